"""Timings of single operations -> rates over sizes, and what a link costs. Pure."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from real_jax.cost.roofline import volume_factor
from real_jax.spec.hardware import Curve, Link, Reach, share

# A product whose memory traffic alone explains this share of its time tells nothing about matrix units.
_TRAFFIC_SHARE = 0.7
# Points of a curve are at least this factor apart; closer ones become one.
_SPACING = 3.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
      what: the operation, in a word: "product", "copy", "all-reduce".
      shape: its size, for people.
      size: floating-point operations of a product; bytes of anything else, of a collective those that a device sends.
      seconds: of one operation.
      group: devices of a collective; else 1.
      bytes: that a product reads and writes.
    """

    what: str
    shape: str
    size: float
    seconds: float
    group: int = 1
    bytes: float = 0.0

    @property
    def rate(self) -> float:
        return self.size / self.seconds


def curve(timings: Sequence[Timing], nominal: float, fixed_seconds: float = 0.0) -> Curve:
    """What `timings` reach of the rate `nominal`, by their size.

    Args:
      fixed_seconds: of each operation, which count elsewhere; at most half of its time is taken for them.
    """
    points: list[list[tuple[float, float]]] = []
    for t in sorted(timings, key=lambda t: t.size):
        reached = t.size / max(t.seconds - fixed_seconds, t.seconds / 2) / nominal
        if not points or t.size > _SPACING * points[-1][0][0]:
            points.append([])
        points[-1].append((t.size, reached))
    return tuple(Reach(*(_rounded(math.exp(np.log(column).mean())) for column in zip(*group))) for group in points)


def bound_by_arithmetic(products: Sequence[Timing], memory: Curve, nominal: float) -> list[Timing]:
    """The products that memory traffic, at the share `memory` of the rate `nominal`, does not hold up; the largest where
    it holds up all of them."""
    kept = [t for t in products if t.bytes / (nominal * share(memory, t.bytes)) < _TRAFFIC_SHARE * t.seconds]
    return kept or [max(products, key=lambda t: t.size)]


def link(timings: Sequence[Timing], slow: float = 1.0, nominal: float = 0.0) -> Link:
    """The link that explains the times of collectives over groups of at least two sizes of array.

    The smallest array of each group tells the latency; over the groups it grows by `hop_us` per device. What larger
    ones take beyond it is bandwidth.

    Args:
      slow: by how much devices slow each other's bandwidth when all of them are at it (`roofline.slowdown`).
      nominal: bytes per second that count as the whole rate; 0: the best of `timings`.
    """
    small: dict[int, list[float]] = {}
    for _, group in itertools.groupby(sorted(timings, key=_kind), key=_kind):
        least = min(group, key=lambda t: t.size)
        small.setdefault(least.group, []).append(least.seconds)
    groups = sorted(small)
    means = [float(np.mean(small[g])) for g in groups]
    hop = max(0.0, float(np.polyfit(groups, means, 1)[0])) if len(groups) > 1 else 0.0
    latency = max(0.0, float(np.mean([m - hop * (g - 2) for m, g in zip(means, groups, strict=True)])))
    sending = []
    for t in timings:
        left = t.seconds - latency - hop * (t.group - 2)
        if left > 0.3 * t.seconds:  # less is noise
            sending.append(dataclasses.replace(t, seconds=left / slow))
    nominal = nominal or max((t.rate for t in sending), default=max(t.rate for t in timings))
    return Link(nominal / 1e9, latency * 1e6, hop * 1e6, curve(sending, nominal))


def sent(kind: str, group: int, array_bytes: float) -> float:
    """Bytes that one device sends in a collective on a full array of `array_bytes`."""
    return array_bytes * volume_factor(kind, group)


def _kind(t: Timing) -> tuple[str, int]:
    return t.what, t.group


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
