"""A cluster of TensorFlow processes on Spark's executors, which run the user's function.

With `InputMode.TENSORFLOW` the function reads its own data, and the workers are those of
`barrier_run`. With `InputMode.SPARK` Spark feeds it rows by `TFCluster.train` and
`TFCluster.inference`; the workers then hold none of Spark's slots.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.api.progress import printer
from pybackend.errors import ClusterError, InputError, SerializationError
from pybackend.feed.client import Feeder
from pybackend.feed.protocol import FEED
from pybackend.job.arguments import check_seconds, check_whole_number
from pybackend.job.job import FEED_TOKEN, FUNCTION, FunctionJob, make_job
from pybackend.job.messages import Announced, Event, Note
from pybackend.job.pickling import pickle_value
from pybackend.launchers import (
    FED_SCHEMA,
    DetachedLauncher,
    FeedFrame,
    FeedItems,
    InferItems,
    SparkLauncher,
    driver_python,
    is_spark_frame,
    quiet_log,
    run_watched,
    small_batches,
)
from pybackend.net.rendezvous import new_token
from pybackend.tfos.node import LEFT, NODE, TERMINATED, NodePlace, NodeSettings, run_node
from pybackend.tfos.session import default_fs, session_of

# What the original takes for "as long as it lasts".
_EPOCHS = 10
# How long a worker may take no row, if nobody says otherwise.
_FEED_SECONDS = 600
_LOOK_SECONDS = 0.05
# How long workers that are to end may take.
_END_SECONDS = 60.0
_PLAIN = {"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string"}
# What feeders say of a failure, and what the driver hears of it, are on their ways together.
_CAUSE_SECONDS = 10.0


class InputMode:
    """Who reads the data: the function itself, or Spark, which feeds it."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A running cluster; made by `run`.

    Attributes
    ----------
    sc, num_executors, input_mode, defaultFS, working_dir, queues
        As given to `run`, or found there.
    cluster_info
        A dict per node: executor_id, job_name, task_index, host, port, addr, tb_port, tb_pid.
    cluster_meta, cluster_id, nodeRDD, server
        As the original has them; ``server.done`` tells whether a function wants no more rows.
    """

    def __init__(
        self, session: Any, gang: _LaunchedCluster, settings: NodeSettings, input_mode: int
    ) -> None:
        self._session = session
        self.sc = sc = session.sparkContext
        self.input_mode = input_mode
        self.num_executors = len(settings.places)
        self.defaultFS = settings.default_fs
        self.working_dir = settings.working_dir
        self.queues = ["input", "output", "error"]
        self.cluster_id = gang.token[:16]
        self.cluster_info = gang.nodes
        self.cluster_meta = {"id": self.cluster_id, "num_executors": self.num_executors}
        self.nodeRDD = sc.parallelize(range(self.num_executors), self.num_executors)
        self.server = gang
        self._gang = gang
        self._feeds = 0
        self._lock = threading.Lock()
        # For what `inference` has returned, too, which is made when it is used.
        self._python = ExitStack()
        self._python.enter_context(driver_python(session))
        self._is_over = False

    def train(
        self,
        dataRDD: Any,
        num_epochs: int = 0,
        feed_timeout: float = _FEED_SECONDS,
        qname: str = "input",
    ) -> None:
        """Feed the rows to the workers; returns when all have been taken, or are not wanted.

        Parameters
        ----------
        dataRDD
            An RDD, a DataFrame, whose rows arrive fastest, or a DStream. Where `DataFeed` has an
            ``input_mapping``, columns of a DataFrame are arrays: see `DataFeed.next_batch`.
        num_epochs
            How often the rows are fed; 0: ten times, or until the function calls ``terminate``.
        feed_timeout
            Seconds that a worker may take no row.

        Raises
        ------
        ClusterError
            A worker has taken no row for so long, or the cluster has ended.
        WorkerFailedError
            A worker has failed.
        SerializationError
            A row cannot travel.
        """
        self._check_fed("train", qname)
        _check_rows(dataRDD, ("mapPartitions", "foreachRDD"))
        epochs = check_whole_number("num_epochs", num_epochs, least=0) or _EPOCHS
        feeder = self._gang.feeder(check_seconds("feed_timeout", feed_timeout))

        def feed(rdd: Any) -> None:  # what it returned, pyspark would take for an RDD
            self._feed(rdd, 1, feeder)

        if hasattr(dataRDD, "foreachRDD"):
            dataRDD.foreachRDD(feed)
        else:
            self._feed(dataRDD, epochs, feeder)

    def train_lists(self, frame: Any, num_epochs: int) -> None:
        """As `train`; columns of this DataFrame are lists, as those of its RDD are.

        Raises
        ------
        InputError
            There are no rows.
        """
        self._check_fed("train", "input")
        epochs = check_whole_number("num_epochs", num_epochs, least=0) or _EPOCHS
        if self._feed(frame, epochs, self._gang.feeder(_FEED_SECONDS), gives_arrays=False) == 0:
            raise InputError("the DataFrame has no rows: there is nothing to train on")

    def abort(self, reason: str) -> None:
        """End the workers, which do not hear that no more rows come."""
        self._is_over = True
        self._gang.give_up(reason)
        self._python.close()

    def inference(
        self, dataRDD: Any, feed_timeout: float = _FEED_SECONDS, qname: str = "input"
    ) -> Any:
        """An RDD of the results for these rows: as many, in the same order, made when it is used.

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
        rows = dataRDD.rdd if is_spark_frame(dataRDD) else dataRDD
        feeder = self._gang.feeder(check_seconds("feed_timeout", feed_timeout))
        return rows.mapPartitions(InferItems(feeder, new_token()[:16]))

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """Say that no more rows come, and wait until all functions have returned.

        Parameters
        ----------
        ssc
            A StreamingContext that feeds the workers: it is waited for, and stopped when a function
            wants no more rows.
        grace_secs
            Nothing: functions are waited for, however long they take after the last row.
        timeout
            Seconds after which workers that still run are ended; -1: never.

        Raises
        ------
        WorkerFailedError
            A worker has failed.
        ClusterError
            The workers took longer, or were lost.
        """
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        self._is_over = True
        try:
            self._shut_down(ssc, deadline, timeout)
        except BaseException as error:
            self._gang.give_up(f"shutdown() was ended by {type(error).__name__}")
            raise

    def _shut_down(self, ssc: Any, deadline: float, timeout: float) -> None:
        if ssc is not None:
            while not ssc.awaitTerminationOrTimeout(0.5):
                if self._gang.done or self._gang.has_ended or time.monotonic() > deadline:
                    ssc.stop(stopSparkContext=False, stopGraceFully=True)
                    break
        while self._feeds and not self._gang.has_ended and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        with self._python:
            self._gang.finish(deadline, timeout)

    def tensorboard_url(self) -> str | None:
        """Where TensorBoard shows the training; None if it was not asked for."""
        shown = (node for node in self.cluster_info if node["tb_port"])
        return next((f"http://{node['host']}:{node['tb_port']}" for node in shown), None)

    def _check_fed(self, call: str, qname: str) -> None:
        if self.input_mode != InputMode.SPARK:
            raise InputError(f"TFCluster.{call}() needs input_mode=InputMode.SPARK")
        if qname != "input":
            raise InputError(f"`qname` must be 'input', not {qname!r}: rows have one queue")
        self._gang.raise_failure(0)
        if self._is_over:
            raise ClusterError(f"the cluster was shut down: TFCluster.{call}() comes before that")

    def _feed(
        self, rows: Any, epochs: int, feeder: Feeder, *, gives_arrays: bool = True
    ) -> int | None:
        """Feed rows; how many there were, if all functions have waited for the last one."""
        name = new_token()[:16]
        if is_spark_frame(rows) and not all(
            _is_plain(field.dataType.simpleString()) for field in rows.schema.fields
        ):
            rows = rows.rdd  # slower, and each value is just what Spark's Python rows have
        with self._lock:
            self._feeds += 1
        try:
            if is_spark_frame(rows):
                feed = partial(_feed_frame, rows, epochs, FeedFrame(feeder, name, gives_arrays))
            else:
                feed = partial(_feed_rdd, rows, epochs, FeedItems(feeder, name))
            with quiet_log(self._session):
                fed = run_watched(self._session, feed, self._gang.watch, math.inf)
        except _NobodyTakesRows:
            fed = None
        finally:
            with self._lock:
                self._feeds -= 1
        if failures := [failure for _, failure in fed or () if failure]:
            kind, _, message = failures[0].partition(": ")
            self._gang.raise_failure(_CAUSE_SECONDS if kind == ClusterError.__name__ else 0)
            if not self._gang.has_ended:  # all has gone well, and nobody wants the rest
                is_row = kind == SerializationError.__name__
                raise SerializationError(message) if is_row else ClusterError(message)
        self._gang.tell_left()
        return None if fed is None else sum(rows for rows, _ in fed)


