"""The first line of Spark's own failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from connect import connect_server, new_session
from pythons import python_without

import pybackend
from pybackend import ClusterError, barrier_run
from pybackend.core.launchers.spark import explain as explain_module
from pybackend.core.launchers.spark.explain import explain_spark_error

SPARK_SAYS = """\
Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost \
task 0.3 in stage 1.0 (TID 7) (10.0.0.7 executor 2): org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1, in main
{cause}

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:572)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def explain(cause: str) -> str:
    return str(explain_spark_error(RuntimeError(SPARK_SAYS.format(cause=cause))))


@pytest.mark.parametrize(
    ("cause", "headline"),
    [
        ("ModuleNotFoundError: No module named 'pyarrow'", "has no module 'pyarrow'"),
        ("ModuleNotFoundError: No module named 'h5py.h5'", "has no module 'h5py'"),
        (
            "PySparkImportError: [PACKAGE_NOT_INSTALLED] PyArrow >= 18.0.0 must be installed",
            "has no module 'pyarrow'",
        ),
        (
            "PySparkImportError: [UNSUPPORTED_PACKAGE_VERSION] PyArrow >= 18.0.0 must be installed",
            "has too old a version of 'pyarrow'",
        ),
    ],
)
def test_a_missing_module_comes_first(cause: str, headline: str) -> None:
    lines = explain(cause).splitlines()
    assert lines[0] == f"Spark could not run the job: the executors' Python on 10.0.0.7 {headline}"
    assert "-m pip install --upgrade" in lines[2]
    assert not [line for line in lines if line.startswith("\tat ")]


@pytest.mark.parametrize(("machines", "other"), [(1, " (/usr/bin/python3)"), (2, "")])
def test_a_module_that_the_workers_have_is_missing_for_a_udf(
    machines: int, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [True, "vm", "/venv/bin/python"]
    monkeypatch.setattr(explain_module, "ask_executors", lambda session, look: [found, found])
    monkeypatch.setattr(explain_module, "is_one_machine", lambda session: machines == 1)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    says = RuntimeError(SPARK_SAYS.format(cause="ModuleNotFoundError: No module named 'pyarrow'"))
    lines = str(explain_spark_error(says, object())).splitlines()
    assert lines[0] == (
        f"Spark could not run the job: the Python of the table's Python UDFs{other} on 10.0.0.7 "
        "has no module 'pyarrow'"
    )
    assert lines[2] == (
        "What to do: set PYSPARK_PYTHON=/venv/bin/python, which has it, or the setting "
        "spark.pyspark.python, before the session starts"
    )


def test_other_causes_are_the_last_line_of_python() -> None:
    assert explain("KeyError: 'x'").startswith("Spark could not run the job: KeyError: 'x'\n")
    odd = str(explain_spark_error(RuntimeError("")))
    assert odd.startswith("Spark could not run the job: \n")


PROGRAM = """
import sys, traceback
from conftest import spark_session, wait_for
import pybackend
from pybackend.core.launchers.spark.explain import _levels
if __name__ == "__main__":
    with spark_session("local[2]") as session:
        session.sparkContext.setLogLevel("WARN")
        session.sql("SELECT 1").collect()  # SQL silences the log: its start may outlast the job
        try:
            pybackend.barrier_run(session, lambda context: 1, workers=2)
        except pybackend.ClusterError:
            traceback.print_exc(file=sys.stdout)
        wait_for(lambda: len(_levels(session)) == 2)  # none is OFF any more
        print("levels afterwards:", *_levels(session).values())
"""


@pytest.mark.full
def test_a_missing_module_is_named_without_the_stack_of_java(tmp_path: Path) -> None:
    python = python_without(tmp_path, "pyarrow*")
    variables = {k: v for k, v in os.environ.items() if k != "SPARK_CONNECT_MODE_ENABLED"}
    path = os.pathsep.join([str(Path(pybackend.__file__).parents[1]), str(Path(__file__).parent)])
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={**variables, "PYTHONPATH": path, "PYSPARK_PYTHON": str(python)},
    )
    headline = f"Spark could not run the job: the executors' Python ({python}) on "
    assert headline in shown.stdout
    assert " has no module 'pyarrow'" in shown.stdout
    assert f"run `{python} -m pip install --upgrade pyarrow`" in shown.stdout
    assert "levels afterwards: WARN WARN" in shown.stdout
    for stream in (shown.stdout, shown.stderr):
        assert "\tat org.apache.spark" not in stream
    assert "Exception in task" not in shown.stderr


@pytest.mark.full
def test_a_missing_module_behind_connect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_without(tmp_path, "pyarrow*")
    (tmp_path / "server").mkdir()
    with connect_server(tmp_path / "server", str(python)) as (url, _):
        monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = new_session(url)
        with pytest.raises(ClusterError, match=r"^Spark could not run the job: .* 'pyarrow'") as e:
            barrier_run(session, lambda context: 1, workers=2)
        session.stop()
    assert f"the executors' Python ({python})" in str(e.value)
    assert f"{python} -m pip install --upgrade pyarrow" in str(e.value)
