"""One worker of elastic training on another host. This file is imported there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.data.layout import check_layouts, read_layouts
from pybackend.data.row_store import digest_rows
from pybackend.job.codec import decode, encode
from pybackend.job.messages import Announced, Failed, Order, Reported
from pybackend.job.notice import Notice
from pybackend.launchers.child import Child
from pybackend.launchers.member import Member
from pybackend.launchers.remote.task import (
    RemoteTask,
    describe_failure,
    find_own_address,
    send_results,
)
from pybackend.net.meeting_client import MeetingClient

# A file of the bundle, with a `Post`.
POST = "post.json"
# Names under which a worker announces its packages, and a digest of its rows.
PACKAGES, ROWS = "packages", "rows"


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
    compares_rows
        True if workers compute their rows separately, and might get different ones.
    """

    number: int
    place: int = 0
    neighbours: int = 1
    share: int = 0
    driver: str = ""
    compares_rows: bool = False

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return encode(self).encode()


def read_post(folder: Path) -> Post:
    """Read the `Post` from the bundle in a folder."""
    return decode((folder / POST).read_bytes(), Post)


def follow_orders(
    task: RemoteTask,
    post: Post,
    batches: Iterable[Any],
    meeting: MeetingClient,
    variables: Mapping[str, str],
    reached: str | None,
    notice: Notice,
    give_up: Callable[[], str | None] = lambda: None,
) -> bool:
    """Run one worker according to the driver's orders, and send the driver its report and model.

    Parameters
    ----------
    batches
        All rows, in a form that the member's source reads as those of rank 0.
    meeting
        Connection for this worker only, in which its rank is 0.
    variables
        Environment variables for the worker's process.
    reached, notice
        As in `take_part`.
    give_up
        As in `Child`.

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
        meeting(Announced(PACKAGES, json.dumps(member.read_packages())))
        with Child(
            member.job,
            number,
            address,
            meeting,
            variables,
            give_up=give_up,
            notice=notice,
            interpreter=member.interpreter,
        ) as child:
            # First: when the worker stands by, the others may begin a generation with it.
            counts = _store_rows(member, batches, child.folder)
            if post.compares_rows:
                digests = {name: digest_rows(child.folder / name) for name in counts}
                meeting(Announced(ROWS, json.dumps(digests)))
            child.start(member.files)
            threading.Thread(target=_pass_on, args=(meeting, child, counts), daemon=True).start()
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


def _store_rows(member: Member, batches: Iterable[Any], folder: Path) -> dict[str, list[int]]:
    """Store the rows that the member receives; return their numbers by data set."""
    if member.source is None:
        for _ in batches:
            pass
        return {}
    member.source.spool(batches, 0, folder)
    layouts = read_layouts(folder)
    check_layouts([layouts])
    return {name: [layout["rows"]] for name, layout in layouts.items()}


def _pass_on(meeting: MeetingClient, child: Child, counts: Mapping[str, list[int]]) -> None:
    """Forward the driver's orders to the worker; the driver may not know the number of rows."""
    while True:
        order = meeting.take_order()
        if isinstance(order, Order):
            order = replace(order, counts={**counts, **order.counts})
        child.go(order)
