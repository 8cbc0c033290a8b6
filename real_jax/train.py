"""`python -m real_jax.train`: plan, train, report."""

import dataclasses
import sys
from pathlib import Path

from real_jax import commandline
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment


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
      cpu_devices: virtual devices on a machine without accelerators.
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
    from real_jax.runtime.run_directory import (
        CONFIG,
        PLAN,
        check_run_directory,
        existing_run_directory,
        new_run_directory,
    )
    from real_jax.spec.files import load_cluster, load_plan, save_cluster
    from real_jax.spec.files import load_experiment as load

    if options.cpu_devices < 1:
        raise UsageError(f"--cpu-devices is {options.cpu_devices}. It must be at least 1.")
    cluster = load_cluster(options.cluster) if options.cluster else None
    wanted = options.plan
    if options.resume:
        run_dir = existing_run_directory(experiment.name, options.run_dir)
        _check_same(load(str(run_dir / CONFIG)), experiment, run_dir)
        if wanted == "auto":
            wanted = str(run_dir / PLAN)
    else:
        check_run_directory(options.run_dir)
    if wanted != "auto" and not wanted.startswith("heuristic:"):
        load_plan(wanted)  # its errors come before anything slow
    commandline.quiet_backends()
    from rich.console import Console

    from real_jax.runtime import meshes
    from real_jax.runtime.prepare import load_data, load_tokenizer, model_archs

    meshes.prepare_devices(options.cpu_devices)
    if cluster and cluster.devices != len(meshes.devices()):
        raise UsageError(
            f"--cluster {options.cluster}: {cluster.name!r} has {cluster.devices} devices, but this process "
            f"{len(meshes.devices())}. Train on that cluster, or plan for it from here with python -m real_jax.search."
        )
    console = Console()
    archs = model_archs(experiment)
    load_data(experiment, load_tokenizer(experiment), archs)  # so that bad data is told before the search
    _say_models(console, experiment, archs)

    from real_jax.planning import find_plan
    from real_jax.runtime.progress import PlanningProgress

    listener = PlanningProgress(console)
    try:
        found = find_plan(
            wanted,
            experiment,
            cluster,
            timed=options.timed,
            layered=options.layered,
            seed=experiment.seed,
            fresh=options.fresh,
            listener=listener,
        )
    finally:
        listener.close()
    if not options.resume:
        run_dir = new_run_directory(experiment.name, options.run_dir)
    _say_plan(console, found)
    save_cluster(found.cluster, run_dir / "cluster.yaml")
    found.figure(path=run_dir / "timeline-predicted.png")
    _run(console, experiment, found, run_dir, options.resume)


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


def _run(console, experiment: Experiment, found, run_dir: Path, resume: bool) -> None:
    from real_jax.cost.store import Store
    from real_jax.planner.report import compare_table, gantt
    from real_jax.planning import record_measurements
    from real_jax.runtime.metrics import median_seconds
    from real_jax.runtime.progress import ConsoleListener
    from real_jax.runtime.trainer import Trainer

    listener = ConsoleListener(console)
    trainer = Trainer(
        experiment, found.plan, run_dir=run_dir, resume=resume, programs=found.programs, listener=listener
    )
    try:
        trainer.fit()
        trainer.export(run_dir / "actor")
    finally:
        listener.close()
        trainer.close()
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
