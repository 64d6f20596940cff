"""The lines that users see while a training runs."""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from rich.console import Console

import pybackend
from pybackend.core.api import request
from pybackend.core.api.display import (
    Display,
    Live,
    Speed,
    choose_lines,
    describe_start,
    epoch_line,
    printer,
    relayed_to,
)
from pybackend.core.api.observer import Observers
from pybackend.core.api.request import following
from pybackend.core.errors import Moment
from pybackend.core.job.codec import encode
from pybackend.core.job.job import Job, PredictionJob, TrainingJob
from pybackend.core.job.messages import (
    EpochEnded,
    Event,
    Note,
    Phase,
    Phases,
    PrintedLine,
    Reported,
    StepEnded,
    Waits,
    read_event,
    sent_by,
)
from pybackend.core.launchers import Outcome
from pybackend.core.launchers.local import LocalLauncher
from pybackend.core.words import show_seconds

EPOCH = EpochEnded(1, 3, 4.06, {"loss": 0.29123, "accuracy": 0.9145, "f1": [0.5, 0.25]})
LINE = PrintedLine("hello", rank=1)


def test_an_epoch_is_one_line() -> None:
    assert epoch_line(EPOCH) == "epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)"
    odd = replace(EPOCH, logs={"loss": 2.3141e-5, "mse": 12345678.9, "zero": 0.0, "lost": math.nan})
    assert epoch_line(odd).endswith("loss 2.314e-05  mse 1.235e+07  zero 0.0000  lost nan  (4.1 s)")


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [(0, []), (1, [epoch_line(EPOCH)]), (2, [epoch_line(EPOCH), "[1] hello"])],
)
def test_what_each_level_shows(verbose: int, shown: list[str], capsys: Any) -> None:
    show = printer(verbose)
    for event in (EPOCH, replace(EPOCH, rank=1), LINE, Reported()):
        show(event)
    assert capsys.readouterr().out.splitlines() == shown


def test_a_loss_that_is_no_number_is_named_once(capsys: Any) -> None:
    show = printer(1)
    for epoch in range(3):
        show(replace(EPOCH, epoch=epoch, logs={"loss": math.nan if epoch else 0.5}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("note: the loss became NaN or infinite") for line in lines] == [
        False,
        False,
        True,
        False,
    ]


def test_of_workers_in_a_chain_the_one_for_whom_all_wait_is_named_once(capsys: Any) -> None:
    show = printer(1)
    chain = [Waits(peer, 60.0, False, rank=rank) for rank, peer in ((3, 0), (2, 1), (0, 2))]
    for event in chain + [replace(event, seconds=62.0, is_second=True) for event in chain]:
        show(event)
    (line,) = capsys.readouterr().out.splitlines()
    assert "waiting for worker 1 for 62 s" in line


IMPORTING = Phase("importing TensorFlow")
LASTING = replace(IMPORTING, lasts=True)


@pytest.mark.parametrize(("verbose", "shown"), [(0, ""), (1, "importing TensorFlow ...\n")])
def test_lines_name_the_phases_of_a_start_that_last(verbose: int, shown: str, capsys: Any) -> None:
    show = printer(verbose)
    for event in (IMPORTING, LASTING, replace(LASTING, rank=1)):
        show(event)
    assert capsys.readouterr().out == shown


def test_a_phase_that_lasts_is_sent_again_until_the_next_begins() -> None:
    sent: list[Event] = []
    has_repeated = threading.Event()

    def emit(event: Event) -> None:
        sent.append(event)
        if event == replace(second, lasts=True):
            has_repeated.set()

    first, second = Phase("loading the model"), Phase("taking the first step")
    phases = Phases(emit, (0.05, 60.0))
    phases(first)
    phases(second)
    assert has_repeated.wait(10)
    assert sent == [first, second, replace(second, lasts=True)]


def test_a_phase_that_lasts_for_long_is_sent_at_growing_intervals() -> None:
    sent: list[Any] = []
    has_lasted = threading.Event()

    def emit(event: Any) -> None:
        sent.append(event)
        if len(sent) == 5:
            phases(Reported())
            has_lasted.set()

    phases = Phases(emit, (0.01, 0.02, 0.04))
    phases._lock = threading.RLock()  # `emit` calls it
    phases(IMPORTING)
    assert has_lasted.wait(10)
    names = [event.name for event in sent[1:5]]
    assert names == [IMPORTING.name, *[f"{IMPORTING.name} (for 0 s)"] * 3]


def timers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if isinstance(one, threading.Timer)}


