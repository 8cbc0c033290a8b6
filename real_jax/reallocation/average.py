"""Moving averages of weights."""

import dataclasses
from collections.abc import Mapping

import jax


@dataclasses.dataclass(frozen=True)
class Onto:
    """What arrays that move are averaged with where they arrive: `arrays`, whose memory the averages take."""

    arrays: Mapping[str, jax.Array]
    eta: float


def average(old: jax.Array, new: jax.Array, eta: float) -> jax.Array:
    """eta x `new` + (1 - eta) x `old`, in the type of `old`."""
    return eta * new.astype(old.dtype) + (1 - eta) * old
