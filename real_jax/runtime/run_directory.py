"""The folder of a run: never shared by two runs, never overwritten."""

from pathlib import Path

from real_jax.spec.errors import UsageError

CONFIG, PLAN = "config.yaml", "plan.yaml"
STOPPED = "stopped"  # there while a run has ended early because it was asked to
_NUMBERS = [f"-{i}" for i in range(2, 10000)]


def check_run_directory(wanted: str) -> None:
    """Raises UsageError where `wanted` cannot hold a new run: it holds one, or something else."""
    path = Path(wanted)
    if wanted and path.exists() and not path.is_dir():
        raise UsageError(f"--run-dir {wanted!r} is a file. Name a folder.")
    if wanted and path.is_dir() and any(path.iterdir()):
        what = "already holds a run" if (path / CONFIG).exists() else "is not empty"
        raise UsageError(f"--run-dir {wanted!r} {what}. Go on with it by --resume, or name another folder.")


def new_run_directory(name: str, wanted: str = "") -> Path:
    """Makes the folder of a new run: `wanted`, or the first free one of runs/NAME, runs/NAME-2, ...

    Raises UsageError as `check_run_directory`, and where the folder cannot be made.
    """
    check_run_directory(wanted)
    candidates = [Path(wanted)] if wanted else [Path("runs") / f"{name}{n}" for n in ("", *_NUMBERS)]
    for path in candidates:
        try:
            # Making it is what claims it, should two runs start at once.
            path.mkdir(parents=True, exist_ok=bool(wanted))
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"The run directory {str(path)!r} cannot be made: {error.strerror}. Name another one."
            ) from None
    raise UsageError(f"No folder is free for a run named {name!r}. Name one by --run-dir.")


def existing_run_directory(name: str, wanted: str = "") -> Path:
    """The folder of the run to go on with: `wanted`, or the newest of runs/NAME, runs/NAME-2, ..."""
    if wanted:
        path = Path(wanted)
        if not (path / CONFIG).exists():
            raise UsageError(f"--resume: {wanted!r} holds no run (it has no {CONFIG}). Check --run-dir.")
        return path
    runs = [
        p for p in Path("runs").glob(f"{name}*") if (p / CONFIG).exists() and p.name.removeprefix(f"{name}-").isdigit()
    ]
    runs += [p for p in [Path("runs") / name] if (p / CONFIG).exists()]
    if not runs:
        raise UsageError(
            f"--resume: there is no run runs/{name}. Name the run by --run-dir, or start it without --resume."
        )
    return max(runs, key=lambda p: (p / CONFIG).stat().st_mtime)
