"""Hugging Face `config.json` <-> `Arch`, and the tensors that such a folder holds, for the Llama and Qwen2 architectures.

The key names are those of transformers' LlamaConfig and Qwen2Config; the rotary base stands at the top level in files written by
transformers 4 and inside `rope_parameters` in those of transformers 5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from real_jax.spec.arch import Arch, Head
from real_jax.spec.errors import UsageError

# model_type in config.json -> its architectures and the head that each carries. The second is how a reward model or
# critic is stored.
_FAMILIES: Mapping[str, Mapping[str, Head]] = {
    "llama": {"LlamaForCausalLM": "lm", "LlamaForSequenceClassification": "scalar"},
    "qwen2": {"Qwen2ForCausalLM": "lm", "Qwen2ForSequenceClassification": "scalar"},
}
ARCHITECTURES: Mapping[str, Head] = {name: head for family in _FAMILIES.values() for name, head in family.items()}

_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
}
_PLAIN_ROPE = (None, "default", "none")


def arch_from_config(config: Mapping[str, Any], where: str) -> tuple[Arch, Head]:
    """The shape and the head that a Hugging Face config describes.

    `where` names the file in errors. Raises UsageError, naming the field, where the config asks for another
    architecture or for something that this model does not compute.
    """
    head = _head(config, where)
    sizes = {ours: _size(config, theirs, where) for theirs, ours in _SIZES.items()}
    heads = sizes["heads"]
    kv_heads = _size(config, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise UsageError(
            f"{where}: num_key_value_heads is {kv_heads}, which does not divide num_attention_heads ({heads})."
        )
    head_dim = _size(config, "head_dim", where, sizes["d_model"] // heads)
    if head_dim % 2:
        raise UsageError(f"{where}: head_dim is {head_dim}; the rotary embedding needs an even one.")
    _check_computation(config, where)
    return Arch(
        **sizes,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(config, where),
        norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_architecture(config).startswith("Qwen2"),
    ), head


def config_from_arch(arch: Arch, head: Head = "lm", dtype: str = "float32", **token_ids: int | None) -> dict[str, Any]:
    """The config.json of `arch`, readable by transformers 4 and 5.

    `token_ids` are bos_token_id, eos_token_id and pad_token_id, as far as they are known. Keys with `None` are
    written as null, since LlamaConfig would otherwise assume the ids of Llama's own vocabulary.
    """
    family = "qwen2" if arch.qkv_bias else "llama"
    architecture = next(name for name, kind in _FAMILIES[family].items() if kind == head)
    config = {
        "architectures": [architecture],
        "model_type": family,
        **{theirs: getattr(arch, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "tie_word_embeddings": arch.tied_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **token_ids,
    }
    if family == "qwen2":
        del config["attention_bias"], config["mlp_bias"]  # Qwen2Config has no such fields; its biases are fixed
        config["use_sliding_window"] = False
    if head == "scalar":
        config["id2label"] = {"0": "score"}
        config["label2id"] = {"score": 0}
    return config


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one weight is found in a folder, and how its two layouts follow from each other.

    Attributes:
      name: the tensor's name; `{layer}` stands for the layer's number.
      stored: its shape in the folder, per layer.
      split: `stored` with heads and head width apart.
      order: the transposition of `split` that gives the order of `spec.arch.weights`.
    """

    name: str
    stored: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    def names(self, layers: int) -> list[str]:
        """The tensor's names, one per layer, or the one name of a tensor outside the blocks."""
        return [self.name.format(layer=i) for i in range(layers if "{layer}" in self.name else 1)]

    def to_weight(self, stored: np.ndarray) -> np.ndarray:
        """A view of one stored tensor in this project's order."""
        return stored.reshape(self.split).transpose(self.order)

    def to_stored(self, weight: np.ndarray) -> np.ndarray:
        """One layer of a weight in the folder's order; the inverse of `to_weight`."""
        return np.ascontiguousarray(weight.transpose(np.argsort(self.order))).reshape(self.stored)


