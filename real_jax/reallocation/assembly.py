"""Moves arrays between meshes of one process whose devices all work in the host's memory, as those of a CPU do.

There a device can read what another one holds: each destination shard is put together straight from the source shards,
by one compiled program for the whole tree, and every byte is copied once. Other backends need `exchange`.
"""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from real_jax.reallocation.average import Onto, average
from real_jax.reallocation.route import Route, route
from real_jax.reallocation.schedule import make_schedule
from real_jax.reallocation.wire import from_wire, to_wire


class Assembly:
    """Moves trees from one mesh to another, of the same devices or of others. Programs are compiled once and kept."""

    def __init__(self, source: Mesh, target: Mesh):
        self.source, self.target = source, target
        place = {d: i for i, d in enumerate(sorted({*source.devices.flat, *target.devices.flat}, key=lambda d: d.id))}
        self._source = [place[d] for d in source.devices.flat]
        self._target = [place[d] for d in target.devices.flat]
        self._senders: dict[Route, np.ndarray] = {}
        self._programs: dict = {}

    def senders(self, way: Route) -> np.ndarray:
        """Which device each cell of a destination shard comes from, by place in the source mesh: [devices, cells of a
        shard in row-major order]. A device's own cells come from itself."""
        if way not in self._senders:
            source = dict(zip(self._source, way.source, strict=True))
            target = dict(zip(self._target, way.destination, strict=True))
            schedule = make_schedule(way.grid, source, target, node=lambda device: 0)
            comes_from = {(device, cell): device for device, cells in schedule.kept.items() for cell in cells}
            for r in schedule.first:
                for (sender, receiver), cells in r.messages.items():
                    comes_from |= {(receiver, cell): sender for cell in cells}
            numbers = np.arange(np.prod(way.grid)).reshape(way.grid)
            rank = {device: i for i, device in enumerate(self._source)}
            self._senders[way] = np.asarray(
                [
                    [rank[comes_from[d, cell]] for cell in numbers[tuple(slice(*r) for r in target[d])].ravel()]
                    for d in self._target
                ]
            )
        return self._senders[way]

    def move(
        self, arrays: Mapping[str, jax.Array], target: Mapping[str, NamedSharding], dtype, onto: Onto | None = None
    ) -> dict[str, jax.Array]:
        """`arrays`, all on the source mesh, under the shardings `target` of the target mesh as `dtype`; averaged with
        the arrays of `onto`, if given. Returns once `arrays` are there and the copying has begun."""
        sides = tuple((n, x.shape, x.dtype, x.sharding, target[n]) for n, x in arrays.items())
        key = sides, np.dtype(dtype), onto and onto.eta
        if key not in self._programs:
            routes = {name: route(x.shape, x.sharding, target[name]) for name, x in arrays.items()}
            senders = {name: self.senders(way) for name, (way, _) in routes.items()}
            self._programs[key] = senders, self._program(arrays, target, dtype, routes, onto and onto.eta)
        senders, program = self._programs[key]
        seen = {name: self._seen(x, senders[name]) for name, x in arrays.items()}
        return program(seen, {name: onto.arrays[name] for name in arrays} if onto else {})

    def _seen(self, x: jax.Array, senders: np.ndarray) -> list[jax.Array]:
        """For each cell of a destination shard, the source shards that the devices find it in: [devices, *shard]. They
        lie where they lay."""
        held = {s.device: s.data for s in x.addressable_shards}
        own = [held[d] for d in self.source.devices.flat]
        # A second handle on a shard: a view of the array itself would keep its memory from being donated for good.
        views = {i: _view(own[i]) for i in np.unique(senders)}
        sharding = NamedSharding(self.target, PartitionSpec(self.target.axis_names))
        shape = (self.target.size, *np.shape(views[senders[0, 0]])[1:])
        return [
            jax.make_array_from_single_device_arrays(
                shape,
                sharding,
                [
                    jax.device_put(views[i], device, may_alias=True)
                    for i, device in zip(column, self.target.devices.flat, strict=True)
                ],
            )
            for column in senders.T
        ]

    def _program(self, arrays: Mapping[str, jax.Array], target: Mapping[str, NamedSharding], dtype, routes, eta):
        """{array: what `_seen` makes of it}, arrays to average with -> {array: under its sharding in `target`}."""
        starts = {n: self._starts(way) for n, (way, _) in routes.items()}
        blocks = {n: [b - a for a, b in way.destination[0]] for n, (way, _) in routes.items()}
        shapes = {n: target[n].shard_shape(x.shape) for n, x in arrays.items()}
        devices = self.target.axis_names

        def assemble(seen, old):
            place, made = jax.lax.axis_index(devices), {}
            for n, shards in seen.items():
                if n in old:
                    whole = _onto(old[n], shards, starts[n], place, routes[n][1], blocks[n], eta)
                else:
                    whole = _together(shards, starts[n], place, routes[n][1], blocks[n], dtype)
                made[n] = whole.reshape(shapes[n])
            return made

        specs = {n: s.spec for n, s in target.items()}
        in_specs = (PartitionSpec(devices), specs if eta is not None else {})
        inner = jax.shard_map(assemble, mesh=self.target, in_specs=in_specs, out_specs=specs, check_vma=False)
        return jax.jit(inner, donate_argnums=1)

    def _starts(self, way: Route) -> np.ndarray:
        """Where each cell of a destination shard begins in the source shard that it is taken from, in cells: [devices,
        cells, dims]."""
        senders = self.senders(way)
        low = np.asarray([[a for a, _ in box] for box in way.source], np.int32)
        wanted = np.asarray([list(itertools.product(*(range(*r) for r in box))) for box in way.destination], np.int32)
        return wanted - low[senders]


