"""Transfers worked out by hand, and against a simulation that looks at every single number."""

import itertools
import random
import time

import numpy as np
import pytest

from real_jax.reallocation.transfers import device_slices, plan_transfers, transfer_seconds
from real_jax.spec.arch import ARCHS, EMBED, KV_HEADS, MLP, Arch, Weight, weights
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import Placement

SQUARE = {"w": Weight((4, 4), (EMBED, MLP), 4)}  # rows over fsdp, columns over tensor


def cluster(shared_cores=0.0, latency_us=0.0):
    return Cluster(
        "test", "gpu", 4, 2, Chip("chip", 80, 100, 40.0), Link(10.0, latency_us), Link(1.0, 2 * latency_us),
        Link(1.0, 0.0), shared_cores,
    )  # fmt: skip


def test_device_slices_follow_the_mesh_order():
    assert device_slices(SQUARE["w"], Placement(2, fsdp=2)) == {2: ((0, 2), (0, 4)), 3: ((2, 4), (0, 4))}
    assert device_slices(SQUARE["w"], Placement(0, tensor=2)) == {0: ((0, 4), (0, 2)), 1: ((0, 4), (2, 4))}
    assert device_slices(SQUARE["w"], Placement(0, data=2, fsdp=2, tensor=2)) == {
        0: ((0, 2), (0, 2)), 1: ((0, 2), (2, 4)), 2: ((2, 4), (0, 2)), 3: ((2, 4), (2, 4)),
        4: ((0, 2), (0, 2)), 5: ((0, 2), (2, 4)), 6: ((2, 4), (0, 2)), 7: ((2, 4), (2, 4)),
    }  # fmt: skip


def test_device_slices_replicate_heads_that_tensor_does_not_divide():
    assert device_slices(Weight((3,), (KV_HEADS,), 1), Placement(tensor=2)) == {0: ((0, 3),), 1: ((0, 3),)}


def test_rows_to_columns_keeps_the_corner_that_is_there():
    moved = plan_transfers(SQUARE, Placement(fsdp=2), Placement(tensor=2), 4, 8)
    assert moved.bytes_received == {0: 16, 1: 16}  # a 2 x 2 corner of float32
    assert moved.bytes_sent == {0: 16, 1: 16}
    assert (moved.total_bytes, moved.local_bytes, moved.arrays) == (32, 32, 1)
    assert (moved.bytes_within_node, moved.bytes_between_nodes) == (32, 0)


def test_replicating_two_halves():
    moved = plan_transfers(SQUARE, Placement(fsdp=2), Placement(data=2), 2, 8)
    assert moved.bytes_received == {0: 16, 1: 16}
    assert moved.local_bytes == 32


def test_sharding_what_is_replicated_moves_nothing():
    moved = plan_transfers(SQUARE, Placement(data=4), Placement(fsdp=2, tensor=2), 4, 2)
    assert moved.total_bytes == moved.bytes_between_nodes == moved.arrays == 0
    assert moved.local_bytes == 64
    assert transfer_seconds(moved, cluster(latency_us=5)) == 0


def test_disjoint_devices_of_two_nodes():
    moved = plan_transfers(SQUARE, Placement(0, fsdp=2), Placement(2, fsdp=2), 4, 2)
    assert moved.bytes_received == {2: 32, 3: 32} and moved.bytes_sent == {0: 32, 1: 32}
    assert moved.bytes_into_node == {0: 0, 1: 64} and moved.bytes_out_of_node == {0: 64, 1: 0}
    assert (moved.bytes_between_nodes, moved.bytes_within_node, moved.local_bytes) == (64, 0, 0)


def test_a_byte_enters_each_node_once_and_leaves_its_holder_once():
    moved = plan_transfers(SQUARE, Placement(0), Placement(0, data=8), 1, 2)  # one device to four nodes of two
    assert moved.bytes_received == {0: 0} | dict.fromkeys(range(1, 8), 16)
    assert moved.bytes_into_node == {0: 0, 1: 16, 2: 16, 3: 16}
    assert (moved.bytes_between_nodes, moved.bytes_within_node) == (48, 64)
    # Once to its neighbour, once to the other nodes, which pass it on.
    assert moved.bytes_sent == {0: 32} and moved.bytes_out_of_node == {0: 16, 1: 0, 2: 0, 3: 0}


