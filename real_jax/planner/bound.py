"""Seconds per iteration that no plan can beat: what a search's result is held against. Pure.

Some things hold of every plan, whatever its timeline (`planner.simulate`):
  area     Devices x seconds of all calls and moves fit into devices x seconds of an iteration.
  clique   Calls of which every two share a device run one after another: those that have more than half of the devices,
           and together with any other call those that leave too few devices for it.
  window   Where the next iteration's first call waits for the last one of this (a trained model's weights), both and all
           that must come between them fit into an iteration: as long as the longest path through the window, its area and
           its cliques say.
  conflict Two calls that follow each other and share a device, the last of which the next iteration need not wait for:
           either it ends before the next iteration's first one begins, and they span a window as well, or it comes after
           that one, and then a longer round of calls is closed.
  turns    Of all calls that share devices, every order in which they can take turns (`planner.cyclic`).
An iteration is at least as long as the largest of these, and the best choice of one option per call makes that largest
one as small as it can be. The minimum over all choices is found exactly, by branch and bound over the models; what an
option is followed by (a reallocation) is taken at its least, so that it bounds from below.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

from real_jax.planner.cyclic import shortest_period
from real_jax.planner.memory import model_shard_bytes
from real_jax.planner.prune import cycles
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import Placement, Workload


@dataclasses.dataclass(frozen=True, order=True)
class Option:
    """A way to run all calls of one model, as far as the bound goes.

    Attributes:
      seconds: of each call, in the order of the model's calls.
      counts: devices of each call.
      moving: seconds of the reallocations in an iteration, at the least.
      area: device-seconds of calls and reallocations.
    """

    seconds: tuple[float, ...]
    counts: tuple[int, ...]
    moving: float
    area: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds per iteration that no plan can beat, and a choice for which nothing rules them out: call -> its seconds and
    devices; empty where none was looked for."""

    seconds: float
    choice: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)


def lower_bound(
    graph: Graph, work: Workload, cluster: Cluster, costs: CostTable, shapes: Mapping[str, Sequence[Placement]]
) -> Bound:
    """The bound under `costs` on plans whose calls have one of `shapes`, wherever they start."""
    problem = _Problem(graph, work, cluster, costs)
    models = [[c.name for c in graph.order if c.model == m] for m in graph.models]
    options = [problem.options(calls, shapes) for calls in models]
    if cluster.shared_cores:
        return Bound(problem.shared(options))
    return _Search(problem, models, options).run()


class _Problem:
    def __init__(self, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable):
        self.graph, self.work, self.cluster, self.costs = graph, work, cluster, costs
        self.host = {c.name: costs[c.name, Placement()].seconds for c in graph.calls if c.kind == "host"}

    def options(self, calls: list[str], shapes: Mapping[str, Sequence[Placement]]) -> list[Option]:
        """The options of one model of which none is better in everything than another."""
        fastest: list[dict[Placement, float]] = []
        for call in calls:
            by_layout: dict[Placement, float] = {}
            for p in shapes[call]:
                seconds = self.costs[call, p].seconds
                by_layout[p.layout] = min(seconds, by_layout.get(p.layout, seconds))
            fastest.append(by_layout)
        found: dict[tuple[int, ...], list[Option]] = {}
        for layouts in itertools.product(*fastest):
            seconds = tuple(known[p] for known, p in zip(fastest, layouts, strict=True))
            counts = tuple(p.count for p in layouts)
            moving, area = self._moves(calls, layouts)
            area += sum(s * n for s, n in zip(seconds, counts, strict=True))
            found.setdefault(counts, []).append(Option(seconds, counts, moving, area))
        return [o for same in found.values() for o in _undominated(same)]

    def _moves(self, calls: list[str], layouts: tuple[Placement, ...]) -> tuple[float, float]:
        """Least seconds and device-seconds of the reallocations in one iteration: none where the meshes may be the same."""
        model = self.graph.call(calls[0]).model
        trains = [p for call, p in zip(calls, layouts, strict=True) if self.graph.call(call).kind == "train"]
        if not trains:
            return 0.0, 0.0
        seconds = area = 0.0
        for other in {p for p in layouts if p != trains[-1]}:
            least = self._least_move(model, trains[-1], other)
            seconds, area = seconds + least, area + least * max(other.count, trains[-1].count)
        return seconds, area

    def _least_move(self, model: str, source: Placement, destination: Placement) -> float:
        """Least seconds of a reallocation: what a device cannot have held is received, all that it gets is written."""
        have, want = (model_shard_bytes(model, self.work, p, self.work.compute_bytes) for p in (source, destination))
        link, memory = self.cluster.within_node, self.cluster.chip.memory_gb_per_s
        return max(0, want - have) / (link.gb_per_s * 1e9) + 2 * want / (memory * 1e9)

    def shared(self, options: list[list[Option]]) -> float:
        """Where devices share cores: a call wants one core per device, at most all of them."""
        cores = self.cluster.shared_cores

        def least(o: Option) -> float:
            return sum(s * min(n, cores) for s, n in zip(o.seconds, o.counts, strict=True)) / cores

        return sum(min(map(least, known)) for known in options) + sum(self.host.values()) / max(cores, 1.0)


