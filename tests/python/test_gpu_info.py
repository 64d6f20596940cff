"""Free GPUs, from the output of a program named `nvidia-smi`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pybackend import ClusterError, InputError
from pybackend.tfos import gpu_info
from pybackend.tfos.util import index_on_host

TOOL = """#!/bin/sh
case "$*" in
  *--list-gpus*) echo 'GPU 0: NVIDIA H200 (UUID: GPU-a)';;
  *--query-gpu*) printf '0, GPU-a\\n1, GPU-b\\n2, GPU-c\\n3, GPU-d\\n';;
  *--query-compute-apps*) cat "$(dirname "$0")/busy";;
esac
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: Any) -> Path:
    """A file of the GPUs that processes use."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_info, "_RETRY_SECONDS", 0.01)
    (tmp_path / "busy").write_text("GPU-b\n")
    return tmp_path / "busy"


def test_workers_of_a_machine_take_different_gpus(busy: Path) -> None:
    assert gpu_info.is_gpu_available()
    taken = [gpu_info.get_gpus(1, index, gpu_info.AS_LIST) for index in range(3)]
    assert taken == [["0"], ["2"], ["3"]]
    assert gpu_info.get_gpus(2, 0) == "0,2"
    assert set(gpu_info.get_gpus(3).split(",")) == {"0", "2", "3"}


def test_too_few_are_an_error(busy: Path) -> None:
    with pytest.raises(
        ClusterError, match="4 free GPUs are needed, but only 3 of this machine's 4 are free"
    ):
        gpu_info.get_gpus(4)
    with pytest.raises(ClusterError, match="num_gpu=2 needs 4 free GPUs, but this machine has 3"):
        gpu_info.get_gpus(2, 1)
    with pytest.raises(InputError, match="`format` must be 'string' or 'list', not 'tuple'"):
        gpu_info.get_gpus(1, format="tuple")


def test_a_machine_without_any(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not gpu_info.is_gpu_available()
    with pytest.raises(ClusterError, match="cannot list this machine's GPUs: nvidia-smi failed"):
        gpu_info.get_gpus()


def test_workers_are_numbered_within_their_host() -> None:
    nodes = ["a:1", "b:1", "a:2", "b:2"]
    assert [index_on_host(nodes, node) for node in nodes] == [0, 0, 1, 1]
    assert [index_on_host(["a", "b"], node) for node in "ab"] == [0, 0]
