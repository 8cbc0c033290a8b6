"""An execution plan for an experiment on a cluster: searched, given by the user, or of a named heuristic.

A plan is searched stage by stage: every feasible placement of every call is costed, a search over the simulated timeline
gives the best few plans, and on the machine at hand these and the symmetric heuristic are timed and the fastest is kept.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from real_jax.spec.costs import CostTable
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement, validate

AUTO, HEURISTIC = "auto", "heuristic:"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan of one stage with its predicted and, where it was timed, its measured seconds per iteration."""

    stage: str
    origin: str
    plan: ExecutionPlan
    predicted: float
    measured: float | None = None


@dataclasses.dataclass
class FoundPlan:
    """A plan and all that is known of it; shows itself as tables and pictures.

    Attributes:
      plan: a placement for every call of every stage.
      stages: the stages (`runtime.prepare.Stage`), in order.
      costs: stage -> costs of the placements that were considered.
      candidates: the plans that were compared.
      programs: compiled programs that a Trainer can take over.
    """

    plan: ExecutionPlan
    cluster: Cluster
    stages: list[Any]
    costs: dict[str, CostTable]
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    programs: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    def tables(self) -> list:
        """The plan of each stage as a table (rich)."""
        from real_jax.planner.report import plan_table

        return [plan_table(self.of(s), s.graph, s.work, self.cluster, self.costs[s.name]) for s in self.stages]

    def candidates_table(self):
        """The plans that were compared, as a table (rich)."""
        from rich.table import Table

        from real_jax.planner.report import format_seconds

        table = Table(title="Plans compared (seconds per iteration)")
        for header in ("stage", "plan", "predicted", "measured"):
            table.add_column(header, justify="left" if header in ("stage", "plan") else "right")
        for c in self.candidates:
            chosen = " *" if all(self.plan[k] == p for k, p in c.plan.placements.items()) else ""
            measured = "-" if c.measured is None else format_seconds(c.measured)
            table.add_row(c.stage, c.origin + chosen, format_seconds(c.predicted), measured)
        return table

    def of(self, stage) -> ExecutionPlan:
        """The part of the plan that `stage` uses."""
        placements = {c.name: self.plan[c.name] for c in stage.graph.calls if c.kind != "host"}
        mine = (c.origin for c in self.candidates if c.stage == stage.name and c.plan.placements == placements)
        return ExecutionPlan(self.plan.cluster, placements, next(mine, self.plan.origin))

    def timeline(self, stage: str = "ppo"):
        """The simulated timeline of a stage (`planner.simulate.Timeline`)."""
        from real_jax.planner.simulate import simulate

        s = next(s for s in self.stages if s.name == stage)
        return simulate(self.of(s), s.graph, s.work, self.cluster, self.costs[stage])

    def predicted(self, stage: str = "ppo") -> dict[str, float]:
        """Predicted seconds of each call and reallocation of a stage."""
        last = max(e.iteration for e in self.timeline(stage).events)
        names = {}
        for event in self.timeline(stage).events:
            if event.iteration == last:
                names[event.name] = event.end - event.start
        return names

    def figure(self, stage: str = "ppo", path: Path | str | None = None):
        """The simulated timeline as a picture: a matplotlib figure, or a PNG at `path`."""
        from real_jax.planner.report import gantt

        return gantt(self.timeline(stage).events, path, f"Predicted timeline of {stage} on {self.cluster.name}")

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(record=True, width=120, file=io.StringIO())
        for table in [*self.tables(), self.candidates_table()]:
            console.print(table)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def local_cluster(store, note: Callable[[str], None]) -> Cluster:
    """The machine at hand as a cluster: probed the first time, then remembered."""
    from real_jax.cost.measure import probe_cluster, probe_key

    key = probe_key()
    cluster = store.cluster(key)
    if cluster is None:
        note("measuring this machine (a few seconds, once)")
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

    def __init__(self, experiment: Experiment, cluster: Cluster | None, note: Callable[[str], None]):
        from real_jax.cost.store import Store, default_folder
        from real_jax.runtime import meshes
        from real_jax.runtime.prepare import make_stages, model_archs

        meshes.prepare_devices()
        meshes.use_compilation_cache(str(default_folder() / "xla"))
        self.experiment, self.note = experiment, note
        self.archs = model_archs(experiment)
        self.stages = make_stages(experiment, self.archs)
        self.store = Store()
        self._given = cluster
        here = (meshes.platform(), len(meshes.devices()))
        self.local = cluster is None or (cluster.platform, cluster.devices) == here
        if cluster and cluster.devices > here[1]:
            raise UsageError(
                f"Cluster {cluster.name!r} has {cluster.devices} devices, but this process only {here[1]} to "
                "compile for. Use python -m real_jax.search, which makes as many virtual ones."
            )

    @functools.cached_property
    def cluster(self) -> Cluster:
        """What is planned for; the machine at hand is measured when its numbers are first needed."""
        return self._given or local_cluster(self.store, self.note)

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

    def costs(self, stage, options: Mapping[str, Any]) -> CostTable:
        from real_jax.cost.table import fill_costs

        def progress(done: int, total: int, what: str) -> None:
            if done == total or done % 10 == 0:
                self.note(f"{stage.name}: costed {done} of {total} layer programs")

        return fill_costs(stage.graph, stage.work, self.cluster, options, self.store, progress)

    def all_costs(self, stage) -> CostTable:
        from real_jax.planner.enumerate import placements

        calls = [c.name for c in stage.graph.calls]
        options = {c: placements(c, stage.graph, stage.work, self.cluster) for c in calls}
        for call, found in options.items():
            if not found:
                raise UsageError(self._why_none(stage, call))
        return self.costs(stage, options)

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
    from real_jax.runtime.prepare import load_tokenizer, make_build, program_key
    from real_jax.runtime.trial import time_plan

    timed, experiment = [], searcher.experiment
    tokenizer = load_tokenizer(experiment)
    tokens = (tokenizer.eos_id, tokenizer.pad_id)
    build = make_build(experiment, stage, *tokens)
    for number, candidate in enumerate(candidates, 1):
        searcher.note(f"{stage.name}: timing plan {number} of {len(candidates)} ({candidate.origin})")
        keys = {c: program_key(experiment, stage.name, c, p, tokens) for c, p in candidate.plan.placements.items()}
        known = {call: programs[key] for call, key in keys.items() if key in programs}
        trial, made = time_plan(build, candidate.plan, known=known)
        programs |= {keys[call]: program for call, program in made.items()}
        seconds = {k: v for k, v in trial.events.items() if stage.graph.has(k) and stage.graph.call(k).kind != "host"}
        record_measurements(stage, searcher.cluster, candidate.plan, seconds, searcher.store)
        timed.append(dataclasses.replace(candidate, measured=trial.seconds))
    return timed


