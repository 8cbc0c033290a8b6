"""Hugging Face folders in and out: safetensors weights as float32 numpy arrays keyed like `spec.arch.weights`.

One tensor at a time is held beside the stacked result, so loading needs little more memory than the float32 weights.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from real_jax.models.families import Tensor, arch_from_config, config_from_arch, tensors
from real_jax.models.tokenizer import Tokenizer
from real_jax.spec.arch import Arch, Head, weights
from real_jax.spec.errors import RunError, UsageError

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
# Buffers that old transformers versions stored; they follow from the config.
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_SHARD_BYTES = 5 * 10**9


def load_arch(path: Path | str) -> tuple[Arch, Head]:
    """The shape and head of the model in folder `path`, from its config.json alone."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {str(path)!r}. Check the path of the model.")
    if not (folder / "config.json").is_file():
        raise UsageError(f"Folder {str(path)!r} has no config.json, so it is not a Hugging Face model folder.")
    return arch_from_config(_read_json(folder / "config.json"), str(folder / "config.json"))


def check(path: Path | str) -> Arch:
    """The shape of the model in folder `path`, once its weight files are there and name every tensor that it needs.

    Reads headers only. Raises UsageError as `load` does.
    """
    folder = Path(path)
    arch, head = load_arch(folder)
    _check_names(_tensor_files(folder), tensors(arch, head), arch, head, folder)
    return arch


def load(path: Path | str) -> tuple[Arch, dict[str, np.ndarray]]:
    """Shape and float32 weights of the model in folder `path`, the weights keyed and shaped as `spec.arch.weights`.

    A LlamaForCausalLM gives the "lm" weights, a LlamaForSequenceClassification with one label the "scalar" ones.
    Raises UsageError for a missing folder, a folder without safetensors, another architecture, and by name for a
    tensor that is missing, unknown, misshaped or not of a float type.
    """
    folder = Path(path)
    arch, head = load_arch(folder)
    files = _tensor_files(folder)
    table = tensors(arch, head)
    _check_names(files, table, arch, head, folder)
    shapes = weights(arch, head)
    params = {key: np.empty(shapes[key].shape, np.float32) for key in table}
    places = {
        name: (key, i) for key, tensor in table.items() for i, name in enumerate(tensor.names(arch.layers))
    }  # fmt: skip
    for name, stored in _read_tensors(files, places, folder):
        key, layer = places[name]
        tensor = table[key]
        if stored.shape != tensor.stored:
            raise UsageError(
                f"{folder}: tensor {name!r} has shape {stored.shape}; by config.json it must be {tensor.stored}."
            )
        target = params[key][layer] if "{layer}" in tensor.name else params[key]
        target[...] = tensor.to_weight(stored)
    _check_tied_output(files, arch, head, params, folder)
    return arch, params