def _view(shard: jax.Array) -> np.ndarray:
    handle = jax.make_array_from_single_device_arrays(shard.shape, SingleDeviceSharding(shard.device), [shard])
    return np.atleast_1d(np.asarray(handle))[None]


def _together(shards, starts: np.ndarray, place, cell, blocks, dtype) -> jax.Array:
    """The cells of a shard, each cut out of the source shard that has it: `blocks` in each dimension."""
    if len(shards) > 1 and max(blocks) == len(shards) and all((x.shape[1:], x.dtype) == (cell, dtype) for x in shards):
        whole = jnp.concatenate([to_wire(x[0]) for x in shards], blocks.index(len(shards)))  # source shards in a row
        return from_wire(whole, dtype)

    def cut(number: int) -> jax.Array:
        x, own = shards[number], starts[:, number]
        return (
            _cut(to_wire(x), own, place, cell) if x.dtype == dtype else to_wire(_cut(x, own, place, cell).astype(dtype))
        )

    if len(shards) == 1:
        return from_wire(cut(0), dtype)
    # XLA would hold cut cells a second time to concatenate them; one after the other is written to its place.
    whole = jax.lax.empty(tuple(np.multiply(blocks, cell).tolist()), cut(0).dtype)
    for number, begin in enumerate(_begins(blocks, cell)):
        whole = jax.lax.dynamic_update_slice(whole, cut(number), begin)
    return from_wire(whole, dtype)


def _onto(old: jax.Array, shards, starts: np.ndarray, place, cell, blocks, eta: float) -> jax.Array:
    """`old`, a shard, with each cell averaged with what `shards` have for it, in place."""
    whole = old.reshape(np.multiply(blocks, cell).tolist())
    for number, begin in enumerate(_begins(blocks, cell)):
        new = average(
            jax.lax.dynamic_slice(whole, begin, cell), _cut(shards[number], starts[:, number], place, cell), eta
        )
        whole = jax.lax.dynamic_update_slice(whole, new, begin)
    return whole


def _begins(blocks, cell) -> list[np.ndarray]:
    """Where each cell of a shard begins."""
    return [np.multiply(block, cell).astype(np.int32) for block in np.ndindex(*blocks)]


def _cut(shard: jax.Array, starts: np.ndarray, place, cell) -> jax.Array:
    """The cell that the device at `place` takes from `shard`, [1, *shape]."""
    if shard.shape[1:] == cell:
        return shard[0]
    return jax.lax.dynamic_slice(shard[0], jnp.asarray(starts)[place] * np.asarray(cell, np.int32), cell)
