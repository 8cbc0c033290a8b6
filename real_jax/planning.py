"""An execution plan for an experiment on a cluster: searched, given by the user, or of a named heuristic.

A plan is searched stage by stage: every feasible placement of every call is costed, a search over the simulated timeline
gives the best few plans, and on the machine at hand these and the symmetric heuristic are timed and the fastest is kept.
"""

import dataclasses

from real_jax.costing import SILENT, Costing, Listener, record_measurements, time_layers
from real_jax.found import Candidate, FoundPlan
from real_jax.spec.costs import CostTable
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, validate

AUTO, HEURISTIC = "auto", "heuristic:"
_VERSION = 2  # of what a search does; raise it where the planner finds other plans
_CORRECTIONS = 4  # searches at most, until a plan fits by its compiled calls


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """As `search_plan` takes them."""

    timed: int
    layered: int
    seed: int


def _seconds(costing: Costing, stage, plan: ExecutionPlan, costs: CostTable) -> float:
    from real_jax.planner.simulate import iteration_seconds

    return iteration_seconds(plan, stage.graph, stage.work, costing.cluster, costs)


def _time_candidates(costing: Costing, stage, candidates: list[Candidate], programs: dict) -> list[Candidate]:
    """Times each candidate on this machine; compiled programs are shared between them and kept in `programs`."""
    from real_jax.runtime.footprint import footprint_key
    from real_jax.runtime.prepare import load_tokenizer, make_build, program_key
    from real_jax.runtime.trial import time_plan

    timed, experiment = [], costing.experiment
    tokenizer = load_tokenizer(experiment)
    tokens = (tokenizer.eos_id, tokenizer.pad_id)
    build = make_build(experiment, stage, *tokens)
    for number, candidate in enumerate(candidates, 1):
        costing.listener.note(f"{stage.name}: timing plan {number} of {len(candidates)} ({candidate.origin})")
        keys = {c: program_key(experiment, stage.name, c, p, tokens) for c, p in candidate.plan.placements.items()}
        known = {call: programs[key] for call, key in keys.items() if key in programs}
        trial, made = time_plan(build, candidate.plan, known=known)
        programs |= {keys[call]: program for call, program in made.items()}
        seconds = {k: v for k, v in trial.events.items() if stage.graph.has(k) and stage.graph.call(k).kind != "host"}
        record_measurements(stage, costing.cluster, candidate.plan, seconds, costing.store)
        for call, bytes_ in trial.work_bytes.items():
            key = footprint_key(stage, call, candidate.plan[call], costing.target)
            costing.store.record_footprint(key, bytes_)
        timed.append(dataclasses.replace(candidate, measured=trial.seconds))
    return timed


