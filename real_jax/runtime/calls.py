"""Model calls as compiled programs: generate, inference and train, each under its placement's own mesh."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from real_jax.algorithms.algorithm import Batch, Forward, TrainFunctions
from real_jax.models.heads import next_token_log_probs
from real_jax.models.transformer import Params, Transformer, abstract_params, cast
from real_jax.reallocation.exchange import in_turn
from real_jax.rollout.generate import generate
from real_jax.runtime import meshes, shardings
from real_jax.spec.arch import Arch, Head, weights
from real_jax.spec.dataflow import Call
from real_jax.spec.experiment import GenerationConfig
from real_jax.spec.plan import Placement

Abstract = dict[str, Any]  # batch key -> ShapeDtypeStruct, or a tree of them


@dataclasses.dataclass(frozen=True)
class ModelProgramConfig:
    """What a program needs to know of its model.

    Attributes:
      compute_type: type of activations, and of the weights inside the program.
      temperature: that log-probabilities are taken at.
      attention: over whole sequences: "cudnn" (bfloat16 on NVIDIA GPUs; elsewhere "xla" all the same), or "xla".
    """

    arch: Arch
    head: Head
    compute_type: Any = jnp.float32
    temperature: float = 1.0
    attention: Literal["cudnn", "xla"] = "cudnn"


@dataclasses.dataclass
class Program:
    """A compiled call.

    Attributes:
      executable: generate, inference: (params, batch) -> written. train: (params, optimizer state, batch) ->
        (params, optimizer state, written, metrics), the first two donated. In a process that has none of the mesh's
        devices it computes nothing and gives arrays without data.
      weights: shardings of the parameters it takes.
      stored_type: type of the parameters it takes: float32 for a train call, else the compute type.
      batch: key -> sharding of each key it reads.
      written: key -> shape and type of each key it writes.
    """

    call: Call
    placement: Placement
    mesh: Mesh
    config: ModelProgramConfig
    executable: Callable
    weights: dict[str, NamedSharding]
    stored_type: Any
    batch: dict[str, Any]
    written: Abstract
    compile_seconds: float
    optimizer: optax.GradientTransformation | None = None
    optimizer_state_shardings: Any = None

    def abstract_state(self):
        """Shapes, types and shardings of a train call's parameters and optimizer state."""
        params = self.abstract_weights(self.stored_type)
        state, laid_out = jax.eval_shape(self.optimizer.init, params), self.optimizer_state_shardings
        return params, jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), state, laid_out)

    def abstract_weights(self, dtype) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of the model's parameters as the call lays them out, of type `dtype`."""
        shapes = abstract_params(weights(self.config.arch, self.config.head), dtype)
        return {k: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.weights[k]) for k, s in shapes.items()}

    def initial_optimizer_state(self, params: Params):
        """The optimizer state of a train call before its first step, laid out as the call takes it."""
        if not self.here:
            _, state = self.abstract_state()
            return jax.tree.map(lambda s: meshes.elsewhere(s, s.sharding), state)
        return in_turn(jax.jit(self.optimizer.init, out_shardings=self.optimizer_state_shardings)(params))

    @property
    def here(self) -> bool:
        """Whether this process takes part."""
        return meshes.here(self.mesh)

    @property
    def work_bytes(self) -> int:
        """Temporary bytes on each device, as the compiler planned them; zero where this process takes no part."""
        if not self.here:
            return 0
        return int(self.executable.memory_analysis().temp_size_in_bytes)


def bind(config: ModelProgramConfig, params: Params, placement: Placement, mesh: Mesh) -> Transformer:
    """The model over `params` in the compute type, its activations pinned to the mesh."""
    fused = config.attention == "cudnn" and config.compute_type == jnp.bfloat16
    fused &= mesh.devices.flat[0].platform == "gpu"
    return Transformer(
        config.arch,
        config.head,
        cast(params, config.compute_type),
        constrain=shardings.constrainer(placement, mesh),
        attention="cudnn" if fused else "xla",
        remat=placement.remat,
    )


