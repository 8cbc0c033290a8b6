"""PPO's functions on a batch of two responses worked out by hand, and every option of PPOConfig."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.algorithms import kl, ppo, value_norm
from real_jax.algorithms.advantages import action_mask, gae, whiten
from real_jax.algorithms.losses import policy_loss
from real_jax.spec.experiment import PPOConfig

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jitted"])
X = 77.0  # what a masked entry happens to hold

CONFIG = PPOConfig(
    minibatches=1, reward_bias=1.0, reward_scale=2.0, reward_clip=3.0, normalize_advantages=False,
    value_norm_beta=0.9, kl_target=2.0, kl_horizon=4.0,
)  # fmt: skip


def f32(x):
    return jnp.asarray(x, jnp.float32)


def rows(*values):
    return jnp.asarray(values, jnp.int32)


def close(actual, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=tolerance, atol=tolerance)


def replace(**options):
    return dataclasses.replace(CONFIG, **options)


def batch(x=X):
    """T = 5. Row 0: prompt 1, response of 3 (actions 0 to 2), ended. Row 1: prompt 2, response of 3 (actions 1 to 3), cut.

    Log-ratios to the reference .2 -.4 9 and 1 0 2. Values in the critic's scale; returns have mean 1, deviation 2, so
    they stand for 1 2 0 and 1 3 -1, and 3 at row 1's last token.
    """
    reference = np.full((2, 4), -2.0)
    log_ratio = np.asarray([[0.2, -0.4, 9, 0], [0, 1, 0, 2]])
    mask = np.asarray([[1, 1, 1, 0], [0, 1, 1, 1]], bool)
    return {
        "tokens": jnp.asarray([[3, 4, 5, 2, 0], [6, 7, 8, 9, 10]], jnp.int32),
        "prompt_lengths": rows(1, 2),
        "lengths": rows(4, 5),
        "ended": jnp.asarray([True, False]),
        "log_probs": f32(np.where(mask, reference + log_ratio, x)),
        "reference_log_probs": f32(np.where(mask, reference, -x)),
        "scores": f32([3, 2]),
        "values": f32([[0, 0.5, -0.5, x, x], [x, 0, 1, -1, 1]]),
        "kl_coef": f32(0.5),
        "value_norm": value_norm.ValueNorm(f32(1), f32(5), f32(1)),
    }


def test_defaults_are_those_of_real():
    c = PPOConfig()
    assert (c.minibatches, c.kl_coef, c.kl_adaptive, c.gamma, c.gae_lambda) == (4, 0.1, False, 1.0, 1.0)
    assert (c.ratio_clip, c.value_clip, c.reward_clip, c.max_ratio) == (0.2, 0.2, 20.0, 5.0)
    assert (c.reward_bias, c.reward_scale, c.score_needs_end, c.normalize_advantages) == (0.0, 1.0, False, True)
    assert (c.value_norm, c.value_norm_beta) == ("exponential", 0.99995)


@EAGER_AND_JITTED
def test_shaped_scores(mode):
    """(raw - 1) x 2 within 3: raw 3 -> 4 -> 3, 2 -> 2, 0 -> -2, -9 -> -20 -> -3."""
    close(mode(lambda x: ppo.shaped_scores(x, CONFIG))(f32([3, 2, 0, -9])), [3, 2, -2, -3])


@EAGER_AND_JITTED
@pytest.mark.parametrize("x", [0.0, 1e6, np.nan])
def test_experience(mode, x):
    """Scores become 3 (clipped) and 2. Rewards: row 0: -.1, .2, 3 (no penalty at the end token); row 1: -.5, 0, -1 + 2.
    Returns: 3.1 3.2 3 and .5 1 1; minus the values 1 2 0 and 1 3 -1."""
    made = mode(lambda b: ppo.experience(b, CONFIG))(batch(x))
    close(made["returns"], [[3.1, 3.2, 3, 0], [0, 0.5, 1, 1]])
    close(made["advantages"], [[2.1, 1.2, 3, 0], [0, -0.5, -2, 2]])
    close(made["kl"], [8.8, 3])


def test_a_cut_response_without_a_score_is_no_terminal_state():
    """score_needs_end: row 1 gets no score, and the value 3 of its last token stands in for the future: returns 1.5 2 2.
    Row 0, the same with its end token, keeps a future of 0."""
    made = ppo.experience(batch(), replace(score_needs_end=True))
    close(made["returns"], [[3.1, 3.2, 3, 0], [0, 1.5, 2, 2]])
    close(made["advantages"], [[2.1, 1.2, 3, 0], [0, 0.5, -1, 3]])
    ended = ppo.experience(batch() | {"ended": jnp.asarray([True, True])}, replace(score_needs_end=True))
    close(ended["returns"][1], [0, 1.5, 2, 2])  # -.5 and then the score 2 without a penalty


def test_discount_and_lambda():
    """gamma 1/2: row 0 returns 3, .2 + 1.5, -.1 + .85. lambda 0: one-step errors -.1 + 2 - 1, .2 + 0 - 2, 3 - 0."""
    close(ppo.experience(batch(), replace(gamma=0.5))["returns"][0], [0.75, 1.7, 3, 0])
    close(ppo.experience(batch(), replace(gae_lambda=0.0))["advantages"][0], [0.9, -1.8, 3, 0])


def test_whitening_is_over_the_valid_tokens_of_the_whole_batch():
    raw = np.asarray([2.1, 1.2, 3, -0.5, -2, 2])
    made = ppo.experience(batch(), replace(normalize_advantages=True))
    white = (raw - raw.mean()) / raw.std()
    close(np.asarray(made["advantages"])[np.asarray(made["mask"])], white)
    close(made["returns"], [[3.1, 3.2, 3, 0], [0, 0.5, 1, 1]])  # returns are not whitened


def functions(call, config=CONFIG):
    return ppo.algorithm(config).train[call]


@EAGER_AND_JITTED
def test_actor_prepare(mode):
    """KL (8.8 + 3) / 2 = 5.9; adaptive with target 2: error clipped to .2, times 2 sequences / horizon 4: .5 x 1.1."""
    prepared, written, metrics = mode(functions("actor_train").prepare)(batch())
    close(written["kl_coef"], 0.5)
    wanted = {"reward": 2.5, "kl": 5.9, "kl_coef": 0.5, "response_length": 3, "truncated": 0.5}
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        close(metrics[name], value)
    np.testing.assert_array_equal(prepared["mask"], [[True, True, True, False], [False, True, True, True]])
    _, written, _ = mode(functions("actor_train", replace(kl_adaptive=True)).prepare)(batch())
    close(written["kl_coef"], 0.55)


def test_actor_loss():
    """The log-probabilities of the first action double (ratio 2, clipped to 1.2 at advantage 2.1), the others stay:
    -(1.2 x 2.1 + 1.2 + 3 - .5 - 2 + 2) / 6."""
    f = functions("actor_train")
    prepared, _, _ = f.prepare(batch())
    normalizer = f.weight(prepared)
    close(normalizer, 6)
    moved = batch()["log_probs"].at[0, 0].add(float(np.log(2)))
    entropies = jnp.where(prepared["mask"], f32([[1, 2, 3, X], [X, 4, 5, 6]]), X)
    loss, metrics = f.loss(lambda tokens: (moved, entropies), prepared, normalizer)
    close(loss, -(2.52 + 1.2 + 3 - 0.5 - 2 + 2) / 6)
    close(metrics["importance_ratio"], 7 / 6)
    close(metrics["clip_fraction"], 1 / 6)
    close(metrics["entropy"], 21 / 6)
    wide, _ = functions("actor_train", replace(ratio_clip=1.5)).loss(
        lambda tokens: (moved, entropies), prepared, normalizer
    )
    close(wide, -(4.2 + 1.2 + 3 - 0.5 - 2 + 2) / 6)


@pytest.mark.parametrize(
    ("ratio", "accepted"), [(1.0, True), (5.0, True), (5.01, False), (np.nan, False), (np.inf, False)]
)
def test_a_minibatch_whose_ratio_passes_the_limit_is_refused(ratio, accepted):
    assert bool(functions("actor_train").accept({"importance_ratio": f32(ratio)})) is accepted
    assert bool(functions("critic_train").accept({})) is True


def test_critic_prepare():
    """Returns 3.1 3.2 3 .5 1 1: mean 11.8 / 6, mean square (9.61 + 10.24 + 9 + .25 + 1 + 1) / 6 = 31.1 / 6.
    beta .9: mean .9 + .1966667 = 1.0966667, mean square 4.5 + .5183333, variance 3.8156556, deviation 1.9533704."""
    prepared, written, metrics = functions("critic_train").prepare(batch())
    close([*written["value_norm"]], [1.0966667, 5.0183333, 1])
    close(metrics["return"], 11.8 / 6)
    wanted = (np.asarray([3.1, 3.2, 3, 0.5, 1, 1]) - 1.0966667) / 1.9533704
    close(np.asarray(prepared["returns"])[np.asarray(prepared["mask"])], wanted)
    prepared, written, _ = functions("critic_train", replace(value_norm="average")).prepare(batch())
    close([*written["value_norm"]], [1 + 11.8 / 6, 5 + 31.1 / 6, 2])
    plain = batch() | {"value_norm": value_norm.initial()}
    prepared, written, _ = functions("critic_train", replace(value_norm="none")).prepare(plain)
    close([*written["value_norm"]], [0, 0, 0])
    close(prepared["returns"], [[3.1, 3.2, 3, 0], [0, 0.5, 1, 1]])


@pytest.mark.parametrize("kind", ["exponential", "average", "none"])
def test_the_value_clip_is_open_at_the_first_step(kind):
    """Before any update the critic gives the old values: nothing is clipped and every token has its gradient, however far
    the scale of returns has moved (here from the start's 0 and 1 to a mean of about 2)."""
    f = functions("critic_train", replace(value_norm=kind))
    first = batch() | {"value_norm": value_norm.initial()}
    prepared, _, _ = f.prepare(first)

    def loss(values):
        return f.loss(lambda tokens: values, prepared, f.weight(prepared))

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(first["values"])
    mask, old = np.asarray(prepared["mask"]), np.asarray(first["values"])[:, :-1]
    error = np.where(mask, old - np.asarray(prepared["returns"]), 0)
    close(value, (error**2).sum() / 2 / 6)
    assert float(metrics["value_clip_fraction"]) == 0
    close(grads[:, :-1], error / 6)
    assert not np.asarray(grads)[:, -1].any()
    # One value moved onto its return, more than 0.2 away, counts as clipped and has no gradient.
    moved = first["values"].at[0, 0].set(prepared["returns"][0, 0])
    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(moved)
    close(metrics["value_clip_fraction"], 1 / 6)
    assert float(grads[0, 0]) == 0


def many_rows():
    """8 responses, row 5 fully masked, with a policy that has moved away."""
    random = np.random.default_rng(0)
    lengths = np.asarray([6, 3, 4, 2, 6, 1, 5, 6])
    made = {
        "tokens": random.integers(0, 9, (8, 6)).astype(np.int32),
        "prompt_lengths": np.asarray([1, 1, 2, 1, 3, 1, 2, 1], np.int32),
        "lengths": lengths.astype(np.int32),
        "ended": lengths % 2 == 1,
        "log_probs": -random.random((8, 5)).astype(np.float32),
        "reference_log_probs": -random.random((8, 5)).astype(np.float32),
        "scores": random.normal(size=8).astype(np.float32),
        "values": random.normal(size=(8, 6)).astype(np.float32),
    }
    carried = {"kl_coef": np.float32(0.1), "value_norm": value_norm.initial()}
    theta = f32(random.normal(size=9) * 0.3 - 1)
    return made, carried, theta


def train_loss(call, theta, rows, whole, config):
    f = functions(call, config)

    def forward(tokens):
        values = jnp.take(theta, tokens, axis=0)
        return (values[:, 1:], values[:, 1:] ** 2) if call == "actor_train" else values

    return f.loss(forward, rows, f.weight(whole))


@pytest.mark.parametrize("call", ["actor_train", "critic_train"])
def test_losses_and_metrics_do_not_depend_on_micro_batches(call):
    made, carried, theta = many_rows()
    config = PPOConfig(value_norm="average")
    prepared, _, _ = functions(call, config).prepare({k: jnp.asarray(v) for k, v in made.items()} | carried)
    grad = jax.jit(
        jax.value_and_grad(lambda theta, part, whole: train_loss(call, theta, part, whole, config), has_aux=True)
    )
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], prepared) for i in range(8)]
    found = [grad(theta, part, prepared) for part in parts]
    jax.tree.map(close, jax.tree.map(lambda *x: sum(x[1:], x[0]), *found), grad(theta, prepared, prepared))


