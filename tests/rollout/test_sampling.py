"""Sampling from a distribution written down here: the sets that truncation keeps, frequencies, log-probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.rollout.sampling import keep_top_k, keep_top_p, sample
from real_jax.spec.experiment import GenerationConfig

# Out of order on purpose: the likeliest token is 2, then 0, 3, 1.
P = np.asarray([0.3, 0.05, 0.5, 0.15])
LOGITS = jnp.asarray(np.log(P) + 7, jnp.float32)  # softmax does not see the constant
DRAWS = 8192


def kept(logits):
    return set(np.flatnonzero(np.isfinite(np.asarray(logits)[0])).tolist())


@pytest.mark.parametrize(
    ("k", "wanted"), [(1, {2}), (2, {0, 2}), (3, {0, 2, 3}), (4, {0, 1, 2, 3}), (99, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_k_likeliest(k, wanted):
    out = keep_top_k(LOGITS[None], k)
    assert kept(out) == wanted
    np.testing.assert_array_equal(np.asarray(out)[0, sorted(wanted)], np.asarray(LOGITS)[sorted(wanted)])


def test_top_k_keeps_ties():
    assert kept(keep_top_k(jnp.asarray([[1.0, 2.0, 1.0, 0.0]]), 2)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (1e-6, {2}),
        (0.4, {2}),
        (0.6, {0, 2}),  # .5 does not reach .6, .8 does
        (0.79, {0, 2}),
        (0.9, {0, 2, 3}),  # .95
        (0.96, {0, 1, 2, 3}),
        (0.999999, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, wanted):
    out = keep_top_p(LOGITS[None], p)
    assert kept(out) == wanted
    np.testing.assert_array_equal(np.asarray(out)[0, sorted(wanted)], np.asarray(LOGITS)[sorted(wanted)])


def test_truncations_work_on_each_row_alone():
    other = jnp.log(jnp.asarray([[0.96, 0.02, 0.01, 0.01]]))
    rows = jnp.concatenate([LOGITS[None], other])
    assert [kept(keep_top_p(rows, 0.9)[i : i + 1]) for i in range(2)] == [{0, 2, 3}, {0}]
    assert [kept(keep_top_k(rows, 1)[i : i + 1]) for i in range(2)] == [{2}, {0}]


def test_top_p_leaves_a_forbidden_token_out():
    assert kept(keep_top_p(LOGITS.at[2].set(-jnp.inf)[None], 0.99)) == {0, 1, 3}  # .6, .3, .1 once 2 is gone


@functools.cache
def draws(config, forbid=None):
    """DRAWS tokens and their log-probabilities, each with its own key."""
    keys = jax.random.split(jax.random.key(3), DRAWS)
    ban = None if forbid is None else (jnp.arange(4) == forbid)[None]
    run = jax.jit(lambda keys: sample(jnp.broadcast_to(LOGITS, (DRAWS, 4)), keys, config, ban))
    tokens, log_probs = run(keys)
    return np.asarray(tokens), np.asarray(log_probs)


@pytest.mark.parametrize(
    ("config", "forbid", "wanted"),
    [
        (GenerationConfig(), None, P),
        (GenerationConfig(temperature=0.5), None, P**2),
        (GenerationConfig(temperature=2.0), None, P**0.5),
        (GenerationConfig(top_k=2), None, P * [1, 0, 1, 0]),
        (GenerationConfig(top_p=0.9), None, P * [1, 0, 1, 1]),
        (GenerationConfig(top_k=3, top_p=0.8), None, P * [1, 0, 1, 0]),  # of .3 .5 .15, over .95: .842 reaches .8
        (GenerationConfig(), 2, P * [1, 1, 0, 1]),
        (GenerationConfig(top_k=2), 2, P * [1, 0, 0, 1]),  # the two likeliest of those that are allowed
    ],
)
def test_frequencies(config, forbid, wanted):
    """Within five standard deviations, and never a token of probability 0."""
    wanted = np.asarray(wanted) / np.sum(wanted)
    tokens, log_probs = draws(config, forbid)
    found = np.bincount(tokens, minlength=4) / DRAWS
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / DRAWS)).all(), (found, wanted)
    # Log-probabilities are those of the whole policy at its temperature, whatever was cut off.
    policy = P ** (1 / config.temperature)
    np.testing.assert_allclose(log_probs, np.log(policy / policy.sum())[tokens], rtol=1e-5, atol=1e-5)
    assert tokens.dtype == np.int32 and log_probs.dtype == np.float32


@pytest.mark.parametrize(("forbid", "wanted"), [(None, 2), (2, 0)])
def test_greedy(forbid, wanted):
    tokens, log_probs = draws(GenerationConfig(greedy=True, temperature=0.5), forbid)
    assert set(tokens.tolist()) == {wanted}
    np.testing.assert_allclose(log_probs, np.log(P[wanted] ** 2 / (P**2).sum()), rtol=1e-5)


def test_greedy_takes_the_first_of_equals():
    tokens, _ = sample(
        jnp.asarray([[1.0, 3.0, 3.0]]), jax.random.split(jax.random.key(0), 1), GenerationConfig(greedy=True)
    )
    assert tokens.tolist() == [1]


def test_a_draw_depends_on_its_own_key_alone():
    tokens, _ = draws(GenerationConfig())
    keys = jax.random.split(jax.random.key(3), DRAWS)
    few = sample(jnp.broadcast_to(LOGITS, (5, 4)), keys[100:105], GenerationConfig())[0]
    assert few.tolist() == tokens[100:105].tolist()
