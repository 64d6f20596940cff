"""The layers of the package, the cost of importing it, and the modules that it does not import."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import pybackend

ROOT = Path(pybackend.__file__).parent

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def listed_layers() -> list[list[str]]:
    """Return the layers from the document, a line each, lowest first."""
    lines = ARCHITECTURE.read_text().partition("## Layers")[2].splitlines()
    numbered = [line for line in lines if re.match(r"\d+\. ", line)]
    return [re.findall(r"`(\w+)/?`", line) for line in numbered]


# A module imports only from its own layer and lower ones, and never in a circle.
LAYERS = listed_layers()
# Heavy, or not installed for every user.
HEAVY = {"tensorflow", "keras", "pyspark", "numpy", "pandas", "pyarrow", "h5py", "matplotlib"}


def sources() -> dict[str, ast.Module]:
    """Return every module by its name inside the package or its core, e.g. ``data.arrays``."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("core", "__init__"):
            continue
        if parts[0] == "core":  # its rooms go by their own names
            parts = parts[1:]
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return found


SOURCES = sources()


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those that only a type checker reads."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield from running(node)


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return full names of the modules, or names in modules, that nodes import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inner(name: str, nodes: Callable[[ast.AST], Iterator[ast.AST]] = running) -> set[str]:
    """Return the package's modules that a module imports, by default when it runs."""
    found = set()
    for full in imported(nodes(SOURCES[name])):
        parts = full.split(".")
        if parts[0] != "pybackend" or len(parts) == 1:
            continue
        parts = parts[2:] if parts[1] == "core" else parts[1:]
        one, other = ".".join(parts), ".".join(parts[:-1])
        found.add(one if one in SOURCES else other)
    return found


def layer(name: str) -> int:
    top = name.partition(".")[0]
    return next((number for number, names in enumerate(LAYERS) if top in names), -1)


def test_every_module_has_its_layer() -> None:
    assert sorted({name.partition(".")[0] for name in SOURCES}) == sorted(
        name for names in LAYERS for name in names
    )


def test_a_module_imports_only_from_layers_before_it() -> None:
    later = {(name, one) for name in SOURCES for one in inner(name) if layer(one) > layer(name)}
    assert later == set()


def test_only_version_and_place_are_taken_from_the_package_itself() -> None:
    for name in SOURCES:
        if layer(name) == len(LAYERS) - 1:  # it may use everything that users may use
            continue
        for node in running(SOURCES[name]):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pybackend", name
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pybackend":
                assert node.attr in ("__version__", "__file__"), name


CORE = [path.relative_to(ROOT).parts[1:] for path in sorted((ROOT / "core").rglob("*.py"))]


def test_the_core_imports_nothing_that_stands_on_it() -> None:
    for parts in CORE:
        tree = ast.parse((ROOT / "core").joinpath(*parts).read_text())
        own = {full for full in imported(ast.walk(tree)) if full.startswith("pybackend.")}
        assert {full for full in own if not full.startswith("pybackend.core.")} == set(), parts


def test_the_core_runs_without_what_stands_on_it(tmp_path: Path) -> None:
    """Copy the core alone, train with it, and import all of it."""
    shutil.copytree(ROOT / "core", tmp_path / "pybackend" / "core")
    shutil.copy(ROOT / "__init__.py", tmp_path / "pybackend")
    modules = [".".join(("pybackend.core", *parts)).removesuffix(".py") for parts in CORE]
    script = tmp_path / "script.py"
    program = f"""
import importlib, sys
import pybackend
assert pybackend.__file__.startswith(sys.path[0])
for name in {[name.removesuffix(".__init__") for name in modules]}:
    importlib.import_module(name)
import numpy as np, keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
result = pybackend.barrier_train(
    None, model, (np.ones((8, 2)), np.ones((8, 1))), workers=2, batch_size=2, verbose=0
)
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("pybackend.")}}
print(len(result.history["loss"]), rooms)
"""
    script.write_text(program)
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (0, "1 {'core'}\n"), shown.stderr


