"""TensorBoard data of a training: the session has the files, and a TensorBoard opens them."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import build_dense, wait_for

from pybackend import (
    InputError,
    RFunction,
    barrier_train,
    track_tensorboard,
    train_many,
    view_tensorboard,
)
from pybackend.cli import main
from pybackend.core.api.training_run import EventFiles
from pybackend.core.job.arguments import check_log_folder, choose_log_folder
from pybackend.core.job.job import TrainingJob, make_job
from pybackend.core.job.messages import EpochEnded, EventBytes, Note
from pybackend.types import TrainResult


@pytest.fixture(scope="module")
def result(rows: Any, tmp_path_factory: Any) -> TrainResult:
    """Train with 60 steps by each of two workers."""
    return barrier_train(
        "local",
        build_dense,
        rows,
        workers=2,
        epochs=2,
        batch_size=7,
        validation_split=0.2,
        callbacks=[track_tensorboard(str(tmp_path_factory.mktemp("board") / "run"))],
        seed=5,
        verbose=0,
    )


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of all scalars in a folder's event files, by their names."""
    import tensorflow as tf
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        values = [(one.step, tf.make_ndarray(one.tensor_proto)) for one in events.Tensors(tag)]
        found[tag] = [(step, float(value)) for step, value in values if value.dtype.kind == "f"]
    return found


def test_what_is_not_installed_here_is_named_before_anything_starts(monkeypatch: Any) -> None:
    for module in ("tensorboard", "rpy2"):
        monkeypatch.setitem(sys.modules, module, None)
    rows = np.ones((8, 1)), np.ones(8)
    with pytest.raises(InputError, match=r"pip install 'tfdist\[tensorboard\]'"):
        barrier_train("local", lambda: None, rows, callbacks=[track_tensorboard()])
    with pytest.raises(InputError, match=r"written in R need .* pip install 'tfdist\[r\]'"):
        barrier_train("local", RFunction("function() NULL"), rows)


def test_the_event_files_have_the_history(result: TrainResult) -> None:
    assert result.tensorboard is not None
    folder = Path(result.tensorboard)
    assert sorted(path.name for path in folder.iterdir()) == ["train", "validation"]
    trained, validated = read_scalars(folder / "train"), read_scalars(folder / "validation")
    for name, values in result.history.items():
        where = validated if name.startswith("val_") else trained
        shown = where[f"epoch_{name.removeprefix('val_')}"]
        assert shown == list(enumerate(pytest.approx(value, rel=1e-6) for value in values))
    assert [step for step, _ in trained["batch_loss"]] == [50]
    assert "keras" in trained  # the graph of the model


