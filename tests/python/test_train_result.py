"""Reports and results: transfer, saving and printing."""

from __future__ import annotations

import base64
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import Failure, InputError, root_cause_first
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.report import StepTimes, WorkerReport

CONTENT = b"\x89HDF\r\n\x1a\n not really"


def result(**changes: Any) -> TrainResult:
    workers = [
        WorkerReport(rank, "127.0.0.1", 100 + rank, rows=50, steps=4, seconds=1.25)
        for rank in range(2)
    ]
    made = TrainResult(
        content=CONTENT,
        model_format="h5",
        model_sha256="ab" * 32,
        history={"loss": [2.0, 1.23456], "accuracy": [0.5, 0.75]},
        workers=workers,
        seconds=3.21,
        seed=7,
        epochs=2,
    )
    return replace(made, **changes)


texts = st.text(max_size=20)
failures = st.builds(
    Failure,
    rank=st.integers(0, 9),
    host=texts,
    exception_type=st.sampled_from(["ValueError", "PeerLostError", "Stopped", "ProcessDied"]),
    message=texts,
    traceback=texts,
    log=st.lists(texts, max_size=3).map(tuple),
    time=st.floats(0, 1e9),
    advice=texts,
)
reports = st.builds(
    WorkerReport,
    rank=st.integers(0, 9),
    host=texts,
    pid=st.integers(1, 2**22),
    rows=st.integers(0),
    steps=st.integers(0),
    seconds=st.floats(0, 1e9),
    waited=st.none() | st.floats(0, 1e9),
    step_times=st.none()
    | st.builds(
        StepTimes,
        steps=st.integers(0, 512),
        data=st.floats(0, 1e9),
        compute=st.floats(0, 1e9),
        communication=st.floats(0, 1e9),
        waiting=st.floats(0, 1e9),
        stretches=st.lists(st.lists(st.floats(0, 1e9), min_size=4, max_size=4), max_size=3),
        buffers=st.lists(st.integers(0), max_size=3),
        costs=st.none() | st.lists(st.floats(0, 1), min_size=3, max_size=3),
        machine=texts,
    ),
    value=st.none() | texts | st.dictionaries(texts, st.lists(st.floats(allow_nan=False))),
    weights_sha256=st.none() | texts,
    failure=st.none() | failures,
)


@settings(deadline=None)
@given(reports)
def test_a_report_travels_as_json(report: WorkerReport) -> None:
    again = decode(encode(report), WorkerReport)
    assert again == report
    assert again.ok == (report.failure is None)


@settings(deadline=None)
@given(st.lists(failures, min_size=1, max_size=6))
def test_the_root_cause_comes_first(found: list[Failure]) -> None:
    ordered = root_cause_first(found)
    assert sorted(map(repr, ordered)) == sorted(map(repr, found))
    late = {"PeerLostError", "Stopped"}
    if any(f.is_loss for f in ordered):  # TensorFlow's errors are about the lost process
        late |= {"AbortedError", "CancelledError", "InternalError"}
        late |= {"PSUnavailableError", "UnavailableError"}
    consequences = [f.exception_type in late for f in ordered]
    assert consequences == sorted(consequences)
    for kind in (False, True):
        times = [f.time for f, c in zip(ordered, consequences, strict=True) if c == kind]
        assert times == sorted(times)


def test_a_lost_peer_is_no_root_cause_even_where_its_clock_is_early() -> None:
    lost = Failure(0, "a", "PeerLostError", "lost worker 1", time=1.0)
    cause = Failure(1, "b", "MemoryError", "", time=99.0)
    assert root_cause_first([lost, cause]) == [cause, lost]


def test_beside_a_lost_process_tensorflows_errors_are_no_root_cause() -> None:
    early = Failure(0, "a", "UnavailableError", "Socket closed", time=1.0)
    lost = Failure(1, "b", "ProcessDied", "SIGKILL", time=2.0)
    own = Failure(1, "b", "ValueError", "", time=2.0)
    assert root_cause_first([early, lost]) == [lost, early]
    assert root_cause_first([own, early]) == [early, own]


def test_the_model_is_decoded_once_and_only_when_asked_for() -> None:
    asked: list[bytes] = []

    def decode(content: bytes) -> object:
        asked.append(content)
        return object()

    found = result(decode=decode)
    assert asked == []
    assert found.model is found.model
    assert asked == [CONTENT]


def test_a_model_at_a_uri_is_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "there.h5").write_bytes(CONTENT)
    uri = str(tmp_path / "there.h5")
    found = result(content=b"", model_uri=uri)
    assert found.save(tmp_path / "here.h5").read_bytes() == CONTENT


def test_without_a_decoder_the_error_says_what_to_call() -> None:
    with pytest.raises(InputError, match="model_from_base64"):
        _ = result().model


