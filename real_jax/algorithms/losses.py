"""Losses as (inputs, normalizer) -> (sum / normalizer, metrics).

The normalizer counts the valid entries of the whole optimizer step, so the sum over micro-batches and over devices is the
same however the step is divided. Metrics are divided by it too, and so add up the same way.
"""

import jax
import jax.numpy as jnp

Array = jax.Array
Metrics = dict[str, Array]


def _same_shape(**arrays: Array) -> None:
    shapes = {name: a.shape for name, a in arrays.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ and would broadcast: {shapes}")


def policy_loss(
    log_probs: Array, old_log_probs: Array, advantages: Array, mask: Array, normalizer: Array, clip: float
) -> tuple[Array, Metrics]:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), all arguments [B, N]:
    -sum min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) / normalizer with ratio = exp(log_prob - old_log_prob)."""
    _same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    # The mask goes on before `exp`: a huge masked difference would otherwise give a NaN gradient.
    log_ratio = jnp.where(mask, log_probs - old_log_probs, 0)
    advantages = jnp.where(mask, advantages, 0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
    metrics = {
        "importance_ratio": jnp.sum(jnp.where(mask, ratio, 0)) / normalizer,
        "clip_fraction": jnp.sum(clipped * advantages < ratio * advantages, dtype=jnp.float32) / normalizer,
        "approx_kl": jnp.sum(ratio - 1 - log_ratio) / normalizer,
    }
    return -jnp.sum(surrogate) / normalizer, metrics


def value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, normalizer: Array, clip: float
) -> tuple[Array, Metrics]:
    """Half the squared error to the returns, the larger of the plain and the clipped one (values stay within `clip` of
    the old ones), all arguments [B, N]: sum max(...) / 2 / normalizer."""
    _same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
    change = values - old_values
    # Within the clip the value itself, not old + change: rounding would count about half of them as clipped.
    near = jnp.where(jnp.abs(change) <= clip, values, old_values + jnp.clip(change, -clip, clip))
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    metrics = {"value_clip_fraction": jnp.sum(clipped > plain, dtype=jnp.float32) / normalizer}
    return 0.5 * jnp.sum(jnp.maximum(plain, clipped)) / normalizer, metrics


def cross_entropy(log_probs: Array, mask: Array, normalizer: Array) -> tuple[Array, Metrics]:
    """Negative log-likelihood of the valid tokens: log_probs, mask [B, N]."""
    _same_shape(log_probs=log_probs, mask=mask)
    loss = -jnp.sum(jnp.where(mask, log_probs, 0)) / normalizer
    return loss, {}


def preference_loss(preferred: Array, rejected: Array, normalizer: Array) -> tuple[Array, Metrics]:
    """Bradley-Terry: -sum log sigmoid(preferred - rejected) / normalizer, both [B] (arXiv 2203.02155, equation 1)."""
    _same_shape(preferred=preferred, rejected=rejected)
    margin = preferred - rejected
    metrics = {
        "accuracy": jnp.sum(margin > 0, dtype=jnp.float32) / normalizer,
        "margin": jnp.sum(margin) / normalizer,
    }
    return -jnp.sum(jax.nn.log_sigmoid(margin)) / normalizer, metrics
