"""Seconds from the SIGKILL of a worker to the error that names its rank, host and signal.

Rank 1 of two workers kills itself in a training, on each launcher that this machine can run: its
own processes, two hosts with real ssh servers, a real Slurm, a stand-in for Kubernetes, and a
standalone Spark cluster. For comparison, a bare process that kills itself, until its parent knows.
Needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TFDIST_TEST_FORGE"] = ""  # workers start as users' do, and are not forked

import keras
import numpy as np
from standalone_session import standalone_session
from step import network

import pybackend

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from conftest import python_without_blanks
from kube import kube_cluster
from slurm import slurm_cluster
from sshd import ssh_hosts

_LEAST = 3
_KILL = """
import os, pathlib, signal, sys, time
pathlib.Path(sys.argv[1]).write_text(str(time.time()))
os.kill(os.getpid(), signal.SIGKILL)
"""


def measure(rounds: int) -> dict[str, Any]:
    """Medians over all kills, at least three for each launcher."""
    table: dict[str, dict[str, float]] = {}
    # Pods have their own /tmp.
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-", dir="/var/tmp") as name:
        # One network of hosts at a time.
        for place, system in _SYSTEMS.items():
            folder = Path(name, str(len(table)))
            folder.mkdir()
            bare, ours = [], []
            with system(folder) as target:
                for _ in range(max(rounds, _LEAST)):
                    bare.append(_kill_bare(folder / "killed"))
                    ours.append(_kill_worker(target, folder / "killed"))
            table[place] = {
                "seconds": float(np.median(ours)),
                "longest": max(ours),
                "waitpid": float(np.median(bare)),
            }
    return {"a killed worker to the error that names rank, host and signal": table}


def _kill_bare(path: Path) -> float:
    process = subprocess.Popen([sys.executable, "-c", _KILL, str(path)])
    assert process.wait() == -signal.SIGKILL
    return time.time() - float(path.read_text())


def _kill_worker(target: Any, path: Path) -> float:
    class Kill(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if os.environ["TFDIST_RANK"] == "1" and batch == 2:
                path.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    rows = np.zeros((512, 28, 28, 1), "float32"), np.zeros(512)
    common = {"workers": 2, "batch_size": 32, "callbacks": [Kill()], "verbose": 0}
    try:
        pybackend.barrier_train(target, network(keras), rows, **common)
    except pybackend.WorkerFailedError as caught:
        seconds, error = time.time() - float(path.read_text()), caught
    first = str(error).partition("\n")[0]
    assert first.startswith(f"worker 1 on {error.host} failed: ProcessDied"), first
    assert first.endswith("the process was killed by SIGKILL"), first
    return seconds


@contextmanager
def _local(folder: Path) -> Iterator[Any]:
    yield "local"


@contextmanager
def _ssh(folder: Path) -> Iterator[Any]:
    with ssh_hosts(["a", "b"], folder) as there:
        yield pybackend.hosts("a,b", ssh_options=there.options)


@contextmanager
def _slurm(folder: Path) -> Iterator[Any]:
    with slurm_cluster() as cluster, patch.dict(os.environ, cluster.variables):
        yield pybackend.slurm(nodes=2, folder=folder / "jobs")


@contextmanager
def _kubernetes(folder: Path) -> Iterator[Any]:
    with (
        kube_cluster(folder) as cluster,
        patch.dict(os.environ, KUBECONFIG=str(cluster.kubeconfig)),
    ):
        yield pybackend.kubernetes("registry/tf:1", python=python_without_blanks())


@contextmanager
def _spark(folder: Path) -> Iterator[Any]:
    with standalone_session() as session:
        yield session


_SYSTEMS = {
    "this machine": _local,
    "hosts(), two hosts": _ssh,
    "slurm(), two nodes": _slurm,
    "kubernetes(), two pods, a stand-in": _kubernetes,
    "Spark, standalone cluster": _spark,
}
