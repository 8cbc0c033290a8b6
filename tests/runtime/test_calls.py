"""The train call against plain gradients, however its batch is divided; minibatches that are skipped; programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from real_jax.algorithms import ppo, sft, value_norm
from real_jax.models.heads import next_token_log_probs
from real_jax.models.transformer import Transformer, initialize
from real_jax.runtime.calls import (
    ModelProgramConfig,
    in_micro_batches,
    inference_function,
    lower_call,
    split,
    train_function,
)
from real_jax.runtime.meshes import make_mesh
from real_jax.runtime.optimizer import make_optimizer
from real_jax.runtime.shardings import optimizer_shardings, replicated, weight_shardings
from real_jax.spec.arch import Arch, weights
from real_jax.spec.dataflow import Call
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import OptimizerConfig, PPOConfig
from real_jax.spec.plan import Placement

ARCH = Arch(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=24, vocab=12, context=32)
CONFIG = ModelProgramConfig(ARCH, "lm")
BATCH, LENGTH = 16, 6
SFT = sft.GRAPH.calls[0]


@functools.cache
def params():
    return jax.device_get(initialize(weights(ARCH), jax.random.key(4)))


@functools.cache
def sft_batch():
    """Answers of 1 to 5 tokens; rows 4 to 7, a whole micro-batch or shard, have none."""
    random = np.random.default_rng(0)
    prompts = np.ones(BATCH, np.int32)
    lengths = random.integers(2, LENGTH + 1, BATCH).astype(np.int32)
    lengths[4:8] = 1
    tokens = random.integers(0, ARCH.vocab, (BATCH, LENGTH)).astype(np.int32)
    return {"tokens": tokens, "prompt_lengths": prompts, "lengths": lengths}


@functools.cache
def plain_gradient():
    """(params, tokens, mask) -> mean over the masked tokens and its gradient, written down again."""

    def loss(params, tokens, mask):
        log_probs, _ = next_token_log_probs(Transformer(ARCH, "lm", params), tokens, 1.0)
        return -jnp.sum(log_probs * mask) / jnp.sum(mask)

    return jax.jit(jax.value_and_grad(loss))


def plain(params, rows):
    mask = np.zeros((BATCH, LENGTH - 1), np.float32)
    batch = sft_batch()
    for b, (prompt, length) in enumerate(zip(batch["prompt_lengths"], batch["lengths"], strict=True)):
        mask[b, prompt - 1 : length - 1] = 1
    return jax.device_get(plain_gradient()(params, batch["tokens"][rows], mask[rows]))


def train(placement, minibatches=1):
    """(new params, written, metrics) of one SFT call with plain gradient descent at rate 1: it moves by the gradient."""
    mesh, optimizer = make_mesh(placement), optax.sgd(1.0)
    function = train_function(CONFIG, sft.algorithm().train["sft_train"], optimizer, minibatches, placement, mesh)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in sft_batch().items()}
    program = lower_call(SFT, placement, mesh, CONFIG, function, abstract, (), optimizer).compile()
    own = jax.device_put(params(), program.weights)
    state = program.initial_optimizer_state(own)
    moved, _, written, metrics = program.executable(own, state, jax.device_put(sft_batch(), program.batch))
    for name, x in moved.items():
        assert x.sharding.is_equivalent_to(program.weights[name], x.ndim)
    return jax.device_get((moved, written, metrics))


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(micro_batches=4),  # the second one fully masked
        Placement(data=4),  # the second shard fully masked
        Placement(0, data=2, fsdp=2, tensor=2, micro_batches=2, remat=True),
    ],
    ids=["whole", "micro-batches", "data", "all of it"],
)
def test_gradients_do_not_depend_on_how_the_batch_is_divided(placement):
    loss, grads = plain(params(), slice(None))
    moved, written, metrics = train(placement)
    assert written == {}
    np.testing.assert_allclose(metrics["loss"], [loss], rtol=1e-5)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], [norm], rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(params()[name] - moved[name], grad, rtol=1e-3, atol=2e-6, err_msg=name)


def test_minibatches_are_contiguous_steps():
    """Rows 0 to 7, then rows 8 to 15 from where the first step led, each normalized by its own tokens."""
    first, step = plain(params(), slice(8))
    middle = {k: v - step[k] for k, v in params().items()}
    second, step = plain(middle, slice(8, 16))
    moved, _, metrics = train(Placement(micro_batches=2), minibatches=2)
    np.testing.assert_allclose(metrics["loss"], [first, second], rtol=1e-4)
    for name, value in middle.items():
        np.testing.assert_allclose(moved[name], value - step[name], rtol=1e-3, atol=1e-5, err_msg=name)


PPO = PPOConfig(minibatches=2, normalize_advantages=False)


@functools.cache
def ppo_step():
    placement = Placement()
    functions = ppo.algorithm(PPO).train["actor_train"]
    optimizer = make_optimizer(OptimizerConfig(lr=1e-3))
    step = jax.jit(train_function(CONFIG, functions, optimizer, 2, placement, make_mesh(placement)))
    return step, optimizer.init(params())


@functools.cache
def log_probs():
    run = jax.jit(lambda p, t: next_token_log_probs(Transformer(ARCH, "lm", p), t, 1.0)[0])
    return np.asarray(run(params(), sft_batch()["tokens"]))


def actor_step(first, second, second_scores=1.0):
    """One actor_train of two minibatches whose importance ratios start at `first` and `second`."""
    lengths = np.full(BATCH, LENGTH, np.int32)
    ratio = np.repeat([first, second], BATCH // 2)[:, None]
    scores = np.where(np.arange(BATCH) < BATCH // 2, 1.0, second_scores) * (-1) ** np.arange(BATCH)
    batch = sft_batch() | {
        "lengths": lengths,
        "ended": np.ones(BATCH, bool),
        "log_probs": (log_probs() - np.log(ratio)).astype(np.float32),
        "reference_log_probs": log_probs(),
        "scores": scores.astype(np.float32),
        "values": np.zeros((BATCH, LENGTH), np.float32),
        "kl_coef": np.float32(0),
        "value_norm": value_norm.initial(),
    }
    step, state = ppo_step()
    return jax.device_get(step(params(), state, batch))


def count_of(state):
    return {int(x) for x in jax.tree.leaves(state) if x.ndim == 0}


def test_the_importance_ratio_is_one_at_the_first_step_and_both_minibatches_count():
    moved, state, _, metrics = actor_step(1, 1)
    assert metrics["accepted"].tolist() == [1, 1]
    np.testing.assert_allclose(metrics["importance_ratio"][0], 1, atol=1e-5)
    assert count_of(state) == {2}
    assert any((moved[k] != params()[k]).any() for k in moved)


def test_a_minibatch_past_the_ratio_leaves_weights_and_optimizer_as_they_were():
    """Ratio 6 against a limit of 5; 4.5 is taken."""
    moved, state, _, metrics = actor_step(6, 6)
    assert metrics["accepted"].tolist() == [0, 0]
    np.testing.assert_allclose(metrics["importance_ratio"], [6, 6], rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, moved, params())
    jax.tree.map(np.testing.assert_array_equal, state, jax.device_get(ppo_step()[1]))
    assert count_of(state) == {0}
    assert actor_step(4.5, 4.5)[3]["accepted"].tolist() == [1, 1]


def test_a_skipped_minibatch_has_no_part_in_the_result():
    """The first step is taken; the second is skipped, whatever its ratio and scores are, infinite ones included."""
    moved, state, _, metrics = actor_step(1, 6)
    assert metrics["accepted"].tolist() == [1, 0]
    assert count_of(state) == {1}
    for ratio, scores in ((9, -20.0), (1e30, 1.0), (np.inf, 1.0), (np.nan, 3.0)):
        other, other_state, _, metrics = actor_step(1, ratio, scores)
        assert metrics["accepted"].tolist() == [1, 0]
        jax.tree.map(np.testing.assert_array_equal, (other, other_state), (moved, state))
    # The other way round the second minibatch still has its turn.
    other, other_state, _, metrics = actor_step(6, 1)
    assert metrics["accepted"].tolist() == [0, 1]
    assert count_of(other_state) == {1}


def test_split_is_contiguous_and_micro_batches_keep_the_order():
    mesh = make_mesh(Placement(data=2))
    x = np.arange(24, dtype=np.int32).reshape(12, 2)
    parts = jax.jit(lambda x: split({"x": x}, (3, 2), mesh)["x"])(x)
    np.testing.assert_array_equal(np.asarray(parts), x.reshape(3, 2, 2, 2))
    seen = []

    def function(rows):
        seen.append(rows["x"].shape)
        return {"sum": jnp.sum(rows["x"], axis=1), "pair": rows["x"] * 2}

    for count in (1, 3, 6):
        out = jax.jit(in_micro_batches(function, count, mesh))({"x": x})
        np.testing.assert_array_equal(np.asarray(out["sum"]), x.sum(axis=1))
        np.testing.assert_array_equal(np.asarray(out["pair"]), x * 2)
    assert seen[0] == (12, 2) and (4, 2) in seen and seen[-1] == (2, 2)


@pytest.fixture(scope="module")
def reference_program():
    placement, call = Placement(4, data=2, fsdp=2), ppo.graph().call("reference_inference")
    config = ModelProgramConfig(ARCH, "lm", jnp.bfloat16, temperature=0.5)
    mesh = make_mesh(placement)
    function = inference_function(config, ppo.algorithm(PPO).inference[call.name], placement, mesh)
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    return lower_call(call, placement, mesh, config, function, batch, ()).compile()


def test_a_program_bears_its_calls_name(reference_program):
    assert "reference_inference" in reference_program.executable.as_text().splitlines()[0]
    assert reference_program.work_bytes > 0


def test_a_program_says_what_it_takes_and_gives(reference_program):
    program = reference_program
    assert program.stored_type == jnp.bfloat16
    assert program.written["reference_log_probs"].shape == (BATCH, LENGTH - 1)
    assert program.written["reference_log_probs"].dtype == jnp.float32
    assert [d.id for d in program.mesh.devices.flat] == [4, 5, 6, 7]
    cast = {k: v.astype(jnp.bfloat16) for k, v in params().items()}
    tokens = sft_batch()["tokens"]
    written = program.executable(
        jax.device_put(cast, program.weights), jax.device_put({"tokens": tokens}, program.batch)
    )
    run = jax.jit(lambda p, t: next_token_log_probs(Transformer(ARCH, "lm", p), t, 0.5)[0])
    np.testing.assert_allclose(
        np.asarray(written["reference_log_probs"]), np.asarray(run(params(), tokens)), rtol=0, atol=0.3
    )
    assert {d.id for d in written["reference_log_probs"].sharding.device_set} == {4, 5, 6, 7}


def test_train_weights_are_float32_masters_and_are_donated():
    placement = Placement(fsdp=2)
    mesh, optimizer = make_mesh(placement), make_optimizer(OptimizerConfig(lr=6e-4))
    config = ModelProgramConfig(ARCH, "lm", jnp.bfloat16)
    function = train_function(config, sft.algorithm().train["sft_train"], optimizer, 1, placement, mesh)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in sft_batch().items()}
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention multiplies float32 by bfloat16 on its way back
        program = lower_call(SFT, placement, mesh, config, function, abstract, (), optimizer).compile()
    assert program.stored_type == jnp.float32
    shapes, state_shapes = program.abstract_state()
    own = jax.device_put(initialize(weights(ARCH), jax.random.key(4)), program.weights)
    state = program.initial_optimizer_state(own)
    for tree, wanted in ((own, shapes), (state, state_shapes)):
        jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim) or pytest.fail(str(s)), tree, wanted)
        jax.tree.map(lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype) or pytest.fail(str(s)), tree, wanted)
    first = np.asarray(jnp.copy(own["norm"]))
    moved, moved_state, _, _ = program.executable(own, state, jax.device_put(sft_batch(), program.batch))
    assert all(x.is_deleted() for x in jax.tree.leaves((own, state)) if x.ndim)
    assert {x.dtype.name for x in moved.values()} == {"float32"}
    change = np.abs(np.asarray(moved["norm"]) - first)
    assert (change > 0).all() and (change < 7e-4).all()  # a step that bfloat16 weights of 1.0 would have lost
    assert count_of(jax.device_get(moved_state)) == {1}


def test_optimizer_state_is_split_like_its_weight():
    placement = Placement(fsdp=2, tensor=2)
    mesh = make_mesh(placement)
    split_weights = weight_shardings(weights(ARCH), placement, mesh)
    state = jax.eval_shape(make_optimizer(OptimizerConfig(warmup_steps=3)).init, params())
    found = jax.tree_util.tree_leaves_with_path(optimizer_shardings(state, split_weights, mesh))
    split_like = [sharding == split_weights[path[-1].key] for path, sharding in found if hasattr(path[-1], "key")]
    assert split_like == [True] * (2 * len(split_weights))  # first and second moments
    assert {sharding for path, sharding in found if not hasattr(path[-1], "key")} == {replicated(mesh)}


def test_a_mesh_beyond_the_devices_is_refused():
    mesh = make_mesh(Placement(2, data=2, tensor=3))
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert [[d.id for d in row] for row in mesh.devices[:, 0]] == [[2, 3, 4], [5, 6, 7]]  # tensor groups are neighbours
    with pytest.raises(UsageError, match="asks for devices 4 to 11, but there are 8"):
        make_mesh(Placement(4, data=8))


def test_calls_of_other_kinds_donate_nothing(reference_program):
    cast = {k: v.astype(jnp.bfloat16) for k, v in params().items()}
    own = jax.device_put(cast, reference_program.weights)
    batch = jax.device_put({"tokens": sft_batch()["tokens"]}, reference_program.batch)
    reference_program.executable(own, batch)
    assert not any(x.is_deleted() for x in (*own.values(), *batch.values()))
    assert isinstance(reference_program.call, Call)
