import dataclasses

import pytest
from support import here

from real_jax.cost.compile import Piece, compile_piece, marker_rows
from real_jax.spec.arch import Arch, forward_flops, parameter_count
from real_jax.spec.errors import UsageError

ARCH = Arch(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab=48, context=64)
DEEP = dataclasses.replace(ARCH, layers=4)
LENGTH = 16


def head_flops(length: int) -> int:
    """Logits of all columns but the last, one row."""
    return 2 * length * ARCH.d_model * ARCH.vocab


def block_flops(arch: Arch, length: int) -> int:
    """All blocks, one row: the hand count of `forward_flops` less the head's."""
    return forward_flops(arch, 1, length) - head_flops(length)


@pytest.fixture(scope="module")
def compiled():
    known = {}

    def get(kind="forward", arch=ARCH, head="lm", fsdp=1, tensor=1, length=LENGTH, **more):
        piece = Piece(kind, arch, head, fsdp, tensor, length, **more)
        if piece not in known:
            known[piece] = compile_piece(piece, here())
        return known[piece]

    return get


def test_forward_flops_equal_the_hand_count(compiled):
    flops = compiled().summary.flops
    assert flops.fixed == 0
    assert flops.per_row == block_flops(ARCH, LENGTH) + head_flops(LENGTH - 1)


def test_flops_of_blocks_grow_with_the_layers(compiled):
    grown = compiled(arch=DEEP).summary.flops.per_row - compiled().summary.flops.per_row
    assert grown == block_flops(ARCH, LENGTH) == block_flops(DEEP, LENGTH) - block_flops(ARCH, LENGTH)


def test_a_gradient_is_three_forward_passes_and_remat_recomputes(compiled):
    forward, gradient = compiled().summary.flops.per_row, compiled("gradient").summary.flops.per_row
    # The logits are made again in the backward pass; the rest is forward, and twice as much back.
    assert 3 * forward <= gradient <= 3 * forward + head_flops(LENGTH - 1)
    again = compiled("gradient", remat=True).summary.flops.per_row - gradient
    # All of a block but its last product, whose result nothing needs.
    last = ARCH.layers * 2 * LENGTH * ARCH.d_ff * ARCH.d_model
    assert again == block_flops(ARCH, LENGTH) - last
    assert compiled("gradient", remat=True).temp_bytes < compiled("gradient").temp_bytes


def test_generation_is_a_prefill_and_every_decode_step(compiled):
    prompt, steps = 8, 8
    flops = compiled("generate", length=prompt, response=steps).summary.flops.per_row
    total = prompt + steps
    one_token = forward_flops(ARCH, 1, 1) - 2 * ARCH.layers * 2 * ARCH.heads * ARCH.head_dim
    attention = 2 * ARCH.layers * 2 * total * ARCH.heads * ARCH.head_dim  # over all columns of the cache
    expected = block_flops(ARCH, prompt) + steps * (one_token + attention)
    assert flops == pytest.approx(expected, rel=0.02)


def test_tensor_splits_the_work_and_sums_activations(compiled):
    whole, half = compiled().summary, compiled(tensor=2).summary
    assert half.flops.per_row == pytest.approx(whole.flops.per_row / 2, rel=0.01)
    reduced = [c for c in half.collectives if c.kind == "all-reduce"]
    assert {(c.group, c.stride) for c in reduced} == {(2, 1)}
    # After attention and after the feed-forward network of each layer: [16, 32] float32 a row; embedding and head more.
    assert sum(c.count for c in reduced) >= 2 * ARCH.layers
    assert sum(c.count * c.bytes.per_row for c in reduced) >= 2 * ARCH.layers * 4 * LENGTH * ARCH.d_model
    assert not whole.collectives


def test_fsdp_gathers_weights(compiled):
    split = compiled(fsdp=4).summary
    assert split.flops.per_row == compiled().summary.flops.per_row
    gathered = [c for c in split.collectives if c.kind == "all-gather"]
    # All weights of the model but nothing that grows with the rows.
    weights = 2 * (2 * 32 + 32 * 8 * (4 + 4 + 2 + 2) + 3 * 32 * 64) + 32 + 2 * 48 * 32
    assert {c.group for c in gathered} == {4}
    assert sum(c.count * c.bytes.fixed for c in gathered) == pytest.approx(4 * weights, rel=0.15)


def test_temporary_bytes_are_linear_in_the_rows(compiled):
    c = dataclasses.replace(compiled(), rows=10, temp_bytes=1100, fixed_bytes=100)
    assert [c.temp_at(r) for r in (0, 10, 20)] == [100, 1100, 2100]


def test_the_marker_divides_no_other_dimension():
    piece = Piece("gradient", dataclasses.replace(ARCH, vocab=13 * 11), "lm", 1, 1, 18)
    assert marker_rows(piece) == 19  # not 13 and 11 (vocabulary), not 17 (columns with a next token)
    assert marker_rows(Piece("forward", ARCH, "lm", 1, 1, LENGTH)) == 13


def test_keys_tell_pieces_apart():
    piece = Piece("forward", ARCH, "lm", 1, 1, LENGTH)
    others = [
        dataclasses.replace(piece, kind="gradient"), dataclasses.replace(piece, arch=DEEP),
        dataclasses.replace(piece, head="scalar"), dataclasses.replace(piece, fsdp=2),
        dataclasses.replace(piece, tensor=2), dataclasses.replace(piece, length=17),
        dataclasses.replace(piece, compute_bytes=2), dataclasses.replace(piece, remat=True),
    ]  # fmt: skip
    target = here()
    other = dataclasses.replace(target, version="another compiler")
    assert len({p.key(target) for p in [piece, *others]} | {piece.key(other)}) == len(others) + 2
    assert piece.key(target) == dataclasses.replace(piece).key(dataclasses.replace(target))


def test_an_optimizer_step_reads_and_writes_weights_and_moments(compiled):
    summary = compiled("optimizer", length=0).summary
    assert not summary.flops and not summary.collectives
    # At least: read weight, gradient and two moments, write weight and moments.
    assert summary.bytes.fixed >= 7 * 4 * parameter_count(ARCH)


def test_bfloat16_halves_the_weights(compiled):
    short = compiled(compute_bytes=2).summary
    assert short.flops.per_row == compiled().summary.flops.per_row


def test_a_mesh_larger_than_the_machine():
    with pytest.raises(UsageError, match="there are 8"):
        compile_piece(Piece("forward", ARCH, "lm", 16, 1, LENGTH), here())
