"""An algorithm as a dataflow graph of model calls; the edges are derived from the names that calls read and write."""

import dataclasses
import functools
from typing import Literal

from real_jax.spec.errors import UsageError

Kind = Literal["generate", "inference", "train", "host"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One model call of an iteration.

    Attributes:
      name: the call's name, which its plan line, compiled program, metrics and timeline row bear.
      kind: "generate", "inference" or "train" on `model`; "host" is a Python function on the host.
      model: the model called; "" for a host call.
      reads, writes: keys of the batch. A key in `Graph.carried` is read as the previous iteration left it.
    """

    name: str
    kind: Kind
    model: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Edge:
    """`target` waits for `source`. `key` is a batch key, or "parameters of MODEL"; `lag` counts iterations in between."""

    source: str
    target: str
    key: str
    lag: int = 0


@dataclasses.dataclass(frozen=True)
class Average:
    """After each iteration the weights of `target`, which no call trains, become eta x those of `source` + (1 - eta) x
    their own."""

    target: str
    source: str
    eta: float


@dataclasses.dataclass(frozen=True)
class Graph:
    """The calls of one iteration.

    Attributes:
      inputs: keys that the data loader gives.
      carried: keys that one iteration hands to the next (a KL coefficient, running statistics).
      averages: models that follow others as moving averages, one each at most.
    """

    name: str
    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    carried: tuple[str, ...] = ()
    averages: tuple[Average, ...] = ()

    def __post_init__(self):
        names = [c.name for c in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"Graph {self.name!r}: two calls are named {name!r}. Give each its own name.")
        writers: dict[str, str] = {}
        for call in self.calls:
            for key in call.writes:
                if key in self.inputs:
                    raise UsageError(
                        f"Graph {self.name!r}: call {call.name!r} writes {key!r}, which the data loader gives."
                    )
                if key in writers:
                    raise UsageError(
                        f"Graph {self.name!r}: calls {writers[key]!r} and {call.name!r} both write {key!r}. "
                        "One key has one writer: rename one of them."
                    )
                writers[key] = call.name
            if (call.kind == "host") != (call.model == ""):
                raise UsageError(
                    f"Graph {self.name!r}: call {call.name!r} is of kind {call.kind!r} and names model {call.model!r}."
                )
        for call in self.calls:
            for key in call.reads:
                if key not in writers and key not in self.inputs:
                    raise UsageError(
                        f"Graph {self.name!r}: call {call.name!r} reads {key!r}, which no call writes and no input gives."
                    )
        for key in self.carried:
            if key not in writers:
                raise UsageError(
                    f"Graph {self.name!r}: {key!r} is carried to the next iteration but no call writes it."
                )
        for a in self.averages:
            if a.target not in self.models or self.trains(a.target) or not self.trains(a.source):
                raise UsageError(
                    f"Graph {self.name!r}: {a.target!r} is to be an average of {a.source!r}. The first must be a model "
                    "that is called and not trained, the second one that is trained."
                )
            if not 0 < a.eta <= 1:
                raise UsageError(f"Graph {self.name!r}: eta of {a.target!r} is {a.eta:g}. It must lie in (0, 1].")
        self.order  # a cycle is an error here, not at the first run

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # The planner keeps what it derives from a graph under the graph.
        return hash((self.name, self.calls, self.inputs, self.carried, self.averages))

    @functools.cached_property
    def _by_name(self) -> dict[str, Call]:
        return {c.name: c for c in self.calls}

    def has(self, name: str) -> bool:
        return name in self._by_name

    def call(self, name: str) -> Call:
        return self._by_name[name]

    @functools.cached_property
    def models(self) -> tuple[str, ...]:
        """The models called, in the order of their first call."""
        return tuple(dict.fromkeys(c.model for c in self.calls if c.model))

    def trains(self, model: str) -> bool:
        return model in self._trained

    def average(self, model: str) -> Average | None:
        """What `model` is a moving average of."""
        return next((a for a in self.averages if a.target == model), None)

    def changes(self, model: str) -> bool:
        """Whether the weights of `model` are others in each iteration: it is trained, or follows one that is. They are
        then kept in float32, or small steps would be lost."""
        return self.trains(model) or self.average(model) is not None

    @functools.cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(c.model for c in self.calls if c.kind == "train")

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Data edges, carried edges (lag 1), and parameter edges: the first calls of a trained model in an iteration
        wait for its last train call of the iteration before; its train call waits for its other calls. Calls of an
        average do so with the train calls of the model that it follows."""
        writers = {key: call.name for call in self.calls for key in call.writes}
        edges = [
            Edge(writers[key], call.name, key, lag=int(key in self.carried))
            for call in self.calls
            for key in call.reads
            if key in writers
        ]
        for model in self.models:
            average = self.average(model)
            followed = average.source if average else model
            trains = [c for c in self.calls if c.model == followed and c.kind == "train"]
            others = [c for c in self.calls if c.model == model and c.kind != "train"]
            for train in trains:
                key = f"parameters of {model}"
                edges += [Edge(train.name, other.name, key, lag=1) for other in others]
                edges += [Edge(other.name, train.name, key) for other in others]
            if trains and not average:
                edges.append(Edge(trains[-1].name, trains[0].name, f"parameters of {model}", lag=1))
        return tuple(dict.fromkeys(edges))

    @functools.cached_property
    def order(self) -> tuple[Call, ...]:
        """The calls in an order in which every call follows what it waits for; ties keep the declared order."""
        waits = {c.name: {e.source for e in self.edges if e.target == c.name and e.lag == 0} for c in self.calls}
        done: list[Call] = []
        while len(done) < len(self.calls):
            names = {c.name for c in done}
            ready = [c for c in self.calls if c.name not in names and waits[c.name] <= names]
            if not ready:
                stuck = sorted(set(waits) - names)
                raise UsageError(f"Graph {self.name!r}: calls {', '.join(stuck)} wait for each other in a circle.")
            done.append(ready[0])
        return tuple(done)

    def last_read(self, key: str) -> str | None:
        """Name of the last call, in order, that reads `key`."""
        readers = [c.name for c in self.order if key in c.reads]
        return readers[-1] if readers else None
