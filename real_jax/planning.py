"""An execution plan for an experiment on a cluster: searched, given by the user, or of a named heuristic.

A plan is searched stage by stage: every feasible placement of every call is costed, a search over the simulated timeline
gives the best few plans, and on the machine at hand these and the symmetric heuristic are timed and the fastest is kept.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from real_jax.found import Candidate, FoundPlan
from real_jax.spec.costs import CostTable
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement, validate

AUTO, HEURISTIC = "auto", "heuristic:"
_VERSION = 1  # of what a search does; raise it where the planner finds other plans
_CORRECTIONS = 4  # searches at most, until a plan fits by its compiled calls


class Listener:
    """Hears how planning goes on; this one keeps it to itself."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def progress(self, what: str, done: int, total: int, item: str) -> None:
        """`done` of `total` parts of `what` are done, `item` the last of them."""


SILENT = Listener()


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """As `search_plan` takes them."""

    timed: int
    layered: int
    seed: int


def local_cluster(store, listener: Listener = SILENT) -> Cluster:
    """The machine at hand as a cluster: probed the first time, then remembered."""
    from real_jax.cost.measure import probe_cluster, probe_key

    key = probe_key()
    cluster = store.cluster(key)
    if cluster is None:
        listener.note("measuring this machine (a few seconds, once)")
        cluster = probe_cluster()
        store.record_cluster(key, cluster)
    return cluster


def record_measurements(stage, cluster: Cluster, plan: ExecutionPlan, seconds: Mapping[str, float], store) -> None:
    """Keeps measured seconds of a stage's calls for later searches.

    Where virtual devices share their cores, calls that run side by side slow each other; a plan that allows it tells
    nothing about a call alone, and is left out.
    """
    from real_jax.cost.table import measurement_key

    calls = [c for c in stage.graph.calls if c.name in seconds]
    placements = [plan[c.name] for c in calls if c.kind != "host"]
    if cluster.shared_cores and not all(a.overlaps(b) for a in placements for b in placements):
        return
    for call in calls:
        placement = Placement() if call.kind == "host" else plan[call.name]
        if seconds[call.name] > 0:
            store.record(measurement_key(call, stage.work, placement, cluster.name), seconds[call.name])


