"""The errors: their classes and texts, and transfers between processes."""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any

import pytest

from pybackend import barrier_run
from pybackend.core import errors
from pybackend.core.api.calls import hide_frames
from pybackend.core.api.job_record import describe_error, restore_error
from pybackend.core.errors import (
    ClusterError,
    Failure,
    InputError,
    Moment,
    PeerLostError,
    SerializationError,
    TfdistError,
    WorkerFailedError,
)
from pybackend.core.words import show_time
from pybackend.types import WorkerContext

ROOT = Failure(
    2,
    "node-c",
    "ValueError",
    "bad batch",
    traceback="Traceback ...\nValueError: bad batch\n",
    log=("reading", "crashing"),
    time=10.0,
    advice="mend the data",
)
OTHERS = [
    Failure(0, "node-a", "PeerLostError", "lost worker 2\nand more", time=11.0),
    Failure(1, "node-b", "Stopped", "", time=12.0),
]


@pytest.mark.parametrize(
    "kind", [InputError, ClusterError, WorkerFailedError, PeerLostError, SerializationError]
)
def test_every_error_is_a_tfdist_error(kind: type[Exception]) -> None:
    assert issubclass(kind, TfdistError)
    assert f" {kind.__name__}" in (errors.__doc__ or "")


def test_the_tree_in_the_docstring_names_every_error() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert {name for name in defined if name not in (errors.__doc__ or "")} == set()


def test_wrong_input_is_a_value_error_too() -> None:
    with pytest.raises(ValueError):
        raise InputError("`workers` must be at least 1")


def test_a_lost_peer_is_named() -> None:
    error = PeerLostError(3, "10.0.0.4", "closed the connection")
    assert (error.rank, error.host, error.reason) == (3, "10.0.0.4", "closed the connection")
    assert str(error).startswith("lost worker 3 on 10.0.0.4: it closed the connection.")


def test_a_failed_worker_is_told_with_cause_traceback_log_and_consequences() -> None:
    error = WorkerFailedError([ROOT, *OTHERS])
    assert str(error).splitlines() == [
        "worker 2 on node-c failed: ValueError: bad batch",
        "",
        "Traceback of worker 2:",
        "Traceback ...",
        "ValueError: bad batch",
        "",
        "Last lines printed by worker 2:",
        "  reading",
        "  crashing",
        "",
        "Other workers:",
        "  worker 0 on node-a: PeerLostError: lost worker 2",
        "  worker 1 on node-b: Stopped",
        "",
        "What to do: mend the data",
    ]
    assert (error.rank, error.host, error.exception_type) == (2, "node-c", "ValueError")
    assert error.worker_traceback == ROOT.traceback
    assert error.log == ["reading", "crashing"]
    assert error.others == OTHERS


def test_a_failure_has_the_timeline_of_its_worker() -> None:
    lost = Failure(1, "b", "ProcessDied", "the process was killed by SIGKILL", advice="see")
    timeline = [Moment(9.0, "started", "PID 7", 0, "a"), Moment(5.0, "started", "PID 8", 1, "b")]
    timeline.append(Moment(65.0, "ended", "killed by SIGKILL\x1b[0m" + 500 * "x", 1, "b"))
    error = WorkerFailedError([lost], timeline=timeline).advise("again")
    shown = [f"  {show_time(5.0)}  started (PID 8)"]
    shown.append(f"  {show_time(65.0)}  ended (killed by SIGKILL{183 * 'x'})")
    assert str(error).splitlines()[1:] == [
        "",
        "Timeline of worker 1:",
        *shown,
        "",
        "What to do: see. again",
    ]
    for again in (pickle.loads(pickle.dumps(error)), restore_error(describe_error(error))):  # noqa: S301
        assert again.timeline == timeline
        assert str(again) == str(error)


def test_a_message_has_the_latest_moments_of_a_worker_that_was_restarted_often() -> None:
    timeline = [Moment(float(number), "started", f"PID {number}") for number in range(50)]
    error = WorkerFailedError([Failure(0, "h", "ProcessDied", "killed")], timeline=timeline)
    shown = [line for line in str(error).splitlines() if line.endswith(")")]
    assert len(shown) == 20
    assert shown[0] == f"  {show_time(30.0)}  started (PID 30)"
    assert error.timeline == timeline


@pytest.mark.parametrize(
    ("kind", "is_loss"),
    [("ProcessDied", True), ("Disrupted", True), ("Deleted", False), ("ProcessLost", False)],
)
def test_what_was_lost_may_be_started_again(kind: str, is_loss: bool) -> None:
    failures = [Failure(0, "h", kind, ""), Failure(1, "h", "PeerLostError", "")]
    assert WorkerFailedError(failures).is_loss(is_kept=False) is is_loss


def test_a_lone_failure_is_one_line() -> None:
    error = WorkerFailedError([Failure(0, "h", "ProcessDied", "ended by SIGKILL")])
    assert str(error) == "worker 0 on h failed: ProcessDied: ended by SIGKILL"
    assert error.others == []


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError(1, "h", "was silent for 3 s"),
        WorkerFailedError([ROOT, *OTHERS]),
        InputError("`epochs` must be at least 1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled_and_copied(error: TfdistError) -> None:
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
    for again in (pickled, copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert getattr(again, "rank", None) == getattr(error, "rank", None)
        assert getattr(again, "others", None) == getattr(error, "others", None)


def test_text_reaches_a_terminal_without_control_characters() -> None:
    odd = "a\tred \x1b[1;31mword\x1b[0m\r\nbell \x07 half \udce9 nul \0"
    shown = "a\tred word\\r\nbell \\x07 half \\udce9 nul \\x00"
    assert str(InputError(odd)) == shown
    failure = Failure(0, "h", "ValueError", odd, traceback=odd, log=(odd,))
    assert (failure.message, failure.traceback, failure.log) == (shown, shown, (shown,))
    str(WorkerFailedError([failure])).encode()


def fail_without_text(context: WorkerContext) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    print("\r1/2 \x1b[32mgreen\x1b[0m\b\b\r2/2 done")
    raise Mute


def test_an_exception_without_text_arrives_with_its_traceback() -> None:
    with pytest.raises(WorkerFailedError, match=r"Mute: .no text: .*Runtime") as caught:
        barrier_run("local", fail_without_text, workers=1, verbose=0)
    assert caught.value.exception_type == "Mute"
    assert "in fail_without_text" in caught.value.worker_traceback
    assert caught.value.log == ["2/2 done"]
    assert len(traceback.extract_tb(caught.tb)) == 2  # this line, and that which raises


def test_frames_of_the_callers_own_code_and_contexts_stay() -> None:
    @hide_frames
    def call(fn: Any) -> None:
        fn()

    def observe() -> None:
        try:
            {}["missing"]
        except KeyError:
            raise ClusterError("cannot connect") from None

    with pytest.raises(ClusterError) as caught:
        call(observe)
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[-2:] == ["call", "observe"]
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__suppress_context__
