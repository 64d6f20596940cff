"""Run the user's function as a node of a cluster, inside a worker."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from pybackend.core.job.context import WorkerContext
from pybackend.core.net.rendezvous import split_address
from pybackend.tfos.feed.queue import RowQueue
from pybackend.tfos.feed.server import open_feed
from pybackend.tfos.TFManager import fed_manager
from pybackend.tfos.TFSparkNode import TFNodeContext, start_tensorboard

# Names of a node's events: its description, and that its function wants no more rows.
NODE = "node"
TERMINATED = "terminated"
# ... because the function has returned, not by `terminate`.
LEFT = "left"


@dataclass(frozen=True)
class NodePlace:
    """Number of a node, its role, and its index in that role."""

    executor_id: int
    job_name: str
    task_index: int


@dataclass(frozen=True)
class NodeSettings:
    """Settings of all nodes of a cluster.

    Attributes
    ----------
    places
        Number and role of each node, by rank.
    default_fs, working_dir
        As in `TFNodeContext`.
    release_port
        Whether the port of a node's server is released when its function starts.
    tensorboard
        Executor id of the node that starts TensorBoard; None: no node.
    log_dir
        Folder that it shows.
    feed_token
        Secret of the tasks that feed rows; None: no rows are fed.
    """

    places: tuple[NodePlace, ...]
    default_fs: str
    working_dir: str
    release_port: bool = True
    tensorboard: int | None = None
    log_dir: str | None = None
    feed_token: str | None = field(default=None, repr=False)


def run_node(
    context: WorkerContext,
    map_fun: Callable[[Any, Any], Any],
    tf_args: Any,
    settings: NodeSettings,
) -> None:
    """Call ``map_fun(tf_args, ctx)`` with a `TFNodeContext`."""
    host, _ = split_address(context.addresses[context.rank])
    token = settings.feed_token
    with open_feed(host, token, context.announce) if token else nullcontext() as queue:
        _call_node(context, map_fun, tf_args, settings, queue)


def _call_node(
    context: WorkerContext,
    map_fun: Callable[[Any, Any], Any],
    tf_args: Any,
    settings: NodeSettings,
    queue: RowQueue | None,
) -> None:
    place = settings.places[context.rank]
    address = context.addresses[context.rank]
    host, port = split_address(address)
    spec = describe_cluster(settings.places, context.addresses)
    if not spec.keys() & {"chief", "master"}:  # then the nodes are independent
        os.environ.pop("TF_CONFIG", None)
    shown = 0
    if settings.tensorboard == place.executor_id:
        shown = start_tensorboard(host, settings.log_dir or f"tensorboard_{place.executor_id}")
    ctx = TFNodeContext(
        place.executor_id,
        place.job_name,
        place.task_index,
        spec,
        settings.default_fs,
        settings.working_dir,
        _manager(queue, context.announce),
        None if settings.release_port else _hold(host, port),
    )
    node = {**vars(place), "host": host, "port": port, "addr": address, "tb_port": shown}
    context.announce(NODE, json.dumps({**node, "tb_pid": 0, "pid": os.getpid()}))
    if isinstance(tf_args, list):
        sys.argv = list(tf_args)
    map_fun(tf_args, ctx)


def describe_cluster(places: Sequence[NodePlace], addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return the addresses of all nodes, by role and in the order of their indices."""
    spec: dict[str, list[str]] = {}
    ordered = sorted(range(len(places)), key=lambda rank: places[rank].task_index)
    for rank in ordered:
        spec.setdefault(places[rank].job_name, []).append(addresses[rank])
    return spec


def _manager(queue: RowQueue | None, announce: Callable[[str, str], object]) -> Any:
    manager = fed_manager(queue)
    if queue is not None:
        threading.Thread(target=_tell_end, args=(queue, announce), daemon=True).start()
    return manager


def _tell_end(queue: Any, announce: Callable[[str, str], object]) -> None:
    """Notify the driver when the function does not want any more rows."""
    with queue.changed:
        queue.changed.wait_for(lambda: queue.has_stopped)
        has_failed, was_left = queue.failure is not None, queue.was_left
    if not has_failed:
        announce(TERMINATED, LEFT if was_left else "")


def _hold(host: str, port: int) -> socket.socket:
    """Return a second socket on this node's port, which TensorFlow's server binds later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))
    return held
