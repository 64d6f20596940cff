"""GPUs of this machine that nobody computes on."""

from __future__ import annotations

import subprocess
from typing import Any

from pybackend.errors import ClusterError

AS_STRING = "string"
AS_LIST = "list"
_SECONDS = 30.0


def is_gpu_available() -> bool:
    """Whether this machine has GPUs of NVIDIA's."""
    return bool(_query("--query-gpu=index"))


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> Any:
    """Numbers of free GPUs, as text with commas or as a list of texts.

    Parameters
    ----------
    worker_index
        Number of the process on its host: it gets the GPUs at this place among the free ones; -1:
        the first.

    Raises
    ------
    ClusterError
        Fewer are free.
    """
    busy = set(_query("--query-compute-apps=gpu_uuid"))
    free = [
        line.partition(", ")[0]
        for line in _query("--query-gpu=index,uuid")
        if line.partition(", ")[2] not in busy
    ]
    if len(free) < num_gpu:
        raise ClusterError(f"num_gpu={num_gpu}, but {len(free)} GPUs of this machine are free")
    places = [(max(0, worker_index) * num_gpu + n) % len(free) for n in range(num_gpu)]
    chosen = [free[place] for place in places]
    return chosen if format == AS_LIST else ",".join(chosen)


def _query(question: str) -> list[str]:
    """Lines of NVIDIA's tool, none without it."""
    command = ["nvidia-smi", question, "--format=csv,noheader"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.splitlines()
