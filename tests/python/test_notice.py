"""SIGTERM: a preemption notice if a training handles it, otherwise the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from pybackend.core.errors import Failure
from pybackend.core.job.notice import PREEMPTED, Notice, at_own_end

# Sends itself signals, and prints how far it gets.
PROGRAM = """
import os, signal
from pybackend.core.job import notice as module
from pybackend.core.job.notice import Notice
def tell():
    os.kill(os.getpid(), signal.SIGTERM)
notice = Notice()
"""


def run(program: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=False
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def test_it_is_a_notice_as_long_as_it_is_expected() -> None:
    program = (
        "with notice.expected(True):\n    tell()\n    print(notice(), flush=True)\n"
        "tell()\nprint('on')"
    )
    assert run(program) == (-signal.SIGTERM, "True\n")


def test_nobody_expects_it_by_default() -> None:
    program = "with notice.expected(False):\n    tell()\n    print('on')"
    assert run(program) == (-signal.SIGTERM, "")


def test_the_same_signal_twice_is_one_and_a_second_one_ends_the_process() -> None:
    program = (
        "module._SAME_SECONDS = 3600\n"
        "with notice.expected(True):\n"
        "    tell(); tell(); print('told', flush=True)\n"
        "    module._SAME_SECONDS = 0; tell(); print('on')"
    )
    assert run(program) == (-signal.SIGTERM, "told\n")


def test_a_worker_takes_any_number_to_its_end() -> None:
    assert run("notice.expect()\ntell()\ntell()\nprint(notice())") == (0, "True\n")


def test_what_came_too_late_to_matter_ends_the_process() -> None:
    program = "with notice.expected(True):\n    tell()\nprint(1, flush=True)\nnotice.pass_on()"
    assert run(program) == (-signal.SIGTERM, "1\n")


def test_a_handler_of_the_users_stays() -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    try:
        notice = Notice()
        with notice.expected(True):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (notice(), taken) == (False, [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_thread_leaves_signals_alone() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(Notice().expect()))
    thread.start()
    thread.join()
    assert found == [False]


def test_the_process_that_was_told_itself_does_not_start_again() -> None:
    notice = Notice()
    failure = Failure(0, "h", "Preempted", f"{PREEMPTED}; all workers left")
    assert at_own_end(failure, notice) is failure
    notice.take(signal.SIGTERM, None)
    found = at_own_end(failure, notice)
    assert found.exception_type == "Terminated"
    assert found.message.startswith(f"this process ({os.getpid()}) received SIGTERM")
    other = Failure(0, "h", "ValueError", "")
    assert at_own_end(other, notice) is other
