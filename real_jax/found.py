"""What a search for a plan found: it shows itself as tables and pictures, in a terminal and in a notebook."""

import dataclasses
import io
from pathlib import Path
from typing import Any

from real_jax.spec.costs import CostTable
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan


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
    """A plan and all that is known of it.

    Attributes:
      plan: a placement for every call of every stage.
      stages: the stages (`runtime.prepare.Stage`), in order.
      costs: stage -> costs of the placements that were considered.
      candidates: the plans that were compared: the best that were found, and the heuristics.
      lower_bounds: stage -> seconds per iteration that no plan can beat under these costs.
      compiler: in words, which compiler the costs come from.
      programs: compiled programs that a Trainer can take over.
    """

    plan: ExecutionPlan
    cluster: Cluster
    stages: list[Any]
    costs: dict[str, CostTable]
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    lower_bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    compiler: str = ""
    programs: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    def stage(self, name: str = ""):
        """The stage called `name`; the last one where it is empty."""
        return next(s for s in self.stages if s.name == name) if name else self.stages[-1]

    def of(self, stage) -> ExecutionPlan:
        """The part of the plan that `stage` uses."""
        placements = {c.name: self.plan[c.name] for c in stage.graph.calls if c.kind != "host"}
        mine = (c.origin for c in self.candidates if c.stage == stage.name and c.plan.placements == placements)
        return ExecutionPlan(self.plan.cluster, placements, next(mine, self.plan.origin))

    def tables(self) -> list:
        """The plan of each stage as a table (rich)."""
        from real_jax.planner.report import plan_table

        return [plan_table(self.of(s), s.graph, s.work, self.cluster, self.costs[s.name]) for s in self.stages]

    def candidates_table(self):
        """The plans that were compared, as a table (rich)."""
        from real_jax.planner.report import candidates_table

        rows = []
        for c in self.candidates:
            chosen = all(self.plan[k] == p for k, p in c.plan.placements.items())
            mine = self.iteration_seconds(c.stage)
            rows.append((c.stage, c.origin, chosen, c.predicted, c.measured, c.predicted / mine if mine else 1.0))
        return candidates_table(rows)

    def summary_table(self, stage: str = ""):
        """What the plan of a stage reaches and what limits it, as a table (rich)."""
        from real_jax.planner.report import summary_table

        s = self.stage(stage)
        bound = self.lower_bounds.get(s.name)
        return summary_table(self.of(s), s.graph, s.work, self.cluster, self.costs[s.name], bound, self.compiler)

    def iteration_seconds(self, stage: str = "") -> float:
        """Predicted seconds of an iteration of a stage in the steady state."""
        return self.timeline(stage).iteration_seconds

    def timeline(self, stage: str = ""):
        """The simulated timeline of a stage (`planner.simulate.Timeline`)."""
        from real_jax.planner.simulate import simulate

        s = self.stage(stage)
        return simulate(self.of(s), s.graph, s.work, self.cluster, self.costs[s.name])

    def predicted(self, stage: str = "") -> dict[str, float]:
        """Predicted seconds of each call and reallocation of a stage."""
        events = self.timeline(stage).events
        last = max(e.iteration for e in events)
        return {e.name: e.end - e.start for e in events if e.iteration == last}

    def figure(self, stage: str = "", path: Path | str | None = None):
        """The simulated timeline as a picture: a matplotlib figure, or a PNG at `path`."""
        from real_jax.planner.report import gantt

        s = self.stage(stage)
        return gantt(self.timeline(s.name).events, path, f"Predicted timeline of {s.name} on {self.cluster.name}")

    def shown(self) -> list:
        """All tables in the order in which they are read."""
        return [*self.tables(), *([self.candidates_table()] if self.candidates else []), self.summary_table()]

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(record=True, width=120, file=io.StringIO())
        for table in self.shown():
            console.print(table)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
