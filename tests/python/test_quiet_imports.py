"""The first import of Keras or TensorFlow, by any code, is quiet and has the usual modules."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import full

PROGRAM = """
from pybackend.core.quiet import install
install()
install()
{first}
import gc, importlib, keras, tensorflow
print(gc.isenabled())
for module in (keras, tensorflow):
    print(module.__spec__.name, type(module.__spec__.loader).__name__)
print(importlib.import_module("keras") is keras, callable(keras.layers.Dense))
try:
    import keras_that_does_not_exist
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.mark.parametrize(
    "first",
    [
        "import keras",
        full("import tensorflow"),
        # As a call that needs Keras, in a session in which it was not imported.
        full("from pybackend.core.quiet import import_tensorflow; import_tensorflow()"),
    ],
)
def test_an_import_is_quiet_and_gives_the_usual_modules(first: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env={k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "True",
        "keras SourceFileLoader",
        "tensorflow SourceFileLoader",
        "True True",
        "keras_that_does_not_exist",
    ]
