"""What is read off the final hidden states: log-probabilities of given tokens, and one number per position."""

import jax
import jax.numpy as jnp

from real_jax.models.transformer import Transformer

Array = jax.Array

CHUNK = 64  # positions whose logits exist at one time


def token_log_probs(model: Transformer, hidden: Array, targets: Array, temperature: float) -> tuple[Array, Array]:
    """Float32 log-probabilities of `targets` and entropies under softmax(logits / temperature).

    Logits are made for `CHUNK` positions at a time and made again in the backward pass, so that B x T x V never exists.

    Args:
      hidden: [B, T, D].
      targets: [B, T] token ids, the token that follows each position.
      temperature: the sampling temperature, so that these are log-probabilities of the policy that sampled.

    Returns:
      log_probs [B, T] and entropies [B, T].
    """
    batch, length, width = hidden.shape
    if targets.shape != (batch, length):
        raise ValueError(f"targets {targets.shape} do not match hidden states {hidden.shape}")

    @jax.checkpoint
    def chunk(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = model.logits(hidden) / jnp.float32(temperature)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        mean_logit = jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, axis=-1)
        return chosen - log_z, log_z - mean_logit

    if length <= CHUNK:
        return chunk(hidden, targets)
    chunks = -(-length // CHUNK)
    pad = chunks * CHUNK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, chunks, CHUNK, width)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, chunks, CHUNK)
    outs = jax.lax.map(lambda x: chunk(*x), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    log_probs, entropies = (x.swapaxes(0, 1).reshape(batch, chunks * CHUNK)[:, :length] for x in outs)
    return log_probs, entropies


def next_token_log_probs(model: Transformer, tokens: Array, temperature: float) -> tuple[Array, Array]:
    """Log-probabilities and entropies [B, T - 1]: column t speaks of tokens[:, t + 1]."""
    hidden = model(tokens)
    return token_log_probs(model, hidden[:, :-1], tokens[:, 1:], temperature)
