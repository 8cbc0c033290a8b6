"""Plans made by rule: the baselines that a search has to beat, each as it is used in practice."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from real_jax.planner import memory, simulate
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload

MEGATRON_TENSOR = 8  # most devices that a layer is split over

# Call -> its options, which all have one layout.
Layouts = dict[str, list[Placement]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a heuristic goes by."""

    graph: Graph
    work: Workload
    cluster: Cluster
    costs: CostTable

    @property
    def calls(self) -> list[str]:
        return [c.name for c in self.graph.calls if c.kind != "host"]

    def kind(self, call: str) -> str:
        return self.graph.call(call).kind

    def layouts(self, call: str, count: int, first: int = 0) -> list[list[Placement]]:
        """Options of `call` on `count` devices from `first` on, by layout, in a fixed order."""
        found: dict[Placement, list[Placement]] = {}
        for p in self.costs.placements(call):
            if p.count == count:
                found.setdefault(p.layout, []).append(dataclasses.replace(p, first=first))
        return [found[layout] for layout in sorted(found)]


def symmetric(s: Setting) -> ExecutionPlan:
    """The fastest plan in which every call has the same mesh over all devices, so that nothing is ever moved."""
    return _best("symmetric", _uniform(s, s.calls, s.cluster.devices), s)


def megatron(s: Setting) -> ExecutionPlan:
    """All devices for every call: `tensor` as large as the node, the models' heads and Megatron's custom allow (8), the
    same for all; the rest is `data`, and as little `fsdp` as the memory requires, in place of pipeline stages."""
    tensors = [{o[0].tensor for o in s.layouts(c, s.cluster.devices)} for c in s.calls]
    common = set.intersection(*tensors) if tensors else set()
    tensor = max((t for t in common if t <= MEGATRON_TENSOR), default=0)
    options = {c: [o for o in s.layouts(c, s.cluster.devices) if o[0].tensor == tensor] for c in s.calls}
    options = {c: sorted(known, key=lambda o: o[0].fsdp) for c, known in options.items()}
    return _first("megatron", _growing(s, options, lambda p: p.fsdp), s)


def real_node(s: Setting) -> ExecutionPlan:
    """As ReaL's shipped heuristic for one node (its code; the paper's section 8.1 compares with it), for any number of devices:
    generation and frozen language models on all of them, the first trained model and the reward on the first half, the
    second trained model on the second half. Generation is as data-parallel as the memory allows, training is tensor 2."""
    half, options = s.cluster.devices // 2, {}
    trained = [m for m in s.graph.models if s.graph.trains(m)]
    for call in s.calls:
        model, kind = s.graph.call(call).model, s.kind(call)
        whole = kind == "generate" or (model not in trained and s.work.heads[model] == "lm") or half == 0
        if whole or len(trained) < 2:
            layouts = s.layouts(call, s.cluster.devices)
        else:
            layouts = s.layouts(call, half, half if model == trained[1] else 0)
        like = 2 if kind == "train" else 1
        options[call] = sorted(layouts, key=lambda o: (o[0].fsdp, abs(o[0].tensor - like), o[0]))
    return _first("real-node", _growing(s, options, lambda p: p.fsdp * p.tensor), s)


def disaggregated(s: Setting) -> ExecutionPlan:
    """Generation on one half of the devices, all else on the other, in the layouts that are fastest there."""
    half = s.cluster.devices // 2
    generate = [c for c in s.calls if s.kind(c) == "generate"]
    if not generate or not half:
        raise _none("disaggregated", s, "It needs a generation call and at least two devices.")
    others = [c for c in s.calls if c not in generate]
    pairs = itertools.product(_uniform(s, generate, half), _uniform(s, others, half, half))
    return _best("disaggregated", (one | other for one, other in pairs), s)


def colocated_fsdp(s: Setting) -> ExecutionPlan:
    """All devices for every call: training and inference split over as many of them as the batch allows by `fsdp`, the rest
    `tensor`; generation as data-parallel as the memory allows, `tensor` within the node: FSDP trainers with a
    tensor-parallel rollout on the same devices."""
    options = {}
    for call in s.calls:
        layouts = s.layouts(call, s.cluster.devices)
        if s.kind(call) == "generate":
            options[call] = sorted((o for o in layouts if o[0].fsdp == 1), key=lambda o: o[0].tensor)
        else:
            options[call] = sorted(layouts, key=lambda o: (-o[0].fsdp, o[0].tensor))[:1]
    return _first("colocated-fsdp", _growing(s, options, lambda p: p.fsdp * p.tensor), s)


