"""The optimizer of a trained model."""

import jax
import optax

from real_jax.spec.experiment import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW on float32 weights after clipping by global norm, with linear warm-up."""
    rate = config.lr
    if config.warmup_steps:
        rate = optax.linear_schedule(config.lr / config.warmup_steps, config.lr, config.warmup_steps - 1)
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=config.weight_decay),
    )

    def update(grads, state, params=None):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            return chain.update(grads, state, params)

    return optax.GradientTransformation(chain.init, update)
