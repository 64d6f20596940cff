"""Functions of the user's own modules run where those modules are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from pybackend import InputError
from pybackend.job.pickling import pickle_value


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
    assert "my_models" not in cloudpickle.list_registry_pickle_by_value()


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
