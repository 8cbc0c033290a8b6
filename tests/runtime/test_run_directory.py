"""Run folders: never shared, never overwritten, found again by --resume."""

import os
from pathlib import Path

import pytest

from real_jax.runtime.run_directory import CONFIG, existing_run_directory, new_run_directory
from real_jax.spec.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(path, age=0):
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text("")
    os.utime(path / CONFIG, (1e9 - age, 1e9 - age))
    return path


def test_new_runs_are_numbered():
    assert [str(new_run_directory("ppo")) for _ in range(3)] == ["runs/ppo", "runs/ppo-2", "runs/ppo-3"]
    assert str(new_run_directory("other")) == "runs/other"
    Path("runs/ppo").rmdir()
    assert str(new_run_directory("ppo")) == "runs/ppo"
    assert Path("runs/ppo").is_dir()


def test_two_runs_that_start_at_once_get_two_folders(monkeypatch):
    """The other run makes its folder right before this one does."""
    plain, rivals = Path.mkdir, []

    def mkdir(self, *args, **options):
        if not rivals and self.name == "ppo":
            rivals.append(self)
            plain(self, parents=True)
        return plain(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert str(new_run_directory("ppo")) == "runs/ppo-2"
    assert rivals


def test_a_wanted_folder():
    assert new_run_directory("ppo", "a/b") == Path("a/b") and Path("a/b").is_dir()
    assert new_run_directory("ppo", "a/b") == Path("a/b")  # still empty
    make_run("a/b")
    with pytest.raises(UsageError, match="--run-dir 'a/b' already holds a run. Go on with it by --resume"):
        new_run_directory("ppo", "a/b")
    Path("c").mkdir()
    Path("c/file").write_text("")
    with pytest.raises(UsageError, match="--run-dir 'c' is not empty"):
        new_run_directory("ppo", "c")
    with pytest.raises(UsageError, match="--run-dir 'c/file' is a file. Name a folder"):
        new_run_directory("ppo", "c/file")
    with pytest.raises(UsageError, match="The run directory 'c/file/x' cannot be made: Not a directory"):
        new_run_directory("ppo", "c/file/x")


def test_runs_in_the_way_of_a_folder():
    Path("runs").write_text("")
    with pytest.raises(UsageError, match="The run directory 'runs/ppo' cannot be made"):
        new_run_directory("ppo")


def test_resume_takes_the_newest_run_of_the_name():
    make_run("runs/ppo", age=30)
    make_run("runs/ppo-2", age=10)
    make_run("runs/ppo-3", age=20)
    Path("runs/ppo-4").mkdir()  # holds no run
    assert existing_run_directory("ppo") == Path("runs/ppo-2")
    make_run("runs/ppo")
    assert existing_run_directory("ppo") == Path("runs/ppo")


def test_resume_leaves_other_experiments_alone():
    """Newer runs of experiments whose names begin alike."""
    make_run("runs/ppo", age=30)
    for other in ("ppo2", "ppo-reviews", "ppo-reviews-2", "ppo-", "ppo7-1", "xppo"):
        make_run(f"runs/{other}")
    assert existing_run_directory("ppo") == Path("runs/ppo")
    make_run("runs/ppo-12")
    assert existing_run_directory("ppo") == Path("runs/ppo-12")


def test_resume_of_a_wanted_folder():
    make_run("mine")
    assert existing_run_directory("ppo", "mine") == Path("mine")
    with pytest.raises(UsageError, match="--resume: 'nowhere' holds no run .it has no config.yaml.. Check --run-dir"):
        existing_run_directory("ppo", "nowhere")


def test_resume_of_nothing():
    with pytest.raises(UsageError, match="--resume: there is no run runs/ppo. Name the run by --run-dir"):
        existing_run_directory("ppo")