def tensors(arch: Arch, head: Head = "lm") -> dict[str, Tensor]:
    """For each key of `spec.arch.weights(arch, head)`, its tensor in a Hugging Face folder.

    Projections are stored there as [outputs, inputs]; query and key rows stand head by head, each head's rotary pairs
    in two halves.
    """
    d, h, k, e, f, v = arch.d_model, arch.heads, arch.kv_heads, arch.head_dim, arch.d_ff, arch.vocab
    block = "model.layers.{layer}."

    def vector(name: str) -> Tensor:
        return Tensor(name, (d,), (d,), (0,))

    def linear(name: str, outputs: int, inputs: int) -> Tensor:
        return Tensor(name, (outputs, inputs), (outputs, inputs), (1, 0))

    def projection(name: str, heads: int) -> Tensor:
        return Tensor(name, (heads * e, d), (heads, e, d), (2, 0, 1))

    def bias(name: str, heads: int) -> Tensor:
        return Tensor(name, (heads * e,), (heads, e), (0, 1))

    table = {
        "embed": Tensor("model.embed_tokens.weight", (v, d), (v, d), (0, 1)),
        "blocks/attention_norm": vector(block + "input_layernorm.weight"),
        "blocks/query": projection(block + "self_attn.q_proj.weight", h),
        "blocks/key": projection(block + "self_attn.k_proj.weight", k),
        "blocks/value": projection(block + "self_attn.v_proj.weight", k),
        "blocks/out": Tensor(block + "self_attn.o_proj.weight", (d, h * e), (d, h, e), (1, 2, 0)),
        "blocks/mlp_norm": vector(block + "post_attention_layernorm.weight"),
        "blocks/gate": linear(block + "mlp.gate_proj.weight", f, d),
        "blocks/up": linear(block + "mlp.up_proj.weight", f, d),
        "blocks/down": linear(block + "mlp.down_proj.weight", d, f),
        "norm": vector("model.norm.weight"),
    }
    if arch.qkv_bias:
        for ours, theirs, heads in (("query", "q", h), ("key", "k", k), ("value", "v", k)):
            table[f"blocks/{ours}_bias"] = bias(f"{block}self_attn.{theirs}_proj.bias", heads)
    if head == "scalar":
        table["scalar"] = Tensor("score.weight", (1, d), (d,), (0,))
    elif not arch.tied_embeddings:
        table["unembed"] = linear("lm_head.weight", v, d)
    return table


def _head(config: Mapping[str, Any], where: str) -> Head:
    if not isinstance(config, Mapping):
        raise UsageError(f"{where} must hold a JSON object of model fields.")
    name = _architecture(config)
    if name not in ARCHITECTURES:
        found = f"architecture {name!r}" if name else f"no architecture and model_type {config.get('model_type')!r}"
        raise UsageError(f"{where} names {found}. Supported: {', '.join(ARCHITECTURES)}.")
    head = ARCHITECTURES[name]
    labels = config.get("num_labels", len(config.get("id2label", (0, 1))))
    if head == "scalar" and labels != 1:
        raise UsageError(f"{where}: the classifier has {labels} labels; a reward model has exactly one.")
    return head


def _architecture(config: Mapping[str, Any]) -> str:
    """The architecture's name; where none is given, the language model of the family."""
    family = _FAMILIES.get(config.get("model_type"), ())
    return next(iter(config.get("architectures") or family), "")


def _check_computation(config: Mapping[str, Any], where: str) -> None:
    """Refuses every option that would make the forward pass another one than the plain Llama decoder's."""
    refused = {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "hidden_act": ("silu", "swish"),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1, 1.0),
        "use_sliding_window": (False, None),
    }
    for field, allowed in refused.items():
        if (value := config.get(field, allowed[0])) not in allowed:
            raise UsageError(f"{where}: {field} is {value!r}, which is not supported; it must be {allowed[0]!r}.")
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        if not isinstance(rope, Mapping):
            raise UsageError(f"{where}: {field} is {rope!r}; it must be an object or null.")
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _PLAIN_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UsageError(
                f"{where}: {field} is {dict(rope)!r}. Scaled or partial rotary embeddings are not supported; "
                "only null or the type 'default'."
            )


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    rope = config.get("rope_parameters") or {}
    return _number(rope if "rope_theta" in rope else config, "rope_theta", where, 10000.0)


def _size(config: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"{where}: field {field!r} is missing.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where}: {field} is {value!r}; it must be a positive whole number.")
    return value


def _number(config: Mapping[str, Any], field: str, where: str, default: float) -> float:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{where}: {field} is {value!r}; it must be a positive number.")
    return float(value)
