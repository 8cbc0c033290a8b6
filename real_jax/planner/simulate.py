"""The timeline that a plan gives: which call runs when, on which devices, and how long an iteration takes.

Nodes are calls and parameter reallocations. They are dispatched as the runtime's engine dispatches them:
  1. A call is dispatched, in graph order, once the calls that it waits for are dispatched and what it reads from other
     devices is ready; a call that has to wait for that lets later ones of its iteration go ahead.
  2. Each device works through its nodes in order of dispatch. A node starts once the nodes that it depends on have ended
     and all its devices have come to it.
  3. Nothing is dispatched while a host call runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from real_jax.planner.memory import MASTER_BYTES, STATE_BYTES, home, home_call, is_offloaded, model_shard_bytes
from real_jax.reallocation.transfers import plan_transfers, transfer_seconds
from real_jax.spec import arch as arch_lib
from real_jax.spec.arch import Arch, Head
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Call, Edge, Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload, shard_bytes
from real_jax.spec.timeline import Event

# Seconds to move what an edge carries from the source's to the target's placement (None: the host).
DataSeconds = Callable[[Edge, Placement | None, Placement | None], float]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events of some iterations.

    Attributes:
      events: in order of dispatch.
      makespan: end of the last event.
      iteration_seconds: of one iteration in the steady state: (makespan of n iterations - of one) / (n - 1), where
        both leave out what happens once in a run (the first move of a frozen model).
    """

    events: tuple[Event, ...]
    makespan: float
    iteration_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """`busy` has a bit for each device (and one for the host), `cores` is the node's demand, `waits` are indices.

    `once` marks what does not come again in later iterations.
    """

    name: str
    kind: str
    iteration: int
    busy: int
    cores: float
    seconds: float
    waits: tuple[int, ...]
    once: bool = False


@dataclasses.dataclass(slots=True)
class _Step:
    """What is dispatched together: a call with the reallocation before it.

    `after` are steps that must have been dispatched, `crossing` nodes that must have ended, `idle` has a bit for each
    device on which all that was dispatched must have ended.
    """

    iteration: int
    nodes: list[int] = dataclasses.field(default_factory=list)
    after: set[int] = dataclasses.field(default_factory=set)
    crossing: set[int] = dataclasses.field(default_factory=set)
    idle: int = 0
    host: bool = False


def simulate(
    plan: ExecutionPlan,
    graph: Graph,
    work: Workload,
    cluster: Cluster,
    costs: CostTable,
    iterations: int = 3,
    data_seconds: DataSeconds | None = None,
) -> Timeline:
    """The timeline of `iterations` iterations of `graph` under `plan`.

    A reallocation stands before a call whose layout (and type) does not hold the newest weights of its model: a trained
    model's views go stale with each of its train calls, a frozen model moves once, in iteration 0. It occupies both
    meshes. A moving average is brought up to date before its first call after the model that it follows has trained, by
    moving that one's float32 weights. An offloaded model is read from host memory before each of its calls, once its devices are idle. Data transfers are taken as free unless
    `data_seconds` prices them; they then delay their target without occupying a device.

    Where devices share `cluster.shared_cores` cores, a node wants as many cores as it has devices (a host call one), at
    most all; while the running nodes together want more than there are, all are slowed by the same factor.

    Raises UsageError where a cost is missing; a host call's cost is looked up under `Placement()`.
    """
    builder = _Builder(plan, graph, work, cluster, costs, data_seconds).build(iterations)
    spans = _run(builder.nodes, builder.steps, cluster.shared_cores)
    events = tuple(
        Event(n.name, n.kind, n.iteration, _bits(n.busy, cluster.devices), start, end)
        for n, (start, end) in zip(builder.nodes, spans, strict=True)
    )
    return Timeline(events, _makespan(spans), _steady(builder, spans, iterations))


