"""Seconds from a call to its first step, on other hosts compared with this machine.

Two workers on the hosts of the tests: network namespaces of this machine, with real ssh servers or
a real Slurm. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
from rounds import interleaved
from step import network

import pybackend

_FOLDER = Path(__file__).parent
sys.path.append(str(_FOLDER.parent / "tests" / "python"))
from slurm import slurm_cluster  # noqa: E402
from sshd import ssh_hosts  # noqa: E402

_LIMIT = 120


def measure(rounds: int) -> dict[str, Any]:
    """Medians over interleaved rounds, after one that warms up."""
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as name:
        folder = Path(name)
        # One network of hosts at a time.
        tables = {
            "over ssh": _over_ssh(folder, rounds),
            "by Slurm": _by_slurm(folder, rounds),
        }
    return {f"call to first step {how}, 2 workers": table for how, table in tables.items()}


def _over_ssh(folder: Path, rounds: int) -> Any:
    with ssh_hosts(["a", "b"], folder) as there:
        hosts = pybackend.hosts("a,b", ssh_options=there.options)
        cases = {
            "this machine": lambda: first_step("local", folder),
            "tfdist run -w 2, from its command line": lambda: first_step_of_script(folder),
            "hosts(), two hosts": lambda: first_step(hosts, folder),
        }
        with patch.dict(os.environ, TFDIST_FORK_SERVER="1"):
            # The first call starts fork servers, and the second waits for them.
            waiting = pybackend.Resources(fork_server=True)
            later = [first_step(hosts, folder, waiting) for _ in range(rounds + 2)][2:]
        with patch.dict(os.environ, TFDIST_FORK_SERVER="0"):  # the next call stops them
            table = _medians(cases, rounds)
        name = "hosts(), two hosts, later call, with a fork server"
        return table | {name: {"seconds": float(np.median(later))}}


def _by_slurm(folder: Path, rounds: int) -> Any:
    with slurm_cluster() as cluster:
        # With these variables, Slurm's commands work in this process.
        os.environ.update(cluster.variables)
        slurm = pybackend.slurm(nodes=2, folder=folder / "jobs")
        cases = {
            "this machine": lambda: first_step("local", folder),
            "slurm(), two nodes, an empty queue": lambda: first_step(slurm, folder),
        }
        return _medians(cases, rounds)


def _medians(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, float]]:
    found = interleaved(cases, rounds)
    return {name: {"seconds": float(np.median(times))} for name, times in found.items()}


def first_step(target: Any, folder: Path, resources: pybackend.Resources | None = None) -> float:
    """Return seconds from the call of a training to its first step on any worker."""
    path = folder / "first"
    path.unlink(missing_ok=True)
    began = time.time()
    train(target, path, resources)
    return path.stat().st_mtime - began


def first_step_of_script(folder: Path) -> float:
    """Return seconds from the start of the command of a script to its first step."""
    path = folder / "first"
    path.unlink(missing_ok=True)
    began = time.time()
    command = [sys.executable, "-m", "pybackend", "run", "-w", "2", "--"]
    subprocess.run(
        [*command, str(_FOLDER / "machines_script.py"), str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_LIMIT,
        env={**os.environ, "PYTHONPATH": str(_FOLDER.parent)},
    )
    return path.stat().st_mtime - began


def train(target: Any, path: Path, resources: pybackend.Resources | None = None) -> None:
    """Train a small network; the modification time of a file is the time of the first step."""

    class First(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                path.touch()

    rows = np.zeros((256, 28, 28, 1), "float32"), np.zeros(256)
    pybackend.barrier_train(
        target,
        network(keras),
        rows,
        batch_size=64,
        workers=2,
        callbacks=[First()],
        resources=resources,
        verbose=0,
    )


if __name__ == "__main__":
    for title, rows in measure(1).items():
        print(title, *rows.items(), sep="\n  ")
