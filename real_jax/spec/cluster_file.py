"""A cluster as a YAML file for people: a number a line, and beside it where it comes from."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping

from real_jax.spec.hardware import Cluster

_PLAIN = re.compile(r"[A-Za-z][\w .,;()/+-]*")


def cluster_text(cluster: Cluster, notes: Mapping[str, str], header: str = "") -> str:
    """The text of the file; `spec.files.load_cluster` reads it back.

    Args:
      notes: field ("chip.memory_gib", or "chip" for all of its fields that have no note of their own) -> the comment
        beside it; "chip.matrix_reach[0]" for a point of a curve.
      header: lines on top, as comments.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    return "\n".join([*lines, *_lines(cluster, notes, "", "")]) + "\n"


def _lines(value, notes: Mapping[str, str], path: str, indent: str) -> Iterator[str]:
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), f"{path}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(inner):
            yield f"{indent}{field.name}:"
            yield from _lines(inner, notes, name, indent + "  ")
        elif isinstance(inner, tuple):
            yield f"{indent}{field.name}:" if inner else f"{indent}{field.name}: []"
            for number, point in enumerate(inner):
                fields = ", ".join(f"{f.name}: {getattr(point, f.name)!r}" for f in dataclasses.fields(point))
                yield f"{indent}  - {{{fields}}}  # {notes.get(f'{name}[{number}]') or _note(notes, name)}"
        elif isinstance(inner, str):
            plain = _PLAIN.fullmatch(inner) and not inner.endswith(" ")
            yield f"{indent}{field.name}: {inner if plain else json.dumps(inner, ensure_ascii=False)}"
        else:
            yield f"{indent}{field.name}: {inner!r}  # {_note(notes, name)}"


def _note(notes: Mapping[str, str], name: str) -> str:
    """The note of the innermost field on the way to `name` that has one."""
    while name and name not in notes:
        name = name.rpartition(".")[0]
    return notes.get(name, "")
