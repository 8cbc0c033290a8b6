"""Moves a parameter tree from the shardings it has to the ones a call wants.

Mover picks the way by what it costs, for all arrays that go from one mesh to another together:

  nothing crosses    one compiled program; each device cuts its part out of what it has
  whole shards       plain copies, where one process has all devices and each shard goes as it is from one to another
  shared memory      `assembly`: each device reads the others' shards where they lie and copies every byte once
  same devices       one compiled reshard, where its temporary memory fits the bound
  otherwise          `exchange`: compiled collectives over both meshes, in chunks of bounded size

The devices of a CPU share their memory as long as one process has them all.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.reallocation.assembly import Assembly
from real_jax.reallocation.average import Onto, average
from real_jax.reallocation.exchange import Exchange, in_turn
from real_jax.reallocation.memories import in_memory, on_devices
from real_jax.reallocation.route import route, stays
from real_jax.reallocation.wire import from_wire, narrower, to_wire

# Memory of a device, beside the arrays themselves, while they move. Accelerators want few large messages; on a host fresh
# memory costs as much as the copy, and what fits the cache is used again.
CHUNK_BYTES, HOST_CHUNK_BYTES = 2**28, 2**24
Params = Mapping[str, jax.Array | np.ndarray]
Arrays = Mapping[str, jax.Array]
Shardings = Mapping[str, NamedSharding]


class Mover:
    """Moves trees between layouts. Programs are compiled once for each pair of layouts and kept.

    All processes must make the same moves in the same order; one that has no device in a move returns from it at once,
    with arrays that have no data here. What comes back never lives in memory that the source can give away, so donating
    the source later is safe.

    Args:
      chunk_bytes: temporary memory of a device, at most; None: what suits this backend.
      shared_memory: whether devices can read each other's memory; None: as this backend does.
    """

    def __init__(self, chunk_bytes: int | None = None, shared_memory: bool | None = None):
        if chunk_bytes is None:
            chunk_bytes = HOST_CHUNK_BYTES if jax.default_backend() == "cpu" else CHUNK_BYTES
        if shared_memory is None:
            shared_memory = jax.process_count() == 1 and jax.default_backend() == "cpu"
        self.shared_memory = shared_memory
        self.chunk_bytes = chunk_bytes
        self._programs: dict = {}
        self._assemblies: dict[tuple[Mesh, Mesh], Assembly] = {}
        self._exchanges: dict[tuple[Mesh, Mesh], Exchange] = {}

    def move(self, params: Params, target: Shardings, dtype) -> dict[str, jax.Array]:
        """`params` under shardings `target`, floating-point type `dtype`.

        Source arrays may be numpy's. Either side may lie in host memory (memory kind "pinned_host"): what comes from
        there is brought to its devices first, what goes there leaves them last.
        """
        _same_names(params, target)
        moved = {k: _place(x, target[k], dtype) for k, x in params.items() if isinstance(x, np.ndarray)}
        arrays = {k: x for k, x in params.items() if isinstance(x, jax.Array)}
        awake = in_memory(arrays, on_devices({k: x.sharding for k, x in arrays.items()}))
        wanted = on_devices({k: target[k] for k in arrays})
        arrived = {k: x for k, x in awake.items() if x is not arrays[k] and _is_as(x, wanted[k], dtype)}
        rest = {k: x for k, x in awake.items() if k not in arrived}
        for (source, destination), group in _by_meshes(rest, wanted).items():
            theirs = {n: wanted[n] for n in group}
            if _is_local(source) or _is_local(destination):
                arrived |= self._move(source, destination, group, theirs, dtype)
            else:
                arrived |= {n: _elsewhere(x.shape, theirs[n], dtype) for n, x in group.items()}
        moved |= in_memory(arrived, {k: target[k] for k in arrived})
        return {name: moved[name] for name in params}

    def average(self, params: Arrays, source: Arrays, eta: float) -> dict[str, jax.Array]:
        """Moves `source` to where `params` are and returns eta x `source` + (1 - eta) x `params`, in the layout and type
        of `params`, whose memory it takes."""
        _same_names(params, source)
        target = {n: x.sharding for n, x in params.items()}
        averages = dict(params)
        for (before, after), arrays in _by_meshes(source, target).items():
            if not _is_local(before) and not _is_local(after):
                continue
            for dtype in sorted({params[n].dtype for n in arrays}, key=str):
                alike = {n: x for n, x in arrays.items() if params[n].dtype == dtype}
                onto = Onto({n: params[n] for n in alike}, eta)
                averages |= self._move(before, after, alike, {n: target[n] for n in alike}, dtype, onto)
        return averages

    def waits(self, params: Params, target: Shardings) -> bool:
        """Whether a move begins only when its source is there: reading it where it lies needs that. All other moves are
        dispatched at once."""
        return self.shared_memory and not all(
            _same_order(*meshes) and _all_stay(arrays, target) for meshes, arrays in _by_meshes(params, target).items()
        )

    def _move(
        self, source: Mesh, destination: Mesh, arrays: Arrays, target: Shardings, dtype, onto: Onto | None = None
    ) -> dict[str, jax.Array]:
        """`arrays`, all on mesh `source`, on mesh `destination`: averaged with the arrays of `onto`, or as they are."""
        if _same_order(source, destination) and _all_stay(arrays, target):
            return in_turn(self._program(arrays, target, dtype, onto)(arrays, onto and onto.arrays))
        whole = {n: x for n, x in arrays.items() if not onto and _goes_whole(x, target[n], dtype)}
        if whole:
            copies = jax.device_put(whole, {n: target[n] for n in whole})
            rest = {n: x for n, x in arrays.items() if n not in whole}
            theirs = {n: target[n] for n in rest}
            return copies | (self._move(source, destination, rest, theirs, dtype) if rest else {})
        if self.shared_memory:
            if (source, destination) not in self._assemblies:
                self._assemblies[source, destination] = Assembly(source, destination)
            return self._assemblies[source, destination].move(arrays, target, dtype, onto)
        if _same_order(source, destination):
            program = self._program(arrays, target, dtype, onto)
            if program.memory_analysis().temp_size_in_bytes <= self.chunk_bytes:
                return in_turn(program(arrays, onto and onto.arrays))
        if (source, destination) not in self._exchanges:
            self._exchanges[source, destination] = Exchange(source, destination, self.chunk_bytes)
        exchange, moved = self._exchanges[source, destination], {}
        for kind in sorted({x.dtype for x in arrays.values()}, key=str):
            alike = {n: x for n, x in arrays.items() if x.dtype == kind}
            moved |= exchange.move(alike, {n: target[n] for n in alike}, dtype, onto)
        return moved

    def _program(self, arrays: Arrays, target: Shardings, dtype, onto: Onto | None = None):
        """(arrays, those of `onto` or None) -> arrays under `target`."""
        sides = tuple((k, x.shape, x.dtype, x.sharding, target[k]) for k, x in sorted(arrays.items()))
        key = sides, np.dtype(dtype), onto and onto.eta
        if key not in self._programs:

            def reallocate(tree, old):
                # `copy` keeps an unchanged leaf from coming back as the source itself.
                new = {k: _reshard(jnp.copy(x), arrays[k].sharding, target[k], dtype) for k, x in tree.items()}
                return {k: average(old[k], x, onto.eta) for k, x in new.items()} if onto else new

            def shapes(tree):
                return {
                    k: jax.ShapeDtypeStruct(tree[k].shape, tree[k].dtype, sharding=tree[k].sharding) for k in arrays
                }

            jitted = jax.jit(reallocate, out_shardings=dict(target), donate_argnums=1)
            self._programs[key] = jitted.lower(shapes(arrays), onto and shapes(onto.arrays)).compile()
        return self._programs[key]


def _same_names(params: Mapping, others: Mapping) -> None:
    if set(params) != set(others):
        raise ValueError(f"weights differ from shardings: {sorted(set(params) ^ set(others))}")


def _reshard(x: jax.Array, source: NamedSharding, target: NamedSharding, dtype) -> jax.Array:
    """`x` under `target` as `dtype`, in a program; the narrower of the two types is what devices send each other."""
    narrow = narrower(x.dtype, dtype)
    sent = jax.lax.with_sharding_constraint(to_wire(x.astype(narrow)), source)
    return from_wire(jax.lax.with_sharding_constraint(sent, target), narrow).astype(dtype)


def _by_meshes(params: Params, target: Shardings) -> dict[tuple[Mesh, Mesh], dict[str, jax.Array]]:
    """(mesh before, mesh after) -> the device arrays that go so."""
    groups: dict[tuple[Mesh, Mesh], dict[str, jax.Array]] = {}
    for name, x in params.items():
        if isinstance(x, jax.Array):
            x = _on_a_mesh(x)
            groups.setdefault((x.sharding.mesh, target[name].mesh), {})[name] = x
    return groups


def _on_a_mesh(x: jax.Array) -> jax.Array:
    """`x`; one that a program outside any mesh has left on a single device, as an array over a mesh of that one."""
    if isinstance(x.sharding, NamedSharding):
        return x
    (device,) = x.sharding.device_set
    mesh = NamedSharding(Mesh(np.asarray([device], dtype=object), ("all",)), PartitionSpec())
    return jax.make_array_from_single_device_arrays(x.shape, mesh, [s.data for s in x.addressable_shards])


def _same_order(source: Mesh, destination: Mesh) -> bool:
    """Whether both meshes have the same devices in the same order, so that one program can speak of both."""
    return source.devices.ravel().tolist() == destination.devices.ravel().tolist()


def _all_stay(arrays: Arrays, target: Shardings) -> bool:
    return all(stays(x.shape, x.sharding, target[n]) for n, x in arrays.items())


def _goes_whole(x: jax.Array, target: NamedSharding, dtype) -> bool:
    """Whether each shard of `x` goes to one other device as it is. No device may keep its place: device_put would leave
    the source's own memory there."""
    before, after = x.sharding.mesh.devices.ravel(), target.mesh.devices.ravel()
    if jax.process_count() > 1 or x.dtype != dtype or before.size != after.size or (before == after).any():
        return False
    way, _ = route(x.shape, x.sharding, target)
    return way.source == way.destination


def _is_local(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def _is_as(x: jax.Array, target: NamedSharding, dtype) -> bool:
    return x.dtype == dtype and x.sharding.is_equivalent_to(target, x.ndim)


def _elsewhere(shape: tuple[int, ...], sharding: NamedSharding, dtype) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _place(x: np.ndarray, sharding: NamedSharding, dtype) -> jax.Array:
    """`x` of the host, which every process has, on the devices of `sharding`."""
    if jax.process_count() == 1:
        return jax.device_put(x.astype(dtype), sharding, may_alias=False)
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part].astype(dtype), dtype=dtype)
