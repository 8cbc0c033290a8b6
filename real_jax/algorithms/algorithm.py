"""What an algorithm is made of: a graph, and for each of its calls a pure function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from real_jax.spec.dataflow import Graph

Array = jax.Array
Batch = dict[str, Array]
Forward = Callable[[Array], Any]
"""The model, handed in. Tokens [B, T] -> (log_probs, entropies), each [B, T - 1], of an "lm" head; values [B, T] of a
"scalar" head."""


def always(metrics: Mapping[str, Array]) -> Array:
    return jnp.bool_(True)


@dataclasses.dataclass(frozen=True)
class TrainFunctions:
    """A train call.

    Attributes:
      prepare: whole batch -> (rows, written, metrics): arrays with a leading batch axis that minibatches are cut from,
        the keys that the call writes, and scalar metrics. Statistics over the batch belong here, so that neither
        minibatches nor micro-batches change them.
      weight: rows of one optimizer step -> the loss's normalizer, a scalar.
      loss: (forward, rows, normalizer) -> (loss, metrics), each a sum over rows divided by the normalizer.
      accept: metrics of a step -> whether its update is applied.
    """

    prepare: Callable[[Batch], tuple[Batch, Batch, Batch]]
    weight: Callable[[Batch], Array]
    loss: Callable[[Forward, Batch, Array], tuple[Array, Batch]]
    accept: Callable[[Mapping[str, Array]], Array] = always


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A graph with the functions of its calls.

    Attributes:
      inference: call -> (forward, batch) -> what the call writes, each with a leading batch axis.
      train: call -> its functions.
      initial: carried key -> its value before the first iteration.
    """

    graph: Graph
    inference: Mapping[str, Callable[[Forward, Batch], Batch]] = dataclasses.field(default_factory=dict)
    train: Mapping[str, TrainFunctions] = dataclasses.field(default_factory=dict)
    initial: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def at_last_token(values: Array, lengths: Array) -> Array:
    """values [B, T] at each row's last token, [B]."""
    if lengths.shape != values.shape[:1]:
        raise ValueError(f"shapes differ: {values.shape=} {lengths.shape=}")
    return jnp.take_along_axis(values, lengths[:, None] - 1, axis=1)[:, 0]
