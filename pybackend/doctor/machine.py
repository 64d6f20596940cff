"""Versions and hardware of this machine, determined without importing the reported packages."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.machine.capacity import count_cores, read_memory
from pybackend.core.machine.packages import UNKNOWN, find_version
from pybackend.core.r.function import ADVICE

_PACKAGES = ("tensorflow", "keras", "numpy", "h5py", "cloudpickle", "pyspark", "pyarrow", "rpy2")
# The lower bounds in pyproject.toml.
_LEAST = {
    "tensorflow": "2.18",
    "keras": "3.13.2",
    "numpy": "1.26",
    "h5py": "3.10",
    "cloudpickle": "3.0",
}
_LEAST_ON_SPARK = {"pyarrow": "15"}
_ASK_R = """
reticulate <- tryCatch(as.character(utils::packageVersion("reticulate")), error = function(e) "")
cat("R", as.character(getRversion()), reticulate)
"""
# For a program that only has to print its version.
_PROGRAM_SECONDS = 20.0


def doctor() -> dict[str, Any]:
    """Return the entries of `inspect_machine`, ``java``, ``spark_home`` (the Spark inside PySpark),
    ``problems`` (sentences) and ``verdict``: whether this machine is ready, or what to do first.
    """
    found = {**inspect_machine(), "java": find_java(), "spark_home": _find_spark_home()}
    problems = [*_missing(found), *_spark_problems(found), *_r_problems(found)]
    return {**found, "problems": problems, "verdict": _verdict(found)}


def inspect_machine() -> dict[str, Any]:
    """Return this machine's versions and hardware as plain data, fast enough for every worker.

    Entries are ``python``, ``python_version``, ``version``, one per package (None if absent),
    ``rscript``, ``r`` and ``reticulate`` (the R package), ``rpy2_problem`` (why an installed rpy2
    cannot use this R), ``cores``, ``memory_gb`` and ``gpus`` (a list of names).
    """
    packages = {name: find_version(name) for name in _PACKAGES}
    r = _r()
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "version": pybackend.__version__,
        **packages,
        **r,
        "rpy2_problem": _try_rpy2() if packages["rpy2"] and r["r"] else None,
        "cores": count_cores(),
        "memory_gb": round(read_memory() / 2**30, 1),
        "gpus": _gpus(),
    }


def find_missing(
    found: Mapping[str, Any], on_spark: bool = False
) -> list[tuple[str, str | None, str]]:
    """Return packages that a worker lacks: name, installed version or None, version needed."""
    least = {**_LEAST, **(_LEAST_ON_SPARK if on_spark else {})}
    return [
        (name, found[name], wanted)
        for name, wanted in least.items()
        if found[name] != UNKNOWN and _numbers(found[name] or "") < _numbers(wanted)
    ]


def find_java() -> str | None:
    """Return the version of the Java that Spark would start; None if it is missing."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")
    match = re.search(r'version "([^"]+)"', _output(program, "-version"))
    return match[1] if match else None


def _find_spark_home() -> str | None:
    """Return the folder of the Spark inside PySpark; None if it is only a Spark Connect client."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent
    return str(home) if (home / "bin" / "spark-submit").exists() else None


def _missing(found: dict[str, Any]) -> list[str]:
    return [
        f"{name} {'is not installed' if have is None else f'{have} is too old'}: install {name} >= "
        f"{wanted}"
        for name, have, wanted in find_missing(found)
    ]


def _spark_problems(found: dict[str, Any]) -> list[str]:
    lacking = {
        "pyarrow": "pyspark is installed without pyarrow, which training on Spark needs",
        "java": "no Java was found: running Spark locally needs Java 17",
    }
    return [text for name, text in lacking.items() if found["pyspark"] and found[name] is None]


def _r_problems(found: dict[str, Any]) -> list[str]:
    if found["rpy2_problem"] is None:
        return []
    return [
        f"rpy2 {found['rpy2']} cannot be used with R {found['r']} ({found['rpy2_problem']}): "
        f"install it {ADVICE}"
    ]


def _verdict(found: dict[str, Any]) -> str:
    if find_missing(found):
        return f"not ready: first run {install_command(found)}"
    if problems := _spark_problems(found):
        return f"ready on this machine; for Spark, first fix this: {problems[0]}"
    if problems := _r_problems(found):
        return f"ready on this machine; for functions in R, first fix this: {problems[0]}"
    return "ready: try `tfdist mnist`"


def install_command(found: Mapping[str, Any], on_spark: bool = False) -> str:
    wanted = " ".join(f"'{name}>={least}'" for name, _, least in find_missing(found, on_spark))
    return f"{found['python']} -m pip install {wanted}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def _r() -> dict[str, str | None]:
    """Return the path and version of R, and the version of its reticulate."""
    # Only R knows its libraries. Without packages, it starts in 50 ms.
    rscript = shutil.which("Rscript")
    bare = ("--no-echo", "--no-restore", "--no-init-file", "--default-packages=NULL")
    versions = re.search(r"R (\d\S*) ?(\S*)", _output(rscript, *bare, "-e", _ASK_R))
    return {
        "rscript": rscript,
        "r": versions[1] if versions else None,
        "reticulate": (versions[2] or None) if versions else None,
    }


def _try_rpy2() -> str | None:
    """Return why rpy2 cannot use this machine's R; None if it can."""
    # In a process of its own, because the import loads R; in the mode that workers use.
    environment = {**os.environ, "RPY2_CFFI_MODE": "ABI"}
    try:
        tried = _run(sys.executable, "-c", "import rpy2.rinterface", env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if tried.returncode == 0:
        return None
    return (tried.stdout.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]


def _gpus() -> list[str]:
    shown = _output(shutil.which("nvidia-smi"), "--query-gpu=name", "--format=csv,noheader")
    return [line.strip() for line in shown.splitlines()]


def _output(program: str | None, *arguments: str) -> str:
    """Return a program's output; an empty string if it is missing, fails, or takes too long."""
    try:
        shown = _run(program, *arguments) if program else None
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout if shown and shown.returncode == 0 else ""


def _run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # where Java prints its version
        text=True,
        errors="replace",
        check=False,
        timeout=_PROGRAM_SECONDS,
    )