def test_saving_writes_the_model_file_and_makes_its_folder(tmp_path: Path) -> None:
    path = result().save(tmp_path / "new" / "model.h5")
    assert path == tmp_path / "new" / "model.h5"
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["model", "model.txt"])
def test_saving_under_another_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"name the file 'model\.h5', or \*\.h5 or \*\.keras, or \*\.json"
    ):
        result().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_saved_under_their_own_name(tmp_path: Path) -> None:
    found = result(model_format="weights.h5")
    with pytest.raises(InputError, match=r"name the file 'model\.weights\.h5', or \*\.h5 or"):
        found.save(tmp_path / "model.pt")
    assert found.save(tmp_path / "model.weights.h5").read_bytes() == CONTENT
    for nothing in (None, ".", 3):
        with pytest.raises(InputError, match="`path` must name a file"):
            found.save(nothing)


def test_the_summary_has_last_figures_and_workers() -> None:
    assert result(metrics={"test_accuracy": 0.98}).summary().splitlines() == [
        "2 workers, 100 rows, 2 epochs, 3.2 s, seed 7",
        "last epoch: loss 1.235, accuracy 0.75",
        "test_accuracy 0.98",
        "  worker 0 on 127.0.0.1 (pid 100): 50 rows, 4 steps, 1.2 s",
        "  worker 1 on 127.0.0.1 (pid 101): 50 rows, 4 steps, 1.2 s",
    ]
    assert str(result()) == result().summary()


def test_the_summary_names_the_worker_for_which_the_others_waited() -> None:
    def of(*waits: float | None) -> Any:
        reports = enumerate(waits)
        return result(workers=[WorkerReport(r, "h", 1, seconds=9.0, waited=w) for r, w in reports])

    assert of(6.0, 0.25, 5.5).straggler == (1, 5.5)
    assert of(6.0, 0.25, 5.5).summary().splitlines()[-2:] == [
        "  worker 2 on h (pid 1): 0 rows, 0 steps, 9.0 s, 5.5 s of them waiting",
        "the others waited 5.5 s for worker 1",
    ]
    # A short wait, a single worker, or unknown times give no line.
    assert [of(*waits).straggler for waits in [(0.5, 0.25), (7.0,), (7.0, None)]] == [None] * 3


def test_the_summary_of_one_worker_and_a_metric_per_class() -> None:
    found = result(
        workers=[WorkerReport(0, "h", 1, rows=9, steps=1)], epochs=1, history={"f1": [[0.5, 0.25]]}
    )
    lines = found.summary().splitlines()
    assert lines[0] == "1 worker, 9 rows, 1 epoch, 3.2 s, seed 7"
    assert lines[1] == "last epoch: f1 [0.5, 0.25]"


def test_a_result_is_shown_without_the_model_file() -> None:
    assert base64.b64decode(result().model_base64) == CONTENT
    assert repr(CONTENT) not in repr(result())


def test_a_result_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        result().seed = 8  # type: ignore[misc]


def test_the_dict_for_r_is_plain_data() -> None:
    failed = WorkerReport(1, "h", 2, failure=Failure(1, "h", "ValueError", "no"))
    plain = result(workers=[WorkerReport(0, "h", 1), failed]).to_dict()
    assert json.loads(json.dumps(plain))["workers"][1]["failure"]["message"] == "no"
    assert [w["ok"] for w in plain["workers"]] == [True, False]
    assert set(plain) == {
        "history",
        "model_base64",
        "model_format",
        "model_sha256",
        "workers",
        "seconds",
        "parts",
        "seed",
        "epochs",
        "initial_epoch",
        "validation_freq",
        "epochs_of",
        "straggler",
        "audit",
        "metrics",
        "model_uri",
        "levels",
        "features",
        "tensors",
        "categories",
        "inputs",
        "encode",
        "feature_names",
        "workers_by_epoch",
        "generations",
        "settings",
        "restarts",
        "timeline",
        "tensorboard",
    }
    assert set(plain) - set(result().to_dict(model=False)) == {"model_base64"}
    coded = result(levels=list(np.array([3, 5])), settings={"batch_size": 8}).to_dict()
    assert json.loads(json.dumps(coded))["levels"] == [3, 5]
    assert coded["settings"] == {"batch_size": 8}


def test_figures_belong_to_epochs() -> None:
    history = {"loss": [3.0, 2.0, 1.0], "val_loss": [2.5]}
    found = result(history=history, epochs=3, initial_epoch=4, validation_freq=3)
    assert (found.epochs_of("loss"), found.epochs_of("val_loss")) == ([5, 6, 7], [6])
    found = replace(found, validation_freq=(1, 7))
    assert found.to_dict()["epochs_of"] == {"loss": [5, 6, 7], "val_loss": [7]}
