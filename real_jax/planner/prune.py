"""Which placements are worth a compile: those that an optimistic estimate cannot rule out.

Every number here is below what a compiled program will be found to take: full rates, nothing exchanged but weights,
everything overlapped. A placement that even so makes an iteration longer than a plan that is known cannot be in the
best plan, and what does not fit the memory without activations does not fit with them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from real_jax.planner import memory
from real_jax.spec.arch import forward_flops
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.hardware import Cluster, Curve, Link
from real_jax.spec.plan import Placement, Workload

Options = Mapping[str, Sequence[Placement]]

# Passes over the float32 numbers of a weight in an optimizer step: weight, gradient and two moments are read, three of
# them written.
_UPDATE_PASSES = 7


# Kernels of a block that no compiler can do without: four products of attention, three of the network, two norms.
_BLOCK_KERNELS = 9


def _best(curve: Curve) -> float:
    return max((point.share for point in curve), default=1.0)


def _over(link: Link, volume: float) -> float:
    return volume / (link.gb_per_s * 1e9 * _best(link.reach))


def least_seconds(call: Call, work: Workload, placement: Placement, cluster: Cluster) -> float:
    """Seconds that `call` takes at the least."""
    p, chip = placement, cluster.chip
    slow = max(1.0, p.count / cluster.shared_cores) if cluster.shared_cores else 1.0
    matrix = chip.matrix_tflops * 1e12 * _best(chip.matrix_reach) / slow
    traffic = chip.memory_gb_per_s * 1e9 * _best(chip.memory_reach) / slow
    arch, head = work.archs[call.model], work.heads[call.model]
    passes = {"generate": 1, "inference": 1, "train": 4 if p.remat else 3}[call.kind]
    flops = passes * forward_flops(arch, work.batch * work.rows, work.length, head)
    shard = memory.model_shard_bytes(call.model, work, p, work.compute_bytes)
    # Times that a device reads its part of the weights (those of its whole fsdp group), and that it runs all blocks.
    steps = work.minibatches.get(call.name, 1) * p.micro_batches
    reads = {"generate": work.response_length, "inference": p.micro_batches, "train": 2 * steps}[call.kind]
    compute = max(flops / p.count / matrix, reads * shard * p.fsdp / traffic)
    if call.kind == "train":
        state = memory.model_shard_bytes(call.model, work, p, memory.MASTER_BYTES)
        compute += work.minibatches.get(call.name, 1) * _UPDATE_PASSES * state / traffic
    exchange = reads * _gather_seconds(shard, p, cluster) + _sum_seconds(call, work, p, cluster, reads)
    starts = 0.0 if cluster.shared_cores else reads * arch.layers * _BLOCK_KERNELS * chip.step_us * 1e-6
    return max(compute, exchange * slow + (1 - chip.overlap) * compute) + starts


def _gather_seconds(shard: int, p: Placement, cluster: Cluster) -> float:
    """Least time to gather weights over `fsdp`: over the links between nodes what other nodes hold, else within one."""
    near = max(1, min(p.fsdp, cluster.devices_per_node // p.tensor))
    far = p.fsdp // near
    if far > 1:
        return _over(cluster.between_nodes, shard * p.fsdp * (far - 1) / far / near)
    return _over(cluster.within_node, shard * (near - 1))


def _sum_seconds(call: Call, work: Workload, p: Placement, cluster: Cluster, reads: int) -> float:
    """Least time to sum activations over `tensor`: twice in a block's forward pass, twice in its backward pass."""
    if p.tensor == 1:
        return 0.0
    arch, train = work.archs[call.model], call.kind == "train"
    link = cluster.within_node if p.tensor <= cluster.devices_per_node else cluster.between_nodes
    tokens = work.batch * work.rows * work.length / p.batch_split
    sent = 2 * (p.tensor - 1) / p.tensor * tokens * arch.d_model * work.compute_bytes
    # Where devices share cores, a small group among few devices meets faster than the link's latency says.
    latency = 0.0 if cluster.shared_cores else link.latency_us * 1e-6
    return arch.layers * (2 * (2 if train else 1) * _over(link, sent) + 2 * reads * latency)


def least_costs(graph: Graph, work: Workload, cluster: Cluster, options: Options) -> CostTable:
    """Optimistic costs of all `options`."""
    table = CostTable()
    for call in graph.calls:
        if call.kind == "host":
            table.add(call.name, Placement(), Cost(0.0, 0, "analytic"))
            continue
        for p in options[call.name]:
            table.add(
                call.name, p, Cost(least_seconds(call, work, p, cluster), _least_bytes(call, work, p), "analytic")
            )
    return table


