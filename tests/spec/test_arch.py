"""Parameter counts against published ones, and FLOPs counted by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from real_jax.models.transformer import Transformer, abstract_params
from real_jax.spec.arch import ARCHS, EMBED, LAYERS, MLP, Arch, Weight, forward_flops, parameter_count, weights

SMALL = Arch(layers=3, d_model=8, heads=4, kv_heads=2, head_dim=2, d_ff=10, vocab=16, context=32)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-70b", 68_976_648_192),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
    ],
)
def test_published_counts(name, count):
    assert parameter_count(ARCHS[name]) == count


def test_34b_is_codellama_at_llamas_vocabulary():
    """CodeLlama-34b has 33,743,970,304 with a vocabulary of 32000; each of 16 more ids would add a row and a column of 8192."""
    arch = ARCHS["llama-34b"]
    assert arch.vocab == 32000
    assert parameter_count(arch) == 33_743_970_304
    assert parameter_count(dataclasses.replace(arch, vocab=32016)) == 33_743_970_304 + 2 * 16 * 8192


def test_counts_by_hand():
    """A block: query 8 x 8, key and value 8 x 4 each, out 8 x 8, three times 8 x 10, two norms of 8: 448."""
    assert parameter_count(SMALL) == 3 * (64 + 64 + 64 + 240 + 16) + 2 * 16 * 8 + 8
    assert parameter_count(dataclasses.replace(SMALL, tied_embeddings=True)) == parameter_count(SMALL) - 128
    assert parameter_count(SMALL, "scalar") == parameter_count(SMALL) - 128 + 8
    assert parameter_count(dataclasses.replace(SMALL, tied_embeddings=True), "scalar") == parameter_count(
        SMALL, "scalar"
    )


def test_every_weight_names_its_axes():
    for head in ("lm", "scalar"):
        for name, weight in weights(SMALL, head).items():
            assert len(weight.axes) == len(weight.shape), name
            assert weight.size == np.prod(weight.shape)
            assert (weight.axes[0] == LAYERS and weight.shape[0] == 3) == name.startswith("blocks/")
    assert weights(SMALL)["blocks/down"] == Weight((3, 10, 8), (LAYERS, MLP, EMBED), 10)
    assert "unembed" not in weights(dataclasses.replace(SMALL, tied_embeddings=True))
    assert "unembed" not in weights(SMALL, "scalar") and "scalar" not in weights(SMALL)


def test_flops_by_hand():
    """B = 2, T = 5: 10 tokens. A token and block: 2 x (64 + 32 + 32 + 64 + 240) for the weights, 2 x 5 x 8 for the scores and
    the same for their use. The head: 2 x 8 x 16, or 2 x 8."""
    block = 2 * (64 + 32 + 32 + 64 + 240) + 2 * (2 * 5 * 8)
    assert forward_flops(SMALL, 2, 5) == 10 * (3 * block + 256)
    assert forward_flops(SMALL, 2, 5, "scalar") == 10 * (3 * block + 16)


def test_flops_are_two_per_parameter_and_token_where_the_context_is_short():
    arch = ARCHS["llama-7b"]
    matrices = parameter_count(arch) - arch.vocab * arch.d_model - (2 * arch.layers + 1) * arch.d_model
    assert forward_flops(arch, 1, 1) == 2 * (matrices + 2 * arch.layers * arch.d_model)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_flops_agree_with_the_matrix_products_of_the_program(head):
    """Every dot_general of one forward pass, counted from the traced program; the body of the scan counts once a layer."""
    batch, length = 2, 5

    def forward(params, tokens):
        model = Transformer(SMALL, head, params)
        hidden = model(tokens)
        return model.logits(hidden) if head == "lm" else model.values(hidden)

    jaxpr = jax.make_jaxpr(forward)(
        abstract_params(weights(SMALL, head)), jax.ShapeDtypeStruct((batch, length), np.int32)
    )

    def count(jaxpr, times):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                inner = np.prod([equation.invars[0].aval.shape[i] for i in contracted])
                total += times * 2 * int(inner) * equation.outvars[0].aval.size
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += count(inner, times * equation.params.get("length", 1))
        return total

    assert count(jaxpr.jaxpr, 1) == forward_flops(SMALL, batch, length, head)


def test_shapes_are_consistent():
    for name, arch in ARCHS.items():
        assert arch.heads % arch.kv_heads == 0, name
        assert arch.head_dim % 2 == 0
        assert arch.heads * arch.head_dim == arch.d_model
