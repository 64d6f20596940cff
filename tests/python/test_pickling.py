"""Functions of the user's own modules run where those modules are not installed."""

from __future__ import annotations

import ast
import linecache
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

import pybackend
from pybackend.core.errors import InputError, TfdistError
from pybackend.core.job import pickling
from pybackend.core.job.pickling import (
    explain_failure,
    find_annotations,
    make_code,
    pickle_value,
    read_source,
)


def run_elsewhere(data: bytes, folder: Path) -> str:
    """Unpickle and call a function in a process that cannot import this test's modules."""
    (folder / "function.pkl").write_bytes(data)
    code = "import cloudpickle; print(cloudpickle.load(open('function.pkl', 'rb'))())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_function_of_a_users_module_travels_as_code(tmp_path: Path, monkeypatch: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "my_models.py").write_text("SIZE = 3\ndef build():\n    return SIZE * 2\n")
    monkeypatch.syspath_prepend(source)
    import my_models

    data = pickle_value(my_models.build, "`model`", [my_models.build])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run_elsewhere(data, elsewhere) == "6"
    given = partial(my_models.build)
    assert run_elsewhere(pickle_value(given, "`model`", [given]), elsewhere) == "6"
    assert "my_models" not in cloudpickle.list_registry_pickle_by_value()


def test_a_function_of_a_module_without_a_file_travels_as_code(
    tmp_path: Path, monkeypatch: Any
) -> None:
    module = ModuleType("made_here")
    exec("import math\nSIZE = 3\ndef build():\n    return math.floor(SIZE * 2.5)", vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, "made_here", module)
    data = pickle_value(module.build, "`model`", [module.build])
    assert run_elsewhere(data, tmp_path) == "7"
    assert len(pickle_value(time.sleep, "`fn`", [time.sleep])) < 200


def test_installed_packages_travel_by_name() -> None:
    import json

    assert len(pickle_value(json.dumps, "`fn`", [json.dumps])) < 200


def test_what_cannot_be_pickled_is_named() -> None:
    import threading

    with pytest.raises(InputError, match="`fn` cannot be sent to the workers"):
        pickle_value(threading.Lock(), "`fn`")


def test_what_fails_there_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    def fail() -> str:
        import traceback

        return traceback.format_stack()[-1]

    line = f'File "{__file__}", line {fail.__code__.co_firstlineno + 3}, in fail'
    assert line in run_elsewhere(pickle_value(fail, "`fn`"), tmp_path)


CELL = """
from typing import Any
import inspect
import pandas as pd

def build(x: "pd.DataFrame | None" = None) -> Any:
    def add(frame: pd.DataFrame | None, *more: Any) -> int:
        return 1
    return inspect.getsource(build), [str(g) for g in sorted(build.__globals__)]
"""


def test_the_source_of_a_notebooks_cell_travels(tmp_path: Path) -> None:
    file, names = "<cell 1>", {"__name__": "__main__"}
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    exec(compile(CELL, file, "exec"), names)  # noqa: S102 - as IPython does
    source, found = ast.literal_eval(run_elsewhere(pickle_value(names["build"], "`fn`"), tmp_path))
    assert source == CELL[CELL.index("def build") :]
    # Packages that AutoGraph needs to compile the annotations, and that may be missing.
    assert {"Any", "pd", "inspect"} <= set(found)


def test_annotations_stand_for_what_they_name() -> None:
    def build(x: Series[int] | None, y: Optional[Frame]) -> nd.Array:  # noqa: F821
        return x

    assert find_annotations(build) == {"Series", "Optional", "Frame", "nd"}
    copy = cloudpickle.loads(pickle_value(build, "`fn`"))
    names = copy.__globals__
    assert eval("Optional[Frame], nd.Array, Series[int] | None, None | Series", names)  # noqa: S307


def test_a_file_that_is_edited_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    for text in ("x = 1\n", "x = 1 + 1\n"):
        file.write_text(text)
        assert read_source(str(file)) == text
        make_code(lambda: None, (), str(file), text)
    assert read_source(str(file)) == text
    file.unlink()
    assert read_source(str(file)) == ""
    make_code(lambda: None, (), str(file), text)
    assert read_source(str(file)) == text


X = np.ones((8, 4), "float32")
Y = np.ones((8, 1), "float32")
LOCK = threading.Lock()


class Logs(keras.callbacks.Callback):
    """Contains a writer, nested deeply."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.writers = {"loss": [tf.summary.create_file_writer(str(folder))]}


class Waits(keras.callbacks.Callback):
    """Uses a lock of its module."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Wait."""
        LOCK.acquire()


class Doubles(keras.layers.Layer):
    """Has a table that it creates immediately, and no `get_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, x: Any) -> Any:
        """Return the double."""
        return 2 * x


class Remembers(keras.losses.Loss):
    """Has a generator, and no `get_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"numbers": (n for n in range(3))}

    def call(self, y: Any, y_pred: Any) -> Any:
        """Return the mean squared error."""
        return keras.ops.mean((y - y_pred) ** 2, -1)


def _compiled(*parts: Any, loss: Any = "mse") -> Any:
    model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def _flushing(folder: Path) -> Any:
    writer = tf.summary.create_file_writer(str(folder))
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: writer.flush())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: _compiled(Doubles()), ["the layer Doubles", "`table`", "Pass a function"]),
        (
            lambda _: _compiled(loss=Remembers()),
            ["the loss Remembers", "`state['numbers']`", "Pass a function"],
        ),
        (
            lambda path: (_compiled(), [Logs(path)]),
            ["the callback Logs", "`writers['loss'][0]`", "`on_train_begin`"],
        ),
        (
            lambda path: (_compiled(), [_flushing(path)]),
            ["the callback LambdaCallback", "`on_epoch_end`, which uses `writer`", "_train_begin`"],
        ),
        (
            lambda _: (_compiled, [keras.callbacks.History(), Waits()]),
            ["the callback Waits", "`on_epoch_end`, which uses `LOCK`", "`on_train_begin`"],
        ),
    ],
)
def test_the_attribute_that_cannot_be_sent_is_named(
    make: Any, expected: list[str], tmp_path: Path
) -> None:
    made = make(tmp_path)
    model, callbacks = made if isinstance(made, tuple) else (made, [])
    with pytest.raises(TfdistError) as caught:
        pybackend.barrier_train(None, model, (X, Y), workers=2, callbacks=callbacks, verbose=0)
    for part in expected:
        assert part in str(caught.value)


def test_what_a_function_uses_is_named() -> None:
    lock = threading.Lock()
    locks = {"one": [lock]}
    with pytest.raises(InputError, match=r"`fn` cannot .* because of `locks\['one'\]\[0\]` \(cl"):
        pickle_value(lambda: locks, "`fn`")
    with pytest.raises(InputError, match=r"because of `lock` \(class lock\): .* inside the func"):
        pickle_value(lambda lock=lock: lock, "`fn`")


@pytest.mark.parametrize(("name", "limit"), [("_SECONDS", 0.3), ("_MOST_PARTS", 30)])
def test_the_search_for_the_part_ends(name: str, limit: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(pickling, name, limit)
    tried = []

    def dump(part: Any) -> None:
        tried.append(part)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(time.sleep, 0.01).result()  # as a model is pickled
        raise TypeError("cannot pickle it")

    value = [{"one": [n]} for n in range(1000)]
    message = explain_failure(value, "`data`", dump, TypeError("no"))
    assert message.startswith("`data` cannot be sent to the workers")
    assert len(tried) <= 30
