"""Trees of arrays between meshes, and between devices and hosts, in one process and in many.

Of all that is here every process must ask together, and in the same order.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.reallocation.move import Mover
from real_jax.runtime.meshes import devices
from real_jax.runtime.shardings import replicated
from real_jax.spec.plan import MESH_AXES


def on_main(tree: Any, mover: Mover) -> Any:
    """`tree` with its arrays in host memory, in process 0; None in every other process. What process 0 has no devices of
    comes over the links between devices."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    found = _fetch(tree, mover, devices()[:1])
    return found if jax.process_index() == 0 else None


def on_every_host(tree: Any, mover: Mover) -> Any:
    """`tree` with its arrays in host memory, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    first = {d.process_index: d for d in reversed(devices())}
    return _fetch(tree, mover, [first[process] for process in sorted(first)])


def move_tree(tree: Any, shardings: Any, mover: Mover) -> Any:
    """`tree` of device arrays of any types under `shardings`, a tree like it."""
    leaves, structure = jax.tree.flatten(tree)
    wanted, groups = jax.tree.leaves(shardings), {}
    for i, x in enumerate(leaves):
        groups.setdefault(x.dtype, []).append(i)
    for dtype, group in groups.items():
        sources, targets = ({str(i): of[i] for i in group} for of in (leaves, wanted))
        for name, x in mover.move(sources, targets, dtype).items():
            leaves[int(name)] = x
    return jax.tree.unflatten(structure, leaves)


def spread_shardings(tree: Any) -> Any:
    """A layout of `tree` (arrays, or their shapes) in which all devices of all processes have their part: each array is
    split along its longest dimension that can be split evenly, or else replicated."""
    everyone = np.asarray(devices(), dtype=object)
    mesh = Mesh(everyone.reshape(-1, *(1 for _ in MESH_AXES[1:])), MESH_AXES)

    def one(x) -> NamedSharding:
        dims = [i for i, size in enumerate(x.shape) if size and size % everyone.size == 0]
        split = max(dims, key=lambda i: x.shape[i], default=None)
        return NamedSharding(mesh, PartitionSpec(*(MESH_AXES[0] if i == split else None for i in range(len(x.shape)))))

    return jax.tree.map(one, tree)


def _fetch(tree: Any, mover: Mover, readers: list[jax.Device]) -> Any:
    mesh = Mesh(np.asarray(readers, dtype=object).reshape(-1, *(1 for _ in MESH_AXES[1:])), MESH_AXES)

    def one(x):
        if not isinstance(x, jax.Array):
            return x
        if not isinstance(x.sharding, NamedSharding):
            return np.asarray(x)  # a process's own, the same in all
        x = mover.move({"": x}, {"": replicated(mesh)}, x.dtype)[""]
        return np.asarray(x.addressable_data(0)) if x.addressable_shards else None

    return jax.tree.map(one, tree)