def _undominated(options: list[Option]) -> list[Option]:
    """The options, all with the same device counts, to which no other is preferable."""
    kept: list[Option] = []
    for o in sorted(set(options), key=lambda o: (sum(o.seconds) + o.moving, o.area, o)):
        if not any(
            k.area <= o.area and k.moving <= o.moving and all(a <= b for a, b in zip(k.seconds, o.seconds, strict=True))
            for k in kept
        ):
            kept.append(o)
    return kept


@dataclasses.dataclass(frozen=True)
class Window:
    """`first` and `last` run in one iteration with all of `inner` between them, which fit into an iteration.

    Attributes:
      paths: of the calls between them, sets that follow each other.
      closed: whether the next iteration's `first` waits for `last`. Otherwise that holds where the two share a device, but
        for the choice to run `last` later; `others` are rounds of which one is then closed.
    """

    first: str
    last: str
    inner: frozenset[str]
    paths: tuple[frozenset[str], ...]
    closed: bool
    others: tuple[frozenset[str], ...] = ()


@functools.lru_cache(maxsize=256)
def windows(graph: Graph) -> tuple[Window, ...]:
    """All windows of a graph, closed or not."""
    paths: dict[tuple[str, str], list[frozenset[str]]] = {}
    after = {c.name: {e.target for e in graph.edges if e.lag == 0 and e.source == c.name} for c in graph.calls}

    def walk(start: str, at: str, seen: frozenset[str]) -> None:
        paths.setdefault((start, at), []).append(seen)
        for further in after[at]:
            walk(start, further, seen | {further})

    for call in graph.calls:
        walk(call.name, call.name, frozenset((call.name,)))
    late = {(e.source, e.target) for e in graph.edges if e.lag == 1}
    found = []
    for (first, last), ways in paths.items():
        if first == last:
            continue
        between = [way - {first, last} for way in ways]
        others = [
            way | {first, last}
            for source, target in late
            if target == first
            for again, begun in late
            if again == last
            for way in paths.get((begun, source), ())
        ]
        inner = frozenset().union(*between)
        found.append(Window(first, last, inner, tuple(between), (last, first) in late, tuple(others)))
    return tuple(found)


