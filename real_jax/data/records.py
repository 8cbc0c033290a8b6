"""Prompts, answers and preference pairs as records, read from JSONL or JSON files."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from real_jax.spec.errors import UsageError

Id = int | str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt to respond to."""

    id: Id
    prompt: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt and the answer to imitate."""

    id: Id
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt with answers of which each in `pos_answers` is preferred to each in `neg_answers`."""

    id: Id
    prompt: str
    pos_answers: tuple[str, ...]
    neg_answers: tuple[str, ...]


Record = TypeVar("Record", Prompt, Answer, Pair)


def read(kind: type[Record], path: Path | str) -> list[Record]:
    """The records in `path`: a JSON object a line, or one JSON list where the file ends in .json.

    Keys that the kind does not have are ignored, so one file can serve several stages. Raises UsageError naming file,
    line and key for a missing, empty or mistyped value, an id that stands twice, and a file without records.
    """
    records, seen = [], {}
    for line, item in _items(Path(path)):
        where = f"{path}, {line}"
        record = _record(kind, item, where)
        if record.id in seen:
            raise UsageError(
                f"{where}: id {record.id!r} stands already in {seen[record.id]}. Give each record its own."
            )
        seen[record.id] = line
        records.append(record)
    if not records:
        raise UsageError(f"{path} holds no records. Give at least one object with {_keys(kind)}.")
    return records


def _keys(kind: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(kind))


def _items(path: Path):
    """(place in the file, decoded object) for each record."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"There is no file {str(path)!r}. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}.") from None
    if path.suffix == ".json":
        items = _decode(text, str(path))
        if not isinstance(items, list):
            raise UsageError(f"{path} must hold a JSON list of records. For an object a line, name it .jsonl.")
        yield from ((f"record {number}", item) for number, item in enumerate(items, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _decode(line, f"{path}, line {number}")


def _decode(text: str, where: str):
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}.") from None


def _record(kind: type[Record], item: Any, where: str) -> Record:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: a record must be an object with {_keys(kind)}, not {item!r:.80}.")
    values = {}
    for field in dataclasses.fields(kind):
        if field.name not in item:
            raise UsageError(f"{where}: key {field.name!r} is missing. A record has {_keys(kind)}.")
        value = item[field.name]
        if field.name == "id":
            ok, needed = isinstance(value, (int, str)) and not isinstance(value, bool), "a whole number or text"
        elif field.name.endswith("answers"):
            ok = isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)
            needed, value = "a list of one or more non-empty texts", tuple(value) if ok else value
        else:
            ok, needed = isinstance(value, str) and bool(value), "a non-empty text"
        if not ok:
            raise UsageError(f"{where}: {field.name} is {value!r:.80}; it must be {needed}.")
        values[field.name] = value
    return kind(**values)