def iteration_seconds(
    plan: ExecutionPlan, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable, iterations: int = 3
) -> float:
    """`simulate(...).iteration_seconds` without the events: what a search calls thousands of times."""
    return _steady(_Builder(plan, graph, work, cluster, costs, None).build(iterations), None, iterations)


@functools.lru_cache(maxsize=65536)
def reallocation_seconds(
    arch: Arch, head: Head, source: Placement, destination: Placement, itemsize: int, cluster: Cluster
) -> float:
    """Seconds to bring a model's weights from layout `source` to layout `destination` as `itemsize`-byte numbers.

    What moves goes over the links; what arrives is a copy of its own, so each device also reads and writes its part once.
    """
    table = arch_lib.weights(arch, head)
    transfers = plan_transfers(table, source, destination, itemsize, cluster.devices_per_node)
    copied = 2 * shard_bytes(table, destination, itemsize) * (destination.count if cluster.shared_cores > 0 else 1)
    return transfer_seconds(transfers, cluster) + copied / (cluster.chip.memory_gb_per_s * 1e9)


class _Builder:
    """Lays out the nodes of a plan, what each waits for, and the steps in which they are dispatched."""

    def __init__(self, plan, graph, work, cluster, costs, data_seconds):
        self.plan, self.graph, self.work, self.cluster, self.costs = plan, graph, work, cluster, costs
        self.data_seconds = data_seconds
        self.nodes: list[_Node] = []
        self.steps: list[_Step] = []
        self.step_of: list[int] = []  # node -> its step
        self.ran: dict[tuple[str, int], int] = {}  # (call, iteration) -> its node
        self.offloaded = {m for m in graph.models if is_offloaded(m, graph, plan)}
        self.newest = {m: home(m, graph, plan) for m in graph.models}  # the layout that the newest weights come from
        self.behind: dict[str, int] = {}  # moving average -> the newest training of the model that it follows
        # For each model, the (layout, bytes of a number) that hold its newest weights -> the node that brought them.
        self.fresh: dict[str, dict[tuple[Placement, int], int | None]] = {
            m: {(self.newest[m], MASTER_BYTES if graph.changes(m) else work.compute_bytes): None} for m in graph.models
        }

    def build(self, iterations: int) -> "_Builder":
        edges = _edges(self.graph, self.data_seconds is None)
        for iteration in range(iterations):
            for call, mine in edges:
                self.steps.append(_Step(iteration, host=call.kind == "host"))
                self._add_call(call, iteration, [e for e in mine if e.lag <= iteration])
        return self

    def _add_call(self, call: Call, iteration: int, edges: list[Edge]) -> None:
        step, host = self.steps[-1], call.kind == "host"
        placement = Placement() if host else self.plan[call.name]
        seconds = self.costs[call.name, placement].seconds
        waits: list[int | None] = [self._arrival(edge, call, iteration) for edge in edges]
        if host:
            busy, devices = 1 << self.cluster.devices, 1
        else:
            busy, devices = _mask(placement), placement.count
            waits.append(self._weights(call, placement, iteration))
        index = self._add(call.name, call.kind, iteration, busy, devices, seconds, waits)
        step.after = {self.step_of[w] for i in step.nodes for w in self.nodes[i].waits} - {len(self.steps) - 1}
        self.ran[call.name, iteration] = index
        if call.kind == "train":
            self.newest[call.model] = placement.layout
            self.fresh[call.model] = {(placement.layout, MASTER_BYTES): index}
            self.behind |= {a.target: index for a in self.graph.averages if a.source == call.model}

    def _weights(self, call: Call, placement: Placement, iteration: int) -> int | None:
        """The node after which `placement` holds the newest weights; adds one where it does not hold them yet."""
        model, itemsize, layout = call.model, self.work.compute_bytes, placement.layout
        name = f"{model} to {call.name}"
        if model in self.offloaded:
            volume = model_shard_bytes(model, self.work, layout, itemsize)
            volume *= layout.count if self.cluster.shared_cores > 0 else 1
            link = self.cluster.host_link
            seconds = volume / (link.gb_per_s * 1e9) + link.latency_us * 1e-6
            self.steps[-1].idle = _mask(layout)
            return self._add(name, "reallocation", iteration, _mask(layout), layout.count, seconds, [])
        if model in self.behind:
            self._catch_up(model, iteration)
        fresh, trains = self.fresh[model], call.kind == "train"
        key = (layout, MASTER_BYTES if trains else itemsize)
        if key not in fresh:
            source = self.newest[model]
            made = next(node for (kept, _), node in fresh.items() if kept == source)
            if made is not None and not source.same_devices(layout):
                self.steps[-1].crossing.add(made)
            # Where a model trains in two layouts, its optimizer state moves along.
            archs, heads = self.work.archs, self.work.heads
            moved = STATE_BYTES if trains else itemsize
            seconds = reallocation_seconds(archs[model], heads[model], source, layout, moved, self.cluster)
            busy, once = _mask(source) | _mask(layout), not self.graph.changes(model)
            fresh[key] = self._add(name, "reallocation", iteration, busy, busy.bit_count(), seconds, [made], once)
        return fresh[key]

    def _catch_up(self, model: str, iteration: int) -> None:
        """Adds the node that brings a moving average up to date; it is in its home layout then, and nowhere else."""
        followed, made, own = self.graph.average(model).source, self.behind.pop(model), self.newest[model]
        source = self.newest[followed]
        if not source.same_devices(own):
            self.steps[-1].crossing.add(made)
        arch, head = self.work.archs[model], self.work.heads[model]
        seconds = reallocation_seconds(arch, head, source, own, MASTER_BYTES, self.cluster)
        busy, name = _mask(source) | _mask(own), f"{followed} to {home_call(model, self.graph)}"
        node = self._add(name, "reallocation", iteration, busy, busy.bit_count(), seconds, [made])
        self.fresh[model] = {(own, MASTER_BYTES): node}

    def _arrival(self, edge: Edge, call: Call, iteration: int) -> int:
        """The node after which the data of `edge` are where its target runs."""
        source = self.ran[edge.source, iteration - edge.lag]
        here, there = (self.plan.placements.get(c) for c in (edge.target, edge.source))
        if edge.key in call.reads and there is not None and (here is None or not here.same_devices(there)):
            self.steps[-1].crossing.add(source)
        seconds = self.data_seconds(edge, there, here) if self.data_seconds else 0.0
        if seconds <= 0:
            return source
        return self._add(f"{edge.key} to {edge.target}", "data", iteration, 0, 0, seconds, [source])

    def _add(self, name, kind, iteration, busy, devices, seconds, waits: Iterable[int | None], once=False) -> int:
        before = tuple(dict.fromkeys(w for w in waits if w is not None))
        cores = min(devices, self.cluster.shared_cores)
        self.nodes.append(_Node(name, kind, iteration, busy, cores, seconds, before, once))
        self.steps[-1].nodes.append(len(self.nodes) - 1)
        self.step_of.append(len(self.steps) - 1)
        return len(self.nodes) - 1