def save(
    path: Path | str,
    arch: Arch,
    params: Mapping[str, np.ndarray],
    tokenizer_source: Tokenizer | Path | str | None = None,
    dtype: str = "float32",
) -> list[Path]:
    """Writes a folder that transformers loads, and returns its files.

    `params` are keyed and shaped as `spec.arch.weights`; with a "scalar" weight the folder is a
    LlamaForSequenceClassification with one label. `tokenizer_source` is a tokenizer, or a Hugging Face folder, GGUF
    file or `package:NAME` that has one. `dtype` is "float32" or "bfloat16". Everything is written aside
    first, so that a failed save leaves an older one whole. Raises UsageError for wrong weights, RunError where the
    disk refuses.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype is {dtype!r}; a folder is written in float32 or bfloat16.")
    head: Head = "scalar" if "scalar" in params else "lm"
    shapes = {key: weight.shape for key, weight in weights(arch, head).items()}
    for key in {**shapes, **params}:
        if key not in params or key not in shapes:
            raise UsageError(f"Weight {key!r} is {'missing' if key in shapes else 'not one of this model'}.")
        if tuple(params[key].shape) != shapes[key]:
            raise UsageError(f"Weight {key!r} has shape {tuple(params[key].shape)}; it must be {shapes[key]}.")
    tokenizer = _tokenizer(tokenizer_source)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
            _write(Path(scratch), arch, head, params, tokenizer, dtype)
            written = sorted(p.name for p in Path(scratch).iterdir())
            mode = (Path(scratch) / "config.json").stat().st_mode
            for name in written:
                (Path(scratch) / name).chmod(mode)  # safetensors lets only the owner read its files
                os.replace(Path(scratch) / name, folder / name)
        for stale in folder.glob("model*.safetensors*"):
            if stale.name not in written:
                stale.unlink()
    except (OSError, SafetensorError) as error:
        raise RunError(f"The model cannot be written to {str(path)!r}: {error}.") from error
    return [folder / name for name in written]


def _tokenizer(source: Tokenizer | Path | str | None) -> Tokenizer | None:
    if source is None or isinstance(source, Tokenizer):
        return source
    return Tokenizer.load(source)


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}.") from None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    single, index = folder / _WEIGHTS, folder / _INDEX
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise UsageError(f"{index} has no object 'weight_map' of tensor names to files.")
        files = {name: folder / file for name, file in names.items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise UsageError(f"{index} names {file.name}, which is missing in {str(folder)!r}.")
        return files
    other = sorted(p.name for p in folder.glob("*.bin"))
    hint = f" It has {other[0]}: save the model as safetensors first." if other else ""
    raise UsageError(f"Folder {str(folder)!r} has no weights: neither {_WEIGHTS} nor {_INDEX}.{hint}")


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}.") from None


def _check_names(files, table: dict[str, Tensor], arch: Arch, head: Head, folder: Path) -> None:
    needed = [name for tensor in table.values() for name in tensor.names(arch.layers)]
    known = set(needed)
    if head == "lm" and arch.tied_embeddings:
        known.add("lm_head.weight")
    for name in needed:
        if name not in files:
            raise UsageError(f"{folder}: tensor {name!r} is missing.")
    for name in files:
        if name not in known and not _BUFFERS.fullmatch(name):
            raise UsageError(f"{folder}: tensor {name!r} is not part of the model that config.json describes.")


def _read_tensors(files, wanted, folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each wanted tensor in its stored type, file by file."""
    for path in sorted({files[name] for name in wanted}):
        with _open(path) as file:
            stored = set(file.keys())
            for name in (n for n in wanted if files[n] == path):
                if name not in stored:
                    raise UsageError(f"{folder}: tensor {name!r} is missing in {path.name}, where the index puts it.")
                kind = file.get_slice(name).get_dtype()
                if kind not in _FLOATS:
                    raise UsageError(
                        f"{folder}: tensor {name!r} has type {kind}; only {', '.join(_FLOATS.values())} can be read."
                    )
                yield name, file.get_tensor(name)


def _check_tied_output(files, arch: Arch, head: Head, params, folder: Path) -> None:
    """A tied model may repeat its embedding as the output projection, but not hold another one."""
    name = "lm_head.weight"
    if head == "lm" and arch.tied_embeddings and name in files:
        _, stored = next(_read_tensors(files, [name], folder))
        if stored.shape != params["embed"].shape or not np.array_equal(stored.astype(np.float32), params["embed"]):
            raise UsageError(
                f"{folder}: config.json says tie_word_embeddings, but tensor {name!r} differs from the embedding. "
                "Set tie_word_embeddings to false."
            )


def _write(folder: Path, arch: Arch, head: Head, params, tokenizer: Tokenizer | None, dtype: str) -> None:
    _write_weights(folder, arch, head, params, dtype)
    ids = {}
    if tokenizer is not None:
        tokenizer.save(folder)
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        if head == "lm":
            _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", config_from_arch(arch, head, dtype, **ids))


def _write_json(path: Path, data) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(folder: Path, arch: Arch, head: Head, params, dtype: str, limit: int = _SHARD_BYTES) -> None:
    """One file up to `limit` bytes; above it numbered shards with an index, so that only one is held at a time."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    table = tensors(arch, head)
    shards: list[list[tuple[str, int, str]]] = [[]]
    size = total = 0
    for key, tensor in table.items():
        nbytes = math.prod(tensor.stored) * kind.itemsize
        for layer, name in enumerate(tensor.names(arch.layers)):
            if shards[-1] and size + nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append((key, layer, name))
            size += nbytes
            total += nbytes
    index: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        host: dict[str, np.ndarray] = {}  # a weight comes from its devices once, not once per layer
        shard = {}
        for key, layer, name in entries:
            if key not in host:
                host = {key: np.asarray(params[key])}
            weight = host[key][layer] if "{layer}" in table[key].name else host[key]
            shard[name] = table[key].to_stored(weight.astype(kind))
            index[name] = file
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": index})
