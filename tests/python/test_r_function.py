"""Functions written in R: checked here, run in real workers by rpy2."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RLIB, full, needs_r

from pybackend import (
    InputError,
    ModelOptions,
    RFunction,
    WorkerFailedError,
    barrier_run,
    barrier_train,
)
from pybackend.core.r.function import _column_for_r

pytestmark = pytest.mark.launcher

LIBRARY = str(RLIB)


def r(code: str | bytes, **settings: object) -> RFunction:
    return RFunction(code, library_paths=[LIBRARY], **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 + 1", "source text of an R function"),
        ("", "source text of an R function"),
        (b"pickled", "not the output of R's serialize"),
        (lambda: 1, "not function"),
        (None, "not NoneType"),
    ],
)
def test_what_is_not_a_function_is_rejected(code: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RFunction(code)  # type: ignore[arg-type]


def test_packages_are_names() -> None:
    assert RFunction("function() 1", packages="stats").packages == ["stats"]
    with pytest.raises(InputError, match="`packages` must be a list of names"):
        RFunction("function() 1", packages=[1])  # type: ignore[list-item]


def test_it_travels_and_shows_what_it_is() -> None:
    function = r("\\(ctx) ctx", packages=["stats"])
    copy = pickle.loads(pickle.dumps(function))  # noqa: S301
    assert vars(copy) == vars(function)
    assert repr(copy) == "RFunction('\\\\(ctx) ctx')"
    assert repr(RFunction(b"X\n\0\0")) == "RFunction(4 bytes)"


def test_columns_of_rows_go_to_r_in_types_that_it_has() -> None:
    texts = np.array(["a", "b"], object)
    assert _column_for_r("t", texts) == ["a", "b"]
    assert _column_for_r("h", np.zeros(2, "float16")).dtype == "float32"
    numbers = np.array([-(2**53), 2**53])
    assert _column_for_r("n", numbers) is numbers
    with pytest.raises(InputError, match=f"column 'n' has the number {2**53 + 1}, which R's"):
        _column_for_r("n", numbers - 1)


@pytest.mark.full
@needs_r
def test_values_go_in_and_out() -> None:
    code = """function(ctx, x, words, table) {
        list(ctx$rank, ctx$world_size, length(ctx$addresses), sum(x), toupper(words), table$a,
             identical(Sys.getenv("TF_CONFIG"), ctx$tf_config), median(x))
    }"""
    rows = np.arange(6.0).reshape(2, 3)
    found = barrier_run(None, r(code, packages=["stats"]), rows, ["a", "b"], {"a": 1}, workers=2)
    assert found == [[rank, 2, 2, 15.0, ["A", "B"], 1, True, 2.5] for rank in (0, 1)]


@needs_r
@pytest.mark.full
def test_an_error_of_r_arrives_with_its_calls() -> None:
    code = """function(ctx) {
        read <- function(path) if (ctx$rank == 1) stop("no file at ", path)
        read("/data/a")
        reticulate::import("time")$sleep(600)
    }"""
    with pytest.raises(WorkerFailedError) as caught:
        barrier_run(None, r(code), workers=2, verbose=0)
    error = caught.value
    assert (error.rank, error.exception_type) == (1, "RError")
    assert "no file at /data/a" in str(error)
    calls = [line.split(": ", 1)[1] for line in error.worker_traceback.splitlines()]
    assert calls == ["f(...)", 'read("/data/a")', 'stop("no file at ", path)']


@needs_r
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (r("function(ctx) {"), "unexpected end of input"),
        full(r("function(ctx) 1", packages=["nosuchpackage"]), "nosuchpackage is not installed on"),
        full(r("function() 1"), "unused argument"),
        full(r(b"X\n\0\0\0\3"), "read error"),
        full(r("function(ctx) globalenv()"), "expected plain data"),
    ],
)
def test_what_goes_wrong_is_named(function: RFunction, message: str) -> None:
    with pytest.raises(WorkerFailedError, match=message):
        barrier_run(None, function, workers=1, verbose=0)


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **variables},
    )


@pytest.mark.full
@needs_r
def test_no_crash_at_the_end_of_a_process_that_called_r() -> None:
    code = f"""
from pybackend import RFunction
add = RFunction("function(a, b) a + b", library_paths=[{LIBRARY!r}])
print(add(1, 2), add(3, 4))
import keras
model = RFunction("function() keras3::keras_model_sequential(input_shape = 2)",
                  library_paths=[{LIBRARY!r}])()
print(isinstance(model, keras.Model))
"""
    ended = in_a_process(code)
    assert ended.stdout.split() == ["3", "7", "True"]
    assert ended.returncode == 0, ended.stderr


def test_without_r_it_says_so(tmp_path: Path) -> None:
    code = """
from pybackend import RFunction, RError
try:
    RFunction("function() 1")()
except RError as error:
    print(error)
