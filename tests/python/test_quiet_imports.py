"""The first import of Keras or TensorFlow, by anyone, is quiet; the modules are the usual ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pybackend.model.quiet_imports import install
install()
install()
import {first}
import importlib, keras, tensorflow
for module in (keras, tensorflow):
    print(module.__spec__.name, type(module.__spec__.loader).__name__)
print(importlib.import_module("keras") is keras, callable(keras.layers.Dense))
try:
    import keras_that_does_not_exist
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.mark.parametrize("first", ["keras", "tensorflow"])
def test_an_import_is_quiet_and_gives_the_usual_modules(first: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "keras SourceFileLoader",
        "tensorflow SourceFileLoader",
        "True True",
        "keras_that_does_not_exist",
    ]
