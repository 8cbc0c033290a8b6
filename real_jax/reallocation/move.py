"""Moves a parameter tree from the shardings it has to the ones a call wants."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from real_jax.reallocation.exchange import Exchange, in_turn

CHUNK_BYTES = 2**28  # of a device, beside the arrays themselves, while they move between processes
Params = Mapping[str, jax.Array | np.ndarray]


class Mover:
    """Moves trees between layouts. Programs are compiled once for each pair of layouts and kept.

    Between layouts over the same devices the whole tree moves in one compiled program; between different devices by
    `jax.device_put`, or in several processes by `exchange.Exchange`. All processes must make the same moves in the same
    order; one that has no device in a move returns from it at once, with arrays that have no data here. What comes back never lives in memory that the source can give away, so donating the source later
    is safe. (On its way through the host of a CPU backend a leaf may be shared; jax then copies instead of donating it.)
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self._chunk_bytes = chunk_bytes
        self._programs: dict = {}
        self._exchanges: dict = {}

    def move(self, params: Params, target: Mapping[str, NamedSharding], dtype) -> dict[str, jax.Array]:
        """`params` under shardings `target`, floating-point type `dtype`. Source arrays may lie in host memory (numpy)."""
        if set(params) != set(target):
            raise ValueError(f"weights differ from shardings: {sorted(set(params) ^ set(target))}")
        if all(isinstance(x, np.ndarray) for x in params.values()):
            return {k: _place(x, target[k], dtype) for k, x in params.items()}
        if self.same_devices(params, target):
            if not _here(params):
                return {k: _elsewhere(x.shape, target[k], dtype) for k, x in params.items()}
            return in_turn(self._program(params, target, dtype)(dict(params)))
        if jax.process_count() > 1:
            return self._exchange(params, target, dtype)
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

    def _exchange(self, params: Params, target: Mapping[str, NamedSharding], dtype) -> dict[str, jax.Array]:
        groups: dict[tuple, list[str]] = {}
        for name, x in params.items():
            groups.setdefault((x.sharding.mesh, target[name].mesh, x.dtype), []).append(name)
        moved = {}
        for (source, destination, _), names in groups.items():
            mine, theirs = {n: params[n] for n in names}, {n: target[n] for n in names}
            if not (_here(mine) or _is_local(destination)):
                moved |= {n: _elsewhere(mine[n].shape, theirs[n], dtype) for n in names}
                continue
            if (source, destination) not in self._exchanges:
                self._exchanges[source, destination] = Exchange(source, destination, self._chunk_bytes)
            moved |= self._exchanges[source, destination].move(mine, theirs, dtype)
        return {name: moved[name] for name in params}

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


def _is_local(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def _here(params: Params) -> bool:
    """Whether this process has a device of any array."""
    return any(_is_local(x.sharding.mesh) for x in params.values())


def _elsewhere(shape: tuple[int, ...], sharding: NamedSharding, dtype) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _place(x: np.ndarray, sharding: NamedSharding, dtype) -> jax.Array:
    """`x` of the host, which every process has, on the devices of `sharding`."""
    if jax.process_count() == 1:
        return jax.device_put(x.astype(dtype), sharding, may_alias=False)
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part].astype(dtype), dtype=dtype)


def _keeps_a_shard(source: jax.Array, target: NamedSharding) -> bool:
    """Whether some device holds the same part of the array before and after."""
    before = source.sharding.devices_indices_map(source.shape)
    return any(before.get(device) == index for device, index in target.devices_indices_map(source.shape).items())