@pytest.mark.parametrize("event", [EPOCH, Reported()])
def test_a_phase_that_has_ended_does_not_last(event: Event) -> None:
    sent: list[Event] = []
    before = timers()
    phases = Phases(sent.append, (0.02, 60.0))
    phases(IMPORTING)
    phases(event)
    wait_for(lambda: timers() <= before)
    assert sent == [IMPORTING, event]


STEP = StepEnded(1, 3, 5, 20, 160, 0.5, {"loss": 0.75})


def test_a_step_travels_as_other_events_do() -> None:
    assert sent_by(read_event(encode(STEP)), 2, "a") == replace(STEP, rank=2, host="a")
    assert sent_by(Reported(), 2, "a") == Reported(rank=2)


def test_steps_are_reported_only_if_somebody_wants_them(caplog: Any) -> None:
    def reports(verbose: int, kind: type[Job] = TrainingJob) -> bool:
        job = kind(workers=2, verbose=verbose)
        with following(LocalLauncher(), job, Observers()) as (own, _):
            return own.reports_steps

    assert not reports(0)
    assert reports(1)  # for lines within a long epoch
    with caplog.at_level(logging.DEBUG, "tfdist"):
        assert reports(0)
        assert not reports(0, PredictionJob)
    with relayed_to(lambda kind, fields: False):
        assert reports(1)
        assert not reports(0)


def test_a_silent_training_is_logged_with_rank_and_host(caplog: Any, capsys: Any) -> None:
    job = TrainingJob(workers=2, verbose=0)
    with (
        caplog.at_level(logging.DEBUG, "tfdist"),
        following(LocalLauncher(), job, Observers()) as (_, on_event),
    ):
        for event in (STEP, EPOCH, Note("careful"), replace(LINE)):
            on_event(replace(event, host="node1"))
    assert capsys.readouterr() == ("", "")
    records = [record for record in caplog.records if record.name == "tfdist"]
    texts = [record.getMessage() for record in records]
    assert texts[0].startswith("Starting 2 workers")
    assert texts[1:] == [
        "worker 0 on node1: epoch 1, step 5/20  loss 0.7500",
        f"worker 0 on node1: {epoch_line(EPOCH)}",
        "worker 0 on node1: careful",
        "worker 1 on node1: hello",
    ]
    levels = [record.levelname for record in records]
    assert levels == ["INFO", "DEBUG", "INFO", "INFO", "DEBUG"]
    assert [(record.rank, record.host) for record in records[1:]] == [(0, "node1")] * 3 + [
        (1, "node1")
    ]
    assert records[2].logs["loss"] == EPOCH.logs["loss"]
    assert not logging.getLogger("tfdist").handlers


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_lines_of_workers_are_logged_by_a_silent_call(level: int, caplog: Any, capsys: Any) -> None:
    with caplog.at_level(level, "tfdist"):
        pybackend.barrier_run("local", lambda context: print("hello"), workers=1, verbose=0)
    lines = [record.getMessage() for record in caplog.records if record.name == "tfdist"]
    assert any(line.endswith(": hello") for line in lines) == (level == logging.DEBUG)
    assert capsys.readouterr().out == ""


