"""17 more columns of padding change no log-probability, value, advantage, loss or metric."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from real_jax.algorithms import ppo, sft, value_norm
from real_jax.models.heads import next_token_log_probs
from real_jax.models.transformer import Transformer, initialize
from real_jax.spec.arch import weights
from real_jax.spec.experiment import GenerationConfig, PPOConfig

MORE = 17


def record(prompt):
    config = PPOConfig(minibatches=2, kl_adaptive=True, kl_coef=0.3)
    generation = GenerationConfig(response_length=support.RESPONSE, temperature=0.8, top_p=0.95)
    engine = support.make_engine(support.make_build(config, generation, prompt=prompt), support.PLANS["one device"])
    made = support.run(engine, iterations=2, prompt=prompt)
    engine.close()
    return made


@pytest.fixture(scope="module")
def narrow_and_wide():
    return record(support.PROMPT), record(support.PROMPT + MORE)


def test_compiled_calls_give_the_same_rollouts(narrow_and_wide):
    """Row b of both is prompt, response, padding; only the padding is longer."""
    width = support.PROMPT + support.RESPONSE
    for narrow, wide in zip(*(r.batches for r in narrow_and_wide), strict=True):
        assert wide["tokens"].shape[1] == width + MORE
        np.testing.assert_array_equal(wide["tokens"][:, :width], narrow["tokens"])
        assert (wide["tokens"][:, width:] == support.PAD).all()
        np.testing.assert_array_equal(wide["lengths"], narrow["lengths"])
        np.testing.assert_array_equal(wide["ended"], narrow["ended"])
        assert narrow["ended"].any() and not narrow["ended"].all()  # both kinds are there


def test_compiled_calls_give_the_same_log_probs_values_and_scores(narrow_and_wide):
    width = support.PROMPT + support.RESPONSE
    for narrow, wide in zip(*(r.batches for r in narrow_and_wide), strict=True):
        valid = np.arange(width)[None] < narrow["lengths"][:, None]
        for key, mask in [("values", valid), ("log_probs", valid[:, 1:]), ("reference_log_probs", valid[:, 1:])]:
            cut = wide[key][:, : mask.shape[1]]
            np.testing.assert_allclose(cut[mask], narrow[key][mask], rtol=1e-4, atol=1e-5, err_msg=key)
        np.testing.assert_allclose(wide["scores"], narrow["scores"], rtol=1e-4, atol=1e-5)


def test_compiled_train_calls_give_the_same_losses_and_metrics(narrow_and_wide):
    """The second iteration also shows that the updated weights are the same."""
    for narrow, wide in zip(*(r.metrics for r in narrow_and_wide), strict=True):
        assert narrow.keys() == wide.keys() == {"actor_train", "critic_train"}
        for call, metrics in narrow.items():
            assert metrics.keys() == wide[call].keys()
            for name, value in metrics.items():
                np.testing.assert_allclose(wide[call][name], value, rtol=2e-3, atol=1e-5, err_msg=f"{call}/{name}")
    for narrow, wide in zip(*(r.losses for r in narrow_and_wide), strict=True):
        np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-6)


def experience_batch(more=0, poison=0.0):
    """4 rollouts of up to 8 columns, `more` columns behind them; every masked number is `poison`."""
    random = np.random.default_rng(3)
    lengths, prompts = np.asarray([8, 5, 6, 3]), np.asarray([3, 2, 4, 1])
    tokens = random.integers(3, support.ARCH.vocab, (4, 8))
    numbers = {k: random.normal(size=(4, 8)) for k in ("log_probs", "reference_log_probs", "values")}
    width = 8 + more
    column = np.arange(width)[None]
    valid = column < lengths[:, None]
    action = ((column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1))[:, :-1]

    def widened(x, mask, fill):
        return np.where(mask, np.pad(x, ((0, 0), (0, width - x.shape[1])))[:, : mask.shape[1]], fill)

    state = value_norm.update(value_norm.initial(), jnp.ones((1, 2)) * 2, jnp.ones((1, 2), bool), "average", 0.0)
    return {
        "tokens": widened(tokens, valid, support.PAD).astype(np.int32),
        "prompt_lengths": prompts.astype(np.int32), "lengths": lengths.astype(np.int32),
        "ended": np.asarray([False, True, True, False]),
        "log_probs": widened(numbers["log_probs"], action, poison).astype(np.float32),
        "reference_log_probs": widened(numbers["reference_log_probs"], action, -poison).astype(np.float32),
        "scores": np.asarray([1, -2, 0.5, 3], np.float32),
        "values": widened(numbers["values"], valid, poison).astype(np.float32),
        "kl_coef": np.float32(0.2), "value_norm": state,
    }  # fmt: skip


@pytest.mark.parametrize("needs_end", [False, True])
@pytest.mark.parametrize("poison", [1e6, np.nan])
def test_advantages_and_returns_do_not_see_padding(needs_end, poison):
    config = PPOConfig(score_needs_end=needs_end, gae_lambda=0.9, gamma=0.99)
    run = jax.jit(lambda batch: ppo.experience(batch, config))
    narrow, wide = run(experience_batch()), run(experience_batch(MORE, poison))
    for name in ("mask", "advantages", "returns"):
        np.testing.assert_allclose(np.asarray(wide[name])[:, :7], np.asarray(narrow[name]), rtol=1e-5, atol=1e-6)
        assert not np.asarray(wide[name])[:, 7:].any()
    np.testing.assert_allclose(np.asarray(wide["kl"]), np.asarray(narrow["kl"]), rtol=1e-5)


def lookup(head, theta):
    """A model that is a table of numbers by token: its gradient is by token too, and cheap to compile."""

    def forward(tokens):
        values = jnp.take(theta, tokens, axis=0)
        return (values[:, 1:], values[:, 1:] ** 2) if head == "lm" else values

    return forward


def close(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6), found, wanted
    )


THETA = jnp.asarray(np.random.default_rng(5).normal(size=support.ARCH.vocab) * 0.3 - 1, jnp.float32)


@pytest.mark.parametrize(("call", "head"), [("actor_train", "lm"), ("critic_train", "scalar")])
def test_losses_gradients_and_statistics_do_not_see_padding(call, head):
    functions = ppo.algorithm(PPOConfig(kl_adaptive=True, value_norm="average")).train[call]

    def run(theta, batch):
        rows, written, metrics = functions.prepare(batch)

        def loss(theta):
            return functions.loss(lookup(head, theta), rows, functions.weight(rows))

        return written, metrics, *jax.value_and_grad(loss, has_aux=True)(theta)

    program = jax.jit(run)
    narrow = program(THETA, experience_batch())
    for poison in (1e6, np.nan):
        close(program(THETA, experience_batch(MORE, poison)), narrow)


def test_supervised_loss_does_not_see_padding():
    functions = sft.algorithm().train["sft_train"]

    def run(theta, batch):
        rows, _, _ = functions.prepare(batch)
        return jax.value_and_grad(lambda t: functions.loss(lookup("lm", t), rows, functions.weight(rows))[0])(theta)

    keys = ("tokens", "prompt_lengths", "lengths")
    program = jax.jit(run)
    narrow, wide = (program(THETA, {k: experience_batch(more)[k] for k in keys}) for more in (0, MORE))
    close(wide, narrow)


def test_other_tokens_in_the_padding_change_nothing():
    """Padding is not special to the model: any tokens behind a row's end leave what stands before them as it was."""
    models = {head: initialize(weights(support.ARCH, head), jax.random.key(1)) for head in ("lm", "scalar")}
    batch = experience_batch(MORE)
    noise = np.random.default_rng(9).integers(0, support.ARCH.vocab, batch["tokens"].shape)
    valid = np.arange(8 + MORE)[None] < batch["lengths"][:, None]
    dirty = np.where(valid, batch["tokens"], noise).astype(np.int32)
    log_probs = jax.jit(lambda p, t: next_token_log_probs(Transformer(support.ARCH, "lm", p), t, 0.8)[0])

    def values(params, tokens):
        model = Transformer(support.ARCH, "scalar", params)
        return model.values(model(tokens))

    values = jax.jit(values)
    one, two = (np.asarray(log_probs(models["lm"], t)) for t in (batch["tokens"], dirty))
    np.testing.assert_array_equal(one[valid[:, 1:]], two[valid[:, 1:]])
    one, two = (np.asarray(values(models["scalar"], t)) for t in (batch["tokens"], dirty))
    np.testing.assert_array_equal(one[valid], two[valid])
