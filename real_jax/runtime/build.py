"""From an algorithm and a plan to compiled programs: the one place where calls, models and placements meet."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax

from real_jax.algorithms.algorithm import Algorithm
from real_jax.models.transformer import abstract_params
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
from real_jax.spec.arch import weights
from real_jax.spec.dataflow import Call
from real_jax.spec.experiment import GenerationConfig
from real_jax.spec.plan import ExecutionPlan, Placement


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


def lower(
    build: Build, call: Call, placement: Placement, batch: Abstract, among: Sequence | None = None
) -> LoweredCall:
    """`call` under `placement`, traced and ready to compile.

    Args:
      batch: shapes of the keys that it reads.
      among: the devices that placements number; None: those of this process.
    """
    mesh = make_mesh(placement, among)
    function, optimizer = _function(build, call, placement, mesh), build.optimizers.get(call.model)
    carried = build.algorithm.graph.carried
    return lower_call(call, placement, mesh, build.models[call.model], function, batch, carried, optimizer)


def abstract_batch(build: Build) -> Abstract:
    """Shapes and types of every batch key, from the loader's to the last call's. They do not depend on a plan."""
    initial = jax.eval_shape(lambda: dict(build.algorithm.initial))
    batch: Abstract = {**build.inputs, **build.host_writes, **initial}
    one = Placement()
    mesh = make_mesh(one)
    for call in build.algorithm.graph.order:
        if call.kind == "host":
            continue
        config = build.models[call.model]
        params = abstract_params(weights(config.arch, config.head), jax.numpy.float32)
        inputs = [params, {key: batch[key] for key in call.reads}]
        if call.kind == "train":
            inputs.insert(1, jax.eval_shape(build.optimizers[call.model].init, params))
        shapes = jax.eval_shape(_function(build, call, one, mesh), *inputs)
        written = shapes[2] if call.kind == "train" else shapes
        batch |= {key: shape for key, shape in written.items() if key not in initial}
    return batch


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
            lowered.append(lower(build, call, plan[call.name], batch))
            written = lowered[-1].written
        batch |= {key: shape for key, shape in written.items() if key not in carried}
    with ThreadPoolExecutor(threads) as pool:
        for program in pool.map(LoweredCall.compile, lowered):
            programs[program.call.name] = program
            progress(program)
    return programs