def _check_rows(rows: Any, methods: Sequence[str]) -> None:
    if not is_spark_frame(rows) and not any(hasattr(rows, name) for name in methods):
        raise InputError(
            f"`dataRDD` must be an RDD or a DataFrame, not {type(rows).__name__}: "
            "sc.parallelize(rows) makes an RDD of a list"
        )


class _NobodyTakesRows(Exception):
    """All functions have returned, or want no more rows: the tasks that feed need not go on."""


class _LaunchedCluster:
    """The workers of a cluster, launched on a thread of their own.

    Attributes
    ----------
    nodes
        What each has said of itself, by executor id.
    launch, fed
        What the thread calls; and the launcher that is told when no more rows come.
    """

    def __init__(self, workers: int) -> None:
        self.token = new_token()
        self.fed: DetachedLauncher | None = None
        self.launch: Callable[[], object] = lambda: None
        self.nodes: list[dict[str, Any]] = []
        self._satisfied: set[int] = set()
        self._left: set[int] = set()
        self._reason: str | None = None
        self._workers = workers
        self._show = printer(2)
        self._error: BaseException | None = None
        self._fed: dict[int, str] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def done(self) -> bool:
        """Whether a function wants no more rows."""
        return bool(self._satisfied)

    @property
    def has_ended(self) -> bool:
        """Whether no worker runs any more."""
        return not self._thread.is_alive()

    def start(self, is_fed: bool, seconds: float) -> None:
        """Start the workers, and wait until all functions are about to begin."""
        self._thread.start()
        try:
            self._wait_for_all(is_fed, seconds)
        except BaseException as error:
            self.give_up(f"the start was ended by {type(error).__name__}")
            raise

    def _wait_for_all(self, is_fed: bool, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._known) < self._workers or (is_fed and len(self._fed) < self._workers):
            self._thread.join(_LOOK_SECONDS)
            if self.has_ended:
                self.raise_failure(0)
                break
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._workers) if rank not in self._known]
                self._end(
                    f"worker {', '.join(map(str, missing))} did not start within {seconds:g}"
                    " s (reservation_timeout): see the logs of the executors"
                )
        self.nodes = sorted(self._known.values(), key=lambda node: int(node["executor_id"]))

    def feeder(self, timeout: float) -> Feeder:
        """How tasks reach the workers that take rows."""
        return Feeder({rank: self._fed[rank] for rank in self._takers()}, self.token, timeout)

    def watch(self) -> None:
        """Raise what ends the tasks that feed: a failure of the workers, or `_NobodyTakesRows`."""
        self.raise_failure(_LOOK_SECONDS)
        if self.has_ended or self._satisfied.issuperset(self._takers()):
            raise _NobodyTakesRows

    def _takers(self) -> list[int]:
        """Ranks that take rows."""
        return sorted(rank for rank, node in self._known.items() if node["job_name"] != "ps")

    def raise_failure(self, seconds: float) -> None:
        """Raise what has ended the workers, if it does so within some seconds."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def finish(self, deadline: float, timeout: float) -> None:
        """Wait for the workers' end, and raise what has failed."""
        if self.fed is not None:
            self.fed.close_feeds()
        while not self.has_ended:  # a short wait, so that Ctrl-C is noticed
            self._thread.join(_LOOK_SECONDS)
            if time.monotonic() > deadline:
                self._end(
                    f"the workers still run after {timeout:g} s (timeout): their functions have "
                    "not returned, though no more rows come. They were ended"
                )
        self.raise_failure(0)

    def stop(self) -> None:
        """Nothing: the workers end with their functions, or with this process."""

    def look(self) -> None:
        """Raise why the workers are to end, if they are."""
        if self._reason is not None:
            raise ClusterError(self._reason)

    def _run(self) -> None:
        try:
            self.launch()
        except BaseException as error:
            self._error = error

    def hear(self, event: Event) -> None:
        """Take in what workers say."""
        if not isinstance(event, Announced):
            self._show(event)
        elif event.name == FEED:
            self._fed[event.rank] = event.text
        elif event.name == NODE:
            self._known[event.rank] = json.loads(event.text)
        elif event.name == TERMINATED:
            self._satisfied.add(event.rank)
            if event.text == LEFT:
                self._left.add(event.rank)

    def tell_left(self) -> None:
        """Tell the user, once, which functions have left while rows were fed."""
        left, self._left = sorted(self._left.intersection(self._takers())), set()
        if left:
            self._show(
                Note(
                    f"worker {', '.join(map(str, left))} returned before the rows had ended: some "
                    "may not have been used. If that is meant, the function says so by "
                    "DataFeed.terminate()"
                )
            )

    def _end(self, reason: str) -> None:
        self.give_up(reason)
        raise self._error or ClusterError(reason)

    def give_up(self, reason: str) -> None:
        """End the workers that still run, and wait a while for that."""
        self._reason = self._reason or reason
        self._thread.join(_END_SECONDS)


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
    """Start a function on every node of a cluster; returns when all are about to begin.

    Parameters
    ----------
    sc
        A SparkContext.
    map_fun
        Called as ``map_fun(tf_args, ctx)`` with a `TFNodeContext`, in a process of its own.
    tf_args
        Its first argument; a list is its ``sys.argv``, too.
    num_executors
        How many nodes there are in all; Spark needs as many slots.
    num_ps
        How many of them are parameter servers.
    tensorboard, log_dir
        Whether a worker starts TensorBoard, and what it shows.
    input_mode
        Of `InputMode`.
    driver_ps_nodes
        Refused: parameter servers are on executors.
    master_node
        ``"chief"`` or ``"master"``: the role of one of the nodes. With it, TF_CONFIG is set.
    reservation_timeout
        Seconds in which all nodes must have started.
    queues
        Ignored.
    eval_node
        Whether one of the nodes is the evaluator.
    release_port
        False leaves ``ctx.tmp_socket`` on the port of each node's server, until the function calls
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
    roles = _count_roles(num_executors, num_ps, master_node, eval_node)
    places = _place_nodes(roles, master_node)
    shows = next(
        (p for name in ("worker", "chief", "master") for p in places if p.job_name == name), None
    )
    settings = NodeSettings(
        places,
        default_fs(session.sparkContext),
        os.getcwd(),
        bool(release_port),
        shows.executor_id if tensorboard and shows else None,
        log_dir,
    )
    job = make_job(FunctionJob, {"workers": num_executors, "roles": roles, "verbose": 2})
    call = (run_node, (map_fun, tf_args, settings))
    files = {FUNCTION: pickle_value(call, "`map_fun` and its arguments", [map_fun, tf_args])}
    gang = _LaunchedCluster(num_executors)
    if is_fed:
        files[FEED_TOKEN] = gang.token.encode()
        gang.fed = DetachedLauncher(session, gang.look)
    launcher = gang.fed or SparkLauncher(session, gang.look)
    gang.launch = partial(launcher.launch, job, files, {}, gang.hear)
    gang.start(is_fed, check_seconds("reservation_timeout", reservation_timeout))
    return TFCluster(session, gang, settings, input_mode)


def _count_roles(
    num_executors: int, num_ps: int, master_node: str | None, eval_node: bool
) -> dict[str, int]:
    """How many nodes have which role, in the order of ranks."""
    count = check_whole_number("num_executors", num_executors, least=1)
    servers = check_whole_number("num_ps", num_ps, least=0)
    if master_node not in (None, "", "chief", "master"):
        raise InputError(f"`master_node` must be 'chief' or 'master', not {master_node!r}")
    chiefs, evaluators = int(bool(master_node)), int(bool(eval_node))
    workers = count - servers - chiefs - evaluators
    if workers < 0 or chiefs + workers < 1:
        raise InputError(
            f"`num_executors` is {count}: too few for num_ps={servers}"
            f"{', a ' + master_node if master_node else ''}{', an evaluator' if eval_node else ''} "
            "and at least one node that trains"
        )
    roles = {"chief": chiefs, "worker": workers, "ps": servers, "evaluator": evaluators}
    return {role: number for role, number in roles.items() if number}


def _place_nodes(roles: dict[str, int], master_node: str | None) -> tuple[NodePlace, ...]:
    """By rank, the numbers that the original gives: parameter servers first, workers last."""
    starts, count = {}, 0
    for role in ("ps", "chief", "evaluator", "worker"):
        starts[role] = count
        count += roles.get(role, 0)
    return tuple(
        NodePlace(starts[role] + index, str(master_node) if role == "chief" else role, index)
        for role, number in roles.items()
        for index in range(number)
    )


def _is_plain(kind: str) -> bool:
    """Whether a column's values come from Arrow as Spark's own rows have them."""
    while kind.startswith("array<"):
        kind = kind.removeprefix("array<").removesuffix(">")
    return kind in _PLAIN


def _feed_rdd(rows: Any, epochs: int, task: FeedItems) -> list[tuple[int, str | None]]:
    context = rows.context
    all_rows = context.union([rows] * epochs) if epochs > 1 else rows
    return list(all_rows.mapPartitions(task).collect())


def _feed_frame(rows: Any, epochs: int, task: FeedFrame) -> list[tuple[int, str | None]]:
    found: list[tuple[int, str | None]] = []
    with small_batches(rows.sparkSession):
        for epoch in range(epochs):
            fed = rows.mapInArrow(replace(task, name=f"{task.name}-{epoch}"), FED_SCHEMA)
            found += [(row["rows"], row["failure"]) for row in fed.collect()]
            if any(failure for _, failure in found):
                break
    return found
