"""The two warm-up stages: cross-entropy of answers, and Bradley-Terry on pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.algorithms import preference, sft

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jitted"])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def close(actual, wanted):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=1e-5, atol=1e-6)


def run(functions, forward, batch):
    rows, written, metrics = functions.prepare(batch)
    assert written == {} and metrics == {}
    return functions.loss(forward, rows, functions.weight(rows))


@EAGER_AND_JITTED
@pytest.mark.parametrize("poison", [0.0, 1e6, np.nan])
def test_sft_is_the_mean_over_answer_tokens_with_the_end_token(mode, poison):
    """Row 0: prompt 2, answer of 2 tokens (columns 1 and 2). Row 1: prompt 1, answer of 4 that fills the row.
    (1 + 2 + 3 + 4 + 5 + 6) / 6, each token once: not the mean of the rows' means 1.5 and 4.5, which would be 3."""
    functions = sft.algorithm().train["sft_train"]
    batch = {
        "tokens": jnp.zeros((2, 5), jnp.int32),
        "prompt_lengths": jnp.asarray([2, 1], jnp.int32),
        "lengths": jnp.asarray([4, 5], jnp.int32),
    }
    log_probs = -f32([[poison, 1, 2, poison], [3, 4, 5, 6]])

    def loss(log_probs):
        return run(functions, lambda tokens: (log_probs, None), batch)[0]

    value, grads = mode(jax.value_and_grad(loss))(log_probs)
    close(value, 3.5)
    close(grads, [[0, -1 / 6, -1 / 6, 0], [-1 / 6] * 4])


def test_sft_without_any_answer_token_is_zero():
    batch = {"tokens": jnp.zeros((1, 4), jnp.int32), "prompt_lengths": jnp.asarray([2]), "lengths": jnp.asarray([2])}
    close(run(sft.algorithm().train["sft_train"], lambda tokens: (f32([[1, 2, 3]]), None), batch)[0], 0)


@EAGER_AND_JITTED
@pytest.mark.parametrize("poison", [0.0, 1e6, np.nan])
def test_preference_reads_each_answers_last_token(mode, poison):
    """Pair 0: 2 against 1. Pair 1: -1 against -1. -log sigmoid(1) = .3132617 and log 2 = .6931472."""
    functions = preference.algorithm().train["reward_train"]
    batch = {
        "tokens": jnp.arange(12, dtype=jnp.int32).reshape(2, 2, 3),
        "lengths": jnp.asarray([[2, 3], [1, 2]], jnp.int32),
    }
    values = f32([[9, 2, poison], [9, 9, 1], [-1, poison, poison], [9, -1, poison]])
    seen = []

    def loss(values):
        def forward(tokens):
            seen.append(tokens.shape)
            return values

        return run(functions, forward, batch)

    (value, metrics), grads = mode(jax.value_and_grad(loss, has_aux=True))(values)
    assert seen[0] == (4, 3)
    close(value, (0.3132617 + 0.6931472) / 2)
    close(metrics["accuracy"], 0.5)
    close(metrics["margin"], 0.5)
    down, even = 0.2689414 / 2, 0.25
    close(grads, [[0, -down, 0], [0, 0, down], [-even, 0, 0], [0, even, 0]])


def test_preference_normalizer_counts_pairs():
    functions = preference.algorithm().train["reward_train"]
    assert float(functions.weight({"lengths": jnp.ones((5, 2), jnp.int32)})) == 5
