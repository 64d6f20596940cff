"""One small job on every route of Python. Each gives the weights of one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from conftest import RLIB, needs_r, shared_spark, wait_for, worker_processes

from pybackend import RFunction, barrier_train
from pybackend.core.launchers.spark.sparklyr import _is_without_protobuf

PYSPARK = tuple(map(int, pyspark.__version__.split(".")[:2]))
if PYSPARK < (4, 2):
    # It leaves its sockets for collecting to the garbage collector.
    pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

# Shared with the R package's tests, which are where R expects them.
SCENARIO = Path(__file__).parents[2] / "rpkg/tests/testthat/scenario/scenario.py"


def scenario_module() -> Any:
    spec = importlib.util.spec_from_file_location("scenario", SCENARIO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scenario = scenario_module()


MODELS = {
    "Python": scenario.build,
    "R": RFunction(scenario.r_source(), library_paths=[str(RLIB)]),
}


languages = pytest.mark.parametrize(
    "language", ["Python", pytest.param("R", marks=[needs_r, pytest.mark.full])]
)


@pytest.fixture(scope="module")
def classic() -> Iterator[Any]:
    with shared_spark("local-cluster[2,1,1024]") as session:
        yield session
    wait_for(lambda: not worker_processes())


def trained(session: Any, model: Any) -> Any:
    return barrier_train(session, model, scenario.arrays(), verbose=0, **scenario.arguments())


def check(result: Any) -> None:
    assert scenario.difference(result.model.get_weights()) < 1e-6
    assert sum(worker.rows for worker in result.workers) == scenario.JOB["rows"]


@languages
@pytest.mark.full
def test_local(language: str) -> None:
    check(trained("local", MODELS[language]))


@languages
@pytest.mark.full
def test_classic(classic: Any, language: str) -> None:
    check(trained(classic, MODELS[language]))


@needs_r
def test_a_spark_without_protobuf_is_known(classic: Any) -> None:
    assert _is_without_protobuf(classic, 2) is (PYSPARK >= (4, 3))
