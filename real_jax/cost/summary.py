"""What one device executes in one run of a compiled program, as a function of its rows. Pure data."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Linear:
    """A quantity that is `fixed + per_row x rows` of a device."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    def __add__(self, other: "Linear") -> "Linear":
        return Linear(self.fixed + other.fixed, self.per_row + other.per_row)

    def __mul__(self, factor: float) -> "Linear":
        return Linear(self.fixed * factor, self.per_row * factor)

    def __bool__(self) -> bool:
        return bool(self.fixed or self.per_row)


NOTHING = Linear()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Equal kernels.

    Attributes:
      flops: floating-point operations of the matrix product in one, if it holds one; a multiply-add counts as two.
      bytes: read and written by one.
      count: how many.
    """

    flops: Linear
    bytes: Linear
    count: float = 1.0


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives.

    Attributes:
      kind: its name in HLO.
      group: devices of a group.
      stride: distance between neighbours of a group, in the mesh's order of devices.
      bytes: of the full array on one device: the operand of a reduction, the result of a gather.
      count: how many.
      cover_flops, cover_bytes: of the kernels that run between its start and its end.
    """

    kind: str
    group: int
    stride: int
    bytes: Linear
    count: float = 1.0
    cover_flops: Linear = NOTHING
    cover_bytes: Linear = NOTHING


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one device executes: kernels and collectives without repeats, and the number of instructions started."""

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    steps: float = 0.0

    @property
    def flops(self) -> Linear:
        """Floating-point operations of all matrix products."""
        return sum((k.flops * k.count for k in self.kernels), NOTHING)

    @property
    def bytes(self) -> Linear:
        """Read and written by all kernels without a matrix product."""
        return sum((k.bytes * k.count for k in self.kernels if not k.flops), NOTHING)

    def __add__(self, other: "Summary") -> "Summary":
        return total((self, other))

    def __mul__(self, times: float) -> "Summary":
        return Summary(
            tuple(dataclasses.replace(k, count=k.count * times) for k in self.kernels),
            tuple(dataclasses.replace(c, count=c.count * times) for c in self.collectives),
            self.steps * times,
        )


def total(parts: Iterable[Summary]) -> Summary:
    """The sum of `parts`, equal kernels and equal collectives counted together."""
    counts: dict[Kernel | Collective, float] = {}
    steps = 0.0
    for part in parts:
        steps += part.steps
        for item in (*part.kernels, *part.collectives):
            kind = dataclasses.replace(item, count=0.0)
            counts[kind] = counts.get(kind, 0.0) + item.count
    items = [dataclasses.replace(kind, count=count) for kind, count in counts.items() if count]
    return Summary(
        tuple(i for i in items if isinstance(i, Kernel)), tuple(i for i in items if isinstance(i, Collective)), steps
    )
