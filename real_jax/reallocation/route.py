"""How an array is cut into cells when it changes its layout, from the shardings before and after."""

import dataclasses
import functools

from jax.sharding import NamedSharding

from real_jax.reallocation.schedule import cell_shape


@dataclasses.dataclass(frozen=True)
class Route:
    """How one array goes: equal for arrays that go alike, whatever their sizes.

    Attributes:
      grid: cells in each dimension.
      source, destination: (start, stop) of each device's shard in cells, by place in its mesh.
    """

    grid: tuple[int, ...]
    source: tuple[tuple[tuple[int, int], ...], ...]
    destination: tuple[tuple[tuple[int, int], ...], ...]


def route(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> tuple[Route, tuple[int, ...]]:
    """How an array of `shape` goes, and the shape of its cells. A scalar goes as an array of one number."""
    if not shape:
        one = ((0, 1),)
        return Route((1,), (one,) * source.mesh.size, (one,) * target.mesh.size), (1,)
    cell = cell_shape(source.shard_shape(shape), target.shard_shape(shape))

    def ranges(sharding: NamedSharding):
        boxes = sharding.devices_indices_map(shape)
        return tuple(
            tuple(
                (index.indices(size)[0] // part, index.indices(size)[1] // part)
                for index, size, part in zip(boxes[device], shape, cell, strict=True)
            )
            for device in sharding.mesh.devices.flat
        )

    grid = tuple(size // part for size, part in zip(shape, cell, strict=True))
    return Route(grid, ranges(source), ranges(target)), cell


@functools.lru_cache(maxsize=4096)
def stays(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> bool:
    """Whether each device of `target` already has all that it wants of an array, under `source`."""
    before, after = source.devices_indices_map(shape), target.devices_indices_map(shape)

    def within(device) -> bool:
        if device not in before:
            return False
        sides = zip(after[device], before[device], shape, strict=True)
        return all(
            had.indices(size)[0] <= wanted.indices(size)[0] and wanted.indices(size)[1] <= had.indices(size)[1]
            for wanted, had, size in sides
        )

    return all(map(within, after))
