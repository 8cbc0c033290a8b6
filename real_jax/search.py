"""`python -m real_jax.search`: find an execution plan for an experiment on a cluster."""

import dataclasses
import sys
from pathlib import Path

from real_jax import commandline
from real_jax.spec.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Where to plan for and where to write.

    Attributes:
      config: a preset's name or the path of a YAML file.
      cluster: path of a cluster file; empty: the machine at hand, measured.
      out: path of the plan file to write; empty: plans/NAME-CLUSTER.yaml.
      timed: plans to time on this machine, beside as many heuristics.
      layered: of the best plans, how many are first predicted from runs of their calls with few layers.
      search_seed: seed of the search.
      fresh: search again even where the same search was done before.
    """

    config: str = commandline.DEFAULT_CONFIG
    cluster: str = ""
    out: str = ""
    timed: int = 2
    layered: int = 0
    search_seed: int = 0
    fresh: bool = False


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 done, 1 failed, 2 wrong usage."""

    def body() -> None:
        options, experiment = commandline.parse(
            SearchOptions, argv, "python -m real_jax.search", "Find an execution plan for an experiment on a cluster."
        )
        _search_command(options, experiment)

    return commandline.run(body)


def _search_command(options: SearchOptions, experiment: Experiment) -> None:
    from real_jax.spec.files import load_cluster, save_plan

    cluster = load_cluster(options.cluster) if options.cluster else None
    name = cluster.name if cluster else "this-machine"
    out = Path(options.out or Path("plans") / f"{experiment.name}-{name}.yaml")
    commandline.check_writable(out, "--out")
    commandline.quiet_backends()
    from rich.console import Console

    from real_jax.planning import search_plan
    from real_jax.runtime.progress import PlanningProgress

    console = Console()
    listener = PlanningProgress(console)
    try:
        found = search_plan(
            experiment,
            cluster,
            timed=options.timed,
            layered=options.layered,
            seed=options.search_seed,
            fresh=options.fresh,
            listener=listener,
        )
    finally:
        listener.close()
    for table in found.shown():
        console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_plan(found.plan, out)
    picture = out.with_suffix(".png")
    found.figure(path=picture)
    console.print(f"Files written: {out}, {picture}")


if __name__ == "__main__":
    sys.exit(main())
