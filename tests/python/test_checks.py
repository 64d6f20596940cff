"""R's tests, linters, R CMD check, vignettes and the site as Makefile targets; names of tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ALONE, FORGE, GROUPS

ROOT = Path(__file__).parents[2]
# Targets that need the same tarball are one group; the longest come first.
CHECKS = {
    "tarball": ["vignettes", "r-check-no-python", "docs", "r-check-python"],
    "r-plain": ["r-test-plain"],
    "r-cluster": ["r-test-cluster"],
    "r-local": ["r-test-local"],
    "r-lint": ["r-lint"],
    "py-lint": ["py-lint"],
    "matrix": ["test-matrix"],
}
MARKS = {
    "docs": [pytest.mark.full],
    "r-check-python": [pytest.mark.full],
    "r-test-cluster": [pytest.mark.full],
    "test-matrix": [pytest.mark.full],
    "py-lint": [pytest.mark.fast],
}
TARGETS = [
    pytest.param(target, marks=[pytest.mark.xdist_group(group), *MARKS.get(target, [])])
    for group, targets in CHECKS.items()
    for target in targets
]
# Failed targets of this process, which runs the whole group: the tarball is not built again.
_failed: set[str] = set()
# Variables that `conftest` sets for this process and its children.
_OURS = ("CUDA_VISIBLE_DEVICES", "KERAS_BACKEND", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_make(target: str) -> None:
    if target == "vignettes" or target.startswith(("r-test", "r-check-python")):
        FORGE.start()  # for R's workers
    if "vignettes" in _failed and target in CHECKS["tarball"]:
        pytest.fail("without its vignettes there is no R package to check")
    _failed.add(target)
    run(target, ["make", "--no-print-directory", target], ROOT)
    _failed.remove(target)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("soak")
def test_what_goes_on_for_long_or_fails_in_a_row_is_exact_and_leaves_nothing() -> None:
    program = "import soak; print(soak.measure(is_long=False))"
    run("soak", [sys.executable, "-c", program], ROOT / "benchmarks")


def run(name: str, command: list[str], folder: Path) -> None:
    """Run a command in a folder; show its output if it fails."""
    log = ROOT / "build" / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in _OURS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:  # at the time limit of the test, or on Ctrl-C
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(log.read_text(errors="replace"))
    assert status == 0, f"{name} ended with status {status}; {log} has its output"


def test_each_module_is_in_one_group() -> None:
    listed = [*ALONE, *(module for modules in GROUPS.values() for module in modules)]
    assert len(listed) == len(set(listed))
    assert set(listed) <= {path.stem for path in Path(__file__).parent.glob("test_*.py")}


def test_comments_name_tests_that_exist() -> None:
    tests = {
        name
        for path in [
            *Path(__file__).parent.glob("test_*.py"),
            Path(__file__).with_name("contract.py"),
        ]
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = {
        name
        for path in (ROOT / "pybackend").rglob("*.py")
        for name in re.findall(r"^ *#.*\b(test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named <= tests


# Suites that belong to no single module; all others are named after a module or a room.
CROSS_CUTTING = {
    "api_input": "the checks of all public functions",
    "audit_suite": "the audit itself, by what it must find and what it must pass",
    "checks": "targets of the Makefile, and how tests are named and grouped",
    "collective_peers": "peers of the collective that misbehave",
    "connect": "Spark Connect",
    "constraints": "constraints.txt",
    "elastic_checkpoints": "elastic training that resumes",
    "epochs": "which epochs run, and which validate",
    "exact": "two workers end where one process ends",
    "exact_cases": "the same, for whatever Keras users do",
    "exact_keras": "the same, for all that Keras has",
    "exact_random": "the same, for models and data drawn at random",
    "exact_shards": "the same, however rows are spread",
    "exact_together": "the same, for what workers compute together",
    "exactness": "scripts/exactness.py and its page",
    "fork_server_spark": "fork servers of Spark's executors",
    "frames": "data frames of pandas, polars, Arrow and DuckDB",
    "examples": "the programs of examples/, run",
    "release": "what a release consists of",
    "fuzz": "input that is damaged or hostile",
    "imports": "layers, and what imports cost",
    "migrating": "the pages of docs/migrating, run",
    "learning_rate": "`ScaleLearningRate` in trainings",
    "local_steps": "trainings with `LocalSteps`",
    "notebook": "examples/notebooks, run by Jupyter's kernel",
    "particles": "examples/particles",
    "object_store": "checkpoints and models in S3",
    "recovery": "checkpoints and restarts",
    "readme": "the blocks of the README and of docs/*.md, run",
    "resources": "resources of each worker: their syntax, division, errors and limits",
    "routes": "one job by each route",
    "r_options": "scripts/r_options.py and its file",
    "rpkg_sources": "rpkg installed from a checkout",
    "run_hosts": "tfdist run on other hosts",
    "site": "the sources of the documents' site, and what checks it",
    "signatures": "the same names and defaults everywhere",
    "standalone": "a Spark cluster of several hosts",
    "tuning_spark": "trials on the executors of a cluster",
    "value_codec_bytes": "job/value_codec.py, with arrays as they are",
    "warm": "forked workers, tests/python/forge",
}


def test_test_files_are_named_after_modules() -> None:
    root = ROOT / "pybackend"
    modules = set()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        # A room's name, a module's name, or both: tfrecord_crc.
        modules |= {"_".join(parts[i:j]) for i in range(len(parts)) for j in range(len(parts) + 1)}
    names = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert names - modules - set(CROSS_CUTTING) == set()
