"""Finding a plan, from Python and from the command line."""

import dataclasses
from pathlib import Path

import pytest

import real_jax as real
from real_jax import costing, planning, search
from real_jax.cost import targets
from real_jax.runtime.metrics import TIMINGS
from real_jax.spec.experiment import DataConfig, GenerationConfig, PPOConfig
from real_jax.spec.files import load_cluster, load_plan, save_cluster

EXPERIMENT = real.Experiment(
    steps=2,
    batch=16,
    data=DataConfig(prompt_length=9, held_out_size=16),
    generation=GenerationConfig(response_length=14),
    ppo=PPOConfig(minibatches=2),
)
CONFIGS = Path(__file__).parents[2] / "tpu_gpu_configs"


@pytest.fixture(scope="module")
def found():
    return real.search_plan(EXPERIMENT, timed=1)


class Heard(costing.Listener):
    def __init__(self):
        self.notes, self.done = [], []

    def note(self, text):
        self.notes.append(text)

    def progress(self, what, done, total, item):
        self.done.append((what, done, total))


def rows(trainer):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in trainer.metrics]


def test_the_plan_measured_no_slower_than_the_symmetric_heuristic(found):
    timed = [c for c in found.candidates if c.measured is not None]
    symmetric = next(c for c in timed if "symmetric" in c.origin)
    chosen = min(timed, key=lambda c: c.measured)
    assert len(timed) >= 2 and found.plan.placements == chosen.plan.placements
    assert chosen.measured <= symmetric.measured
    assert {"heuristic:megatron", "heuristic:colocated-fsdp"} <= {c.origin for c in found.candidates}


def test_the_same_search_again_is_remembered(found):
    heard = Heard()
    again = real.search_plan(EXPERIMENT, timed=1, listener=heard)
    assert again.plan == found.plan and heard.notes == ["plan found by an earlier search"]
    assert again.lower_bounds == found.lower_bounds and again.compiler == found.compiler
    assert [c.measured for c in again.candidates] == [c.measured for c in found.candidates]


def test_programs_left_by_the_search_give_the_same_run_as_fresh_ones(found):
    """They are compiled for this experiment: its end token, its optimizers, its seed."""
    programs = dict(found.programs)
    assert programs
    reused = real.Trainer(EXPERIMENT, found.plan, programs=programs).fit()
    assert len(programs) == len(found.programs)  # nothing was compiled for it
    fresh = real.Trainer(EXPERIMENT, found.plan).fit()
    assert rows(reused) == rows(fresh) and len(rows(fresh)) == 2
    assert reused.after.responses == fresh.after.responses


def test_programs_of_another_experiment_are_not_taken(found):
    other = dataclasses.replace(EXPERIMENT, generation=GenerationConfig(response_length=14, temperature=0.5))
    programs = dict(found.programs)
    trainer = real.Trainer(other, found.plan, programs=programs)
    trainer.fit(1)
    assert len(programs) == len(found.programs) + 6


def test_a_found_plan_shows_itself(found):
    html = found._repr_html_()
    assert "actor_generate" in html and "symmetric" in html
    assert set(found.predicted()) >= {"actor_generate", "actor_train", "critic_train"}
    assert len(found.figure().axes) == 1


def test_named_heuristics_make_plans(found):
    plan = planning.heuristic_plan(EXPERIMENT, "megatron").plan
    assert {(p.data, p.fsdp, p.tensor) for p in plan.placements.values()} == {(1, 1, 8)}


def test_the_command_plans_for_another_cluster_and_names_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "_installed", lambda module: False)  # the CPU's partitioner is the quickest compiler
    pair = dataclasses.replace(load_cluster(CONFIGS / "h100-1x8.yaml"), name="h100-1x2", devices_per_node=2)
    save_cluster(pair, "pair.yaml")
    arguments = ["--cluster", "pair.yaml", "--out", "plan.yaml"]
    small = ["--batch", "16", "--sft.steps", "0", "--preference.steps", "0"]
    assert search.main([*arguments, *small]) == 0
    shown = capsys.readouterr().out
    assert "plan.yaml, plan.png" in shown and "h100" in shown and "actor_train" in shown
    assert "virtual devices, in place of the cluster's own" in " ".join(shown.split())
    assert "tokens/s" in shown and "device time" in shown and "heuristic:megatron" in shown
    assert "above the optimum" in shown or "proven optimal" in shown
    plan = load_plan("plan.yaml")
    assert set(plan.placements) == {
        "actor_generate", "reward_inference", "reference_inference", "critic_inference", "actor_train", "critic_train",
    }  # fmt: skip
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_runs_with_few_layers_sharpen_a_prediction(found):
    heard = Heard()
    sharper = planning.given_plan(EXPERIMENT, found.plan, layered=True, listener=heard)
    sources = {sharper.costs["ppo"][call, p].source for call, p in sharper.of(sharper.stage()).placements.items()}
    assert sources <= {"measured", "layers"}  # those that the search has timed are known already


@pytest.mark.parametrize(
    "more, words",
    [
        (["--config", "ppo-llama-70b"], ["1,539 GiB", "are short", "32 devices (4 nodes)"]),
        (["--out", "."], ["--out is '.'", "Give the path of a file"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(more, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert search.main(["--cluster", str(CONFIGS / "h100-1x8.yaml"), *more]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not list(tmp_path.iterdir())
