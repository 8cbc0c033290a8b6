"""Generation: prefill the prompts, then decode until every row has ended or the response is full."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from real_jax.models.cache import AXES, Cache, empty_cache
from real_jax.models.transformer import Transformer
from real_jax.rollout.sampling import sample
from real_jax.spec.experiment import GenerationConfig

Array = jax.Array


class Rollout(NamedTuple):
    """Prompts with their sampled responses, T = P + R columns; each row is prompt, response, then padding.

    Attributes:
      tokens: [B, T] int32.
      lengths: [B] tokens of prompt and response, the end token included.
      ended: [B] whether the end token was sampled; False where the response was cut at R tokens.
      log_probs: [B, T - 1] of each sampled token, in the column before it; zero elsewhere.
    """

    tokens: Array
    lengths: Array
    ended: Array
    log_probs: Array


class _State(NamedTuple):
    step: Array
    tokens: Array
    log_probs: Array
    lengths: Array
    ended: Array
    hidden: Array
    cache: Cache


def generate(
    model: Transformer,
    prompts: Array,
    prompt_lengths: Array,
    keys: Array,
    config: GenerationConfig,
    end_token: int,
    pad_token: int,
) -> Rollout:
    """Samples a response to each prompt.

    Args:
      prompts: [B, P] token ids, padded on the right.
      prompt_lengths: [B] tokens of each prompt, at least 1.
      keys: [B] random keys; row b's tokens depend on its prompt and keys[b] alone.
      end_token: ends a response; it may occur inside a prompt.
      pad_token: fills the columns after a row's end.
    """
    batch, width = prompts.shape
    length = width + config.response_length
    columns = jnp.arange(length, dtype=jnp.int32)[None]
    is_end = (jnp.arange(model.arch.vocab, dtype=jnp.int32) == end_token)[None]

    clean = jnp.where(columns[:, :width] < prompt_lengths[:, None], prompts, pad_token).astype(jnp.int32)
    tokens = jnp.full((batch, length), pad_token, jnp.int32).at[:, :width].set(clean)
    empty = Cache(*(model.constrain(x, AXES) for x in empty_cache(model.arch, batch, length, model.embed.dtype)))
    hidden, cache = model.prefill(clean, empty)
    last = jnp.take_along_axis(hidden, (prompt_lengths - 1)[:, None, None], axis=1)[:, 0]
    start = _State(
        step=jnp.int32(0),
        tokens=tokens,
        log_probs=jnp.zeros((batch, length - 1), jnp.float32),
        lengths=prompt_lengths.astype(jnp.int32),
        ended=jnp.zeros((batch,), jnp.bool_),
        hidden=last,
        cache=cache,
    )

    def unfinished(s: _State) -> Array:
        return (s.step < config.response_length) & ~jnp.all(s.ended)

    def step(s: _State) -> _State:
        forbid = is_end & (s.step < config.min_length) if config.min_length else None
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, s.step)
        drawn, log_prob = sample(model.logits(s.hidden), step_keys, config, forbid)
        drawn = jnp.where(s.ended, pad_token, drawn)
        position = s.lengths  # column of the new token; past a row's end nothing is written
        at = jnp.where(s.ended, length, position)[:, None]
        # A comparison instead of a scatter, which would not stay split over the batch.
        tokens = jnp.where(columns == at, drawn[:, None], s.tokens)
        log_probs = jnp.where(columns[:, 1:] == at, log_prob[:, None], s.log_probs)
        # Ended rows keep rewriting their own last column, which nobody reads any more.
        hidden, cache = model.decode(drawn, jnp.minimum(position, length - 1), s.cache)
        return _State(
            step=s.step + 1,
            tokens=tokens,
            log_probs=log_probs,
            lengths=s.lengths + (~s.ended).astype(jnp.int32),
            ended=s.ended | (drawn == end_token) & ~s.ended,
            hidden=hidden,
            cache=cache,
        )

    end = jax.lax.while_loop(unfinished, step, start)
    return Rollout(end.tokens, end.lengths, end.ended, end.log_probs)
