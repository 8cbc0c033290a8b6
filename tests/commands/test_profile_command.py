"""Measuring the machine from the command line. What is measured has its own tests; here it is made up."""

import re
from pathlib import Path

import pytest

import real_jax.cost.measure
from real_jax import profile
from real_jax.cost.curves import Timing
from real_jax.cost.fit import Sample
from real_jax.cost.measure import Profile, notes_of
from real_jax.cost.summary import Summary
from real_jax.spec.files import load_cluster
from real_jax.spec.hardware import Chip, Cluster, Link, Reach

CLUSTER = Cluster(
    "cpu-8", "cpu", 1, 8, Chip("cpu", 1.5, 0.1, 10.0, matrix_reach=(Reach(1e6, 0.5),)), Link(1.0, 100.0),
    Link(1.0, 100.0), Link(5.0, 100.0), 2.0, "measured now; fitted to layer programs",
)  # fmt: skip
TIMINGS = (Timing("product", "8 x 8 x 8 float32", 1024, 1e-6), Timing("all-reduce", "64 B over 2", 64, 2e-3, 2))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The options that `measure` was called with; empty where it was not."""
    calls = []

    def measure(progress, **options):
        calls.append(options)
        progress(0, 1, "matrix products")
        progress(1, 1, "done")
        return Profile(CLUSTER, TIMINGS, (Sample(Summary(steps=1000.0), 1, 2.01e-3, "forward"),), notes_of(CLUSTER))

    monkeypatch.setattr(real_jax.cost.measure, "measure", measure)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_file_is_written_and_named_last(measured, capsys):
    assert profile.main(["--out", "folder/mine.yaml"]) == 0
    assert measured == [{"full": True, "name": "", "nodes": 0}]
    assert load_cluster("folder/mine.yaml") == CLUSTER
    shown = capsys.readouterr().out
    assert shown.strip().endswith("File written: folder/mine.yaml")
    assert "8 x 8 x 8 float32" in shown and "0.00102 TFLOP/s" in shown  # 1024 operations in 1 us
    assert "64 B over 2" in shown and "2 ms" in shown
    assert "1.00" in shown  # a layer program: 1000 kernels of 2 us, and a start of 10 us


def test_every_number_says_that_it_was_measured(measured):
    assert profile.main(["--out", "mine.yaml"]) == 0
    for line in Path("mine.yaml").read_text().splitlines():
        if re.search(r"^[^#\"]*: -?\d", line):
            assert re.search(r"  # (measured|counted)", line), line


def test_the_file_is_named_after_the_machine(measured):
    assert profile.main([]) == 0
    assert load_cluster("tpu_gpu_configs/cpu-8.yaml") == CLUSTER


def test_a_file_that_is_there_is_kept(measured, capsys):
    Path("mine.yaml").write_text("precious")
    assert profile.main(["--out", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert "'mine.yaml' exists already" in error and "--overwrite" in error
    assert measured == [] and Path("mine.yaml").read_text() == "precious"
    assert profile.main(["--out", "mine.yaml", "--overwrite"]) == 0
    assert load_cluster("mine.yaml") == CLUSTER


def test_a_place_where_no_file_can_be_is_refused_before_measuring(measured, capsys, tmp_path):
    assert profile.main(["--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err and measured == []
