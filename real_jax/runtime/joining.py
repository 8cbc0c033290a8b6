"""Joining the other processes of a job: by what `real_jax.launch` or SLURM left in the environment."""

import dataclasses
from collections.abc import Mapping

import jax

from real_jax.spec.errors import RunError, UsageError

COORDINATOR, PROCESSES, PROCESS_ID = "REAL_JAX_COORDINATOR", "REAL_JAX_PROCESSES", "REAL_JAX_PROCESS_ID"
_HEARTBEAT_SECONDS = 20  # without a sign of life for that long a process counts as dead, and the job ends
_START_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process's place in its job.

    Attributes:
      coordinator: HOST:PORT of process 0.
      local_device: the only device of its host that this process may use; None: all of them.
    """

    coordinator: str
    processes: int
    index: int
    local_device: int | None = None


def membership(environment: Mapping[str, str]) -> Membership | None:
    """What the environment says; None where this process stands alone.

    Raises UsageError where a part is missing or is no number.
    """
    coordinator = environment.get(COORDINATOR, "")
    if not coordinator:
        if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
            raise UsageError(
                f"This is one of {environment['SLURM_STEP_NUM_TASKS']} tasks of a SLURM step, but {COORDINATOR} is not "
                "set. Start the job by python -m real_jax.launch slurm, or export HOST:PORT of its first node."
            )
        return None

    def number(*names: str) -> int:
        name = next((n for n in names if n in environment), names[0])
        try:
            return int(environment[name])
        except (KeyError, ValueError):
            raise UsageError(
                f"{COORDINATOR} is set, but {name} is {environment.get(name, '')!r}, not a number. "
                "Start the processes by python -m real_jax.launch."
            ) from None

    processes, index = number(PROCESSES, "SLURM_NTASKS"), number(PROCESS_ID, "SLURM_PROCID")
    if not 0 <= index < processes:
        raise UsageError(f"{PROCESS_ID} is {index}, but {PROCESSES} is {processes}. It must be below that.")
    several = environment.get("SLURM_NTASKS_PER_NODE", "1") not in ("", "1")
    only_one = "," not in environment.get("CUDA_VISIBLE_DEVICES", ",")
    local = int(environment["SLURM_LOCALID"]) if several and not only_one else None
    return Membership(coordinator, processes, index, local)


def join(place: Membership | None, cpu_devices: int) -> None:
    """Makes this process one of its job; on a machine without accelerators it gets `cpu_devices` virtual devices. Must
    come before jax is used. Raises RunError where the others do not come."""
    if place is None or place.processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.index,
            local_device_ids=place.local_device,
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"Process {place.index} of {place.processes} did not reach the others at {place.coordinator} in "
            f"{_START_SECONDS} s: {str(error).splitlines()[0]}"
        ) from error
