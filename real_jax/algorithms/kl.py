"""The KL penalty to the reference policy inside the reward, and its controller."""

import jax
import jax.numpy as jnp

from real_jax.algorithms.advantages import action_mask

Array = jax.Array


def token_rewards(
    scores: Array,
    log_probs: Array,
    reference_log_probs: Array,
    prompt_lengths: Array,
    lengths: Array,
    ended: Array,
    kl_coef: Array,
    *,
    score_needs_end: bool,
) -> tuple[Array, Array]:
    """Rewards [B, T - 1] of each action, and the KL estimate [B] summed over each response.

    reward_t = -kl_coef (log_prob_t - reference_log_prob_t), plus the score at the last action. The action that produces
    the end token carries no penalty. A response without an end token carries the penalty to its last token, and gets
    its score unless `score_needs_end`.

    Args:
      scores: [B] of whole responses.
      log_probs, reference_log_probs: [B, T - 1]; entries outside the response may hold anything.
      prompt_lengths, lengths: [B]; `lengths` counts prompt and response.
      ended: [B] whether the last token is the end token.
      kl_coef: scalar.
    """
    rows = lengths.shape
    if not rows == scores.shape == ended.shape == log_probs.shape[:1] or log_probs.shape != reference_log_probs.shape:
        raise ValueError(
            f"shapes differ: {scores.shape=} {lengths.shape=} {ended.shape=} {log_probs.shape=} "
            f"{reference_log_probs.shape=}"
        )
    width = log_probs.shape[1]
    mask = action_mask(prompt_lengths, lengths, width)
    last = mask & (jnp.arange(width, dtype=jnp.int32)[None] == lengths[:, None] - 2)
    log_ratio = jnp.where(mask, log_probs - reference_log_probs, 0)
    penalty = jnp.where(last & ended[:, None], 0, -kl_coef * log_ratio)
    given = jnp.where(ended | (not score_needs_end), scores, 0)
    return penalty + jnp.where(last, given[:, None], 0), jnp.sum(log_ratio, axis=1)


def adapt_coefficient(kl_coef: Array, kl: Array, target: float, horizon: float, sequences: int) -> Array:
    """The next KL coefficient (arXiv 1909.08593, section 2.2): it follows the measured KL per sequence towards `target`.

    kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) sequences / horizon).
    """
    error = jnp.clip(kl / jnp.float32(target) - 1, -0.2, 0.2)
    return kl_coef * (1 + error * jnp.float32(sequences / horizon))
