"""Losses worked out by hand, with their gradients; masked entries, micro-batches and shards change nothing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.algorithms.losses import cross_entropy, policy_loss, preference_loss, value_loss

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jitted"])
POISON = pytest.mark.parametrize("poison", [1e6, -1e6, np.nan, np.inf])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def close(actual, wanted, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=tolerance, atol=tolerance)


def policy(log_probs, old, advantages, mask, normalizer, clip=0.2):
    return policy_loss(log_probs, old, advantages, mask, normalizer, clip)


def value(values, old, returns, mask, normalizer, clip=0.2):
    return value_loss(values, old, returns, mask, normalizer, clip)


# Ratios 1.5 and 0.5 with advantages +1 and -1, clip 0.2: min(1.5, 1.2), min(-1.5, -1.2), min(.5, .8), min(-.5, -.8)
# = 1.2, -1.5, .5, -.8, whose sum is -.6.
LOG_RATIO = np.log([[1.5, 1.5], [0.5, 0.5]]).astype(np.float32)
ADVANTAGES = np.asarray([[1, -1], [1, -1]], np.float32)


@EAGER_AND_JITTED
def test_policy_loss(mode):
    old = f32([[-3, -2], [-1, -4]])
    loss, metrics = mode(policy)(old + LOG_RATIO, old, f32(ADVANTAGES), jnp.ones((2, 2), bool), f32(4))
    close(loss, 0.6 / 4)
    close(metrics["importance_ratio"], 1.0)  # (1.5 + 1.5 + .5 + .5) / 4
    close(metrics["clip_fraction"], 0.5)  # 1.2 < 1.5 and -.8 < -.5
    close(metrics["approx_kl"], -2 * math.log(0.75) / 4)  # sum of ratio - 1 - log ratio: 4 - 4 - 2 log(1.5 x .5)


def test_policy_gradient_is_zero_where_clipped():
    """d loss / d log_prob = -A ratio / 4 where the plain term is the smaller one, else 0."""
    grad = jax.grad(lambda x: policy(x, jnp.zeros((2, 2)), f32(ADVANTAGES), jnp.ones((2, 2), bool), f32(4))[0])
    close(grad(f32(LOG_RATIO)), [[0, 1.5 / 4], [-0.5 / 4, 0]])


@EAGER_AND_JITTED
@POISON
def test_policy_loss_ignores_masked_entries(mode, poison):
    mask = jnp.asarray([[True, False], [True, False]])
    grad = mode(jax.value_and_grad(policy, argnums=(0, 1, 2), has_aux=True))
    clean, clean_grads = grad(f32(LOG_RATIO), f32(np.zeros((2, 2))), f32(ADVANTAGES), mask, f32(2))
    arrays = [jnp.where(mask, x, poison) for x in (f32(LOG_RATIO), jnp.zeros((2, 2)), f32(ADVANTAGES))]
    found, grads = grad(*arrays, mask, f32(2))
    # Masked with an infinite difference too: the old log-probability stays 0 there.
    also, also_grads = grad(arrays[0], jnp.zeros((2, 2)), f32(ADVANTAGES), mask, f32(2))
    close(found[0], -(1.2 + 0.5) / 2)
    jax.tree.map(np.testing.assert_array_equal, (found, grads), (clean, clean_grads))
    jax.tree.map(np.testing.assert_array_equal, (also, also_grads), (clean, clean_grads))
    assert np.asarray(grads[0])[:, 1].tolist() == [0, 0]


def test_mean_is_over_valid_tokens():
    """areal-project/AReaL#1346: advantages [1, 1, 10, 10], the tens masked, ratio 1: loss -1."""
    mask = jnp.asarray([[True, True, False, False]])
    loss, _ = policy(
        jnp.zeros((1, 4)), jnp.zeros((1, 4)), f32([[1, 1, 10, 10]]), mask, jnp.sum(mask, dtype=jnp.float32)
    )
    close(loss, -1)


def test_token_mean_does_not_depend_on_the_micro_batch():
    """modelscope/twinkle#292: lengths 1 and 3, advantages +1 and -1: loss -(1 - 3) / 4 = .5, gradients -1/4 and 1/4."""
    mask = jnp.asarray([[True, False, False], [True, True, True]])
    advantages = jnp.where(mask, f32([[1], [-1]]), 0)
    grad = jax.value_and_grad(lambda x, a, m: policy(x, jnp.zeros_like(x), a, m, f32(4))[0])
    whole, whole_grad = grad(jnp.zeros((2, 3)), advantages, mask)
    parts = [grad(jnp.zeros((1, 3)), advantages[i : i + 1], mask[i : i + 1]) for i in range(2)]
    close(whole, 0.5)
    close(sum(p[0] for p in parts), 0.5)
    close(whole_grad, [[-0.25, 0, 0], [0.25, 0.25, 0.25]])
    close(jnp.concatenate([p[1] for p in parts]), whole_grad)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_losses_do_not_depend_on_the_shards(shards):
    """8 rows over 1, 2 and 8 devices, row 5 fully masked: the same losses, metrics and gradients."""
    random = np.random.default_rng(0)
    a, b, c = (random.normal(size=(8, 4)).astype(np.float32) for _ in range(3))
    mask = np.arange(4)[None] < np.asarray([4, 2, 3, 1, 4, 0, 1, 2])[:, None]
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:shards]), ("data",)), PartitionSpec("data"))

    def both(a, b, c, mask):
        n = jnp.sum(mask, dtype=jnp.float32)
        return policy(a, b, c, mask, n)[0] + value(a, b, c, mask, n)[0]

    found = jax.jit(jax.value_and_grad(both))(*(jax.device_put(x, sharding) for x in (a, b, c, mask)))
    ratio = np.exp(a - b)
    surrogate = np.minimum(ratio * c, np.clip(ratio, 0.8, 1.2) * c)
    near = b + np.clip(a - b, -0.2, 0.2)
    squares = np.maximum((a - c) ** 2, (near - c) ** 2) / 2
    close(found[0], (squares - surrogate)[mask].sum() / 17, 1e-5)
    assert not np.asarray(found[1])[~mask].any()
    grad = jax.grad(both)(*(jnp.asarray(x) for x in (a, b, c, mask)))
    close(found[1], grad)


