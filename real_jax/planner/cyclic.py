"""The shortest period of calls that repeat in every iteration, some of which must not overlap. Pure.

An edge (source, target, lag) says that `target` of an iteration waits for `source` of the one `lag` before. Two calls that
share a device take turns: between two runs of the first there is one of the second, of the same iteration or of one some
way off, and which of these holds is a choice. Under given choices no period is shorter than the seconds of any round of
waiting calls divided by the iterations that it spans (Reiter 1968, "Scheduling parallel computations"); the choices are
searched one pair after another.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

from real_jax.spec.dataflow import Graph

Arc = tuple[int, int, int]  # source, target, lag; calls by their index in the graph's order
_PRECISION = 1e-4


class Structure:
    """What of a graph does not depend on any seconds."""

    def __init__(self, graph: Graph):
        self.names = [c.name for c in graph.order]
        index = {name: i for i, name in enumerate(self.names)}
        self.arcs: list[Arc] = sorted({(index[e.source], index[e.target], e.lag) for e in graph.edges})
        pairs = list(itertools.combinations(range(len(self.names)), 2))
        self.offsets = {pair: self._possible(*pair) for pair in pairs}

    def _possible(self, x: int, y: int) -> list[int]:
        """How many iterations the run of `y` between two runs of `x` may be ahead, without waiting for itself."""
        reach = len(self.names)
        many = 2 * reach * len(self.names)  # a period in which any wait for an earlier iteration has long ended
        found = []
        for ahead in range(-reach, reach + 1):
            if not _overruns([*self.arcs, *_turns(x, y, ahead)], [1.0] * len(self.names), {}, many):
                found.append(ahead)
        return sorted(found, key=abs)


structure = functools.lru_cache(maxsize=64)(Structure)


def shortest_period(
    graph: Graph,
    seconds: Mapping[str, float],
    together: Sequence[tuple[str, str]],
    delays: Mapping[tuple[str, str], float],
    limit: float,
) -> float:
    """A lower bound on the period, or `limit` where it is no smaller.

    Args:
      seconds: of each call.
      together: pairs of calls that share a device.
      delays: (source, target) -> seconds added to what `target` waits after `source` of the iteration before.
    """
    s = structure(graph)
    index = {name: i for i, name in enumerate(s.names)}
    lengths = [seconds[name] for name in s.names]
    extra = {(index[a], index[b]): delay for (a, b), delay in delays.items()}
    pairs = [tuple(sorted((index[a], index[b]))) for a, b in together]
    # Pairs with the fewest choices first, then those with the most to do.
    pairs.sort(key=lambda p: (len(s.offsets[p]), -lengths[p[0]] - lengths[p[1]]))

    def fits(arcs: list[Arc], at: int, period: float) -> bool:
        if _overruns(arcs, lengths, extra, period):
            return False
        if at == len(pairs):
            return True
        return any(fits([*arcs, *_turns(*pairs[at], d)], at + 1, period) for d in s.offsets[pairs[at]])

    if not fits(s.arcs, 0, limit * (1 - _PRECISION)):
        return limit
    low, high = 0.0, limit
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(s.arcs, 0, middle) else (middle, high)
    return low


def _turns(x: int, y: int, ahead: int) -> tuple[Arc, Arc]:
    """`y` of the iteration `ahead` of `x`'s runs after that `x`, and before the next one."""
    return (x, y, ahead), (y, x, 1 - ahead)


def _overruns(arcs: Sequence[Arc], lengths: Sequence[float], extra: Mapping, period: float) -> bool:
    """Whether some round of calls takes longer than the iterations that it spans do at `period`."""
    start = [0.0] * len(lengths)
    weights = [(a, b, lengths[a] + (extra.get((a, b), 0.0) if lag == 1 else 0.0) - lag * period) for a, b, lag in arcs]
    for _ in range(len(lengths)):
        changed = False
        for a, b, weight in weights:
            if start[a] + weight > start[b] + 1e-9 * period:
                start[b], changed = start[a] + weight, True
        if not changed:
            return False
    return True
