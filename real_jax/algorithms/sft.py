"""Supervised fine-tuning: one train call on prompts with their answers."""

import jax.numpy as jnp

from real_jax.algorithms.advantages import action_mask
from real_jax.algorithms.algorithm import Algorithm, TrainFunctions
from real_jax.algorithms.losses import cross_entropy
from real_jax.spec.dataflow import Call, Graph

GRAPH = Graph(
    name="sft",
    inputs=("tokens", "prompt_lengths", "lengths"),
    calls=(Call("sft_train", "train", "actor", reads=("tokens", "prompt_lengths", "lengths")),),
)


def algorithm() -> Algorithm:
    """Cross-entropy of the answer tokens, the end token included."""

    def prepare(batch):
        mask = action_mask(batch["prompt_lengths"], batch["lengths"], batch["tokens"].shape[1] - 1)
        return {"tokens": batch["tokens"], "mask": mask}, {}, {}

    def loss(forward, rows, normalizer):
        log_probs, _ = forward(rows["tokens"])
        return cross_entropy(log_probs, rows["mask"], normalizer)

    def weight(rows):
        return jnp.maximum(jnp.sum(rows["mask"], dtype=jnp.float32), 1)

    return Algorithm(GRAPH, train={"sft_train": TrainFunctions(prepare, weight, loss)})