class _Searcher:
    """The parts of a search that all stages share."""

    def __init__(self, experiment: Experiment, cluster: Cluster | None, listener: Listener):
        from real_jax.cost.store import Store, default_folder
        from real_jax.runtime import meshes
        from real_jax.runtime.prepare import make_stages, model_archs

        meshes.prepare_devices()
        meshes.use_compilation_cache(str(default_folder() / "xla"))
        self.experiment, self.listener = experiment, listener
        self.archs = model_archs(experiment)
        self.stages = make_stages(experiment, self.archs)
        self.store = Store()
        self._given = cluster
        self.local = cluster is None or (cluster.platform, cluster.devices) == (
            meshes.platform(),
            len(meshes.devices()),
        )

    @functools.cached_property
    def cluster(self) -> Cluster:
        """What is planned for; the machine at hand is measured when its numbers are first needed."""
        return self._given or local_cluster(self.store, self.listener)

    @functools.cached_property
    def target(self):
        """The compiler that costs come from (`cost.targets.Target`)."""
        from real_jax.cost import targets

        target = targets.choose(self.cluster, self.local)
        if remedy := target.remedy():
            self.listener.note(f"Costs come from {target.describe()}. {remedy}")
        return target

    @property
    def outline(self) -> Cluster:
        """`cluster` as far as a plan must fit it: its name and its devices. Known without measuring anything."""
        from real_jax.cost.measure import cluster_name
        from real_jax.runtime import meshes

        if self._given:
            return self._given
        link = Link(gb_per_s=1.0, latency_us=0.0)
        chip = Chip(name="", memory_gib=1.0, matrix_tflops=1.0, memory_gb_per_s=1.0)
        return Cluster(cluster_name(), meshes.platform(), 1, len(meshes.devices()), chip, link, link, link)

    def costs(self, stage, options: Mapping[str, Sequence[Placement]], what: str = "layer programs") -> CostTable:
        from real_jax.cost.table import fill_costs

        def progress(done: int, total: int, piece: str) -> None:
            self.listener.progress(f"{stage.name}: {what}", done, total, piece)

        table = fill_costs(stage.graph, stage.work, self.cluster, options, self.store, self.target, progress)
        return self._with_known_bytes(stage, table)

    def _with_known_bytes(self, stage, table: CostTable) -> CostTable:
        """`table` with the bytes of those calls that have been compiled themselves before."""
        from real_jax.runtime.footprint import footprint_key

        known = CostTable()
        for call in (c.name for c in stage.graph.calls if c.kind != "host"):
            for p in table.placements(call):
                bytes_ = self.store.footprint(footprint_key(stage, call, p, self.target))
                if bytes_ is not None:
                    known.add(call, p, dataclasses.replace(table[call, p], work_bytes=bytes_))
        return table.updated(known)

    def all_costs(self, stage) -> CostTable:
        """Costs of every placement that the best plan may have.

        A few placements are costed first; the best plan of them tells which of the others an optimistic estimate can
        rule out, and only the rest is compiled.
        """
        from real_jax.planner import prune
        from real_jax.planner.enumerate import shapes
        from real_jax.planner.memory import infeasible
        from real_jax.planner.search import search

        about = (stage.graph, stage.work, self.cluster)
        if reason := infeasible(*about):
            raise UsageError(reason)
        options = {c.name: shapes(c.name, *about) for c in stage.graph.calls}
        for call, found in options.items():
            if not found:
                raise UsageError(self._why_none(stage, call))
        fitting = prune.fitting(*about, options)
        options = {call: fitting[call] or found for call, found in options.items()}
        guess = prune.first_guess(*about, options)
        costs = self.costs(stage, guess, "first layer programs")
        try:
            known = search(*about, costs, seed=0, evaluations=500).top[0][1]
        except UsageError:  # none of the first few fits the memory: nothing can be ruled out
            return self.costs(stage, options)
        promising = prune.promising(*about, options, known)
        wanted = {c: {*found, *guess[c]} for c, found in promising.items()}
        return self.costs(stage, self._with_the_same_programs(stage, options, wanted))

    def _with_the_same_programs(self, stage, options: Mapping, wanted: Mapping) -> dict[str, list[Placement]]:
        """`wanted`, and those of `options` that need no other programs: heuristics have use for them, and they cost nothing."""
        from real_jax.cost.table import pieces

        calls = [c for c in stage.graph.calls if c.kind != "host"]
        made = {piece for c in calls for p in wanted[c.name] for piece in pieces(c, stage.work, p).values()}
        free = {
            c.name: [p for p in options[c.name] if made.issuperset(pieces(c, stage.work, p).values())] for c in calls
        }
        return {c: sorted({*found, *free.get(c, ())}) for c, found in wanted.items()}

    def footprints(self, stage, plan: ExecutionPlan, costs: CostTable) -> CostTable:
        """Costs of the calls of `plan`, with the bytes that the calls themselves need when they are compiled."""
        from real_jax.runtime.footprint import footprints

        def progress(done: int, total: int, call: str) -> None:
            self.listener.progress(f"{stage.name}: compiling the plan's calls", done, total, call)

        found = footprints(self.experiment, stage, plan.placements, self.target, self.store, progress)
        renewed = {
            (call, plan[call]): dataclasses.replace(costs[call, plan[call]], work_bytes=bytes_)
            for call, bytes_ in found.items()
        }
        return CostTable(renewed)

    def _why_none(self, stage, call: str) -> str:
        from real_jax.spec.plan import placement_error

        reason = placement_error(call, Placement(), stage.graph, stage.work, self.cluster)
        return f"No placement on cluster {self.cluster.name!r} can serve call {call!r}. {reason or ''}"

    def named_costs(self, stage, plan: ExecutionPlan) -> CostTable:
        options = {c.name: [plan[c.name]] if c.kind != "host" else [Placement()] for c in stage.graph.calls}
        return self.costs(stage, options)


