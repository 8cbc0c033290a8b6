"""What to train, on what and how: the configuration that a YAML file or the command line fills in."""

import dataclasses
from typing import Literal

from real_jax.spec.arch import ARCHS, Arch, Head
from real_jax.spec.errors import UsageError
from real_jax.spec.plan import Workload


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model: weights from `path`, or random weights of a named shape.

    Attributes:
      path: a Hugging Face folder, a GGUF file, or `package:NAME` for a GGUF file inside an installed Python package.
      arch: a name from `real_jax.spec.arch.ARCHS`, for random weights. Where both are empty, a critic starts from the
        reward model (or the actor, where there is none) and a reward model from the actor.
    """

    path: str = ""
    arch: str = ""


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Where scores come from: a reward model trained on preference pairs, or a Python function.

    Attributes:
      function: `module:function` taking (prompts, responses) as lists of text and returning one float each; empty for
        a reward model.
      model: the reward model, where there is no function.
    """

    function: str = ""
    model: ModelConfig = ModelConfig()


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts, answers and preference pairs.

    Attributes:
      task: the built-in task, used where no file is given.
      prompts: JSONL of {id, prompt}.
      answers: JSONL of {id, prompt, answer}, for supervised fine-tuning.
      pairs: JSONL of {id, prompt, pos_answers, neg_answers}, for the reward model.
      held_out: JSONL of {id, prompt}, for evaluation; empty: the last `held_out_size` prompts are kept back.
      prompt_length: longest prompt, in tokens (P). A longer one is an error unless `drop_long` is set.
      chat: whether the tokenizer's chat template is put around prompts.
    """

    task: Literal["reviews", ""] = "reviews"
    prompts: str = ""
    answers: str = ""
    pairs: str = ""
    held_out: str = ""
    held_out_size: int = 64
    prompt_length: int = 16
    drop_long: bool = False
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How responses are sampled.

    Attributes:
      response_length: most tokens of a response (R).
      min_length: tokens before the end token may be sampled.
      temperature: logits are divided by it, here and wherever log-probabilities are taken.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
      greedy: take the likeliest token.
    """

    response_length: int = 16
    min_length: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then constant. Defaults after ReaL's code; `lr` is set by each preset."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class WarmupStage:
    """Supervised fine-tuning or reward-model training before PPO: optimizer steps (0 leaves it out) and batch."""

    steps: int = 0
    batch: int = 64
    optimizer: OptimizerConfig = OptimizerConfig()


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """PPO, with the defaults of ReaL (arXiv 2406.14088) and its code.

    Attributes:
      minibatches: optimizer steps per iteration.
      kl_coef: weight of the per-token KL penalty in the reward.
      kl_adaptive: whether `kl_coef` follows `kl_target` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).
      kl_target, kl_horizon: target KL per sequence, and sequences over which the coefficient may change e-fold.
      gamma, gae_lambda: discount, and the weight of generalized advantage estimation (arXiv 1506.02438).
      ratio_clip, value_clip: PPO's epsilon (arXiv 1707.06347, equation 7), and the same for values.
      reward_bias, reward_scale, reward_clip: score = clip((raw - bias) x scale, -clip, clip).
      normalize_advantages: whiten advantages over the valid tokens of the batch.
      value_norm: running normalization of returns: "exponential", "average" (plain moving average), or "none".
      value_norm_beta: decay of the exponential kind.
      score_needs_end: give the score only to responses that reached the end token.
      max_ratio: a minibatch whose mean importance ratio passes it is skipped.
      reference_eta: after each iteration the reference becomes eta x actor + (1 - eta) x reference; 0 keeps it as it was.
    """

    minibatches: int = 4
    kl_coef: float = 0.1
    kl_adaptive: bool = False
    kl_target: float = 6.0
    kl_horizon: float = 10000.0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    ratio_clip: float = 0.2
    value_clip: float = 0.2
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float = 20.0
    normalize_advantages: bool = True
    value_norm: Literal["exponential", "average", "none"] = "exponential"
    value_norm_beta: float = 0.99995
    score_needs_end: bool = False
    max_ratio: float = 5.0
    reference_eta: float = 0.0


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written (`every` iterations; 0: only at the end of each stage) and how many are kept."""

    every: int = 10
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run: the models, the data, the stages and their options.

    Attributes:
      steps: PPO iterations.
      batch: prompts per iteration (B).
      compute_type: type of activations and of the weights of calls that do not train; trained weights stay float32.
      evaluate_every: iterations between evaluations on held-out prompts; 0: only before and after.
    """

    name: str = "ppo-reviews"
    seed: int = 0
    steps: int = 30
    batch: int = 64
    compute_type: Literal["float32", "bfloat16"] = "float32"
    evaluate_every: int = 0
    actor: ModelConfig = ModelConfig(arch="tiny")
    critic: ModelConfig = ModelConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    generation: GenerationConfig = GenerationConfig()
    sft: WarmupStage = WarmupStage()
    preference: WarmupStage = WarmupStage()
    ppo: PPOConfig = PPOConfig()
    actor_optimizer: OptimizerConfig = OptimizerConfig()
    critic_optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def check_experiment(e: Experiment) -> Experiment:
    """Returns `e`, or raises UsageError naming the first field whose value cannot work."""

    def need(ok: bool, field: str, value, remedy: str) -> None:
        if not ok:
            raise UsageError(f"{field} is {value!r}. {remedy}")

    g, p = e.generation, e.ppo
    for field in ("steps", "batch"):
        need(getattr(e, field) >= 1, field, getattr(e, field), "It must be at least 1.")
    need(e.data.prompt_length >= 1, "data.prompt_length", e.data.prompt_length, "It must be at least 1 token.")
    need(g.response_length >= 1, "generation.response_length", g.response_length, "It must be at least 1 token.")
    need(
        0 <= g.min_length <= g.response_length, "generation.min_length", g.min_length,
        f"It must lie between 0 and generation.response_length ({g.response_length}).",
    )  # fmt: skip
    need(
        g.temperature > 0,
        "generation.temperature",
        g.temperature,
        "It must be positive; set generation.greedy for the likeliest token.",
    )
    need(g.top_k >= 0, "generation.top_k", g.top_k, "It must be 0 (keep all) or more.")
    need(0 < g.top_p <= 1, "generation.top_p", g.top_p, "It must lie in (0, 1].")
    need(p.minibatches >= 1, "ppo.minibatches", p.minibatches, "It must be at least 1.")
    need(e.batch % p.minibatches == 0, "ppo.minibatches", p.minibatches, f"It must divide batch ({e.batch}).")
    need(p.kl_coef >= 0, "ppo.kl_coef", p.kl_coef, "It must be 0 (no penalty) or more.")
    need(0 <= p.gamma <= 1, "ppo.gamma", p.gamma, "It must lie in [0, 1].")
    need(0 <= p.gae_lambda <= 1, "ppo.gae_lambda", p.gae_lambda, "It must lie in [0, 1].")
    need(
        0 <= p.reference_eta <= 1, "ppo.reference_eta", p.reference_eta, "It must lie in [0, 1]; 0 keeps the reference."
    )
    need(0 <= p.value_norm_beta < 1, "ppo.value_norm_beta", p.value_norm_beta, "It must lie in [0, 1).")
    for field in ("ratio_clip", "value_clip", "reward_clip", "max_ratio", "kl_target", "kl_horizon"):
        need(getattr(p, field) > 0, f"ppo.{field}", getattr(p, field), "It must be positive.")
    need(bool(e.actor.path or e.actor.arch), "actor.path", e.actor.path, "Give actor.path or actor.arch.")
    for name, config in (("actor", e.actor), ("critic", e.critic), ("reward.model", e.reward.model)):
        need(config.arch in ("", *ARCHS), f"{name}.arch", config.arch, f"Known shapes: {', '.join(ARCHS)}.")
    for name in ("sft", "preference"):
        stage: WarmupStage = getattr(e, name)
        need(stage.steps >= 0, f"{name}.steps", stage.steps, "It must be 0 (leave the stage out) or more.")
        need(stage.batch >= 1, f"{name}.batch", stage.batch, "It must be at least 1.")
        need(stage.optimizer.lr > 0, f"{name}.optimizer.lr", stage.optimizer.lr, "It must be positive.")
    need(e.actor_optimizer.lr > 0, "actor_optimizer.lr", e.actor_optimizer.lr, "It must be positive.")
    need(e.critic_optimizer.lr > 0, "critic_optimizer.lr", e.critic_optimizer.lr, "It must be positive.")
    need(e.checkpoint.keep >= 1, "checkpoint.keep", e.checkpoint.keep, "At least one checkpoint must be kept.")
    need(e.checkpoint.every >= 0, "checkpoint.every", e.checkpoint.every, "It must be 0 (only at the end) or more.")
    return e


def workload(e: Experiment, stage: str, archs: dict[str, Arch]) -> Workload:
    """The workload of a stage ("sft", "preference" or "ppo") on models of the given shapes."""
    if stage == "ppo":
        batch, rows = e.batch, 1
        minibatches = {"actor_train": e.ppo.minibatches, "critic_train": e.ppo.minibatches}
    else:
        batch, minibatches, rows = getattr(e, stage).batch, {}, 2 if stage == "preference" else 1
    heads: dict[str, Head] = {m: "lm" if m in ("actor", "reference") else "scalar" for m in archs}
    return Workload(
        archs=archs,
        heads=heads,
        batch=batch,
        prompt_length=e.data.prompt_length,
        response_length=e.generation.response_length,
        minibatches=minibatches,
        rows=rows,
        compute_bytes={"float32": 4, "bfloat16": 2}[e.compute_type],
    )
