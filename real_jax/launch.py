"""`python -m real_jax.launch`: train in several processes, on this machine or by SLURM.

python -m real_jax.launch local --processes 2 --devices-per-process 4 -- --plan auto
python -m real_jax.launch slurm --nodes 16 --gpus-per-node 8 --time 24:00:00 -- --config ppo-llama-7b --plan auto
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeVar

from real_jax import commandline
from real_jax.slurm import SlurmOptions, batch_script, check
from real_jax.spec.errors import RunError, UsageError
from real_jax.spec.experiment import Experiment
from real_jax.train import TrainOptions

Options = TypeVar("Options")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_GRACE_SECONDS = 10.0  # for the rest to end by themselves once one has failed, and again once they were told to


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """Processes of this machine.

    Attributes:
      processes: how many.
      devices_per_process: GPUs of each; on a machine without, virtual CPU devices of each.
    """

    processes: int = 2
    devices_per_process: int = 4


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 done, 1 failed, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return commandline.run(lambda: _launch(argv))


def _launch(argv: list[str]) -> int:
    ways = {"local": (LocalOptions, _local), "slurm": (SlurmOptions, _slurm)}
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        print("`local --help` and `slurm --help` list the options; what follows -- goes to python -m real_jax.train.")
        return 0
    if not argv or argv[0] not in ways:
        raise UsageError(f"Say where to launch: {' or '.join(ways)}, then its options, then -- and those of train.")
    cut = argv.index("--") if "--" in argv else len(argv)
    options_of, launch = ways[argv[0]]
    options = _parse(options_of, argv[1:cut], f"python -m real_jax.launch {argv[0]}")
    train = argv[cut + 1 :]
    asked, experiment = commandline.parse(TrainOptions, train, "python -m real_jax.launch ... --", "Options of train.")
    return launch(options, train, asked, experiment)


def _parse(options: type[Options], argv: list[str], prog: str) -> Options:
    import tyro

    return tyro.cli(options, prog=prog, args=argv, config=(tyro.conf.UseAppendAction,))


# On this machine


def _local(options: LocalOptions, train: list[str], asked: TrainOptions, experiment: Experiment) -> int:
    del asked, experiment
    for name in ("processes", "devices_per_process"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name)}. It must be at least 1.")
    gpus = commandline.accelerators()
    needed = options.processes * options.devices_per_process
    if gpus and needed > gpus:
        raise UsageError(
            f"--processes {options.processes} x --devices-per-process {options.devices_per_process} is {needed}, but "
            f"this machine has {gpus} accelerators. Lower one of them."
        )
    coordinator = f"127.0.0.1:{_free_port()}"
    jobs = [_start(rank, options, train, coordinator, bool(gpus)) for rank in range(options.processes)]
    return _watch(jobs)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(rank: int, options: LocalOptions, train: list[str], coordinator: str, gpus: bool) -> subprocess.Popen:
    from real_jax.runtime.joining import COORDINATOR, PROCESS_ID, PROCESSES

    environment = os.environ | {COORDINATOR: coordinator, PROCESSES: str(options.processes), PROCESS_ID: str(rank)}
    command = [sys.executable, "-m", "real_jax.train", *train]
    if gpus:
        first = rank * options.devices_per_process
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + options.devices_per_process)))
    else:
        command += ["--cpu-devices", str(options.devices_per_process)]
    # In a session of its own, so that a signal from the keyboard reaches it once: through this process.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} if rank else {}
    job = subprocess.Popen(command, env=environment, start_new_session=True, text=True, **quiet)
    if rank:
        threading.Thread(target=_relay, args=(rank, job), daemon=True).start()
    return job


def _relay(rank: int, job: subprocess.Popen) -> None:
    """Shows what process `rank` says on its standard error."""
    for line in job.stderr:
        print(f"[{rank}] {line}", end="", file=sys.stderr)


def _watch(jobs: list[subprocess.Popen]) -> int:
    """Waits for all; where one fails the rest are ended. The status of the command."""
    asked: list[int] = []

    def forward(number: int, frame) -> None:
        del frame
        asked.append(number)
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        while not (failed := [j for j in jobs if j.poll()]) and any(j.poll() is None for j in jobs):
            time.sleep(0.1)
        if not failed:
            return 0
        first = failed[0]
        if first.returncode > 0:  # it has said why, and the others are about to hear of it
            _wait(jobs)
        left = [j for j in jobs if j.poll() is None]
        _end(left)
        if asked and not left:
            return 1
        if first.returncode < 0 or left:
            raise RunError(_what_failed(jobs.index(first), first, len(jobs)))
        return first.returncode if first.returncode in (1, 2) else 1
    finally:
        _end([j for j in jobs if j.poll() is None])
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(jobs: list[subprocess.Popen]) -> None:
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(j.poll() is None for j in jobs):
        time.sleep(0.1)


def _end(jobs: list[subprocess.Popen]) -> None:
    """Ends processes that wait for one that is gone: they could not save anything."""
    for job in jobs:
        job.kill()
    for job in jobs:
        job.wait()


def _what_failed(rank: int, job: subprocess.Popen, processes: int) -> str:
    code = job.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    rest = f" The other {processes - 1} were stopped." if processes > 1 else ""
    return (
        f"Process {rank} of {processes} (pid {job.pid}) on {socket.gethostname()} {how}.{rest} "
        "Go on from the newest checkpoint with --resume."
    )


# By SLURM


def _slurm(options: SlurmOptions, train: list[str], asked: TrainOptions, experiment: Experiment) -> int:
    check(options)
    if asked.resume and not asked.run_dir:
        raise UsageError("--resume needs --run-dir in a SLURM job: name the run that it is to go on with.")
    if options.gpus_per_node and asked.plan == "auto" and not asked.cluster:
        raise UsageError(
            "--plan auto needs --cluster in a SLURM job: the plan is found on one node, for a cluster that a file tells "
            "of. Name one of tpu_gpu_configs/, or what python -m real_jax.profile wrote."
        )
    text = batch_script(options, experiment.name, _without(train, "--run-dir", "--resume"), asked.run_dir)
    if options.dry_run:
        print(text, end="")
        return 0
    if not shutil.which("sbatch"):
        raise UsageError("sbatch is not on this machine. Submit from a login node, or show the script by --dry-run.")
    path = Path(options.script or f"{options.job_name or experiment.name}.sbatch")
    if path.exists() and path.read_text() != text:
        raise UsageError(f"{str(path)!r} exists and says something else. Name another file by --script.")
    commandline.check_writable(path, "--script")
    Path(options.log).absolute().parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    sent = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if sent.returncode:
        raise UsageError(f"sbatch refused {path}: {sent.stderr.strip() or sent.stdout.strip()}")
    job = sent.stdout.strip().partition(";")[0]
    log = options.log.replace("%j", job)
    print(f"Submitted job {job}. Script: {path}")
    print(f"  squeue --job {job}          where it stands")
    print(f"  tail -F {log}               what it says")
    print(f"  scancel --signal=TERM {job} save a checkpoint and end{' (and requeue)' if options.requeue else ''}")
    print(f"  scancel {job}               end at once")
    return 0


def _without(train: list[str], *flags: str) -> list[str]:
    """`train` without `flags`; --run-dir has a value, --resume has none."""
    left, words = [], iter(train)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in flags:
            left.append(word)
        elif name == "--run-dir" and not equals:
            next(words, None)
    return left


if __name__ == "__main__":
    sys.exit(main())
