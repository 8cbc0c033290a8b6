"""YAML files and back, and what the errors say about a wrong one."""

import dataclasses

import pytest
import yaml

from real_jax.spec import files
from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import DataConfig, Experiment, GenerationConfig, ModelConfig, OptimizerConfig, PPOConfig
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement

PRESETS = sorted(p.stem for p in files.PRESETS.glob("*.yaml"))


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_survives_the_round_trip(name, tmp_path):
    experiment = files.load_experiment(name)
    assert experiment.name == name
    files.save_experiment(experiment, tmp_path / "out.yaml")
    assert files.load_experiment(str(tmp_path / "out.yaml")) == experiment


def test_an_experiment_with_nothing_at_its_default_survives_the_round_trip(tmp_path):
    experiment = Experiment(
        name="other: name", seed=-3, steps=7, batch=12, compute_type="bfloat16", actor=ModelConfig(arch="llama-7b"),
        data=DataConfig(task="", prompts="p.jsonl", drop_long=True), generation=GenerationConfig(top_p=0.1 + 0.2, greedy=True),
        ppo=PPOConfig(minibatches=3, value_norm="none", value_norm_beta=1 - 1e-7),
        actor_optimizer=OptimizerConfig(lr=1e-7, eps=1e-30),
    )  # fmt: skip
    path = tmp_path / "out.yaml"
    files.save_experiment(experiment, path)
    assert files.load_experiment(str(path)) == experiment


def test_an_empty_file_is_the_default_experiment(tmp_path):
    assert files.load_experiment(str(write(tmp_path, ""))) == Experiment()


