"""Advantages worked out by hand; whatever stands at masked positions changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.algorithms.advantages import action_mask, gae, masked_mean, whiten

EAGER_AND_JITTED = pytest.mark.parametrize("mode", [lambda f, **_: f, jax.jit], ids=["eager", "jitted"])
POISON = pytest.mark.parametrize("poison", [1e6, np.nan, np.inf])


def f32(x):
    return jnp.asarray(x, jnp.float32)


def close(actual, wanted, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted, np.float32), rtol=tolerance, atol=tolerance)


def rows(*values):
    return jnp.asarray(values, jnp.int32)


@EAGER_AND_JITTED
def test_action_mask_marks_the_column_before_each_response_token(mode):
    # T = 5. Row 0: prompt 2, response in columns 2 and 3. Row 1: response in 1 and 2. Row 2: no response.
    # Row 3: the response fills the row. Row 4: prompt of one token, response of one.
    mask = mode(action_mask, static_argnums=2)(rows(2, 1, 4, 2, 1), rows(4, 3, 4, 5, 2), 4)
    wanted = [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(wanted, bool))


def test_mask_is_not_shifted():
    """Tokens [10, 11, 12, 13], of which 12 alone is a response token: 12 is scored (OpenRLHF/OpenRLHF#973)."""
    tokens = np.asarray([[10, 11, 12, 13]])
    mask = np.asarray(action_mask(rows(2), rows(3), 3))
    assert tokens[:, 1:][mask].tolist() == [12]


def test_mask_comes_from_lengths_where_pad_is_the_end_token():
    """Reply [5, END, END, END] that ended at its first END: mask [1, 1, 0, 0] (huggingface/trl#5303)."""
    np.testing.assert_array_equal(np.asarray(action_mask(rows(1), rows(3), 4)), [[True, True, False, False]])


def test_action_mask_refuses_what_would_broadcast():
    with pytest.raises(ValueError, match="shapes differ"):
        action_mask(rows(2, 2), rows(4), 4)
    with pytest.raises(ValueError, match="shapes differ"):
        action_mask(rows(2, 2)[:, None], rows(4, 4)[:, None], 4)


def in_mode(mode):
    return mode(gae, static_argnums=(4, 5))


@EAGER_AND_JITTED
def test_gae_stops_at_the_mask(mode):
    """alibaba/ROLL#447. d = [0 + 0 - 0, 1 + 0 - 0]; A1 = 1, A0 = 0 + .95 x 1; the masked 100 is no next value."""
    mask = jnp.asarray([[True, True, False]])
    advantages, returns = in_mode(mode)(f32([[0, 1, 0]]), f32([[0, 0, 100]]), f32([0]), mask, 1.0, 0.95)
    close(advantages, [[0.95, 1, 0]])
    close(returns, [[0.95, 1, 0]])


@EAGER_AND_JITTED
def test_gae_ended_and_cut(mode):
    """gamma = lambda = 1/2, rewards 1 2 3, values 1 1 1.

    Bootstrap 4 (cut): d = [1 + .5 - 1, 2 + .5 - 1, 3 + 2 - 1] = [.5, 1.5, 4]; A2 = 4, A1 = 1.5 + 4/4 = 2.5,
    A0 = .5 + 2.5/4 = 1.125. Bootstrap 0 (ended): d2 = 3 - 1 = 2, A1 = 1.5 + 2/4 = 2, A0 = .5 + 2/4 = 1.
    """
    rewards, values, mask = f32([[1, 2, 3]] * 2), f32([[1, 1, 1]] * 2), jnp.ones((2, 3), bool)
    advantages, returns = in_mode(mode)(rewards, values, f32([4, 0]), mask, 0.5, 0.5)
    close(advantages, [[1.125, 2.5, 4], [1, 2, 2]])
    close(returns, [[2.125, 3.5, 5], [2, 3, 3]])


def test_gae_of_lambda_one_and_zero():
    """lambda 1: the return is the discounted sum of rewards, whatever V is. lambda 0: A is the one-step error."""
    rewards, values, mask = f32([[1, 2, 4]]), f32([[5, -3, 7]]), jnp.ones((1, 3), bool)
    _, returns = gae(rewards, values, f32([0]), mask, 0.5, 1.0)
    close(returns, [[1 + 1 + 1, 2 + 2, 4]])
    advantages, _ = gae(rewards, values, f32([10]), mask, 1.0, 0.0)
    close(advantages, [[1 - 3 - 5, 2 + 7 + 3, 4 + 10 - 7]])


@EAGER_AND_JITTED
@POISON
def test_gae_ignores_masked_entries(mode, poison):
    mask = jnp.asarray([[False, True, True, False], [True, False, False, False], [False, False, False, False]])
    rewards, values = f32([[0, 1, 2, 0], [3, 0, 0, 0], [0] * 4]), f32([[0, 1, 1, 0], [2, 0, 0, 0], [0] * 4])
    run = in_mode(mode)
    poisoned = run(jnp.where(mask, rewards, poison), jnp.where(mask, values, poison), f32([0, 1, 0]), mask, 1.0, 1.0)
    for actual, clean in zip(poisoned, run(rewards, values, f32([0, 1, 0]), mask, 1.0, 1.0), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(clean))
    # Row 0: d = [1 + 1 - 1, 2 - 1]; A = [2, 1]. Row 1: A = 3 + 1 - 2.
    close(poisoned[0], [[0, 2, 1, 0], [2, 0, 0, 0], [0] * 4])
    close(poisoned[1], [[0, 3, 2, 0], [4, 0, 0, 0], [0] * 4])


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4), (2,)), ((2, 3), (2, 3), (2, 1)), ((2, 3), (2, 1), (2,))])
def test_gae_refuses_what_would_broadcast(shapes):
    rewards, values, bootstrap = (jnp.zeros(s, jnp.float32) for s in shapes)
    with pytest.raises(ValueError, match="shapes differ"):
        gae(rewards, values, bootstrap, jnp.ones((2, 3), bool), 1.0, 1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(2), jnp.ones((2, 1), bool), 1.0, 1.0)