def forward_of(config: ModelProgramConfig, params: Params, placement: Placement, mesh: Mesh) -> Forward:
    """Tokens -> (log_probs, entropies) or values, as algorithms expect it."""
    model = bind(config, params, placement, mesh)
    if config.head == "lm":
        return lambda tokens: next_token_log_probs(model, tokens, config.temperature)
    return lambda tokens: model.values(model(tokens))


def split(tree, parts: tuple[int, ...], mesh: Mesh):
    """Cuts the leading axis of every array into `parts`, [B, ...] -> [*parts, B / product, ...], each row group spread
    over the mesh."""

    def one(x: jax.Array) -> jax.Array:
        rest = x.shape[0]
        for part in parts:
            rest //= part
        x = x.reshape(*parts, rest, *x.shape[1:])
        return jax.lax.with_sharding_constraint(x, shardings.rows(mesh, len(parts)))

    return jax.tree.map(one, tree)


def in_micro_batches(function: Callable[[Batch], Batch], parts: int, mesh: Mesh) -> Callable[[Batch], Batch]:
    """`function` of a batch, run on `parts` row groups one after another; the result is the same."""
    if parts == 1:
        return function

    def run(batch: Batch) -> Batch:
        out = jax.lax.map(function, split(batch, (parts,), mesh))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    return run


def generate_function(
    config: ModelProgramConfig,
    generation: GenerationConfig,
    placement: Placement,
    mesh: Mesh,
    *,
    seed: int,
    end_token: int,
    pad_token: int,
) -> Callable[[Params, Batch], Batch]:
    """(params, batch of prompt_tokens, prompt_lengths, row_ids) -> tokens, lengths, ended, log_probs.

    A row's randomness comes from the seed and its row id: its place in the batch and on the mesh do not matter.
    """

    def run(params: Params, batch: Batch) -> Batch:
        model = bind(config, params, placement, mesh)

        def part(rows: Batch) -> Batch:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows["row_ids"])
            prompts, lengths = rows["prompt_tokens"], rows["prompt_lengths"]
            return generate(model, prompts, lengths, keys, generation, end_token, pad_token)._asdict()

        return in_micro_batches(part, placement.micro_batches, mesh)(batch)

    return run


def inference_function(
    config: ModelProgramConfig, function: Callable[[Forward, Batch], Batch], placement: Placement, mesh: Mesh
) -> Callable[[Params, Batch], Batch]:
    """(params, batch) -> what `function` writes."""

    def run(params: Params, batch: Batch) -> Batch:
        forward = forward_of(config, params, placement, mesh)
        return in_micro_batches(lambda rows: function(forward, rows), placement.micro_batches, mesh)(batch)

    return run


def train_function(
    config: ModelProgramConfig,
    functions: TrainFunctions,
    optimizer: optax.GradientTransformation,
    minibatches: int,
    placement: Placement,
    mesh: Mesh,
) -> Callable:
    """(params, optimizer state, batch) -> (params, optimizer state, written, metrics [minibatches] each).

    Each minibatch, a contiguous part of the batch whatever the plan, is one optimizer step; its gradient is the sum
    over its micro-batches, of a loss normalized over the whole minibatch.
    """
    pinned = shardings.weight_shardings(weights(config.arch, config.head), placement, mesh)

    def gradient(params: Params, minibatch: Batch):
        normalizer = functions.weight(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), minibatch))

        def loss(params: Params, rows: Batch):
            value, metrics = functions.loss(forward_of(config, params, placement, mesh), rows, normalizer)
            return value, metrics | {"loss": value}

        def one(rows: Batch):
            grads, metrics = jax.grad(loss, has_aux=True)(params, rows)
            return jax.lax.with_sharding_constraint(grads, pinned), metrics

        if placement.micro_batches == 1:
            return one(jax.tree.map(lambda x: x[0], minibatch))
        shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], minibatch))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        total, _ = jax.lax.scan(lambda sum_, rows: (jax.tree.map(jnp.add, sum_, one(rows)), None), zeros, minibatch)
        return total

    def step(state, minibatch: Batch):
        params, optimizer_state = state
        grads, metrics = gradient(params, minibatch)
        updates, new_state = optimizer.update(grads, optimizer_state, params)
        accepted = functions.accept(metrics)

        def keep(new, old):
            return jnp.where(accepted, new, old)

        params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        metrics |= {"grad_norm": optax.tree.norm(grads), "accepted": accepted.astype(jnp.float32)}
        return (params, jax.tree.map(keep, new_state, optimizer_state)), metrics

    def run(params: Params, optimizer_state, batch: Batch):
        rows, written, whole = functions.prepare(batch)
        parts = split(rows, (minibatches, placement.micro_batches), mesh)
        (params, optimizer_state), metrics = jax.lax.scan(step, (params, optimizer_state), parts)
        return params, optimizer_state, written, metrics | whole

    return run


