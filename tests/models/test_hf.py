import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from real_jax.models import hf
from real_jax.models.load import load_arch, load_model
from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.arch import Arch, weights
from real_jax.spec.errors import RunError, UsageError

ARCH = Arch(layers=3, d_model=12, heads=4, kv_heads=2, head_dim=6, d_ff=20, vocab=11, context=32, rope_theta=5e4)
TIED = dataclasses.replace(ARCH, tied_embeddings=True)
QWEN = dataclasses.replace(ARCH, qkv_bias=True)


def random_params(arch, head="lm", seed=0):
    random = np.random.default_rng(seed)
    return {k: random.normal(size=w.shape).astype(np.float32) for k, w in weights(arch, head).items()}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == np.float32 and found[key].shape == value.shape
        assert np.array_equal(found[key], value), key


@pytest.mark.parametrize(
    ("arch", "head"), [(ARCH, "lm"), (TIED, "lm"), (ARCH, "scalar"), (QWEN, "lm"), (QWEN, "scalar")]
)
def test_round_trip_is_bit_for_bit(tmp_path, arch, head):
    params = random_params(arch, head)
    hf.save(tmp_path / "model", arch, params)
    found_arch, found = hf.load(tmp_path / "model")
    assert found_arch == arch
    assert_equal(found, params)
    assert load_arch(tmp_path / "model") == arch
    assert load_model(str(tmp_path / "model"))[0] == arch


def test_stored_tensors_have_the_names_and_order_of_transformers(tmp_path):
    params = random_params(ARCH)
    hf.save(tmp_path, ARCH, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 3 + 9 * 3  # embedding, norm, output; nine tensors a layer
    key = stored["model.layers.1.self_attn.k_proj.weight"]
    assert key.shape == (2 * 6, 12)
    assert key[1 * 6 + 4, 9] == params["blocks/key"][1, 9, 1, 4]
    out = stored["model.layers.2.self_attn.o_proj.weight"]
    assert out[9, 3 * 6 + 4] == params["blocks/out"][2, 3, 4, 9]
    assert np.array_equal(stored["model.layers.0.mlp.down_proj.weight"], params["blocks/down"][0].T)
    assert np.array_equal(stored["lm_head.weight"], params["unembed"].T)


def test_biases_have_the_names_and_order_of_transformers(tmp_path):
    params = random_params(QWEN)
    hf.save(tmp_path, QWEN, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 3 + 12 * 3
    bias = stored["model.layers.2.self_attn.k_proj.bias"]
    assert bias.shape == (2 * 6,)
    assert bias[1 * 6 + 4] == params["blocks/key_bias"][2, 1, 4]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_a_saved_folder_says_what_it_is(tmp_path):
    files = hf.save(tmp_path, ARCH, random_params(ARCH), Tokenizer.words(f"w{i}" for i in range(9)))
    assert [f.name for f in files] == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == [f.name for f in files]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["torch_dtype"] == "float32"
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (1, 0, None)
    assert len({f.stat().st_mode for f in files}) == 1


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_its_exact_values(tmp_path, kind):
    hf.save(tmp_path, TIED, random_params(TIED))
    stored = {name: value.astype(kind) for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    _, found = hf.load(tmp_path)
    expected = {key: value.astype(kind).astype(np.float32) for key, value in random_params(TIED).items()}
    assert_equal(found, expected)


def test_bfloat16_folder(tmp_path):
    hf.save(tmp_path, TIED, random_params(TIED), dtype="bfloat16")
    assert {v.dtype for v in load_file(tmp_path / "model.safetensors").values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32) for k, v in random_params(TIED).items()}
    assert_equal(hf.load(tmp_path)[1], expected)


def test_shards_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(hf._write_weights, "__defaults__", (2000,))
    params = random_params(ARCH)
    names = [f.name for f in hf.save(tmp_path, ARCH, params)]
    shards = [n for n in names if n.endswith(".safetensors")]
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in params.values())
    assert_equal(hf.load(tmp_path)[1], params)

    monkeypatch.undo()
    hf.save(tmp_path, ARCH, random_params(ARCH, seed=1))  # a single file leaves no stale shard behind
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(hf.load(tmp_path)[1], random_params(ARCH, seed=1))

    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="model-00001-of-.*missing"):
        hf.load(tmp_path)


def test_tied_folder_may_repeat_its_embedding_only(tmp_path):
    hf.save(tmp_path, TIED, random_params(TIED))
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    assert_equal(hf.load(tmp_path)[1], random_params(TIED))
    stored["lm_head.weight"] += 1
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="lm_head.weight.*tie_word_embeddings"):
        hf.load(tmp_path)


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match="no folder.*nowhere"):
        hf.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no config.json"):
        hf.load(tmp_path)
    hf.save(tmp_path, ARCH, random_params(ARCH))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"

    save_file({k: v for k, v in stored.items() if k != name}, file)
    with pytest.raises(UsageError, match=f"'{name}' is missing"):
        hf.load(tmp_path)
    save_file(stored | {"model.layers.1.extra": np.ones(2)}, file)
    with pytest.raises(UsageError, match="'model.layers.1.extra' is not part"):
        hf.load(tmp_path)
    save_file(stored | {name: stored[name][:-1].copy()}, file)
    with pytest.raises(UsageError, match=rf"'{name}' has shape \(19, 12\).*\(20, 12\)"):
        hf.load(tmp_path)
    save_file(stored | {name: stored[name].astype(np.int32)}, file)
    with pytest.raises(UsageError, match=f"'{name}' has type I32"):
        hf.load(tmp_path)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UsageError, match="not a readable safetensors"):
        hf.load(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="no weights.*pytorch_model.bin"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="config.json cannot be read as JSON"):
        hf.load(tmp_path)


def test_save_refuses_wrong_weights_and_reports_a_refusing_disk(tmp_path):
    params = random_params(ARCH)
    with pytest.raises(UsageError, match="'blocks/up' is missing"):
        hf.save(tmp_path / "m", ARCH, {k: v for k, v in params.items() if k != "blocks/up"})
    with pytest.raises(UsageError, match="'other' is not one"):
        hf.save(tmp_path / "m", ARCH, params | {"other": params["norm"]})
    with pytest.raises(UsageError, match=r"'norm' has shape \(11,\); it must be \(12,\)"):
        hf.save(tmp_path / "m", ARCH, params | {"norm": params["norm"][1:]})
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        hf.save(tmp_path / "m", ARCH, params, dtype="int8")
    assert not (tmp_path / "m").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        hf.save(tmp_path / "file" / "m", ARCH, params)
