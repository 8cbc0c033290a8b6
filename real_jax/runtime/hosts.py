"""Arrays of devices as arrays of the host, in one process and in many."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from real_jax.reallocation.move import Mover
from real_jax.runtime.meshes import devices
from real_jax.runtime.shardings import replicated
from real_jax.spec.plan import MESH_AXES


def on_main(tree: Any, mover: Mover) -> Any:
    """`tree` with its arrays in host memory, in process 0; None in every other process.

    All processes must ask for it together. What process 0 has no devices of comes over the links between devices.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    found = _fetch(tree, mover, devices()[:1])
    return found if jax.process_index() == 0 else None


def on_every_host(tree: Any, mover: Mover) -> Any:
    """`tree` with its arrays in host memory, in every process. All processes must ask for it together."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    first = {d.process_index: d for d in reversed(devices())}
    return _fetch(tree, mover, [first[process] for process in sorted(first)])


def _fetch(tree: Any, mover: Mover, readers: list[jax.Device]) -> Any:
    mesh = Mesh(np.asarray(readers, dtype=object).reshape(-1, *(1 for _ in MESH_AXES[1:])), MESH_AXES)

    def one(x):
        if not isinstance(x, jax.Array):
            return x
        x = mover.move({"": x}, {"": replicated(mesh)}, x.dtype)[""]
        return np.asarray(x.addressable_data(0)) if x.addressable_shards else None

    return jax.tree.map(one, tree)