HEURISTICS: dict[str, Callable[[Setting], ExecutionPlan]] = {
    "symmetric": symmetric,
    "megatron": megatron,
    "real-node": real_node,
    "disaggregated": disaggregated,
    "colocated-fsdp": colocated_fsdp,
}


def heuristic(name: str, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> ExecutionPlan:
    """The plan of the heuristic called `name`; UsageError where there is none of that name, or no plan of it fits."""
    if name not in HEURISTICS:
        raise UsageError(f"There is no heuristic {name!r}. Heuristics: {', '.join(HEURISTICS)}.")
    return HEURISTICS[name](Setting(graph, work, cluster, costs))


def _uniform(s: Setting, calls: list[str], count: int, first: int = 0) -> Iterator[Layouts]:
    """One mesh for all of `calls`, each mesh that serves them in turn."""
    by_call = {c: {o[0].layout: o for o in s.layouts(c, count, first)} for c in calls}
    shared = set.intersection(*(set(known) for known in by_call.values())) if by_call else set()
    for layout in sorted(shared):
        yield {c: known[layout] for c, known in by_call.items()}


def _growing(s: Setting, options: dict[str, list[list[Placement]]], parts: Callable[[Placement], int]):
    """For each call the first of its layouts that splits the weights into enough `parts`: ever more of them, first for train
    calls, then for inference up to as many, and last for generation, where gathering weights costs most."""
    if not all(options.values()):
        return
    levels = sorted({parts(o[0]) for known in options.values() for o in known})
    for generate, inference, train in itertools.product(levels, repeat=3):
        if not generate <= inference <= train:
            continue
        wanted = {"generate": generate, "inference": inference, "train": train}
        chosen = {c: next((o for o in known if parts(o[0]) >= wanted[s.kind(c)]), None) for c, known in options.items()}
        if all(chosen.values()):
            yield chosen


def _best(name: str, choices: Iterator[Layouts], s: Setting) -> ExecutionPlan:
    fitting, short = [], None
    for plan, error in (_settle(name, layouts, s) for layouts in choices):
        short = short or error
        if error is None:
            fitting.append((simulate.iteration_seconds(plan, s.graph, s.work, s.cluster, s.costs), plan))
    if not fitting:
        raise _none(name, s, short)
    return min(fitting, key=lambda pair: pair[0])[1]


def _first(name: str, choices: Iterator[Layouts], s: Setting) -> ExecutionPlan:
    short = None
    for plan, error in (_settle(name, layouts, s) for layouts in choices):
        if error is None:
            return plan
        short = error
    raise _none(name, s, short)


def _none(name: str, s: Setting, reason: str | None) -> UsageError:
    reason = reason or f"No mesh over the devices of {s.cluster.name!r} serves every call."
    return UsageError(f"Heuristic {name!r} makes no plan for {s.graph.name!r}. {reason}")


def _settle(name: str, layouts: Layouts, s: Setting) -> tuple[ExecutionPlan, str | None]:
    """Each call with its fastest option that fits beside the resident parameters, else with its leanest; and what is
    short. What is resident depends on the layouts alone."""
    first = ExecutionPlan(s.cluster.name, {call: options[0] for call, options in layouts.items()})
    base, _ = memory.peaks(first, s.graph, s.work, s.costs)
    limit, placements = s.cluster.chip.memory_gib * memory.GIB, {}
    for call, options in layouts.items():
        room = limit - base[options[0].first : options[0].first + options[0].count].max()
        fitting = [p for p in options if s.costs[call, p].work_bytes <= room]
        if fitting:
            placements[call] = min(fitting, key=lambda p: (s.costs[call, p].seconds, p))
        else:
            placements[call] = min(options, key=lambda p: (s.costs[call, p].work_bytes, p))
    plan = ExecutionPlan(s.cluster.name, placements, f"heuristic:{name}")
    return plan, memory.check(plan, s.graph, s.work, s.cluster, s.costs)
