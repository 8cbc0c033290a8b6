"""AdamW worked out by hand: with a constant gradient its bias-corrected step is the learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.runtime.optimizer import make_optimizer
from real_jax.spec.experiment import OptimizerConfig


def steps(config, grad, start, count):
    optimizer = make_optimizer(config)

    def one(carry, _):
        params, state = carry
        updates, state = optimizer.update({"w": jnp.asarray(grad, jnp.float32)}, state, params)
        params = {"w": params["w"] + updates["w"]}
        return (params, state), params["w"]

    params = {"w": jnp.asarray(start, jnp.float32)}
    (_, state), path = jax.jit(lambda p: jax.lax.scan(one, (p, optimizer.init(p)), None, length=count))(params)
    return np.asarray(path), state


def test_small_updates_are_not_lost():
    """w = 1 and 100 steps of 6e-4: in bfloat16 w would stay 1.0; in float32 it is .94."""
    path, _ = steps(OptimizerConfig(lr=6e-4, eps=1e-12), [1.0], [1.0], 100)
    np.testing.assert_allclose(path[-1], [0.94], rtol=1e-4)
    np.testing.assert_allclose(path[0], [1 - 6e-4], rtol=1e-6)


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1]), (4, [0.25, 0.5, 0.75, 1, 1])]
)
def test_warm_up_is_linear_and_ends_at_the_rate(warmup, rates):
    path, _ = steps(OptimizerConfig(lr=0.5, warmup_steps=warmup, eps=1e-12), [-1.0], [0.0], 5)
    np.testing.assert_allclose(np.diff(path[:, 0], prepend=0), 0.5 * np.asarray(rates), rtol=1e-4)


def test_gradients_are_clipped_by_their_global_norm():
    """(3, 4) has norm 5; clipped to 1 it is (.6, .8), of which the first moment takes 1 - beta1 = .1. Below, it stays."""
    for limit, clipped in ((1.0, [0.6, 0.8]), (50.0, [3, 4])):
        _, state = steps(OptimizerConfig(max_grad_norm=limit), [3.0, 4.0], [0.0, 0.0], 1)
        moments = [np.asarray(x) for x in jax.tree.leaves(state) if x.ndim]
        np.testing.assert_allclose(moments[0], 0.1 * np.asarray(clipped), rtol=1e-5)
        np.testing.assert_allclose(moments[1], 0.05 * np.asarray(clipped) ** 2, rtol=1e-5)


def test_weight_decay_is_decoupled():
    """Zero gradient: w shrinks by lr x decay, 2 -> 2 (1 - .1 x .5)."""
    path, _ = steps(OptimizerConfig(lr=0.1, weight_decay=0.5), [0.0], [2.0], 1)
    np.testing.assert_allclose(path[0], [1.9], rtol=1e-6)
