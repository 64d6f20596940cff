"""The report of a training: in a browser, its page shows the values of the result."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chromium import first_pixel, read_page
from conftest import build_dense
from killing import KillAt

from pybackend import InputError, Recovery, WorkerFailedError, barrier_train, report
from pybackend.bridge import capture, report_record
from pybackend.core.api.markup import find_ticks
from pybackend.core.errors import Failure, Moment
from pybackend.core.words import show_number, show_seconds, show_time
from pybackend.types import TrainResult

HOSTILE = '</script><b>\u2028 & "bold" \''


@pytest.fixture(scope="module")
def result(rows: Any, tmp_path_factory: Any) -> TrainResult:
    """Record of a training that lost a worker in its second epoch, and continued."""
    folder = tmp_path_factory.mktemp("run")
    kill = KillAt(1, 1, 2, folder / "mark")
    return barrier_train(
        "local",
        build_dense,
        rows,
        workers=2,
        epochs=3,
        validation_split=0.2,
        callbacks=[kill],
        recovery=Recovery(str(folder / "kept"), restarts=1),
        seed=5,
        verbose=0,
    )


@pytest.fixture(scope="module")
def page(result: TrainResult, tmp_path_factory: Any) -> Path:
    return report(result, tmp_path_factory.mktemp("page") / "run.html")


def test_a_report_may_be_the_first_file_of_its_folder(result: TrainResult, tmp_path: Path) -> None:
    target = tmp_path / "new" / "run.html"
    assert report(result, target, title="T") == target
    assert "<title>T</title>" in target.read_text()


def test_restarts_are_kept(result: TrainResult) -> None:
    (restart,) = result.restarts
    assert "worker 1" in restart.lost
    assert "SIGKILL" in restart.lost
    assert restart.checkpoint == "epoch 1"
    assert result.to_dict()["restarts"][0]["lost"] == restart.lost


def test_a_result_has_the_timeline_of_all_runs(result: TrainResult) -> None:
    lost = [one for one in result.timeline if one.rank == 1]
    # The launcher orders it while it imports TensorFlow.
    early = {"importing TensorFlow", "waiting for the other workers", "joined"}
    states = [one.state for one in lost if one.state not in early]
    run = ["started", "reading the data", "connecting to the other workers", "loading the model"]
    run.append("taking the first step")
    assert states == [*run, "ended", "failed", *run, "reported"]
    assert [one.state in early for one in lost].count(True) == 2 * len(early)
    assert [one.reason for one in lost if one.state == "ended"] == ["killed by SIGKILL"]
    assert {one.host for one in lost} == {"127.0.0.1"}
    times = [one.time for one in lost]
    assert times == sorted(times)
    assert result.to_dict()["timeline"][0]["rank"] == 0


def test_the_parts_of_the_call_add_up(result: TrainResult) -> None:
    assert list(result.parts) == ["prepare", "start", "epochs", "finish"]
    assert sum(result.parts.values()) == pytest.approx(result.seconds)
    assert result.parts["epochs"] > max(worker.seconds for worker in result.workers) / 2
    assert min(result.parts.values()) >= 0


def test_quantiles_are_those_of_the_steps(result: TrainResult) -> None:
    for worker in result.workers:
        times = worker.step_times
        assert times is not None
        assert len(times.quantiles) == 21
        assert times.route == "sockets"  # the gradients are small
        assert times.quantiles == sorted(times.quantiles)
        mean = times.data + times.compute + times.communication + times.waiting
        assert times.quantiles[0] <= mean <= times.quantiles[-1]


def test_a_browser_reads_all_numbers_back(result: TrainResult, page: Path, tmp_path: Path) -> None:
    shown = read_page(page, tmp_path)
    data = json.loads(shown.texts["tfdist-run"])
    record = json.loads(result.record)
    assert {name: data[name] for name in record} == record
    assert data["history"] == result.history
    assert data["model_sha256"] == result.model_sha256
    assert data["restarts"][0]["checkpoint"] == "epoch 1"
    assert "Total params" in data["model_summary"]
    table = [[float(cell) for cell in row] for row in shown.tables["history"][1:]]
    assert table == [[n + 1, *(v[n] for v in result.history.values())] for n in range(3)]
    workers = [row[:5] for row in shown.tables["workers"][1:]]
    assert workers == [
        [str(w.rank), w.host, str(w.pid), str(w.rows), str(w.steps)] for w in result.workers
    ]
    rates = [float(row[7]) for row in shown.tables["workers"][1:]]
    assert rates == [worker["rows_per_second"] for worker in record["workers"]]
    medians = [float(row[7]) for row in shown.tables["steps"][1:]]
    assert medians == [w.step_times.quantiles[10] for w in result.workers if w.step_times]
    # Every chart has a title for screen readers: metrics, and five for the workers.
    titles = [text for name, text in shown.texts.items() if name.startswith(("curve-", "chart-"))]
    assert len(titles) == shown.tags.count("svg") == 2 + 5
    assert all(titles)
    assert any(text.startswith("loss by epoch: training ends at") for text in titles)


def test_it_is_light_or_dark_as_its_reader_prefers(page: Path, tmp_path: Path) -> None:
    assert first_pixel(page, tmp_path, False, 1280) == (0xFF, 0xFF, 0xFF)
    assert first_pixel(page, tmp_path, True, 400) == (0x12, 0x16, 0x1D)


def test_it_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"(?i)\s(?:src|href|srcset)\s*=|url\(|@import|<link|<iframe", text) == []
    assert re.findall("<script[^>]*>", text) == ['<script type="application/json" id="tfdist-run">']
    assert "default-src 'none'" in text
    assert list(page.parent.iterdir()) == [page]


def test_what_comes_from_users_is_text(result: TrainResult, tmp_path: Path) -> None:
    (restart,) = result.restarts
    hostile = replace(
        result,
        history={f"loss{HOSTILE}": [1.0, math.nan, math.inf]},
        metrics={HOSTILE: 0.5},
        features=[HOSTILE],
        levels=[HOSTILE],
        restarts=[replace(restart, lost=HOSTILE)],
        settings={HOSTILE: HOSTILE},
        workers=[replace(worker, host=HOSTILE) for worker in result.workers],
        epochs=3,
    )
    page = report(hostile, tmp_path / "hostile.html", title=HOSTILE)
    shown = read_page(page, tmp_path)
    assert shown.tags.count("b") == page.read_text().count('<div class="tile"><b>')
    data = json.loads(shown.texts["tfdist-run"])
    assert data["levels"] == [HOSTILE]
    assert data["history"] == {f"loss{HOSTILE}": [1.0, "NaN", "Infinity"]}
    assert [row[1] for row in shown.tables["workers"][1:]] == [HOSTILE] * 2


def test_what_is_not_there_is_named(result: TrainResult, tmp_path: Path) -> None:
    known = {"history": {"loss": [1.0, 0.5]}, "workers": [], "epochs": 2}
    assert capture(report_record, json.dumps(known), None, str(tmp_path / "a.html"), None)["ok"]
    text = (tmp_path / "a.html").read_text()
    (named,) = re.findall("This result does not include: ([^<]*)", text)
    assert named.startswith("restarts, step times")
    assert named.endswith("the settings of the call, the model&#x27;s layers.")


def test_a_failure_has_a_page_too(tmp_path: Path) -> None:
    error = WorkerFailedError(
        [
            Failure(
                1, "node-1", "ValueError", HOSTILE, "Traceback ...", ("one", "two"), 1.5, "mend"
            ),
            Failure(0, "node-0", "PeerLostError", "lost worker 1", time=2.5),
        ],
        timeline=[Moment(0.5, "started", "PID 7", 1, "node-1"), Moment(2.5, "failed", HOSTILE)],
    )
    page = report(error, tmp_path / "failed.html")
    shown = read_page(page, tmp_path)
    found = json.loads(shown.texts["tfdist-run"])["failures"]
    assert [one["message"] for one in found] == [HOSTILE, "lost worker 1"]
    assert [row[1] for row in shown.tables["failures"][1:]] == ["node-1", "node-0"]
    _, started, failed = shown.tables["timeline"]
    assert started == ["1", "node-1", show_time(0.5), "started", "PID 7"]
    assert failed[3:] == ["failed", HOSTILE]
    assert "What to do: mend" in page.read_text()


@pytest.mark.parametrize(
    ("what", "path", "said"),
    [
        (None, "run.html", "needs a TrainResult"),
        (1, "run.pdf", "name the page"),
        (1, 7, "must be the path"),
    ],
)
def test_wrong_arguments(what: Any, path: Any, said: str, tmp_path: Path) -> None:
    target = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(InputError, match=said):
        report(what, target)
    assert list(tmp_path.iterdir()) == []


RANGES = [(0.0, 1.0), (0.21, 1.19), (5.0, 5.0), (0.0, 0.0), (-3e-7, 2e-7), (1e9, 3e9)]
# Losses that differ only by the order of a sum, and some that are nearly zero.
RANGES += [(1e9, 1e9 + 0.003), (0.693147180559945, 0.6931471805599453), (1e-13, 3e-13)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_are_round_and_enclose(low: float, high: float) -> None:
    ticks = find_ticks(low, high, 5)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8


def test_figures_are_short() -> None:
    assert [show_number(one) for one in (12345, 0.123456, 1234.5, 2e-7, None, math.nan)] == [
        *("12,345", "0.1235", "1,234", "2e-07", "–", "nan"),
    ]
    assert [show_seconds(one) for one in (0, 2e-5, 0.0123, 4.56, 192, 7500, None)] == [
        *("0 s", "20 µs", "12.3 ms", "4.56 s", "3 min 12 s", "2 h 5 min", "–"),
    ]
