"""Moves arrays between meshes of different devices by compiled collectives, in one process or many.

Each device of the source mesh packs what it sends into a buffer, the buffers change hands by `ppermute` over a mesh of all
devices that take part, and each device of the destination mesh unpacks what it has got. Every process that has a device
in either mesh takes part; all of them in the same order. What is packed at a time is bounded, so that a move of any size
needs little memory beside the result.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.reallocation.average import Onto, average
from real_jax.reallocation.route import Route, route
from real_jax.reallocation.schedule import Packing, Round, Schedule, make_schedule
from real_jax.reallocation.wire import from_wire, narrower, to_wire, wire_type

_ALL = "devices"
_SENT, _KEPT = "sent", "kept"


def in_turn(arrays):
    """`arrays`, results of a program that talks to other processes.

    Between CPUs a collective is known by its devices alone, so a second program must not start before the first has
    ended, or they take each other's messages. Accelerators run programs in the order of their dispatch.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(arrays)
    return arrays


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` equal parts of every cell of an array, cut along dimension `dim`."""

    name: str
    cell: tuple[int, ...]  # shape of the part of a cell
    dim: int
    count: int


class Exchange:
    """Moves trees from one mesh to another. Programs are compiled once and kept.

    Args:
      chunk_bytes: what one device packs at a time, at most, but for cells that cannot be cut.
      devices_per_node: device number d is on node d // devices_per_node; None: a process is a node.
    """

    def __init__(self, source: Mesh, target: Mesh, chunk_bytes: int, devices_per_node: int | None = None):
        self.source, self.target, self._chunk_bytes = source, target, chunk_bytes
        devices = sorted({*source.devices.flat, *target.devices.flat}, key=lambda d: (d.process_index, d.id))
        self._mesh = Mesh(np.asarray(devices, dtype=object), (_ALL,))
        place = {d: i for i, d in enumerate(devices)}
        self._source = [place[d] for d in source.devices.flat]
        self._target = [place[d] for d in target.devices.flat]
        self._nodes = [d.id // devices_per_node if devices_per_node else d.process_index for d in devices]
        self._schedules: dict[Route, Schedule] = {}
        self._programs: dict = {}
        self._blanks: dict = {}  # the zeros of `_wrap`, for all parts of a chunk

    def schedule(self, way: Route) -> Schedule:
        if way not in self._schedules:
            source = dict(zip(self._source, way.source, strict=True))
            target = dict(zip(self._target, way.destination, strict=True))
            self._schedules[way] = make_schedule(way.grid, source, target, self._nodes.__getitem__)
        return self._schedules[way]

    def move(
        self, arrays: Mapping[str, jax.Array], target: Mapping[str, NamedSharding], dtype, onto: Onto | None = None
    ) -> dict[str, jax.Array]:
        """`arrays`, all on the source mesh and of one type, under the shardings `target` of the target mesh as `dtype`;
        averaged with the arrays of `onto`, if given."""
        alike: dict[Route, list[tuple[str, tuple[int, ...]]]] = {}
        for name, x in sorted(arrays.items()):  # every process must send in the same order
            way, cell = route(x.shape, x.sharding, target[name])
            alike.setdefault(way, []).append((name, cell))
        moved: dict[str, jax.Array] = {}
        for way, cells in alike.items():
            names = [name for name, _ in cells]
            if onto:
                moved |= {n: onto.arrays[n] for n in names}
            else:
                moved |= self._empty({n: arrays[n] for n in names}, {n: target[n] for n in names}, dtype)
            # An average that is passed on must not be rounded to the type of its source.
            small = np.dtype(dtype) if onto else narrower(dtype, next(iter(arrays.values())).dtype)
            for chunk in self._chunks(self.schedule(way), cells, small.itemsize):
                for number in range(chunk[0].count):
                    self._step(way, chunk, number, arrays, moved, small, onto and onto.eta)
                self._blanks.clear()
        return {name: moved[name] for name in arrays}

    def _chunks(self, schedule: Schedule, cells, itemsize: int) -> list[list[Part]]:
        """The arrays in groups whose buffers fit the bound; one that alone does not is cut."""
        slots = max(_slots(schedule.first) + _slots(schedule.second), max(map(len, schedule.kept.values())), 1)
        chunks, room = [], 0
        for name, cell in cells:
            size = slots * math.prod(cell) * itemsize
            if size > self._chunk_bytes:
                chunks.append([_cut(name, cell, math.ceil(size / self._chunk_bytes))])
                room = 0
                continue
            if size > room:
                chunks.append([])
                room = self._chunk_bytes
            chunks[-1].append(Part(name, cell, 0, 1))
            room -= size
        return chunks

    def _step(self, way: Route, chunk: list[Part], number: int, arrays, moved: dict, dtype, eta: float | None) -> None:
        """Moves part `number` of the arrays in `chunk`; `moved` is brought up to date, with averages where `eta` is
        given."""
        names = [part.name for part in chunk]
        schedule, offset = self.schedule(way), np.int32(number)
        sends = any(d.process_index == jax.process_index() for d in self.source.devices.flat)
        gets = any(d.process_index == jax.process_index() for d in self.target.devices.flat)
        width = sum(math.prod(part.cell) for part in chunk)

        def pack(kind: str, arrays) -> dict[str, jax.Array]:
            tree = {n: arrays[n] for n in names}
            return self._program(kind, way, chunk, tree, dtype)(tree, offset)

        def unpack(kind: str, got: dict[str, jax.Array], eta: float | None = None) -> None:
            own = {n: moved[n] for n in names}
            moved.update(self._program(kind, way, chunk, own, dtype, eta)(own, got, offset))

        packed = pack("pack", arrays) if sends else {}
        got = self._send(schedule.first_packing, packed.get(_SENT), self.source, width, dtype)
        if kept := max(map(len, schedule.kept.values())):
            got[_KEPT] = self._wrap(packed.get(_KEPT), self.source, self.target, (kept, width), dtype)
        if gets and got:
            unpack("unpack", got, eta)
        if schedule.second:
            packed = pack("pack again", moved) if gets else {}
            got = self._send(schedule.second_packing, packed.get(_SENT), self.target, width, dtype)
            if gets:  # what is passed on is an average already
                unpack("unpack again", got)

    def _wrap(self, buffer: jax.Array | None, before: Mesh, after: Mesh, shape: tuple[int, int], dtype) -> jax.Array:
        """The rows that this process's devices have, [devices of `before`, *shape] of the wire form of `dtype`, as an
        array over `after`; zeros where a device had none. Nothing is copied."""
        dtype = wire_type(dtype)
        sharding = NamedSharding(after, PartitionSpec(after.axis_names))
        known = {s.device: s.data for s in buffer.addressable_shards} if buffer is not None else {}
        mine = [d for d in after.devices.flat if d.process_index == jax.process_index()]
        rows = [known[d] if d in known else self._blank(d, shape, dtype) for d in mine]
        return jax.make_array_from_single_device_arrays((after.size, *shape), sharding, rows, dtype=dtype)

    def _blank(self, device: jax.Device, shape: tuple[int, int], dtype) -> jax.Array:
        key = device, shape, dtype
        if key not in self._blanks:
            self._blanks[key] = jnp.zeros((1, *shape), dtype, device=device)
        return self._blanks[key]

    def _send(self, packing: Packing, packed: jax.Array | None, before: Mesh, width: int, dtype):
        """What the devices of the target receive of what those of `before` have packed: round -> [devices, slots, width]."""
        if not packing.messages:
            return {}
        buffer = self._wrap(packed, before, self._mesh, (packing.slots, width), dtype)
        key = "send", packing, buffer.shape, buffer.dtype
        if key not in self._programs:
            starts = np.zeros((len(packing.messages), self._mesh.size), np.int32)
            for own, messages, begins in zip(starts, packing.messages, packing.starts, strict=True):
                own[[sender for sender, _ in messages]] = begins

            def exchange(x):
                parts, place = {}, jax.lax.axis_index(_ALL)
                for number, (messages, length) in enumerate(zip(packing.messages, packing.lengths, strict=True)):
                    own = jax.lax.dynamic_slice_in_dim(x, jnp.asarray(starts)[number, place], length, axis=1)
                    parts[_round(number)] = jax.lax.ppermute(own, _ALL, list(messages))
                return parts

            spec = PartitionSpec(_ALL)
            mapped = jax.shard_map(exchange, mesh=self._mesh, in_specs=spec, out_specs=spec)
            self._programs[key] = jax.jit(mapped)
        received = self._programs[key](buffer)
        if jax.default_backend() == "cpu":  # the sends of many parts at once hold all threads and wait for each other
            jax.block_until_ready(received)
        return {
            _round(number): self._wrap(received[_round(number)], self._mesh, self.target, (length, width), dtype)
            for number, length in enumerate(packing.lengths)
        }

    def _empty(self, arrays, target: Mapping[str, NamedSharding], dtype) -> dict[str, jax.Array]:
        """Arrays to be filled, on the target mesh."""
        if not any(d.process_index == jax.process_index() for d in self.target.devices.flat):
            return {
                n: jax.make_array_from_single_device_arrays(x.shape, target[n], [], dtype=dtype)
                for n, x in arrays.items()
            }
        shapes = {n: x.shape for n, x in arrays.items()}
        key = "empty", tuple(sorted(shapes.items())), tuple(sorted(target.items(), key=lambda t: t[0])), np.dtype(dtype)
        if key not in self._programs:
            self._programs[key] = jax.jit(
                lambda: {n: jnp.zeros(s, dtype) for n, s in shapes.items()}, out_shardings=dict(target)
            )
        return self._programs[key]()

    def _program(self, kind: str, way: Route, chunk: list[Part], arrays: Mapping[str, jax.Array], dtype, eta=None):
        key = kind, way, tuple(chunk), tuple((n, x.shape, x.dtype, x.sharding) for n, x in arrays.items()), dtype, eta
        if key not in self._programs:
            packs = kind.startswith("pack")
            schedule, again = self.schedule(way), kind.endswith("again")
            mesh, places = (self.source, self._source) if kind == "pack" else (self.target, self._target)
            ranges = dict(zip(places, way.source if kind == "pack" else way.destination, strict=True))
            rounds = schedule.second if again else schedule.first
            sides = {_KEPT: {} if again else schedule.kept}
            if packs:
                sides[_SENT] = dict((schedule.second_packing if again else schedule.first_packing).cells)
            else:
                sides |= {_round(i): {to: cells for (_, to), cells in r.messages.items()} for i, r in enumerate(rounds)}
            tables = {what: _starts(side, places, ranges, way.grid) for what, side in sides.items()}
            tables = {what: table for what, table in tables.items() if table.shape[1]}
            specs = {n: x.sharding.spec for n, x in arrays.items()}
            if packs:
                self._programs[key] = _pack(chunk, tables, mesh, specs, dtype)
            else:
                self._programs[key] = _unpack(chunk, tables, mesh, specs, dtype, eta)
        return self._programs[key]


def _slots(rounds: Sequence[Round]) -> int:
    return sum(r.length for r in rounds)


def _cut(name: str, cell: tuple[int, ...], parts: int) -> Part:
    """`cell` cut into at least `parts` equal parts along one dimension, as near to that number as its size allows."""
    dim = max(range(len(cell)), key=lambda i: cell[i])
    count = next(n for n in range(min(parts, cell[dim]), cell[dim] + 1) if cell[dim] % n == 0)
    return Part(name, (*cell[:dim], cell[dim] // count, *cell[dim + 1 :]), dim, count)


def _round(number: int) -> str:
    return f"round {number}"


def _starts(side: Mapping[int, Sequence[int]], places: Sequence[int], ranges, grid) -> np.ndarray:
    """Where each cell of `side` begins in its device's shard, in cells; negative for none: [devices, slots, dims]."""
    slots = max(map(len, side.values()), default=0)
    starts = np.full((len(places), slots, len(grid)), -1, np.int32)
    for row, place in enumerate(places):
        low = np.asarray([a for a, _ in ranges[place]], np.int32)
        for slot, cell in enumerate(side.get(place, ())):
            starts[row, slot] = np.asarray(np.unravel_index(cell, grid), np.int32) - low
    return starts


def _offsets(part: Part, number) -> jax.Array:
    return jnp.zeros(len(part.cell), jnp.int32).at[part.dim].set(number * part.cell[part.dim])


def _whole(part: Part) -> np.ndarray:
    """Shape of the cell that `part` is cut from."""
    shape = np.asarray(part.cell, np.int32)
    shape[part.dim] *= part.count
    return shape


def _pack(chunk: Sequence[Part], tables: Mapping[str, np.ndarray], mesh: Mesh, specs, dtype):
    """(arrays, part number) -> one buffer [devices, slots, numbers of all parts] for each table, the wire form of
    `dtype`."""

    def pack(arrays, number):
        place = jax.lax.axis_index(mesh.axis_names)

        def buffer(table: np.ndarray):
            starts = jnp.maximum(jnp.asarray(table)[place], 0)
            columns = []
            for part in chunk:
                x = jnp.atleast_1d(arrays[part.name])
                same = x.dtype == dtype
                take = functools.partial(jax.lax.dynamic_slice, to_wire(x) if same else x, slice_sizes=part.cell)
                cells = jax.vmap(take)(starts * _whole(part) + _offsets(part, number))
                cells = cells.reshape(len(starts), math.prod(part.cell))
                columns.append(cells if same else to_wire(cells.astype(dtype)))
            return jnp.concatenate(columns, axis=1)[None]

        return {what: buffer(table) for what, table in tables.items()}

    specs_in, spec_out = (specs, PartitionSpec()), PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=specs_in, out_specs=spec_out, check_vma=False))


def _unpack(chunk: Sequence[Part], tables: Mapping[str, np.ndarray], mesh: Mesh, specs, dtype, eta: float | None):
    """(arrays, a buffer for each table, part number) -> arrays with the cells of the buffers, the wire form of `dtype`,
    in their places, or with `eta` averaged with what was there."""

    def unpack(arrays, buffers, number):
        place = jax.lax.axis_index(mesh.axis_names)
        arrays, first = dict(arrays), 0
        for part in chunk:
            size, filled = math.prod(part.cell), jnp.atleast_1d(arrays[part.name])
            kind, plain = filled.dtype, eta is None and filled.dtype == dtype
            filled = to_wire(filled) if plain else filled
            for what, table in tables.items():
                starts = jnp.asarray(table)[place]
                cells = buffers[what][0, :, first : first + size]
                cells = cells if plain else from_wire(cells, dtype).astype(kind)

                def put(slot, x, starts=starts, cells=cells, part=part):
                    start = jnp.maximum(starts[slot], 0) * _whole(part) + _offsets(part, number)
                    old = jax.lax.dynamic_slice(x, start, part.cell)
                    new = cells[slot].reshape(part.cell)
                    new = new if eta is None else average(old, new, eta)
                    new = jnp.where(starts[slot, 0] >= 0, new, old)
                    return jax.lax.dynamic_update_slice(x, new, start)

                filled = jax.lax.fori_loop(0, table.shape[1], put, filled)
            filled = from_wire(filled, kind) if plain else filled
            arrays[part.name] = filled.reshape(arrays[part.name].shape)
            first += size
        return arrays

    in_specs = (specs, PartitionSpec(mesh.axis_names), PartitionSpec())
    inner = jax.shard_map(unpack, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
    return jax.jit(inner, donate_argnums=0)
