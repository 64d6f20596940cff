"""Checkpoints and models in an object store: S3's protocol, over a real connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
from object_store import ObjectStore, object_store
from test_checkpoint_store import fill, manifest

from pybackend import ClusterError, ModelOptions, Recovery, barrier_train, load_checkpoint
from pybackend.core.data.checkpoint_store import CheckpointStore
from pybackend.core.engine.checkpoint.checkpointing import CheckpointWriter
from pybackend.core.job.messages import Event, Note
from pybackend.core.model.compare import hash_weights

URI = "s3://bucket/runs/a run"
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(80, 6)).astype("float32"), RNG.integers(0, 3, 80)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("bucket") as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore) -> Iterator[Any]:
    """The file system, whose bucket is empty before and after."""
    server.open()
    filesystem = fsspec.filesystem("s3")
    yield filesystem
    server.open()
    filesystem.invalidate_cache()
    for path in filesystem.find("bucket"):
        filesystem.rm_file(path)


def names(s3: Any) -> list[str]:
    s3.invalidate_cache()
    return [path.rpartition("/")[2] for path in s3.find("bucket")]


@pytest.mark.full
def test_what_is_damaged_there_is_passed_over_and_the_folder_is_cleared(s3: Any) -> None:
    fill(URI, keep=3)
    assert len(names(s3)) == 3 * 2 + 1
    (newest,) = s3.glob(f"{URI}/checkpoint-000003-*.state")
    s3.pipe_file(newest, s3.cat_file(newest)[:3])
    (second,) = s3.glob(f"{URI}/checkpoint-000002-*.json")
    s3.pipe_file(second, s3.cat_file(second).replace(b"1", b"2"))
    said: list[str] = []
    store = CheckpointStore(URI)
    store.open()
    kept = store.find_newest(said.append)
    assert kept is not None
    assert (kept.manifest.epoch, kept.state, kept.model) == (1, b"state 1", b"model")
    assert len(said) == 2
    store.commit(manifest(2, kept.manifest.model), b"again")
    store.prune(1)
    assert len(names(s3)) == 3
    store.clear()
    assert names(s3) == []


@pytest.mark.full
def test_a_torn_upload_is_no_checkpoint(s3: Any, server: ObjectStore) -> None:
    store = fill(URI, keep=2)
    model = store.write_model(b"model", "h5")
    server.shut(r"PUT .*checkpoint-000009.*\.json")
    with pytest.raises(OSError, match=r"(?i)slow|busy|unavailable"):
        store.commit(manifest(9, model), b"its state alone has arrived")
    server.open()
    assert any(name.startswith("checkpoint-000009") for name in names(s3))
    kept = CheckpointStore(URI).find_newest(pytest.fail)
    assert kept is not None
    assert kept.manifest.epoch == 3
    store.commit(manifest(9, model), b"whole")
    store.prune(1)
    assert sorted(name.partition(".")[2] for name in names(s3)) == ["h5", "json", "state"]


def test_a_store_that_does_not_answer_is_waited_for(s3: Any, server: ObjectStore) -> None:
    notes: list[Event] = []
    store = fill(URI, keep=2)
    model = store.write_model(b"model", "h5")
    writer = CheckpointWriter(store, 3, notes.append)
    server.shut(".")
    with pytest.raises(ClusterError, match=r"cannot be read right now .* try again"):
        load_checkpoint(URI)
    writer.submit(manifest(4, model), b"state 4")
    writer.finish(60)
    (note,) = notes
    assert isinstance(note, Note)
    assert f"the checkpoint of epoch 4 could not be written to '{URI}'" in note.text
    writer.check()  # the run continues
    server.open()
    writer.submit(manifest(5, model), b"state 5")
    writer.finish(60)
    assert len(notes) == 1
    kept = CheckpointStore(URI).find_newest(pytest.fail)
    assert kept is not None
    assert kept.state == b"state 5"


def build() -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dropout(0.2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


class FirstIsKept(keras.callbacks.Callback):
    """Waits for the first epoch's checkpoint, so that the writer starts the second one's."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        filesystem = fsspec.filesystem("s3")
        while epoch == 1 and not filesystem.glob(f"{URI}/checkpoint-000001-*.json"):
            time.sleep(0.2)
            filesystem.invalidate_cache()
        time.sleep(0.2 if epoch == 0 else 1.0)


def train(**settings: Any) -> Any:
    options = {"workers": 2, "batch_size": 10, "seed": 5, "epochs": 4}
    return barrier_train(None, build, ROWS, **{**options, **settings})


@pytest.mark.full
def test_a_training_goes_on_without_its_store_and_resumes_from_it(
    s3: Any, server: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.shut("PUT .*checkpoint-000002-")
    refused = server.refused
    kept = Recovery(URI, keep=2)
    uri = "s3://bucket/models/m.keras"
    whole = train(recovery=kept, model_options=ModelOptions(uri=uri), callbacks=[FirstIsKept()])
    said = capsys.readouterr().out
    assert server.refused > refused
    assert said.count("the checkpoint of epoch 2 could not be written to") == 1
    assert "the newest one is from epoch 1" in said
    weights = whole.workers[0].weights_sha256
    assert hash_weights(load_checkpoint(URI)) == weights
    assert hash_weights(whole.model) == weights
    assert "bucket/models/m.keras" in s3.find("bucket/models")
    server.open()
    for path in s3.find("bucket/runs"):
        s3.rm_file(path)
    train(recovery=URI, epochs=2)
    again = train(recovery=Recovery(URI, resume=True))
    assert (again.history, again.workers[0].weights_sha256) == (whole.history, weights)
    assert "resumes from the checkpoint of epoch 2" in capsys.readouterr().out
