"""Rows of metrics: what they hold, how they are kept, and what a resumed run keeps of them."""

import errno
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from real_jax.runtime.engine import Result
from real_jax.runtime.metrics import TIMINGS, CompileCounter, MetricsLog, flatten, median_seconds
from real_jax.spec.errors import RunError
from real_jax.spec.timeline import Event


def result():
    metrics = {
        "critic_train": {"loss": np.asarray([4.0, 2.0], np.float32)},
        "actor_train": {"importance_ratio": np.asarray([1.0, 1.5], np.float32), "kl": np.float32(0.25)},
    }
    events = [
        Event("actor_generate", "call", 3, (0,), 0.5, 1.75),
        Event("actor to actor_generate", "reallocation", 3, (0, 1), 0.0, 0.5),
    ]
    return Result(3, {}, metrics, events, 2.0)


MOVES = {
    "actor to actor_generate": {"bytes_within_node": 48, "bytes_between_nodes": 16, "predicted_seconds": 0.25},
    "critic to critic_inference": {"bytes_within_node": 1, "bytes_between_nodes": 0},  # not made in this iteration
}


def test_flatten():
    row = flatten("ppo", 3, result(), 300, MOVES)
    assert row == {
        "stage": "ppo", "step": 3,
        "actor_train/importance_ratio": 1.25, "actor_train/first_importance_ratio": 1.0, "actor_train/kl": 0.25,
        "critic_train/loss": 3.0,
        "seconds": {"actor_generate": 1.25, "actor to actor_generate": 0.5},
        "reallocations": {"actor to actor_generate": MOVES["actor to actor_generate"]},
        "iteration_seconds": 2.0, "tokens_per_second": 150.0,
    }  # fmt: skip
    assert {"seconds", "iteration_seconds", "tokens_per_second"} <= set(TIMINGS)
    assert json.loads(json.dumps(row)) == row


def test_compiles_are_counted():
    counter = CompileCounter()
    program = jax.jit(lambda x: x * 1.0625)
    program(np.float32(1))
    assert counter.since() == 1
    program(np.float32(2))
    assert counter.since() == 0
    program(np.ones(3, np.float32))
    assert counter.since() == 1


def test_rows_are_lines_of_json_and_tensorboard_events(tmp_path):
    log = MetricsLog(tmp_path)
    rows = [flatten("ppo", step, result(), 300, {}) for step in range(3)]
    for row in rows:
        log.add(row)
    log.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows == log.rows
    boards = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(boards) == 1
    written = boards[0].read_bytes()
    for name in (b"ppo/actor_train/kl", b"ppo/seconds/actor_generate", b"ppo/tokens_per_second"):
        assert name in written


def test_without_a_folder_rows_are_only_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = MetricsLog(None)
    log.add(flatten("ppo", 0, result(), 1, {}))
    log.keep_until({"ppo": 0}, ("ppo",))
    log.close()
    assert len(log.rows) == 1 and not list(tmp_path.iterdir())


def test_resume_keeps_the_rows_that_the_checkpoints_hold(tmp_path):
    """SFT is done (2 iterations), of PPO 1 of 3 is in a checkpoint; the run was killed in the middle of a line."""
    rows = [{"stage": stage, "step": i} for stage in ("sft", "ppo") for i in range(3 if stage == "ppo" else 2)]
    text = "".join(json.dumps(row) + "\n" for row in reversed(rows)) + '{"stage": "ppo", "st'
    (tmp_path / "metrics.jsonl").write_text(text)
    log = MetricsLog(tmp_path)
    log.keep_until({"sft": 2, "ppo": 1}, ("sft", "preference", "ppo"))
    assert [(r["stage"], r["step"]) for r in log.rows] == [("sft", 1), ("sft", 0), ("ppo", 0)]
    log.add({"stage": "ppo", "step": 1, "seconds": {}})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 0, 0, 1]
    assert not list(tmp_path.glob("*.tmp"))
    log.close()


def test_resume_without_any_rows(tmp_path):
    log = MetricsLog(tmp_path)
    log.keep_until({"ppo": 1}, ("ppo",))
    assert log.rows == []


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, RunError), (errno.EIO, OSError)])
def test_a_full_disk_is_said_so(tmp_path, monkeypatch, number, raised):
    def fail(*_, **__):
        raise OSError(number, "no")

    log = MetricsLog(tmp_path)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(raised, match="No space left to write .*metrics.jsonl" if raised is RunError else "no"):
        log.add({"stage": "ppo", "step": 0, "seconds": {}})


def test_median_seconds_leaves_the_first_iteration_out():
    rows = [{"stage": "ppo", "seconds": {"a": s, "b": 1.0}} for s in (100.0, 1.0, 3.0, 8.0)]
    rows += [{"stage": "ppo", "seconds": {"a": 3.0, "late": 5.0}}, {"stage": "sft", "seconds": {"a": 50.0}}]
    assert median_seconds(rows, "ppo") == {"a": 3.0, "b": 1.0, "late": 5.0}
    assert median_seconds(rows, "sft") == {"a": 50.0}
    assert median_seconds(rows, "other") == {}
