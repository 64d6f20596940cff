"""Software for training on a machine, and what is missing; on machines made of real files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import pybackend
from pybackend.core.machine.packages import BUILDS
from pybackend.core.r.function import FOR_R_BEFORE_45
from pybackend.doctor.machine import doctor, find_java, find_missing

PACKAGES = ("tensorflow", "keras", "numpy", "h5py", "cloudpickle", "pyspark", "pyarrow", "rpy2")
GOOD = {
    "tensorflow-cpu": "2.18.0",
    "keras": "3.13.2",
    "numpy": "2.0.0",
    "h5py": "3.11.0",
    "cloudpickle": "3.1.2",
}


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def doctor_on(folder: Path, packages: dict[str, str], **programs: str) -> dict[str, Any]:
    """Return the result of `doctor` in a new Python that sees only these packages and programs."""
    site, programs_of = folder / "site", folder / "bin"
    site.mkdir()
    programs_of.mkdir()
    (site / "pybackend").symlink_to(Path(pybackend.__file__).parent)
    for name, number in packages.items():
        meta = site / f"{name.replace('-', '_')}-{number}.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    for name, text in programs.items():
        executable(programs_of / name.replace("_", "-"), text)
    return ask_doctor(folder)


def ask_doctor(folder: Path) -> dict[str, Any]:
    """Return the result of `doctor` in a folder that `doctor_on` filled."""
    program = (
        "import json, sys; from pybackend.doctor.machine import doctor; found = doctor();"
        "loaded = {'tensorflow', 'keras', 'pyspark', 'numpy', 'h5py'} & set(sys.modules);"
        "print(json.dumps({**found, 'loaded': sorted(loaded)}))"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={
            "PATH": str(folder / "bin"),
            "PYTHONPATH": str(folder / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_this_machine() -> None:
    found = doctor()
    assert found["python"] == sys.executable
    assert found["python_version"] == platform.python_version()
    assert found["version"] == pybackend.__version__
    for name in ("keras", "numpy", "h5py"):
        assert found[name] == version(name)
    assert found["tensorflow"] is not None
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_gb"] > 0
    assert isinstance(found["gpus"], list)
    assert json.loads(json.dumps(found)) == found


def test_a_machine_with_nothing(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, {})
    assert [found[name] for name in PACKAGES] == [None] * len(PACKAGES)
    assert (found["java"], found["gpus"], found["loaded"]) == (None, [], [])
    assert (found["rscript"], found["r"], found["reticulate"]) == (None, None, None)
    wanted = "3.13.2"
    assert found["problems"] == [
        "tensorflow is not installed: install tensorflow >= 2.18",
        f"keras is not installed: install keras >= {wanted}",
        "numpy is not installed: install numpy >= 1.26",
        "h5py is not installed: install h5py >= 3.10",
        "cloudpickle is not installed: install cloudpickle >= 3.0",
    ]
    assert found["verdict"] == (
        f"not ready: first run {sys.executable} -m pip install 'tensorflow>=2.18' "
        f"'keras>={wanted}' 'numpy>=1.26' 'h5py>=3.10' 'cloudpickle>=3.0'"
    )


def test_a_machine_with_enough(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, GOOD)
    assert found["problems"] == []
    assert (found["tensorflow"], found["numpy"]) == ("2.18.0", "2.0.0")
    assert found["verdict"] == "ready: try `tfdist mnist`"


@pytest.mark.parametrize("name", BUILDS["tensorflow"])
def test_every_build_of_tensorflow_counts(tmp_path: Path, name: str) -> None:
    packages = {k: v for k, v in GOOD.items() if k != "tensorflow-cpu"} | {name: "2.21.0rc1"}
    found = doctor_on(tmp_path, packages)
    assert (found["tensorflow"], found["problems"]) == ("2.21.0rc1", [])


def test_a_build_of_keras_or_tensorflow_without_metadata_counts(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, {k: v for k, v in GOOD.items() if k != "tensorflow-cpu"})
    assert found["problems"] == ["tensorflow is not installed: install tensorflow >= 2.18"]
    (tmp_path / "site" / "tensorflow").mkdir()
    (tmp_path / "site" / "tensorflow" / "__init__.py").touch()
    found = ask_doctor(tmp_path)
    assert (found["tensorflow"], found["problems"]) == ("unknown", [])


def test_versions_that_are_too_old(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, {**GOOD, "tensorflow-cpu": "2.9.1", "keras": "3.2.0"})
    wanted = "3.13.2"
    assert found["problems"] == [
        "tensorflow 2.9.1 is too old: install tensorflow >= 2.18",
        f"keras 3.2.0 is too old: install keras >= {wanted}",
    ]


def test_spark_needs_arrow_and_java(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, {**GOOD, "pyspark": "4.2.1"})
    assert found["problems"] == [
        "pyspark is installed without pyarrow, which training on Spark needs",
        "no Java was found: running Spark locally needs Java 17",
    ]
    assert found["verdict"] == (
        "ready on this machine; for Spark, first fix this: pyspark is installed without pyarrow, "
        "which training on Spark needs"
    )


def test_java_and_gpus_are_asked(tmp_path: Path) -> None:
    found = doctor_on(
        tmp_path,
        {**GOOD, "pyspark": "4.2.1", "pyarrow": "20.0.0"},
        java="""echo 'openjdk version "17.0.12" 2024-07-16' >&2""",
        nvidia_smi="echo 'NVIDIA H200'; echo 'NVIDIA H200'",
    )
    assert found["java"] == "17.0.12"
    assert found["spark_home"] is None
    assert found["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
    assert found["problems"] == []


def test_the_spark_inside_pyspark_is_found(tmp_path: Path) -> None:
    assert doctor_on(tmp_path, GOOD)["spark_home"] is None
    home = tmp_path / "site" / "pyspark"
    (home / "bin").mkdir(parents=True)
    (home / "__init__.py").touch()
    assert ask_doctor(tmp_path)["spark_home"] is None
    (home / "bin" / "spark-submit").touch()
    assert ask_doctor(tmp_path)["spark_home"] == str(home)


def test_a_driver_that_fails_means_no_gpu(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, GOOD, nvidia_smi="echo 'no devices were found'; exit 9")
    assert found["gpus"] == []


def test_r_itself_is_asked(tmp_path: Path) -> None:
    found = doctor_on(tmp_path, GOOD, Rscript='echo "R 4.2.2 1.47.0"')
    assert (found["r"], found["reticulate"]) == ("4.2.2", "1.47.0")
    assert found["rscript"] == str(tmp_path / "bin" / "Rscript")


@pytest.mark.parametrize("text", ['echo "R 4.2.2 "', "echo 'cannot find R'; exit 1"])
def test_r_without_reticulate_and_r_that_fails(tmp_path: Path, text: str) -> None:
    found = doctor_on(tmp_path, GOOD, Rscript=text)
    assert (found["r"], found["reticulate"]) == ("4.2.2" if "4.2.2" in text else None, None)
    assert found["problems"] == []


def test_an_rpy2_that_r_is_too_old_for(tmp_path: Path) -> None:
    rpy2 = tmp_path / "site" / "rpy2"
    found = doctor_on(tmp_path, {**GOOD, "rpy2": "3.6.9"}, Rscript='echo "R 4.2.2 1.47.0"')
    assert found["rpy2"] == "3.6.9"
    rpy2.mkdir()
    (rpy2 / "__init__.py").touch()
    (rpy2 / "rinterface.py").write_text("raise AttributeError('no R_getVar')")
    found = ask_doctor(tmp_path)
    assert found["rpy2_problem"] == "AttributeError: no R_getVar"
    problem = (
        "rpy2 3.6.9 cannot be used with R 4.2.2 (AttributeError: no R_getVar): install it for R "
        "before 4.5 with rpy2-rinterface==3.6.5 and rpy2-robjects==3.6.4"
    )
    assert found["problems"] == [problem]
    assert found["verdict"].endswith(f"for functions in R, first fix this: {problem}")
    (rpy2 / "rinterface.py").write_text("")
    found = ask_doctor(tmp_path)
    assert (found["rpy2_problem"], found["problems"]) == (None, [])


def test_one_rpy2_for_older_r_is_named_everywhere() -> None:
    root = Path(__file__).parents[2]
    extra = (root / "pyproject.toml").read_text().partition("\nr44 = [")[2].partition("]")[0]
    constraints = (root / "constraints.txt").read_text().splitlines()
    for pin in FOR_R_BEFORE_45:
        assert f'"{pin}"' in extra
        assert pin in constraints


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "java", """echo 'openjdk version "21.0.1"' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == "21.0.1"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    assert find_java() is None


def test_only_workers_of_spark_need_arrow() -> None:
    found = {**doctor(), "pyarrow": "14.0.2"}
    assert find_missing(found) == []
    assert find_missing(found, on_spark=True) == [("pyarrow", "14.0.2", "15")]
    assert find_missing({**found, "keras": "3.12.4"}) == [("keras", "3.12.4", "3.13.2")]
