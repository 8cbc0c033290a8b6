"""Programs run and timed on several devices: collectives, moving arrays between layouts, and what overlaps."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.cost.curves import Timing, sent
from real_jax.cost.timing import seconds_of, size_text
from real_jax.runtime.meshes import devices, platform

KINDS = ("all-reduce", "all-gather", "reduce-scatter")
_ACROSS, _GROUP = "across", "group"


def groups_within(per_node: int) -> list[int]:
    """Sizes of groups within a node: powers of two, and the whole node."""
    sizes = [2**i for i in range(1, per_node.bit_length()) if 2**i < per_node and per_node % 2**i == 0]
    return [*sizes, per_node] if per_node > 1 else []


def mesh_within(group: int) -> Mesh:
    """All devices in groups of `group` neighbours; within a node where that divides its devices."""
    return Mesh(np.asarray(devices(), dtype=object).reshape(-1, group), (_ACROSS, _GROUP))


def mesh_between(nodes: int, group: int) -> Mesh:
    """All devices in groups of `group`, each of another node."""
    by_node = np.asarray(devices(), dtype=object).reshape(nodes // group, group, -1)
    return Mesh(by_node.transpose(0, 2, 1).reshape(-1, group), (_ACROSS, _GROUP))


def collective(kind: str, mesh: Mesh, volume: int, times: int) -> Timing:
    """One collective of `kind` on full arrays of `volume` bytes, in all groups of `mesh` at the same time."""
    group = mesh.shape[_GROUP]
    spec = PartitionSpec((_ACROSS, _GROUP))
    part = max(volume // 4 // group, 2)

    def step(_, y):
        if kind == "all-reduce":
            return jax.lax.psum(y, _GROUP) * jnp.float32(1 / group)
        if kind == "all-gather":
            return jax.lax.all_gather(y[:part], _GROUP, tiled=True)
        return y.at[:part].set(jax.lax.psum_scatter(y, _GROUP, tiled=True))

    loop = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, times, step, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    x = _ones((mesh.size * part * group,), NamedSharding(mesh, spec))
    taken = seconds_of(jax.jit(loop), x) / times
    volume = 4 * part * group
    text = f"{size_text(volume)} over {group}"
    return Timing(kind, text, sent(kind, group, volume), taken, group)


def _ones(shape: tuple[int, ...], sharding: NamedSharding, value: float = 1.0) -> jax.Array:
    return jax.block_until_ready(
        jax.jit(lambda: jnp.full(shape, jnp.float32(value), jnp.float32), out_shardings=sharding)()
    )


def reallocations(volume: int) -> list[Timing]:
    """An array of `volume` bytes laid out anew over the same devices, and moved from one half of them to the other.

    Fresh arrays each time: jax keeps a copy on the host of what it once moved through it. Of several processes none
    can time this alone: nothing is measured.
    """
    found = devices()
    if len(found) < 2 or jax.process_count() > 1:
        return []
    side, half = int((volume // 4) ** 0.5) // len(found) * len(found), len(found) // 2
    everything, first, second = found, found[:half], found[half : 2 * half]
    cases = [("same devices", everything, everything), ("other devices", first, second)]
    timings = []
    for name, sources, destinations in cases:
        source = NamedSharding(_row(sources), PartitionSpec(_GROUP))
        destination = NamedSharding(_row(destinations), PartitionSpec(None, _GROUP))
        taken = []
        for i in range(4):
            x = _ones((side, side), source, float(i))
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(x, destination))
            taken.append(time.perf_counter() - start)
        timings.append(Timing("reallocation", f"{size_text(4 * side * side)}, {name}", 4 * side * side, min(taken[1:])))
    return timings


def _row(chosen: Sequence) -> Mesh:
    return Mesh(np.asarray(chosen, dtype=object), (_GROUP,))


def overlap(volume: int, size: int, rate: float, dtype) -> float:
    """The share of an all-gather of `volume` bytes that products of `size` x `size` hide, 0 to 1.

    Three programs: the gather, as many products as take about as long, and both without a need for each other. A CPU
    runs one after the other.

    Args:
      rate: operations per second of such products.
    """
    if platform() == "cpu" or len(devices()) < 2:
        return 0.0
    mesh = mesh_within(len(devices()))
    alone = collective("all-gather", mesh, volume, 1).seconds
    products = max(1, round(alone * rate / (2 * size**3)))
    spec, everywhere = PartitionSpec((_ACROSS, _GROUP)), PartitionSpec()

    def multiply(y):
        for _ in range(products):
            y = y @ y * jnp.asarray(1 / size, dtype)
        return y

    def gather(x):
        return jax.lax.all_gather(x, _GROUP, tiled=True)

    def timed(function, outputs) -> float:
        program = jax.shard_map(function, mesh=mesh, in_specs=(spec, everywhere), out_specs=outputs, check_vma=False)
        return seconds_of(jax.jit(program), x, y)

    x = _ones((volume // 4,), NamedSharding(mesh, spec))
    y = jax.jit(lambda: jnp.ones((size, size), dtype), out_shardings=NamedSharding(mesh, everywhere))()
    both = timed(lambda x, y: (gather(x), multiply(y)), (everywhere, everywhere))
    gathering = timed(lambda x, y: gather(x), everywhere)
    multiplying = timed(lambda x, y: multiply(y), everywhere)
    return hidden_share(gathering, multiplying, both)


def hidden_share(gathering: float, multiplying: float, both: float) -> float:
    """Of the shorter of two parts, the share that runs beside the other; 0 to 1."""
    return round(min(1.0, max(0.0, (gathering + multiplying - both) / min(gathering, multiplying))), 3)