class _Search:
    """Branch and bound over the models: the choice of one option each that makes the largest bound smallest."""

    def __init__(self, problem: _Problem, models: list[list[str]], options: list[list[Option]]):
        self.problem, self.devices = problem, problem.cluster.devices
        # The models with the most to do first: they decide.
        order = sorted(range(len(models)), key=lambda i: -min(sum(o.seconds) for o in options[i]))
        self.models = [models[i] for i in order]
        self.options = [sorted(options[i], key=lambda o: sum(o.seconds) + o.moving) for i in order]
        self.windows = windows(problem.graph)
        self.model = {c.name: c.model for c in problem.graph.calls}
        self.trained = {m for m in problem.graph.models if problem.graph.trains(m)}
        self.cycles = cycles(problem.graph)
        least = {c: (s, 0.0) for c, s in problem.host.items()}
        for calls, known in zip(self.models, self.options, strict=True):
            for i, call in enumerate(calls):
                least[call] = (min(o.seconds[i] for o in known), min(o.seconds[i] * o.counts[i] for o in known))
        self.quickest = {call: seconds for call, (seconds, _) in least.items()}
        self.leanest = {call: area for call, (_, area) in least.items()}
        self.smallest = [min(o.area for o in known) for known in self.options]
        self.best, self.choice = float("inf"), {}

    def run(self) -> Bound:
        self._visit(0, {}, {}, {}, 0.0)
        return Bound(self.best, self.choice)

    def _visit(self, depth: int, seconds: dict, counts: dict, moving: dict, area: float) -> None:
        if depth == len(self.models):
            value = self._bound(depth, seconds, counts, moving, area)
            if value < self.best:
                value = max(value, self._period(seconds, counts, moving))
            if value < self.best:
                self.best, self.choice = value, {call: (seconds[call], counts[call]) for call in seconds}
            return
        calls, children = self.models[depth], []
        for o in self.options[depth]:
            more = (
                seconds | dict(zip(calls, o.seconds, strict=True)),
                counts | dict(zip(calls, o.counts, strict=True)),
                moving | {self.model[calls[0]]: o.moving},
                area + o.area,
            )
            value = self._bound(depth + 1, *more)
            if value < self.best:
                children.append((value, more))
        for value, more in sorted(children, key=lambda child: child[0]):
            if value >= self.best:
                return
            self._visit(depth + 1, *more)

    def _bound(self, depth: int, seconds: dict, counts: dict, moving: dict, area: float) -> float:
        known = self.quickest | seconds
        areas = self.leanest | {c: seconds[c] * n for c, n in counts.items()}
        value = max(
            (area + sum(self.smallest[depth:])) / self.devices,
            self._crowd(known, counts, counts),
            *(sum(known[c] for c in cycle) for cycle in self.cycles),
        )
        for window in self.windows:
            apart = counts.get(window.first, 0) + counts.get(window.last, 0) <= self.devices
            if apart and not window.closed:
                continue
            inside = max(
                max((sum(known[c] for c in path) for path in window.paths), default=0.0),
                sum(areas[c] for c in window.inner) / self.devices,
                self._crowd(known, counts, window.inner),
            )
            length = known[window.first] + inside + known[window.last] + self._moved(window, moving)
            if not window.closed:
                later = max((sum(known[c] for c in round_) for round_ in window.others), default=0.0)
                length = min(length, max(later, known[window.first] + known[window.last]))
            value = max(value, length)
        return value

    def _period(self, seconds: dict, counts: dict, moving: dict) -> float:
        """What the order in which calls that share a device take turns allows; `best` where that is no less."""
        together = [p for p in itertools.combinations(counts, 2) if counts[p[0]] + counts[p[1]] > self.devices]
        delays = {}
        for calls in self.models:
            model = self.model[calls[0]]
            trains = [c for c in calls if self.problem.graph.call(c).kind == "train"]
            if len(trains) == 1 and len(calls) == 2:
                (other,) = (c for c in calls if c != trains[0])
                delays[trains[0], other] = moving[model]
        known = self.quickest | seconds
        one_after_another = 1.01 * (sum(known.values()) + sum(delays.values()))
        return shortest_period(self.problem.graph, known, together, delays, min(self.best, one_after_another))

    def _moved(self, window: Window, moving: dict) -> float:
        """Where a window ends with training a model and begins with its next use, its weights are moved in between."""
        model = self.model[window.last]
        same = window.closed and self.model[window.first] == model and model in self.trained
        return moving.get(model, 0.0) if same else 0.0

    def _crowd(self, known: dict, counts: dict, among) -> float:
        """Seconds of those of the calls `among` of which every two share a device."""
        sized = [(counts[c], known[c]) for c in among if c in counts]
        value = 0.0
        for least in {n for n, _ in sized if 2 * n <= self.devices} | {self.devices // 2 + 1}:
            crowd = sum(s for n, s in sized if n > self.devices - least and n >= least)
            alone = max((s for n, s in sized if least <= n <= self.devices - least), default=0.0)
            value = max(value, crowd + alone)
        # Of any m + 1 calls that each have more than a part m + 1 of the devices, two share one.
        for m in range(2, len(sized)):
            wide = sorted((s for n, s in sized if n * (m + 1) > self.devices), reverse=True)
            if len(wide) > m:
                value = max(value, wide[m - 1] + wide[m])
        return value