# On the CPU backend these make the same program in a sixth of the time, and it runs as fast.
_CPU_OPTIONS = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}


def compile_lowered(lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles for the mesh's devices, with the options that suit them where this version of the compiler has them."""
    if mesh.devices.flat[0].platform == "cpu":
        try:
            return lowered.compile(compiler_options=_CPU_OPTIONS)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile()


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """A call that is traced and ready to compile. `written` are shapes and types of the keys that it writes.

    `lowered` is None where none of the devices belong to this process; `results` is then called in its place.
    """

    lowered: jax.stages.Lowered | None
    results: Callable
    fields: dict[str, Any]
    seconds: float

    @property
    def written(self) -> Abstract:
        return self.fields["written"]

    def compile(self) -> Program:
        """May run in any thread: whatever of jax's configuration holds for one thread has had its effect in tracing."""
        start = time.perf_counter()
        executable = compile_lowered(self.lowered, self.fields["mesh"]) if self.lowered else self.results
        return Program(executable=executable, compile_seconds=self.seconds + time.perf_counter() - start, **self.fields)


def lower_call(
    call: Call,
    placement: Placement,
    mesh: Mesh,
    config: ModelProgramConfig,
    function: Callable,
    batch: Abstract,
    carried: tuple[str, ...],
    optimizer: optax.GradientTransformation | None = None,
) -> LoweredCall:
    """Traces `function` for its mesh, under the call's own name, with every input and output sharding given.

    Args:
      batch: shapes and types of the keys that the call reads.
      carried: keys without a batch axis; they are replicated.
    """
    start = time.perf_counter()
    table = weights(config.arch, config.head)
    weight_shardings = shardings.weight_shardings(table, placement, mesh)

    def sharding_of(key: str, tree):
        return jax.tree.map(lambda _: shardings.replicated(mesh) if key in carried else shardings.rows(mesh), tree)

    def with_sharding(tree, sharding):
        return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), tree, sharding)

    reads = {key: batch[key] for key in call.reads}
    batch_shardings = {key: sharding_of(key, tree) for key, tree in reads.items()}
    stored = jnp.float32 if call.kind == "train" else config.compute_type
    params = with_sharding(abstract_params(table, stored), weight_shardings)
    inputs, donated, state_shardings = [params, with_sharding(reads, batch_shardings)], (), None
    if call.kind == "train":
        state = jax.eval_shape(optimizer.init, params)
        state_shardings = shardings.optimizer_shardings(state, weight_shardings, mesh)
        inputs.insert(1, with_sharding(state, state_shardings))
        donated = (0, 1)
    shapes = jax.eval_shape(function, *inputs)
    written = shapes[2] if call.kind == "train" else shapes
    out = {key: sharding_of(key, tree) for key, tree in written.items()}
    if call.kind == "train":
        out = (weight_shardings, state_shardings, out, jax.tree.map(lambda _: shardings.replicated(mesh), shapes[3]))

    def named_function(*args):
        return function(*args)

    named_function.__name__ = named_function.__qualname__ = call.name

    def results(*_):
        return jax.tree.map(meshes.elsewhere, shapes, out)

    lowered = None
    if meshes.here(mesh):
        lowered = jax.jit(named_function, donate_argnums=donated, out_shardings=out).lower(*inputs)
    fields = {
        "call": call,
        "placement": placement,
        "mesh": mesh,
        "config": config,
        "weights": weight_shardings,
        "stored_type": stored,
        "batch": batch_shardings,
        "written": written,
        "optimizer": optimizer,
        "optimizer_state_shardings": state_shardings,
    }
    return LoweredCall(lowered, results, fields, time.perf_counter() - start)
