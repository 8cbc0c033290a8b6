"""What must move when parameters change their layout: minimal transfers in bytes. Pure data; `move` runs them.

The planner predicts with these numbers and the runtime reports the bytes that it moved against them.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from real_jax.spec.arch import Weight
from real_jax.spec.hardware import Cluster, share
from real_jax.spec.plan import MESH_AXES, Placement, partition

Slices = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Bytes that a change of layout moves.

    A byte that its device already holds is free (`local_bytes`). Any other byte is received once by each device that
    wants it. It enters a node that holds no copy once, and spreads over the links within the node from there, so
    `total_bytes == bytes_within_node + bytes_between_nodes`.

    Attributes:
      bytes_received: destination device -> bytes it receives.
      bytes_sent: source device -> bytes it sends, where the holders of a byte share its sending evenly and receivers
        pass it on (a pipelined broadcast), so that it leaves the source once per node of holders that serves it.
      bytes_into_node, bytes_out_of_node: node -> bytes that cross its boundary, counted in the same way.
      total_bytes: sum of `bytes_received`.
      bytes_within_node: those that come from a device of the same node.
      bytes_between_nodes: those that cross a node boundary.
      local_bytes: those that stay on their device, summed over the destination devices.
      arrays: weights of which at least one byte moves.
    """

    bytes_received: Mapping[int, int]
    bytes_sent: Mapping[int, float]
    bytes_into_node: Mapping[int, int]
    bytes_out_of_node: Mapping[int, float]
    total_bytes: int
    bytes_within_node: int
    bytes_between_nodes: int
    local_bytes: int
    arrays: int


def device_slices(weight: Weight, placement: Placement) -> dict[int, Slices]:
    """Device -> the part of `weight` it holds under `placement`, as (start, stop) per dimension.

    Devices fill the mesh in row-major order of MESH_AXES. Raises UsageError as `spec.plan.partition` does.
    """
    spec = partition(weight.axes, weight.shape, placement)
    by_dimension = []
    for axes, size in zip(spec, weight.shape, strict=True):
        part, parts = _parts(axes, placement)
        width = size // parts
        by_dimension.append([(int(i) * width, (int(i) + 1) * width) for i in part])
    return dict(zip(placement.devices, zip(*by_dimension, strict=True), strict=True))


