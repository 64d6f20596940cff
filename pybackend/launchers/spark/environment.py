"""The environment of a job's workers on Spark: packed once, and sent once to each host.

The driver sends it to one executor of each host, over tfdist's own connections. Spark sends files
to every executor, even of the same host, and so only if executors cannot connect to the driver.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.resources import show_bytes
from pybackend.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.launchers.environment.installing import read_blocks
from pybackend.launchers.spark.environment_task import (
    BLOCK_SECONDS,
    FILE,
    PURPOSE,
    SCHEMA,
    ServedArchive,
    SparkEnvironment,
)
from pybackend.launchers.spark.python import SHIPPING, driver_python, shipped_to
from pybackend.launchers.spark.session import ask, is_connect
from pybackend.net.rendezvous import Acceptor, address_of, listen, new_token
from pybackend.net.stream import Stream


@contextmanager
def sent_environment(
    session: Any,
    job: Job,
    addresses: tuple[str | None, str | None],
    collect: Callable[[Any], Sequence[Any]],
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
    collect
        Runs a DataFrame's job and returns its rows.
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
                obstacle = _find_obstacle(collect(plan))
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
            _send(session, packed)
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
        return tasks.mapInArrow(environment, SCHEMA, barrier=True, **options)

    return ask(session, "a plan", make)


def _find_obstacle(rows: Sequence[Any]) -> str | None:
    """Return why an executor could not connect to the driver; raise any other problem."""
    for row in rows:
        if not row["is_unreached"]:
            raise ClusterError(row["problem"])
    return rows[0]["problem"] if rows else None


def _send(session: Any, packed: PackedEnvironment) -> None:
    request = "to take the Python environment"
    if is_connect(session):
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = _place(packed, Path(folder))
            ask(session, request, lambda: session.addArtifacts(path, file=True), packed.size)
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives, from the folder that Spark removes
    # with the context.
    root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
    path = _place(packed, Path(root))
    ask(session, request, lambda: session.sparkContext.addFile(path), packed.size)


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


class ArchiveServer:
    """Server of a packed environment, for those who know its token; a context manager.

    Parameters
    ----------
    packed
        The environment.
    host, announced
        As in `MeetingServer`.

    Attributes
    ----------
    archive
        For the hosts.

    Raises
    ------
    ClusterError
        ``host`` is not an address of this machine.
    """

    def __init__(self, packed: PackedEnvironment, host: str, announced: str | None) -> None:
        server, token = listen(host), new_token()
        self.archive = ServedArchive(address_of(server, announced), token, packed.size)
        self._path = packed.path
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._is_closed = False
        self._acceptor = Acceptor(server, token, PURPOSE, self._welcome)

    def __enter__(self) -> ArchiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        with self._lock:
            is_closed = self._is_closed
            self._streams.add(stream)
        if is_closed:
            stream.close()
        # Not on the thread of the greeting: their number is limited.
        threading.Thread(target=self._send, args=(stream,), daemon=True).start()

    def _send(self, stream: Stream) -> None:
        with suppress(OSError):
            for block in read_blocks(self._path):
                stream.send_all(block, BLOCK_SECONDS)
        stream.close()
        with self._lock:
            self._streams.discard(stream)
