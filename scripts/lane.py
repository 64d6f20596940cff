"""One lane of checks: a command with a budget of seconds, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "lanes"
# The variable by which the processes of a lane are found, those of new sessions too.
MARK = "TFDIST_TEST_LANE"
# JVMs that live for seconds, as `spark-conf` has them, and Python that keeps what it has compiled.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUICK = {
    "SPARK_CONF_DIR": str(ROOT / "scripts" / "spark-conf"),
    "SPARK_LAUNCHER_OPTS": _JVM,
    "SPARK_DAEMON_JAVA_OPTS": _JVM,
    "PYTHONDONTWRITEBYTECODE": "",
}


@dataclass(frozen=True)
class Lane:
    """A command, the seconds it may take, the lane whose product it needs, and what it takes.

    One that ``waits`` mostly waits: for other hosts, for what does not answer, for limits to pass.
    """

    name: str
    command: tuple[str, ...]
    budget: float
    after: str | None = None
    waits: bool = False

    @property
    def log(self) -> Path:
        """What it printed."""
        return BUILD / f"{self.name}.log"

    @property
    def report(self) -> Path:
        """Pytest's report, if it runs pytest."""
        return BUILD / f"{self.name}.xml"


@dataclass(frozen=True)
class Ended:
    """How a lane ended; ``problem`` is empty if all is well. It may be late.

    ``unstable`` are the tests that failed beside other lanes, and passed when run again alone.
    """

    lane: Lane
    seconds: float
    problem: str
    is_late: bool = False
    unstable: tuple[str, ...] = ()


def run_lane(lane: Lane, factor: float, folder: Path) -> Ended:
    """Run one lane and judge it.

    ``folder`` is its own for temporary files: so it sees only what it has left behind itself.
    """
    lane.report.unlink(missing_ok=True)
    limit = 2 * factor * lane.budget
    began = time.monotonic()
    with lane.log.open("wb") as output:
        process = subprocess.Popen(
            lane.command,
            cwd=ROOT,
            env={**os.environ, **_QUICK, "TMPDIR": str(folder), MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=limit)
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"ended after {limit:.0f} s"
            print_stacks(folder)
        end_all(folder)
        process.wait()
    seconds = time.monotonic() - began
    return Ended(lane, seconds, problem, seconds > factor * lane.budget)


def print_stacks(folder: Path) -> None:
    """Have the processes of a lane that hangs say where: pytest on SIGABRT, Java on SIGQUIT."""
    for pid, command in processes_of(folder):
        send(pid, signal.SIGQUIT if b"java" in command else signal.SIGABRT)
    deadline = time.monotonic() + 5
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def end_all(folder: Path) -> None:
    """End whatever the lanes whose folders are in this one have started and left."""
    while left := processes_of(folder):
        for pid, _ in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(folder: Path) -> list[tuple[int, bytes]]:
    """Process ids and commands."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            if command and mark in (entry / "environ").read_bytes():
                found.append((int(entry.name), command))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