@pytest.mark.parametrize("call", ["actor_train", "critic_train"])
def test_losses_and_statistics_do_not_depend_on_the_shards(call):
    """The batch on one device and over 8, of which one holds only masked entries."""
    made, carried, theta = many_rows()
    config = PPOConfig(value_norm="average", kl_adaptive=True)

    def run(batch, theta):
        prepared, written, metrics = functions(call, config).prepare(batch)
        return (
            written,
            metrics,
            jax.value_and_grad(lambda t: train_loss(call, t, prepared, prepared, config), has_aux=True)(theta),
        )

    results = []
    for count in (1, 8):
        mesh = Mesh(np.asarray(jax.devices()[:count]), ("data",))
        split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
        batch = jax.device_put(made, split) | jax.device_put(carried, whole)
        results.append(jax.device_get(jax.jit(run)(batch, jax.device_put(theta, whole))))
    jax.tree.map(close, *results)


def test_one_step_on_the_penalty_alone_lowers_the_kl():
    """mll-lab-nu/RAGEN#58. Policy (.75, .25), reference (.5, .5), four one-token responses in the policy's own proportions,
    scores 0: a step of plain gradient descent brings the policy closer to the reference."""
    theta = jnp.log(f32([0.75, 0.25]))
    drawn = rows(0, 0, 0, 1)
    old = jax.nn.log_softmax(theta)[drawn][:, None]
    reference = jnp.full((4, 1), np.float32(np.log(0.5)))
    prompts, lengths, ended = rows(1, 1, 1, 1), rows(2, 2, 2, 2), jnp.zeros(4, bool)
    rewards, measured = kl.token_rewards(
        jnp.zeros(4), old, reference, prompts, lengths, ended, f32(0.1), score_needs_end=False
    )

    def divergence(theta):
        p = jax.nn.softmax(theta)
        return float(jnp.sum(p * (jnp.log(p) - np.float32(np.log(0.5)))))

    close(jnp.mean(measured), divergence(theta))
    mask = action_mask(prompts, lengths, 1)
    advantages, _ = gae(rewards, jnp.zeros((4, 1)), jnp.zeros(4), mask, 1.0, 1.0)
    for weights in (advantages, whiten(advantages, mask)):
        grad = jax.jit(
            jax.grad(lambda t, a: policy_loss(jax.nn.log_softmax(t)[drawn][:, None], old, a, mask, f32(4), 0.2)[0])
        )(theta, weights)
        assert divergence(theta - 0.1 * grad) < divergence(theta) - 1e-4