def test_scientific_notation_and_whole_numbers_are_floats(tmp_path):
    """YAML 1.1 reads 1e-5 as text and 3 as an integer."""
    text = "actor_optimizer: {lr: 1e-5, eps: 1.5E-8, max_grad_norm: 3}\nppo: {kl_horizon: 1e4}\n"
    experiment = files.load_experiment(str(write(tmp_path, text)))
    optimizer = experiment.actor_optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.max_grad_norm) == (1e-5, 1.5e-8, 3.0)
    assert type(optimizer.max_grad_norm) is float and type(experiment.ppo.kl_horizon) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3", "unknown key 'stpes'. Did you mean 'steps'?"),
        ("ppo: {kl_coeff: 0.1}", "unknown key 'ppo.kl_coeff'. Did you mean 'kl_coef'?"),
        ("actor_optimizer: {learning_rate: 1}", "unknown key 'actor_optimizer.learning_rate'. Known keys: lr, beta1"),
        ("1: 2", "unknown key '1'"),
        ("steps: three", "steps is 'three'; it must be of type int."),
        ("steps: 3.0", "steps is 3.0; it must be of type int."),
        ("steps: true", "steps is True; it must be of type int."),
        ("steps: null", "steps is None; it must be of type int."),
        ("ppo: {gamma: true}", "ppo.gamma is True; it must be of type float."),
        ("ppo: {gamma: much}", "ppo.gamma is 'much'; it must be of type float."),
        ("ppo: {kl_adaptive: 1}", "ppo.kl_adaptive is 1; it must be of type bool."),
        ("name: 3", "name is 3; it must be of type str."),
        ("name: [a]", "name is ['a']; it must be of type str."),
        ("compute_type: float16", "compute_type is 'float16'; it must be one of 'float32', 'bfloat16'."),
        ("ppo: {value_norm: [none]}", "ppo.value_norm is ['none']; it must be one of"),
        ("ppo: 3", "ppo must be a mapping of fields, not 3."),
        ("ppo:", "ppo must be a mapping of fields, not None."),
        ("[1, 2]", "the file must be a mapping of fields, not [1, 2]."),
        ("just text", "the file must be a mapping of fields, not 'just text'."),
        ("steps: 0", "steps is 0. It must be at least 1."),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        files.load_experiment(str(path))
    assert message in str(raised.value)
    if message != "steps is 0. It must be at least 1.":
        assert str(raised.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="There is no file '.*missing.yaml'. Check the path."):
        files.load_experiment(str(tmp_path / "missing.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UsageError, match="folder.yaml' cannot be read"):
        files.load_experiment(str(tmp_path / "folder.yaml"))
    inside_a_file = write(tmp_path, "") / "x.yaml"
    with pytest.raises(UsageError, match="cannot be read"):
        files.load_experiment(str(inside_a_file))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UsageError, match="binary.yaml' cannot be read"):
        files.load_experiment(str(tmp_path / "binary.yaml"))
    with pytest.raises(UsageError, match="is not valid YAML"):
        files.load_experiment(str(write(tmp_path, "a: [1,\nb: }")))


def test_an_unknown_preset_names_its_neighbour():
    with pytest.raises(
        UsageError, match=r"There is no preset 'ppo-review'. Did you mean 'ppo-reviews'\? Presets: .*ppo-reviews"
    ):
        files.load_experiment("ppo-review")


def test_data_files_beside_the_configuration_are_found(tmp_path):
    write(tmp_path, "", "prompts.jsonl")
    path = write(tmp_path, "data: {prompts: prompts.jsonl, answers: elsewhere.jsonl}")
    data = files.load_experiment(str(path)).data
    assert (data.prompts, data.answers) == (str(tmp_path / "prompts.jsonl"), "elsewhere.jsonl")


def cluster():
    return Cluster(
        "c", "gpu", 2, 8, Chip("chip", 80.0, 1e3, 3e3, 10.0, 0.1 + 0.2), Link(1.0, 2.0), Link(3.0, 4.0), Link(5.0, 6.0),
        source="a data sheet: page 3",
    )  # fmt: skip


def test_a_cluster_survives_the_round_trip(tmp_path):
    files.save_cluster(cluster(), tmp_path / "c.yaml")
    assert files.load_cluster(tmp_path / "c.yaml") == cluster()


@pytest.mark.parametrize(
    ("drop", "message"), [("platform", "key 'platform' is missing"), ("host_link", "key 'host_link' is missing")]
)
def test_a_cluster_with_a_missing_key_is_refused(drop, message, tmp_path):
    data = files.to_data(cluster())
    del data[drop]
    with pytest.raises(UsageError, match=message):
        files.load_cluster(write(tmp_path, yaml.safe_dump(data)))
    data = files.to_data(cluster())
    del data["chip"]["memory_gib"]
    with pytest.raises(UsageError, match="key 'chip.memory_gib' is missing"):
        files.load_cluster(write(tmp_path, yaml.safe_dump(data)))


def test_a_cluster_file_is_checked(tmp_path):
    files.save_cluster(dataclasses.replace(cluster(), nodes=0), tmp_path / "c.yaml")
    with pytest.raises(UsageError, match="nodes is 0"):
        files.load_cluster(tmp_path / "c.yaml")


PLAN = ExecutionPlan(
    "cpu-8",
    {
        "b": Placement(),
        "a": Placement(4, 1, 2, 2, 8, remat=True, offload=False),
        "c": Placement(0, data=2, offload=True),
    },
    "searched",
)


def test_a_plan_survives_the_round_trip(tmp_path):
    files.save_plan(PLAN, tmp_path / "p.yaml")
    loaded = files.load_plan(tmp_path / "p.yaml")
    assert loaded == PLAN
    assert list(loaded.placements) == ["b", "a", "c"]
    assert yaml.safe_load((tmp_path / "p.yaml").read_text())["calls"]["b"] == {"first": 0, "data": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a plan needs a mapping 'calls'"),
        ("calls: [a]", "a plan needs a mapping 'calls'"),
        ("calls: {}\nclustr: x", "unknown key 'clustr'. A plan has the keys cluster, origin, calls."),
        ("calls: {a: {tensr: 2}}", "unknown key 'calls.a.tensr'. Did you mean 'tensor'?"),
        ("calls: {a: {tensor: 2.5}}", "calls.a.tensor is 2.5; it must be of type int."),
        ("calls: {a: 3}", "calls.a must be a mapping of fields, not 3."),
        ("calls: {a: {remat: yes please}}", "calls.a.remat is 'yes please'; it must be of type bool."),
    ],
)
def test_a_wrong_plan_is_refused_by_name(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        files.load_plan(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)


def test_a_header_is_a_comment(tmp_path):
    files.write_yaml(tmp_path / "x.yaml", {"a": 1}, header="two\nlines")
    assert (tmp_path / "x.yaml").read_text().startswith("# two\n# lines\n")
    assert files.read_yaml(tmp_path / "x.yaml") == {"a": 1}
