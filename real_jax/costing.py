"""What the calls of an experiment cost on a cluster: by its compiler, by what was measured, by what has run before."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from real_jax.spec.costs import CostTable
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement


class Listener:
    """Hears how planning goes on; this one keeps it to itself."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def progress(self, what: str, done: int, total: int, item: str) -> None:
        """`done` of `total` parts of `what` are done, `item` the last of them."""


SILENT = Listener()


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


class Costing:
    """What the calls of an experiment cost on a cluster: as many of them as are asked for, from wherever that is known."""

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


def time_layers(costing: Costing, stage, plans: Sequence[ExecutionPlan]) -> CostTable:
    """Runs the calls of `plans` with few layers, as far as that has not been done, and returns their costs."""
    from real_jax.cost.table import layers_key, measurement_key
    from real_jax.runtime import layers
    from real_jax.runtime.prepare import load_tokenizer, make_build

    tokenizer = load_tokenizer(costing.experiment)
    build = make_build(costing.experiment, stage, tokenizer.eos_id, tokenizer.pad_id)
    calls = [c for c in stage.graph.calls if c.kind != "host"]
    missing = {}
    for call, plan in ((call, plan) for plan in plans for call in calls):
        key = measurement_key(call, stage.work, plan[call.name], costing.cluster.name)
        if costing.store.measured(key) is None and costing.store.measured(layers_key(key)) is None:
            missing.setdefault(layers_key(key), (call, dataclasses.replace(plan[call.name], first=0, offload=False)))
    for done, (key, (call, placement)) in enumerate(missing.items(), 1):
        seconds, _ = layers.at_depth(layers.time_layers(build, call, placement), stage.work.archs[call.model].layers)
        costing.store.record(key, seconds)
        item = f"{call.name} over {placement.describe()}"
        costing.listener.progress(f"{stage.name}: timing layers", done, len(missing), item)
    return costing.costs(stage, {c.name: [plan[c.name] for plan in plans] for c in calls})
