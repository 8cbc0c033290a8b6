"""The weights of every model: one home each, and views in other layouts that carry the version they were made from."""

import dataclasses
from typing import Any

import jax
import numpy as np

from real_jax.reallocation.memories import on_hosts
from real_jax.reallocation.move import Mover
from real_jax.runtime.calls import Program
from real_jax.runtime.hosts import move_tree
from real_jax.spec.dataflow import Graph


class StaleView(RuntimeError):
    """A call was handed weights older than the model's."""


@dataclasses.dataclass
class View:
    """Weights in one layout, made from the home weights of `version`."""

    params: dict[str, jax.Array]
    version: int


@dataclasses.dataclass
class Home:
    """A model's own weights.

    Attributes:
      params: under the home layout; in the memory of the devices' hosts where the model waits there between its calls.
      optimizer_state: of a trained model.
      version: counts the updates.
      views: layout key -> view.
      behind: of a moving average: whether the model that it follows has been trained since.
    """

    params: dict[str, Any]
    optimizer_state: Any = None
    version: int = 0
    views: dict[Any, View] = dataclasses.field(default_factory=dict)
    behind: bool = False


class WeightStore:
    """Holds the models of one graph under one plan."""

    def __init__(self, graph: Graph, programs: dict[str, Program]):
        self._programs = programs
        self.mover = Mover()
        self._models: dict[str, Home] = {}
        offloads = {name for name, program in programs.items() if program.placement.offload}
        self.home_call = {model: _home_call(graph, model, offloads) for model in graph.models}
        self._graph = graph
        self.trained = tuple(model for model in graph.models if graph.trains(model))
        self.averages = tuple(model for model in graph.models if graph.average(model))
        self._offloaded = {m for m in graph.models if self.home_call[m] in offloads}

    def put(self, model: str, params: dict[str, Any], optimizer_state=None, version: int = 0) -> None:
        """Takes a copy of `params`, arrays of the host or of devices, as the model's home weights, in the home call's
        layout."""
        program = self._programs[self.home_call[model]]
        dtype = self.home_type(model)
        where = on_hosts(program.weights) if model in self._offloaded else program.weights
        home = self.mover.move(params, where, dtype)
        if model in self.trained:
            if optimizer_state is None:
                optimizer_state = program.initial_optimizer_state(home)
            else:
                optimizer_state = self._laid_out(optimizer_state, program.optimizer_state_shardings)
        self._models[model] = Home(home, optimizer_state, version)

    def _laid_out(self, state: Any, shardings: Any) -> Any:
        """An optimizer state under `shardings`; one that is laid out so already, as a checkpoint restores it, is taken
        as it is."""
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
        if all(isinstance(x, jax.Array) and x.sharding == s for x, s in pairs):
            return state
        return move_tree(state, shardings, self.mover)

    def home(self, model: str) -> Home:
        """The model's own weights; an average is brought up to date first."""
        if self._models[model].behind:
            self._update_average(model)
        return self._models[model]

    def home_type(self, model: str) -> np.dtype:
        """Of what changes, float32: the compute type might lose small steps."""
        return np.dtype(np.float32 if self._graph.changes(model) else self._programs[self.home_call[model]].stored_type)

    def is_home(self, call: str) -> bool:
        """Whether `call` takes its model's home weights as they are."""
        program = self._programs[call]
        own = self._programs[self.home_call[program.call.model]]
        same = program.placement.layout == own.placement.layout
        same &= np.dtype(program.stored_type) == self.home_type(program.call.model)
        return same and program.call.model not in self._offloaded

    def has_view(self, call: str) -> bool:
        """Whether the weights for `call` exist in its layout and are current."""
        program = self._programs[call]
        home = self._models[program.call.model]
        if home.behind:
            return False
        view = home.views.get(_view_key(program))
        return self.is_home(call) or (view is not None and view.version == home.version)

    def awaited(self, call: str) -> list[jax.Array]:
        """The device arrays that a reallocation for `call` has to wait for before it can be dispatched."""
        program = self._programs[call]
        home = self._models[program.call.model]
        steps = [(home.params, program.weights)]
        if home.behind:
            own = self._programs[self.home_call[program.call.model]].weights
            steps = [(self._models[self.follows(program.call.model)].params, own)]
        return [
            x
            for params, wanted in steps
            if self.mover.waits(params, wanted)
            for x in params.values()
            if isinstance(x, jax.Array)
        ]

    def follows(self, model: str) -> str:
        """The model of whose weights `model` is a moving average."""
        return self._graph.average(model).source

    def is_behind(self, model: str) -> bool:
        return self._models[model].behind

    def catch_up(self, call: str) -> dict[str, Any]:
        """The weights of the model of `call`, a moving average being brought up to date first."""
        return self.home(self._programs[call].call.model).params

    def _update_average(self, model: str) -> None:
        home = self._models[model]
        average = self._graph.average(model)
        home.params = self.mover.average(home.params, self._models[average.source].params, average.eta)
        home.views.clear()
        home.version, home.behind = home.version + 1, False

    def make_view(self, call: str) -> dict[str, jax.Array]:
        """Reallocates the model's current weights into the layout of `call`."""
        program = self._programs[call]
        home = self.home(program.call.model)
        params = self.mover.move(home.params, program.weights, program.stored_type)
        home.views[_view_key(program)] = View(params, home.version)
        return params

    def params_for(self, call: str) -> dict[str, jax.Array]:
        """The weights for `call`. Raises StaleView where the view in its layout is older than the model."""
        program = self._programs[call]
        home = self.home(program.call.model)
        if self.is_home(call):
            return home.params
        view = home.views[_view_key(program)]
        if view.version != home.version:
            raise StaleView(f"{call}: weights of version {view.version}, but {program.call.model} is at {home.version}")
        return view.params

    def drop_views(self, model: str) -> None:
        self._models[model].views.clear()

    def release(self, call: str) -> None:
        """Drops the view that an offloading call was given."""
        program = self._programs[call]
        if program.placement.offload:
            self._models[program.call.model].views.pop(_view_key(program), None)

    def update(self, model: str, params: dict[str, jax.Array], optimizer_state) -> None:
        """New home weights after a train call; every view is stale from here on and is dropped."""
        home = self._models[model]
        home.views.clear()
        home.params, home.optimizer_state, home.version = params, optimizer_state, home.version + 1
        for average in self._graph.averages:
            if average.source == model:
                self._models[average.target].behind = True


def _home_call(graph: Graph, model: str, offloads: set[str]) -> str:
    """A trained model lives where it trains (its last train call), a frozen one where it is first called; calls that
    leave it in host memory come last."""
    calls = [c for c in graph.order if c.model == model]
    trains = [c for c in calls if c.kind == "train"]
    staying = [c for c in calls if c.name not in offloads]
    return trains[-1].name if trains else (staying or calls)[0].name


def _view_key(program: Program):
    return program.placement.layout, np.dtype(program.stored_type).name
