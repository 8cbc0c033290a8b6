"""Search for the plan with the shortest iteration: exhaustive where the space is small, else Markov chain Monte Carlo.

After ReaL (arXiv 2406.14088, section 5.2). Everything is counted in evaluations, never in wall-clock time, so that one
seed gives one plan on any machine.
"""

import bisect
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence

from real_jax.planner import bound, memory, simulate
from real_jax.planner.enumerate import may_offload, moved
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload

OVER_MEMORY_FACTOR = 3.0  # by which a plan that does not fit counts as slower, as in ReaL
COOLING = 10.0  # by which beta grows over a chain: it ends in a descent

Choice = tuple[int, ...]  # for each call, the index of its option


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
      best: the plan with the shortest iteration; the first of `top`.
      top: distinct plans that fit, with seconds per iteration, the fastest first.
      evaluated: distinct plans that were simulated.
      exact: whether every plan was evaluated, so that `best` is the optimum under these costs.
      lower_bound: seconds per iteration that no plan can beat under these costs.
    """

    best: ExecutionPlan
    top: list[tuple[ExecutionPlan, float]]
    evaluated: int
    exact: bool
    lower_bound: float

    @property
    def gap(self) -> float:
        """By what share `best` may be slower than the optimum."""
        return self.top[0][1] / self.lower_bound - 1 if self.lower_bound > 0 else math.inf


def search(
    graph: Graph,
    work: Workload,
    cluster: Cluster,
    costs: CostTable,
    *,
    seed: int = 0,
    evaluations: int = 4000,
    beta: float = 10.0,
    restarts: int = 4,
    keep: int = 8,
    initial: Iterable[ExecutionPlan] = (),
) -> SearchResult:
    """Searches placements for all calls of `graph`; the options of a call are `costs.placements(call)`.

    Where the product of the options is at most `evaluations`, all plans are evaluated. Otherwise options that are both
    slower and larger than another one with the same layout are left out, and chains share the evaluations. They start
    from each call's own fastest option, from each call's leanest option, from the plans in `initial`, from what the lower
    bound would choose, and (up to `restarts` chains) from the best plan so far; each first descends call by call. A step
    proposes another option for one call (at times two) and accepts it if the plan gets no slower, else with probability
    exp(-b x relative slowdown), where b grows from `beta` to 10 x `beta` over a chain. A plan over memory counts as
    slower by 3 x its overrun. A plan in `initial` that fits is never better than the result.

    Raises UsageError where a cost is missing, or where no plan fits the memory: what is short, and by how much.
    """
    calls = [c.name for c in graph.calls if c.kind != "host"]
    starts, about = list(initial), (graph, work, cluster, costs)
    shapes = [_fitting(call, *about) for call in calls]
    space = [_spread(*pair, starts, graph, cluster) for pair in zip(calls, shapes, strict=True)]
    exact = _size(space) <= evaluations
    # Where cores are shared a faster call can make a plan slower (more overlaps), so no option is left out there.
    if not exact and cluster.shared_cores == 0:
        shapes = [_undominated(call, known, costs) for call, known in zip(calls, shapes, strict=True)]
        space = [_spread(*pair, starts, graph, cluster) for pair in zip(calls, shapes, strict=True)]
    least = bound.lower_bound(graph, work, cluster, costs, dict(zip(calls, shapes, strict=True)))
    trial = _Trial(calls, space, graph, work, cluster, costs)
    if _size(space) <= evaluations:
        for choice in itertools.product(*(range(len(options)) for options in space)):
            trial(choice)
        origin = "exhaustive search" + ("" if exact else " over undominated options")
    else:
        given = [tuple(options.index(p[c]) for c, options in zip(calls, space, strict=True)) for p in starts]
        given.append(_relaxed(trial, least))
        _chains(trial, given, random.Random(seed), evaluations, beta, restarts, least.seconds)
        origin = f"search, seed {seed}, {evaluations} evaluations"
    ranked = trial.ranked()
    if not ranked:
        short = memory.check(trial.plan(trial.leanest), graph, work, cluster, costs)
        raise UsageError(f"No plan for {graph.name!r} was found that fits the memory of {cluster.name!r}. {short}")
    top = [(trial.plan(choice, origin), seconds) for choice, seconds in ranked[:keep]]
    lowest = top[0][1] if exact else min(least.seconds, top[0][1])
    return SearchResult(top[0][0], top, len(trial.seen), exact, lowest)


def _size(space: Sequence[Sequence[Placement]]) -> int:
    return math.prod(len(options) for options in space)


def _fitting(call: str, graph, work, cluster, costs) -> list[Placement]:
    """The shapes of `call` that fit the memory by themselves."""
    known = costs.placements(call)
    if not known:
        raise UsageError(f"No cost is known for call {call!r} under any placement, so there is nothing to search.")
    limit = cluster.chip.memory_gib * memory.GIB
    need = {p: memory.least_bytes(call, p, graph, work, costs) for p in known}
    if fitting := [p for p in known if need[p] <= limit]:
        return fitting
    least = min(known, key=lambda p: (need[p], p))
    raise UsageError(
        f"No placement of call {call!r} fits: the leanest ({least.describe()}, micro_batches "
        f"{least.micro_batches}) needs {memory.gib(need[least])} per device, "
        f"{memory.gib(need[least] - limit)} more than the {memory.gib(limit)} of a "
        f"{cluster.chip.name}. Use more devices, more micro-batches or a smaller batch."
    )


def _spread(call: str, shapes: Sequence[Placement], given: Sequence[ExecutionPlan], graph, cluster) -> list[Placement]:
    """`shapes` on every slice, kept on the devices or, where that may be, in host memory; and what `given` plans have."""
    offload = may_offload(call, graph)
    return sorted({p for shape in shapes for p in moved(shape, cluster, offload)} | {plan[call] for plan in given})


def _undominated(call: str, options: list[Placement], costs: CostTable) -> list[Placement]:
    """Leaves out placements to which one with the same layout is preferable in both seconds and bytes."""
    kept: list[Placement] = []
    lowest: dict[Placement, float] = {}

    def merit(p: Placement):
        return costs[call, p].seconds, costs[call, p].work_bytes, p

    for p in sorted(options, key=merit):
        work_bytes = costs[call, p].work_bytes
        if work_bytes < lowest.get(p.layout, math.inf):
            lowest[p.layout] = work_bytes
            kept.append(p)
    return kept


class _Trial:
    """Scores choices, and remembers them: seconds per iteration, times a penalty where memory is short."""

    def __init__(self, calls, space, graph, work, cluster, costs):
        self.calls, self.space = calls, space
        self.graph, self.work, self.cluster, self.costs = graph, work, cluster, costs
        self.limit = cluster.chip.memory_gib * memory.GIB
        self.seen: dict[Choice, float] = {}
        self.fitting: dict[Choice, float] = {}
        self.leanest: Choice = ()
        self.least_overrun = math.inf

    def plan(self, choice: Choice, origin: str = "") -> ExecutionPlan:
        placements = {c: o[i] for c, o, i in zip(self.calls, self.space, choice, strict=True)}
        return ExecutionPlan(self.cluster.name, placements, origin)

    def __call__(self, choice: Choice) -> float:
        if choice in self.seen:
            return self.seen[choice]
        plan = self.plan(choice)
        seconds = simulate.iteration_seconds(plan, self.graph, self.work, self.cluster, self.costs)
        base, top = memory.peaks(plan, self.graph, self.work, self.costs)
        overrun = float((base + top).max()) / self.limit
        if overrun < self.least_overrun:
            self.leanest, self.least_overrun = choice, overrun
        if overrun <= 1:
            self.fitting[choice] = score = seconds
        else:
            score = seconds * OVER_MEMORY_FACTOR * overrun
        self.seen[choice] = score
        return score

    def ranked(self) -> list[tuple[Choice, float]]:
        return sorted(self.fitting.items(), key=lambda item: (item[1], item[0]))

    def fastest(self) -> float:
        """Seconds of the fastest plan so far that fits."""
        return min(self.fitting.values(), default=math.inf)

    def best(self) -> Choice:
        return min(self.seen, key=lambda choice: (self.seen[choice], choice))


def _relaxed(trial: _Trial, least: bound.Bound) -> Choice:
    """For each call the option nearest to what the lower bound would choose."""

    def distance(call: str, p: Placement) -> tuple:
        seconds, count = least.choice.get(call, (0.0, p.count))
        return p.count != count, abs(trial.costs[call, p].seconds - seconds), p

    return tuple(
        min(range(len(options)), key=lambda i: distance(call, options[i]))
        for call, options in zip(trial.calls, trial.space, strict=True)
    )


def _chains(
    trial: _Trial,
    given: list[Choice],
    rng: random.Random,
    evaluations: int,
    beta: float,
    restarts: int,
    least: float,
):
    """Runs the chains one after another; together they propose `evaluations` plans. They end early where a plan reaches
    `least` seconds, as nothing can be gained then."""

    def by(measure) -> Choice:
        return tuple(
            min(range(len(options)), key=lambda i: (measure(call, options[i]), i))
            for call, options in zip(trial.calls, trial.space, strict=True)
        )

    fastest = by(lambda call, p: trial.costs[call, p].seconds)
    leanest = by(lambda call, p: memory.least_bytes(call, p, trial.graph, trial.work, trial.costs))
    starts: list[Choice | None] = list(dict.fromkeys([fastest, leanest, *given]))
    for start in starts:
        trial(start)
    starts += [None] * (restarts - len(starts))
    proposals = _Proposals(trial, rng)
    for number, start in enumerate(starts):
        # A division of the budget that hands out every evaluation, whatever the number of chains.
        steps = (number + 1) * evaluations // len(starts) - number * evaluations // len(starts)
        current = _descend(trial, proposals, trial.best() if start is None else start, steps // 2)
        score = trial(current)
        if trial.fastest() <= least * (1 + 1e-6):
            return
        for step in range(steps):
            candidate = proposals.draw(current)
            new = trial(candidate)
            slowdown = (new - score) / max(score, 1e-300)
            cold = COOLING ** (step / steps)
            if slowdown <= 0 or rng.random() < math.exp(-beta * cold * slowdown):
                current, score = candidate, new
    _descend(trial, proposals, trial.best(), evaluations)


def _descend(trial: "_Trial", proposals: "_Proposals", choice: Choice, evaluations: int) -> Choice:
    """The end of a descent from `choice`: one call after another gets the best of its options, alone or with the other calls
    of its model in the same layout, until nothing is gained or about `evaluations` plans were looked at."""
    score, tried, idle = trial(choice), 0, 0
    for k in itertools.cycle(proposals.movable):
        if idle >= len(proposals.movable) or tried >= evaluations:
            return choice
        near = proposals.neighbours(k, choice, score)
        tried += len(near)
        best = min(near, key=lambda c: (trial(c), c), default=choice)
        idle += 1
        if trial(best) < score * (1 - 1e-9):
            choice, score, idle = best, trial(best), 0
    return choice


class _Proposals:
    """Draws a neighbour of a choice: one call with another option, and in half of the draws a second call with it.

    The option is drawn in one of five ways with equal chance: from all; in favour of those that are fast by themselves;
    or from those with the same devices as now, with the same shape elsewhere, or with the layout of another call
    (which saves a reallocation). The second call either follows into the same layout, if it is on the same model, or
    goes to the neighbouring slice of the same size: two calls that share devices can hardly part one at a time, as the
    first to shrink gets slower while nothing gains yet.
    """

    def __init__(self, trial: _Trial, rng: random.Random):
        self.rng, self.trial, self.space = rng, trial, trial.space
        self.movable = [k for k, options in enumerate(trial.space) if len(options) > 1]
        models = [trial.graph.call(call).model for call in trial.calls]
        self.family = [[j for j, m in enumerate(models) if m == model and j != k] for k, model in enumerate(models)]
        self.cumulative = []
        # For each call, the options that share a trait, the fastest first.
        self.alike: list[dict[tuple, list[int]]] = []
        for call, options in zip(trial.calls, trial.space, strict=True):
            seconds = [max(trial.costs[call, p].seconds, 1e-300) for p in options]
            least = min(seconds)
            self.cumulative.append(list(itertools.accumulate((least / s) ** 2 for s in seconds)))
            alike: dict[tuple, list[int]] = {}
            for i in sorted(range(len(options)), key=lambda i: (seconds[i], i)):
                p = options[i]
                for trait in (_devices(p.first, p.count), _shape(p), _layout(p)):
                    alike.setdefault(trait, []).append(i)
            self.alike.append(alike)

    def draw(self, choice: Choice) -> Choice:
        rng, drawn = self.rng, list(choice)
        k = self.movable[rng.randrange(len(self.movable))]
        drawn[k] = self._option(k, choice)
        p = self.space[k][drawn[k]]
        way = rng.randrange(4)
        if way == 0 and self.family[k]:
            self._move(drawn, self.family[k][rng.randrange(len(self.family[k]))], _layout(p))
        elif way == 1 and len(choice) > 1:
            other = (k + 1 + rng.randrange(len(choice) - 1)) % len(choice)
            beside = p.first + p.count if p.first // p.count % 2 == 0 else p.first - p.count
            self._move(drawn, other, _devices(beside, p.count))
        return tuple(drawn)

    def neighbours(self, k: int, choice: Choice, seconds: float, each: int = 3) -> list[Choice]:
        """What a descent tries for call `k`: on every slice the fastest few options, less those that take longer than
        `seconds` by themselves; the layouts of the other calls of its model; and each of these with them."""
        trial, calls = self.trial, self.trial.calls
        picked: dict[int, None] = {}
        for trait, same in self.alike[k].items():
            if trait[0] == "devices":
                fast = [i for i in same if trial.costs[calls[k], self.space[k][i]].seconds < seconds]
                meshes = {}
                for i in fast:
                    meshes.setdefault(_layout(self.space[k][i]), i)
                picked |= dict.fromkeys(list(meshes.values())[:each])
        for j in self.family[k]:
            picked |= dict.fromkeys(self.alike[k].get(_layout(self.space[j][choice[j]]), [])[:1])
        found = []
        for i in picked:
            drawn = list(choice)
            drawn[k] = i
            found.append(tuple(drawn))
            for j in self.family[k]:
                if same := self.alike[j].get(_layout(self.space[k][i])):
                    drawn[j] = same[0]
                    found.append(tuple(drawn))
        return [c for c in dict.fromkeys(found) if c != choice]

    def _option(self, k: int, choice: Choice) -> int:
        """Another option for call `k` than the one in `choice`."""
        rng, size, way = self.rng, len(self.space[k]), self.rng.randrange(5)
        now, drawn = self.space[k][choice[k]], list(choice)
        if way == 1:
            cumulative = self.cumulative[k]
            drawn[k] = min(bisect.bisect_right(cumulative, rng.random() * cumulative[-1]), size - 1)
        elif way == 2:
            self._move(drawn, k, _devices(now.first, now.count))
        elif way == 3:
            self._move(drawn, k, _shape(now))
        elif way == 4:
            other = rng.randrange(len(choice))
            self._move(drawn, k, _layout(self.space[other][choice[other]]))
        if drawn[k] == choice[k]:
            return (choice[k] + 1 + rng.randrange(size - 1)) % size
        return drawn[k]

    def _move(self, drawn: list[int], k: int, trait: tuple) -> None:
        """Gives call `k` an option with `trait`, more likely a fast one; leaves it as it is where there is none."""
        same = self.alike[k].get(trait)
        if same:
            drawn[k] = same[int(len(same) * self.rng.random() ** 2)]


def _devices(first: int, count: int) -> tuple:
    return "devices", first, count


def _shape(p: Placement) -> tuple:
    return "shape", dataclasses.replace(p, first=0)


def _layout(p: Placement) -> tuple:
    return "layout", p.layout
