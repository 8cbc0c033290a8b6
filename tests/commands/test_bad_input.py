"""Bad input: one paragraph that names field, value and remedy, the right exit status, no traceback, nothing lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from real_jax import search, train

H100S = Path(__file__).parents[2] / "tpu_gpu_configs" / "h100-16x8.yaml"
BASE = {
    "name": "bad",
    "steps": 1,
    "batch": 16,
    "actor": {"arch": "tiny"},
    "data": {"prompt_length": 9, "held_out_size": 16},
    "generation": {"response_length": 14},
    "ppo": {"minibatches": 2},
}
CALLS = ("actor_generate", "reward_inference", "reference_inference", "critic_inference", "actor_train", "critic_train")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder: Path, **changes) -> str:
    config = {k: dict(v) if isinstance(v, dict) else v for k, v in BASE.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config.setdefault(section, {})[name] = value
        else:
            config[section] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "config.yaml")


def write_plan(folder: Path, **placement) -> str:
    (folder / "plan.yaml").write_text(yaml.safe_dump({"calls": {c: placement for c in CALLS}}))
    return str(folder / "plan.yaml")


def refused(capsys, argv, status=2, main=train.main) -> str:
    """The message with which `argv` is refused; checks its form."""
    try:
        code = main(argv)
    except SystemExit as exit_:  # the command-line parser refuses by itself, in a box
        err = capsys.readouterr().err
        assert exit_.code == status, err
    else:
        err = capsys.readouterr().err
        assert code == status, err
        assert "\n" not in err.strip(), err
    assert "Traceback" not in err
    assert not Path("runs").exists()
    return err


def test_unknown_config_key_names_its_neighbour(folder, capsys):
    err = refused(capsys, ["--config", write_config(folder, ppo__kl_coeff=0.1)])
    assert "unknown key 'ppo.kl_coeff'" in err and "Did you mean 'kl_coef'?" in err


def test_unknown_flag(folder, capsys):
    assert "--ppo.kl-coef" in refused(capsys, ["--ppo.kl-coeff", "0.1"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "missing.yaml"], "There is no file 'missing.yaml'"),
        (["--config", "ppo-review"], "Did you mean 'ppo-reviews'?"),
        (["--plan", "missing.yaml"], "There is no file 'missing.yaml'"),
        (["--cluster", "missing.yaml"], "There is no file 'missing.yaml'"),
        (["--actor.path", "missing"], "There is no folder 'missing'"),
        (["--data.prompts", "missing.jsonl", "--data.task", ""], "data.prompts needs a tokenizer"),
        (["--plan", "heuristic:best"], "Heuristics: symmetric"),
        (["--resume"], "there is no run runs/ppo-reviews"),
        (["--generation.temperature", "0"], "generation.temperature is 0.0"),
        (["--ppo.minibatches", "5"], "must divide batch (64)"),
        (["--batch", "0"], "batch is 0"),
        (["--cpu-devices", "0"], "--cpu-devices is 0"),
        (["--cluster", str(H100S)], "'h100-16x8' has 128 devices, but this job 8"),
    ],
)
def test_missing_files_and_wrong_values(folder, capsys, argv, words):
    assert words in refused(capsys, argv)


def test_hugging_face_folder_without_weights(folder, capsys):
    (folder / "model").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    err = refused(capsys, ["--config", write_config(folder), "--actor.path", "model"])
    assert "model" in err and ("tokenizer" in err or "safetensors" in err)


def test_hugging_face_folder_of_another_architecture(folder, capsys):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    err = refused(capsys, ["--config", write_config(folder), "--actor.path", "model"])
    assert "GPT2LMHeadModel" in err or "gpt2" in err


def test_prompts_longer_than_the_context(folder, capsys):
    err = refused(capsys, ["--config", write_config(folder, data__prompt_length=120)])
    assert "120 + 14 = 134, but the actor accepts 128 tokens" in err


def test_prompts_longer_than_prompt_length(folder, capsys):
    err = refused(capsys, ["--config", write_config(folder, data__prompt_length=5)])
    assert "has 9 tokens; data.prompt_length is 5" in err


def test_empty_dataset(folder, capsys):
    (folder / "empty.jsonl").write_text("\n")
    err = refused(capsys, ["--config", write_config(folder), "--data.prompts", "empty.jsonl"])
    assert "empty.jsonl" in err or "tokenizer" in err


def test_plan_for_more_devices_than_there_are(folder, capsys):
    err = refused(capsys, ["--config", write_config(folder), "--plan", write_plan(folder, first=0, data=16)])
    assert "asks for devices 0 to 15" in err and "has 8 (0 to 7)" in err


def test_plan_whose_tensor_degree_does_not_divide_the_heads(folder, capsys):
    plan = write_plan(folder, first=0, data=1, tensor=3)
    err = refused(capsys, ["--config", write_config(folder), "--plan", plan])
    assert "tensor is 3, which does not divide the 8 heads of model 'actor'" in err


def test_plan_that_does_not_divide_the_batch(folder, capsys):
    plan = write_plan(folder, first=0, data=8, micro_batches=2)
    err = refused(capsys, ["--config", write_config(folder), "--plan", plan])
    assert "8 sequences a step cannot be divided by data x fsdp x micro_batches = 8 x 1 x 2 = 16" in err


def test_plan_without_a_call_and_with_an_unknown_one(folder, capsys):
    (folder / "plan.yaml").write_text(yaml.safe_dump({"calls": {"actor_generate": {"data": 2}}}))
    assert "no placement for call" in refused(capsys, ["--config", write_config(folder), "--plan", "plan.yaml"])
    placements = {c: {"data": 1} for c in (*CALLS, "actor_tain")}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"calls": placements}))
    assert "'actor_tain'" in refused(capsys, ["--config", write_config(folder), "--plan", "plan.yaml"])


def test_run_directory_that_holds_another_run(folder, capsys):
    (folder / "mine").mkdir()
    (folder / "mine" / "config.yaml").write_text("name: other\n")
    plan = write_plan(folder, first=0, data=1)
    err = refused(capsys, ["--config", write_config(folder), "--run-dir", "mine", "--plan", plan])
    assert "'mine' already holds a run" in err and "--resume" in err
    assert (folder / "mine" / "config.yaml").read_text() == "name: other\n"
    assert [p.name for p in (folder / "mine").iterdir()] == ["config.yaml"]


def test_search_refuses_a_wrong_cluster(folder, capsys):
    source = Path(__file__).parents[2] / "tpu_gpu_configs" / "h100-1x8.yaml"
    data = yaml.safe_load(source.read_text())
    data["chip"]["memory_gb_per_s"] = -3350
    (folder / "cluster.yaml").write_text(yaml.safe_dump(data))
    err = refused(capsys, ["--cluster", "cluster.yaml"], main=search.main)
    assert "chip.memory_gb_per_s is -3350" in err


def test_a_plan_is_refused_before_the_machine_is_measured(folder, capsys, monkeypatch):
    import real_jax.cost.measure

    def measured(*_):
        raise AssertionError("a probe ran")

    monkeypatch.setattr(real_jax.cost.measure, "probe_cluster", measured)
    monkeypatch.setenv("REAL_JAX_CACHE", str(folder / "empty"))
    plan = write_plan(folder, first=0, data=16)
    assert "has 8 (0 to 7)" in refused(capsys, ["--config", write_config(folder), "--plan", plan])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_no_disk_space_for_a_checkpoint(folder, small_disk, capsys):
    run_dir = small_disk / "run"
    plan = write_plan(folder, first=0, data=1)
    argv = ["--config", write_config(folder), "--plan", plan, "--run-dir", str(run_dir)]
    err = refused(capsys, argv, status=1)
    assert "No space for a checkpoint" in err and "go on with --resume" in err
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["name"] == "bad"
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 1  # the iteration that was done is not lost


@pytest.mark.parametrize("module", ["real_jax.train", "real_jax.search", "real_jax.convert"])
def test_help_answers_within_two_seconds(module):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
        assert "--" in done.stdout
    assert min(times) < 2
