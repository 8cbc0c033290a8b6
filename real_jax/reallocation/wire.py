"""The form in which numbers are cut, sent and put together: as bits, where a backend would not leave them alone.

CPUs send half precision in twice its bytes, and cut it in float32: slower, and not all bits of not-a-numbers survive.
"""

import jax
import numpy as np


def narrower(a, b) -> np.dtype:
    """The type to send, of the one there is and the one that is wanted."""
    return min(np.dtype(a), np.dtype(b), key=lambda t: t.itemsize)


def wire_type(dtype) -> np.dtype:
    """The type that `to_wire` makes of `dtype`."""
    size = np.dtype(dtype).itemsize
    return np.dtype(dtype) if size >= 4 else np.dtype(f"uint{8 * size}")


def to_wire(x: jax.Array) -> jax.Array:
    """The bits of `x` as numbers that every backend leaves as they are."""
    kind = wire_type(x.dtype)
    return x if x.dtype == kind else x.astype(kind) if x.dtype == bool else jax.lax.bitcast_convert_type(x, kind)


def from_wire(x: jax.Array, dtype) -> jax.Array:
    """What `to_wire` was given, of type `dtype`."""
    return x if x.dtype == dtype else x.astype(bool) if dtype == bool else jax.lax.bitcast_convert_type(x, dtype)
