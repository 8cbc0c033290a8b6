"""Jobs on a real SLURM cluster of two nodes on this machine: they end, they stop and go on, and they notice a dead process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
MISSING = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(tool)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmctld and slurmd must be started as root"),
]

PLAN = """
origin: by hand
cluster: two nodes
calls:
  sft_train: {first: 0, fsdp: 2}
  reward_train: {first: 0, fsdp: 2}
  actor_generate: {first: 0, data: 2}
  reward_inference: {first: 2, data: 2}
  reference_inference: {first: 0, data: 4}
  critic_inference: {first: 2, tensor: 2}
  actor_train: {first: 0, fsdp: 4}
  critic_train: {first: 2, fsdp: 2}
"""
STEPS = 4


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    script = str(HERE / "two_nodes.sh")
    started = subprocess.run([script, "start", str(folder)], capture_output=True, text=True, check=False, timeout=60)
    if started.returncode:
        pytest.fail(f"the cluster did not start: {started.stderr}")
    yield os.environ | {"SLURM_CONF": started.stdout.strip()}
    subprocess.run([script, "stop", str(folder)], check=False)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "plan.yaml").write_text(PLAN)
    return folder


def submit(environment, work: Path, name: str, *more: str) -> str:
    """Launches a short training as job `name`, or the same again; returns its number."""
    options = [*f"--nodes 2 --gpus-per-node 0 --time 20 --job-name {name} --log {name}-%j.log".split(), *more]
    options += ["--setup", f"export PATH={Path(sys.executable).parent}:$PATH JAX_PLATFORMS=cpu"]
    options += ["--env", f"REAL_JAX_CACHE={work / 'cache'}"]
    train = "--cpu-devices 2 --plan plan.yaml --batch 16 --sft.steps 2 --sft.batch 16 --preference.steps 2"
    train += f" --preference.batch 16 --steps {STEPS} --checkpoint.every 1 --run-dir {name}"
    command = [sys.executable, "-m", "real_jax.launch", "slurm", *options, "--", *train.split()]
    said = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stderr
    assert f"tail -F {name}-" in said.stdout
    return said.stdout.split("job ")[1].split(".")[0]


def state(environment, job: str) -> dict[str, str]:
    shown = subprocess.run(
        ["scontrol", "show", "job", job], env=environment, capture_output=True, text=True, check=True
    )
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)


def wait(environment, job: str, seconds: float = 400) -> dict[str, str]:
    until = time.monotonic() + seconds
    while (now := state(environment, job))["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < until, f"job {job} still {now['JobState']}"
        time.sleep(0.5)
    return now


def rows(work: Path, name: str) -> list[dict]:
    path = work / name / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in found if row["stage"] == "ppo"]


def wait_for_rows(environment, work: Path, name: str, job: str, count: int) -> None:
    while len(rows(work, name)) < count:
        assert state(environment, job)["JobState"] in ("PENDING", "RUNNING"), log(work, name)
        time.sleep(0.5)


def log(work: Path, name: str) -> str:
    return "\n".join(path.read_text() for path in sorted(work.glob(f"{name}-*.log")))[-6000:]


def numbers(row: dict) -> dict[str, float]:
    return {k: v for k, v in row.items() if "/" in k}


@pytest.fixture(scope="module")
def undisturbed(slurm, work):
    job = submit(slurm, work, "whole", "--no-requeue")
    ended = wait(slurm, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log(work, "whole")
    return rows(work, "whole")


def test_a_job_over_two_nodes_ends_well(undisturbed, work):
    assert [row["step"] for row in undisturbed] == list(range(STEPS))
    assert (work / "whole" / "actor" / "model.safetensors").exists()
    assert log(work, "whole").count("Held-out reward") == 1  # one process speaks
    assert "[Gloo]" not in log(work, "whole")


def test_a_job_told_to_end_goes_on_where_it_was(undisturbed, slurm, work):
    job = submit(slurm, work, "halves", "--no-requeue")
    wait_for_rows(slurm, work, "halves", job, 1)
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True)
    assert wait(slurm, job)["JobState"] == "FAILED"
    assert "SIGTERM" in (work / "halves" / "stopped").read_text()
    done = len(rows(work, "halves"))
    assert 1 <= done < STEPS and (work / "halves" / "checkpoints" / "ppo" / str(done)).is_dir()
    again = submit(slurm, work, "halves", "--no-requeue")
    assert wait(slurm, again)["JobState"] == "COMPLETED", log(work, "halves")
    same_as(undisturbed, work, "halves")


def same_as(undisturbed, work: Path, name: str) -> None:
    assert not (work / name / "stopped").exists()
    for whole, mine in zip(undisturbed, rows(work, name), strict=True):
        for key, value in numbers(whole).items():
            np.testing.assert_allclose(numbers(mine)[key], value, atol=1e-5, err_msg=key)


def test_a_job_told_that_its_time_is_up_goes_back_into_the_queue_and_on_by_itself(undisturbed, slurm, work):
    job = submit(slurm, work, "requeued")
    wait_for_rows(slurm, work, "requeued", job, 1)
    subprocess.run(["scancel", "--signal=USR1", job], env=slurm, check=True)
    ended = wait(slurm, job)
    assert ended["JobState"] == "COMPLETED", log(work, "requeued")
    assert ended["Restarts"] == "1"
    same_as(undisturbed, work, "requeued")


def test_a_killed_process_ends_the_job(slurm, work):
    job = submit(slurm, work, "killed", "--no-requeue")
    wait_for_rows(slurm, work, "killed", job, 1)
    os.kill(process_of(rank=1, run_dir="killed"), signal.SIGKILL)
    began = time.monotonic()
    assert wait(slurm, job, 60)["JobState"] == "FAILED"
    assert time.monotonic() - began < 60
    assert "task 1: Killed" in log(work, "killed")


def process_of(rank: int, run_dir: str) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            environment = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "real_jax.train" in words and run_dir in words and f"SLURM_PROCID={rank}" in environment:
            return int(folder.name)
    raise AssertionError("no such process")
