"""Which device sends what to which when an array changes its layout. Pure; `exchange` runs it on devices.

The shards of both layouts are cut along all borders of either into equal cells. A destination keeps the cells that its
own device holds. A cell that its node holds comes from there; any other comes into the node once, to one of the devices
that want it, which then passes it on. So what is sent is what `transfers.plan_transfers` says, and no less is possible.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

Ranges = Mapping[int, tuple[tuple[int, int], ...]]  # device -> (start, stop) of its shard in each dimension, in cells
Edges = Mapping[tuple[int, int], list[int]]  # (sender, receiver) -> cells


@dataclasses.dataclass(frozen=True)
class Round:
    """Messages sent at the same time: no device sends two of them or receives two, and all have the same length.

    Attributes:
      messages: (sender, receiver) -> the cells, in the order in which they are sent.
      length: cells of each message.
    """

    messages: Mapping[tuple[int, int], tuple[int, ...]]
    length: int


@dataclasses.dataclass(frozen=True)
class Packing:
    """How devices lay out what they send in some rounds. A cell that goes to several is packed once.

    Attributes:
      messages: of each round, its (sender, receiver) pairs.
      lengths: of each round, the cells of a message.
      starts: of each round, where each of its messages begins among the cells that its sender packs.
      cells: (device, the cells that it packs), of all senders.
    """

    messages: tuple[tuple[tuple[int, int], ...], ...]
    lengths: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def slots(self) -> int:
        """Cells of the largest of what the senders pack."""
        return max((len(cells) for _, cells in self.cells), default=0)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Attributes:
    kept: device -> cells that it holds before and after.
    first: rounds from devices of the source layout.
    second: rounds after those, from devices of the destination layout that have received the cells by then.
    """

    kept: Mapping[int, tuple[int, ...]]
    first: tuple[Round, ...]
    second: tuple[Round, ...]

    @functools.cached_property
    def first_packing(self) -> Packing:
        return pack(self.first)

    @functools.cached_property
    def second_packing(self) -> Packing:
        return pack(self.second)


def cell_shape(source: Iterable[int], destination: Iterable[int]) -> tuple[int, ...]:
    """Shape of the cells, from the shapes of a shard in the two layouts."""
    return tuple(math.gcd(a, b) for a, b in zip(source, destination, strict=True))


def make_schedule(grid: tuple[int, ...], source: Ranges, destination: Ranges, node: Callable[[int], int]) -> Schedule:
    """The messages that bring an array of `grid` cells from one layout to another.

    Args:
      grid: cells in each dimension; a cell's number is its place in row-major order.
      source, destination: the shards of the two layouts. Between them the sources hold every cell.
      node: device -> its node.
    """
    held, wanted = _cells(grid, source), _cells(grid, destination)
    holders: dict[int, list[int]] = collections.defaultdict(list)
    for device, cells in held.items():
        for cell in cells:
            holders[cell].append(device)
    kept = {d: tuple(sorted(cells & held.get(d, set()))) for d, cells in wanted.items()}
    lacking: dict[tuple[int, int], list[int]] = collections.defaultdict(list)  # (cell, node) -> devices
    for device, cells in sorted(wanted.items()):
        for cell in cells - held.get(device, set()):
            lacking[cell, node(device)].append(device)
    load: collections.Counter[tuple[str, int]] = collections.Counter()
    first: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    second: dict[tuple[int, int], list[int]] = collections.defaultdict(list)

    def send(edges, senders: list[int], receiver: int, cell: int) -> None:
        sender = min(senders, key=lambda s: (load["out", s], (s - receiver) % _FAR))
        load["out", sender] += 1
        load["in", receiver] += 1
        edges[sender, receiver].append(cell)

    for (cell, where), receivers in sorted(lacking.items()):
        near = [d for d in holders[cell] if node(d) == where]
        if near:
            for receiver in receivers:
                send(first, near, receiver, cell)
            continue
        gate = min(receivers, key=lambda d: (load["gate", d], load["in", d], d))
        load["gate", gate] += 1
        send(first, holders[cell], gate, cell)
        for receiver in receivers:
            if receiver != gate:
                send(second, [gate], receiver, cell)
    return Schedule(kept, _rounds(first), _rounds(second))


_FAR = 1 << 20  # more than there are devices


def _cells(grid: tuple[int, ...], ranges: Ranges) -> dict[int, set[int]]:
    strides = [math.prod(grid[i + 1 :]) for i in range(len(grid))]

    def numbers(box) -> set[int]:
        places = itertools.product(*(range(a, b) for a, b in box))
        return {sum(i * s for i, s in zip(place, strides, strict=True)) for place in places}

    known = {box: numbers(box) for box in set(ranges.values())}
    return {device: known[box] for device, box in ranges.items()}


def _rounds(edges: Edges) -> tuple[Round, ...]:
    """All messages of `edges`, cut so that those of a round are equally long: nothing is sent to fill up."""
    left = {pair: sorted(cells) for pair, cells in edges.items()}
    rounds = []
    while left:
        senders, receivers, chosen = set(), set(), []
        for sender, receiver in sorted(left, key=lambda pair: (-len(left[pair]), pair)):
            if sender not in senders and receiver not in receivers:
                senders.add(sender)
                receivers.add(receiver)
                chosen.append((sender, receiver))
        length = min(len(left[pair]) for pair in chosen)
        rounds.append(Round({pair: tuple(left[pair][:length]) for pair in chosen}, length))
        left = {pair: cells[length:] if pair in chosen else cells for pair, cells in left.items()}
        left = {pair: cells for pair, cells in left.items() if cells}
    return tuple(rounds)


def pack(rounds: tuple[Round, ...]) -> Packing:
    """What the senders of `rounds` pack, each in one piece for all of its messages."""
    packed: dict[int, list[int]] = collections.defaultdict(list)
    starts = tuple(tuple(_place_of(cells, packed[d]) for (d, _), cells in r.messages.items()) for r in rounds)
    return Packing(
        tuple(tuple(r.messages) for r in rounds),
        tuple(r.length for r in rounds),
        starts,
        tuple((d, tuple(cells)) for d, cells in packed.items()),
    )


def _place_of(cells: tuple[int, ...], packed: list[int]) -> int:
    """Where `cells` begin in `packed`, to whose end they are added if they are not there."""
    for start in range(len(packed) - len(cells) + 1):
        if tuple(packed[start : start + len(cells)]) == cells:
            return start
    packed += cells
    return len(packed) - len(cells)
