"""One worker of a job, started by srun on a node.

Its input is in a folder that the nodes and the driver share. This file is imported on the nodes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import cloudpickle

from pybackend.core.errors import ClusterError
from pybackend.core.job.notice import Notice
from pybackend.core.launchers.remote.task import TASK, RemoteTask, read_post, take_part
from pybackend.core.launchers.slurm.nodes import count_cores, hosts_by_rank
from pybackend.core.machine import own_address
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import split_address

# File with the address of the driver.
DRIVER = "driver"
_DRIVER_SECONDS = 30.0
# Sent to this process by itself, to end even if it waits after a SIGTERM.
_LOST_DRIVER = signal.SIGHUP


def main(folder: Path, own: Path) -> int:
    """Run one worker, and return the exit status of its task.

    Parameters
    ----------
    folder, own
        Folder with the files for all workers, and folder with those for this job.

    Raises
    ------
    ClusterError
        The driver cannot be reached.
    """
    for number in (signal.SIGTERM, _LOST_DRIVER):
        signal.signal(number, _end)
    if not os.path.isdir(os.environ.get("TMPDIR", "/")):  # sbatch forwards the login node's
        del os.environ["TMPDIR"]
    # Pickled by the driver, in a folder that only its user can access.
    task: RemoteTask = cloudpickle.loads((folder / TASK).read_bytes())
    task = replace(task, hosts=hosts_by_rank(os.environ))
    notice = Notice()
    if task.member.job.can_go_on:  # the worker saves its state, and ends by itself
        signal.signal(signal.SIGTERM, notice.take)
    rank, token = int(os.environ["SLURM_PROCID"]), task.member.token
    post, driver = read_post(own), (own / DRIVER).read_text()
    with MeetingClient(driver, token, rank, _DRIVER_SECONDS, _end_at_once) as meeting:
        meeting.wait_until_settled(_DRIVER_SECONDS + 5)
        if meeting.error is not None:
            raise ClusterError(
                f"worker {rank} cannot reach the driver at {driver}: {meeting.error}. Pass slurm() "
                "an `address` of the driver's machine that the nodes can reach"
            )
        cores, gpus = count_cores(os.environ), _own_gpus(task, os.environ)
        # Hosts of the other workers are in other steps or jobs.
        reached = own_address(split_address(driver)[0]) if post else None
        arguments = (task, rank, [folder], meeting, cores, gpus, reached, notice, post)
        return 0 if take_part(*arguments) else 1


def _own_gpus(task: RemoteTask, environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs of this task if it requested GPUs; Slurm restricts it to those."""
    if task.member.job.resources.gpus is None:
        return None
    return [number for number in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]


def _end(*_: object) -> NoReturn:
    """End this task, by an exit that ends the worker and removes its folder."""
    sys.exit("Slurm or the driver ended the job")


def _end_at_once() -> None:
    os.kill(os.getpid(), _LOST_DRIVER)