def test_inference_functions():
    algorithm = ppo.algorithm(CONFIG)
    values = f32([[1, 2, 3, np.nan, np.nan], [4, 5, 6, 7, 8]])
    data = {"tokens": jnp.zeros((2, 5), jnp.int32), "lengths": rows(3, 5)}
    close(algorithm.inference["reward_inference"](lambda tokens: values, data)["scores"], [3, 8])
    close(algorithm.inference["critic_inference"](lambda tokens: values[:, :2], data)["values"], [[1, 2], [4, 5]])
    log_probs = algorithm.inference["reference_inference"](lambda tokens: (values[:, :2], None), data)
    close(log_probs["reference_log_probs"], [[1, 2], [4, 5]])
    assert algorithm.initial.keys() == {"kl_coef", "value_norm"}
    close(algorithm.initial["kl_coef"], 0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        algorithm.inference["reward_inference"](lambda tokens: values, data | {"lengths": rows(3)})


def test_a_reward_function_takes_the_reward_models_place():
    graph = ppo.algorithm(CONFIG, reward_function=True).graph
    assert graph.models == ("actor", "reference", "critic")
    assert graph.call("reward_function").kind == "host"
    assert {e.target for e in graph.edges if e.key == "scores"} == {"actor_train", "critic_train"}
