"""Layouts as plain data, which a test can draw at random and hand to other processes."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.reallocation.memories import on_hosts
from real_jax.runtime.meshes import devices

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and for each array the dimension that each of its axes splits (None: it replicates).

    Attributes:
      devices: by number, in the order of the mesh.
      mesh: size of each axis.
      splits: for each array, for each axis.
    """

    devices: tuple[int, ...]
    mesh: tuple[int, int, int]
    splits: tuple[tuple[int | None, ...], ...]

    def parts(self, array: int, dim: int) -> int:
        """Parts that dimension `dim` of `array` is split into."""
        return math.prod(size for size, split in zip(self.mesh, self.splits[array], strict=True) if split == dim)

    def shardings(self, shapes) -> list[NamedSharding]:
        among = devices()
        mesh = Mesh(np.asarray([among[d] for d in self.devices], dtype=object).reshape(self.mesh), AXES)
        return [
            NamedSharding(
                mesh,
                PartitionSpec(
                    *(
                        tuple(axis for axis, split in zip(AXES, splits, strict=True) if split == dim)
                        for dim in range(len(shape))
                    )
                ),
            )
            for shape, splits in zip(shapes, self.splits, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays that go from one layout to another and back."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    before: Layout
    after: Layout
    chunk_bytes: int
    on_host: tuple[bool, bool]  # whether the arrays lie in host memory, in each layout

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def load(text: str) -> "Case":
        fields = json.loads(text)
        tuples = lambda x: tuple(map(tuples, x)) if isinstance(x, list) else x
        layouts = {k: Layout(**{n: tuples(v) for n, v in fields.pop(k).items()}) for k in ("before", "after")}
        return Case(**{k: tuples(v) for k, v in fields.items()}, **layouts)

    def values(self) -> list[np.ndarray]:
        """Arbitrary bits, not-a-numbers of every kind among them."""
        random, dtype = np.random.default_rng(len(self.shapes)), jnp.dtype(self.dtype)
        if dtype == bool:
            return [random.integers(0, 2, shape).astype(bool) for shape in self.shapes]
        return [
            np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
            for shape in self.shapes
        ]


def there_and_back(case: Case, mover) -> None:
    """Moves the arrays of `case` and looks at each shard of every device here."""
    values, layouts = case.values(), []
    for layout, on_host in zip((case.before, case.after), case.on_host, strict=True):
        shardings = dict(enumerate(layout.shardings(case.shapes)))
        layouts.append(list((on_hosts(shardings) if on_host else shardings).values()))
    arrays = {
        str(i): jax.make_array_from_callback(x.shape, s, lambda part, x=x: x[part], dtype=x.dtype)
        for i, (x, s) in enumerate(zip(values, layouts[0], strict=True))
    }
    for shardings in (layouts[1], layouts[0]):
        target = dict(zip(arrays, shardings, strict=True))
        arrays = mover.move(arrays, target, jnp.dtype(case.dtype))
        for x, value, sharding in zip(arrays.values(), values, shardings, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim) and x.dtype == value.dtype
            assert x.sharding.memory_kind == sharding.memory_kind
            for shard in x.addressable_shards:
                found, wanted = np.asarray(shard.data), np.ascontiguousarray(value[shard.index])
                assert found.tobytes() == wanted.tobytes(), (case, shard.device)
