"""What a process that joins others gets of its machine, which something else may have divided."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pybackend.job.resources import Resources
from pybackend.launchers.joined.place import Place
from pybackend.launchers.machine import list_gpus
from pybackend.launchers.machine_share import (
    Machine,
    find_shortage,
    share_of_machine,
    this_machine,
)
from pybackend.launchers.slurm.step import count_cores

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class JoinedShare:
    """Cores and GPUs of a process's worker, and what its machine lacks for all workers there.

    ``gpus`` are None if nobody has divided them.
    """

    cores: int
    gpus: Sequence[str] | None
    shortage: str | None


def find_share(
    place: Place,
    resources: Resources,
    environment: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
) -> JoinedShare:
    """The share of a process.

    Parameters
    ----------
    environment
        Its variables.
    machine
        Where it runs; None: this one.
    """
    machine = machine or this_machine()
    own = share_of_machine(place.local_size, environment, resources, machine.gpus)[place.local_rank]
    cores, devices = int(own["TF_NUM_INTRAOP_THREADS"]), own.get(_DEVICES)
    if place.source == "srun":
        allotted = count_cores(environment)
        machine = replace(machine, cores=allotted * place.local_size)
        cores = resources.cpus or allotted
    if _is_divided(place, environment):
        given = list_gpus(environment)
        machine = replace(machine, gpus=given * place.local_size)
        devices = ",".join(given[: resources.gpus])
    gpus = None if devices is None else [number for number in devices.split(",") if number]
    name = f"the machine of {place.name(place.rank)}"
    return JoinedShare(cores, gpus, find_shortage(resources, place.local_size, machine, name))


def _is_divided(place: Place, environment: Mapping[str, str]) -> bool:
    """Whether the GPUs that this process sees are its own: Slurm and launchers of scripts do so."""
    return _DEVICES in environment and (place.source == "srun" or "LOCAL_RANK" in environment)