def plan_transfers(
    table: Mapping[str, Weight], source: Placement, destination: Placement, itemsize: int, devices_per_node: int
) -> Transfers:
    """Minimal transfers that bring the weights of `table` from layout `source` to layout `destination`.

    Args:
      table: path -> weight.
      itemsize: bytes of one number.
      devices_per_node: device d is on node d // devices_per_node.

    Raises UsageError where a weight cannot be laid out in either way.
    """
    nodes = sorted({d // devices_per_node for p in (source, destination) for d in p.devices})
    local, received, sent = (np.zeros((len(nodes), devices_per_node)) for _ in range(3))
    into, out = np.zeros(len(nodes)), np.zeros(len(nodes))
    arrays = 0
    for axes, (numbers, count) in _kinds(table, source, destination).items():
        sizes, held, wanted = _cells(axes, source, destination, nodes, devices_per_node)
        sizes = sizes * (numbers * itemsize // int(sizes.sum()))
        kept, needed = _volumes(sizes, held, wanted), _volumes(sizes, wanted, wanted)
        local += kept
        if np.array_equal(kept, needed):
            continue
        arrays += count
        received += needed - kept
        holders, lacking = _counts(held), _counts(wanted) > _counts([h * w for h, w in zip(held, wanted, strict=True)])
        crossing = lacking & (holders == 0)
        into += (crossing * sizes).sum(axis=(1, 2))
        leaves = crossing.any(axis=0) * sizes / np.maximum(holders.sum(axis=0), 1)
        out += (holders * leaves).sum(axis=(1, 2))
        # A holder's part of each cell that it holds: of what its own node lacks, and of what other nodes lack.
        share = (lacking & (holders > 0)) * sizes / np.maximum(holders, 1) + leaves
        sent += ((held[0] @ share) * held[1]).sum(axis=2)
    total, between = int(received.sum()), int(into.sum())
    return Transfers(
        bytes_received=_by_device(received, nodes, destination, int),
        bytes_sent=_by_device(sent, nodes, source, float),
        bytes_into_node={n: int(b) for n, b in zip(nodes, into, strict=True)},
        bytes_out_of_node={n: float(b) for n, b in zip(nodes, out, strict=True)},
        total_bytes=total,
        bytes_within_node=total - between,
        bytes_between_nodes=between,
        local_bytes=int(local.sum()),
        arrays=arrays,
    )


def transfer_seconds(transfers: Transfers, cluster: Cluster) -> float:
    """Seconds that `transfers` take on an otherwise idle `cluster`: the busiest link, plus one latency per array.

    A device receives and sends over its link within the node at the same time. What crosses a node's boundary is
    shared by the links between nodes of those devices of the node that take part. Where devices share their host's
    cores, all bytes pass through one memory, which reads and writes each of them.
    """
    if not transfers.total_bytes:
        return 0.0
    inside, across = cluster.within_node, cluster.between_nodes
    crosses = transfers.bytes_between_nodes > 0
    latency = (across if crosses else inside).latency_us * 1e-6 * transfers.arrays
    if cluster.shared_cores > 0:
        return transfers.total_bytes / (min(inside.gb_per_s, cluster.chip.memory_gb_per_s / 2) * 1e9) + latency
    busiest = max(itertools.chain(transfers.bytes_received.values(), transfers.bytes_sent.values()))
    seconds = busiest / (inside.gb_per_s * 1e9 * share(inside.reach, max(busiest, 1.0)))
    if crosses:
        for volume, devices in (
            (transfers.bytes_into_node, transfers.bytes_received),
            (transfers.bytes_out_of_node, transfers.bytes_sent),
        ):
            links = collections.Counter(d // cluster.devices_per_node for d in devices)
            part = max(b / links[n] for n, b in volume.items() if links[n])
            seconds = max(seconds, part / (across.gb_per_s * 1e9 * share(across.reach, max(part, 1.0))))
    return seconds + latency


def _by_device(values: np.ndarray, nodes: Sequence[int], placement: Placement, kind: type) -> dict[int, int | float]:
    """Entries of `values` [nodes, devices per node] for the devices of `placement`."""
    per_node, row = values.shape[1], {n: i for i, n in enumerate(nodes)}
    return {d: kind(values[row[d // per_node], d % per_node]) for d in placement.devices}


# For each dimension that either layout splits: the mesh axes that split it in the source and in the destination.
_Split = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def _kinds(table: Mapping[str, Weight], source: Placement, destination: Placement) -> dict[_Split, tuple[int, int]]:
    """How weights are split -> (numbers, weights) that are split so.

    Parts are equal, so two weights split over the same axes are cut at the same fractions of their length, whatever
    their shapes: they move alike, and each kind has to be worked out only once.
    """
    kinds: dict[_Split, tuple[int, int]] = {}
    for w in table.values():
        specs = (partition(w.axes, w.shape, source), partition(w.axes, w.shape, destination))
        split = tuple(sorted(pair for pair in zip(*specs, strict=True) if any(pair)))
        numbers, count = kinds.get(split, (0, 0))
        kinds[split] = (numbers + w.size, count + 1)
    return kinds


def _parts(axes: tuple[str, ...], placement: Placement) -> tuple[np.ndarray, int]:
    """Which part of a dimension split over `axes` each device holds [devices], and the number of parts."""
    mesh = tuple(placement.mesh_shape[axis] for axis in MESH_AXES)
    coordinates = dict(zip(MESH_AXES, np.unravel_index(np.arange(placement.count), mesh), strict=True))
    part, parts = np.zeros(placement.count, np.int64), 1
    for axis in axes:
        part = part * placement.mesh_shape[axis] + coordinates[axis]
        parts *= placement.mesh_shape[axis]
    return part, parts


def _cells(
    split: _Split, source: Placement, destination: Placement, nodes: Sequence[int], per_node: int
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Cuts an array along every shard border of both layouts, into rows (first split dimension) x columns (the others).

    Returns the size of each cell [rows, columns] in the largest unit in which all are whole, and which rows and which columns each device holds, and
    wants: lists of two arrays, 0 or 1 [nodes, devices per node, rows or columns]. A device has the cells of its rows
    and its columns. Devices outside a layout have none.
    """
    row_of = {n: i for i, n in enumerate(nodes)}
    widths, masks = [np.ones(1), np.ones(1)], []
    for p in (source, destination):
        inside = np.zeros((len(nodes) * per_node, 1))
        inside[[row_of[d // per_node] * per_node + d % per_node for d in p.devices]] = 1
        masks.append([inside, inside])
    for dim, pair in enumerate(split):
        layouts = [_parts(axes, p) for axes, p in zip(pair, (source, destination), strict=True)]
        length = math.lcm(*(parts for _, parts in layouts))
        cuts = np.unique(np.concatenate([np.arange(0, length + 1, length // parts) for _, parts in layouts]))
        side = min(dim, 1)
        widths[side] = np.multiply.outer(widths[side], np.diff(cuts)).ravel()
        for mask, (part, parts) in zip(masks, layouts, strict=True):
            owner = cuts[:-1] // (length // parts)
            devices = np.flatnonzero(mask[0].any(axis=1))
            owns = np.zeros((len(mask[0]), len(owner)))
            owns[devices] = part[:, None] == owner
            mask[side] = (mask[side][:, :, None] * owns[:, None, :]).reshape(len(owns), -1)
    held, wanted = ([side.reshape(len(nodes), per_node, -1) for side in mask] for mask in masks)
    return np.multiply.outer(*widths), held, wanted


def _volumes(sizes: np.ndarray, a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """Sum of the sizes of the cells that a device has in both `a` and `b`: [nodes, devices per node]."""
    rows, columns = (x * y for x, y in zip(a, b, strict=True))
    return ((rows @ sizes) * columns).sum(axis=2)


def _counts(mask: Sequence[np.ndarray]) -> np.ndarray:
    """Number of devices of each node that have a cell: [nodes, rows, columns]."""
    return mask[0].transpose(0, 2, 1) @ mask[1]
