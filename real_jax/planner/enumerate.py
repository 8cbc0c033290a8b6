"""All placements that a call may have on a cluster: which devices, how they form a mesh, how the batch is cut."""

import dataclasses
from collections.abc import Iterator

from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import Placement, Workload, placement_error


def slice_sizes(cluster: Cluster) -> list[int]:
    """Device counts of a mesh: powers of two inside a node, then one node and every number of whole nodes."""
    inside, size = [], 1
    while size < cluster.devices_per_node:
        inside.append(size)
        size *= 2
    return inside + [cluster.devices_per_node * n for n in range(1, cluster.nodes + 1)]


def slice_starts(count: int, cluster: Cluster) -> list[int]:
    """First devices of the aligned slices of `count` devices, none of which crosses a node without need."""
    per_node = cluster.devices_per_node
    if count >= per_node:
        return list(range(0, cluster.devices - count + 1, per_node))
    return [f for f in range(0, cluster.devices, count) if f // per_node == (f + count - 1) // per_node]


def shapes(call: str, graph: Graph, work: Workload, cluster: Cluster, *, max_micro_batches: int = 8) -> list[Placement]:
    """The placements of `call` that differ in more than their first device; `first` is 0 in all of them.

    An aligned slice crosses a node boundary only where it consists of whole nodes, so a placement costs the same
    wherever it starts, and these are all that need costing. A host call has the one placement `Placement()`.
    """
    kind = graph.call(call).kind
    if kind == "host":
        return [Placement()]
    cuts = [1 << i for i in range(max_micro_batches.bit_length())] if kind != "generate" else [1]
    remats = (False, True) if kind == "train" else (False,)
    found = []
    for count in slice_sizes(cluster):
        for data, fsdp, tensor in _products(count):
            # Micro-batches and remat change nothing about whether the weights can be laid out: ask about that once.
            plain = Placement(0, data, fsdp, tensor)
            if placement_error(call, plain, graph, work, cluster):
                continue
            for micro_batches in cuts:
                option = dataclasses.replace(plain, micro_batches=micro_batches)
                if not placement_error(call, option, graph, work, cluster):
                    found += [dataclasses.replace(option, remat=remat) for remat in remats]
    return sorted(found)


def placements(
    call: str, graph: Graph, work: Workload, cluster: Cluster, *, max_micro_batches: int = 8
) -> list[Placement]:
    """Every placement that `spec.plan.placement_error` accepts for `call`, in a fixed order.

    Slices are aligned power-of-two parts of a node or consecutive whole nodes; meshes are all products data x fsdp x
    tensor; micro-batches are powers of two up to `max_micro_batches` (1 for generate calls, which decode the whole
    batch at once); train calls come with and without remat.
    """
    options = shapes(call, graph, work, cluster, max_micro_batches=max_micro_batches)
    if graph.call(call).kind == "host":
        return options
    return sorted(p for shape in options for p in moved(shape, cluster))


def moved(shape: Placement, cluster: Cluster) -> list[Placement]:
    """`shape` on every aligned slice of its size: the placements that cost the same as it."""
    return [dataclasses.replace(shape, first=first) for first in slice_starts(shape.count, cluster)]


def _products(count: int) -> Iterator[tuple[int, int, int]]:
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    for tensor in divisors:
        for fsdp in (d for d in divisors if (count // tensor) % d == 0):
            yield count // tensor // fsdp, fsdp, tensor