def test_seconds_of_the_busiest_link():
    table = {"w": Weight((4, 10**9), (EMBED, MLP), 4)}
    inside = plan_transfers(table, Placement(0), Placement(1), 1, 2)
    assert transfer_seconds(inside, cluster()) == pytest.approx(0.4)  # 4 GB at 10 GB/s
    assert transfer_seconds(inside, cluster(latency_us=1000)) == pytest.approx(0.401)
    across = plan_transfers(table, Placement(0, fsdp=2), Placement(2, fsdp=2), 1, 2)
    assert transfer_seconds(across, cluster()) == pytest.approx(2.0)  # 4 GB over the two links of a node at 1 GB/s
    assert transfer_seconds(across, cluster(latency_us=1000)) == pytest.approx(2.002)
    # One sender is the bottleneck although the four receivers get a quarter each.
    spread = plan_transfers(table, Placement(0), Placement(4, fsdp=4), 1, 8)
    assert transfer_seconds(spread, cluster()) == pytest.approx(0.4)
    # Where cores are shared all bytes pass one memory of 40 GB/s, read and written, and no faster than the link.
    both = plan_transfers(table, Placement(0, fsdp=2), Placement(2, fsdp=2), 1, 8)
    assert transfer_seconds(both, cluster(shared_cores=2.0)) == pytest.approx(0.4)


def test_undividable_weights_are_an_error():
    with pytest.raises(UsageError, match="cannot be split into 3"):
        plan_transfers(SQUARE, Placement(), Placement(fsdp=3), 4, 8)


def held_numbers(table, placement):
    """Device -> the set of (weight, index...) that it holds."""
    held = {d: set() for d in placement.devices}
    for name, weight in table.items():
        for device, slices in device_slices(weight, placement).items():
            held[device] |= {(name, *index) for index in itertools.product(*(range(*s) for s in slices))}
    return held


def brute_force(table, source, destination, itemsize, per_node):
    have, want = held_numbers(table, source), held_numbers(table, destination)
    received = {d: len(want[d] - have.get(d, set())) for d in want}
    sent = dict.fromkeys(have, 0.0)
    between = 0
    for number in set().union(*want.values()):
        holders = [d for d in have if number in have[d]]
        lacking = {d // per_node for d in want if number in want[d] and d not in holders}
        served = {n: [d for d in holders if d // per_node == n] for n in lacking}
        between += sum(not local for local in served.values())
        for local in served.values():
            for d in local:
                sent[d] += 1 / len(local)
        if not all(served.values()):
            for d in holders:
                sent[d] += 1 / len(holders)
    return (
        {d: itemsize * n for d, n in received.items()},
        {d: itemsize * n for d, n in sent.items()},
        itemsize * between,
        itemsize * sum(len(want[d] & have.get(d, set())) for d in want),
    )


@pytest.mark.parametrize("seed", range(25))
def test_against_every_single_number(seed):
    rng = random.Random(seed)
    arch = Arch(layers=1, d_model=12, heads=6, kv_heads=rng.choice((1, 3, 6)), head_dim=1, d_ff=12, vocab=12, context=8)
    table = weights(arch, rng.choice(("lm", "scalar")))

    def layout():
        while True:
            p = Placement(rng.randrange(8), *(rng.choice((1, 1, 2, 3, 4)) for _ in range(3)))
            if p.count <= 12 and arch.heads % p.tensor == 0:
                return p

    source, destination, itemsize, per_node = layout(), layout(), rng.choice((2, 4)), rng.choice((2, 3, 4, 32))
    moved = plan_transfers(table, source, destination, itemsize, per_node)
    received, sent, between, local = brute_force(table, source, destination, itemsize, per_node)
    assert moved.bytes_received == received
    assert moved.bytes_sent == pytest.approx(sent)
    assert (moved.bytes_between_nodes, moved.local_bytes) == (between, local)
    assert moved.total_bytes == sum(received.values()) == moved.bytes_within_node + moved.bytes_between_nodes
    assert moved.bytes_between_nodes == sum(moved.bytes_into_node.values())


def test_70b_on_128_devices_is_exact_and_fast():
    table = weights(ARCHS["llama-70b"])
    begin = time.perf_counter()
    moved = plan_transfers(table, Placement(fsdp=128), Placement(data=2, tensor=64), 2, 8)
    assert time.perf_counter() - begin < 1
    # All is wanted on every pair of devices except the norms and the 8 key/value heads, which are not split by tensor.
    whole = 8192 * (2 * 80 + 1) + 2 * 80 * 8192 * 8 * 128
    split = sum(w.size for w in table.values()) - whole
    wanted = 2 * (2 * split + 128 * whole)
    assert moved.total_bytes + moved.local_bytes == wanted
    assert np.isclose(moved.local_bytes, wanted / 128)
