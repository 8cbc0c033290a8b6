"""Plans made by rule: one layout on all devices for every call. The baselines that a search has to beat."""

from collections.abc import Callable

from real_jax.planner import memory, simulate
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload


def symmetric(graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> ExecutionPlan:
    """The fastest plan in which every call has the same mesh over all devices, so that nothing is ever moved.

    Each call has the micro-batches (and remat) with which it is fastest within the memory. Raises UsageError where no
    such plan fits.
    """
    return _best_uniform("symmetric", _full_layouts(graph, cluster, costs), graph, work, cluster, costs)


def data_parallel(graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> ExecutionPlan:
    """Every call on all devices, each with a whole copy of the parameters. Raises UsageError where that does not fit."""
    layouts = {p: o for p, o in _full_layouts(graph, cluster, costs).items() if p.data == cluster.devices}
    return _best_uniform("data-parallel", layouts, graph, work, cluster, costs)


def tensor_parallel(graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> ExecutionPlan:
    """Every call on all devices, split by the largest `tensor` within a node that all models allow; the rest is data.

    Raises UsageError where that does not fit.
    """
    layouts = {
        p: options
        for p, options in _full_layouts(graph, cluster, costs).items()
        if p.fsdp == 1 and cluster.devices_per_node % p.tensor == 0
    }
    largest = max((p.tensor for p in layouts), default=0)
    layouts = {p: options for p, options in layouts.items() if p.tensor == largest}
    return _best_uniform("tensor-parallel", layouts, graph, work, cluster, costs)


HEURISTICS: dict[str, Callable[[Graph, Workload, Cluster, CostTable], ExecutionPlan]] = {
    "symmetric": symmetric,
    "data-parallel": data_parallel,
    "tensor-parallel": tensor_parallel,
}


def heuristic(name: str, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> ExecutionPlan:
    """The plan of the heuristic called `name`; UsageError where there is none of that name, or it makes no plan."""
    if name not in HEURISTICS:
        raise UsageError(f"There is no heuristic {name!r}. Heuristics: {', '.join(HEURISTICS)}.")
    return HEURISTICS[name](graph, work, cluster, costs)


def _calls(graph: Graph) -> list[str]:
    return [c.name for c in graph.calls if c.kind != "host"]


# Layout over all devices -> call -> its placements with that layout.
_Uniform = dict[Placement, dict[str, list[Placement]]]


def _full_layouts(graph: Graph, cluster: Cluster, costs: CostTable) -> _Uniform:
    """Layouts over all devices in which the cost of every call is known, in a fixed order."""
    found: _Uniform = {}
    calls = _calls(graph)
    for call in calls:
        for p in costs.placements(call):
            if p.count == cluster.devices and not p.offload:
                found.setdefault(p.layout, {}).setdefault(call, []).append(p)
    return {layout: options for layout, options in sorted(found.items()) if len(options) == len(calls)}


def _best_uniform(name: str, layouts: _Uniform, graph, work, cluster, costs) -> ExecutionPlan:
    best, best_seconds = None, float("inf")
    short = (float("inf"), f"No mesh over all {cluster.devices} devices of {cluster.name!r} serves every call.")
    for options in layouts.values():
        plan = _uniform(name, options, graph, work, cluster, costs)
        error = memory.check(plan, graph, work, cluster, costs)
        if error:
            base, top = memory.peaks(plan, graph, work, costs)
            short = min(short, (float((base + top).max()), error))  # what the leanest mesh lacks
            continue
        seconds = simulate.iteration_seconds(plan, graph, work, cluster, costs)
        if seconds < best_seconds:
            best, best_seconds = plan, seconds
    if best is None:
        raise UsageError(f"Heuristic {name!r} makes no plan for {graph.name!r}. {short[1]}")
    return best


def _uniform(name: str, options: dict[str, list[Placement]], graph, work, cluster, costs) -> ExecutionPlan:
    """Each call with its fastest option that fits beside the resident parameters, else with its leanest.

    `options` all have one layout, so what is resident does not depend on which of them are chosen.
    """
    first = ExecutionPlan(cluster.name, {call: p[0] for call, p in options.items()})
    room = cluster.chip.memory_gib * memory.GIB - memory.peaks(first, graph, work, costs)[0].max()
    placements = {}
    for call, candidates in options.items():
        fitting = [p for p in candidates if costs[call, p].work_bytes <= room]
        if fitting:
            placements[call] = min(fitting, key=lambda p: (costs[call, p].seconds, p))
        else:
            placements[call] = min(candidates, key=lambda p: (costs[call, p].work_bytes, p))
    return ExecutionPlan(cluster.name, placements, f"heuristic:{name}")
