"""The form in which numbers are sent from device to device."""

import jax
import jax.numpy as jnp
import numpy as np


def narrower(a, b) -> np.dtype:
    """The type to send, of the one there is and the one that is wanted."""
    return min(np.dtype(a), np.dtype(b), key=lambda t: t.itemsize)


def to_wire(x: jax.Array) -> jax.Array:
    """The bits of `x` as numbers that every backend sends as they are: CPUs send half precision in twice its bytes."""
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    if x.dtype.itemsize >= 4:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_wire(x: jax.Array, dtype) -> jax.Array:
    """What `to_wire` was given, of type `dtype`."""
    return x if x.dtype == dtype else x.astype(bool) if dtype == bool else jax.lax.bitcast_convert_type(x, dtype)
