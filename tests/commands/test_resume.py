"""A killed run, resumed, ends as if it had never been interrupted; a half-written checkpoint is never taken."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from real_jax.runtime.metrics import TIMINGS

STEPS, STOP = 4, 2


def _write(folder):
    config = {
        "name": "resume",
        "steps": STEPS,
        "batch": 16,
        "actor": {"arch": "tiny"},
        "data": {"prompt_length": 9, "held_out_size": 16},
        "generation": {"response_length": 14},
        "sft": {"steps": 3, "batch": 16, "optimizer": {"lr": 0.001}},
        "preference": {"steps": 2, "batch": 16, "optimizer": {"lr": 0.001}},
        "ppo": {"minibatches": 2, "kl_adaptive": True, "reference_eta": 0.05},
        "actor_optimizer": {"lr": 0.001},
        "critic_optimizer": {"lr": 0.001},
        "checkpoint": {"every": STOP, "keep": 3},
    }
    calls = ("sft_train", "reward_train", "actor_generate", "reward_inference", "reference_inference",
             "critic_inference", "actor_train", "critic_train")  # fmt: skip
    plan = {"calls": {call: {"first": 0, "data": 2} for call in calls}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))


def _start(folder, run_dir, *more):
    command = [sys.executable, "-m", "real_jax.train", "--config", str(folder / "config.yaml"),
               "--plan", str(folder / "plan.yaml"), "--run-dir", str(run_dir), *more]  # fmt: skip
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def _finish(process, folder):
    assert process.wait(timeout=600) == 0, (folder / "log.txt").read_text()[-3000:]


def _rows(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def _arrays(run_dir, step):
    """Every array of PPO's checkpoint `step`, by its path."""
    import jax

    folder = run_dir / "checkpoints" / "ppo" / str(step)
    found = {}
    for item in ("actor", "actor_optimizer", "critic", "critic_optimizer", "reference", "carried"):
        tree = ocp.StandardCheckpointer().restore(folder / item)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    _write(folder)
    straight, killed = folder / "straight", folder / "killed"
    _finish(_start(folder, straight), folder)
    process = _start(folder, killed)
    deadline = time.monotonic() + 600
    while not (killed / "checkpoints" / "ppo" / str(STOP)).exists():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # What a write cut short leaves behind: Orbax writes into a folder of another name and renames it when it is whole.
    (killed / "checkpoints" / "ppo" / "3.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 3, "cut')
    _finish(_start(folder, killed, "--resume"), folder)
    return straight, killed


def test_parameters_and_optimizer_states_are_bit_equal(runs):
    straight, killed = (_arrays(run, STEPS) for run in runs)
    assert straight.keys() == killed.keys() and len(straight) > 60
    for name, value in straight.items():
        np.testing.assert_array_equal(killed[name], value, err_msg=name)


def test_metrics_are_equal(runs):
    straight, killed = map(_rows, runs)
    assert killed == straight
    assert [(r["stage"], r["step"]) for r in straight] == [
        *(("sft", i) for i in range(3)), *(("preference", i) for i in range(2)), *(("ppo", i) for i in range(STEPS)),
    ]  # fmt: skip


def test_the_run_directory_holds_everything(runs):
    straight, _ = runs
    for name in ("config.yaml", "plan.yaml", "cluster.yaml", "metrics.jsonl", "timeline.png"):
        assert (straight / name).stat().st_size > 0
    assert list((straight / "tensorboard").glob("events.*"))
    assert sorted(p.name for p in (straight / "checkpoints" / "ppo").iterdir()) == ["2", "4"]


def test_a_finished_run_refuses_another_configuration_and_a_second_start(runs, capsys):
    from real_jax import train

    straight, _ = runs
    config = str(straight / "config.yaml")
    assert train.main(["--config", config, "--run-dir", str(straight), "--plan", str(straight / "plan.yaml")]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert train.main(["--config", config, "--run-dir", str(straight), "--resume", "--seed", "7"]) == 2
    assert "has seed = 0, but now it is 7" in capsys.readouterr().err
    assert len(_rows(straight)) == 9


def test_compiles_are_counted_and_end_after_the_first_iterations(runs):
    straight, _ = runs
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["compiles"] >= 0
    assert [row["compiles"] for row in rows if row["stage"] == "ppo"][1] == 0