def _least_bytes(call: Call, work: Workload, p: Placement) -> int:
    """Working bytes of a device at the least: gradients and what the backward pass needs of each block, or keys and
    values."""
    arch = work.archs[call.model]
    tokens = work.step_batch(call.name) * work.rows * work.length // (p.batch_split * p.micro_batches)
    if call.kind == "generate":
        heads = arch.kv_heads // (p.tensor if arch.kv_heads % p.tensor == 0 else 1)
        return 2 * tokens * arch.layers * heads * arch.head_dim * work.compute_bytes
    if call.kind == "inference":
        return 0
    # The residual stream alone; without remat also queries, and both inputs of the gated product.
    kept = arch.d_model + (0 if p.remat else (arch.heads * arch.head_dim + 2 * arch.d_ff) // p.tensor)
    gradients = memory.model_shard_bytes(call.model, work, p, memory.MASTER_BYTES)
    return gradients + tokens * arch.layers * kept * work.compute_bytes


@functools.lru_cache(maxsize=256)
def cycles(graph: Graph) -> tuple[frozenset[str], ...]:
    """Sets of calls of which no two can overlap and which no other iteration can overtake: an iteration lasts at least as
    long as all calls of any of them together. They are the paths from a call to one that the next iteration's waits for.
    """
    after: dict[str, set[str]] = {c.name: set() for c in graph.calls}
    for edge in graph.edges:
        if edge.lag == 0 and edge.source != edge.target:
            after[edge.source].add(edge.target)

    def paths(at: str, end: str) -> Iterable[frozenset[str]]:
        if at == end:
            yield frozenset((at,))
        for further in after[at]:
            for path in paths(further, end):
                yield path | {at}

    found = {path for e in graph.edges if e.lag == 1 for path in paths(e.target, e.source)}
    found |= {frozenset((c.name,)) for c in graph.calls}
    return tuple(sorted((p for p in found if not any(p < other for other in found)), key=sorted))


def fitting(graph: Graph, work: Workload, cluster: Cluster, options: Options) -> dict[str, list[Placement]]:
    """The placements that fit the memory, as far as can be told before a compile."""
    least, limit = least_costs(graph, work, cluster, options), cluster.chip.memory_gib * memory.GIB
    return {
        call: [p for p in known if _is_host(graph, call) or memory.least_bytes(call, p, graph, work, least) <= limit]
        for call, known in options.items()
    }


def promising(
    graph: Graph, work: Workload, cluster: Cluster, options: Options, seconds: float
) -> dict[str, list[Placement]]:
    """The placements that a plan may have whose iterations are shorter than `seconds`."""
    least = least_costs(graph, work, cluster, options)
    quickest = {c: min((least[c, p].seconds for p in known), default=0.0) for c, known in options.items()}
    smallest = {
        c: min((least[c, p].seconds * p.count for p in known), default=0.0) if not _is_host(graph, c) else 0.0
        for c, known in options.items()
    }
    whole = sum(smallest.values())

    def fits(call: str, p: Placement) -> bool:
        own = least[call, p].seconds
        for cycle in cycles(graph):
            if call in cycle and own + sum(quickest[c] for c in cycle if c != call) > seconds:
                return False
        return _is_host(graph, call) or own * p.count + whole - smallest[call] <= seconds * cluster.devices

    return {call: [p for p in known if fits(call, p)] for call, known in options.items()}


def first_guess(graph: Graph, work: Workload, cluster: Cluster, options: Options, each: int = 2) -> Options:
    """For each call the few placements over all devices, one a mesh, that look fastest: they are costed first, and the
    best plan of them tells which others can be left out."""
    least = least_costs(graph, work, cluster, options)
    most = {c: max((p.count for p in known), default=0) for c, known in options.items()}
    guess = {}
    for call, known in options.items():
        meshes: dict[Placement, list[Placement]] = {}
        for p in sorted(known, key=lambda p: (least[call, p].seconds, -p.remat, -p.micro_batches, p)):
            if p.count == most[call]:
                meshes.setdefault(dataclasses.replace(p, micro_batches=1, remat=False), []).append(p)
        guess[call] = [p for ways in list(meshes.values())[:each] for p in ways]
    return guess


def _is_host(graph: Graph, call: str) -> bool:
    return graph.call(call).kind == "host"
