"""The same job with other tools: lines, seconds, equality with one process, a killed worker.

The job is in `tools/case.py`: 1,001 rows on two workers. The other tools need torch, pyspark and
Ray: ``TORCH_PYTHON`` names a Python that has them. Seconds are those of the whole command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import pybackend

TOOLS = Path(__file__).with_name("tools")
sys.path.append(str(TOOLS))
TORCH = os.environ.get("TORCH_PYTHON", "")
_LIMIT = 300


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over interleaved rounds; only tfdist's row if there is no ``TORCH_PYTHON``."""
    commands = {"tfdist": ([sys.executable], ["with_tfdist.py"])}
    if TORCH:
        torchrun = [TORCH, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands |= {
            "torchrun, DistributedDataParallel": (torchrun, ["with_torchrun.py", "torch_loop.py"]),
            "TorchDistributor": ([TORCH], ["with_torch_distributor.py", "torch_loop.py"]),
            "Ray Train": ([TORCH], ["with_ray.py", "torch_loop.py"]),
        }
    else:
        print("others: TORCH_PYTHON is not set, so only tfdist is measured")
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for _ in range(rounds):
            for name, (starter, files) in commands.items():
                began = time.perf_counter()
                _run([*starter, files[0]], Path(folder, "weights.npz"))
                seconds[name].append(time.perf_counter() - began)
        for name, (starter, files) in commands.items():
            path = Path(folder, f"{len(table)}.npz")
            _run([*starter, files[0]], path)
            table[name] = {
                "lines": sum(map(_count_lines, files)),
                "seconds": float(np.median(seconds[name])),
                "difference": _compare(path, name == "tfdist"),
                **_kill([*starter, files[0]], Path(folder)),
            }
    return {"1,001 rows, 2 workers, 20 epochs, and a worker killed at half time": table}


def _run(command: list[str], path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; an error without ``variables`` is raised."""
    environment = {**os.environ, "PYTHONPATH": str(TOOLS), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*command, str(path)],
        cwd=TOOLS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT,
        check=not variables,
    )


def _kill(command: list[str], folder: Path) -> dict[str, float]:
    """Return the seconds from the kill to the end, and whether the output names rank and cause."""
    note = folder / "killed"
    note.unlink(missing_ok=True)
    done = _run(command, folder / "none.npz", TOOLS_KILL=str(note))
    ended = time.time()
    names = re.search(r"(?i)(rank|worker)\W{1,4}1\b", done.stdout)
    says = re.search(r"SIGKILL|signal 9|-9\b", done.stdout)
    return {
        "kill_s": ended - float(note.read_text()),
        "kill_named": float(bool(done.returncode and names and says)),
    }


def _compare(path: Path, is_ours: bool) -> float:
    """Return the largest difference of a weight from one process, relative to the largest weight.

    The process uses the same global batches: tfdist's, or those of a `DistributedSampler` without
    the row that it repeats.
    """
    import case

    batches: list[Any] = []
    for epoch in range(case.EPOCHS):
        if is_ours:
            batches += pybackend.replay_batches(
                case.ROWS, case.WORKERS, case.BATCH, seed=0, epoch=epoch, shuffle=False
            )
            continue
        shards = [np.arange(rank, case.ROWS, case.WORKERS) for rank in range(case.WORKERS)]
        for start in range(0, len(shards[0]), case.BATCH):
            batches.append(np.concatenate([s[start : start + case.BATCH] for s in shards]))
    expected = case.train_alone(batches)
    with np.load(path) as found:
        pairs = list(zip(found.values(), expected, strict=True))
    largest = max(float(np.abs(one).max()) for one in expected)
    return max(float(np.abs(a - b).max()) for a, b in pairs) / largest


def _count_lines(name: str) -> int:
    """Count lines that are neither empty nor comments."""
    lines = (TOOLS / name).read_text().splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith(("#", '"""')) for line in lines)
