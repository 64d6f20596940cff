"""One call of the user's function in a worker, from the order to the value."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.function.barrier_context import standing_in
from pybackend.function.hub import Hub
from pybackend.function.spoke import Spoke
from pybackend.function.values import encode_result
from pybackend.job.context import Gather, WorkerContext
from pybackend.job.job import FUNCTION, Job
from pybackend.job.messages import Order
from pybackend.job.roles import config_of, place_of, ranks_that_follow, ranks_that_lead
from pybackend.net.secret import derive_token


def call_function(
    job: Job,
    rank: int,
    folder: Path,
    server: socket.socket,
    order: Order,
    on_end: Callable[[Exception | None], object],
) -> tuple[str, float]:
    """Call the function in the folder; its value as text, and the seconds that it took.

    Parameters
    ----------
    server
        The socket at which this worker listens; closed.
    on_end
        As in `Spoke`, if this worker is one that is ended when others have returned.
    """
    addresses = order.reserved
    config = config_of(job.roles, addresses, rank)
    os.environ["TF_CONFIG"] = config
    # The functions may make a call together, without a launcher.
    os.environ["TFDIST_SECRET"] = derive_token(order.token, "calls of the functions")
    # Written by the launcher on this machine, from the driver's own objects.
    function, positional = cloudpickle.loads((folder / FUNCTION).read_bytes())

    def call(gather: Gather) -> tuple[str, float]:
        place = place_of(job.roles, rank)
        context = WorkerContext(rank, job.workers, addresses, config, *place, gather)
        with standing_in(context):
            began = time.monotonic()
            value = function(context, *positional)
            seconds = time.monotonic() - began
        return encode_result(value), seconds

    if job.workers == 1:
        server.close()
        return call(lambda _, text: [text])
    if rank == 0:
        return _call_as_hub(job, server, order, call)
    server.close()
    return _call_as_spoke(job, rank, order, call, on_end)


def _call_as_hub(
    job: Job, server: socket.socket, order: Order, call: Callable[[Gather], tuple[str, float]]
) -> tuple[str, float]:
    hub = Hub(server, order.peers, order.token, job.timeout, job.exchange.encrypt)
    try:
        result = call(hub.gather)
        following = ranks_that_follow(job.roles, job.workers)
        patient = {other for other in following if place_of(job.roles, other)[0] != "ps"}
        hub.finish(ranks_that_lead(job.roles, job.workers), following, patient)
    finally:
        hub.leave()
    return result


def _call_as_spoke(
    job: Job,
    rank: int,
    order: Order,
    call: Callable[[Gather], tuple[str, float]],
    on_end: Callable[[Exception | None], object],
) -> tuple[str, float]:
    following = ranks_that_follow(job.roles, job.workers)
    end = on_end if rank in following else _ignore
    spoke = Spoke(order.peers, rank, order.token, job.timeout, job.exchange.encrypt, end)
    try:
        if following:  # nobody is ended who is not connected
            spoke.wait()
        result = call(spoke.gather)
    except BaseException:
        spoke.close()
        raise
    spoke.finish()
    return result


def _ignore(_: Any) -> None:
    """A function that is not a server's ends by itself."""