def test_a_session_of_r_is_told_and_nothing_is_printed(capsys: Any) -> None:
    told: list[Any] = []

    def tell(kind: str, fields: Any) -> bool:
        told.append((kind, fields.get("text") or fields.get("step") or fields.get("name")))
        return True

    job = TrainingJob(workers=2)
    with (
        relayed_to(tell),
        following(LocalLauncher(), job, Observers()) as (_, on_event),
    ):
        for event in (IMPORTING, STEP, Note("careful"), EPOCH, LINE):
            on_event(event)
    assert [kind for kind, _ in told][:2] == ["is_live", "begin"]
    assert told[2:] == [
        ("phase", "starting"),
        ("phase", "importing TensorFlow"),
        ("step", 5),
        ("line", "note: careful"),
        ("epoch", epoch_line(EPOCH)),
        ("end", None),
    ]
    assert capsys.readouterr() == ("", "")
    # A session without a bar shows few steps, as lines.
    told.clear()
    with (
        relayed_to(lambda kind, fields: told.append((kind, fields.get("text")))),
        following(LocalLauncher(), job, Observers()) as (_, on_event),
    ):
        on_event(STEP)
        on_event(replace(STEP, step=15, seconds=10.5))
    assert told[2:] == [("line", "epoch 1: step 15 of 20, 1 steps/s, 5 s left"), ("end", None)]


def test_a_search_shows_a_line_and_tells_r_how_many_trials_have_ended(capsys: Any) -> None:
    told: list[Any] = []
    with relayed_to(lambda kind, fields: told.append((kind, fields))):
        choose_lines(1).trials("trial 1", 1, 4)
        choose_lines(0).trials("trial 2", 2, 4)
    assert told == [("trials", {"text": "trial 1", "done": 1, "total": 4})]
    choose_lines(1).trials("trial 3", 3, 4)
    assert capsys.readouterr().out == "trial 3\n"


def test_a_bar_shows_step_loss_speed_and_time_left_below_the_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    live = Live(False, console)
    with live:
        live.begin("Starting 2 workers ...", TrainingJob(workers=2))
        live.phase(IMPORTING)
        live.step(STEP)
        live.step(replace(STEP, step=10, rows=320, seconds=1.0))
        live.line("note: [brackets] stay")
        live.epoch(EPOCH, epoch_line(EPOCH))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "2 workers  importing TensorFlow" in shown
    assert "importing TensorFlow ..." not in shown
    assert "2 workers  epoch 1/3" in shown
    assert re.search(r"step 10/20  loss 0\.7500  320 rows/s  ETA 5 s", shown)
    assert shown.index("note: [brackets] stay") < shown.index("epoch 1/3  loss 0.2912")
    assert "note: [brackets] stay\n" in shown.replace("\r", "")


def test_a_time_left_is_that_of_all_epochs() -> None:
    speed = Speed()
    assert speed.describe(STEP) == []
    speed.note(STEP)
    later = replace(STEP, step=15, rows=480, seconds=1.5)
    speed.note(later)
    assert speed.describe(later) == ["320 rows/s", "ETA 4 s"]


def test_a_log_shows_steps_of_a_long_epoch_at_growing_intervals(capsys: Any) -> None:
    def train(epoch: int, seconds: int) -> list[str]:
        for second in range(1, seconds + 1):
            # 54 steps a second, after a first step of 2 s
            step = 1 + max(0, 54 * (second - 2))
            show(replace(STEP, epoch=epoch, step=step, steps=40000, seconds=float(second)))
        show(replace(EPOCH, epoch=epoch))
        return capsys.readouterr().out.splitlines()[:-1]

    show = printer(1)
    assert train(1, 730) == [
        "epoch 1: step 433 of 40000, 48 steps/s, 14 min left",
        "epoch 1: step 3673 of 40000, 54 steps/s, 11 min left",
        "epoch 1: step 19873 of 40000, 54 steps/s, 6 min left",
        "epoch 1: step 36073 of 40000, 54 steps/s, 73 s left",
    ]
    assert train(2, 299) == []
    assert train(3, 301) == ["epoch 3: step 16093 of 40000, 54 steps/s, 7 min left"]


def test_the_processes_that_start_are_named() -> None:
    roles = (("chief", 1), ("worker", 2), ("ps", 1))
    assert describe_start(None, TrainingJob(4, roles=roles)) == (
        "Starting 2 workers, a chief and 1 parameter server ..."
    )
    assert describe_start(None, TrainingJob(4)) == "Starting 4 workers ..."


def test_a_step_that_takes_long_has_no_speed(capsys: Any) -> None:
    printer(1)(replace(STEP, step=1, seconds=15.0))
    assert capsys.readouterr().out == "epoch 1: step 1 of 20\n"


