"""The environment of a job's workers on Spark: packed once, and sent once to each host.

The driver sends it to one executor of each host, over tfdist's own connections. Spark sends files
to every executor, even of the same host, and so only if executors cannot connect to the driver.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.resources import show_bytes
from pybackend.launchers.environment.archive import PackedEnvironment
from pybackend.launchers.environment.packing import pack_for
from pybackend.launchers.environment.serving import ArchiveServer
from pybackend.launchers.spark.environment_task import FILE, SCHEMA, SparkEnvironment
from pybackend.launchers.spark.python import SHIPPING, driver_python, shipped_to
from pybackend.launchers.spark.session import ask, is_connect


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
