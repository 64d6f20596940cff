"""Helpers for a function on a worker: paths on the cluster's file system, and its rows."""

from __future__ import annotations

import getpass
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pybackend.core.errors import InputError

logger = logging.getLogger(__name__)

_SCHEME = re.compile("(adl|file|gs|hdfs|oss|s3[an]?|swift|viewfs|wasbs?)://")


def hdfs_path(ctx: Any, path: str) -> str:
    """Return an absolute path with the scheme of its file system.

    ``ctx`` has ``defaultFS`` and ``working_dir``. Relative paths are below the user's folder on
    HDFS, or below ``working_dir`` on a local disk.
    """
    root = ctx.defaultFS
    if _SCHEME.match(path):
        return path
    if path.startswith("/"):
        return f"{root}{path}"
    if root.startswith(("hdfs://", "viewfs://")):
        return f"{root}/user/{getpass.getuser()}/{path}"
    if root.startswith("file://"):
        return f"{root}/{ctx.working_dir[1:]}/{path}"
    logger.warning("%s is not a supported file system: %s is treated as relative to it", root, path)
    return f"{root}/{path}"


def start_cluster_server(ctx: Any, num_gpus: int = 1, rdma: bool = False) -> NoReturn:
    """Raise `InputError`: in TensorFlow 2, a strategy of `tf.distribute` starts the servers."""
    raise InputError(
        "start_cluster_server() belongs to TensorFlow 1: use a strategy of tf.distribute, which "
        "reads TF_CONFIG and starts the server itself"
    )


def export_saved_model(sess: Any, export_dir: str, tag_set: str, signatures: Any) -> NoReturn:
    """Raise `InputError`: in TensorFlow 2, use `pybackend.tfos.compat.export_saved_model`."""
    raise InputError(
        "export_saved_model() of a session belongs to TensorFlow 1: use "
        "compat.export_saved_model(model, export_dir, is_chief)"
    )


def release_port(ctx: Any) -> None:
    """Close the socket that holds the port of this node's server."""
    if ctx.tmp_socket is None:
        logger.warning("release_port() was called, but no socket holds a port")
        return
    ctx.tmp_socket.close()
    ctx.tmp_socket = None


def _removed(call: str) -> Callable[..., NoReturn]:
    def raise_error(*_: Any, **__: Any) -> NoReturn:
        raise InputError(f"TFNode.{call}() was removed: use TFNode.DataFeed(ctx.mgr).{call}()")

    return raise_error


next_batch, batch_results, terminate = map(_removed, ("next_batch", "batch_results", "terminate"))


class DataFeed:
    """Rows that Spark feeds to this worker, and the results that it returns for them.

    Parameters
    ----------
    mgr
        The context's ``mgr``.
    train_mode
        False for inference: a batch then holds rows from one partition only.
    qname_in, qname_out
        Names of queues in ``mgr``.
    input_mapping
        Mapping from columns of a DataFrame to names of tensors. The values of a row are in the
        order of the sorted columns.
    """

    def __init__(
        self,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.mgr = mgr
        self.train_mode = train_mode
        self.qname_in = qname_in
        self.qname_out = qname_out
        self.done_feeding = False
        self.input_tensors = (
            None if input_mapping is None else [name for _, name in sorted(input_mapping.items())]
        )
        self.queue_in = mgr.get_queue(qname_in)
        self.queue_out = mgr.get_queue(qname_out)

    def next_batch(self, batch_size: int) -> Any:
        """Return the next rows: a list, or with ``input_mapping`` a dict with a column per tensor.

        Waits for ``batch_size`` rows; returns fewer at the end, and in inference at the end of a
        partition. A column is a list or, if `TFCluster.train` was called with a DataFrame of
        numbers, text and arrays of these, a numpy array with one entry per row, taken directly from
        Arrow.

        Raises
        ------
        InputError
            A column of such a DataFrame is not an array: it has nulls or lists of different
            lengths.
        """
        queue, apart = self.queue_in, not self.train_mode
        names = self.input_tensors
        if names is None:
            items, self.done_feeding = queue.take(batch_size, keeps_apart=apart)
            return items
        columns, self.done_feeding = queue.take_columns(batch_size, len(names), keeps_apart=apart)
        return dict(zip(names, columns, strict=True))

    def should_stop(self) -> bool:
        """Return whether no more rows will come."""
        return self.done_feeding

    def batch_results(self, results: Sequence[Any]) -> None:
        """Send one result for each row that was taken, in row order."""
        self.queue_out.give(results)

    def terminate(self) -> None:
        """Stop taking rows: current and later feeding tasks end at once."""
        self.mgr.set("state", "terminating")
        self.done_feeding = True
        self.queue_in.stop()
