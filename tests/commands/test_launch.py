"""Launching several processes: what is refused, the batch script, and how a job of this machine ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from real_jax import launch
from real_jax.runtime.joining import Membership, membership
from real_jax.slurm import SlurmOptions, batch_script
from real_jax.spec.errors import RunError, UsageError

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=study
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --partition=large
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --exclusive

source env/bin/activate
module load cuda/13
export WORDS='two words'
run_dir=runs/study-$SLURM_JOB_ID

# Process 0 is on this node, the first of the job. The port is the job's own; should another program have it,
# the next free one is taken.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
port=$((20000 + SLURM_JOB_ID % 20000))
while (: </dev/tcp/127.0.0.1/"$port") 2>/dev/null; do port=$((port + 1)); done
export REAL_JAX_COORDINATOR="$address:$port"

# A job that was requeued goes on from its newest checkpoint.
resume=$([[ -e $run_dir/config.yaml ]] && echo --resume)
srun --kill-on-bad-exit=1 python -m real_jax.train \\
  --config ppo-llama-7b --plan 'my plan.yaml' --run-dir "$run_dir" $resume
status=$?

# The run was told to end and has saved its state: back into the queue.
[[ -e $run_dir/stopped ]] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


def test_the_batch_script():
    options = SlurmOptions(
        nodes=16, time="24:00:00", partition="large", job_name="study", processes_per_node="gpu", modules=("cuda/13",),
        env=("WORDS=two words",), sbatch=("--exclusive",), setup=("source env/bin/activate",),
    )  # fmt: skip
    assert batch_script(options, "ppo", ["--config", "ppo-llama-7b", "--plan", "my plan.yaml"]) == SCRIPT


def test_a_container_and_a_run_directory():
    text = batch_script(SlurmOptions(container="nvcr.io/x:1", requeue=False), "ppo", [], "/data/run 1")
    assert "run_dir='/data/run 1'\n" in text and "scontrol requeue" not in text and "--no-requeue" in text
    assert "srun --kill-on-bad-exit=1 --container-image=nvcr.io/x:1 --container-mounts=" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], ["local", "slurm"]),
        (["cloud"], ["local", "slurm"]),
        (["local", "--processes", "0"], ["--processes is 0", "at least 1"]),
        (["slurm", "--nodes", "0", "--"], ["--nodes is 0", "at least 1"]),
        (["slurm", "--time", "1 day", "--"], ["--time", "'1 day'", "HH:MM:SS"]),
        (["slurm", "--env", "9A=1", "--"], ["--env", "'9A=1'", "NAME=VALUE"]),
        (["slurm", "--sbatch", "exclusive", "--"], ["--sbatch", "'exclusive'"]),
        (["slurm", "--"], ["--plan auto", "--cluster", "tpu_gpu_configs"]),
        (["slurm", "--gpus-per-node", "0", "--", "--resume"], ["--resume", "--run-dir"]),
        (["local", "--", "--config", "no-such"], ["no-such"]),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(argv, words, capsys):
    assert launch.main(argv) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words) and "\n" not in said.strip()


def test_a_machine_without_slurm(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch.main(["slurm", "--gpus-per-node", "0", "--"]) == 2
    assert "sbatch is not on this machine" in capsys.readouterr().err


def test_a_script_of_the_user_is_kept(tmp_path, capsys, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sbatch").write_text("mine")
    argv = ["slurm", "--gpus-per-node", "0", "--script", "job.sbatch", "--"]
    assert launch.main(argv) == 2
    assert "'job.sbatch' exists" in capsys.readouterr().err and (tmp_path / "job.sbatch").read_text() == "mine"
    argv[argv.index("job.sbatch")] = "other.sbatch"
    assert launch.main(argv) == 0 and launch.main(argv) == 0  # the same script again is no other one
    said = capsys.readouterr().out
    assert "Submitted job 7" in said and "tail -F slurm-7.log" in said


def test_a_dry_run_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.main(["slurm", "--gpus-per-node", "0", "--dry-run", "--", "--run-dir", "r", "--steps", "5"]) == 0
    said = capsys.readouterr().out
    assert "run_dir=r\n" in said and '--steps 5 --run-dir "$run_dir" $resume' in said
    assert not list(tmp_path.iterdir())


PLACE = {"REAL_JAX_COORDINATOR": "h:1", "REAL_JAX_PROCESSES": "4", "REAL_JAX_PROCESS_ID": "3"}
STEP = {"REAL_JAX_COORDINATOR": "h:1", "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}


def test_where_a_process_belongs():
    assert membership({}) is None
    assert membership(PLACE) == Membership("h:1", 4, 3)
    assert membership(STEP) == Membership("h:1", 16, 9)
    # One process for each GPU: every process sees all GPUs of its node, and takes one.
    assert membership(STEP | {"SLURM_NTASKS_PER_NODE": "8"}).local_device == 1
    several = STEP | {"SLURM_NTASKS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert membership(several).local_device == 1
    assert membership(several | {"CUDA_VISIBLE_DEVICES": "5"}).local_device is None


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "REAL_JAX_COORDINATOR"),
        (PLACE | {"REAL_JAX_PROCESSES": "many"}, "'many'"),
        (PLACE | {"REAL_JAX_PROCESS_ID": "4"}, "REAL_JAX_PROCESS_ID is 4"),
    ],
)
def test_a_process_that_does_not_know_its_place(environment, words):
    with pytest.raises(UsageError, match=words):
        membership(environment)


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def test_all_processes_end_well():
    assert launch._watch([start("pass"), start("import time; time.sleep(0.3)")]) == 0


def test_a_killed_process_takes_the_others_along():
    jobs = [start("import time; time.sleep(100)"), start("import time; time.sleep(100)")]
    jobs[1].kill()
    began = time.monotonic()
    with pytest.raises(RunError, match=rf"Process 1 of 2 \(pid {jobs[1].pid}\) .* was ended by SIGKILL"):
        launch._watch(jobs)
    assert time.monotonic() - began < 60
    assert jobs[0].poll() == -signal.SIGKILL


def test_a_failed_process_gives_the_status(monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)
    assert launch._watch([start("raise SystemExit(2)"), start("raise SystemExit(1)")]) in (1, 2)
    with pytest.raises(RunError, match="Process 0 of 2 .* ended with status 1"):
        launch._watch([start("raise SystemExit(1)"), start("import time; time.sleep(100)")])


def test_signals_are_passed_on():
    code = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); time.sleep(100)"
    jobs = [start(code), start(code)]
    asker = start(f"import os, time; time.sleep(2); os.kill({os.getpid()}, {int(signal.SIGUSR1)})")
    assert launch._watch(jobs) == 0
    asker.wait()


@pytest.mark.slow
def test_a_killed_process_ends_a_training_and_is_named(tmp_path):
    """A real one, in the middle of its iterations: over within a minute, nothing left behind, the checkpoint whole."""
    run_dir = tmp_path / "run"
    calls = "sft_train reward_train actor_generate reward_inference reference_inference critic_inference actor_train"
    plan = {"calls": {call: {"first": 0, "data": 2} for call in [*calls.split(), "critic_train"]}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    train = f"--plan {tmp_path / 'plan.yaml'} --batch 16 --sft.steps 1 --sft.batch 16 --preference.steps 1"
    train += f" --preference.batch 16 --steps 10000 --checkpoint.every 1 --run-dir {run_dir}"
    options = "--processes 2 --devices-per-process 1"
    job = subprocess.Popen(
        [sys.executable, "-m", "real_jax.launch", "local", *options.split(), "--", *train.split()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 300
        while not (run_dir / "checkpoints" / "ppo" / "2").exists():
            assert job.poll() is None and time.monotonic() < until, job.communicate()
            time.sleep(0.2)
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        victim = next(
            p for p in children if "REAL_JAX_PROCESS_ID=1" in Path(f"/proc/{p}/environ").read_text().split("\0")
        )
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        out, err = job.communicate(timeout=60)
        assert time.monotonic() - began < 60
    finally:
        job.kill()
    assert job.returncode == 1
    assert f"Process 1 of 2 (pid {victim})" in err and "SIGKILL" in err, err[-3000:]
    assert "Traceback" not in err and "[Gloo]" not in out
    assert not any(Path(f"/proc/{p}").exists() for p in children)
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["stage"] == "ppo"
