"""Writes a model as a Hugging Face folder: `python -m real_jax.convert SOURCE DEST`."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from real_jax.spec.errors import RunError, UsageError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Writes a model as a Hugging Face folder: config.json, model.safetensors and the tokenizer's files."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A GGUF file, `package:NAME` for the GGUF file inside an installed Python package, or a Hugging Face folder."""
    dest: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DEST")]
    """The folder to write; it must be new or empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""


def convert(source: str, dest: Path, dtype: str = "float32") -> list[Path]:
    """Writes the model at `source` into folder `dest` and returns its files; UsageError where `dest` is not empty."""
    if dest.exists() and not dest.is_dir():
        raise UsageError(f"DEST {str(dest)!r} is a file. Give a folder that is new or empty.")
    if dest.is_dir() and any(dest.iterdir()):
        raise UsageError(f"DEST {str(dest)!r} is not empty. Give a folder that is new or empty.")
    from real_jax.models import hf, load
    from real_jax.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source)
    arch, params = load.load_model(source)
    return hf.save(dest, arch, params, tokenizer, dtype)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m real_jax.convert")
    try:
        files = convert(arguments.source, arguments.dest, arguments.dtype)
    except (UsageError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    for file in files:
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