def find_processes(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture
def command(result: TrainResult) -> Iterator[tuple[Any, str]]:
    """Run the command `tfdist tensorboard`; return the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pybackend", "tensorboard", str(result.tensorboard)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"TensorBoard for {result.tensorboard} at http://127.0.0.1:")
        yield process, line.split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# Without the forge: the process is the subject.
@pytest.mark.full
@pytest.mark.launcher
def test_a_tensorboard_shows_them_and_ends_with_who_started_it(
    command: Any, result: TrainResult
) -> None:
    process, url = command

    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/tags") as answer:  # noqa: S310
            return dict(json.load(answer))

    wait_for(lambda: len(ask()) == 2)
    tags = ask()
    assert {"epoch_loss", "epoch_accuracy", "batch_loss"} <= tags["train"].keys()
    assert {"epoch_loss", "epoch_accuracy"} <= tags["validation"].keys()
    assert len(find_processes(str(result.tensorboard))) >= 2
    process.send_signal(signal.SIGKILL)  # which it cannot change
    process.wait()
    wait_for(lambda: not find_processes(str(result.tensorboard)))


def test_files_come_in_parts_and_again(tmp_path: Path) -> None:
    said: list[Note] = []
    files = EventFiles(str(tmp_path / "run"), said.append)
    with files:
        for start, part in ((0, b"abc"), (3, b"def"), (0, b"abc")):
            data = base64.b64encode(part).decode()
            files(EventBytes("train/events", start, data))
        files.conclude()
        assert f"TensorBoard's files in {tmp_path}/run are incomplete" in said.pop().text
        files(EventBytes("", 0, "", is_last=True))
        files.conclude()
        assert [note.text for note in said] == [
            f"run `tfdist tensorboard {tmp_path}/run` to view this training run"
        ]
    assert (tmp_path / "run/train/events").read_bytes() == b"abcdef"


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_a_worker_cannot_write_elsewhere(name: str, tmp_path: Path) -> None:
    said: list[Note] = []
    with EventFiles(str(tmp_path / "run"), said.append) as files:
        files(EventBytes(name, 0, base64.b64encode(b"x").decode()))
        files.conclude()
        assert "could not be written" in said[-1].text
    assert list(tmp_path.iterdir()) == []  # an empty folder is not accepted


@pytest.mark.parametrize(("rank", "is_said"), [(0, True), (1, False), (None, True)])
def test_only_who_hears_rank_0_misses_its_files(
    rank: int | None, is_said: bool, tmp_path: Path
) -> None:
    said: list[Note] = []
    with EventFiles(str(tmp_path / "run"), said.append) as files:
        if rank is not None:
            files(EpochEnded(1, 1, 0.5, {}, rank=rank))
        files.conclude()
    assert bool(said) is is_said


def test_what_cannot_be_kept_ends_no_training(tmp_path: Path) -> None:
    said: list[Note] = []
    with EventFiles(str(tmp_path / "logs" / "run"), said.append) as files:
        for name, start, data in (("a", 0, "no base64!"), ("a", 1 << 70, ""), ("a\0b", 0, "")):
            files(EventBytes(name, start, data))
        files.conclude()
    assert "could not be written" in said[-1].text


def test_what_was_there_stays_and_what_was_made_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in ("mine", "mine/logs/run", "other/run"):
        with EventFiles(str(tmp_path / folder), print):
            assert (tmp_path / folder).is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_metric_of_several_values_has_a_curve_for_each(tmp_path: Path) -> None:
    import keras
    import numpy as np

    from pybackend.core.engine.session_callbacks import make_tensorboard

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    job = make_job(TrainingJob, {"workers": 1, "tensorboard": str(tmp_path)})
    callbacks = make_tensorboard(job, tmp_path / "own", lambda event: None)
    x, y = np.ones((6, 4), "float32"), np.eye(3, dtype="float32")[[0, 1, 2, 0, 1, 2]]
    history = model.fit(x, y, verbose=0, callbacks=callbacks).history
    found = read_scalars(tmp_path / "own" / "tensorboard" / "train")
    for number, figure in enumerate(history["f1_score"][0], start=1):
        assert found[f"epoch_f1_score_{number}"][0][1] == pytest.approx(float(figure))


def test_true_is_a_new_folder_in_logs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = choose_log_folder()
    assert first is not None
    assert Path(first).parent == tmp_path / "logs"
    Path(first).mkdir(parents=True)
    assert choose_log_folder() != first
    assert check_log_folder(None) is None
    assert check_log_folder("run") == str(tmp_path / "run")
    assert check_log_folder("gs://bucket/run") == "gs://bucket/run"
    assert check_log_folder(f"file://{tmp_path}/run") == str(tmp_path / "run")


@pytest.mark.parametrize("wrong", [1, "", [], 0.5])
def test_a_folder_is_a_text(wrong: Any, rows: Any) -> None:
    with pytest.raises(InputError, match="`folder` must be a folder or a URI, not"):
        track_tensorboard(wrong)


def test_there_must_be_something_to_show(tmp_path: Path, capsys: Any, rows: Any) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        view_tensorboard(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="shows a TrainResult or a folder, not 7"):
        view_tensorboard(7)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: specify a folder"):
        barrier_train("local", build_dense, rows, callbacks=[track_tensorboard(tmp_path / "file")])
    assert main(["tensorboard", str(tmp_path / "absent")]) == 1
    assert "tfdist: there is no folder" in capsys.readouterr().err


def test_trials_write_into_folders_of_their_own(tmp_path: Path, monkeypatch: Any) -> None:
    from pybackend.core.api.observer import split_folder

    monkeypatch.chdir(tmp_path)
    chosen = track_tensorboard().choose()
    assert split_folder([chosen.for_trial(2, {})]) == (f"{chosen.folder}/trial-2", [])
    assert split_folder([track_tensorboard("run"), 3]) == (str(tmp_path / "run"), [3])
    assert split_folder(None) == (None, [])


@pytest.mark.full
def test_the_trials_of_a_call_share_a_new_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.zeros((8, 8), "float32"), np.zeros(8)
    trials = train_many(
        "local", build_dense, rows, grid=[{}, {}], callbacks=[track_tensorboard()], verbose=0
    )
    folders = [Path(str(one.result and one.result.tensorboard)) for one in trials]
    assert [one.name for one in folders] == ["trial-1", "trial-2"]
    assert folders[0].parent == folders[1].parent
    assert folders[0].parent.parent == tmp_path / "logs"
    assert all(list(one.rglob("events.*")) for one in folders)
