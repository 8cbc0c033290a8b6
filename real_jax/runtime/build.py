"""From an algorithm and a plan to compiled programs: the one place where calls, models and placements meet."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from real_jax.algorithms.algorithm import Algorithm
from real_jax.models.transformer import abstract_params
from real_jax.runtime.calls import (
    Abstract,
    ModelProgramConfig,
    Program,
    compile_call,
    generate_function,
    inference_function,
    train_function,
)
from real_jax.runtime.meshes import make_mesh
from real_jax.spec.arch import weights
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


def _written(build: Build, call, function, batch: Abstract) -> Abstract:
    config = build.models[call.model]
    table = weights(config.arch, config.head)
    reads = {key: batch[key] for key in call.reads}
    if call.kind != "train":
        return jax.eval_shape(function, abstract_params(table, config.compute_type), reads)
    params = abstract_params(table, jnp.float32)
    state = jax.eval_shape(build.optimizers[call.model].init, params)
    return jax.eval_shape(function, params, state, reads)[2]


def compile_programs(
    build: Build,
    plan: ExecutionPlan,
    *,
    known: Mapping[str, Program] | None = None,
    threads: int = 2,
    progress: Callable[[Program], Any] = lambda program: None,
) -> dict[str, Program]:
    """Compiles every call of the graph under its placement, a few at a time; `progress` hears of each.

    A call in `known` is taken from there instead.

    Every shape is known before the first compile starts: a call's inputs are what its writers write.
    """
    graph = build.algorithm.graph
    known = known or {}
    carried = jax.eval_shape(lambda: dict(build.algorithm.initial))
    batch: Abstract = {**build.inputs, **build.host_writes, **carried}
    todo = []
    for call in graph.order:
        if call.kind == "host":
            continue
        placement = plan[call.name]
        mesh = make_mesh(placement)
        function = _function(build, call, placement, mesh)
        todo.append((call, placement, mesh, function))
        batch |= {k: v for k, v in _written(build, call, function, batch).items() if k not in carried}

    def one(item) -> Program:
        call, placement, mesh, function = item
        if call.name in known:
            return known[call.name]
        program = compile_call(
            call,
            placement,
            mesh,
            build.models[call.model],
            function,
            batch,
            graph.carried,
            build.optimizers.get(call.model),
        )
        progress(program)
        return program

    with ThreadPoolExecutor(threads) as pool:
        return {program.call.name: program for program in pool.map(one, todo)}
