"""From an algorithm and a plan to compiled programs: the one place where calls, models and placements meet."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax

from real_jax.algorithms.algorithm import Algorithm
from real_jax.runtime.calls import (
    Abstract,
    LoweredCall,
    ModelProgramConfig,
    Program,
    generate_function,
    inference_function,
    lower_call,
    train_function,
)
from real_jax.runtime.meshes import make_mesh
from real_jax.spec.experiment import GenerationConfig
from real_jax.spec.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class Build:
    """Everything that an algorithm's programs depend on, beside the plan.

    Attributes:
      models: model -> shape, head and types.
      optimizers: trained model -> its optimizer.
      minibatches: train call -> optimizer steps an iteration.
      inputs: shapes and types of the keys that the loader gives.
      host_writes: shapes and types of the keys that host calls write.
    """

    algorithm: Algorithm
    models: Mapping[str, ModelProgramConfig]
    inputs: Abstract
    optimizers: Mapping[str, optax.GradientTransformation] = dataclasses.field(default_factory=dict)
    minibatches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_writes: Abstract = dataclasses.field(default_factory=dict)
    generation: GenerationConfig = GenerationConfig()
    seed: int = 0
    end_token: int = 0
    pad_token: int = 0


def _function(build: Build, call, placement, mesh) -> Callable:
    config = build.models[call.model]
    if call.kind == "generate":
        return generate_function(
            config,
            build.generation,
            placement,
            mesh,
            seed=build.seed,
            end_token=build.end_token,
            pad_token=build.pad_token,
        )
    if call.kind == "inference":
        return inference_function(config, build.algorithm.inference[call.name], placement, mesh)
    return train_function(
        config,
        build.algorithm.train[call.name],
        build.optimizers[call.model],
        build.minibatches.get(call.name, 1),
        placement,
        mesh,
    )


def compile_programs(
    build: Build,
    plan: ExecutionPlan,
    *,
    known: Mapping[str, Program] | None = None,
    threads: int = 2,
    progress: Callable[[Program], Any] = lambda program: None,
) -> dict[str, Program]:
    """Compiles every call of the graph under its placement, a few at a time; `progress` hears of each.

    A call in `known` is taken from there instead. All calls are traced before the first compile starts, so a fault in
    any of them is told at once.
    """
    graph = build.algorithm.graph
    programs: dict[str, Program] = {}
    carried = jax.eval_shape(lambda: dict(build.algorithm.initial))
    batch: Abstract = {**build.inputs, **build.host_writes, **carried}
    lowered: list[LoweredCall] = []
    for call in graph.order:
        if call.kind == "host":
            continue
        if known and call.name in known:
            programs[call.name] = known[call.name]
            written = known[call.name].written
        else:
            placement, config = plan[call.name], build.models[call.model]
            mesh = make_mesh(placement)
            function = _function(build, call, placement, mesh)
            optimizer = build.optimizers.get(call.model)
            lowered.append(lower_call(call, placement, mesh, config, function, batch, graph.carried, optimizer))
            written = lowered[-1].written
        batch |= {key: shape for key, shape in written.items() if key not in carried}
    with ThreadPoolExecutor(threads) as pool:
        for program in pool.map(LoweredCall.compile, lowered):
            programs[program.call.name] = program
            progress(program)
    return programs
