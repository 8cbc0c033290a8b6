import dataclasses

import numpy as np
import pytest

from real_jax.models.families import arch_from_config, config_from_arch, tensors
from real_jax.spec.arch import ARCHS, weights
from real_jax.spec.errors import UsageError

# As transformers 4 wrote it for SmolLM2-135M-Instruct, shortened to the fields that matter.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_published_config_gives_the_published_shape():
    assert arch_from_config(SMOLLM2, "config.json") == (ARCHS["smollm2-135m"], "lm")


def test_rotary_base_of_newer_files():
    config = {key: value for key, value in SMOLLM2.items() if key not in ("rope_theta", "rope_scaling")}
    config["rope_parameters"] = {"rope_theta": 100000.0, "rope_type": "default"}
    assert arch_from_config(config, "config.json")[0] == ARCHS["smollm2-135m"]


def test_absent_fields_take_the_defaults_of_llama_config():
    config = {
        key: value
        for key, value in SMOLLM2.items()
        if key not in ("rope_theta", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings")
    }
    arch, _ = arch_from_config(config, "config.json")
    assert (arch.rope_theta, arch.norm_eps, arch.kv_heads, arch.tied_embeddings) == (10000.0, 1e-6, 9, False)
    assert arch.head_dim == 64


@pytest.mark.parametrize("name", ARCHS)
def test_config_round_trip(name):
    for head in ("lm", "scalar"):
        assert arch_from_config(config_from_arch(ARCHS[name], head), "config.json") == (ARCHS[name], head)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_transformers_reads_the_same_shape(name):
    transformers = pytest.importorskip("transformers")
    arch = ARCHS[name]
    config = transformers.LlamaConfig.from_dict(config_from_arch(arch, eos_token_id=5))
    assert config.rope_parameters["rope_theta"] == arch.rope_theta
    assert (config.head_dim, config.num_key_value_heads, config.vocab_size) == (
        arch.head_dim,
        arch.kv_heads,
        arch.vocab,
    )
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (5, None, None)
    assert arch_from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "config.json")[0] == arch


def test_transformers_reads_the_same_qwen2():
    transformers = pytest.importorskip("transformers")
    arch = ARCHS["qwen2.5-7b"]
    config = transformers.Qwen2Config.from_dict(config_from_arch(arch))
    assert (config.hidden_size, config.num_key_value_heads, config.vocab_size) == (3584, 4, 152064)
    assert not config.use_sliding_window
    assert arch_from_config(config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}, "config.json")[0] == arch


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ("MistralForCausalLM", "LlamaForCausalLM")),
        ({"architectures": None, "model_type": "gpt2"}, ("gpt2", "LlamaForCausalLM")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling", "linear")),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, ("rope_parameters", "llama3")),
        ({"attention_bias": True}, ("attention_bias", "True")),
        ({"mlp_bias": True}, ("mlp_bias", "True")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": "576"}, ("hidden_size", "'576'")),
        ({"num_key_value_heads": 4}, ("num_key_value_heads is 4", "9")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps is 0",)),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, ("3 labels",)),
    ],
)
def test_refused_configs_are_named(change, named):
    with pytest.raises(UsageError) as error:
        arch_from_config(SMOLLM2 | change, "somewhere/config.json")
    for word in ("somewhere/config.json", *named):
        assert word in str(error.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_tensor_table_covers_the_weights_and_inverts(head, tied):
    arch = dataclasses.replace(ARCHS["tiny"], tied_embeddings=tied)
    table = tensors(arch, head)
    expected = weights(arch, head)
    assert set(table) == set(expected)
    for key, tensor in table.items():
        shape = expected[key].shape[1:] if key.startswith("blocks/") else expected[key].shape
        stored = np.arange(np.prod(tensor.stored)).reshape(tensor.stored)
        weight = tensor.to_weight(stored)
        assert weight.shape == shape
        assert np.array_equal(tensor.to_stored(weight), stored)


def test_projections_are_transposed_by_head():
    arch = ARCHS["tiny"]  # 8 heads of 16, width 128
    query = tensors(arch)["blocks/query"]
    stored = np.arange(128 * 128).reshape(128, 128)
    assert query.to_weight(stored)[5, 3, 7] == stored[3 * 16 + 7, 5]
    out = tensors(arch)["blocks/out"]
    assert out.to_weight(stored)[3, 7, 5] == stored[5, 3 * 16 + 7]