@EAGER_AND_JITTED
def test_value_loss(mode):
    """Clip 0.2. Old 0, new 1, return 2: near .2, max(1, 1.8^2) = 3.24. Old 2.5, new 2, return 0: near 2.3, 5.29.
    Old 0, new .5, return 0: near .2, max(.25, .04) = .25. Half of 8.78, over 3; two of three clipped."""
    args = f32([[1, 2, 0.5]]), f32([[0, 2.5, 0]]), f32([[2, 0, 0]]), jnp.ones((1, 3), bool), f32(3)
    loss, metrics = mode(value)(*args)
    close(loss, 8.78 / 2 / 3)
    close(metrics["value_clip_fraction"], 2 / 3)
    close(jax.grad(lambda *a: mode(value)(*a)[0])(*args), [[0, 0, 0.5 / 3]])


def test_values_within_the_clip_never_count_as_clipped():
    """Moved by at most 0.19 from the old ones: old + (value - old) is not always the value in float32."""
    random = np.random.default_rng(0)
    old = random.normal(size=(8, 64)).astype(np.float32)
    new = (old + random.uniform(-0.19, 0.19, old.shape)).astype(np.float32)
    returns = random.normal(size=old.shape).astype(np.float32)
    loss, metrics = value(new, old, returns, jnp.ones(old.shape, bool), f32(512))
    assert float(metrics["value_clip_fraction"]) == 0
    close(loss, ((new - returns) ** 2).mean() / 2)


@EAGER_AND_JITTED
@POISON
def test_value_loss_ignores_masked_entries(mode, poison):
    mask = jnp.asarray([[True, False, True]])
    arrays = [jnp.where(mask, f32(x), poison) for x in ([[1, 0, 0.5]], [[0, 0, 0]], [[2, 0, 0]])]
    (loss, metrics), grads = mode(jax.value_and_grad(value, has_aux=True))(*arrays, mask, f32(2))
    close(loss, (3.24 + 0.25) / 2 / 2)
    close(metrics["value_clip_fraction"], 1 / 2)
    close(grads, [[0, 0, 0.5 / 2]])


@EAGER_AND_JITTED
@POISON
def test_cross_entropy(mode, poison):
    """-(-1 - 3) / 2."""
    mask = jnp.asarray([[True, False, True]])
    (loss, metrics), grads = mode(jax.value_and_grad(cross_entropy, has_aux=True))(
        f32([[-1, poison, -3]]), mask, f32(2)
    )
    close(loss, 2)
    close(grads, [[-0.5, 0, -0.5]])
    assert metrics == {}


@EAGER_AND_JITTED
def test_preference_loss(mode):
    """-log sigmoid(1) = log(1 + 1/e) = .3132617, -log sigmoid(0) = log 2 = .6931472; their mean .5032044."""
    args = f32([1, 0]), f32([0, 0]), f32(2)
    loss, metrics = mode(preference_loss)(*args)
    close(loss, 0.5032044)
    close(metrics["accuracy"], 0.5)
    close(metrics["margin"], 0.5)
    grads = jax.grad(lambda *a: preference_loss(*a)[0], argnums=(0, 1))(*args)
    close(grads[0], [-0.2689414 / 2, -0.5 / 2])  # -sigmoid(-margin) / 2
    close(grads[1], [0.2689414 / 2, 0.5 / 2])


def test_preference_loss_of_a_hopeless_margin_is_finite():
    close(preference_loss(f32([-1000]), f32([1000]), f32(1))[0], 2000)
    close(preference_loss(f32([1000]), f32([-1000]), f32(1))[0], 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong, right, mask: policy(wrong, right, right, mask, f32(1)),
        lambda wrong, right, mask: policy(right, wrong, right, mask, f32(1)),
        lambda wrong, right, mask: policy(right, right, wrong, mask, f32(1)),
        lambda wrong, right, mask: policy(right, right, right, mask[:, :1], f32(1)),
        lambda wrong, right, mask: value(wrong, right, right, mask, f32(1)),
        lambda wrong, right, mask: value(right, wrong, right, mask, f32(1)),
        lambda wrong, right, mask: value(right, right, wrong, mask, f32(1)),
        lambda wrong, right, mask: cross_entropy(wrong, mask, f32(1)),
        lambda wrong, right, mask: preference_loss(wrong[:, 0], right, f32(1)),
    ],
)
def test_losses_refuse_what_would_broadcast(call):
    with pytest.raises(ValueError, match="would broadcast"):
        call(jnp.zeros((3, 1)), jnp.zeros((3, 3)), jnp.ones((3, 3), bool))
