"""Orbax checkpoints of a stage: asynchronous, whole or not at all, restored onto any layout."""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from real_jax.runtime import distributed
from real_jax.runtime.engine import Engine
from real_jax.runtime.hosts import move_tree, spread_shardings
from real_jax.spec.errors import RunError


class Checkpoints:
    """The checkpoints of one stage under `folder`, numbered by the iterations done. The newest `keep` stay.

    A checkpoint holds, per trained model, its weights and optimizer state, the weights of moving averages, the carried
    keys, and `meta` (plain data).
    Random numbers and the data position follow from the seed and the number of iterations.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """Iterations done at the newest whole checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, engine: Engine, meta: Mapping[str, Any]) -> None:
        """Starts writing; returns once the values are safe from later updates. Raises RunError where the disk is full."""
        if self.latest() == step:
            return
        items: dict[str, Any] = {"meta": ocp.args.JsonSave(dict(meta))}
        for model in engine.store.trained:
            home = engine.store.home(model)
            for name, tree in ((model, home.params), (f"{model}_optimizer", home.optimizer_state)):
                items[name] = ocp.args.StandardSave(_settled(tree, engine))
        for model in engine.store.averages:
            items[model] = ocp.args.StandardSave(_settled(engine.store.home(model).params, engine))
        if engine.carried:
            items["carried"] = ocp.args.StandardSave(engine.fetch(dict(engine.carried)))
        trees = [item.item for name, item in items.items() if name != "meta"]
        needed = sum(x.nbytes for x in jax.tree.leaves(trees))
        self.wait()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise self._full(f"it needs {needed / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free")
        try:
            self._manager.save(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._named(error) from error

    def wait(self) -> None:
        """Waits for a write in progress. Raises RunError where it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._named(error) from error

    def restore(self, step: int, engine: Engine) -> dict[str, Any]:
        """Puts checkpoint `step` into the engine's store, in the layouts of its plan, and returns `meta`."""
        items: dict[str, Any] = {"meta": ocp.args.JsonRestore()}
        for model in engine.store.trained:
            program = engine.programs[engine.store.home_call[model]]
            for name, shapes in zip((model, f"{model}_optimizer"), program.abstract_state(), strict=True):
                items[name] = ocp.args.StandardRestore(_restored(shapes))
        for model in engine.store.averages:
            shapes = engine.programs[engine.store.home_call[model]].abstract_weights(engine.store.home_type(model))
            items[model] = ocp.args.StandardRestore(_restored(shapes))
        if engine.carried:
            carried = engine.fetch(dict(engine.carried))
            items["carried"] = ocp.args.StandardRestore(jax.tree.map(np.asarray, carried))
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        for model in engine.store.trained:
            engine.store.put(model, found[model], found[f"{model}_optimizer"], version=step)
        for model in engine.store.averages:
            engine.store.put(model, found[model], version=step)
        if engine.carried:
            engine.carried = jax.tree.map(np.asarray, found["carried"])
        return found["meta"]

    def restore_params(
        self, step: int, model: str, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, np.ndarray]:
        """The weights of one model, in host memory."""
        target = {k: np.zeros(s.shape, s.dtype) for k, s in shapes.items()}
        found = self._manager.restore(step, args=ocp.args.Composite(**{model: ocp.args.StandardRestore(target)}))
        return found[model]

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _full(self, what: str) -> RunError:
        last = self.latest()
        kept = (
            f"The checkpoint of iteration {last} is whole" if last is not None else "No checkpoint was written before"
        )
        return RunError(
            f"No space for a checkpoint under {str(self.folder)!r}: {what}. {kept}; free some space or name another "
            "run directory, and go on with --resume."
        )

    def _named(self, error: Exception) -> Exception:
        text = str(error)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
            return self._full("the disk is full")
        return error


def _settled(tree, engine: Engine):
    """Copies of the arrays: Orbax may read them after `save` returned, and by then the next train call has donated them.

    In several processes Orbax takes only arrays that all of them have a part of.
    """
    if distributed.processes() > 1:
        return move_tree(tree, spread_shardings(tree), engine.store.mover)
    return jax.tree.map(jax.numpy.copy, tree)


def _restored(shapes):
    """Where the arrays are restored to: as `shapes` say, or, in several processes, as they were saved."""
    if distributed.processes() == 1:
        return shapes
    spread = spread_shardings(shapes)
    return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, spread)
