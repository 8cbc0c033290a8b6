"""Per-token rewards and the KL coefficient, worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.algorithms.kl import adapt_coefficient, token_rewards

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jitted"])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def rows(*values):
    return jnp.asarray(values, jnp.int32)


def close(actual, wanted):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=1e-6, atol=1e-6)


# T = 6. Row 0: prompt 2, response of 3 tokens (actions 1, 2, 3) that ended. Row 1: prompt 3, response of 3 (actions
# 2, 3, 4) that fills the row and was cut. Row 2: prompt 1, response of one token that is the end token (action 0).
PROMPTS, LENGTHS, ENDED = rows(2, 3, 1), rows(5, 6, 2), jnp.asarray([True, False, True])
LOG_RATIO = [[0, 0.5, -0.25, 1, 0], [0, 0, 1, 2, -1], [3, 0, 0, 0, 0]]
VALID = np.asarray([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]], bool)
SCORES = [2, 5, -1]


def rewards(log_probs, reference, needs_end):
    run = functools.partial(token_rewards, score_needs_end=needs_end)
    return run(f32(SCORES), log_probs, reference, PROMPTS, LENGTHS, ENDED, f32(0.1))


@EAGER_AND_JITTED
@pytest.mark.parametrize("poison", [0, 1e6, np.nan, np.inf])
@pytest.mark.parametrize("needs_end", [False, True])
def test_token_rewards(mode, poison, needs_end):
    """Minus 0.1 x log-ratio; no penalty at the end token; the score at the last response token, never on a pad."""
    reference = jnp.where(VALID, f32([[-1, -2, -3, -4, -5]] * 3), poison)
    log_probs = jnp.where(VALID, f32([[-1, -2, -3, -4, -5]] * 3) + f32(LOG_RATIO), -poison)
    out, kl = mode(lambda a, b: rewards(a, b, needs_end))(log_probs, reference)
    cut = 0 if needs_end else 5
    close(out, [[0, -0.05, 0.025, 2, 0], [0, 0, -0.1, -0.2, 0.1 + cut], [-1, 0, 0, 0, 0]])
    close(kl, [1.25, 2, 3])


def test_score_lands_on_the_last_response_token():
    """[t0, t1, END, PAD, PAD] after a prompt of one: index 2 of the response (huggingface/trl#3750)."""
    zeros = jnp.zeros((1, 5))
    out, _ = token_rewards(
        f32([7]), zeros, zeros, rows(1), rows(4), jnp.asarray([True]), f32(0.1), score_needs_end=True
    )
    close(out, [[0, 0, 7, 0, 0]])


def test_token_rewards_refuse_what_would_broadcast():
    zeros = jnp.zeros((3, 5))
    good = {
        "scores": f32(SCORES), "log_probs": zeros, "reference_log_probs": zeros, "prompt_lengths": PROMPTS,
        "lengths": LENGTHS, "ended": ENDED, "kl_coef": f32(0.1), "score_needs_end": False,
    }  # fmt: skip
    token_rewards(**good)
    for name, wrong in [
        ("scores", jnp.zeros((3, 1))),
        ("reference_log_probs", jnp.zeros((3, 1))),
        ("log_probs", jnp.zeros((3, 6))),
        ("ended", jnp.ones((3, 1), bool)),
        ("ended", jnp.ones((1,), bool)),
        ("lengths", rows(5)),
        ("prompt_lengths", rows(2)),
    ]:
        with pytest.raises(ValueError, match="shapes differ"):
            token_rewards(**good | {name: wrong})


@EAGER_AND_JITTED
@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (9.0, 0.102),  # 9 / 6 - 1 = .5, clipped to .2: .1 (1 + .2 x 64 / 640)
        (6.6, 0.101),  # .1: .1 (1 + .1 x .1)
        (6.0, 0.1),
        (0.0, 0.098),  # -1, clipped to -.2
        (-3.0, 0.098),
    ],
)
def test_adapt_coefficient(mode, kl, wanted):
    close(mode(lambda c, k: adapt_coefficient(c, k, 6.0, 640.0, 64))(f32(0.1), f32(kl)), wanted)
