"""RLHF training in JAX: every model call under its own mesh, chosen by a search over execution plans.

    import real_jax as real
    experiment = real.load_experiment("ppo-reviews")
    found = real.search_plan(experiment)
    trainer = real.Trainer(experiment, found.plan).fit()

Names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib

_NAMES = {
    "Experiment": "real_jax.spec.experiment",
    "load_experiment": "real_jax.spec.files",
    "ExecutionPlan": "real_jax.spec.plan",
    "Placement": "real_jax.spec.plan",
    "load_plan": "real_jax.spec.files",
    "save_plan": "real_jax.spec.files",
    "load_cluster": "real_jax.spec.files",
    "search_plan": "real_jax.planning",
    "given_plan": "real_jax.planning",
    "Trainer": "real_jax.runtime.trainer",
    "compare_table": "real_jax.planner.report",
    "gantt": "real_jax.planner.report",
    "graph_table": "real_jax.planner.report",
}
__all__ = list(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"real_jax has no {name!r}; it has {', '.join(_NAMES)}")
    return getattr(importlib.import_module(_NAMES[name]), name)
