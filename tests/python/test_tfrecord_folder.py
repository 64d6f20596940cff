"""A folder of records is complete or does not exist, whatever fails meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pybackend import InputError
from pybackend.core.data import files
from pybackend.core.data.tfrecord import folder
from pybackend.core.data.tfrecord.encode import write_part
from pybackend.core.data.tfrecord.folder import RecordsManifest
from pybackend.core.data.tfrecord.protobuf import to_spark_fields
from pybackend.core.data.tfrecord.record_files import RecordFiles

TOKEN = "0123456789abcdef"


@pytest.fixture(params=["", "local://"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a folder that does not exist, as a path or as a URI for fsspec."""
    if request.param:
        pytest.importorskip("fsspec")
    return f"{request.param}{tmp_path / 'data'}"


def attempt(uri: str, value: int, token: str = TOKEN) -> dict[str, Any]:
    """Return the files of a job with one task, and its manifest."""
    batch = pa.record_batch({"x": [value]})
    name = f"00000-{value}"
    part = write_part([batch], folder.choose_path(uri, token, name), name)
    assert part is not None
    return RecordsManifest(to_spark_fields(batch.schema), None, (part,)).to_json()


def values(uri: str) -> list[int]:
    data = RecordFiles.at(uri)
    return pa.Table.from_batches(data.batches(0, data.rows, ["x"]))["x"].to_pylist()


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data").iterdir())


def test_only_attempts_that_count_are_published(uri: str, tmp_path: Path) -> None:
    assert folder.begin(uri, TOKEN, False)
    assert folder.is_begun(uri, TOKEN)
    attempt(uri, 1)  # of a retried task
    manifest = folder.finish(uri, TOKEN, attempt(uri, 2), False)
    assert values(uri) == [2]
    assert names(tmp_path) == ["_SUCCESS", "_tfdist.json", "part-00000-01234567.tfrecord"]
    report = json.loads((tmp_path / "data" / "_tfdist.json").read_text())
    assert RecordsManifest.from_json(report) == RecordsManifest.from_json(manifest)


def test_what_was_there_goes_when_the_new_is_complete(uri: str, tmp_path: Path) -> None:
    folder.begin(uri, TOKEN, False)
    folder.finish(uri, TOKEN, attempt(uri, 1), False)
    other = "fedcba9876543210"
    with pytest.raises(InputError, match=r"not empty, it contains _SUCCESS: .*overwrite=True"):
        folder.begin(uri, other, False)
    assert not folder.begin(uri, other, True)
    report = attempt(uri, 2, other)
    assert values(uri) == [1]
    folder.finish(uri, other, report, True)
    assert values(uri) == [2]
    assert names(tmp_path) == ["_SUCCESS", "_tfdist.json", "part-00000-fedcba98.tfrecord"]


@pytest.mark.parametrize("failing", ["move", "manifest"])
def test_what_was_there_stays_when_publishing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    uri = str(tmp_path / "data")
    folder.begin(uri, TOKEN, False)
    folder.finish(uri, TOKEN, attempt(uri, 1), False)
    folder.begin(uri, "f" * 16, True)
    report = attempt(uri, 2, "f" * 16)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        if failing == "move":
            patch.setattr(files.Folder, "move", fail)
        else:
            patch.setattr(folder.json, "dumps", fail)
        with pytest.raises(OSError, match="full"):
            folder.finish(uri, "f" * 16, report, True)
    folder.discard(uri, "f" * 16, False)
    assert values(uri) == [1]
    assert names(tmp_path) == ["_SUCCESS", "_tfdist.json", "part-00000-01234567.tfrecord"]


def test_nothing_is_left_of_a_job_that_failed(uri: str, tmp_path: Path) -> None:
    is_new = folder.begin(uri, TOKEN, False)
    attempt(uri, 1)
    folder.discard(uri, TOKEN, is_new)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_stays_where_a_job_failed(uri: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    is_new = folder.begin(uri, TOKEN, False)
    folder.discard(uri, TOKEN, is_new)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("prepare", "report"),
    [
        (lambda path: path.write_text("a"), r"is a file; expected a folder"),
        (
            lambda path: (path / "sub").mkdir(parents=True),
            "contains sub, but overwrite=True replaces",
        ),
    ],
)
def test_what_is_not_ours_is_not_replaced(
    uri: str, tmp_path: Path, prepare: Callable[[Path], Any], report: str
) -> None:
    prepare(tmp_path / "data")
    with pytest.raises(InputError, match=f"`path`: .*{report}"):
        folder.begin(uri, TOKEN, True)


def test_a_place_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        folder.begin(str(tmp_path / "file" / "data"), TOKEN, False)


def test_what_came_meanwhile_is_not_mixed_in(uri: str, tmp_path: Path) -> None:
    folder.begin(uri, TOKEN, False)
    report = attempt(uri, 1)
    (tmp_path / "data" / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"notes.txt appeared in"):
        folder.finish(uri, TOKEN, report, False)


def test_files_that_this_machine_does_not_see_are_told(uri: str, tmp_path: Path) -> None:
    folder.begin(uri, TOKEN, False)
    report = attempt(uri, 1)
    (tmp_path / "data" / f"_temporary-{TOKEN}" / "00000-1").unlink()
    with pytest.raises(InputError, match=r"which this machine cannot see: .*share"):
        folder.finish(uri, TOKEN, report, False)
