"""What the planner sees of the world: for each call and placement, seconds and bytes, each with its source."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from real_jax.spec.errors import UsageError
from real_jax.spec.plan import Placement

Source = Literal["measured", "layers", "compiled", "analytic"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one call under one placement.

    Attributes:
      seconds: of one run of the call, on an otherwise idle machine.
      work_bytes: peak bytes per device beyond parameters and optimizer state: activations, gradients, KV cache, logits.
      source: "measured" on devices, "layers" from runs with few layers, "compiled" from the compiler's analysis and a
        roofline, or "analytic".
      parts: where the seconds go, by resource ("matrix", "memory", "collectives", "overhead").
    """

    seconds: float
    work_bytes: int
    source: Source
    parts: tuple[tuple[str, float], ...] = ()


@functools.lru_cache(maxsize=1 << 16)
def shape(placement: Placement) -> Placement:
    """`placement` without what costs nothing: where it starts, and whether its weights wait in host memory."""
    return dataclasses.replace(placement, first=0, offload=False)


class CostTable:
    """Costs by call and the `shape` of its placement: a mesh costs the same wherever it starts."""

    def __init__(self, entries: Mapping[tuple[str, Placement], Cost] | None = None):
        self._entries: dict[tuple[str, Placement], Cost] = {}
        for (call, placement), cost in (entries or {}).items():
            self.add(call, placement, cost)

    def add(self, call: str, placement: Placement, cost: Cost) -> None:
        self._entries[call, shape(placement)] = cost

    def updated(self, other: "CostTable") -> "CostTable":
        """This table with the entries of `other` in place of its own."""
        return CostTable(self._entries | other._entries)

    def __getitem__(self, key: tuple[str, Placement]) -> Cost:
        try:
            return self._entries[key[0], shape(key[1])]
        except KeyError:
            raise UsageError(f"No cost is known for call {key[0]!r} under {key[1]}.") from None

    def __contains__(self, key: tuple[str, Placement]) -> bool:
        return (key[0], shape(key[1])) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def placements(self, call: str) -> list[Placement]:
        """Shapes of placements with a known cost for `call`, in a fixed order."""
        return sorted(p for c, p in self._entries if c == call)
