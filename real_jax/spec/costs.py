"""What the planner sees of the world: for each call and placement, seconds and bytes, each with its source."""

import dataclasses
from typing import Literal

from real_jax.spec.errors import UsageError
from real_jax.spec.plan import Placement

Source = Literal["measured", "compiled", "analytic"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one call under one placement.

    Attributes:
      seconds: of one run of the call, on an otherwise idle machine.
      work_bytes: peak bytes per device beyond parameters and optimizer state: activations, gradients, KV cache, logits.
      source: "measured" on devices, "compiled" from the compiler's analysis and a roofline, or "analytic".
      parts: where the seconds go, by resource ("matrix", "memory", "collectives", "overhead").
    """

    seconds: float
    work_bytes: int
    source: Source
    parts: tuple[tuple[str, float], ...] = ()


class CostTable:
    """Costs by (call, placement)."""

    def __init__(self, entries: dict[tuple[str, Placement], Cost] | None = None):
        self._entries = dict(entries or {})

    def add(self, call: str, placement: Placement, cost: Cost) -> None:
        self._entries[call, placement] = cost

    def __getitem__(self, key: tuple[str, Placement]) -> Cost:
        try:
            return self._entries[key]
        except KeyError:
            raise UsageError(f"No cost is known for call {key[0]!r} under {key[1]}.") from None

    def __contains__(self, key: tuple[str, Placement]) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def placements(self, call: str) -> list[Placement]:
        """Placements with a known cost for `call`, in a fixed order."""
        return sorted(p for c, p in self._entries if c == call)