def _unlike(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates that differ in more than which devices their calls start on."""
    kept: dict[tuple, Candidate] = {}
    for c in candidates:
        shape = tuple((call, dataclasses.replace(p, first=0)) for call, p in sorted(c.plan.placements.items()))
        kept.setdefault(shape, c)
    return list(kept.values())[:count]


def _search_stage(
    searcher: _Searcher, stage, timed: int, seed: int, programs: dict
) -> tuple[Candidate, list, CostTable]:
    """The best plan of one stage, the candidates compared, and the costs."""
    from real_jax.planner.heuristics import symmetric
    from real_jax.planner.search import search

    costs = searcher.all_costs(stage)
    try:
        base = [symmetric(stage.graph, stage.work, searcher.cluster, costs)]
    except UsageError as error:  # the batch or the heads do not divide over all devices: nothing to compare with
        base = []
        searcher.note(str(error))
    result = search(stage.graph, stage.work, searcher.cluster, costs, seed=seed, initial=base)
    found = [Candidate(stage.name, plan.origin, plan, seconds) for plan, seconds in result.top]
    plain = [Candidate(stage.name, p.origin, p, _seconds(searcher, stage, p, costs)) for p in base]
    if not (searcher.local and timed):
        return found[0], [found[0], *plain], costs
    # One call alone is well predicted; it is where calls overlap that a second plan is worth its time.
    timed = timed if len(stage.graph.calls) > 1 else 1
    same = [p.placements for p in base]
    chosen = _unlike([c for c in found if c.plan.placements not in same], timed) + plain
    chosen = _time_candidates(searcher, stage, chosen, programs)
    return min(chosen, key=lambda c: c.measured), chosen, costs


def search_plan(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    timed: int = 2,
    seed: int = 0,
    fresh: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> FoundPlan:
    """Finds a plan for every call of every stage.

    Args:
      cluster: what to plan for; None: the machine at hand, measured.
      timed: how many of the best plans are timed on this machine, beside the symmetric heuristic, so that the plan
        returned never measured slower than it; 0 trusts the prediction. Another cluster's plans are never timed.
      fresh: search again even where the same search was done before.
      note: hears of progress.
    """
    searcher = _Searcher(experiment, cluster, note)
    key = _search_key(searcher, timed, seed)
    kept = None if fresh else searcher.store.plan(key)
    if kept:
        note("plan found by an earlier search")
        return _from_kept(searcher, kept)
    placements, candidates, costs, programs = {}, [], {}, {}
    for stage in searcher.stages:
        best, compared, costs[stage.name] = _search_stage(searcher, stage, timed, seed, programs)
        candidates += compared
        placements |= best.plan.placements
    timing = ", the fastest of those timed" if any(c.measured is not None for c in candidates) else ""
    plan = ExecutionPlan(searcher.cluster.name, placements, f"search, seed {seed}{timing}")
    searcher.store.record_plan(key, _keep(plan, candidates))
    return FoundPlan(plan, searcher.cluster, searcher.stages, costs, candidates, programs)


def _search_key(searcher: _Searcher, timed: int, seed: int) -> str:
    """Equal for searches that must find the same: same graphs, workloads, cluster and software."""
    import hashlib
    import json

    import jax

    from real_jax.spec.files import to_data

    stages = [[s.name, to_data(s.graph), to_data(s.work)] for s in searcher.stages]
    content = [stages, to_data(searcher.cluster), timed, seed, jax.__version__]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _keep(plan: ExecutionPlan, candidates: list[Candidate]) -> dict:
    from real_jax.spec.files import plan_data

    kept = [{**dataclasses.asdict(c), "plan": plan_data(c.plan)} for c in candidates]
    return {"plan": plan_data(plan), "candidates": kept}


def _from_kept(searcher: _Searcher, kept: dict) -> FoundPlan:
    from real_jax.spec.files import plan_from_data

    plan = plan_from_data(kept["plan"], "the cache")
    candidates = [Candidate(**{**c, "plan": plan_from_data(c["plan"], "the cache")}) for c in kept["candidates"]]
    costs = {s.name: searcher.named_costs(s, plan) for s in searcher.stages}
    return FoundPlan(plan, searcher.cluster, searcher.stages, costs, candidates)


def given_plan(
    experiment: Experiment,
    plan: ExecutionPlan,
    cluster: Cluster | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> FoundPlan:
    """A plan that the user wrote, checked against the experiment and the cluster, with its predicted costs."""
    searcher = _Searcher(experiment, cluster, note)
    _check(searcher, plan)
    plan = dataclasses.replace(plan, cluster=searcher.cluster.name)
    return FoundPlan(
        plan, searcher.cluster, searcher.stages, {s.name: searcher.named_costs(s, plan) for s in searcher.stages}
    )


def heuristic_plan(
    experiment: Experiment, name: str, cluster: Cluster | None = None, note: Callable[[str], None] = lambda text: None
) -> FoundPlan:
    """The plan of a named heuristic."""
    from real_jax.planner.heuristics import HEURISTICS, heuristic

    if name not in HEURISTICS:
        raise UsageError(f"There is no heuristic {name!r}. Heuristics: {', '.join(HEURISTICS)}.")
    searcher = _Searcher(experiment, cluster, note)
    placements, costs = {}, {}
    for stage in searcher.stages:
        costs[stage.name] = searcher.all_costs(stage)
        placements |= heuristic(name, stage.graph, stage.work, searcher.cluster, costs[stage.name]).placements
    plan = ExecutionPlan(searcher.cluster.name, placements, f"heuristic {name}")
    return FoundPlan(plan, searcher.cluster, searcher.stages, costs)


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
    seed: int = 0,
    fresh: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> FoundPlan:
    """What `--plan` means: "auto", "heuristic:NAME", or the path of a plan file."""
    from real_jax.spec.files import load_plan

    if wanted == AUTO:
        return search_plan(experiment, cluster, timed=timed, seed=seed, fresh=fresh, note=note)
    if wanted.startswith(HEURISTIC):
        return heuristic_plan(experiment, wanted.removeprefix(HEURISTIC), cluster, note)
    return given_plan(experiment, load_plan(wanted), cluster, note)
