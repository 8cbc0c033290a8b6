"""PPO for language models: six calls on actor, critic, reference and reward model (arXiv 2406.14088, figure 4).

One iteration: the actor samples responses; the reward model (or a Python function) scores them, the reference and the
critic read them; then actor and critic train on the same advantages, each computing them for itself from the batch, so
that neither waits for the other.
"""

import jax.numpy as jnp

from real_jax.algorithms import kl, value_norm
from real_jax.algorithms.advantages import action_mask, gae, masked_mean, whiten
from real_jax.algorithms.algorithm import Algorithm, Array, Batch, TrainFunctions, at_last_token
from real_jax.algorithms.losses import policy_loss, value_loss
from real_jax.spec.dataflow import Average, Call, Graph

SEQUENCE = ("tokens", "prompt_lengths", "lengths", "ended")
EXPERIENCE = (*SEQUENCE, "log_probs", "reference_log_probs", "scores", "values", "kl_coef", "value_norm")


def graph(reward_function: bool = False, reference_eta: float = 0.0) -> Graph:
    """PPO's dataflow graph; with `reward_function` the scores come from a host call instead of a reward model, with
    `reference_eta` the reference follows the actor as a moving average."""
    reward = (
        Call("reward_function", "host", "", reads=SEQUENCE, writes=("scores",))
        if reward_function
        else Call("reward_inference", "inference", "reward", reads=("tokens", "lengths"), writes=("scores",))
    )
    return Graph(
        name="ppo",
        inputs=("prompt_tokens", "prompt_lengths", "row_ids"),
        carried=("kl_coef", "value_norm"),
        averages=(Average("reference", "actor", reference_eta),) if reference_eta else (),
        calls=(
            Call(
                "actor_generate", "generate", "actor",
                reads=("prompt_tokens", "prompt_lengths", "row_ids"), writes=("tokens", "lengths", "ended", "log_probs"),
            ),
            reward,
            Call("reference_inference", "inference", "reference", reads=("tokens",), writes=("reference_log_probs",)),
            Call("critic_inference", "inference", "critic", reads=("tokens",), writes=("values",)),
            Call("actor_train", "train", "actor", reads=EXPERIENCE, writes=("kl_coef",)),
            Call("critic_train", "train", "critic", reads=EXPERIENCE, writes=("value_norm",)),
        ),
    )  # fmt: skip


def shaped_scores(raw: Array, config) -> Array:
    """clip((raw - reward_bias) x reward_scale, -reward_clip, reward_clip)."""
    scaled = (raw - jnp.float32(config.reward_bias)) * jnp.float32(config.reward_scale)
    return jnp.clip(scaled, -config.reward_clip, config.reward_clip)


def experience(batch: Batch, config) -> dict[str, Array]:
    """Mask, advantages, returns (in the rewards' scale) [B, T - 1] and KL per sequence [B] of a batch of rollouts.

    What follows a response is worth 0 where the response was given its score, for that is all it will get. Only a
    response that was cut at the length limit and goes without a score (`score_needs_end`) is no terminal state: there
    the value of its last token stands in for the future. Never both, or being cut would pay.
    """
    width = batch["tokens"].shape[1] - 1
    mask = action_mask(batch["prompt_lengths"], batch["lengths"], width)
    rewards, kl_sum = kl.token_rewards(
        shaped_scores(batch["scores"], config), batch["log_probs"], batch["reference_log_probs"],
        batch["prompt_lengths"], batch["lengths"], batch["ended"], batch["kl_coef"], score_needs_end=config.score_needs_end,
    )  # fmt: skip
    values = value_norm.denormalize(batch["value_norm"], batch["values"])
    open_ended = ~batch["ended"] & config.score_needs_end
    bootstrap = jnp.where(open_ended, at_last_token(values, batch["lengths"]), 0)
    advantages, returns = gae(rewards, values[:, :-1], bootstrap, mask, config.gamma, config.gae_lambda)
    if config.normalize_advantages:
        advantages = whiten(advantages, mask)
    return {"mask": mask, "advantages": advantages, "returns": returns, "kl": kl_sum}


def _token_count(rows: Batch) -> Array:
    return jnp.maximum(jnp.sum(rows["mask"], dtype=jnp.float32), 1)


def _actor_train(config) -> TrainFunctions:
    def prepare(batch: Batch):
        made = experience(batch, config)
        sequences = batch["tokens"].shape[0]
        kl_mean = jnp.mean(made["kl"])
        kl_coef = batch["kl_coef"]
        if config.kl_adaptive:
            kl_coef = kl.adapt_coefficient(kl_coef, kl_mean, config.kl_target, config.kl_horizon, sequences)
        rows = {
            "tokens": batch["tokens"], "mask": made["mask"],
            "advantages": made["advantages"], "old_log_probs": batch["log_probs"],
        }  # fmt: skip
        responses = (batch["lengths"] - batch["prompt_lengths"]).astype(jnp.float32)
        metrics = {
            "reward": jnp.mean(batch["scores"]),
            "kl": kl_mean,
            "kl_coef": batch["kl_coef"],
            "response_length": jnp.mean(responses),
            "truncated": jnp.mean(~batch["ended"], dtype=jnp.float32),
        }
        return rows, {"kl_coef": kl_coef}, metrics

    def loss(forward, rows, normalizer):
        log_probs, entropies = forward(rows["tokens"])
        value, metrics = policy_loss(
            log_probs, rows["old_log_probs"], rows["advantages"], rows["mask"], normalizer, config.ratio_clip
        )
        return value, metrics | {"entropy": jnp.sum(jnp.where(rows["mask"], entropies, 0)) / normalizer}

    def accept(metrics):
        return metrics["importance_ratio"] <= config.max_ratio

    return TrainFunctions(prepare, _token_count, loss, accept)


def _critic_train(config) -> TrainFunctions:
    def prepare(batch: Batch):
        made = experience(batch, config)
        state = value_norm.update(
            batch["value_norm"], made["returns"], made["mask"], config.value_norm, config.value_norm_beta
        )
        # Clipping bounds how far the critic's own output moves: the old output stays as it was, whatever the scale of the
        # returns did. Rescaled with them it would start out of reach of the new output, and the clip would stop learning.
        old = batch["values"][:, :-1]
        returns = value_norm.normalize(state, made["returns"])
        rows = {"tokens": batch["tokens"], "mask": made["mask"], "old_values": old, "returns": returns}
        metrics = {"return": masked_mean(made["returns"], made["mask"])}
        return rows, {"value_norm": state}, metrics

    def loss(forward, rows, normalizer):
        values = forward(rows["tokens"])[:, :-1]
        return value_loss(values, rows["old_values"], rows["returns"], rows["mask"], normalizer, config.value_clip)

    return TrainFunctions(prepare, _token_count, loss)


def algorithm(config, reward_function: bool = False) -> Algorithm:
    """PPO under `config` (a `spec.experiment.PPOConfig`)."""
    inference = {
        "reference_inference": lambda forward, batch: {"reference_log_probs": forward(batch["tokens"])[0]},
        "critic_inference": lambda forward, batch: {"values": forward(batch["tokens"])},
        "reward_inference": lambda forward, batch: {
            "scores": at_last_token(forward(batch["tokens"]), batch["lengths"])
        },
    }
    return Algorithm(
        graph(reward_function, config.reference_eta),
        inference=inference,
        train={"actor_train": _actor_train(config), "critic_train": _critic_train(config)},
        initial={"kl_coef": jnp.float32(config.kl_coef), "value_norm": value_norm.initial()},
    )