@functools.lru_cache(maxsize=256)
def _edges(graph: Graph, alike: bool) -> tuple[tuple[Call, tuple[Edge, ...]], ...]:
    """The calls in order, each with the edges that lead to it; with `alike` one of those that differ in their key alone."""

    def of(call: Call) -> tuple[Edge, ...]:
        mine = [e for e in graph.edges if e.target == call.name]
        if alike:
            mine = list({(e.source, e.lag, e.key in call.reads): e for e in mine}.values())
        return tuple(mine)

    return tuple((call, of(call)) for call in graph.order)


def _mask(placement: Placement) -> int:
    return ((1 << placement.count) - 1) << placement.first


def _bits(mask: int, devices: int) -> tuple[int, ...]:
    return tuple(d for d in range(devices) if mask >> d & 1)


def _makespan(spans: list[tuple[float, float]]) -> float:
    return max((end for _, end in spans), default=0.0)


def _steady(builder: _Builder, spans: list[tuple[float, float]] | None, iterations: int) -> float:
    """Seconds per iteration of what `builder` laid out; `spans` are those of its nodes where they are known."""
    nodes, steps, shared_cores = builder.nodes, builder.steps, builder.cluster.shared_cores
    if iterations < 2:
        return _makespan(spans or _run(nodes, steps, shared_cores))
    if any(n.once for n in nodes):
        # Left in, a long first move would stretch the first iteration and so make the others look short.
        nodes, spans = [dataclasses.replace(n, seconds=0.0) if n.once else n for n in nodes], None
    several = spans or _run(nodes, steps, shared_cores)
    # Later iterations may slow the first one, so the run of one iteration is its own.
    first = [s for s in steps if s.iteration == 0]
    one = _run(nodes[: first[-1].nodes[-1] + 1], first, shared_cores)
    return (_makespan(several) - _makespan(one)) / (iterations - 1)


