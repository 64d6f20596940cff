"""Cluster of TensorFlow processes on Spark's executors, which run the user's function.

With `InputMode.TENSORFLOW`, the function reads its own data, and the workers are those of
`barrier_run`. With `InputMode.SPARK`, `TFCluster.train` and `TFCluster.inference` feed it rows, and
the workers hold no Spark slots.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from pybackend.core import launchers
from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.arguments import check_seconds, check_whole_number
from pybackend.core.job.job import FUNCTION, FunctionJob, make_job
from pybackend.core.job.pickling import pickle_value
from pybackend.core.net.authentication import new_token
from pybackend.tfos import TFSparkNode
from pybackend.tfos.feed.client import FED_SCHEMA, Feeder, feed_frame, feed_items, infer_items
from pybackend.tfos.feed.dialog import FEED_TOKEN
from pybackend.tfos.feed.launcher import LaunchedCluster, NobodyTakesRows, launch_fed
from pybackend.tfos.TFSparkNode import NodeSettings
from pybackend.tfos.util import default_fs, session_of

# Number of epochs that the original uses for "until the function ends".
_EPOCHS = 10
# Default of the longest time without a taken row.
_SECONDS = 600
_LOOK_SECONDS = 0.05
_PLAIN = {"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string"}
# Feeders and the driver receive the same failure by different ways; the driver's may be later.
_CAUSE_SECONDS = 10.0


class InputMode:
    """Source of the rows: the function reads its own data, or Spark feeds it."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A running cluster; returned by `run`.

    Attributes
    ----------
    sc, num_executors, input_mode, defaultFS, working_dir, queues
        Arguments of `run`, or values derived from them.
    cluster_info
        A dict per node: executor_id, job_name, task_index, host, port, addr, tb_port, tb_pid.
    cluster_meta, cluster_id, nodeRDD, server
        As in TensorFlowOnSpark; ``server.done`` is True once a function does not want any more
        rows.
    """

    def __init__(
        self,
        session: Any,
        launched: LaunchedCluster,
        settings: NodeSettings,
        input_mode: int,
    ) -> None:
        self._session = session
        self.sc = sc = session.sparkContext
        self.input_mode = input_mode
        self.num_executors = len(settings.nodes)
        self.defaultFS = settings.default_fs
        self.working_dir = settings.working_dir
        self.queues = ["input", "output", "error"]
        self.cluster_id = launched.token[:16]
        self.cluster_info = launched.nodes
        self.cluster_meta = {"id": self.cluster_id, "num_executors": self.num_executors}
        self.nodeRDD = sc.parallelize(range(self.num_executors), self.num_executors)
        self.server = launched
        self._feeds: list[str] = []
        # Also for the lazy RDD that `inference` returns.
        self._python = ExitStack()
        self._python.enter_context(launchers.driver_python(session))
        self._is_over = False

    def train(
        self,
        dataRDD: Any,
        num_epochs: int = 0,
        feed_timeout: float = _SECONDS,
        qname: str = "input",
    ) -> None:
        """Feed the rows to the workers; return when all have been taken, or no more are wanted.

        Parameters
        ----------
        dataRDD
            An RDD, a DataFrame (fastest), or a DStream. If `DataFeed` has an
            ``input_mapping``, columns of a DataFrame become arrays: see `DataFeed.next_batch`.
        num_epochs
            Number of times that the rows are fed; 0: ten times, or until the function calls
            ``terminate``.
        feed_timeout
            Maximum seconds during which a worker takes no row.

        Raises
        ------
        ClusterError
            A worker took no row for that long, or the cluster has ended.
        WorkerFailedError
            A worker failed.
        SerializationError
            A row cannot be sent.
        """
        self._check_fed("train", qname)
        _check_rows(dataRDD, ("mapPartitions", "foreachRDD"))
        feeder = self.server.feeder(check_seconds("feed_timeout", feed_timeout))

        def feed(rdd: Any) -> None:  # returns None: pyspark would use another value as an RDD
            self._feed(rdd, 1, feeder)

        if hasattr(dataRDD, "foreachRDD"):
            dataRDD.foreachRDD(feed)
        else:
            self._feed(dataRDD, num_epochs, feeder)

    def train_lists(self, frame: Any, num_epochs: int) -> None:
        """Feed as in `train`, but with columns of the DataFrame as lists, as from its RDD.

        Raises
        ------
        InputError
            The DataFrame has no rows.
        """
        self._check_fed("train", "input")
        feeder = self.server.feeder(_SECONDS)
        if self._feed(frame, num_epochs, feeder, arrays=False) == 0:
            raise InputError("the DataFrame has no rows: there is nothing to train on")

    def abort(self, reason: str) -> None:
        """Stop the workers without notifying them that there are no more rows."""
        self._is_over = True
        self.server.give_up(reason)
        self._python.close()

    def inference(self, dataRDD: Any, feed_timeout: float = _SECONDS, qname: str = "input") -> Any:
        """Return a lazy RDD of the results: one for each row, in the same order.

        Parameters
        ----------
        dataRDD, feed_timeout
            As in `train`; an RDD or a DataFrame.

        Raises
        ------
        ClusterError, WorkerFailedError
            As in `train`.
        """
        self._check_fed("inference", qname)
        _check_rows(dataRDD, ("mapPartitions",))
        rows = dataRDD.rdd if launchers.is_spark_frame(dataRDD) else dataRDD
        feeder = self.server.feeder(check_seconds("feed_timeout", feed_timeout))
        return rows.mapPartitions(partial(infer_items, feeder, new_token()[:16]))

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """Notify the workers that there are no more rows, and wait for all functions to return.

        Parameters
        ----------
        ssc
            A StreamingContext that feeds the workers. `shutdown` waits for it, and stops it when a
            function does not want any more rows.
        grace_secs
            Ignored: `shutdown` waits for the functions without a limit after the last row.
        timeout
            Seconds after which running workers are stopped; -1: never.

        Raises
        ------
        WorkerFailedError
            A worker failed.
        ClusterError
            The workers took longer, or were lost.
        """
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        self._is_over = True
        try:
            while ssc is not None and not ssc.awaitTerminationOrTimeout(0.5):
                if self.server.done or self.server.has_ended or time.monotonic() > deadline:
                    ssc.stop(stopSparkContext=False, stopGraceFully=True)
                    break
            while self._feeds and not self.server.has_ended and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            with self._python:
                self.server.finish(deadline, timeout)
        except BaseException as error:
            self.server.give_up(f"shutdown() was interrupted by {type(error).__name__}")
            raise

    def tensorboard_url(self) -> str | None:
        """Return the URL of TensorBoard; None if it was not requested."""
        shown = (node for node in self.cluster_info if node["tb_port"])
        return next((f"http://{node['host']}:{node['tb_port']}" for node in shown), None)

    def _check_fed(self, call: str, qname: str) -> None:
        if self.input_mode != InputMode.SPARK:
            raise InputError(f"TFCluster.{call}() needs input_mode=InputMode.SPARK")
        if qname != "input":
            raise InputError(f"`qname` must be 'input', not {qname!r}: rows have one queue")
        self.server.raise_failure(0)
        if self._is_over:
            raise ClusterError(f"the cluster was shut down: call {call}() before shutdown()")

    def _feed(self, rows: Any, epochs: int, feeder: Feeder, *, arrays: bool = True) -> int | None:
        """Feed rows; return their number, or None if not all of them were wanted."""
        epochs = check_whole_number("num_epochs", epochs, least=0) or _EPOCHS
        name = new_token()[:16]
        if launchers.is_spark_frame(rows) and not all(
            _is_plain(field.dataType.simpleString()) for field in rows.schema.fields
        ):
            rows = rows.rdd  # slower, but each value equals that of Spark's Python rows
        if launchers.is_spark_frame(rows):
            feed = partial(_feed_frame, rows, epochs, feeder, name, arrays)
        else:
            feed = partial(_feed_rdd, rows, epochs, feeder, name)
        self._feeds.append(name)
        try:
            with launchers.quiet_log(self._session):
                fed = launchers.run_watched(self._session, feed, self.server.watch, math.inf)
        except NobodyTakesRows:
            fed = None
        finally:
            self._feeds.remove(name)
        if failures := [failure for _, failure in fed or () if failure]:
            kind, _, message = failures[0].partition(": ")
            self.server.raise_failure(_CAUSE_SECONDS if kind == ClusterError.__name__ else 0)
            # If all functions returned without a failure, the other rows are not needed.
            if not self.server.has_ended:
                is_row = kind == SerializationError.__name__
                raise SerializationError(message) if is_row else ClusterError(message)
        self.server.tell_left()
        return None if fed is None else sum(rows for rows, _ in fed)


def _check_rows(rows: Any, methods: Sequence[str]) -> None:
    if not launchers.is_spark_frame(rows) and not any(hasattr(rows, name) for name in methods):
        raise InputError(
            f"`dataRDD` must be an RDD or a DataFrame, not {type(rows).__name__}: "
            "sc.parallelize(rows) makes an RDD from a list"
        )


def run(
    sc: Any,
    map_fun: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    num_ps: int,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
) -> TFCluster:
    """Start a function on every node of a cluster; return when all are about to start.

    Parameters
    ----------
    sc
        A SparkContext.
    map_fun
        Called as ``map_fun(tf_args, ctx)`` with a `TFNodeContext`, in a separate process.
    tf_args
        Its first argument; a list also becomes its ``sys.argv``.
    num_executors
        Total number of nodes; Spark needs that many slots.
    num_ps
        Number of parameter servers among them.
    tensorboard, log_dir
        Whether a worker starts TensorBoard, and the folder that it shows.
    input_mode
        A value of `InputMode`.
    driver_ps_nodes
        Not supported: parameter servers run on executors.
    master_node
        ``"chief"`` or ``"master"``: the role of one of the nodes; TF_CONFIG is then set.
    reservation_timeout
        Seconds within which all nodes must start.
    queues
        Ignored.
    eval_node
        Whether one of the nodes is the evaluator.
    release_port
        False: ``ctx.tmp_socket`` holds the port of each node's server until the function calls
        ``ctx.release_port()``.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError
        As in `barrier_run`.
    """
    if not callable(map_fun):
        raise InputError(f"`map_fun` must be a function, not {type(map_fun).__name__}")
    session = session_of(sc)
    if input_mode not in (InputMode.TENSORFLOW, InputMode.SPARK):
        raise InputError(f"`input_mode` must be one of InputMode, not {input_mode!r}")
    is_fed = input_mode == InputMode.SPARK
    if driver_ps_nodes:
        raise InputError(
            "`driver_ps_nodes` is not supported: parameter servers run on executors. Leave it out, "
            "and give the session num_executors slots"
        )
    if eval_node and is_fed:
        raise InputError("`eval_node` needs InputMode.TENSORFLOW: an evaluator reads its own data")
    roles = TFSparkNode.count_roles(num_executors, num_ps, master_node, eval_node)
    nodes = TFSparkNode.number_nodes(roles, master_node)
    trains = [node for node in nodes if node.job_name in TFSparkNode.TRAINING]
    shows = min(trains, key=lambda node: node.job_name != "worker")
    launched = LaunchedCluster(num_executors)
    folders = default_fs(session.sparkContext), os.getcwd()
    shown = shows.executor_id if tensorboard else None
    token = launched.token if is_fed else None
    settings = NodeSettings(nodes, *folders, bool(release_port), shown, log_dir, token)
    job = make_job(FunctionJob, {"workers": num_executors, "roles": roles, "verbose": 2})
    call = (TFSparkNode.run_node, (map_fun, tf_args, settings))
    files = {FUNCTION: pickle_value(call, "`map_fun` and its arguments", [map_fun, tf_args])}
    if is_fed:
        files[FEED_TOKEN] = launched.token.encode()
        launched.launch = partial(launch_fed, session, launched, job, files)
    else:
        launcher = launchers.SparkLauncher(session, launched.look)
        launched.launch = partial(launcher.launch, job, files, {}, launched.hear)
    launched.start(is_fed, check_seconds("reservation_timeout", reservation_timeout))
    return TFCluster(session, launched, settings, input_mode)


def _is_plain(kind: str) -> bool:
    """Return whether Arrow represents a column with the same values as Spark's own rows."""
    return kind.replace("array<", "").rstrip(">") in _PLAIN


def _feed_rdd(rows: Any, epochs: int, feeder: Feeder, name: str) -> list[tuple[int, str | None]]:
    all_rows = rows.context.union([rows] * epochs) if epochs > 1 else rows
    return list(all_rows.mapPartitions(partial(feed_items, feeder, name)).collect())


def _feed_frame(
    rows: Any, epochs: int, feeder: Feeder, name: str, arrays: bool
) -> list[tuple[int, str | None]]:
    found: list[tuple[int, str | None]] = []
    with launchers.small_batches(rows.sparkSession):
        for epoch in range(epochs):
            task = partial(feed_frame, feeder, f"{name}-{epoch}", arrays)
            fed = rows.mapInArrow(task, FED_SCHEMA)
            found += [(row["rows"], row["failure"]) for row in fed.collect()]
            if any(failure for _, failure in found):
                break
    return found
