"""Sampling one token a row: temperature, top-k, top-p, greedy. A row's draw depends on its own key alone."""

import jax
import jax.numpy as jnp

from real_jax.spec.experiment import GenerationConfig

Array = jax.Array


def keep_top_k(logits: Array, k: int) -> Array:
    """Logits [B, V] with all but the k largest of each row at minus infinity; ties with the k-th are kept."""
    threshold = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][:, -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_top_p(logits: Array, p: float) -> Array:
    """Logits [B, V] of the smallest set of likeliest tokens whose probability reaches p (arXiv 1904.09751); the rest at
    minus infinity. The likeliest token always stays."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    threshold = jnp.min(jnp.where(before < jnp.float32(p), ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def sample(logits: Array, keys: Array, config: GenerationConfig, forbid: Array | None = None) -> tuple[Array, Array]:
    """Draws one token a row.

    Args:
      logits: [B, V] float32.
      keys: [B] random keys.
      config: temperature, top_k, top_p, greedy.
      forbid: [B, V] or [1, V] booleans of tokens that may not be drawn.

    Returns:
      tokens [B] int32, and log_probs [B] of them under softmax(logits / temperature). The truncations steer the draw
      and are left out of the log-probability, as they are wherever else the policy's log-probabilities are taken.
    """
    scaled = logits / jnp.float32(config.temperature)
    allowed = scaled if forbid is None else jnp.where(forbid, -jnp.inf, scaled)
    if config.greedy:
        tokens = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    else:
        if config.top_k:
            allowed = keep_top_k(allowed, config.top_k)
        if config.top_p < 1:
            allowed = keep_top_p(allowed, config.top_p)
        tokens = jax.vmap(jax.random.categorical)(keys, allowed).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=-1)
