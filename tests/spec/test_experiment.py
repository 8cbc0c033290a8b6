"""Values that cannot work are refused by name, and a stage's workload."""

import dataclasses

import pytest

from real_jax.spec.arch import ARCHS
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import Experiment, check_experiment, workload


def changed(path, value):
    def replace(spec, names):
        inner = replace(getattr(spec, names[0]), names[1:]) if len(names) > 1 else value
        return dataclasses.replace(spec, **{names[0]: inner})

    return replace(Experiment(), path.split("."))


def test_the_default_passes():
    assert check_experiment(Experiment()) == Experiment()


@pytest.mark.parametrize(
    ("path", "value", "remedy"),
    [
        ("steps", 0, "at least 1"),
        ("batch", -4, "at least 1"),
        ("data.prompt_length", 0, "at least 1 token"),
        ("generation.response_length", 0, "at least 1 token"),
        ("generation.min_length", 17, r"between 0 and generation.response_length \(16\)"),
        ("generation.min_length", -1, "between 0 and"),
        ("generation.temperature", 0.0, "positive; set generation.greedy"),
        ("generation.temperature", float("nan"), "positive"),
        ("generation.top_k", -1, "0 .keep all. or more"),
        ("generation.top_p", 0.0, r"in \(0, 1\]"),
        ("generation.top_p", 1.5, r"in \(0, 1\]"),
        ("ppo.minibatches", 0, "at least 1"),
        ("ppo.minibatches", 7, r"divide batch \(64\)"),
        ("ppo.gamma", 1.01, r"in \[0, 1\]"),
        ("ppo.gae_lambda", -0.1, r"in \[0, 1\]"),
        ("ppo.reference_eta", 1.5, r"in \[0, 1\]"),
        ("ppo.ratio_clip", 0.0, "positive"),
        ("ppo.value_clip", -0.2, "positive"),
        ("ppo.reward_clip", 0.0, "positive"),
        ("ppo.max_ratio", 0.0, "positive"),
        ("ppo.kl_target", 0.0, "positive"),
        ("ppo.kl_horizon", 0.0, "positive"),
        ("ppo.value_norm_beta", 1.0, r"in \[0, 1\)"),
        ("actor.arch", "", "Give actor.path or actor.arch"),
        ("actor.arch", "llama-8b", "Known shapes: tiny, smollm2-135m"),
        ("critic.arch", "x", "Known shapes"),
        ("reward.model.arch", "x", "Known shapes"),
        ("sft.steps", -1, "leave the stage out"),
        ("preference.batch", 0, "at least 1"),
        ("sft.optimizer.lr", 0.0, "positive"),
        ("actor_optimizer.lr", -1e-5, "positive"),
        ("critic_optimizer.lr", float("nan"), "positive"),
        ("checkpoint.keep", 0, "At least one checkpoint"),
        ("checkpoint.every", -1, "only at the end"),
    ],
)
def test_a_value_that_cannot_work_is_named(path, value, remedy):
    shown = "actor.path" if value == "" else path
    with pytest.raises(UsageError, match=f"^{shown} is {value!r}. .*{remedy}"):
        check_experiment(changed(path, value))


def test_workloads_of_the_stages():
    archs = {m: ARCHS["tiny"] for m in ("actor", "reference", "critic", "reward")}
    e = dataclasses.replace(changed("sft.batch", 48), compute_type="bfloat16")
    work = workload(e, "ppo", archs)
    assert (work.batch, work.rows, work.length, work.compute_bytes) == (64, 1, 32, 2)
    assert work.heads == {"actor": "lm", "reference": "lm", "critic": "scalar", "reward": "scalar"}
    assert {c: work.step_batch(c) for c in ("actor_train", "critic_train", "actor_generate")} == {
        "actor_train": 16, "critic_train": 16, "actor_generate": 64,
    }  # fmt: skip
    work = workload(e, "sft", {"actor": ARCHS["tiny"]})
    assert (work.batch, work.rows, work.step_batch("sft_train")) == (48, 1, 48)
    work = workload(Experiment(), "preference", {"reward": ARCHS["tiny"]})
    assert (work.batch, work.rows, work.heads, work.compute_bytes) == (64, 2, {"reward": "scalar"}, 4)
