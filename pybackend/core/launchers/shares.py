"""The share of a machine's cores and GPUs for each of several processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pybackend.core.job.worker_options import Resources
from pybackend.core.machine.capacity import count_cores, keep_usable, list_gpus, read_machine
from pybackend.core.words import show_bytes

_ADVICE = "request less in `resources`, or start fewer workers there"


@dataclass(frozen=True)
class Machine:
    """Cores, bytes of memory, and numbers of the GPUs of a machine."""

    cores: int
    memory: int
    gpus: Sequence[str]

    @property
    def usable_gpus(self) -> list[str]:
        return keep_usable(self.gpus)


def this_machine() -> Machine:
    """Return the part of this machine that this process may use."""
    return Machine(**read_machine())


def limit_threads(cores: int) -> dict[str, str]:
    return {"TF_NUM_INTRAOP_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}


def share_of_machine(
    workers: int,
    environment: Mapping[str, str] = os.environ,
    resources: Resources | None = None,
    gpus: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """Divide this machine's cores and GPUs among the workers, unless ``environment`` already does.

    ``resources``, for each worker, are not checked against the machine, unlike in `find_shortage`.
    ``gpus`` are numbers; None: the GPUs of this machine.
    """
    wanted = resources or Resources()
    limits = limit_threads(wanted.cpus or max(1, count_cores() // workers))
    shared = {n: cores if wanted.cpus else environment.get(n, cores) for n, cores in limits.items()}
    devices = list_gpus(environment) if gpus is None else gpus
    if wanted.gpus is not None:
        devices = keep_usable(devices)
        parts = [devices[rank * wanted.gpus :][: wanted.gpus] for rank in range(workers)]
        return [{**shared, "CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]
    if not devices:
        return [shared] * workers
    return [
        {**shared, "CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]} for rank in range(workers)
    ]


def find_shortage(
    resources: Resources, workers: int, machine: Machine, host: str = "this machine"
) -> str | None:
    gpus = len(machine.usable_gpus)
    for kind, each, has, show in (
        ("cpus", resources.cpus, machine.cores, str),
        ("memory", resources.bytes, machine.memory, show_bytes),
        ("gpus", resources.gpus, gpus, str),
    ):
        if each is not None and each * workers > has:
            many = f"{workers} workers need" if workers > 1 else "a worker needs"
            total = f" ({show(each)} each)" if workers > 1 else ""
            return (
                f"{many} {_name(kind, show(each * workers))}{total}, but {host} has {show(has)}: "
                f"{_ADVICE}"
            )
    return None


def _name(kind: str, amount: str) -> str:
    return f"{amount} of memory" if kind == "memory" else f"{amount} {kind}"
