"""GPUs on this machine that no process uses, according to ``nvidia-smi``."""

from __future__ import annotations

import random
import subprocess
import time
from typing import Any

from pybackend.core.errors import ClusterError, InputError

MAX_RETRIES = 3
AS_STRING = "string"
AS_LIST = "list"
# NVIDIA's driver still lists a process for a moment after its end.
_RETRY_SECONDS = 1.0


def is_gpu_available() -> bool:
    """Return whether this machine has a GPU."""
    try:
        return bool(_query("--list-gpus"))
    except (OSError, subprocess.CalledProcessError):
        return False


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> Any:
    """Return the numbers of GPUs that no process uses.

    Workers of one machine that pass their ``worker_index`` take different GPUs; -1: at random.
    ``format`` is `AS_STRING`, as ``CUDA_VISIBLE_DEVICES`` takes them, or `AS_LIST`. Raises
    `ClusterError` if too few GPUs are free, workers would share them, or the machine has none.
    """
    if format not in (AS_STRING, AS_LIST):
        raise InputError(f"`format` must be {AS_STRING!r} or {AS_LIST!r}, not {format!r}")
    free = _find_free(num_gpu)
    if worker_index < 0:
        chosen = random.sample(free, num_gpu)
    else:
        first = worker_index * num_gpu
        if first + num_gpu > len(free):
            raise ClusterError(
                f"worker_index={worker_index} with num_gpu={num_gpu} needs {first + num_gpu} free "
                f"GPUs, but this machine has {len(free)}: the workers would share them. Number "
                "the workers of each machine from 0, start fewer workers, or give each of them "
                "fewer GPUs"
            )
        chosen = free[first : first + num_gpu]
    return ",".join(chosen) if format == AS_STRING else chosen


def _find_free(count: int) -> list[str]:
    try:
        pairs = [line.split(", ") for line in _query("--query-gpu=index,uuid")]
        for _ in range(MAX_RETRIES):
            busy = set(_query("--query-compute-apps=gpu_uuid"))
            free = [index for index, uuid in pairs if uuid not in busy]
            if len(free) >= count:
                return free
            time.sleep(_RETRY_SECONDS)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"cannot list this machine's GPUs: nvidia-smi failed: {error}") from None
    raise ClusterError(
        f"{count} free GPUs are needed, but only {len(free)} of this machine's {len(pairs)} are "
        "free: end the processes that use the others (nvidia-smi lists them), or request fewer"
    )


def _query(option: str) -> list[str]:
    options = [option] if option.startswith("--list") else [option, "--format=csv,noheader,nounits"]
    shown = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True)
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()]
