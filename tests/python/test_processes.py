"""A stopped process is distinguished from a merely quiet one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import full

from pybackend.core.launchers.watches import StallWatch

PROGRAMS = {
    "asleep": "import time; time.sleep(60)",
    "busy": "while True: pass",
}


@pytest.fixture(params=["asleep", full("busy")])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAMS[request.param]]) as started:
        yield started
        started.kill()


def watch_for(watch: StallWatch, seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if reason := watch.look():
            return reason
        time.sleep(0.02)
    return None


def test_a_quiet_process_is_not_lost_but_a_stopped_one_is(process: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(process.pid, 0.4)
    assert watch_for(watch, 1.5) is None
    os.kill(process.pid, signal.SIGSTOP)
    assert watch_for(watch, 0.2) is None
    reason = watch_for(watch, 60)
    assert reason is not None
    assert "stopped" in reason


def test_a_process_that_goes_on_in_time_is_not_lost(process: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(process.pid, 1.0)
    for _ in range(4):
        os.kill(process.pid, signal.SIGSTOP)
        assert watch_for(watch, 0.4) is None
        os.kill(process.pid, signal.SIGCONT)
        assert watch_for(watch, 0.4) is None


def test_a_watcher_that_was_stopped_itself_counts_from_then_on(
    process: subprocess.Popen[bytes],
) -> None:
    watch = StallWatch(process.pid, 1.0)
    os.kill(process.pid, signal.SIGSTOP)
    assert watch_for(watch, 0.3) is None
    time.sleep(1.2)  # as when the whole machine is stopped
    assert watch.look() is None


def test_a_process_that_is_gone_is_not_stalled() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as started:
        started.wait()
    assert watch_for(StallWatch(started.pid, 0.1), 0.5) is None
