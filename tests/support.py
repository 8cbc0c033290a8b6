"""A PPO on a model of a few thousand weights, for tests of the runtime."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from real_jax.algorithms import ppo
from real_jax.cost import targets
from real_jax.cost.targets import Target
from real_jax.models.transformer import initialize
from real_jax.runtime.build import Build, compile_programs
from real_jax.runtime.calls import ModelProgramConfig
from real_jax.runtime.engine import Engine
from real_jax.runtime.optimizer import make_optimizer
from real_jax.runtime.weights import WeightStore
from real_jax.spec.arch import Arch, weights
from real_jax.spec.experiment import GenerationConfig, OptimizerConfig, PPOConfig
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement

ARCH = Arch(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab=40, context=64)
BATCH, PROMPT, RESPONSE, END, PAD = 16, 6, 8, 2, 2
CALLS = ("actor_generate", "reward_inference", "reference_inference", "critic_inference", "actor_train", "critic_train")


def here() -> Target:
    """The compiler of this machine's eight virtual devices."""
    return targets.choose(
        Cluster("cpu-8", "cpu", 1, 8, Chip("cpu", 1.0, 0.1, 10.0), *[Link(1.0, 100.0)] * 3), here=True
    )


def same(placement: Placement) -> ExecutionPlan:
    return ExecutionPlan("cpu-8", {call: placement for call in CALLS})


PLANS = {
    "one device": same(Placement()),
    "data": same(Placement(data=8)),
    "tensor": same(Placement(tensor=4, data=2)),
    "fsdp": same(Placement(fsdp=8)),
    "disjoint": ExecutionPlan(
        "cpu-8",
        {
            "actor_generate": Placement(data=8),
            "reward_inference": Placement(0, data=2, micro_batches=2),
            "reference_inference": Placement(2, tensor=2, micro_batches=4),
            "critic_inference": Placement(4, data=2, tensor=2),
            "actor_train": Placement(0, fsdp=2, tensor=2, micro_batches=2, remat=True),
            "critic_train": Placement(4, data=2, fsdp=2, micro_batches=2),
        },
    ),
    "offload": ExecutionPlan(
        "cpu-8",
        {
            **same(Placement(data=2, tensor=2)).placements,
            "reference_inference": Placement(4, data=4, offload=True),
            "actor_generate": Placement(0, data=2, fsdp=2, tensor=2, micro_batches=2),
        },
    ),
}


def make_build(
    config: PPOConfig | None = None,
    generation: GenerationConfig | None = None,
    *,
    compute_type=jnp.float32,
    prompt: int = PROMPT,
    batch: int = BATCH,
) -> Build:
    config = config or PPOConfig(minibatches=2, kl_adaptive=True)
    generation = generation or GenerationConfig(response_length=RESPONSE)
    algorithm = ppo.algorithm(config)
    heads = {"actor": "lm", "reference": "lm", "critic": "scalar", "reward": "scalar"}
    models = {
        m: ModelProgramConfig(ARCH, heads[m], compute_type, generation.temperature) for m in algorithm.graph.models
    }
    optimizer = make_optimizer(OptimizerConfig(lr=1e-3))
    return Build(
        algorithm=algorithm,
        models=models,
        inputs={
            "prompt_tokens": jax.ShapeDtypeStruct((batch, prompt), jnp.int32),
            "prompt_lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
            "row_ids": jax.ShapeDtypeStruct((batch,), jnp.uint32),
        },
        optimizers={"actor": optimizer, "critic": optimizer},
        minibatches={"actor_train": config.minibatches, "critic_train": config.minibatches},
        generation=generation,
        end_token=END,
        pad_token=PAD,
    )


def initial_params(build: Build) -> dict:
    seeds = {"actor": 1, "reference": 1, "critic": 2, "reward": 3}
    return {
        m: jax.device_get(initialize(weights(c.arch, c.head), jax.random.key(seeds[m])))
        for m, c in build.models.items()
    }


def make_engine(build: Build, plan: ExecutionPlan) -> Engine:
    programs = compile_programs(build, plan)
    store = WeightStore(build.algorithm.graph, programs)
    for model, params in initial_params(build).items():
        store.put(model, params)
    return Engine(build.algorithm.graph, programs, store, carried=build.algorithm.initial)


def inputs(iteration: int, prompt: int = PROMPT, batch: int = BATCH) -> dict[str, np.ndarray]:
    """The same prompts whatever the padding: `prompt` columns, of which at most PROMPT hold tokens."""
    random = np.random.default_rng(iteration)
    tokens = np.full((batch, prompt), PAD, np.int32)
    tokens[:, :PROMPT] = random.integers(3, ARCH.vocab, (batch, PROMPT))
    lengths = random.integers(1, PROMPT + 1, batch).astype(np.int32)
    rows = np.arange(batch, dtype=np.uint32) + np.uint32(iteration * batch)
    return {"prompt_tokens": tokens, "prompt_lengths": lengths, "row_ids": rows}


@dataclasses.dataclass
class Record:
    tokens: np.ndarray
    losses: np.ndarray
    metrics: list[dict]
    batches: list[dict]


KEEP = frozenset({"tokens", "lengths", "ended", "log_probs", "reference_log_probs", "values", "scores"})


def run(engine: Engine, iterations: int = 3, prompt: int = PROMPT, batch: int = BATCH) -> Record:
    """Runs PPO iterations, each dispatched before the last has ended; tokens [iterations, B, T] and all losses in order."""
    tokens, losses, metrics, batches = [], [], [], []
    for result in engine.run(range(iterations), lambda i: inputs(i, prompt, batch), KEEP):
        batches.append({k: np.asarray(v) for k, v in result.batch.items() if k in KEEP})
        tokens.append(batches[-1]["tokens"])
        losses += [result.metrics[c]["loss"] for c in ("actor_train", "critic_train")]
        metrics.append(result.metrics)
    return Record(np.stack(tokens), np.concatenate(losses), metrics, batches)
