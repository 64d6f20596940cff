"""Search for leaks in long trainings, in many consecutive ones, and in failing ones.

Trainings in one session, here and on Spark; consecutive runs that fail; thousands of steps over a
link that delays 1 % of the packets, while one worker is stopped now and then; and trainings over a
link that loses packets and fails: each must end with the weights of an undisturbed one, or in an
error that names a worker. Links are between network namespaces, which needs root.

Growth is per training, or per 1000 steps; ``growing`` counts the values that grow beyond noise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growth import sample, slopes
from soak_worker import train

_FOLDER = Path(__file__).parent
sys.path.append(str(_FOLDER.parent / "tests" / "python"))
from namespaces import Network, network  # noqa: E402

_ADDRESSES = "10.215.0.1", "10.215.0.2"
_PORT = 40_123
_LOOK_SECONDS = 0.5
# Interval and length of the worker's pauses, in seconds; they are shorter than the timeout.
_PAUSE_EVERY, _PAUSE = 5.0, 0.5
# Seconds up and down. The last failure takes longer than the timeout, and ends a training.
_FLAPS = ("9,1", "15,3", "12,2", "20,30")
_TIMEOUT = 12.0
_ROUND_LIMIT = 300.0
_MARK = "TFDIST_SOAK"


@dataclass(frozen=True)
class Setting:
    """Number of trainings, failures and steps, and time limits."""

    trainings: int
    failures: int
    steps: int
    seconds: float
    steps_of_round: int


SHORT = Setting(trainings=10, failures=20, steps=1000, seconds=120, steps_of_round=1000)
LONG = Setting(trainings=50, failures=100, steps=10_000, seconds=1800, steps_of_round=3000)


def measure(is_long: bool) -> dict[str, Any]:
    """Return all tables."""
    return {title: part(LONG if is_long else SHORT) for title, part in PARTS.items()}


def grow_by_training(setting: Setting) -> dict[str, dict[str, float]]:
    """Measure the growth of this process, training after training."""
    found = {}
    with _temporary() as folder:
        found["driver, this machine"] = _repeat("local", setting.trainings, folder)
        with _spark(folder) as session:
            found["driver, Spark local-cluster"] = _repeat(session, setting.trainings, folder)
    return found


def _repeat(spark: Any, count: int, folder: Path) -> dict[str, float]:
    samples = []
    for _ in range(count):
        train(spark, 20)
        samples.append(sample(os.getpid(), folder))
    return slopes(samples, range(count))


def fail_in_a_row(setting: Setting) -> dict[str, dict[str, float]]:
    """Run failing trainings, with workers forked from a process that has imported TensorFlow."""
    from conftest import FORGE
    from failing import KINDS, SLOW, fail, nothing_left

    os.environ[_MARK] = mark = str(os.getpid())
    popen = subprocess.Popen
    kinds = list(KINDS)
    chosen = [kinds[number % len(kinds)] for number in range(setting.failures - len(SLOW))]
    seconds: list[float] = []
    with _temporary() as folder:
        FORGE.start()
        subprocess.Popen = FORGE.popen  # type: ignore[misc, assignment]
        try:
            fail("kill")
            with nothing_left(f"{_MARK}={mark}", folder):
                seconds += [fail(kind) for kind in [*SLOW, *chosen]]
        finally:
            subprocess.Popen = popen  # type: ignore[misc]
            FORGE.close()
    longest, middle = max(seconds), sorted(seconds)[len(seconds) // 2]
    return {
        "all named, nothing left": {"runs": len(seconds), "median_s": middle, "most_s": longest}
    }


def grow_by_step(setting: Setting) -> dict[str, dict[str, float]]:
    """Run a long training with late packets and stops; its result must be exact."""
    expected = train("local", setting.steps).workers[0]
    watched: dict[str, tuple[list[Any], list[float]]] = {}
    last = time.monotonic()

    def look(group: Generation) -> None:
        nonlocal last
        for name, pid in group.processes().items():
            with suppress(OSError):
                samples, times = watched.setdefault(name, ([], []))
                samples.append(sample(pid, group.folder))
                times.append(time.monotonic())
        if time.monotonic() > last + _PAUSE_EVERY and "worker 1" in group.processes():
            last = time.monotonic()
            _stop_for(group.processes()["worker 1"], _PAUSE)

    with _group_over(0.0, 0.01, ()) as start, start(setting.steps, 300.0) as group:
        began = time.monotonic()
        ended = group.wait(look, 30 * _ROUND_LIMIT)
        taken = time.monotonic() - began
    wanted = {"digest": expected.weights_sha256, "steps": expected.steps}
    assert ended == [wanted, wanted], ended
    # Steps are not counted while they run; all take about the same time.
    by_1000 = taken / setting.steps * 1000
    return {
        f"{name}, exact after {expected.steps} steps": slopes(
            samples[:-2], [at / by_1000 for at in times[:-2]]
        )
        for name, (samples, times) in sorted(watched.items())
    }


def end_by_name(setting: Setting) -> dict[str, dict[str, float]]:
    """Run trainings over a link that fails, and count how they ended."""
    expected = train("local", setting.steps_of_round).workers[0].weights_sha256
    exact = named = 0
    until = time.monotonic() + setting.seconds
    with _group_over(0.005, 0.01, _FLAPS) as start:
        while time.monotonic() < until:
            with start(setting.steps_of_round, _TIMEOUT) as group:
                ended = group.wait(lambda group: None, _ROUND_LIMIT)
            for one in ended:
                if "error" in one:
                    assert "worker" in one["message"], one
                    named += 1
                else:
                    assert one["digest"] == expected, one
                    exact += 1
    return {"ends": {"exact": exact, "in a named error": named, "otherwise": 0}}


PARTS: dict[str, Callable[[Setting], dict[str, dict[str, float]]]] = {
    "growth by training, in one session": grow_by_training,
    "runs that fail in a row": fail_in_a_row,
    "growth by 1000 steps, 1 % of packets late, worker 1 stopped now and then": grow_by_step,
    "trainings over a link that loses packets and fails": end_by_name,
}


class Generation:
    """Group of two processes that train together, each on its host."""

    def __init__(self, hosts: Network, folder: Path, steps: int, timeout: float) -> None:
        self.folder = folder
        addresses = ",".join(f"{address}:{_PORT}" for address in _ADDRESSES)
        variables = {
            "TFDIST_SECRET": os.urandom(16).hex(),
            "TF_NUM_INTRAOP_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TMPDIR": str(folder),
            "PYTHONPATH": f"{_FOLDER.parent}:{_FOLDER}",
        }
        program = str(_FOLDER / "soak_worker.py")
        self._started = [
            subprocess.Popen(
                [*host.enter, sys.executable, program, str(i), addresses, str(steps), str(timeout)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
            for i, host in enumerate(hosts.hosts)
        ]

    def processes(self) -> dict[str, int]:
        """Return the process ids of the drivers and their workers, by name."""
        found = {}
        for rank, started in enumerate(self._started):
            found[f"driver {rank}"] = started.pid
            with suppress(OSError, IndexError):
                children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
                found[f"worker {rank}"] = int(children.split()[0])
        return found

    def wait(self, look: Callable[[Generation], None], limit: float) -> list[dict[str, Any]]:
        """Wait for both processes, calling ``look`` meanwhile; return how each ended."""
        deadline = time.monotonic() + limit
        while any(started.poll() is None for started in self._started):
            assert time.monotonic() < deadline, f"it hangs: no end within {limit:g} s"
            look(self)
            time.sleep(_LOOK_SECONDS)
        ends = []
        for started in self._started:
            printed, errors = started.communicate()
            assert printed.startswith("{"), errors
            ends.append(json.loads(printed.splitlines()[-1]))
        return ends

    def close(self) -> None:
        """Stop running processes, and check that none remain."""
        for started in self._started:
            started.kill()
            started.communicate()
        deadline = time.monotonic() + 20
        while left := list(self.folder.iterdir()):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


@contextmanager
def _group_over(
    lost: float, late: float, flaps: Sequence[str]
) -> Iterator[Callable[[int, float], Any]]:
    """Create a link of this kind; yield a function that starts a `Group` over it."""
    with ExitStack() as stack:
        folder = stack.enter_context(_temporary())
        hosts = stack.enter_context(network(["a", "b"]))
        ends = [
            str(word)
            for host, address in zip(hosts.hosts, _ADDRESSES, strict=True)
            for word in (host.namespace, address)
        ]
        command = [sys.executable, str(_FOLDER / "soak_link.py"), *ends, str(lost), str(late)]
        link = subprocess.Popen([*command, *flaps], stdout=subprocess.PIPE, text=True)
        stack.callback(link.communicate)
        stack.callback(link.terminate)
        assert link.stdout is not None
        assert link.stdout.readline() == "up\n"

        @contextmanager
        def start(steps: int, timeout: float) -> Iterator[Generation]:
            group = Generation(hosts, folder, steps, timeout)
            try:
                yield group
            finally:
                group.close()

        yield start


def _stop_for(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


@contextmanager
def _temporary() -> Iterator[Path]:
    """Create a folder for all temporary files of this process and its children."""
    own = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            if own is not None:
                os.environ["TMPDIR"] = own


@contextmanager
def _spark(folder: Path) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    session = builder.config(
        map={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(folder),
            # Files of a shuffle remain until Java collects the frame, by default every 30 minutes.
            "spark.cleaner.periodicGC.interval": "1s",
        }
    ).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()


if __name__ == "__main__":
    wanted = sys.argv[2:] or PARTS
    for title, part in PARTS.items():
        if any(word in title for word in wanted):
            print(title)
            for name, figures in part(LONG if "long" in sys.argv[1:2] else SHORT).items():
                print(f"  {name}: {figures}", flush=True)
