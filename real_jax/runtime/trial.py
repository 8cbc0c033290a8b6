"""Timing a plan: a few iterations of one stage under it, on random weights and random prompts."""

import dataclasses

import jax
import numpy as np

from real_jax.models.transformer import initialize
from real_jax.runtime.build import Build, compile_programs
from real_jax.runtime.calls import Program
from real_jax.runtime.engine import Engine, Result
from real_jax.runtime.weights import WeightStore
from real_jax.spec.arch import weights
from real_jax.spec.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class Trial:
    """Medians over the timed iterations: seconds of one iteration, and of each call and reallocation in it."""

    seconds: float
    events: dict[str, float]
    work_bytes: dict[str, int]


def time_plan(
    build: Build,
    plan: ExecutionPlan,
    *,
    iterations: int = 3,
    enough_seconds: float = 10.0,
    known: dict[str, Program] | None = None,
    progress=None,
) -> tuple[Trial, dict[str, Program]]:
    """Runs one iteration to warm up and up to `iterations` more, no further one once `enough_seconds` are spent, and
    returns the times and the compiled programs.

    Host calls are left out: they cost the same under every plan.
    """
    listen = {"progress": progress} if progress else {}
    programs = compile_programs(build, plan, known=known, **listen)
    graph = build.algorithm.graph
    store = WeightStore(graph, programs)
    key = jax.random.key(0)
    for number, (model, config) in enumerate(build.models.items()):
        store.put(model, initialize(weights(config.arch, config.head), jax.random.fold_in(key, number)))
    host = {c.name: _zeros(build, c.writes) for c in graph.calls if c.kind == "host"}
    engine = Engine(graph, programs, store, host, build.algorithm.initial)
    results: list[Result] = []
    for result in engine.run(range(iterations + 1), lambda i: random_inputs(build, i), pause=lambda i: i == 0):
        results += [result] if result.iteration else []
        if sum(r.seconds for r in results) >= enough_seconds:
            break
    engine.close()
    names = dict.fromkeys(e.name for r in results for e in r.events)
    events = {n: float(np.median([e.end - e.start for r in results for e in r.events if e.name == n])) for n in names}
    bytes_ = {name: program.work_bytes for name, program in programs.items()}
    return Trial(float(np.median([r.seconds for r in results])), events, bytes_), programs


def random_inputs(build: Build, seed: int) -> dict[str, np.ndarray]:
    """Inputs of a stage: random tokens, every sequence at its full length."""
    random = np.random.default_rng(seed)
    vocab = min(config.arch.vocab for config in build.models.values())
    width = max(s.shape[-1] for name, s in build.inputs.items() if name.endswith("tokens"))
    made = {}
    for name, shape in build.inputs.items():
        if name.endswith("tokens"):
            made[name] = random.integers(0, vocab, shape.shape).astype(shape.dtype)
        elif name == "row_ids":
            made[name] = np.arange(shape.shape[0]).astype(shape.dtype)
        elif name == "prompt_lengths" and "lengths" in build.inputs:
            made[name] = np.full(shape.shape, max(1, width // 2), shape.dtype)
        else:
            made[name] = np.full(shape.shape, width, shape.dtype)
    return made


def _zeros(build: Build, keys: tuple[str, ...]):
    def run(batch):
        return {key: np.zeros(build.host_writes[key].shape, build.host_writes[key].dtype) for key in keys}

    return run
