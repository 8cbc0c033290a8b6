"""Seconds per iteration that no plan can beat: what a search's result is held against. Pure.

Three things hold of every plan, whatever its timeline (`planner.simulate`):
  cycle   The calls on a cycle of the graph run one after another, and the next iteration's round waits for the last one.
  area    Devices x seconds of all calls and moves fit into devices x seconds of an iteration.
  clique  Calls of which every two share a device run one after another: those that have more than half of the devices,
          and together with any other call those that leave too few devices for it.
An iteration is at least as long as the largest of these, and the best choice of one option per call makes that largest
one as small as it can be. The minimum over all choices is found exactly, by branch and bound over the calls; what an
option is followed by (a reallocation, on which devices) is left out or taken at its least, so that it bounds from below.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

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


def lower_bound(
    graph: Graph, work: Workload, cluster: Cluster, costs: CostTable, shapes: Mapping[str, Sequence[Placement]]
) -> float:
    """Seconds per iteration under `costs` that no plan can beat whose calls have one of `shapes`, wherever they start."""
    problem = _Problem(graph, work, cluster, costs)
    models = [[c.name for c in graph.order if c.model == m] for m in graph.models]
    options = [problem.options(calls, shapes) for calls in models]
    if cluster.shared_cores:
        return problem.shared(options)
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


class _Search:
    """Branch and bound over the models: the choice of one option each that makes the largest bound smallest."""

    def __init__(self, problem: _Problem, models: list[list[str]], options: list[list[Option]]):
        self.problem, self.devices = problem, problem.cluster.devices
        # The models with the most to do first: they decide.
        order = sorted(range(len(models)), key=lambda i: -min(sum(o.seconds) for o in options[i]))
        self.models = [models[i] for i in order]
        self.options = [sorted(options[i], key=lambda o: sum(o.seconds) + o.moving) for i in order]
        names = [call for calls in self.models for call in calls]
        # A cycle's move: where a trained model has a second layout, its weights come from training before they are used.
        self.cycles = [frozenset(c for c in cycle) for cycle in cycles(problem.graph)]
        self.trains = {c for c in names if problem.graph.call(c).kind == "train"}
        self.quickest = {
            call: min(o.seconds[i] for o in known)
            for calls, known in zip(self.models, self.options, strict=True)
            for i, call in enumerate(calls)
        } | problem.host
        self.smallest = [min(o.area for o in known) for known in self.options]
        self.best = float("inf")

    def run(self) -> float:
        self._visit(0, {}, {}, {}, 0.0)
        return self.best

    def _visit(self, depth: int, seconds: dict, counts: dict, moving: dict, area: float) -> None:
        value = self._bound(depth, seconds, counts, moving, area)
        if value >= self.best:
            return
        if depth == len(self.models):
            self.best = value
            return
        calls = self.models[depth]
        children = []
        for o in self.options[depth]:
            more = (
                seconds | dict(zip(calls, o.seconds, strict=True)),
                counts | dict(zip(calls, o.counts, strict=True)),
                moving | dict.fromkeys(calls, o.moving),
                area + o.area,
            )
            children.append((self._bound(depth + 1, *more), more))
        for value, more in sorted(children, key=lambda child: child[0]):
            if value >= self.best:
                return
            self._visit(depth + 1, *more)

    def _bound(self, depth: int, seconds: dict, counts: dict, moving: dict, area: float) -> float:
        whole = area + sum(self.smallest[depth:])
        value = whole / self.devices
        known = self.quickest | seconds
        for cycle in self.cycles:
            length = sum(known[c] for c in cycle)
            # Weights that the cycle's own train call has changed are moved before its other call of that model.
            for train in self.trains & cycle & moving.keys():
                model = self.problem.graph.call(train).model
                if any(c != train and self._model(c) == model for c in cycle):
                    length += moving[train]
            value = max(value, length)
        for least in {n for n in counts.values() if 2 * n <= self.devices} | {self.devices // 2 + 1}:
            crowd = [seconds[c] for c, n in counts.items() if n > self.devices - least and n >= least]
            alone = [seconds[c] for c, n in counts.items() if least <= n <= self.devices - least]
            value = max(value, sum(crowd) + max(alone, default=0.0))
        return value

    def _model(self, call: str) -> str:
        return self.problem.graph.call(call).model