def _seconds(searcher: _Searcher, stage, plan: ExecutionPlan, costs: CostTable) -> float:
    from real_jax.planner.simulate import iteration_seconds

    return iteration_seconds(plan, stage.graph, stage.work, searcher.cluster, costs)


def _time_candidates(searcher: _Searcher, stage, candidates: list[Candidate], programs: dict) -> list[Candidate]:
    """Times each candidate on this machine; compiled programs are shared between them and kept in `programs`."""
    from real_jax.runtime.footprint import footprint_key
    from real_jax.runtime.prepare import load_tokenizer, make_build, program_key
    from real_jax.runtime.trial import time_plan

    timed, experiment = [], searcher.experiment
    tokenizer = load_tokenizer(experiment)
    tokens = (tokenizer.eos_id, tokenizer.pad_id)
    build = make_build(experiment, stage, *tokens)
    for number, candidate in enumerate(candidates, 1):
        searcher.listener.note(f"{stage.name}: timing plan {number} of {len(candidates)} ({candidate.origin})")
        keys = {c: program_key(experiment, stage.name, c, p, tokens) for c, p in candidate.plan.placements.items()}
        known = {call: programs[key] for call, key in keys.items() if key in programs}
        trial, made = time_plan(build, candidate.plan, known=known)
        programs |= {keys[call]: program for call, program in made.items()}
        seconds = {k: v for k, v in trial.events.items() if stage.graph.has(k) and stage.graph.call(k).kind != "host"}
        record_measurements(stage, searcher.cluster, candidate.plan, seconds, searcher.store)
        for call, bytes_ in trial.work_bytes.items():
            key = footprint_key(stage, call, candidate.plan[call], searcher.target)
            searcher.store.record_footprint(key, bytes_)
        timed.append(dataclasses.replace(candidate, measured=trial.seconds))
    return timed


def _time_layers(searcher: _Searcher, stage, plans: Sequence[ExecutionPlan]) -> CostTable:
    """Runs the calls of `plans` with few layers, as far as that has not been done, and returns their costs."""
    from real_jax.cost.table import layers_key, measurement_key
    from real_jax.runtime.layers import at_depth, time_layers
    from real_jax.runtime.prepare import load_tokenizer, make_build

    tokenizer = load_tokenizer(searcher.experiment)
    build = make_build(searcher.experiment, stage, tokenizer.eos_id, tokenizer.pad_id)
    calls = [c for c in stage.graph.calls if c.kind != "host"]
    missing = {}
    for call, plan in ((call, plan) for plan in plans for call in calls):
        key = measurement_key(call, stage.work, plan[call.name], searcher.cluster.name)
        if searcher.store.measured(key) is None and searcher.store.measured(layers_key(key)) is None:
            missing.setdefault(layers_key(key), (call, dataclasses.replace(plan[call.name], first=0, offload=False)))
    for done, (key, (call, placement)) in enumerate(missing.items(), 1):
        seconds, _ = at_depth(time_layers(build, call, placement), stage.work.archs[call.model].layers)
        searcher.store.record(key, seconds)
        item = f"{call.name} over {placement.describe()}"
        searcher.listener.progress(f"{stage.name}: timing layers", done, len(missing), item)
    return searcher.costs(stage, {c.name: [plan[c.name] for plan in plans] for c in calls})


