"""From an experiment to what can be planned and built: shapes, tokenizer, data, and the stages with their graphs.

Everything that can be wrong with an experiment is found here, before any compile starts.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from real_jax.algorithms import ppo, preference, sft
from real_jax.algorithms.algorithm import Algorithm
from real_jax.data import reviews
from real_jax.data.corpus import Corpus, load_corpus
from real_jax.models.load import load_arch
from real_jax.models.tokenizer import Tokenizer
from real_jax.runtime.build import Build
from real_jax.runtime.calls import ModelProgramConfig
from real_jax.runtime.optimizer import make_optimizer
from real_jax.spec.arch import ARCHS, Arch, parameter_count
from real_jax.spec.dataflow import Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import (
    CheckpointConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    check_experiment,
    workload,
)
from real_jax.spec.plan import Placement, Workload

STAGES = ("sft", "preference", "ppo")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run that walks one graph again and again: what it computes, on what, how often."""

    name: str
    algorithm: Algorithm
    work: Workload
    steps: int

    @property
    def graph(self) -> Graph:
        return self.algorithm.graph


def model_archs(e: Experiment) -> dict[str, Arch]:
    """Shape of each model of PPO, in the order actor, reference, critic, reward. Reads files' headers only."""

    def shape(config: ModelConfig, otherwise: Arch | None) -> Arch:
        if config.path:
            return load_arch(config.path)
        return ARCHS[config.arch] if config.arch else otherwise

    actor = shape(e.actor, None)
    reward = {} if e.reward.function else {"reward": shape(e.reward.model, actor)}
    critic = shape(e.critic, reward.get("reward", actor))
    archs = {"actor": actor, "reference": actor, "critic": critic, **reward}
    length = e.data.prompt_length + e.generation.response_length
    for model, arch in archs.items():
        if length > arch.context:
            raise UsageError(
                f"data.prompt_length + generation.response_length is {e.data.prompt_length} + "
                f"{e.generation.response_length} = {length}, but the {model} accepts {arch.context} tokens. Lower one of them."
            )
        if arch.vocab != actor.vocab:
            raise UsageError(
                f"The {model} has a vocabulary of {arch.vocab}, the actor of {actor.vocab}. All models must share one."
            )
    return archs


def make_stages(e: Experiment, archs: Mapping[str, Arch]) -> list[Stage]:
    """The stages that `e` runs, in their order."""
    e = check_experiment(e)
    stages = []
    if e.sft.steps:
        stages.append(Stage("sft", sft.algorithm(), workload(e, "sft", {"actor": archs["actor"]}), e.sft.steps))
    if e.preference.steps and not e.reward.function:
        work = workload(e, "preference", {"reward": archs["reward"]})
        stages.append(Stage("preference", preference.algorithm(), work, e.preference.steps))
    stages.append(Stage("ppo", ppo.algorithm(e.ppo, bool(e.reward.function)), workload(e, "ppo", dict(archs)), e.steps))
    return stages


def load_tokenizer(e: Experiment) -> Tokenizer:
    """The actor's tokenizer, or the built-in task's words where the actor has random weights."""
    if e.actor.path:
        return Tokenizer.load(e.actor.path)
    if e.data.task == "reviews" and not e.data.prompts:
        return Tokenizer.words(reviews.WORDS)
    raise UsageError("data.prompts needs a tokenizer. Set actor.path to a model that has one.")


def load_data(e: Experiment, tokenizer: Tokenizer, archs: Mapping[str, Arch]) -> Corpus:
    """The experiment's data, checked against the actor's vocabulary."""
    vocab = archs["actor"].vocab
    if tokenizer.vocab_size > vocab:
        raise UsageError(f"The tokenizer has {tokenizer.vocab_size} ids, but the actor's vocabulary only {vocab}.")
    return load_corpus(e, tokenizer, vocab, tokenizer.pad_id)


def _optimizers(e: Experiment, stage: str) -> dict[str, OptimizerConfig]:
    if stage == "ppo":
        return {"actor": e.actor_optimizer, "critic": e.critic_optimizer}
    return {"actor" if stage == "sft" else "reward": getattr(e, stage).optimizer}


def make_build(e: Experiment, stage: Stage, end_token: int, pad_token: int) -> Build:
    """What the programs of `stage` are compiled from."""
    work = stage.work
    dtype = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[e.compute_type]
    temperature = e.generation.temperature if stage.name == "ppo" else 1.0
    models = {m: ModelProgramConfig(a, work.heads[m], dtype, temperature) for m, a in work.archs.items()}

    def ints(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = work.batch
    inputs = {
        "sft": {"tokens": ints(batch, work.length), "prompt_lengths": ints(batch), "lengths": ints(batch)},
        "preference": {"tokens": ints(batch, 2, work.length), "lengths": ints(batch, 2)},
        "ppo": {
            "prompt_tokens": ints(batch, work.prompt_length),
            "prompt_lengths": ints(batch),
            "row_ids": ints(batch, dtype=jnp.uint32),
        },
    }[stage.name]
    return Build(
        algorithm=stage.algorithm,
        models=models,
        inputs=inputs,
        optimizers={m: make_optimizer(o) for m, o in _optimizers(e, stage.name).items()},
        minibatches=work.minibatches,
        host_writes={"scores": ints(batch, dtype=jnp.float32)} if e.reward.function else {},
        generation=e.generation,
        seed=e.seed,
        end_token=end_token,
        pad_token=pad_token,
    )


def program_key(e: Experiment, stage: str, call: str, placement: Placement, tokens: tuple[int, int]) -> tuple:
    """Equal where two compiled programs would be: everything of the experiment that a program may depend on is in it.
    `tokens` are the ids of the end token and of padding."""
    free = dataclasses.replace(e, name="", steps=1, evaluate_every=0, checkpoint=CheckpointConfig())
    return free, stage, call, placement, tokens


def model_counts(archs: Mapping[str, Arch]) -> dict[str, int]:
    """Parameters of each model."""
    return {m: parameter_count(a, "lm" if m in ("actor", "reference") else "scalar") for m, a in archs.items()}
