"""What all commands share: reading the command line, and saying what went wrong in one paragraph."""

import contextlib
import dataclasses
import glob
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from real_jax.spec.errors import RunError, UsageError
from real_jax.spec.experiment import Experiment, check_experiment
from real_jax.spec.files import load_experiment

Options = TypeVar("Options")
DEFAULT_CONFIG = "ppo-reviews"


# Device files of GPUs (NVIDIA, AMD, in Windows' Linux) and TPUs.
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/accel*", "/dev/vfio/[0-9]*")


def accelerators() -> int:
    """How many GPUs or TPUs this machine seems to have, without starting a library."""
    return len({path for pattern in _ACCELERATORS for path in glob.glob(pattern)})


def check_writable(path: Path, option: str) -> None:
    """UsageError where a file cannot be written at `path`, found out before anything slow is done."""
    folder = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} is {str(path)!r}, where no file can be written. Give the path of a file.")


def quiet_backends() -> None:
    """Keeps libraries' own log lines off the console; has an effect only before they are imported."""
    if not accelerators():
        # Compilers for GPUs and TPUs may be installed where there are none; jax need not try to start them.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def quiet_collectives() -> None:
    """From here on Python alone writes to standard output. Gloo, by which CPUs talk to each other, prints a line there for
    each group of processes that it connects."""
    if accelerators():
        return
    sys.stdout.flush()
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding="utf-8", errors="replace")


def parse(options: type[Options], argv: list[str] | None, prog: str, description: str) -> tuple[Options, Experiment]:
    """The command's own options, and the experiment: `--config` names a preset or file, other flags override its fields."""
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    experiment = load_experiment(_config(argv))
    command = dataclasses.make_dataclass(
        "Command",
        [
            ("options", Annotated[options, tyro.conf.arg(name="")], dataclasses.field(default=options())),
            ("experiment", Annotated[Experiment, tyro.conf.arg(name="")], dataclasses.field(default=experiment)),
        ],
        frozen=True,
    )
    parsed = tyro.cli(command, prog=prog, description=description, args=argv)
    return parsed.options, check_experiment(parsed.experiment)


def _config(argv: list[str]) -> str:
    """The value of --config, which decides the other flags' defaults."""
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return DEFAULT_CONFIG


def run(main: Callable[[], int | None]) -> int:
    """Runs a command's body. Exit status: 0 done, 1 failed, 2 wrong usage; the user's errors come without a traceback."""
    try:
        return main() or 0
    except UsageError as error:
        return _say(error, 2)
    except RunError as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("Interrupted.", 1)


def _say(error: object, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return status
