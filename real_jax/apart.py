"""Planning in a process of its own.

A process that has joined others cannot search: its compiler and its timings would wait for the rest. So the first of
them starts a child that stands alone. On a machine without accelerators the child has as many virtual devices as the
whole job, and measures and times plans on them; the plan for other clusters comes from their compiler, which needs no
device.
"""

import dataclasses
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from real_jax.found import FoundPlan
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment
from real_jax.spec.hardware import Cluster


def find_plan_apart(
    wanted: str, experiment: Experiment, cluster: Cluster | None, platform: str, devices: int, **options
) -> FoundPlan:
    """What `planning.find_plan` finds for a job with `devices` devices of `platform` in all; no compiled programs.

    Raises UsageError where the job has accelerators and no cluster file tells of them.
    """
    from real_jax.runtime.prepare import make_stages, model_archs

    if cluster is None and platform != "cpu":
        raise UsageError(
            f"--cluster is empty, but this job has {devices} {platform.upper()} devices in several processes, and one "
            "process cannot measure them all. Name a cluster file: one of tpu_gpu_configs/, or what "
            "python -m real_jax.profile writes."
        )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_prepare, initargs=(devices if platform == "cpu" else 1,)) as pool:
        fields = pool.submit(_find, wanted, experiment, cluster, options).result()
    return FoundPlan(stages=make_stages(experiment, model_archs(experiment)), **fields)


def _prepare(devices: int) -> None:
    """Readies the child, before it imports jax."""
    from real_jax.commandline import quiet_backends

    os.environ["JAX_PLATFORMS"] = "cpu"
    quiet_backends()
    from real_jax.runtime import meshes

    meshes.prepare_devices(devices)


def _find(wanted: str, experiment: Experiment, cluster: Cluster | None, options: dict) -> dict:
    """The plain data of a FoundPlan."""
    from rich.console import Console

    from real_jax.planning import find_plan
    from real_jax.runtime.progress import PlanningProgress

    listener = PlanningProgress(Console())
    try:
        found = find_plan(wanted, experiment, cluster, listener=listener, **options)
    finally:
        listener.close()
    left = ("stages", "programs")
    return {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name not in left}
