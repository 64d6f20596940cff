"""One node of a cluster: what its function knows of it."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pybackend.tfos import TFNode

_TRAINING = ("chief", "master", "worker")


class TFNodeContext:
    """What a function knows of its node; its second argument, ``ctx``.

    Parameters
    ----------
    executor_id
        Number of the node in the cluster; ``worker_num`` is the same.
    job_name, task_index
        Role of the node, and its number in that role.
    cluster_spec
        ``host:port`` of all nodes, in a list by role.
    defaultFS, working_dir
        The cluster's file system, and the folder in which the driver was started.
    mgr
        For `TFNode.DataFeed`.
    tmp_socket
        Holds the port of this node's server until `release_port`; None if nothing has to.
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
        self.num_workers = sum(len(self.cluster_spec.get(role, [])) for role in _TRAINING)
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self.user_name = getpass.getuser()

    def absolute_path(self, path: str) -> str:
        """See `TFNode.hdfs_path`."""
        return TFNode.hdfs_path(self, path)

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> NoReturn:
        """See `TFNode.start_cluster_server`."""
        TFNode.start_cluster_server(self, num_gpus, rdma)

    def export_saved_model(
        self, sess: Any, export_dir: str, tag_set: str, signatures: Any
    ) -> NoReturn:
        """See `TFNode.export_saved_model`."""
        TFNode.export_saved_model(sess, export_dir, tag_set, signatures)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> TFNode.DataFeed:
        """See `TFNode.DataFeed`."""
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """See `TFNode.release_port`."""
        TFNode.release_port(self)
