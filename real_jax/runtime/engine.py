"""The engine walks a graph under a plan: it moves weights and data to each call's mesh and dispatches without waiting.

One iteration:
  1. Inputs from the loader and carried keys from the iteration before are the first batch keys.
  2. A call is dispatched once the calls it waits for are dispatched, and the moves that it needs with it. Where devices
     share their memory a move reads its source where it lies, which must be there by then; a model that waits in host
     memory is not brought in before its devices are idle, as there is room for it only then. The engine lets other calls
     go ahead meanwhile.
  3. Train calls donate weights and optimizer state; their models' views are stale from then on and are dropped. A moving
     average of them is brought up to date before its next call.
  4. Threads note when each result is ready; nothing else waits for the devices, and the next iteration is dispatched
     before this one has ended.

In several processes each walks the same graph in the same order, as programs that talk to each other must be dispatched
in one order everywhere. A process leaves out the calls that none of its devices has a part in; host calls run in
process 0, and at the end of an iteration all tell each other what they have seen of it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from real_jax.reallocation.exchange import in_turn
from real_jax.runtime import distributed, meshes
from real_jax.runtime.calls import Program
from real_jax.runtime.hosts import move_tree, on_every_host, on_main
from real_jax.runtime.weights import WeightStore
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.timeline import Event

HostFunction = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


@dataclasses.dataclass
class Result:
    """What an iteration leaves: batch keys that nobody drops, metrics by call, and the timeline; the same in every process.

    `seconds` run from the end of the iteration before (or the start, where that came later) to its own end.
    """

    iteration: int
    batch: dict[str, Any]
    metrics: dict[str, dict[str, np.ndarray]]
    events: list[Event]
    seconds: float


@dataclasses.dataclass
class _Pending:
    name: str
    kind: str
    devices: tuple[int, ...]
    dispatched: float
    after: tuple[str, ...]
    done: Future
    here: bool = True


@dataclasses.dataclass
class _Started:
    """An iteration whose calls are all dispatched; `start` is a reading of the clock."""

    iteration: int
    start: float
    batch: dict[str, Any]
    pending: list[_Pending] = dataclasses.field(default_factory=list)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


class Engine:
    """Runs one graph under one plan.

    Args:
      graph: the calls.
      programs: call -> compiled program, for every call that is not a host call.
      store: the weights.
      host: call -> Python function, for every host call; it gets and returns numpy arrays.
      carried: carried key -> value before the first iteration.
    """

    def __init__(
        self,
        graph: Graph,
        programs: Mapping[str, Program],
        store: WeightStore,
        host: Mapping[str, HostFunction] | None = None,
        carried: Mapping[str, Any] | None = None,
    ):
        self.graph, self.programs, self.store = graph, dict(programs), store
        self.host, self.carried = dict(host or {}), dict(carried or {})
        self._pool = ThreadPoolExecutor(max_workers=4 * len(graph.calls) + 4, thread_name_prefix="watch")
        self._watched: list[_Pending] = []  # what may still run
        self._ends: dict[str, float] = {}  # of the newest finished iteration: name -> when it ended
        self._free: dict[int, float] = {}  # device -> when the newest finished iteration left it

    def run_iteration(
        self, iteration: int, inputs: Mapping[str, np.ndarray], keep: frozenset[str] = frozenset()
    ) -> Result:
        """One pass over the graph, waiting for its end. Keys in `keep` stay in the result's batch; others are dropped
        after their last reader."""
        return self._finish(self._start(iteration, inputs, keep))

    def run(
        self,
        iterations: range,
        inputs: Callable[[int], Mapping[str, np.ndarray]],
        keep: frozenset[str] = frozenset(),
        pause: Callable[[int], bool] = lambda iteration: False,
    ) -> Iterator[Result]:
        """Results of iterations in order, each iteration dispatched before the one before it has ended, so that calls
        of both overlap where their devices do not. After an iteration for which `pause` is true the next one is held
        back until its result has been dealt with: the weights are then those of that iteration."""
        started: _Started | None = None
        for iteration in iterations:
            following = self._start(iteration, inputs(iteration), keep)
            if started is not None:
                yield self._finish(started)
            started = following
            if pause(iteration):
                yield self._finish(started)
                started = None
        if started is not None:
            yield self._finish(started)

    def _start(self, iteration: int, inputs: Mapping[str, np.ndarray], keep: frozenset[str]) -> "_Started":
        started = _Started(iteration, time.perf_counter(), {**inputs, **self.carried})
        batch, carried = started.batch, {}
        waiting = list(self.graph.order)
        while waiting:
            call = self._next(waiting, batch)
            waiting.remove(call)
            written, metrics = self._dispatch(call, batch, started.pending)
            carried |= {k: v for k, v in written.items() if k in self.graph.carried}
            batch |= {k: v for k, v in written.items() if k not in self.graph.carried}
            if metrics is not None:
                started.metrics[call.name] = metrics
            needed = keep | {key for c in waiting for key in c.reads}
            for key in set(batch) - needed:
                del batch[key]
        self.carried |= carried
        return started

    def _finish(self, started: "_Started") -> Result:
        batch = self.fetch(started.batch)
        metrics, spans = self._seen_by_all(started)
        events, ends = _events(started, spans, self._ends, self._free)
        seconds = max(ends.values()) - max(spans[None][0], *self._ends.values(), 0.0)
        self._ends = ends
        for p in started.pending:
            self._free |= {d: max(self._free.get(d, 0.0), ends[p.name]) for d in p.devices}
        return Result(started.iteration, batch, metrics, events, max(seconds, 1e-9))

    def _seen_by_all(self, started: "_Started") -> tuple[dict, dict]:
        """Metrics by call, and when each thing was dispatched and ended by the clock (under None: the iteration, and
        nothing), put together from what each process has seen."""
        spans = {p.name: (p.dispatched, p.done.result()) for p in started.pending if p.here}
        spans[None] = (started.start, 0.0)
        told = [c for c in started.metrics if meshes.first_process(self.programs[c].mesh) == jax.process_index()]
        metrics = jax.device_get({call: started.metrics[call] for call in told})
        if distributed.processes() == 1:
            return metrics, spans
        # Each process has a clock of its own; that of the wall is common to them.
        shift = time.time() - time.perf_counter()
        seen = distributed.gather((metrics, {k: (a + shift, b + shift) for k, (a, b) in spans.items()}))
        merged: tuple[dict, dict] | None = None
        if seen is not None:
            merged = {}, {}
            for metrics, spans in seen:
                merged[0].update(metrics)
                for name, (began, ended) in spans.items():
                    first, last = merged[1].get(name, (began, ended))
                    merged[1][name] = max(first, began), max(last, ended)
        metrics, spans = distributed.broadcast(merged)
        return metrics, {k: (a - shift, b - shift) for k, (a, b) in spans.items()}

    def run_call(self, name: str, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a single generate, inference or host call outside an iteration, and brings what it writes to every host;
        used for evaluation."""
        written, _ = self._dispatch(self.graph.call(name), dict(batch), [])
        return self.fetch(written)

    def fetch(self, tree: Any) -> Any:
        """`tree` with its arrays in host memory, in every process."""
        return on_every_host(tree, self.store.mover)

    def _next(self, waiting: list[Call], batch: Mapping[str, Any]) -> Call:
        """The first call in order that can be dispatched without waiting for a device; else the first whose producers
        are dispatched. Several processes take them in one order."""
        names = {c.name for c in waiting}
        blocked = {e.target for e in self.graph.edges if e.lag == 0 and e.source in names}
        ready = [c for c in waiting if c.name not in blocked]
        if distributed.processes() > 1:
            return ready[0]
        while True:
            for call in ready:
                if all(x.is_ready() for x in self._crossing(call, batch)) and not self._in_the_way(call):
                    return call
            if len(ready) == 1:
                return ready[0]
            time.sleep(0.0005)

    def _crossing(self, call: Call, batch: Mapping[str, Any]) -> list[jax.Array]:
        """Arrays that must be there before `call` is dispatched: those that are read where they lie, on other devices."""
        if not self.store.mover.shared_memory:
            return []
        arrays = [x for key in call.reads for x in jax.tree.leaves(batch[key]) if isinstance(x, jax.Array)]
        if call.kind == "host":
            return arrays
        program = self.programs[call.name]
        own = set(program.mesh.devices.flat)
        crossing = [x for x in arrays if x.sharding.device_set != own]
        if not self.store.has_view(call.name):
            crossing += self.store.awaited(call.name)
        return crossing

    def _in_the_way(self, call: Call) -> list[_Pending]:
        """What must end before the weights of `call` are brought in from host memory: all on its devices."""
        if call.kind == "host" or not self.programs[call.name].placement.offload or self.store.has_view(call.name):
            return []
        return [
            p
            for p in self._watched
            if not p.done.done() and set(p.devices) & set(self.programs[call.name].placement.devices)
        ]

    def _dispatch(self, call: Call, batch: dict, pending: list[_Pending]) -> tuple[dict, Any]:
        if call.kind == "host":
            return self._run_host(call, batch, pending), None
        program = self.programs[call.name]
        devices = tuple(program.placement.devices)
        if self.store.is_behind(call.model):
            self._reallocate(
                self.store.follows(call.model), self.store.home_call[call.model], pending, self.store.catch_up
            )
        if not self.store.has_view(call.name):
            for before in self._in_the_way(call):
                before.done.result()
            self._reallocate(call.model, call.name, pending, self.store.make_view)
        params = self.store.params_for(call.name)
        with jax.profiler.TraceAnnotation(call.name):
            own = self._bring({key: batch[key] for key in call.reads}, program)
            began = time.perf_counter()
            if call.kind == "train":
                home = self.store.home(call.model)
                self.store.drop_views(call.model)
                params, state, written, metrics = program.executable(params, home.optimizer_state, own)
                self.store.update(call.model, params, state)
            else:
                written, metrics = program.executable(params, own), None
                self.store.release(call.name)
        after = tuple(e.source for e in self.graph.edges if e.target == call.name and e.lag == 0)
        results = in_turn((written, metrics))
        pending.append(self._watch(call.name, call.kind, devices, began, after, results, program.here))
        return written, metrics

    def _reallocate(self, model: str, call: str, pending: list[_Pending], move: Callable[[str], Any]) -> None:
        """Moves weights of `model` to where `call` runs."""
        began = time.perf_counter()
        moved = move(call)
        ends = [self.programs[self.store.home_call[model]], self.programs[call]]
        touched = tuple(sorted({d for end in ends for d in end.placement.devices}))
        here = any(end.here for end in ends)
        pending.append(self._watch(f"{model} to {call}", "reallocation", touched, began, (), moved, here))

    def _bring(self, batch: dict[str, Any], program: Program) -> dict[str, Any]:
        """Batch keys on the devices of the program, laid out as it takes them."""
        leaves, structure = jax.tree.flatten(batch)
        wanted = jax.tree.leaves({key: program.batch[key] for key in batch})
        brought, crossing = list(leaves), []
        for i, (x, sharding) in enumerate(zip(leaves, wanted, strict=True)):
            if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
                brought[i] = meshes.place(np.asarray(x), sharding)
            elif x.sharding.device_set != sharding.device_set:
                crossing.append(i)
            elif program.here:
                brought[i] = in_turn(jax.device_put(x, sharding))
        moved = move_tree([leaves[i] for i in crossing], [wanted[i] for i in crossing], self.store.mover)
        for i, x in zip(crossing, moved, strict=True):
            brought[i] = x
        return jax.tree.unflatten(structure, brought)

    def _run_host(self, call: Call, batch: dict, pending: list[_Pending]) -> dict:
        read = on_main({key: batch[key] for key in call.reads}, self.store.mover)
        began = time.perf_counter()
        written = distributed.once(lambda: self.host[call.name](read))
        if set(written) != set(call.writes):
            raise ValueError(f"host call {call.name} wrote {sorted(written)}, not {sorted(call.writes)}")
        done: Future = Future()
        done.set_result(time.perf_counter())
        after = tuple(e.source for e in self.graph.edges if e.target == call.name and e.lag == 0)
        pending.append(_Pending(call.name, "host", (), began, after, done, distributed.is_main()))
        return written

    def _watch(self, name, kind, devices: tuple[int, ...], began: float, after, arrays, here: bool) -> _Pending:
        leaves = jax.tree.leaves(arrays)

        def wait() -> float:
            jax.block_until_ready(leaves)
            return time.perf_counter()

        self._watched = [p for p in self._watched if not p.done.done()]
        self._watched.append(_Pending(name, kind, devices, began, after, self._pool.submit(wait), here))
        return self._watched[-1]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _events(
    started: _Started, spans: Mapping, before: Mapping[str, float], free: Mapping[int, float]
) -> tuple[list[Event], dict[str, float]]:
    """The timeline, and when each thing ended: something begins when it is dispatched, what it waits for has ended and
    its devices are free. `spans` tell when each was dispatched and ended; `before` and `free` say the same of the iteration before, on the clock."""
    events: list[Event] = []
    ends: dict[str, float] = {}
    free = dict(free)
    for p in started.pending:
        dispatched, end = spans[p.name]
        waits = [ends.get(name, before.get(name, 0.0)) for name in p.after]
        begin = min(end, max([dispatched, *waits, *(free.get(d, 0.0) for d in p.devices)]))
        events.append(Event(p.name, p.kind, started.iteration, p.devices, begin, end))
        ends[p.name] = end
        free |= {d: end for d in p.devices}
    zero = min(e.start for e in events)
    return [dataclasses.replace(e, start=e.start - zero, end=e.end - zero) for e in events], ends
