"""A reward model from preference pairs: one train call on preferred and rejected answers side by side."""

import jax.numpy as jnp

from real_jax.algorithms.algorithm import Algorithm, TrainFunctions, at_last_token
from real_jax.algorithms.losses import preference_loss
from real_jax.spec.dataflow import Call, Graph

GRAPH = Graph(
    name="preference",
    inputs=("tokens", "lengths"),
    calls=(Call("reward_train", "train", "reward", reads=("tokens", "lengths")),),
)


def algorithm() -> Algorithm:
    """Bradley-Terry on the scalar head at the last token. tokens [B, 2, T]; index 0 of axis 1 is preferred."""

    def prepare(batch):
        return dict(batch), {}, {}

    def loss(forward, rows, normalizer):
        tokens, lengths = rows["tokens"], rows["lengths"]
        scores = at_last_token(forward(tokens.reshape(-1, tokens.shape[-1])), lengths.reshape(-1))
        preferred, rejected = scores.reshape(-1, 2).T
        return preference_loss(preferred, rejected, normalizer)

    def weight(rows):
        return jnp.float32(rows["lengths"].shape[0])

    return Algorithm(GRAPH, train={"reward_train": TrainFunctions(prepare, weight, loss)})
