"""One worker of elastic training on another host. This file is imported there."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pybackend.job.codec import decode, encode
from pybackend.job.messages import Announced, Failed, Reported
from pybackend.job.notice import Notice
from pybackend.job.packages import read_versions
from pybackend.launchers.child import Child
from pybackend.launchers.remote.task import (
    RemoteTask,
    describe_failure,
    find_own_address,
    send_results,
)
from pybackend.net.meeting_client import MeetingClient

# A file of the bundle, with a `Post`.
POST = "post.json"
# Name under which a worker announces its packages.
PACKAGES = "packages"


@dataclass(frozen=True)
class Post:
    """Settings of a single worker in elastic training.

    Attributes
    ----------
    number
        Number of the worker.
    place
        Index of its host in the task's ``hosts``.
    neighbours
        Maximum number of workers on its host.
    share
        Index of the worker's share of that host, from 0.
    driver
        Address of the driver, unless the worker is already connected to it.
    """

    number: int
    place: int = 0
    neighbours: int = 1
    share: int = 0
    driver: str = ""

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return encode(self).encode()


def read_post(folder: Path) -> Post:
    """Read the `Post` from the bundle in a folder."""
    return decode((folder / POST).read_bytes(), Post)


def follow_orders(
    task: RemoteTask,
    post: Post,
    folder: Path,
    meeting: MeetingClient,
    variables: Mapping[str, str],
    reached: str | None,
    notice: Notice,
) -> bool:
    """Run one worker according to the driver's orders, and send the driver its report and model.

    Parameters
    ----------
    folder
        Folder of the bundle.
    meeting
        Connection for this worker only, in which its rank is 0.
    variables
        Environment variables for the worker's process.
    reached, notice
        As in `take_part`.

    Returns
    -------
    bool
        True if the worker trained to the end.
    """
    member, number = task.member, post.number
    host = task.hosts[post.place]
    try:
        address = "127.0.0.1"
        if not member.loopback:
            address = find_own_address(task.hosts, post.place, reached)
        meeting(Announced(PACKAGES, json.dumps(read_versions())))
        with Child(member.job, number, address, meeting, variables, notice=notice) as child:
            child.start(member.files)
            if member.source is not None:
                member.source.spool([folder], number, child.folder)
            threading.Thread(target=_pass_on, args=(meeting, child), daemon=True).start()
            report = replace(child.wait(), rank=0)
            model = child.model()
        if report.failure is not None:
            report, model = replace(report, failure=replace(report.failure, rank=0)), None
        send_results(meeting, report, model)
        meeting(Reported())
    except Exception as error:
        meeting(Failed(describe_failure(0, host, error)))
        return False
    return report.ok


def _pass_on(meeting: MeetingClient, child: Child) -> None:
    """Forward the driver's orders to the worker, once its rows are written."""
    while True:
        child.go(meeting.take_order())
