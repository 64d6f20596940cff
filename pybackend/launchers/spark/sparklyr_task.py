"""One worker of a stage that sparklyr runs: R on an executor starts this process, which starts R.

The first R belongs to sparklyr, and passes on the rank and the addresses. The second R is the
worker: R with Python and TensorFlow embedded, started and watched like every other worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from pathlib import Path

import cloudpickle

from pybackend.data.text import decode_lines
from pybackend.launchers.member import Member
from pybackend.launchers.package_files import load_own_libraries
from pybackend.launchers.remote.task import TASK, RemoteGroup, send_results
from pybackend.launchers.spark.task_failure import fail_task
from pybackend.net.heartbeat import find_silence
from pybackend.net.meeting_client import MeetingClient

_DRIVER_SECONDS = 10.0


def main(archive: str, rows: str, options: str) -> None:
    """Run one worker.

    Parameters
    ----------
    archive
        Archive from the driver: this package, and a pickled `Member`.
    rows
        File with this worker's rows, in the format of `pybackend.data.text`.
    options
        JSON with ``rank``, ``addresses``, ``cores`` and ``rscript``.

    Raises
    ------
    RuntimeError
        The worker failed, as in `fail_task`.
    ClusterError
        The driver cannot be reached.
    """
    load_own_libraries()
    given = json.loads(options)
    with zipfile.ZipFile(archive) as packed:
        # The driver pickled its own objects, and Spark delivered them like its tasks.
        member: Member = cloudpickle.loads(packed.read(TASK))
    # Exiting this way ends the worker and removes its folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the driver ended the job"))
    token, rank = member.token, given["rank"]
    with MeetingClient(member.driver, token, rank, _DRIVER_SECONDS, _end_this_process) as meeting:
        meeting.require()
        meeting.start_beating(find_silence(member.job.timeout))
        hosts = [address.rpartition(":")[0].strip("[]") for address in given["addresses"]]
        # R does not know the GPUs of the task.
        group = RemoteGroup(rank, hosts, given["cores"], gpus=None, meeting=meeting)
        report, model = member.work(group, decode_lines(Path(rows)), meeting, given["rscript"])
        if report.failure is not None:
            fail_task(report.failure, meeting)
        send_results(meeting, report, model)


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
