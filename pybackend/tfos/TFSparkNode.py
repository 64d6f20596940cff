"""One node of a cluster: its description for the function, its GPUs, and its call."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.context import WorkerContext
from pybackend.core.net.rendezvous import reserve, split_address
from pybackend.tfos import TFManager, TFNode, gpu_info, reservation, util
from pybackend.tfos.feed.server import open_feed

TRAINING = ("chief", "master", "worker")
# TensorBoards of this process: each ends when nothing refers to it.
_boards: list[Any] = []


class TFNodeContext:
    """Description of a node; the second argument of its function, ``ctx``.

    Parameters
    ----------
    executor_id
        Number of the node in the cluster; equal to ``worker_num``.
    job_name, task_index
        Role of the node, and its number in that role.
    cluster_spec
        Lists of ``host:port`` of all nodes, by role.
    defaultFS, working_dir
        The cluster's file system, and the folder in which the driver was started.
    mgr
        Manager for `TFNode.DataFeed`.
    tmp_socket
        Socket that holds the port of this node's server until `release_port`; None if there is
        none.
    """

    def __init__(
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, Sequence[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
    ) -> None:
        self.worker_num = executor_id
        self.executor_id = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = {role: list(peers) for role, peers in (cluster_spec or {}).items()}
        self.num_workers = sum(len(self.cluster_spec.get(role, [])) for role in TRAINING)
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self.user_name = getpass.getuser()

    absolute_path = TFNode.hdfs_path
    start_cluster_server = TFNode.start_cluster_server
    export_saved_model = staticmethod(TFNode.export_saved_model)
    release_port = TFNode.release_port

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> TFNode.DataFeed:
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)


def run(
    fn: Callable[[Any, Any], Any],
    tf_args: Any,
    cluster_meta: Mapping[str, Any],
    tensorboard: bool,
    log_dir: str | None,
    queues: Sequence[str],
    background: bool,
) -> Callable[[Iterable[int]], None]:
    """Return a function for a partition that holds a node's number; it runs ``fn`` as that node.

    `TFCluster.run` does more, and does not use this. The nodes register at a `reservation.Server`,
    and the function runs in the process of Spark's task, as ``fn(tf_args, ctx)``. ``cluster_meta``
    has ``cluster_template`` (numbers of nodes by role), ``server_addr``, ``default_fs``,
    ``working_dir`` and ``release_port``. ``tensorboard`` and ``log_dir`` are as in `TFCluster.run`,
    ``queues`` are the names of those of ``ctx.mgr``, and ``background`` must be False.
    """
    if background:
        raise InputError("`background` is not supported: TFCluster.run() feeds running functions")

    def run_node(numbers: Iterable[int]) -> None:
        executor_id = list(numbers)[-1]
        _set_gpus(tf_args)
        template = cluster_meta["cluster_template"]
        job_name = next((role for role in template if executor_id in template[role]), "default")
        task_index = template[job_name].index(executor_id) if job_name in template else -1
        node = ClusterNode(executor_id, job_name, task_index)
        host = util.get_ip_address()
        with reserve(host) as held:
            manager = TFManager.start(secrets.token_bytes(16), queues)
            manager.set("state", "running")
            shown = 0
            first = next((role for role in ("worker", "chief", "master") if role in template), None)
            if tensorboard and (job_name, task_index) == (first, 0):
                shown = start_tensorboard(host, log_dir or f"tensorboard_{executor_id}")
            address = {"host": host, "port": held.getsockname()[1], "addr": manager.address}
            described = {**vars(node), **address, "tb_pid": 0, "tb_port": shown}
            with closing(reservation.Client(cluster_meta["server_addr"])) as client:
                client.register(described)
                known = client.await_reservations()
            spec = _get_cluster_spec(sorted(known, key=lambda one: int(one["executor_id"])))
            if spec.keys() & {"chief", "master"}:
                task = {"type": job_name, "index": task_index}
                os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": task})
            _set_gpus(tf_args, spec, job_name, task_index)
            given = {**vars(node), "defaultFS": cluster_meta["default_fs"], "cluster_spec": spec}
            given |= {"working_dir": cluster_meta["working_dir"], "mgr": manager}
            ctx = TFNodeContext(**given, tmp_socket=held)
            if cluster_meta.get("release_port", True):
                ctx.release_port()
            fn(tf_args, ctx)

    return run_node


def _get_cluster_spec(sorted_cluster_info: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    numbers = [node["executor_id"] for node in sorted_cluster_info]
    if len(set(numbers)) < len(numbers):
        raise ClusterError(f"two nodes have the same number: {numbers}")
    spec: dict[str, list[str]] = {}
    for node in sorted_cluster_info:
        spec.setdefault(node["job_name"], []).append(f"{node['host']}:{node['port']}")
    return spec


def _has_spark_resource_api() -> bool:
    """Return whether Spark reports the GPUs of a task: always, since Spark 3."""
    return True


def _set_gpus(tf_args: Any, spec: Any = None, job_name: str = "", task_index: int = 0) -> None:
    """Make this node's GPUs visible to TensorFlow: its task's, or else free ones on its machine.

    Raises `ClusterError` if the node has fewer than ``tf_args.num_gpus``.
    """
    named = tf_args if isinstance(tf_args, Mapping) else getattr(tf_args, "__dict__", {})
    wanted = None if named.get("num_gpus") is None else int(named["num_gpus"])
    gpus, is_pod = _gpus_of_task(), "SPARK_EXECUTOR_POD_IP" in os.environ
    if gpus:
        gpus = gpus if wanted is None else gpus[:wanted]
    # In a pod, only assigned GPUs may be used.
    elif wanted != 0 and not is_pod and gpu_info.is_gpu_available():
        nodes = [node for some in (spec or {}).values() for node in some]
        index = util.index_on_host(nodes, spec[job_name][task_index]) if spec else 0
        count = 1 if wanted is None else wanted
        gpus = list(gpu_info.get_gpus(count, index, format=gpu_info.AS_LIST))
    if wanted is not None and len(gpus) < wanted:
        raise ClusterError(
            f"num_gpus={wanted}, but this node on {socket.gethostname()} has {len(gpus)}: assign "
            "GPUs to Spark's tasks (spark.task.resource.gpu.amount), or request fewer"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def _gpus_of_task() -> list[str]:
    if not _has_spark_resource_api():
        return []
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = context.resources() if context else {}
    return list(resources["gpu"].addresses) if resources and "gpu" in resources else []


def start_tensorboard(host: str, log_dir: str) -> int:
    """Start TensorBoard, which ends with this worker; return its port, or 0 if it did not start."""
    from pybackend.tracking.tensorboard import TensorBoardView

    try:
        board = TensorBoardView(log_dir, host, os.environ.get("TENSORBOARD_PORT", "0"))
    except ClusterError as error:
        print(error, flush=True)
        return 0
    _boards.append(board)
    return urlsplit(board.url).port or 0


# Names of a node's events: its description, and that its function wants no more rows.
NODE = "node"
TERMINATED = "terminated"
# ... because the function has returned, not by `terminate`.
LEFT = "left"


@dataclass(frozen=True)
class ClusterNode:
    """Number of a node, its role, and its index in that role."""

    executor_id: int
    job_name: str
    task_index: int


@dataclass(frozen=True)
class NodeSettings:
    """Settings of all nodes of a cluster; ``nodes`` are by rank.

    With ``release_port``, the port of a node's server is released when its function starts.
    ``tensorboard`` is the executor id of the node that starts TensorBoard and shows ``log_dir``;
    None: no node. ``feed_token`` is the secret of the tasks that feed rows; None: no rows are fed.
    """

    nodes: tuple[ClusterNode, ...]
    default_fs: str
    working_dir: str
    release_port: bool = True
    tensorboard: int | None = None
    log_dir: str | None = None
    feed_token: str | None = field(default=None, repr=False)


def run_node(
    context: WorkerContext, map_fun: Callable[[Any, Any], Any], tf_args: Any, settings: NodeSettings
) -> None:
    """Call ``map_fun(tf_args, ctx)`` with a `TFNodeContext`, inside a worker."""
    node, address = settings.nodes[context.rank], context.addresses[context.rank]
    host, port = split_address(address)
    spec: dict[str, list[str]] = {}
    pairs = zip(settings.nodes, context.addresses, strict=True)
    for one, its in sorted(pairs, key=lambda pair: pair[0].task_index):
        spec.setdefault(one.job_name, []).append(its)
    if not spec.keys() & {"chief", "master"}:  # then the nodes are independent
        os.environ.pop("TF_CONFIG", None)
    token = settings.feed_token
    with open_feed(host, token, context.announce) if token else nullcontext() as queue:
        if queue is not None:
            threading.Thread(target=_tell_end, args=(queue, context.announce), daemon=True).start()
        shown = 0
        if settings.tensorboard == node.executor_id:
            shown = start_tensorboard(host, settings.log_dir or f"tensorboard_{node.executor_id}")
        given = {**vars(node), "defaultFS": settings.default_fs, "cluster_spec": spec}
        given |= {"working_dir": settings.working_dir, "mgr": TFManager.fed_manager(queue)}
        held = None if settings.release_port else _hold(host, port)
        ctx = TFNodeContext(**given, tmp_socket=held)
        described = {**vars(node), "host": host, "port": port, "addr": address, "tb_port": shown}
        context.announce(NODE, json.dumps({**described, "tb_pid": 0, "pid": os.getpid()}))
        if isinstance(tf_args, list):
            sys.argv = list(tf_args)
        map_fun(tf_args, ctx)


def _tell_end(queue: Any, announce: Callable[[str, str], object]) -> None:
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


def count_roles(num_executors: Any, num_ps: Any, master: Any, eval_node: Any) -> dict[str, int]:
    count = check_whole_number("num_executors", num_executors, least=1)
    servers = check_whole_number("num_ps", num_ps, least=0)
    if master not in (None, "", "chief", "master"):
        raise InputError(f"`master_node` must be 'chief' or 'master', not {master!r}")
    chiefs, evaluators = int(bool(master)), int(bool(eval_node))
    workers = count - servers - chiefs - evaluators
    if workers < 0 or chiefs + workers < 1:
        raise InputError(
            f"`num_executors` is {count}: too few for num_ps={servers}"
            f"{', a ' + master if master else ''}{', an evaluator' if eval_node else ''} "
            "and at least one node that trains"
        )
    roles = {"chief": chiefs, "worker": workers, "ps": servers, "evaluator": evaluators}
    return {role: number for role, number in roles.items() if number}


def number_nodes(roles: dict[str, int], master_node: str | None) -> tuple[ClusterNode, ...]:
    """Return the nodes by rank, numbered as in TensorFlowOnSpark: parameter servers first."""
    starts, count = {}, 0
    for role in ("ps", "chief", "evaluator", "worker"):
        starts[role] = count
        count += roles.get(role, 0)
    return tuple(
        ClusterNode(starts[role] + index, str(master_node) if role == "chief" else role, index)
        for role, number in roles.items()
        for index in range(number)
    )