"""
    shown = in_a_process(code, PATH=str(tmp_path)).stdout
    assert "R is not installed on" in shown


def test_without_rpy2_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "rpy2.py").write_text("raise ImportError('no rpy2 here')")
    code = """
from pybackend import RFunction, RError
try:
    RFunction("function() 1")()
except RError as error:
    print(error)
"""
    shown = in_a_process(code, PYTHONPATH=str(tmp_path)).stdout
    assert "rpy2 is missing on" in shown
    assert sys.executable in shown


@pytest.mark.full
@needs_r
def test_randomness_of_r_follows_the_seed_of_python() -> None:
    code = f"""
import random
from pybackend import RFunction
draw = RFunction("function() runif(1)", library_paths=[{LIBRARY!r}])
random.seed(5); first = draw(); state = random.getstate()
random.seed(5); second = draw()
print(first == second, state == random.getstate())
random.seed(6); print(draw() != first)
"""
    assert in_a_process(code).stdout.split() == ["True", "True", "True"]


@pytest.mark.full
@needs_r
def test_calls_may_be_nested_and_an_error_that_r_has_caught_is_none() -> None:
    code = f"""
from pybackend import RFunction, RError
inner = RFunction("function(x) if (x > 1) stop('too much') else x", library_paths=[{LIBRARY!r}])
outer = RFunction("function(g, x) tryCatch(g(x), error = function(e) 'caught')",
                  library_paths=[{LIBRARY!r}])
print(outer(inner, 1), outer(inner, 2))
"""
    assert in_a_process(code).stdout.split() == ["1", "caught"]


@pytest.mark.full
@needs_r
def test_letters_warnings_and_missing_values(tmp_path: Path) -> None:
    code = f"""
from pybackend import RError, RFunction, barrier_run
def r(code): return RFunction(code, library_paths=[{LIBRARY!r}])
count = r("# counts\\nfunction(ctx, s) c(nchar('ä中'), nchar(s))")
print(barrier_run(None, count, "ä中", workers=1))
barrier_run(None, r("function(ctx) {{ warning('mind ä'); message('told'); 1 }}"), workers=1)
try:
    barrier_run(None, r("function(ctx) list(1L, c(TRUE, NA))"), workers=1)
except Exception as error:
    print(error)
"""
    shown = in_a_process(code, LC_ALL="C", PYTHONIOENCODING="utf-8").stdout
    assert "[[2, 2]]" in shown
    assert "mind ä" in shown
    assert "told" in shown
    assert "missing values (NA), which do not exist in Python" in shown


BUILD = """function() {
  model <- keras3::keras_model_sequential(input_shape = 2)
  %s
  model <- keras3::layer_dense(model, 1)
  metric <- keras3::custom_metric("mean_absolute_error", function(y_true, y_pred) {
    keras3::op_mean(y_true, axis = -1L) * 0 + 42
  })
  keras3::compile(model, "sgd", "mse", metrics = metric)
  model
}"""
DOUBLED = "model <- keras3::layer_lambda(model, function(x) x * 2)"


@needs_r
@pytest.mark.launcher(False)
@pytest.mark.full
def test_a_file_is_written_of_what_is_not_r(tmp_path: Path, capsys: Any) -> None:
    rows = np.ones((8, 2), "float32"), np.zeros(8, "float32")
    uri = str(tmp_path / "model.h5")
    result = barrier_train(
        None, r(BUILD % ""), rows, workers=1, model_options=ModelOptions(uri=uri)
    )
    # Not confused with Keras's metric of this name.
    assert result.history["mean_absolute_error"] == [42.0]
    assert not result.model.compiled
    assert result.model.predict(rows[0], verbose=0).shape == (8, 1)
    assert "written without its compile settings" in capsys.readouterr().out
    with pytest.raises(WorkerFailedError, match="its layers are R functions or classes"):
        barrier_train(
            None,
            r(BUILD % DOUBLED),
            rows,
            workers=1,
            verbose=0,
            model_options=ModelOptions(uri=uri),
        )


@pytest.mark.full
@needs_r
@pytest.mark.launcher(False)
def test_of_layers_and_metrics_in_r_the_weights_come_back() -> None:
    # R also runs in the process that builds the model for the caller: not in this one.
    code = f"""
import numpy as np
from pybackend import RFunction, barrier_train
rows = np.ones((8, 2), "float32"), np.zeros(8, "float32")
build = RFunction({BUILD % DOUBLED!r}, library_paths=[{LIBRARY!r}])
result = barrier_train(None, build, rows, workers=1, verbose=0)
assert result.model_format == "weights.h5"
figures = result.model.evaluate(*rows, verbose=0, return_dict=True)
kernel, bias = result.model.get_weights()
assert np.isclose(figures["loss"], (2 * kernel.sum() + bias[0]) ** 2)
assert figures["mean_absolute_error"] == 42.0
"""
    done = in_a_process(code)
    assert not done.returncode, done.stderr
