"""A training job as a SLURM batch script: readable, and the same whenever it is requeued."""

import dataclasses
import re
import shlex
from typing import Literal

from real_jax.spec.errors import UsageError

_TIME = re.compile(r"(\d+-\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){0,2})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """The job that SLURM is asked for.

    Attributes:
      nodes: machines.
      gpus_per_node: GPUs of each; 0 trains on CPUs.
      time: limit, as SLURM writes it (24:00:00, 2-12:00:00, minutes).
      partition, account: as your cluster names them; empty: its defaults.
      job_name: empty: the experiment's name.
      processes_per_node: "node" starts one process a node, "gpu" one for each GPU.
      cpus_per_task: CPU cores of each process; 0: the cluster's default.
      container: image that the processes run in, for clusters with pyxis (srun --container-image).
      modules: environment modules to load, in order.
      env: NAME=VALUE lines to export.
      sbatch: further lines for sbatch, as "--exclusive".
      setup: shell lines to run first, as "source env/bin/activate".
      signal_seconds: how long before the time limit the run is told to save its state and end.
      requeue: whether a job that was told to end (time limit, preemption) goes back into the queue.
      log: file for the job's output; %j is its number.
      script: where to write the batch script; empty: JOB_NAME.sbatch.
      dry_run: show the script; write and submit nothing.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    time: str = "1:00:00"
    partition: str = ""
    account: str = ""
    job_name: str = ""
    processes_per_node: Literal["node", "gpu"] = "node"
    cpus_per_task: int = 0
    container: str = ""
    modules: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    signal_seconds: int = 300
    requeue: bool = True
    log: str = "slurm-%j.log"
    script: str = ""
    dry_run: bool = False


def check(options: SlurmOptions) -> None:
    """Raises UsageError by field."""
    for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 0), ("signal_seconds", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}. It must be at least {least}.")
    if not _TIME.fullmatch(options.time):
        raise UsageError(
            f"--time is {options.time!r}. Write it as SLURM does: minutes, HH:MM:SS or D-HH:MM:SS, as 24:00:00."
        )
    for pair in options.env:
        name, equals, _ = pair.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(f"--env has {pair!r}. Write NAME=VALUE.")
    for line in options.sbatch:
        if not line.startswith("-") or "\n" in line:
            raise UsageError(f"--sbatch has {line!r}. Write an option of sbatch, as --sbatch=--exclusive.")


def tasks_per_node(options: SlurmOptions) -> int:
    return max(options.gpus_per_node, 1) if options.processes_per_node == "gpu" else 1


def batch_script(options: SlurmOptions, name: str, train: list[str], run_dir: str = "") -> str:
    """The text of the script.

    Args:
      name: of the job, where the options leave it open.
      train: arguments of `real_jax.train`, neither --run-dir nor --resume among them.
      run_dir: of the run; empty: one that bears the job's number, which a requeued job keeps.
    """
    name = options.job_name or name
    asked = {
        "job-name": name,
        "nodes": options.nodes,
        "ntasks-per-node": tasks_per_node(options),
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_task or None,
        "time": options.time,
        "partition": options.partition or None,
        "account": options.account or None,
        "output": options.log,
        "open-mode": "append",
        "signal": f"USR1@{options.signal_seconds}",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{k}={v}" for k, v in asked.items() if v is not None)]
    lines += [f"#SBATCH --{'requeue' if options.requeue else 'no-requeue'}", *(f"#SBATCH {x}" for x in options.sbatch)]
    lines += ["", *options.setup, *(f"module load {shlex.quote(m)}" for m in options.modules)]
    lines += [f"export {n}={shlex.quote(v)}" for n, _, v in (pair.partition("=") for pair in options.env)]
    where = shlex.quote(run_dir) if run_dir else f"runs/{shlex.quote(name)}-$SLURM_JOB_ID"
    container = f"--container-image={shlex.quote(options.container)} " if options.container else ""
    if container:
        container += '--container-mounts="$PWD:$PWD" --container-workdir="$PWD" '
    lines += [
        f"run_dir={where}",
        "",
        "# Process 0 is on this node, the first of the job. The port is the job's own; should another program have it,",
        "# the next free one is taken.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)",
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        'while (: </dev/tcp/127.0.0.1/"$port") 2>/dev/null; do port=$((port + 1)); done',
        'export REAL_JAX_COORDINATOR="$address:$port"',
        "",
        "# A job that was requeued goes on from its newest checkpoint.",
        "resume=$([[ -e $run_dir/config.yaml ]] && echo --resume)",
        f"srun --kill-on-bad-exit=1 {container}python -m real_jax.train \\",
        f'  {shlex.join(train)}{" " if train else ""}--run-dir "$run_dir" $resume',
        "status=$?",
    ]
    if options.requeue:
        lines += [
            "",
            "# The run was told to end and has saved its state: back into the queue.",
            '[[ -e $run_dir/stopped ]] && scontrol requeue "$SLURM_JOB_ID"',
        ]
    return "\n".join([*lines, 'exit "$status"', ""])