def needs_only_the_core(test: Path) -> bool:
    """Return whether a file of tests is about a module of the core, and names nothing else."""
    if test.stem.removeprefix("test_") not in {parts[-1].removesuffix(".py") for parts in CORE}:
        return False
    tree = ast.parse(test.read_text())
    modules = {full for full in imported(ast.walk(tree)) if full.startswith("pybackend.")}
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pybackend"
    }
    homes = {f"pybackend.{pybackend._HOME[name]}" for name in names & set(pybackend._HOME)}
    return all(full.startswith("pybackend.core.") for full in modules | homes)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_tests_of_the_core_pass_without_what_stands_on_it(tmp_path: Path) -> None:
    """Run the tests that start no cluster, and those of exactness, with the core alone."""
    shutil.copytree(ROOT / "core", tmp_path / "pybackend" / "core")
    shutil.copy(ROOT / "__init__.py", tmp_path / "pybackend")
    tests = tmp_path / "tests" / "python"
    shutil.copytree(Path(__file__).parent, tests)
    shutil.copy(ROOT.parent / "pyproject.toml", tmp_path)
    alone = [path.name for path in sorted(tests.glob("test_*.py")) if needs_only_the_core(path)]
    assert len(alone) > 50
    command = [sys.executable, "-m", "pytest", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for chosen in (["-m", "fast", *alone], ["-m", "not full", "test_exact.py"]):
        subprocess.run([*command, *chosen], cwd=tests, env=environment, check=True)


@pytest.mark.parametrize("nodes", [running, ast.walk])
def test_no_module_imports_itself_through_others(nodes: Any) -> None:
    graph = {name: inner(name, nodes) for name in SOURCES if name != "__init__"}
    TopologicalSorter(graph).prepare()  # its error has the circle


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    """Return the calls of a function, by its name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if getattr(node.func, "id", None) == function]


def test_only_a_view_walks_over_the_parts_of_a_model() -> None:
    for name, tree in SOURCES.items():
        if name != "model.view":
            walks = [one for one in calls(tree, "flatten") if "vars(" in ast.unparse(one)]
            assert [ast.unparse(one) for one in walks] == [], name
            read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert read.isdisjoint({"submodules", "_flatten_layers"}), name


# How often a module looks at a model. Others get a view: a new one costs a search, and is needed
# only where a part may have been created since. Each of these either has the model first, or runs
# after code of the user.
LOOKS = {
    # the session
    "api.in_process": 1,
    "api.request": 1,
    "ml.persistence": 1,
    "model.onnx": 2,
    # copies of a model, and the model that they are compared with
    "model.transfer": 3,
    "model.compare": 1,
    # a worker's model, once it is loaded and once it is built
    "engine.replica": 2,
    "engine.evaluation": 2,
    "parameter_server.chief": 1,
    # between steps
    "engine.sync": 2,
    "engine.equal_state": 1,
    "engine.step_changes": 1,
    "engine.checkpoint.training_state": 1,
    # a layer in another one
    "engine.audit.one_process": 1,
}


def test_a_model_is_looked_at_once_and_the_view_is_passed_on() -> None:
    found = {name: len(calls(tree, "ModelView")) for name, tree in SOURCES.items()}
    found.pop("model.view")
    assert {name: count for name, count in found.items() if count} == LOOKS


def test_only_a_worker_imports_the_engine() -> None:
    trains = ("engine", "parameter_server")
    others = [name for name in SOURCES if name.partition(".")[0] not in (*trains, "worker")]
    used = {(name, one) for name in others for one in inner(name, ast.walk)}
    assert {(name, one) for name, one in used if one.partition(".")[0] in trains} == set()


def test_launchers_are_imported_by_their_front_door_only() -> None:
    # The launcher of feeds is one of its own, as another package's could be.
    outside = [name for name in SOURCES if not name.startswith(("launchers.", "tfos.feed."))]
    outside.remove("launchers")
    assert {n: o for n in outside for o in inner(n) if o.startswith("launchers.")} == {}


def test_pyspark_is_imported_in_a_few_rooms_only() -> None:
    importing = {
        name
        for name, tree in SOURCES.items()
        if any(full.partition(".")[0] == "pyspark" for full in imported(running(tree)))
    }
    rooms = ("launchers.spark.", "doctor.", "ml.", "tfos.")
    elsewhere = {name for name in importing if not name.startswith(rooms)}
    # Rows and vectors of Spark, which feeds and workers need.
    assert elsewhere <= {"data.spark_rows", "tfos.feed.items", "job.value_kinds"}


def reach(name: str) -> set[str]:
    """Return all modules of this package that one imports, including imports in functions."""
    reached: set[str] = set()
    waiting = {name}
    while waiting:
        waiting = set().union(*(inner(one) for one in waiting)) - reached
        reached |= waiting
    return reached


@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith("_task")])
def test_what_runs_on_executors_imports_no_file_of_the_driver(name: str) -> None:
    driver = {
        other
        for other in reach(name)
        if other.partition(".")[0] in ("api", "doctor", "bridge", "cli")
        or other == "launchers.local"
        or (other.startswith("launchers.spark.") and not other.endswith("_task"))
    }
    assert driver == set()


def test_the_checks_see_imports_inside_functions() -> None:
    assert "model.serialization" in inner("engine.save")
    assert "collective" in inner("worker")
    assert inner("words") == set()


def test_only_public_names_of_other_packages_are_used() -> None:
    for name, tree in SOURCES.items():
        text = ast.unparse(tree)
        for inside in ("keras.src", "tensorflow.python", "tf.python", "tensorflow.compat"):
            assert inside not in text, name
        for full in imported(running(tree)):
            hidden = [part for part in full.split(".") if part.startswith("_") and part[:2] != "__"]
            assert hidden == [], name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                # `os._exit` is documented; its underscore is only a warning.
                own = (f"self.{node.attr}", f"cls.{node.attr}", "os._exit")
                assert ast.unparse(node) in own, name


def fresh(program: str) -> object:
    """Return the JSON output of a program in a new Python process."""
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return json.loads(shown.stdout)


def loaded(statement: str) -> set[str]:
    """Return the heavy packages that a statement imports."""
    found = fresh(f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))")
    assert isinstance(found, list)
    return HEAVY & set(found)


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert loaded("import pybackend") == set()


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        (
            "from pybackend import make_tf_config, read_tf_config, InputError; "
            "from pybackend.types import TrainResult",
            set(),
        ),
        (
            "import pybackend.cli, pybackend.doctor.machine; pybackend.doctor.machine.doctor()",
            set(),
        ),
        ("from pybackend import *", {"numpy"}),
        # It waits on each host for ten minutes.
        ("import pybackend.core.launchers.hosts.keeper_task", set()),
        ("import pybackend.core.launchers.script.agent", set()),
        (
            "import pybackend.bridge, pybackend.core.worker; "
            "import pybackend.core.launchers.spark.barrier",
            {"numpy"},
        ),
    ],
)
def test_what_else_costs_little(statement: str, allowed: set[str]) -> None:
    assert loaded(statement) <= allowed


def test_every_public_name_has_a_home_and_is_there() -> None:
    assert list(pybackend.__all__) == sorted(pybackend.__all__)
    for name in pybackend.__all__:
        assert getattr(pybackend, name) is not None
    homes = {
        name: getattr(pybackend, name).__module__
        for name in pybackend.__all__
        if name != "__version__"
    }
    assert {module.partition(".")[0] for module in homes.values()} == {"pybackend"}
    assert dir(pybackend) == sorted(pybackend.__all__)


@pytest.mark.parametrize("module", ["", "types"])
def test_the_public_names_are_those_exported_lazily_and_those_of_the_type_checker(
    module: str,
) -> None:
    tree = SOURCES[module or "__init__"]
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        (alias.name, (node.module or "").removeprefix("pybackend."))
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "pybackend"
        for alias in node.names
    }
    assert typed == set((pybackend.types if module else pybackend)._HOME.items())


def test_a_name_that_moved_says_where_it_is() -> None:
    for name, instead in {
        "TrainResult": "it is pybackend.types.TrainResult",
        "Checkpoint": "use Recovery",
        "sha256_of": "use hashlib.sha256",
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {instead}$"):
            getattr(pybackend, name)
    for name in pybackend.types.__all__:
        assert getattr(pybackend.types, name).__module__.startswith("pybackend.")


def test_few_names_are_exported() -> None:
    assert len(pybackend.__all__) <= 60


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pybackend' has no attribute 'train'"):
        _ = pybackend.train  # type: ignore[attr-defined]


def test_every_path_of_the_architecture_page_exists() -> None:
    text = re.sub(r"(?m)^[-*=]{4,}.*$", "", ARCHITECTURE.read_text())
    folders = [ROOT, ROOT / "core", ROOT.parent, *(one for one in ROOT.rglob("*") if one.is_dir())]
    folders += [ROOT.parent / "rpkg" / "R", ROOT.parent / "scripts"]
    named = re.findall(r"(?<![\w/.-])[\w/.-]+\.(?:py|R|md|sh)\b", text)
    assert len(named) > 100
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert missing == []
