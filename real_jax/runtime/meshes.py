"""Placements as jax meshes. The only module that asks jax for its devices."""

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.spec.errors import UsageError
from real_jax.spec.plan import MESH_AXES, Placement, Spec

VIRTUAL_CPU_DEVICES = 8


def prepare_devices(cpu_devices: int = VIRTUAL_CPU_DEVICES) -> None:
    """Gives a machine without accelerators `cpu_devices` virtual devices. Has an effect only before jax's first use, and
    none in a process that has joined others: those have said how many devices each has."""
    if jax.distributed.is_initialized():
        return
    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        pass  # the backend is up already: its devices are what there is


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in `folder` across processes, unless jax has been given a folder already."""
    if jax.config.jax_compilation_cache_dir:
        return
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def devices() -> list[jax.Device]:
    """All devices of the default backend, in the order in which placements number them."""
    return jax.devices()


def own_count() -> int:
    """How many of `devices()` belong to this process."""
    return jax.local_device_count()


def here(mesh: Mesh) -> bool:
    """Whether this process has a part in what runs on `mesh`. A process alone has, be the devices described ones."""
    return jax.process_count() == 1 or any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def first_process(mesh: Mesh) -> int:
    """The lowest process that has a device of `mesh`."""
    return min(d.process_index for d in mesh.devices.flat)


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`x`, which every process has, as an array over `sharding`; nothing is copied to devices of other processes."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding, may_alias=False)
    # A copy, as the backend may use the memory that it is given.
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part].copy(), dtype=x.dtype)


def elsewhere(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """What stands in this process for an array whose devices all belong to others: it has no data here."""
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, [], dtype=shape.dtype)


def platform() -> str:
    """JAX's name of the default backend: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def make_mesh(placement: Placement, among: Sequence | None = None) -> Mesh:
    """The mesh of a placement, with all of MESH_AXES as named axes (some of size one).

    Raises UsageError where the placement names more devices than there are.
    """
    among = devices() if among is None else among
    if placement.first + placement.count > len(among):
        raise UsageError(
            f"A placement asks for devices {placement.first} to {placement.first + placement.count - 1}, "
            f"but there are {len(among)}."
        )
    chosen = np.asarray(among[placement.first : placement.first + placement.count], dtype=object)
    return Mesh(chosen.reshape(tuple(placement.mesh_shape.values())), MESH_AXES)


def named(mesh: Mesh, spec: Spec) -> NamedSharding:
    """The jax sharding of a `spec.plan.partition` over `mesh`."""
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