def _unlike(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates that differ in more than which devices their calls start on."""
    kept: dict[tuple, Candidate] = {}
    for c in candidates:
        shape = tuple((call, dataclasses.replace(p, first=0)) for call, p in sorted(c.plan.placements.items()))
        kept.setdefault(shape, c)
    return list(kept.values())[:count]


def _heuristics(costing: Costing, stage, costs: CostTable) -> list[Candidate]:
    """The plans of all heuristics that make one, the fastest first."""
    from real_jax.planner.heuristics import HEURISTICS, heuristic

    found = []
    for name in HEURISTICS:
        try:
            plan = heuristic(name, stage.graph, stage.work, costing.cluster, costs)
        except UsageError as error:  # it does not fit, or the batch does not divide: nothing to compare with
            costing.listener.note(f"{stage.name}: {error}")
            continue
        if plan.placements not in [c.plan.placements for c in found]:
            found.append(Candidate(stage.name, plan.origin, plan, _seconds(costing, stage, plan, costs)))
    return sorted(found, key=lambda c: c.predicted)


def _search_fitting(costing: Costing, stage, costs: CostTable, seed: int, initial: list[ExecutionPlan]):
    """The result of a search whose best plan fits the memory by what its compiled calls need, and the costs.

    For the machine at hand the calls are compiled when they are timed or run; for another cluster they are compiled
    here. A plan that turns out too large corrects the costs, and the search is repeated.
    """
    from real_jax.planner.memory import check
    from real_jax.planner.search import search

    about = (stage.graph, stage.work, costing.cluster)
    for _ in range(_CORRECTIONS):
        result = search(*about, costs, seed=seed, initial=initial)
        if costing.local or costing.target.kind == "partitioner":
            break
        costs = costs.updated(costing.footprints(stage, result.best, costs))
        if check(result.best, *about, costs) is None:
            break
        costing.listener.note(f"{stage.name}: the plan's compiled calls need more memory than predicted; once more")
        initial = [p for p in initial if check(p, *about, costs) is None]
    return result, costs


def _with_layers(costing: Costing, stage, found: list[Candidate], costs: CostTable) -> tuple[list, CostTable]:
    """`found` predicted anew from runs with few layers, the fastest first; and the costs, those of their calls renewed."""
    renewed = time_layers(costing, stage, [c.plan for c in found])
    costs = costs.updated(renewed)
    again = [dataclasses.replace(c, predicted=_seconds(costing, stage, c.plan, costs)) for c in found]
    return sorted(again, key=lambda c: c.predicted), costs


def _search_stage(costing: Costing, stage, options: SearchOptions, programs: dict):
    """The best plan of one stage, the candidates compared, the costs, and the lower bound."""
    costs = costing.all_costs(stage)
    plain = _heuristics(costing, stage, costs)
    costing.listener.note(f"{stage.name}: searching")
    plans = [c.plan for c in plain]
    result, costs = _search_fitting(costing, stage, costs, options.seed, plans)
    found = [Candidate(stage.name, plan.origin, plan, seconds) for plan, seconds in result.top]
    timed = options.timed
    if costing.local and options.layered:
        found, costs = _with_layers(costing, stage, found[: options.layered], costs)
    if not (costing.local and timed):
        return found[0], [found[0], *plain], costs, result.lower_bound
    # One call alone is well predicted; it is where calls overlap that a second plan is worth its time.
    several = len(stage.graph.calls) > 1
    quickest = timed if several else 0
    rivals = [c for i, c in enumerate(plain) if i < quickest or c.origin == "heuristic:symmetric"]
    same = [c.plan.placements for c in rivals]
    chosen = _unlike([c for c in found if c.plan.placements not in same], timed if several else 1) + rivals
    chosen = _time_candidates(costing, stage, chosen, programs)
    rest = [c for c in plain if c not in rivals]
    return min(chosen, key=lambda c: c.measured), chosen + rest, costs, result.lower_bound


def search_plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    timed: int = 2,
    layered: int = 0,
    seed: int = 0,
    fresh: bool = False,
    listener: Listener = SILENT,
) -> FoundPlan:
    """Finds a plan for every call of every stage.

    Args:
      cluster: what to plan for; None: the machine at hand, measured.
      timed: how many of the best plans are timed on this machine, beside as many heuristics, so that the plan
        returned never measured slower than them; 0 trusts the prediction. Another cluster's plans are never timed.
      layered: how many of the best plans' calls are run with few layers first, which sharpens the prediction.
      fresh: search again even where the same search was done before.
      listener: hears of progress.
    """
    costing = Costing(experiment, cluster, listener)
    options = SearchOptions(timed, layered, seed)
    key = _search_key(costing, options)
    kept = None if fresh else costing.store.plan(key)
    if kept:
        listener.note("plan found by an earlier search")
        return _from_kept(costing, kept)
    found = FoundPlan(ExecutionPlan("", {}), costing.cluster, costing.stages, {}, compiler=costing.target.describe())
    placements = {}
    for stage in costing.stages:
        best, compared, found.costs[stage.name], bound = _search_stage(costing, stage, options, found.programs)
        found.candidates += compared
        found.lower_bounds[stage.name] = bound
        placements |= best.plan.placements
    timing = ", the fastest of those timed" if any(c.measured is not None for c in found.candidates) else ""
    found.plan = ExecutionPlan(costing.cluster.name, placements, f"search, seed {seed}{timing}")
    costing.store.record_plan(key, _keep(found))
    return found


def _search_key(costing: Costing, options: SearchOptions) -> str:
    """Equal for searches that must find the same: same graphs, workloads, cluster and software."""
    import hashlib
    import json

    from real_jax.cost.compile import FORMAT
    from real_jax.spec.files import to_data

    stages = [[s.name, to_data(s.graph), to_data(s.work)] for s in costing.stages]
    content = [stages, to_data(costing.cluster), to_data(options), costing.target.key, FORMAT, _VERSION]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _keep(found: FoundPlan) -> dict:
    from real_jax.spec.files import plan_data

    kept = [{**dataclasses.asdict(c), "plan": plan_data(c.plan)} for c in found.candidates]
    return {"plan": plan_data(found.plan), "candidates": kept, "lower_bounds": found.lower_bounds}


def _from_kept(costing: Costing, kept: dict) -> FoundPlan:
    from real_jax.spec.files import plan_from_data

    plan = plan_from_data(kept["plan"], "the cache")
    candidates = [Candidate(**{**c, "plan": plan_from_data(c["plan"], "the cache")}) for c in kept["candidates"]]
    return _described(costing, plan, candidates=candidates, lower_bounds=kept["lower_bounds"])


def _described(costing: Costing, plan: ExecutionPlan, **more) -> FoundPlan:
    """`plan` with its predicted costs."""
    costs = {s.name: costing.named_costs(s, plan) for s in costing.stages}
    return FoundPlan(plan, costing.cluster, costing.stages, costs, compiler=costing.target.describe(), **more)


def given_plan(
    experiment: Experiment,
    plan: ExecutionPlan,
    cluster: Cluster | None = None,
    *,
    layered: bool = False,
    listener: Listener = SILENT,
) -> FoundPlan:
    """A plan that the user wrote, checked against the experiment and the cluster, with its predicted costs; and where
    `layered` is set and the cluster is the machine at hand, seconds from runs with few layers and bytes from the
    compiled calls."""
    costing = Costing(experiment, cluster, listener)
    _check(costing, plan)
    plan = dataclasses.replace(plan, cluster=costing.cluster.name)
    if layered and costing.local:
        for stage in costing.stages:
            costs = time_layers(costing, stage, [plan])
            mine = {c.name: plan[c.name] for c in stage.graph.calls if c.kind != "host"}
            costing.footprints(stage, ExecutionPlan(plan.cluster, mine), costs)
    return _described(costing, plan)


def heuristic_plan(
    experiment: Experiment, name: str, cluster: Cluster | None = None, listener: Listener = SILENT
) -> FoundPlan:
    """The plan of a named heuristic."""
    from real_jax.planner.heuristics import HEURISTICS, heuristic

    if name not in HEURISTICS:
        raise UsageError(f"There is no heuristic {name!r}. Heuristics: {', '.join(HEURISTICS)}.")
    costing = Costing(experiment, cluster, listener)
    placements, costs = {}, {}
    for stage in costing.stages:
        costs[stage.name] = costing.all_costs(stage)
        placements |= heuristic(name, stage.graph, stage.work, costing.cluster, costs[stage.name]).placements
    plan = ExecutionPlan(costing.cluster.name, placements, f"heuristic {name}")
    return FoundPlan(plan, costing.cluster, costing.stages, costs, compiler=costing.target.describe())


def _check(costing: Costing, plan: ExecutionPlan) -> None:
    known: set[str] = set()
    for stage in costing.stages:
        validate(plan, stage.graph, stage.work, costing.outline)
        known |= {c.name for c in stage.graph.calls}
    for call in plan.placements:
        if call not in known:
            raise UsageError(
                f"The plan names call {call!r}, which this experiment does not make. Its calls: {', '.join(sorted(known))}."
            )


def find_plan(
    wanted: str,
    experiment: Experiment,
    cluster: Cluster | None,
    *,
    timed: int = 2,
    layered: int = 0,
    seed: int = 0,
    fresh: bool = False,
    listener: Listener = SILENT,
) -> FoundPlan:
    """What `--plan` means: "auto", "heuristic:NAME", or the path of a plan file."""
    from real_jax.spec.files import load_plan

    if wanted == AUTO:
        more = {"timed": timed, "layered": layered, "seed": seed, "fresh": fresh}
        return search_plan(experiment, cluster, **more, listener=listener)
    if wanted.startswith(HEURISTIC):
        return heuristic_plan(experiment, wanted.removeprefix(HEURISTIC), cluster, listener)
    return given_plan(experiment, load_plan(wanted), cluster, listener=listener)
