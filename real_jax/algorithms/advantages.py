"""Generalized advantage estimation over padded sequences, and whitening over valid entries."""

import jax
import jax.numpy as jnp

Array = jax.Array


def action_mask(prompt_lengths: Array, lengths: Array, width: int) -> Array:
    """Booleans [B, width]: column t is valid where the token in column t + 1 is a response token.

    Args:
      prompt_lengths: [B] tokens of each prompt.
      lengths: [B] tokens of prompt and response.
      width: T - 1.
    """
    if prompt_lengths.shape != lengths.shape or lengths.ndim != 1:
        raise ValueError(f"shapes differ: {prompt_lengths.shape=} {lengths.shape=}")
    column = jnp.arange(width, dtype=jnp.int32)[None]
    return (column >= prompt_lengths[:, None] - 1) & (column < lengths[:, None] - 1)


def gae(
    rewards: Array, values: Array, bootstrap: Array, mask: Array, gamma: float, gae_lambda: float
) -> tuple[Array, Array]:
    """Advantages and returns (arXiv 1506.02438, equation 16).

    With d_t = r_t + gamma V_{t+1} - V_t: A_t = d_t + gamma lambda A_{t+1}, return_t = A_t + V_t, over the valid steps of
    a row, which stand next to each other. After the last valid step V is `bootstrap` and A is 0. Masked entries of the
    inputs, whatever they hold, change nothing; masked entries of the results are 0.

    Args:
      rewards: [B, N] of each action.
      values: [B, N] of the state before each action.
      bootstrap: [B] value of the state after the last action: 0 where the sequence ended there.
      mask: [B, N] booleans.

    Returns:
      advantages [B, N] and returns [B, N].
    """
    if not rewards.shape == values.shape == mask.shape or bootstrap.shape != mask.shape[:1]:
        raise ValueError(f"shapes differ: {rewards.shape=} {values.shape=} {mask.shape=} {bootstrap.shape=}")
    rewards, values = jnp.where(mask, rewards, 0), jnp.where(mask, values, 0)
    no_more = jnp.zeros_like(mask[:, :1])
    following = jnp.concatenate([mask[:, 1:], no_more], axis=1)
    shifted = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)
    next_values = jnp.where(following, shifted, bootstrap[:, None])
    deltas = jnp.where(mask, rewards + jnp.float32(gamma) * next_values - values, 0)

    def back(later: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, valid = step
        advantage = jnp.where(valid, delta + jnp.float32(gamma * gae_lambda) * later, 0)
        return advantage, advantage

    _, advantages = jax.lax.scan(back, jnp.zeros_like(bootstrap), (deltas.T, mask.T), reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(mask, advantages + values, 0)


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean of the valid entries; 0 where there are none."""
    if x.shape != mask.shape:
        raise ValueError(f"shapes differ and would broadcast: {x.shape=} {mask.shape=}")
    return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)


def whiten(x: Array, mask: Array) -> Array:
    """x with mean 0 and (biased) variance 1 over its valid entries; 0 elsewhere."""
    mean = masked_mean(x, mask)
    centred = jnp.where(mask, x - mean, 0)
    return centred * jax.lax.rsqrt(masked_mean(centred**2, mask) + jnp.float32(1e-8))
