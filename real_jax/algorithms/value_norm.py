"""Running normalization of returns, so that the critic learns numbers of unit scale."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from real_jax.algorithms.advantages import masked_mean

Array = jax.Array


class ValueNorm(NamedTuple):
    """Running sums, scalars: the mean and mean square of returns, each divided by `weight` when used.

    `weight` corrects the bias of the exponential average's start (arXiv 1412.6980, section 3); for the plain moving
    average it counts the batches seen.
    """

    mean: Array
    mean_square: Array
    weight: Array


def initial() -> ValueNorm:
    zero = jnp.zeros((), jnp.float32)
    return ValueNorm(zero, zero, zero)


def update(state: ValueNorm, returns: Array, mask: Array, kind: str, beta: float) -> ValueNorm:
    """The statistics after one batch of returns [B, N]; `kind` is "exponential", "average" or "none"."""
    if kind == "none":
        return state
    keep, add = (
        (jnp.float32(beta), jnp.float32(1 - beta)) if kind == "exponential" else (jnp.float32(1), jnp.float32(1))
    )
    return ValueNorm(
        keep * state.mean + add * masked_mean(returns, mask),
        keep * state.mean_square + add * masked_mean(returns**2, mask),
        keep * state.weight + add,
    )


def _moments(state: ValueNorm) -> tuple[Array, Array]:
    fresh = state.weight == 0
    weight = jnp.where(fresh, 1, state.weight)
    mean = state.mean / weight
    variance = jnp.maximum(state.mean_square / weight - mean**2, 1e-5)
    return mean, jnp.where(fresh, 1, jnp.sqrt(variance))


def normalize(state: ValueNorm, x: Array) -> Array:
    """Returns in the critic's scale; unchanged before the first update."""
    mean, deviation = _moments(state)
    return (x - mean) / deviation


def denormalize(state: ValueNorm, x: Array) -> Array:
    """The critic's output in the scale of returns; the inverse of `normalize`."""
    mean, deviation = _moments(state)
    return x * deviation + mean
