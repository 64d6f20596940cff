"""Call the user's function in a worker, from receiving the `Order` to returning the value."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from pybackend.core import tf_config
from pybackend.core.errors import ClusterError
from pybackend.core.function.adapters import standing_in
from pybackend.core.function.sharing import GRACE_SECONDS, ConnectingRank, ListeningRank
from pybackend.core.function.values import encode_result
from pybackend.core.job.context import Announce, Gather, WorkerContext
from pybackend.core.job.job import FUNCTION, ROWS, FunctionJob, Job
from pybackend.core.job.messages import Order
from pybackend.core.net.authentication import derive_token
from pybackend.core.net.rendezvous import split_address
from pybackend.core.words import show

T = TypeVar("T")
_NO_FIT = (
    "Keras 3 cannot `fit` under MultiWorkerMirroredStrategy with several workers. Train the model "
    "with `pybackend.barrier_train`, which needs no changes to it; or install tf_keras on the "
    "workers, and start the function with os.environ['TF_USE_LEGACY_KERAS'] = '1', after which "
    "tf.keras is Keras 2; or write a custom training step"
)


@dataclass(frozen=True)
class Hooks:
    """Functions of the worker process that the call uses."""

    # As in `ConnectingRank`, for a worker that is stopped after the others have returned.
    on_end: Callable[[Exception | None], object]
    announce: Announce  # sends a message to the driver
    note: Callable[[str], object]  # shows a message to the user


def call_function(
    job: FunctionJob, rank: int, folder: Path, server: socket.socket, order: Order, hooks: Hooks
) -> tuple[str, float]:
    """Call the function in the folder; return its value as text, and how many seconds it took.

    ``server`` is the socket on which this worker listens; this function closes it.
    """
    addresses = order.reserved
    config = tf_config.config_of(job.roles, addresses, rank)
    os.environ |= {"TF_CONFIG": config, **name_rank(addresses, rank)}
    # The functions may start a joint call without a launcher.
    os.environ["TFDIST_SECRET"] = derive_token(order.token, "calls of the functions")
    # Written by the launcher on this machine, pickled from the driver's own objects.
    function, positional = cloudpickle.loads((folder / FUNCTION).read_bytes())

    def call(gather: Gather) -> tuple[str, float]:
        known = (rank, job.workers, addresses, config, *tf_config.find_role(job.roles, rank))
        context = WorkerContext(*known, gather, _open_rows(folder), hooks.announce)
        value, seconds = _timed(function, context, positional)
        return encode_result(value), seconds

    following = tf_config.ranks_that_follow(job.roles, job.workers)
    patient = {other for other in following if tf_config.find_role(job.roles, other)[0] != "ps"}

    def tell(ended: Set[int]) -> None:
        for other in ended & set(tf_config.ranks_of(job.roles, "evaluator")):
            hooks.note(
                f"worker {other}, the evaluator, was stopped {GRACE_SECONDS:g} s after the others "
                f"returned, so its value is {show(None)}: to let it finish, make the chief wait "
                "for what it writes"
            )

    return take_part(job, rank, server, order, call, hooks.on_end, patient, tell)


def name_rank(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """Return the environment variables of a process's rank, as torchrun defines them.

    ``addresses`` has ``host:port`` of every worker, by rank.
    """
    hosts = [split_address(address)[0] for address in addresses]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
    }


def take_part(
    job: Job,
    rank: int,
    server: socket.socket,
    order: Order,
    call: Callable[[Gather], T],
    on_end: Callable[[Exception | None], object],
    patient: Set[int] = frozenset(),
    tell: Callable[[Set[int]], object] = lambda ended: None,
) -> T:
    """Make a call that shares values with the other workers' calls; also used for servers.

    ``server`` and ``on_end`` are as in `call_function` and `Hooks`, ``patient`` as in
    `ListeningRank.finish`. ``tell`` is called on rank 0 with the ranks that it stopped.
    """
    following = tf_config.ranks_that_follow(job.roles, job.workers)
    if job.workers > 1 and rank == 0:
        root = ListeningRank(server, order.peers, order.token, job.timeout, job.encrypt)
        try:
            result = call(root.gather)
            leading = tf_config.ranks_that_lead(job.roles, job.workers)
            tell(root.finish(leading, following, patient))
        finally:
            root.leave()
        return result
    server.close()
    if job.workers == 1:
        return call(lambda _, text: [text])
    # A function that does not run a server returns on its own.
    end = on_end if rank in following else lambda error: None
    own = ConnectingRank(order.peers, rank, order.token, job.timeout, job.encrypt, end)
    try:
        if rank in following:  # only a connected rank can be ended
            own.wait()
        result = call(own.gather)
    except BaseException:
        own.close()
        raise
    own.finish()
    return result


def _timed(
    function: Callable[..., Any], context: WorkerContext, positional: Sequence[Any]
) -> tuple[Any, float]:
    with standing_in(context):
        began = time.monotonic()
        try:
            value = function(context, *positional)
        except SystemExit as end:  # sys.exit() and sys.exit(0) are success, as in a script
            if end.code not in (None, 0):
                raise
            value = None
        except ValueError as error:
            if "PerReplica" not in str(error):
                raise
            # Its own message prints the tensors: hundreds of lines.
            raise ClusterError(_NO_FIT).with_traceback(error.__traceback__) from None
        return value, time.monotonic() - began


def _open_rows(folder: Path) -> Any:
    if not (folder / ROWS).is_dir():
        return None
    from pybackend.core.function.values import StoredColumns  # numpy and pyarrow

    return StoredColumns(folder / ROWS)
