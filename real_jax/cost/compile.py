"""Layer programs, compiled ahead of time and never run: what a call executes on one device of its mesh.

A call is made of a few programs, run as often as its micro-batches and optimizer steps say: a forward pass, a gradient,
an optimizer step, a generation. Layers are scanned, so a program compiles as fast for eighty layers as for two, and the text of the
compiled program tells how often each part runs (`cost.hlo`). The number of rows is a prime that divides no other
dimension, so that one compile tells the cost of any number of rows. A mesh axis `data` gives each copy its own rows and
adds nothing but a sum of gradients (`cost.table`), so programs are compiled over `fsdp` x `tensor` alone. For which
chips they are compiled is `cost.targets`' business.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from real_jax.cost import hlo, targets
from real_jax.cost.summary import Summary
from real_jax.cost.targets import Target
from real_jax.models.cache import AXES, Cache, empty_cache
from real_jax.models.heads import CHUNK, next_token_log_probs
from real_jax.models.transformer import Transformer, abstract_params, cast
from real_jax.runtime.meshes import make_mesh, named
from real_jax.runtime.optimizer import make_optimizer
from real_jax.spec.arch import BATCH, LAYERS, LENGTH, Arch, Head, weights
from real_jax.spec.experiment import OptimizerConfig
from real_jax.spec.plan import Placement, partition

Kind = Literal["forward", "gradient", "generate", "optimizer"]

FORMAT = 3  # of stored pieces; raise it where this module or `hlo` counts differently
# On the CPU backend most of a compile goes into machine code, which nobody runs here; the program stays the same.
_CPU_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
_MARKERS = (13, 11, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)


@dataclasses.dataclass(frozen=True, order=True)
class Piece:
    """A layer program. Calls whose pieces are equal share one compile.

    Attributes:
      kind: "forward" (head included: log-probabilities or values), "gradient" of it by float32 weights, "generate":
        prefill of `length` tokens and `response` decode steps, or "optimizer": one step on float32 weights.
      head: "lm" or "scalar".
      fsdp, tensor: the mesh.
      length: tokens of a row; of a prompt where the kind is "generate".
      response: decode steps; 0 in the other kinds.
      compute_bytes: 4 for float32, 2 for bfloat16.
      remat: whether blocks are computed again in the backward pass.
    """

    kind: Kind
    arch: Arch
    head: Head
    fsdp: int
    tensor: int
    length: int
    response: int = 0
    compute_bytes: int = 4
    remat: bool = False

    @property
    def placement(self) -> Placement:
        return Placement(fsdp=self.fsdp, tensor=self.tensor)

    @property
    def dtype(self):
        return {4: jnp.float32, 2: jnp.bfloat16}[self.compute_bytes]

    def key(self, target: Target) -> str:
        """Content hash: equal for equal programs on equal devices under the same compiler."""
        content = [FORMAT, target.key, dataclasses.asdict(self)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a piece.

    Attributes:
      summary: what one device executes, as a function of its rows.
      temp_bytes: temporary bytes of one device at `rows` rows.
      fixed_bytes: about how many of them are there at any number of rows: copies of weights.
    """

    summary: Summary
    rows: int
    temp_bytes: int
    fixed_bytes: int

    def temp_at(self, rows: float) -> float:
        """Temporary bytes with `rows` rows per device."""
        fixed = min(self.fixed_bytes, self.temp_bytes)
        return fixed + (self.temp_bytes - fixed) * rows / self.rows


