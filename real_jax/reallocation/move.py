"""Moves a parameter tree from the shardings it has to the ones a call wants."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

Params = Mapping[str, jax.Array | np.ndarray]


class Mover:
    """Moves trees between layouts. Programs are compiled once for each pair of layouts and kept.

    Between layouts over the same devices the whole tree moves in one compiled program; between different devices by
    `jax.device_put`. What comes back never lives in memory that the source can give away, so donating the source later
    is safe. (On its way through the host of a CPU backend a leaf may be shared; jax then copies instead of donating it.)
    """

    def __init__(self):
        self._programs: dict = {}

    def move(self, params: Params, target: Mapping[str, NamedSharding], dtype) -> dict[str, jax.Array]:
        """`params` under shardings `target`, floating-point type `dtype`. Source arrays may lie in host memory (numpy)."""
        if set(params) != set(target):
            raise ValueError(f"weights differ from shardings: {sorted(set(params) ^ set(target))}")
        if all(isinstance(x, np.ndarray) for x in params.values()):
            return jax.device_put({k: x.astype(dtype) for k, x in params.items()}, dict(target), may_alias=False)
        if self.same_devices(params, target):
            return self._program(params, target, dtype)(dict(params))
        # Cast on the side where fewer bytes then move; the cast program stays on the source's own devices.
        narrow = any(x.dtype.itemsize > np.dtype(dtype).itemsize for x in params.values())
        if narrow:
            params = self._program(params, {k: x.sharding for k, x in params.items()}, dtype)(dict(params))
        moved = jax.device_put(dict(params), dict(target), may_alias=False)
        # `may_alias=False` is not honoured for a shard that stays where it is: such a leaf still shares its memory with
        # the source and must be copied, or donating the source would delete it.
        unfinished = {k: x for k, x in moved.items() if x.dtype != dtype or _keeps_a_shard(params[k], target[k])}
        if unfinished:
            moved |= self._program(unfinished, {k: target[k] for k in unfinished}, dtype)(unfinished)
        return moved

    @staticmethod
    def same_devices(params: Params, target: Mapping[str, NamedSharding]) -> bool:
        """Whether every weight stays on its own devices, in the same order."""
        return all(
            isinstance(x, jax.Array)
            and isinstance(x.sharding, NamedSharding)
            and x.sharding.mesh.devices.ravel().tolist() == target[name].mesh.devices.ravel().tolist()
            for name, x in params.items()
        )

    def _program(self, params: Params, target: Mapping[str, NamedSharding], dtype):
        key = tuple((k, x.shape, x.dtype, x.sharding, target[k]) for k, x in sorted(params.items())), np.dtype(dtype)
        if key not in self._programs:

            def reallocate(tree):
                # `copy` keeps an unchanged leaf from coming back as the source itself.
                return {k: jax.numpy.copy(x).astype(dtype) for k, x in tree.items()}

            shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in params.items()}
            self._programs[key] = jax.jit(reallocate, out_shardings=dict(target)).lower(shapes).compile()
        return self._programs[key]


def _keeps_a_shard(source: jax.Array, target: NamedSharding) -> bool:
    """Whether some device holds the same part of the array before and after."""
    before = source.sharding.devices_indices_map(source.shape)
    return any(before.get(device) == index for device, index in target.devices_indices_map(source.shape).items())
