"""Small functions for information about this machine, and the Spark session of a call."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.launchers import is_session
from pybackend.core.machine import own_address
from pybackend.tfos import gpu_info

# Only its route is looked up, nothing is sent (RFC 5737 reserves it for documentation).
_ELSEWHERE = "192.0.2.1"
_EXECUTOR_ID = "executor_id"


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Make a number of GPUs, or none, visible to TensorFlow in this process.

    ``nodes`` are ``host:port`` of all workers: those on the same host as number ``worker_index``
    take different GPUs.
    """
    visible = ""
    if num_gpus > 0 and gpu_info.is_gpu_available():
        is_known = worker_index >= 0 and nodes
        index = index_on_host(nodes, nodes[worker_index]) if is_known else worker_index
        visible = gpu_info.get_gpus(num_gpus, index)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible


def index_on_host(nodes: Sequence[str], own: str) -> int:
    """Return the number of a node among those on its host; all are ``host:port``, or hosts."""
    hosts = [node.rpartition(":")[0] or node for node in nodes]
    place = nodes.index(own)
    return hosts[:place].count(hosts[place])


def get_ip_address() -> str:
    """Return the address of this machine on its route to other machines."""
    return own_address(_ELSEWHERE) or socket.gethostbyname(socket.getfqdn())


def find_in_path(path: str, file: str) -> str | bool:
    """Return the path of a file in a list of folders; False if no folder has it."""
    found = (Path(folder, file) for folder in path.split(os.pathsep))
    return next((str(candidate) for candidate in found if candidate.is_file()), False)


def write_executor_id(num: int) -> None:
    Path(_EXECUTOR_ID).write_text(str(num))


def read_executor_id() -> int:
    """Return the number that `write_executor_id` wrote. Raises `InputError` if there is none."""
    try:
        return int(Path(_EXECUTOR_ID).read_text())
    except FileNotFoundError:
        raise InputError(
            f"there is no file {_EXECUTOR_ID} in {os.getcwd()}: no node of a cluster was started "
            "on this executor"
        ) from None


def session_of(sc: Any) -> Any:
    if is_session(sc):
        return sc
    if not hasattr(sc, "parallelize"):
        raise InputError(f"`sc` must be a SparkContext, not {type(sc).__name__}")
    from pyspark.sql import SparkSession

    return SparkSession(sc)


def default_fs(context: Any) -> str:
    """Return Hadoop's default file system, from Spark's settings or Hadoop's own file."""
    known = context.getConf().get("spark.hadoop.fs.defaultFS")
    folder = os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")
    if known is None and folder:
        with suppress(OSError):
            pattern = r"<name>\s*fs\.default(?:FS|\.name)\s*</name>\s*<value>\s*([^<\s]+)"
            found = re.search(pattern, Path(folder, "core-site.xml").read_text())
            known = found and found[1]
    known = known or "file://"
    # Without the trailing slash, as absolute paths are appended.
    return known.removesuffix("/") if re.match("file://.", known) else known
