"""Output on the terminal while TensorFlow is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# The output of a new process is the subject.
from conftest import full

from pybackend.core.quiet import is_noise

pytestmark = pytest.mark.launcher

NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795328976.065510   15069 port.cc:153] oneDNN custom operations are on.
2025-01-02 03:04:05.678901: I tensorflow/core/platform/cpu_feature_guard.cc:210] This binary is
To enable the following instructions: AVX2 AVX512F AVX512_VNNI FMA, in other operations, rebuild.
E0000 00:00:1795328976.1 99 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to
W0000 00:00:1795328976.1 99 computation_placer.cc:177] computation placer already registered.
"""
WORTH_READING = """\
F0000 00:00:1795328976.1 99 cpu_feature_guard.cc:32] The library was compiled to use AVX512F
E0000 00:00:1795328976.1 99 cuda_executor.cc:1228] INTERNAL: CUDA Runtime error: no device
ImportError: libtensorflow_framework.so.2: cannot open shared object file
"""
IMPORT = "from pybackend.core.quiet import import_tensorflow\nimport_tensorflow({verbose})\n"


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process without settings for TensorFlow in its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


Import = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def import_stand_in(tmp_path: Path) -> Import:
    """Import, in a new process, a package in Keras's place that runs some code."""

    def run(code: str, verbose: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "keras").mkdir()
        (tmp_path / "keras" / "__init__.py").write_text(f"import os, sys\n{code}\n")
        path = os.pathsep.join([str(tmp_path), *sys.path])
        return run_python(IMPORT.format(verbose=verbose), PYTHONPATH=path, **variables)

    return run


@pytest.mark.parametrize("line", NOISE.splitlines())
def test_a_start_up_line_is_noise(line: str) -> None:
    assert is_noise(line)


@pytest.mark.parametrize("line", [*WORTH_READING.splitlines(), "", "epoch 1/3", "I am a note"])
def test_anything_else_is_not(line: str) -> None:
    assert not is_noise(line)


def test_only_noise_is_left_out(import_stand_in: Import) -> None:
    text = NOISE + WORTH_READING
    done = import_stand_in(f"os.write(2, {text.encode()!r}); print('hello', file=sys.stderr)")
    assert (done.returncode, done.stderr) == (0, WORTH_READING + "hello\n")


def test_a_broken_import_shows_its_error(import_stand_in: Import) -> None:
    done = import_stand_in(f"os.write(2, {NOISE.encode()!r}); raise ImportError('no libcuda')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: no libcuda"
    assert not any(map(is_noise, done.stderr.splitlines()))


def test_the_last_words_of_a_process_that_is_aborted_appear(import_stand_in: Import) -> None:
    done = import_stand_in(f"os.write(2, {(NOISE + WORTH_READING).encode()!r}); os.abort()")
    assert done.returncode < 0
    assert done.stderr == WORTH_READING


def test_a_process_without_stderr_can_import_it(import_stand_in: Import) -> None:
    done = import_stand_in("print('imported')")
    assert done.stdout == "imported\n"
    stand_in = "import os; os.close(2)\nimport sys; sys.modules['keras'] = sys\n"
    done = run_python(stand_in + IMPORT.format(verbose=1))
    assert done.returncode == 0


@pytest.mark.parametrize("level", ["0", "1"])
def test_a_level_that_is_set_asks_for_the_lines(import_stand_in: Import, level: str) -> None:
    done = import_stand_in(f"os.write(2, {NOISE.encode()!r})", TF_CPP_MIN_LOG_LEVEL=level)
    assert done.stderr == NOISE


def test_verbose_2_asks_for_the_lines(import_stand_in: Import) -> None:
    done = import_stand_in(f"os.write(2, {NOISE.encode()!r})", verbose=2)
    assert done.stderr == NOISE


@pytest.mark.full
def test_a_training_and_its_model_print_no_line_of_tensorflow() -> None:
    code = """
import pybackend
result = pybackend.train_mnist("local", workers=2, epochs=1, limit=200, verbose=1)
result.model.summary()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "test accuracy" in done.stdout


FIRST_IMPORT = """
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
        [sys.executable, "-c", FIRST_IMPORT.format(first=first)],
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