def test_durations_of_all_lengths() -> None:
    shown = [
        show_seconds(seconds, is_estimate=True)
        for seconds in (4.4, 99.4, 99.6, 705, 5989, 6000, 7500)
    ]
    assert shown == ["4 s", "99 s", "2 min", "12 min", "1 h 40 min", "1 h 40 min", "2 h 5 min"]


def test_on_a_terminal_a_training_ends_with_its_lines_alone() -> None:
    program = """if True:
        from pybackend.core.api.observer import Observers
        from pybackend.core.api.request import following
        from pybackend.core.job.job import TrainingJob
        from pybackend.core.job.messages import EpochEnded, StepEnded
        from pybackend.core.launchers.local import LocalLauncher
        with following(LocalLauncher(), TrainingJob(workers=2), Observers()) as (job, on_event):
            assert job.reports_steps
            on_event(StepEnded(1, 1, 5, 20, 160, 0.5, {"loss": 0.75}))
            print("printed by a script")
            on_event(EpochEnded(1, 1, 4.0, {"loss": 0.5}))
        """
    parent, child = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=child, env=variables) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                if not (part := os.read(parent, 65536)):
                    break
            except OSError:  # Linux's error if the other end is closed
                break
            shown += part
    os.close(parent)
    assert process.returncode == 0
    text = shown.decode()
    # The code that erases the bar comes last: nothing of it remains.
    assert "step 5/20" in text
    assert text.rstrip().endswith("\x1b[2K") or text.rindex("\x1b[2K") > text.rindex("━")
    assert text.index("printed by a script") < text.rindex("━")


def closed_pipe() -> Any:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def full_disk() -> Any:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


OUTPUTS = {"a full disk": full_disk, "a closed pipe": closed_pipe}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_that_nobody_reads_ends_no_training(name: str, monkeypatch: Any) -> None:
    stream = OUTPUTS[name]()
    monkeypatch.setattr(sys, "stdout", stream)
    Display(shows_printed=True).line("epoch 1")
    Display(shows_printed=True).printed("of a worker")
    with suppress(OSError):
        stream.close()


def test_a_terminal_of_ascii_shows_what_it_can(monkeypatch: Any) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    Display(shows_printed=True).line("loss of Zürich")
    assert written.getvalue() == b"loss of Z?rich\n"


PROGRAM = """
import numpy as np, pybackend
x = np.ones((8, 2), "float32")

def build():
    import keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

if __name__ == "__main__":
    result = pybackend.barrier_train("local", build, (x, x[:, :1]), workers=2)
    open("done", "w").write(str(result.epochs))
"""


@pytest.mark.full
def test_a_process_without_standard_streams_trains(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(pybackend.__file__).parents[1])
    command = f"exec {shlex.quote(sys.executable)} program.py <&- >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=False)
    assert (done.returncode, (tmp_path / "done").read_text()) == (0, "1")


def test_a_start_that_lasts_is_shown_until_a_worker_answers(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(request, "_STARTING_SECONDS", (0.02, 60.0))
    before = timers()
    job = TrainingJob(workers=2, verbose=1)
    with following(LocalLauncher(), job, Observers()) as (_, on_event):
        wait_for(lambda: "starting ..." in capsys.readouterr().out)
        on_event(Note("hello"))
    with following(LocalLauncher(), job, Observers()) as (_, on_event):
        on_event(Note("hello"))
    wait_for(lambda: timers() <= before)
    assert "starting ..." not in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "kept"), [(200, 200 * 12), (2, 1000)])
def test_a_timeline_has_all_workers_but_is_bounded(workers: int, kept: int) -> None:
    class Crowd(LocalLauncher):
        def launch(self, job: Job, files: Any, datasets: Any, on_event: Any) -> Outcome:
            for number in range(200 * 12):
                on_event(Moment(float(number), "started", rank=number % workers))
            return Outcome([])

    job = TrainingJob(workers)
    timeline = request.Timeline()
    outcome = timeline.launch(Crowd(), job, {}, {}, lambda event: None)
    assert len(outcome.timeline) == kept
    assert outcome.timeline[-1] == Moment(2399.0, "started", rank=workers - 1)
