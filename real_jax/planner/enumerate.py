"""All placements that a call may have on a cluster: which devices, how they form a mesh, how the batch is cut."""

import dataclasses
from collections.abc import Iterator

from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import Placement, Workload, placement_error


def slice_sizes(cluster: Cluster) -> list[int]:
    """Device counts of a mesh: powers of two inside a node; one node, powers of two of nodes, and all nodes."""
    sizes, size = [], 1
    while size < cluster.devices_per_node:
        sizes.append(size)
        size *= 2
    nodes = {1 << i for i in range(cluster.nodes.bit_length()) if 1 << i <= cluster.nodes} | {cluster.nodes}
    return sizes + [cluster.devices_per_node * n for n in sorted(nodes)]


def slice_starts(count: int, cluster: Cluster) -> list[int]:
    """First devices of the aligned slices of `count` devices, none of which crosses a node without need.

    Slices of a part of a node are taken from the first node of each half of the cluster, of each quarter, and so on to
    eighths: any node is as good as another, and no plan needs more of them apart.
    """
    per_node = cluster.devices_per_node
    if count >= per_node:
        return list(range(0, cluster.devices - count + 1, count))
    step = max(1, cluster.nodes // 8)

    def inside(first: int) -> bool:
        node = first // per_node
        return node % step == 0 and node == (first + count - 1) // per_node

    return [first for first in range(0, cluster.devices, count) if inside(first)]


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
            if tensor > cluster.devices_per_node:  # sums of activations would cross nodes in every layer
                continue
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

    Slices are aligned power-of-two parts of a node, or of the nodes, or all nodes; `tensor` stays within a node; meshes are all products data x fsdp x
    tensor; micro-batches are powers of two up to `max_micro_batches` (1 for generate calls, which decode the whole
    batch at once); train calls come with and without remat, the only call of a frozen model with and without offload.
    """
    options = shapes(call, graph, work, cluster, max_micro_batches=max_micro_batches)
    if graph.call(call).kind == "host":
        return options
    return sorted(p for shape in options for p in moved(shape, cluster, may_offload(call, graph)))


def moved(shape: Placement, cluster: Cluster, offload: bool = False) -> list[Placement]:
    """`shape` on every aligned slice of its size: the placements that cost the same as it; with `offload` also those
    whose weights wait in host memory."""
    found = [dataclasses.replace(shape, first=first) for first in slice_starts(shape.count, cluster)]
    return found + [dataclasses.replace(p, offload=True) for p in found] * offload


def may_offload(call: str, graph: Graph) -> bool:
    """Whether `call` may be placed with `offload`: it is the only one of a frozen model."""
    model = graph.call(call).model
    return bool(model) and not graph.changes(model) and sum(c.model == model for c in graph.calls) == 1


def _products(count: int) -> Iterator[tuple[int, int, int]]:
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    for tensor in divisors:
        for fsdp in (d for d in divisors if (count // tensor) % d == 0):
            yield count // tensor // fsdp, fsdp, tensor
