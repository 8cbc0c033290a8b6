"""A model or tokenizer from wherever it is: a Hugging Face folder, a GGUF file, or `package:NAME`."""

from pathlib import Path

import numpy as np

from real_jax.models import gguf_file, hf
from real_jax.spec.arch import Arch


def load_arch(source: Path | str) -> Arch:
    """The shape of the model at `source`, whose weights are there; they are not read."""
    if gguf_file.is_gguf(source):
        return gguf_file.arch_from_header(gguf_file.read_header(source))
    return hf.check(source)


def load_model(source: Path | str) -> tuple[Arch, dict[str, np.ndarray]]:
    """Shape and float32 weights of the model at `source`, the weights keyed and shaped as `spec.arch.weights`.

    Raises UsageError where the source is missing, broken, or of another architecture.
    """
    return gguf_file.load(source) if gguf_file.is_gguf(source) else hf.load(source)
