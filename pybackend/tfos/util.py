"""Small functions for information about this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from pybackend.core.errors import InputError
from pybackend.core.machine import own_address
from pybackend.tfos import gpu_info

# Only its route is looked up, nothing is sent (RFC 5737 reserves it for documentation).
_ELSEWHERE = "192.0.2.1"
_EXECUTOR_ID = "executor_id"


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Make a number of GPUs, or none, visible to TensorFlow in this process.

    Parameters
    ----------
    worker_index
        Index of this worker.
    nodes
        ``host:port`` of all workers: workers on the same host take different GPUs.
    """
    visible = ""
    if num_gpus > 0 and gpu_info.is_gpu_available():
        index = worker_index
        if worker_index >= 0 and nodes:
            host = nodes[worker_index].partition(":")[0]
            near = [node for node in nodes if node.partition(":")[0] == host]
            index = near.index(nodes[worker_index])
        visible = gpu_info.get_gpus(num_gpus, index)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def get_ip_address() -> str:
    """Return the address of this machine on its route to other machines."""
    return own_address(_ELSEWHERE) or socket.gethostbyname(socket.getfqdn())


def find_in_path(path: str, file: str) -> str | bool:
    """Return the path of a file in a list of folders; False if no folder has it."""
    found = (Path(folder, file) for folder in path.split(os.pathsep))
    return next((str(candidate) for candidate in found if candidate.is_file()), False)


def write_executor_id(num: int) -> None:
    """Write the number of the node on this executor to a file in the current folder."""
    Path(_EXECUTOR_ID).write_text(str(num))


def read_executor_id() -> int:
    """Return the number that `write_executor_id` wrote.

    Raises
    ------
    InputError
        There is no such file.
    """
    try:
        return int(Path(_EXECUTOR_ID).read_text())
    except FileNotFoundError:
        raise InputError(
            f"there is no file {_EXECUTOR_ID} in {os.getcwd()}: no node of a cluster was started "
            "on this executor"
        ) from None