def marker_rows(piece: Piece) -> int:
    """Rows per device at which a piece is compiled: a prime that divides no other dimension of the program."""
    a = piece.arch
    sizes = [a.layers, a.d_model, a.heads, a.kv_heads, a.head_dim, a.d_ff, a.vocab, CHUNK, piece.fsdp, piece.tensor]
    sizes += [piece.length, piece.length - 1, piece.length + piece.response, piece.length + piece.response - 1]
    sizes += [-(-piece.length // CHUNK), -(-(piece.length - 1) // CHUNK), piece.response]
    return next(p for p in _MARKERS if all(size % p or size == 0 for size in sizes))


def program(piece: Piece, placement: Placement, rows: int, among: Sequence | None = None, attention: str = "xla"):
    """`piece` as a jitted function over the mesh of `placement`, and the shapes and shardings of its inputs.

    Args:
      rows: per device.
      among: the devices to choose from; None: those of this process.
      attention: "cudnn" for fused attention (bfloat16 alone), or "xla".
    """
    mesh = make_mesh(placement, among)
    table = weights(piece.arch, piece.head)
    stored = jnp.float32 if piece.kind in ("gradient", "optimizer") else piece.dtype

    def placed(shape: tuple[int, ...], axes: tuple[str, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, partition(axes, shape, placement)))

    params = {name: placed(s.shape, table[name].axes, s.dtype) for name, s in abstract_params(table, stored).items()}
    if piece.kind == "optimizer":
        return _optimizer(params)
    batch = rows * placement.batch_split
    inputs = [params, placed((batch, piece.length), (BATCH, LENGTH), jnp.int32)]
    model_of = _model_maker(piece, placement, mesh, attention if piece.dtype == jnp.bfloat16 else "xla")
    if piece.kind == "generate":
        inputs.append(placed((batch,), (BATCH,), jnp.uint32))
        return jax.jit(_generate(piece, model_of)), inputs
    forward = _forward(piece, model_of)
    if piece.kind == "forward":
        return jax.jit(forward), inputs
    return jax.jit(_gradient(forward), out_shardings={name: s.sharding for name, s in params.items()}), inputs


def compile_piece(piece: Piece, target: Target) -> Compiled:
    """Compiles `piece` for the first devices of `target`. Nothing is run.

    Raises UsageError where the mesh is larger than the target, or where the weights cannot be laid out.
    """
    rows, among = marker_rows(piece), targets.devices(target)
    function, inputs = program(piece, piece.placement, rows, among, target.attention)
    on_cpu = among[0].platform == "cpu"
    compiled = _compile(function.lower(*inputs), on_cpu)
    return Compiled(
        summary=hlo.summarize(compiled.as_text(), rows, scalars=not on_cpu),
        rows=rows,
        temp_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        fixed_bytes=_fixed_bytes(piece),
    )


def _compile(lowered: jax.stages.Lowered, on_cpu: bool) -> jax.stages.Compiled:
    if on_cpu:
        return lowered.compile(compiler_options=_CPU_OPTIONS)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError:
        # Where nothing can be timed the GPU compiler takes a tile by rule, and may find that it fits no odd size.
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _model_maker(piece: Piece, placement: Placement, mesh, attention: str) -> Callable[[Any], Transformer]:
    def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if placement.count == 1:
            return x
        return jax.lax.with_sharding_constraint(x, named(mesh, partition(axes, x.shape, placement)))

    def model_of(params) -> Transformer:
        return Transformer(
            piece.arch,
            piece.head,
            cast(params, piece.dtype),
            constrain=constrain,
            attention=attention,
            remat=piece.remat,
        )

    return model_of


def _forward(piece: Piece, model_of):
    def forward(params, tokens):
        model = model_of(params)
        if piece.head == "lm":
            return next_token_log_probs(model, tokens, 1.0)
        return model.values(model(tokens))

    return forward


def _gradient(forward):
    def loss(params, tokens):
        return sum((jnp.sum(x) for x in jax.tree.leaves(forward(params, tokens))), jnp.float32(0))

    return jax.grad(loss)


def _optimizer(params):
    """One step as `runtime.calls` takes it, and its inputs: parameters and state, both updated in place, and gradients."""
    optimizer = make_optimizer(OptimizerConfig())

    def step(params, state, grads):
        updates, new_state = optimizer.update(grads, state, params)
        accepted = jnp.isfinite(optax.tree.norm(grads))
        kept = [(optax.apply_updates(params, updates), params), (new_state, state)]
        return [jax.tree.map(lambda new, old: jnp.where(accepted, new, old), *pair) for pair in kept]

    return jax.jit(step, donate_argnums=(0, 1)), [params, jax.eval_shape(optimizer.init, params), params]


def _generate(piece: Piece, model_of):
    """As `rollout.generate` with every row running to the end, sampling at temperature one."""
    width, length = piece.length, piece.length + piece.response

    def generate(params, prompts, row_ids):
        model = model_of(params)
        batch = prompts.shape[0]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), row_ids)
        columns = jnp.arange(length, dtype=jnp.int32)[None]
        empty = empty_cache(piece.arch, batch, length, piece.dtype)
        hidden, cache = model.prefill(prompts, Cache(*(model.constrain(x, AXES) for x in empty)))
        tokens = jnp.zeros((batch, length), jnp.int32).at[:, :width].set(prompts)

        def step(number, state):
            hidden, cache, tokens, log_probs = state
            number = number.astype(jnp.int32)
            logits = model.logits(hidden)
            drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, number), logits)
            drawn = drawn.astype(jnp.int32)
            log_prob = jnp.take_along_axis(logits, drawn[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
            position = jnp.full((batch,), width, jnp.int32) + number
            tokens = jnp.where(columns == position[:, None], drawn[:, None], tokens)
            log_probs = jnp.where(columns == position[:, None], log_prob[:, None], log_probs)
            hidden, cache = model.decode(drawn, position, cache)
            return hidden, cache, tokens, log_probs

        start = (hidden[:, -1], cache, tokens, jnp.zeros((batch, length), jnp.float32))
        _, _, tokens, log_probs = jax.lax.fori_loop(0, piece.response, step, start)
        return tokens, log_probs

    return generate


def _fixed_bytes(piece: Piece) -> int:
    """Bytes of copies of weights at a program's peak.

    A layer's weights are sliced out of the stack and gathered over `fsdp`, and a gradient has sums of their size; about
    half of that is alive at the peak, as compiles at several numbers of rows show. A cast copy of all weights lives on.
    """
    whole = dataclasses.replace(piece.placement, fsdp=1)
    layer = rest = cast_numbers = 0
    for weight in weights(piece.arch, piece.head).values():
        gathered = weight.size // _parts(weight, whole)
        if LAYERS in weight.axes:
            layer += gathered // max(piece.arch.layers, 1)
        elif piece.fsdp > 1:
            rest += gathered
        cast_numbers += weight.size // _parts(weight, piece.placement)
    if piece.kind != "gradient":
        return (layer + rest) * piece.compute_bytes // 2
    copy = cast_numbers * piece.compute_bytes if piece.compute_bytes < 4 else 0
    return (layer + rest) * (piece.compute_bytes + 4) // 2 + copy


def _parts(weight, placement: Placement) -> int:
    spec = partition(weight.axes, weight.shape, placement)
    return math.prod(placement.mesh_shape[axis] for dim in spec for axis in dim)