def _unlike(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates that differ in more than which devices their calls start on."""
    kept: dict[tuple, Candidate] = {}
    for c in candidates:
        shape = tuple((call, dataclasses.replace(p, first=0)) for call, p in sorted(c.plan.placements.items()))
        kept.setdefault(shape, c)
    return list(kept.values())[:count]


def _heuristics(searcher: _Searcher, stage, costs: CostTable) -> list[Candidate]:
    """The plans of all heuristics that make one, the fastest first."""
    from real_jax.planner.heuristics import HEURISTICS, heuristic

    found = []
    for name in HEURISTICS:
        try:
            plan = heuristic(name, stage.graph, stage.work, searcher.cluster, costs)
        except UsageError as error:  # it does not fit, or the batch does not divide: nothing to compare with
            searcher.listener.note(f"{stage.name}: {error}")
            continue
        if plan.placements not in [c.plan.placements for c in found]:
            found.append(Candidate(stage.name, plan.origin, plan, _seconds(searcher, stage, plan, costs)))
    return sorted(found, key=lambda c: c.predicted)


def _search_fitting(searcher: _Searcher, stage, costs: CostTable, seed: int, initial: list[ExecutionPlan]):
    """The result of a search whose best plan fits the memory by what its compiled calls need, and the costs.

    For the machine at hand the calls are compiled when they are timed or run; for another cluster they are compiled
    here. A plan that turns out too large corrects the costs, and the search is repeated.
    """
    from real_jax.planner.memory import check
    from real_jax.planner.search import search

    about = (stage.graph, stage.work, searcher.cluster)
    for _ in range(_CORRECTIONS):
        result = search(*about, costs, seed=seed, initial=initial)
        if searcher.local or searcher.target.kind == "partitioner":
            break
        costs = costs.updated(searcher.footprints(stage, result.best, costs))
        if check(result.best, *about, costs) is None:
            break
        searcher.listener.note(f"{stage.name}: the plan's compiled calls need more memory than predicted; once more")
        initial = [p for p in initial if check(p, *about, costs) is None]
    return result, costs


def _with_layers(searcher: _Searcher, stage, found: list[Candidate], costs: CostTable) -> tuple[list, CostTable]:
    """`found` predicted anew from runs with few layers, the fastest first; and the costs, those of their calls renewed."""
    renewed = _time_layers(searcher, stage, [c.plan for c in found])
    costs = costs.updated(renewed)
    again = [dataclasses.replace(c, predicted=_seconds(searcher, stage, c.plan, costs)) for c in found]
    return sorted(again, key=lambda c: c.predicted), costs


def _search_stage(searcher: _Searcher, stage, options: SearchOptions, programs: dict):
    """The best plan of one stage, the candidates compared, the costs, and the lower bound."""
    costs = searcher.all_costs(stage)
    plain = _heuristics(searcher, stage, costs)
    searcher.listener.note(f"{stage.name}: searching")
    plans = [c.plan for c in plain]
    result, costs = _search_fitting(searcher, stage, costs, options.seed, plans)
    found = [Candidate(stage.name, plan.origin, plan, seconds) for plan, seconds in result.top]
    timed = options.timed
    if searcher.local and options.layered:
        found, costs = _with_layers(searcher, stage, found[: options.layered], costs)
    if not (searcher.local and timed):
        return found[0], [found[0], *plain], costs, result.lower_bound
    # One call alone is well predicted; it is where calls overlap that a second plan is worth its time.
    several = len(stage.graph.calls) > 1
    quickest = timed if several else 0
    rivals = [c for i, c in enumerate(plain) if i < quickest or c.origin == "heuristic:symmetric"]
    same = [c.plan.placements for c in rivals]
    chosen = _unlike([c for c in found if c.plan.placements not in same], timed if several else 1) + rivals
    chosen = _time_candidates(searcher, stage, chosen, programs)
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
    searcher = _Searcher(experiment, cluster, listener)
    options = SearchOptions(timed, layered, seed)
    key = _search_key(searcher, options)
    kept = None if fresh else searcher.store.plan(key)
    if kept:
        listener.note("plan found by an earlier search")
        return _from_kept(searcher, kept)
    found = FoundPlan(ExecutionPlan("", {}), searcher.cluster, searcher.stages, {}, compiler=searcher.target.describe())
    placements = {}
    for stage in searcher.stages:
        best, compared, found.costs[stage.name], bound = _search_stage(searcher, stage, options, found.programs)
        found.candidates += compared
        found.lower_bounds[stage.name] = bound
        placements |= best.plan.placements
    timing = ", the fastest of those timed" if any(c.measured is not None for c in found.candidates) else ""
    found.plan = ExecutionPlan(searcher.cluster.name, placements, f"search, seed {seed}{timing}")
    searcher.store.record_plan(key, _keep(found))
    return found


def _search_key(searcher: _Searcher, options: SearchOptions) -> str:
    """Equal for searches that must find the same: same graphs, workloads, cluster and software."""
    import hashlib
    import json

    from real_jax.cost.compile import FORMAT
    from real_jax.spec.files import to_data

    stages = [[s.name, to_data(s.graph), to_data(s.work)] for s in searcher.stages]
    content = [stages, to_data(searcher.cluster), to_data(options), searcher.target.key, FORMAT, _VERSION]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _keep(found: FoundPlan) -> dict:
    from real_jax.spec.files import plan_data

    kept = [{**dataclasses.asdict(c), "plan": plan_data(c.plan)} for c in found.candidates]
    return {"plan": plan_data(found.plan), "candidates": kept, "lower_bounds": found.lower_bounds}


def _from_kept(searcher: _Searcher, kept: dict) -> FoundPlan:
    from real_jax.spec.files import plan_from_data

    plan = plan_from_data(kept["plan"], "the cache")
    candidates = [Candidate(**{**c, "plan": plan_from_data(c["plan"], "the cache")}) for c in kept["candidates"]]
    return _described(searcher, plan, candidates=candidates, lower_bounds=kept["lower_bounds"])


def _described(searcher: _Searcher, plan: ExecutionPlan, **more) -> FoundPlan:
    """`plan` with its predicted costs."""
    costs = {s.name: searcher.named_costs(s, plan) for s in searcher.stages}
    return FoundPlan(plan, searcher.cluster, searcher.stages, costs, compiler=searcher.target.describe(), **more)


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
    searcher = _Searcher(experiment, cluster, listener)
    _check(searcher, plan)
    plan = dataclasses.replace(plan, cluster=searcher.cluster.name)
    if layered and searcher.local:
        for stage in searcher.stages:
            costs = _time_layers(searcher, stage, [plan])
            mine = {c.name: plan[c.name] for c in stage.graph.calls if c.kind != "host"}
            searcher.footprints(stage, ExecutionPlan(plan.cluster, mine), costs)
    return _described(searcher, plan)


def heuristic_plan(
    experiment: Experiment, name: str, cluster: Cluster | None = None, listener: Listener = SILENT
) -> FoundPlan:
    """The plan of a named heuristic."""
    from real_jax.planner.heuristics import HEURISTICS, heuristic

    if name not in HEURISTICS:
        raise UsageError(f"There is no heuristic {name!r}. Heuristics: {', '.join(HEURISTICS)}.")
    searcher = _Searcher(experiment, cluster, listener)
    placements, costs = {}, {}
    for stage in searcher.stages:
        costs[stage.name] = searcher.all_costs(stage)
        placements |= heuristic(name, stage.graph, stage.work, searcher.cluster, costs[stage.name]).placements
    plan = ExecutionPlan(searcher.cluster.name, placements, f"heuristic {name}")
    return FoundPlan(plan, searcher.cluster, searcher.stages, costs, compiler=searcher.target.describe())


def _check(searcher: _Searcher, plan: ExecutionPlan) -> None:
    known: set[str] = set()
    for stage in searcher.stages:
        validate(plan, stage.graph, stage.work, searcher.outline)
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
