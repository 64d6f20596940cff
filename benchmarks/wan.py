"""Milliseconds per step over a link with 50 ms round trip and 100 Mbit/s, compared with a LAN.

Two processes in network namespaces. `wan_link` provides the slow link; the LAN is the bridge
between the namespaces. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rounds import interleaved

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from namespaces import Host, Network, network

MODES = {
    "tfdist, exact": "exact",
    "tfdist, LocalSteps(500), DiLoCo, bf16": "local",
    "MultiWorkerMirroredStrategy (Keras 2)": "mirrored",
}
LIMIT = 400
DELAY_MS, MBIT = 25.0, 100.0
_FOLDER = Path(__file__).parent


def measure(rounds: int) -> dict[str, Any]:
    """Medians over interleaved rounds, after one that warms up."""
    with network(["a", "b"]) as hosts, slow_link(hosts) as slow:
        links = {"LAN": [host.address for host in hosts.hosts], "WAN": slow}
        cases = {
            f"{name}, {link}": lambda mode=mode, addresses=addresses: train(  # type: ignore[misc]
                hosts.hosts, mode, addresses
            )
            for name, mode in MODES.items()
            for link, addresses in links.items()
        }
        found = interleaved(cases, rounds)
    middle = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    table = {
        name: {
            "ms": middle[f"{name}, LAN"],
            "ms, 50 ms and 100 Mbit/s": middle[f"{name}, WAN"],
            "throughput kept": middle[f"{name}, LAN"] / middle[f"{name}, WAN"],
        }
        for name in MODES
    }
    return {"step over a slow link, 2 workers, 64 images each": table}


@contextmanager
def slow_link(hosts: Network) -> Iterator[list[str]]:
    """Create a slow link, and yield the addresses of its ends."""
    addresses = ["10.214.0.1", "10.214.0.2"]
    ends = [str(word) for pair in zip(_namespaces(hosts), addresses, strict=True) for word in pair]
    command = [sys.executable, str(_FOLDER / "wan_link.py"), *ends, str(DELAY_MS), str(MBIT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield addresses
    finally:
        process.terminate()
        process.communicate()


def _namespaces(hosts: Network) -> list[str | None]:
    return [host.namespace for host in hosts.hosts]


def train(hosts: Sequence[Host], mode: str, addresses: Sequence[str]) -> float:
    """Train, and return the milliseconds of a step."""
    listed = ",".join(f"{address}:2222" for address in addresses)
    variables = {
        "TFDIST_SECRET": os.urandom(16).hex(),
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_FOLDER.parent}:{_FOLDER}",
    }
    processes = [
        subprocess.Popen(
            [*host.enter, sys.executable, str(_FOLDER / "wan_worker.py"), mode, str(index), listed],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **variables},
        )
        for index, host in enumerate(hosts)
    ]
    try:
        return float(processes[0].communicate(timeout=LIMIT)[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    for title, rows in measure(1).items():
        print(title)
        for name, figures in rows.items():
            print(f"  {name}: {figures}")
