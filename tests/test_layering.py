"""DESIGN's import table, over the syntax trees of all modules: imports inside functions and for type checking too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import real_jax

ROOT = Path(real_jax.__file__).resolve().parent

# Package -> what of real_jax its modules may import, beside the package itself. Prefixes of module names.
MAY_IMPORT = {
    "spec": (),
    "reallocation": ("spec",),
    "planner": ("spec", "reallocation.transfers"),
    "cost": ("spec", "models", "runtime.meshes", "runtime.optimizer"),
    "models": ("spec.arch", "spec.errors"),
    "algorithms": ("spec.dataflow",),
    "rollout": ("models", "spec"),
    "data": ("spec",),
    "runtime": ("spec", "reallocation", "cost", "models", "algorithms", "rollout", "data"),
}
# Package or module -> libraries beside the standard library. None: any of the project's dependencies.
LIBRARIES = {
    "spec": (),
    "spec.files": ("yaml",),
    "reallocation": ("numpy",),
    "reallocation.move": ("numpy", "jax"),
    "reallocation.route": ("jax",),
    "reallocation.assembly": ("numpy", "jax"),
    "reallocation.exchange": ("numpy", "jax"),
    "reallocation.average": ("jax",),
    "reallocation.memories": ("jax",),
    "reallocation.wire": ("numpy", "jax"),
    "planner": ("numpy",),
    "planner.report": ("numpy", "matplotlib", "rich"),
    "algorithms": ("jax",),
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "chex"}


def modules():
    """Module name below real_jax ("planner.search") -> syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def imports(tree):
    """(full name, line) of everything imported anywhere in the tree; `from a import b` may mean a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def inside(name, prefixes):
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def packages():
    return {name.split(".")[0] for name in MODULES if (ROOT / name.split(".")[0]).is_dir() and name}


def test_the_table_covers_every_package():
    assert packages() == set(MAY_IMPORT)


def test_packages_import_only_what_the_table_allows():
    wrong = []
    for module, tree in MODULES.items():
        package = module.split(".")[0]
        if package not in MAY_IMPORT:
            continue  # the commands and the package's own names
        for name, line in imports(tree):
            if name.split(".")[0] == "real_jax":
                inner = name.removeprefix("real_jax").removeprefix(".")
                if not inside(inner, (package, *MAY_IMPORT[package])):
                    wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_libraries_are_those_the_table_names():
    wrong = []
    for module, tree in MODULES.items():
        allowed = LIBRARIES.get(module, LIBRARIES.get(module.split(".")[0]))
        if allowed is None:
            continue
        for name, line in imports(tree):
            top = name.split(".")[0]
            if top != "real_jax" and top not in sys.stdlib_module_names and top not in allowed:
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_planner_reaches_no_jax_through_others():
    """Every module that the planner's imports lead to, as they stand in the sources."""
    seen, todo = set(), [m for m in MODULES if m.split(".")[0] == "planner"]
    wrong = []
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, line in imports(MODULES[module]):
            if name.split(".")[0] in JAX:
                wrong.append(f"{module}:{line} imports {name}")
            inner = name.removeprefix("real_jax.")
            todo += [m for m in (inner, inner.rpartition(".")[0]) if m in MODULES and name.startswith("real_jax.")]
    assert {"spec.plan", "spec.costs", "reallocation.transfers"} <= seen
    assert not wrong, "\n".join(wrong)


def test_the_planner_runs_where_there_is_no_jax():
    names = [m for m in MODULES if m.split(".")[0] in ("planner", "spec")] + ["reallocation.transfers"]
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(JAX))
    script += "".join(f"import real_jax.{name}\n" for name in names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_else():
    script = "import sys, real_jax\nprint(sorted({'jax', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_only_meshes_asks_jax_for_devices():
    asks = {"devices", "local_devices", "device_count", "local_device_count"}
    found = {
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in asks
        if isinstance(node.value, ast.Name) and node.value.id == "jax"
    }
    assert found <= {"runtime.meshes"}


def test_no_package_imports_a_command():
    commands = {m for m in MODULES if "." not in m and m and not (ROOT / m).is_dir()}
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in MODULES.items()
        if module.split(".")[0] in MAY_IMPORT
        for name, line in imports(tree)
        if inside(name.removeprefix("real_jax."), commands) and name.startswith("real_jax.")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_name_for_notebooks_is_a_commands_name():
    assert not set(real_jax._NAMES) & {m.split(".")[0] for m in MODULES}


@pytest.mark.parametrize("name", sorted(real_jax._NAMES))
def test_names_for_notebooks_exist(name):
    assert getattr(real_jax, name) is not None


def test_packages_are_at_most_two_levels_deep():
    assert max(m.count(".") for m in MODULES) <= 1