def _run(nodes: list[_Node], steps: list[_Step], shared_cores: float) -> list[tuple[float, float]]:
    """Start and end of each node, by events: time jumps from one end of a node to the next.

    In between, all running nodes progress at rate min(1, shared_cores / sum of their cores), or 1 without shared cores.
    """
    start, end, left = [0.0] * len(nodes), [-1.0] * len(nodes), [n.seconds for n in nodes]
    undispatched, dispatched = list(range(len(steps))), set()
    queue: list[int] = []  # dispatched nodes that have not started, in order
    running: list[int] = []
    now = 0.0
    while undispatched or queue or running:
        while (k := _next_step(steps, undispatched, dispatched, nodes, end)) is not None:
            undispatched.remove(k)
            dispatched.add(k)
            queue += steps[k].nodes
        running += _start(queue, running, nodes, end, now, start)
        wanted = sum(nodes[i].cores for i in running)
        rate = min(1.0, shared_cores / wanted) if wanted else 1.0
        step = min(left[i] for i in running)
        now += step / rate
        still = []
        for i in running:
            left[i] -= step
            # Nodes that end together differ by rounding only; ending them apart would leave slivers behind.
            if left[i] > 1e-12 * nodes[i].seconds:
                still.append(i)
            else:
                end[i] = now
        running = still
    return list(zip(start, end, strict=True))


def _next_step(steps, undispatched: list[int], dispatched: set[int], nodes, end: list[float]) -> int | None:
    """The first step, in graph order of the current iteration, that can be dispatched now; None where none can."""
    if not undispatched:
        return None
    if any(steps[k].host and end[steps[k].nodes[-1]] < 0 for k in dispatched):
        return None
    iteration = steps[undispatched[0]].iteration
    for k in undispatched:
        if steps[k].iteration > iteration:
            return None
        ready = steps[k].after <= dispatched and all(end[i] >= 0 for i in steps[k].crossing)
        if ready and _idle(steps, k, dispatched, nodes, end):
            return k
    return None


def _idle(steps, k: int, dispatched: set[int], nodes, end: list[float]) -> bool:
    """Whether nothing that was dispatched still needs a device that step `k` wants idle."""
    wanted = steps[k].idle
    return not wanted or not any(nodes[i].busy & wanted and end[i] < 0 for j in dispatched for i in steps[j].nodes)


def _start(queue: list[int], running: list[int], nodes, end: list[float], now: float, start: list[float]) -> list[int]:
    """Takes from `queue` what can start now: nodes whose waits have ended and whose devices have come to them."""
    claimed, started = 0, []
    for i in running:
        claimed |= nodes[i].busy
    for i in list(queue):
        node = nodes[i]
        if not node.busy & claimed and all(end[w] >= 0 for w in node.waits):
            queue.remove(i)
            start[i] = now
            started.append(i)
        claimed |= node.busy
    return started
