"""What occupied which devices when: the unit of predicted and of measured timelines."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Event:
    """One bar of a timeline, in seconds from its start.

    Attributes:
      name: a call's name, or "MODEL to CALL" for a reallocation.
      kind: a call's kind, "reallocation" or "data".
      devices: those that it keeps busy, in order; a host call and a data transfer keep none busy.
    """

    name: str
    kind: str
    iteration: int
    devices: tuple[int, ...]
    start: float
    end: float
