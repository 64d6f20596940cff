"""A failing disk is reported, and ends the training only after several failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybackend.core.data.checkpoint_store import CheckpointStore, Manifest, Part
from pybackend.core.engine.checkpoint.checkpointing import CheckpointWriter
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.messages import Event, Note


def manifest(epoch: int) -> Manifest:
    return Manifest(epoch, 0, 1, 7, False, {}, Part("model", ""), "h5", "", None)


def test_failures_are_notes_until_there_are_too_many(tmp_path: Path) -> None:
    notes: list[Event] = []
    folder = tmp_path / "kept"
    writer = CheckpointWriter(CheckpointStore(str(folder)), 2, notes.append)
    writer.submit(manifest(1), b"state")
    writer.finish(60)
    assert notes == []
    folder.rename(tmp_path / "elsewhere")
    folder.touch()  # a file is at its path: nothing can be written there
    writer.submit(manifest(2), b"state")
    writer.finish(60)
    (note,) = notes
    assert isinstance(note, Note)
    assert "the checkpoint of epoch 2 could not be written" in note.text
    assert note.text.endswith("the newest one is from epoch 1")
    writer.submit(manifest(3), b"state")
    writer.finish(60)
    with pytest.raises(ClusterError, match=r"2 checkpoints in a row .* is from epoch 1"):
        writer.check()
    folder.unlink()
    writer.submit(manifest(4), b"state")
    writer.finish(60)
    assert CheckpointStore(str(folder)).find_newest() is not None


def test_what_cannot_be_removed_is_a_note_and_no_failure_to_write(tmp_path: Path) -> None:
    notes: list[Event] = []
    store = CheckpointStore(str(tmp_path))
    store.commit(manifest(1), b"state")
    again = CheckpointStore(str(tmp_path))
    again.open()
    writer = CheckpointWriter(again, 3, notes.append)
    (tmp_path / store.names()[0]).write_bytes(b"damaged")
    for epoch in (2, 3):
        writer.submit(manifest(epoch), b"state")
        writer.finish(60)
        writer.check()
    (note,) = notes
    assert isinstance(note, Note)
    assert "older checkpoints at" in note.text
    assert len(store.names()) == 3
    writer.submit(manifest(4), b"state")
    writer.clear(60)
    assert not tmp_path.exists()


def test_another_training_in_the_folder_ends_this_one(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(str(tmp_path)), 2, lambda event: None)
    CheckpointStore(str(tmp_path)).commit(manifest(1), b"state")
    writer.submit(manifest(1), b"state")
    writer.finish(60)
    with pytest.raises(InputError, match="another training run is writing to"):
        writer.check()
