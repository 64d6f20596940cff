"""Checks of the resources of a Spark task against those that each worker needs."""

from __future__ import annotations

from typing import Any

from pybackend.errors import InputError
from pybackend.job.resources import Resources
from pybackend.launchers.machine_share import count_cores, find_shortage, this_machine
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.slots import count_slots, is_one_machine, read_setting

_CPUS = "spark.task.cpus"
_GPUS = "spark.task.resource.gpu.amount"


def check_allotment(session: Any, resources: Resources, workers: int) -> None:
    """Raise an error if workers need more than Spark's tasks have.

    Raises
    ------
    InputError
        Names the setting that the session needs at its start.
    """
    pairs = {_CPUS: ("cpus", resources.cpus, "1"), _GPUS: ("gpus", resources.gpus, "0")}
    for setting, (name, wanted, default) in pairs.items():
        has = float(read_setting(session, setting) or default)
        if wanted is not None and wanted > has:
            raise InputError(
                f"each worker needs {wanted} {name} (resources=Resources({name}={wanted})), "
                f"but a task of this Spark session has {has:g}: start the session with "
                f"{setting}={wanted}"
            )
    if is_one_machine(session) and not is_connect(session):
        # In a cluster, each task checks its own machine.
        wanted_there = Resources(memory=resources.memory)
        if shortage := find_shortage(wanted_there, workers, this_machine()):
            raise InputError(shortage)


def cores_of_task(session: Any, workers: int) -> int:
    """Return the cores of each worker: a task's, or a share of a local session's cores.

    In a cluster other tasks, and other applications, may use the rest of a machine.
    """
    given = read_setting(session, _CPUS)
    if given is not None or not is_one_machine(session):
        return int(given or 1)
    cores = count_slots(session)
    if not is_connect(session):  # it may have more slots than cores
        cores = min(cores, count_cores())
    return max(1, cores // workers)
