"""`python -m real_jax.train`: plan, train, report."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from real_jax import commandline
from real_jax.spec.errors import Stopped, UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What to run and where.

    Attributes:
      config: a preset's name or the path of a YAML file.
      plan: "auto", "heuristic:NAME" (symmetric, megatron, real-node, disaggregated, colocated-fsdp), or the path of a plan file.
      cluster: path of a cluster file; empty: the machine at hand, measured.
      run_dir: folder of the run; empty: a new one under runs/.
      resume: go on with the run in run_dir (default: the newest one of this experiment) from its newest checkpoint.
      timed: plans that "auto" times on this machine beside as many heuristics.
      layered: of the best plans, how many "auto" first predicts from runs of their calls with few layers.
      fresh: search for a plan again even where the same search was done before.
      cpu_devices: virtual devices of each process on a machine without accelerators.
    """

    config: str = commandline.DEFAULT_CONFIG
    plan: str = "auto"
    cluster: str = ""
    run_dir: str = ""
    resume: bool = False
    timed: int = 2
    layered: int = 0
    fresh: bool = False
    cpu_devices: int = 8


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 done, 1 failed, 2 wrong usage."""

    def body() -> None:
        options, experiment = commandline.parse(
            TrainOptions,
            argv,
            "python -m real_jax.train",
            "Train a language model by RLHF, each model call under its own mesh.",
        )
        _train(options, experiment)

    return commandline.run(body)


def _train(options: TrainOptions, experiment: Experiment) -> None:
    from real_jax.spec.files import load_cluster, load_plan

    if options.cpu_devices < 1:
        raise UsageError(f"--cpu-devices is {options.cpu_devices}. It must be at least 1.")
    cluster = load_cluster(options.cluster) if options.cluster else None
    if options.plan != "auto" and not options.plan.startswith("heuristic:"):
        load_plan(options.plan)  # its errors come before anything slow
    commandline.quiet_backends()
    from real_jax.runtime import distributed, joining, meshes

    if place := joining.membership(os.environ):
        commandline.quiet_collectives()
    joining.join(place, options.cpu_devices)
    meshes.prepare_devices(options.cpu_devices)
    told: list[_Prepared] = []

    def prepare() -> tuple[Path, ExecutionPlan]:
        told.append(_prepare(options, experiment, cluster))
        return told[0].run_dir, told[0].found.plan

    run_dir, plan = distributed.once(prepare)
    _run(told[0] if told else None, experiment, plan, run_dir, options.resume)


@dataclasses.dataclass
class _Prepared:
    """What the first process has found before the run starts."""

    console: Any
    run_dir: Path
    found: Any


def _prepare(options: TrainOptions, experiment: Experiment, cluster: Cluster | None) -> _Prepared:
    """Data, run directory and plan, all checked and shown."""
    from rich.console import Console

    from real_jax.runtime import meshes
    from real_jax.runtime.prepare import load_data, load_tokenizer, model_archs
    from real_jax.runtime.run_directory import (
        CONFIG,
        PLAN,
        STOPPED,
        check_run_directory,
        existing_run_directory,
        new_run_directory,
    )
    from real_jax.spec.files import load_experiment, save_cluster, save_experiment, save_plan

    console, wanted = Console(), options.plan
    if options.resume:
        run_dir = existing_run_directory(experiment.name, options.run_dir)
        _check_same(load_experiment(str(run_dir / CONFIG)), experiment, run_dir)
        if wanted == "auto":
            wanted = str(run_dir / PLAN)
        (run_dir / STOPPED).unlink(missing_ok=True)
    else:
        check_run_directory(options.run_dir)
    if cluster and cluster.devices != len(meshes.devices()):
        raise UsageError(
            f"--cluster {options.cluster}: {cluster.name!r} has {cluster.devices} devices, but this job "
            f"{len(meshes.devices())}. Train on that cluster, or plan for it from here with python -m real_jax.search."
        )
    archs = model_archs(experiment)
    load_data(experiment, load_tokenizer(experiment), archs)  # so that bad data is told before the search
    _say_models(console, experiment, archs)
    found = _find(console, wanted, options, experiment, cluster)
    if not options.resume:
        run_dir = new_run_directory(experiment.name, options.run_dir)
        save_experiment(experiment, run_dir / CONFIG)  # from here on the run can be resumed
        save_plan(found.plan, run_dir / PLAN)
    _say_plan(console, found)
    save_cluster(found.cluster, run_dir / "cluster.yaml")
    found.figure(path=run_dir / "timeline-predicted.png")
    return _Prepared(console, run_dir, found)


def _find(console, wanted: str, options: TrainOptions, experiment: Experiment, cluster: Cluster | None):
    from real_jax.apart import find_plan_apart
    from real_jax.planning import find_plan
    from real_jax.runtime import distributed, meshes
    from real_jax.runtime.progress import PlanningProgress

    more = {"timed": options.timed, "layered": options.layered, "seed": experiment.seed, "fresh": options.fresh}
    if distributed.processes() > 1:
        return find_plan_apart(wanted, experiment, cluster, meshes.platform(), len(meshes.devices()), **more)
    listener = PlanningProgress(console)
    try:
        return find_plan(wanted, experiment, cluster, listener=listener, **more)
    finally:
        listener.close()


def _check_same(kept: Experiment, asked: Experiment, run_dir: Path) -> None:
    """A run goes on as it began; only how long it lasts, and how often it saves and evaluates, may change."""
    free = ("steps", "checkpoint", "evaluate_every")
    for field in dataclasses.fields(Experiment):
        if field.name not in free and getattr(kept, field.name) != getattr(asked, field.name):
            raise UsageError(
                f"--resume: the run in {str(run_dir)!r} has {field.name} = {getattr(kept, field.name)!r}, but now it is "
                f"{getattr(asked, field.name)!r}. Give the same configuration, or start a new run."
            )


def _say_models(console, experiment: Experiment, archs) -> None:
    from rich.table import Table

    from real_jax.runtime.prepare import model_counts

    table = Table(title=f"{experiment.name}: models")
    for header in ("model", "from", "layers x width", "parameters", "trained"):
        table.add_column(header, justify="right" if header == "parameters" else "left")
    origin = {
        "actor": experiment.actor.path or f"random {experiment.actor.arch}",
        "reference": "the actor before PPO",
        "critic": experiment.critic.path
        or experiment.critic.arch
        or ("the reward model" if "reward" in archs else "the actor"),
        "reward": experiment.reward.model.path or experiment.reward.model.arch or "the actor",
    }
    trained = {"actor": "sft, ppo" if experiment.sft.steps else "ppo", "critic": "ppo", "reference": "frozen"}
    trained["reward"] = "preference pairs" if experiment.preference.steps else "frozen"
    for model, count in model_counts(archs).items():
        arch = archs[model]
        table.add_row(model, origin[model], f"{arch.layers} x {arch.d_model}", f"{count:,}", trained[model])
    if experiment.reward.function:
        table.add_row("reward", experiment.reward.function, "-", "-", "a Python function")
    console.print(table)


def _say_plan(console, found) -> None:
    from real_jax.planner.report import graph_table

    console.print(graph_table(found.stages[-1].graph))
    for table in found.shown():
        console.print(table)


def _run(told: _Prepared | None, experiment: Experiment, plan: ExecutionPlan, run_dir: Path, resume: bool) -> None:
    """Trains, in all processes; the first one, which was told more, shows how it goes and what came out."""
    from real_jax.runtime import signals
    from real_jax.runtime.progress import ConsoleListener
    from real_jax.runtime.run_directory import STOPPED
    from real_jax.runtime.trainer import Trainer

    listener = ConsoleListener(told.console) if told else None
    more = {"listener": listener}
    if told:
        more |= {"programs": told.found.programs, "cluster": told.found.cluster}
    with signals.listening() as stop:
        trainer = Trainer(experiment, plan, run_dir=run_dir, resume=resume, stop=stop.agreed, **more)
        try:
            trainer.fit()
            trainer.export(run_dir / "actor")
        except Stopped as stopped:
            if not told:
                raise SystemExit(1) from None  # the first process tells it
            (run_dir / STOPPED).write_text(f"{stopped} {stop.why()}\n")
            again = f"Go on with --resume --run-dir {run_dir}."
            raise Stopped(f"{stopped} {stop.why()} Its state is in {run_dir / 'checkpoints'}. {again}") from None
        finally:
            if listener:
                listener.close()
            trainer.close()
    if told:
        _report(told, experiment, trainer)


def _report(told: _Prepared, experiment: Experiment, trainer) -> None:
    from real_jax.cost.store import Store
    from real_jax.costing import record_measurements
    from real_jax.planner.report import compare_table, gantt
    from real_jax.runtime.metrics import median_seconds

    console, run_dir, found = told.console, told.run_dir, told.found
    rows, store = [], Store()
    for stage in found.stages:
        measured, predicted = median_seconds(trainer.metrics, stage.name), found.predicted(stage.name)
        names = dict.fromkeys([*predicted, *measured])
        rows += [(n, predicted.get(n), measured.get(n)) for n in names]
        record_measurements(
            stage, found.cluster, found.plan, {k: v for k, v in measured.items() if stage.graph.has(k)}, store
        )
    console.print(compare_table(rows, "Seconds per call and reallocation (median over iterations)"))
    picture = run_dir / "timeline.png"
    if trainer.events:
        gantt(trainer.events, picture, f"{experiment.name}: one PPO iteration, as measured")
    _say_result(console, trainer)
    console.print("Files written:")
    for path in written_files(run_dir):
        console.print(f"  {path}", soft_wrap=True, highlight=False)


def _say_result(console, trainer) -> None:
    from rich.table import Table

    before, after = trainer.before, trainer.after
    table = Table(title="Held-out prompts, before and after PPO", show_lines=True)
    for header in ("prompt", "before", "score", "after", "score"):
        table.add_column(header, justify="right" if header == "score" else "left")
    for i in range(min(3, len(after.prompts))):
        table.add_row(
            after.prompts[i],
            before.responses[i],
            f"{before.scores[i]:+.2f}",
            after.responses[i],
            f"{after.scores[i]:+.2f}",
        )
    console.print(table)
    ppo = [row for row in trainer.metrics if row["stage"] == "ppo"]
    kl = f", KL from the reference {ppo[-1]['actor_train/kl']:.2f} nats per response" if ppo else ""
    console.print(
        f"Held-out reward by {after.judge}: {before.reward:+.3f} before, {after.reward:+.3f} after "
        f"({after.reward - before.reward:+.3f}) on {len(after.scores)} prompts{kl}."
    )


def written_files(run_dir: Path) -> list[Path]:
    """What a run has written: its files, and each checkpoint as one folder."""
    checkpoints = sorted(p for p in run_dir.glob("checkpoints/*/*") if p.is_dir())
    others = [p for p in run_dir.rglob("*") if p.is_file() and "checkpoints" not in p.relative_to(run_dir).parts]
    return sorted(others) + checkpoints


if __name__ == "__main__":
    sys.exit(main())
