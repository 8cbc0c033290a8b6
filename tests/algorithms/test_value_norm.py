"""Running normalization of returns, worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.algorithms import value_norm

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jitted"])
MASK = jnp.asarray([[True, True, False]])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def close(actual, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=tolerance, atol=tolerance)


def two_updates(kind, beta, mode=lambda f: f, poison=0.0):
    """After returns 1, 3 (mean 2, mean square 5) and then 5, 5 (mean 5, mean square 25)."""
    update = mode(functools.partial(value_norm.update, kind=kind, beta=beta))
    first = update(value_norm.initial(), f32([[1, 3, poison]]), MASK)
    return first, update(first, f32([[5, 5, poison]]), MASK)


@EAGER_AND_JITTED
@pytest.mark.parametrize("poison", [0, 1e6, np.nan])
def test_exponential(mode, poison):
    """beta .9. After one batch: mean .2 / .1 = 2, variance 5 - 4 = 1. After two: weight .19, mean (.18 + .5) / .19 =
    3.578947, mean square (.45 + 2.5) / .19 = 15.526316, variance 2.717452."""
    first, second = two_updates("exponential", 0.9, mode, poison)
    close([*first], [0.2, 0.5, 0.1])
    close(value_norm.normalize(first, f32([1, 3, 2])), [-1, 1, 0])
    close([*second], [0.68, 2.95, 0.19])
    close(value_norm.normalize(second, f32([0, 3.578947])), [-3.578947 / 1.6484696, 0])


@EAGER_AND_JITTED
def test_average(mode):
    """Mean (2 + 5) / 2 = 3.5, mean square (5 + 25) / 2 = 15, variance 2.75."""
    _, second = two_updates("average", 0.9, mode)
    close([*second], [7, 30, 2])
    close(value_norm.denormalize(second, f32([0, 1])), [3.5, 3.5 + 2.75**0.5])


@EAGER_AND_JITTED
def test_none_and_the_start_change_nothing(mode):
    for state in (value_norm.initial(), two_updates("none", 0.9, mode)[1]):
        close(value_norm.normalize(state, f32([-4, 0, 7])), [-4, 0, 7], 0)
        close(value_norm.denormalize(state, f32([-4, 0, 7])), [-4, 0, 7], 0)


@pytest.mark.parametrize("kind", ["exponential", "average", "none"])
def test_denormalize_inverts_normalize(kind):
    _, state = two_updates(kind, 0.99995)
    x = f32([-30, -1, 0, 2.5, 1000])
    close(value_norm.denormalize(state, value_norm.normalize(state, x)), x)


def test_the_default_decay_keeps_its_precision():
    """beta .99995 in float32: the moments are right from the first batch on and stay so."""

    def step(state, _):
        return value_norm.update(state, f32([[1, 3, 99]]), MASK, "exponential", 0.99995), None

    for batches in (1, 3000):
        state, _ = jax.lax.scan(step, value_norm.initial(), None, length=batches)
        close(value_norm.normalize(state, f32([1, 2, 3])), [-1, 0, 1], 1e-3)


def test_constant_returns_stay_finite():
    """The variance is at least 1e-5."""
    state = value_norm.update(value_norm.initial(), f32([[4, 4, 0]]), MASK, "exponential", 0.9)
    close(value_norm.normalize(state, f32([4, 4 + 1e-5**0.5])), [0, 1], 2e-3)


def test_update_refuses_what_would_broadcast():
    with pytest.raises(ValueError, match="would broadcast"):
        value_norm.update(value_norm.initial(), jnp.zeros((2, 3)), jnp.ones((2, 1), bool), "average", 0.9)
