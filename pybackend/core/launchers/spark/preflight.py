"""Stages before that of the workers: do the hosts reach each other, and have the environment?

Spark's own transfers wait minutes for a host behind a firewall, before any Python code runs in a
task. The network check's stage does not move any data, and takes a fraction of a second if the
network works.

The environment is packed once, and sent once to each host: the driver sends it to one executor of
each host, over tfdist's own connections. Spark sends files to every executor, even of the same
host, and so only if executors cannot connect to the driver. This file is imported on the executors.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.errors import ClusterError
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Note
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.environment.installing import Interpreter, install_here, read_blocks
from pybackend.core.launchers.environment.serving import (
    ArchiveServer,
    ServedArchive,
    UnreachedError,
)
from pybackend.core.launchers.spark.explain import run_explained
from pybackend.core.launchers.spark.jobs import give_up_after
from pybackend.core.launchers.spark.session import (
    SHIPPING,
    ask,
    driver_python,
    send_file,
    shipped_to,
)
from pybackend.core.net.rendezvous import advise_on_network, find_unreachable
from pybackend.core.words import show_bytes

NETWORK_SCHEMA = "rank int, problem string"
# Spark itself may wait for a peer to pass on the task's code: then this stage does not end.
LIMIT_SECONDS = 90.0
TOO_LONG = (
    f"Spark's executors did not report within {LIMIT_SECONDS:g} s whether they can reach each "
    "other: either they cannot, or their hosts are overloaded. "
)
# Number of other hosts that each host tries: enough to find hosts behind a firewall in one round.
_MOST = 64


def check_network(session: Any, workers: int) -> None:
    """Raise an error if the hosts of a job's tasks cannot all reach each other.

    Raises
    ------
    ClusterError
        Raised after about ten seconds; names the two hosts, the address and what to do.
    """

    def make() -> Any:
        return session.range(0, workers, 1, workers).mapInArrow(look, NETWORK_SCHEMA, barrier=True)

    plan = ask(session, "a plan", make)
    late = ClusterError(TOO_LONG + advise_on_network())
    rows = run_explained(session, plan.collect, check=give_up_after(LIMIT_SECONDS, late))
    problems = [row["problem"] for row in sorted(rows, key=lambda row: row["rank"])]
    if problems:
        more = f" ({len(problems)} of {workers} workers cannot reach another)"
        raise ClusterError(problems[0] + more)


def look(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a row of `NETWORK_SCHEMA` if another task's host is unreachable; runs in each task.

    Executors are identified by the port of their connection to the driver. Usually no process
    listens there, and a refused connection shows that the network lets connections through.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    # Otherwise Spark ends this Python process and starts another, which costs the workers' tasks
    # seconds (test_the_check_of_the_network_leaves_its_pythons_to_the_next_tasks).
    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    rank = context.partitionId()
    peers = [str(info.address) for info in context.getTaskInfos()]
    others = [(rank + step) % len(peers) for step in range(1, min(len(peers), _MOST + 1))]
    problem = find_unreachable(peers, rank, others)
    if problem:
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([problem])], names=["rank", "problem"]
        )


@contextmanager
def sent_environment(
    session: Any,
    job: Job,
    addresses: tuple[str | None, str | None],
    run: Callable[[Callable[[], list[Any]]], list[Any]],
    on_event: Emit,
    profile: Any = None,
) -> Iterator[SparkEnvironment | None]:
    """Send the environment of a job to the hosts that lack it; None if the job has none.

    Hosts can get it until the block ends.

    Parameters
    ----------
    addresses
        Address on which the driver listens, and the one at which executors reach it; None: unknown,
        or the same.
    run
        Returns the value of a call that runs a Spark job.
    on_event
        Receives notes about the progress.
    profile
        Resources of the workers' tasks.

    Raises
    ------
    InputError
        The environment cannot run this job's workers.
    ClusterError
        A host cannot run it, or has too little disk.
    """

    def say(text: str) -> None:
        on_event(Note(text))

    packed = pack_for(job, say)
    if packed is None:
        yield None
        return
    shipped, file = shipped_to(session), FILE.format(packed.name)
    with ExitStack() as stack:
        environment = None if file in shipped else _serve(stack, packed, *addresses)
        if environment is not None and packed.name not in shipped:
            say(f"sending the Python environment ({show_bytes(packed.size)}) to the hosts")
            with driver_python(session):
                plan = _plan(session, environment, job.workers, profile)
                obstacle = _find_obstacle(run(plan.collect))
            if obstacle:
                say(f"{obstacle}: Spark sends the environment to each executor")
                environment = None
            else:
                shipped.add(packed.name)
        if environment is not None:
            yield environment
            return
    with SHIPPING:
        if file not in shipped:
            say(f"sending the Python environment ({show_bytes(packed.size)}) through Spark")
            request = "to take the Python environment"
            send_file(session, request, packed.size, partial(_place, packed))
            shipped.add(file)
    yield SparkEnvironment(packed)


def _serve(
    stack: ExitStack, packed: PackedEnvironment, host: str | None, announced: str | None
) -> SparkEnvironment | None:
    """Return an environment that this process sends; None if it cannot listen for the hosts."""
    if host is None:
        return None
    try:
        server = stack.enter_context(ArchiveServer(packed, host, announced))
    except ClusterError:  # the driver's address belongs to another machine
        return None
    return SparkEnvironment(packed, server.archive)


def _plan(session: Any, environment: SparkEnvironment, workers: int, profile: Any) -> Any:
    """Return a DataFrame whose tasks unpack the environment, where the workers will run."""
    options = {"profile": profile} if profile else {}

    def make() -> Any:
        tasks = session.range(0, workers, 1, workers)
        return tasks.mapInArrow(environment, ENVIRONMENT_SCHEMA, barrier=True, **options)

    return ask(session, "a plan", make)


def _find_obstacle(rows: Sequence[Any]) -> str | None:
    """Return why an executor could not connect to the driver; raise any other problem."""
    for row in rows:
        if not row["is_unreached"]:
            raise ClusterError(row["problem"])
    return rows[0]["problem"] if rows else None


def _place(packed: PackedEnvironment, folder: Path) -> str:
    """Link or copy the file into a folder, under the name that tells its content."""
    path = folder / FILE.format(packed.name)
    # The file of a call that was interrupted made the next one fail
    # (test_a_file_is_placed_again_after_a_call_that_was_interrupted).
    path.unlink(missing_ok=True)
    try:
        os.link(packed.path, path)
    except OSError:  # on another disk
        shutil.copyfile(packed.path, path)
    return str(path)


# Folders that Spark removes with the application, in Spark's own order: those of a standalone
# cluster and of YARN are shared by the executors of a host, the last is the executor's.
_FOLDERS = (("SPARK_EXECUTOR_DIRS", os.pathsep), ("LOCAL_DIRS", ","), ("SPARK_LOCAL_DIRS", ","))


ENVIRONMENT_SCHEMA = "problem string, is_unreached boolean"
# Spark unpacks files whose names end like that of a tar file, on each executor.
FILE = "{}.gz"


@dataclass(frozen=True)
class SparkEnvironment:
    """A packed environment for the executors.

    ``served`` is where the driver sends it from; None: every executor gets the file from Spark,
    with its first task.
    """

    packed: PackedEnvironment
    served: ServedArchive | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Unpack it in a Spark task; yield a row of `ENVIRONMENT_SCHEMA` if that fails."""
        import pyarrow as pa

        for _ in batches:  # else Spark ends this Python process, and starts another
            pass
        try:
            self.install()
        except ClusterError as error:
            columns = [pa.array([str(error)]), pa.array([isinstance(error, UnreachedError)])]
            yield pa.RecordBatch.from_arrays(columns, names=["problem", "is_unreached"])

    def install(self) -> Interpreter:
        """Unpack it on this host, unless another executor or an earlier call has done that.

        If the process that unpacks it is killed, the next one that waits takes over.

        Raises
        ------
        ClusterError
            It cannot run here, the disk is full, or the driver cannot be reached
            (`UnreachedError`).
        """
        root = _find_folder()
        # A lock of the system, as it ends with its process, unlike a file that exists
        # (test_another_executor_takes_over_from_one_that_is_killed).
        with open(os.path.join(root, f".{self.packed.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = install_here(self.packed, self._read(), root)
            if self.served is None:
                self._remove()
        return replace(found, paths=_list_paths())

    def _read(self) -> Iterable[bytes]:
        return read_blocks(self._find_file()) if self.served is None else self.served.read()

    def _find_file(self) -> str:
        from pyspark import SparkFiles

        return str(SparkFiles.get(FILE.format(self.packed.name)))

    def _remove(self) -> None:
        """Remove this executor's copy; the driver's own is needed by executors that start later."""
        archive, own = self._find_file(), self.packed.path
        with suppress(OSError):
            if not os.path.exists(own) or not os.path.samefile(own, archive):
                os.unlink(archive)


def _find_folder() -> str:
    for name, separator in _FOLDERS:
        for folder in os.environ.get(name, "").split(separator):
            if os.path.isdir(folder) and os.access(folder, os.W_OK):
                return folder
    from pyspark import SparkFiles

    return str(SparkFiles.getRootDirectory())


def _list_paths() -> tuple[str, ...]:
    """Return the paths of this package and of the modules that were added to the session."""
    from pyspark import SparkFiles

    own = os.path.abspath(Path(pybackend.__file__).parents[1])
    root = os.path.abspath(SparkFiles.getRootDirectory())
    found = [os.path.abspath(path or ".") for path in sys.path]
    added = [path for path in found if os.path.commonpath([root, path]) == root]
    return tuple(dict.fromkeys([own, *added]))
