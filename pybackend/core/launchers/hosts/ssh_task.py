"""The process on a host that ssh reaches, which runs the workers of a call.

The workers share the two pipes of ssh, which are also their lifeline. This file is imported on the
workers' hosts.
"""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from pybackend.core.job.notice import Notice
from pybackend.core.launchers.hosts.keeper_task import using_keeper
from pybackend.core.launchers.remote.task import RemoteTask, read_post, read_task, take_part
from pybackend.core.launchers.shares import share_of_machine
from pybackend.core.machine import reached_address
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.shared_lines import SharedLines, follow_driver
from pybackend.core.worker import wake_when_orphaned

RANKS = "ranks.json"


def run_workers(folder: str, pipe: IO[bytes], channel: int) -> None:
    """Run this host's workers until all have reported, or the driver closes ``pipe``.

    They write only below ``folder``, that of the bundle; ``channel`` is the descriptor of the pipe
    to the driver.
    """
    wake_when_orphaned()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    lines = SharedLines(pipe, os.fdopen(channel, "wb", buffering=0))
    placed = json.loads(Path(folder, RANKS).read_text())
    # No token: ssh has authenticated both ends of the shared connection.
    meetings = {
        rank: MeetingClient(None, "", rank, 0.0, _end, stream=lines.connect(rank))
        for rank in placed["ranks"]
    }
    follow_driver(lines, _end)
    task = read_task(Path(folder), meetings)
    if task is not None:
        with using_keeper(Path(folder)):
            _work(task, Path(folder), meetings, placed)


def _work(
    task: RemoteTask, folder: Path, meetings: dict[int, MeetingClient], placed: dict[str, Any]
) -> None:
    os.environ.update(task.environment)
    reached = reached_address()
    job, notice, post = task.member.job, Notice(), read_post(folder)
    shares = share_of_machine(placed["neighbours"], resources=job.resources)[placed["first"] :]
    with notice.expected(job.can_go_on), ThreadPoolExecutor(len(meetings)) as threads:
        for (rank, meeting), share in zip(meetings.items(), shares, strict=False):
            gpu = share.get("CUDA_VISIBLE_DEVICES")
            cores = int(share["TF_NUM_INTRAOP_THREADS"])
            gpus = None if gpu is None else gpu.split(",") if gpu else []
            arguments = (task, rank, [folder], meeting, cores, gpus, reached, notice, post)
            # A thread has no context of its own: the fork server of this one would be forgotten.
            threads.submit(copy_context().run, partial(take_part, *arguments))


def _end() -> NoReturn:
    os._exit(1)  # workers end with their launcher, and folders with this process
