"""YAML files <-> specs. An unknown key is an error that names its nearest neighbour."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml

from real_jax.spec.errors import UsageError
from real_jax.spec.experiment import DataConfig, Experiment, check_experiment
from real_jax.spec.hardware import Cluster, check_cluster
from real_jax.spec.plan import ExecutionPlan, Placement

_HOME = Path(__file__).resolve().parent.parent
PRESETS = _HOME / "presets"


def to_data(value):
    """A spec as plain dictionaries, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: to_data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(v) for v in value]
    return value


def from_data(cls, data, where: str, path: str = ""):
    """Builds dataclass `cls` from plain data; `where` names the file in errors. Missing keys take their defaults."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: {path or 'the file'} must be a mapping of fields, not {data!r}.")
    hints, fields = _hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(fields)}."
            raise UsageError(f"{where}: unknown key {name!r}. {hint}")
        values[key] = _convert(hints[key], value, where, name)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}: key {f'{path}.{name}' if path else name!r} is missing.")
    return cls(**values)


_hints = functools.cache(typing.get_type_hints)


def _convert(hint, value, where: str, name: str):
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_data(hint, value, where, name)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise UsageError(
                f"{where}: {name} is {value!r}; it must be one of {', '.join(map(repr, typing.get_args(hint)))}."
            )
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in typing.get_args(hint) if a is not type(None)), value, where, name)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UsageError(f"{where}: {name} is {value!r}; it must be a list.")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, where, f"{name}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, str):
        try:  # YAML 1.1 reads 1e-5 as text
            return float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
            raise UsageError(f"{where}: {name} is {value!r}; it must be of type {hint.__name__}.")
    return value


def read_yaml(path: Path | str):
    """The content of a YAML file; UsageError where it is missing or is no YAML."""
    path = Path(path)
    try:
        return yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"There is no file {str(path)!r}. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None


def write_yaml(path: Path | str, data, header: str = "") -> None:
    text = "".join(f"# {line}\n" for line in header.splitlines())
    Path(path).write_text(text + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120))


def load_experiment(name: str) -> Experiment:
    """An experiment from a YAML file, or from a preset by its name."""
    preset = PRESETS / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    elif preset.exists():
        path = preset
    else:
        known = sorted(p.stem for p in PRESETS.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"There is no preset {name!r}. {hint}Presets: {', '.join(known)}; or give the path of a .yaml file."
        )
    experiment = from_data(Experiment, read_yaml(path) or {}, str(path))
    return check_experiment(dataclasses.replace(experiment, data=_beside(experiment.data, path.parent)))


def _beside(data: DataConfig, folder: Path) -> DataConfig:
    """Data files that lie beside the configuration are named relative to it; other paths stay as they are."""
    names = {field: getattr(data, field) for field in ("prompts", "answers", "pairs", "held_out")}
    found = {field: str(folder / name) for field, name in names.items() if name and (folder / name).is_file()}
    return dataclasses.replace(data, **found)


def save_experiment(experiment: Experiment, path: Path | str) -> None:
    write_yaml(path, to_data(experiment))


def load_cluster(path: Path | str) -> Cluster:
    """A cluster from its YAML file."""
    return check_cluster(from_data(Cluster, read_yaml(path), str(path)))


def save_cluster(cluster: Cluster, path: Path | str) -> None:
    write_yaml(path, to_data(cluster))


def load_plan(path: Path | str) -> ExecutionPlan:
    """A plan from its YAML file: `cluster`, and under `calls` a placement a line."""
    return plan_from_data(read_yaml(path), str(path))


def plan_from_data(data, where: str) -> ExecutionPlan:
    """A plan from what `plan_data` gives; `where` names its source in errors."""
    if not isinstance(data, Mapping) or not isinstance(data.get("calls"), Mapping):
        raise UsageError(f"{where}: a plan needs a mapping 'calls' of call names to placements.")
    for key in data:
        if key not in ("cluster", "origin", "calls"):
            raise UsageError(f"{where}: unknown key {key!r}. A plan has the keys cluster, origin, calls.")
    calls = {name: from_data(Placement, p, where, f"calls.{name}") for name, p in data["calls"].items()}
    return ExecutionPlan(str(data.get("cluster", "")), calls, str(data.get("origin", "")))


def plan_data(plan: ExecutionPlan) -> dict:
    """A plan as plain data; fields that have their default value are left out."""
    default = Placement()
    calls = {
        name: {k: v for k, v in to_data(p).items() if k in ("first", "data") or v != getattr(default, k)}
        for name, p in plan.placements.items()
    }
    return {"cluster": plan.cluster, "origin": plan.origin, "calls": calls}


def save_plan(plan: ExecutionPlan, path: Path | str) -> None:
    write_yaml(path, plan_data(plan))