@EAGER_AND_JITTED
@POISON
def test_whitening_leaves_padding_out(mode, poison):
    """NovaSky-AI/SkyRL#1305: [2, 4] has mean 3 and deviation 1."""
    mask = jnp.asarray([[True, True, False, False]])
    close(mode(whiten)(f32([[2, 4, poison, poison]]), mask), [[-1, 1, 0, 0]])
    close(mode(masked_mean)(f32([[2, 4, poison, poison]]), mask), 3)


def test_whitening_of_nothing_and_of_a_constant_is_zero():
    close(whiten(f32([[7, 8]]), jnp.zeros((1, 2), bool)), [[0, 0]])
    close(whiten(f32([[7, 7]]), jnp.ones((1, 2), bool)), [[0, 0]])
    close(masked_mean(f32([[7, 8]]), jnp.zeros((1, 2), bool)), 0)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_whitening_is_over_all_shards(shards):
    """9 tokens 1 to 9 over 1, 2 and 8 shards, one row fully masked (THUDM/slime#2235): mean 5, variance 60 / 9."""
    mask = np.asarray([[1, 0], [1, 1], [0, 0], [1, 0], [1, 1], [1, 0], [1, 0], [1, 0]], bool)
    x = np.where(mask, (np.cumsum(mask) * 1.0).reshape(mask.shape), 777).astype(np.float32)
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:shards]), ("data",)), PartitionSpec("data"))
    out = jax.jit(whiten)(jax.device_put(x, sharding), jax.device_put(mask, sharding))
    close(out, np.where(mask, (x - 5) / np.sqrt(60 / 9), 0))


def test_means_refuse_what_would_broadcast():
    with pytest.raises(ValueError, match="would broadcast"):
        masked_mean(jnp.zeros(4), jnp.ones((4, 1), bool))
    with pytest.raises(ValueError, match="would broadcast"):
        whiten(jnp.zeros((4, 3)), jnp.ones((4, 1), bool))
