"""Checkpoints are intact or skipped, and old ones are deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from threads import Threads

from pybackend.core.data.checkpoint_store import VERSION, CheckpointStore, Manifest, Part
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.report import Generation


def manifest(epoch: int, model: Part, step: int = 0) -> Manifest:
    return Manifest(epoch, step, 2, 7, False, {"data": [[1, "a"]]}, model, "h5", "", None)


def fill(uri: str, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(uri)
    model = store.write_model(b"model", "h5")
    for epoch in range(4):
        store.commit(manifest(epoch, model), b"state %d" % epoch)
        store.prune(keep)
    return store


def reopen(path: Path) -> CheckpointStore:
    store = CheckpointStore(str(path))
    store.open()
    return store


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "not text": lambda path: path.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", ["json", "state"])
def test_what_is_damaged_is_passed_over_and_then_removed(
    damage: str, suffix: str, tmp_path: Path
) -> None:
    fill(str(tmp_path))
    (path,) = tmp_path.glob(f"checkpoint-000003-*.{suffix}")
    DAMAGES[damage](path)
    said: list[str] = []
    store = reopen(tmp_path)
    kept = store.find_newest(said.append)
    assert kept is not None
    assert (kept.manifest.epoch, kept.state, kept.model) == (2, b"state 2", b"model")
    if (damage, suffix) != ("missing", "json"):  # then it was never committed
        assert "is damaged" in said[0]
    for step in (4, 5):
        store.commit(manifest(2, kept.manifest.model, step), b"newer")
        store.prune(2)
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert names == ["checkpoint-000002-000000004.json", "checkpoint-000002-000000005.json"]
    assert len(list(tmp_path.iterdir())) == 5  # two states, and the model's file


def test_all_are_damaged_and_the_model_alone(tmp_path: Path) -> None:
    store = fill(str(tmp_path))
    flip(next(tmp_path.glob("model-*")))
    kept = store.find_newest()
    assert kept is not None
    assert kept.model is None
    for path in tmp_path.glob("*.state"):
        flip(path)
    said: list[str] = []
    with pytest.raises(InputError, match=r"all 2 are damaged\. Choose another folder"):
        store.find_newest(said.append)
    assert len(said) == 2


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_stay(keep: int, tmp_path: Path) -> None:
    store = fill(str(tmp_path), keep)
    assert [name[11:17] for name in store.names()] == [f"{e:06d}" for e in range(4 - keep, 4)]
    with pytest.raises(InputError, match="resume=True"):
        store.check_is_empty()
    store.clear()
    assert not tmp_path.exists()


def test_a_uri_is_a_folder_as_well() -> None:
    store = fill("memory://checkpoints")
    kept = CheckpointStore("memory://checkpoints").find_newest()
    assert kept is not None
    assert kept.state == b"state 3"
    store.clear()
    assert store.names() == []


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newer_one(
    tmp_path: Path,
) -> None:
    training = reopen(tmp_path)
    model = training.write_model(b"model", "h5")
    has_begun, is_over = threading.Event(), threading.Event()

    def train() -> None:
        epoch = 0
        while not is_over.is_set():
            epoch += 1
            training.commit(manifest(epoch, model), b"state %d" % epoch * 10_000)
            training.prune(1)
            has_begun.set()

    with Threads() as pool:
        running = pool.submit(train)
        try:
            assert has_begun.wait(30)
            said: list[str] = []
            for _ in range(200):
                kept = CheckpointStore(str(tmp_path)).find_newest(said.append)
                assert kept is not None
                assert kept.state == b"state %d" % kept.manifest.epoch * 10_000
                assert kept.model == b"model"
        finally:
            is_over.set()
        running.result()
    assert said == []


def test_a_newer_form_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    model = store.write_model(b"model", "h5")
    newer = Manifest(1, 0, 2, 7, False, {}, model, "h5", "", None, version=VERSION + 1)
    store.commit(newer, b"state")
    with pytest.raises(InputError, match="written by a newer release of tfdist"):
        store.find_newest()


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    names = ["checkpoint-500/weights", "model-best.keras", "checkpoint-notes.json"]
    names += ["model-00000000.h5/weights"]  # a folder with a name like tfdist's
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "model-11111111.h5.partial-22222222").touch()
    store = reopen(tmp_path)
    part = store.write_model(b"model", "h5")
    (tmp_path / "model-33333333.h5").touch()  # another training started
    for epoch in (1, 2):
        store.commit(manifest(epoch, part), b"state")
        store.prune(1)
    store.clear()
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {*names, "model-33333333.h5"}


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Make the system fail to open a file, as with a disk that does not answer."""
    aside = path.rename(path.with_suffix(".aside"))
    path.symlink_to(path)  # ELOOP, also for root
    yield
    aside.replace(path)


@pytest.mark.parametrize("suffix", ["json", "state"])
def test_what_cannot_be_read_at_the_moment_is_not_damaged(suffix: str, tmp_path: Path) -> None:
    fill(str(tmp_path))
    (path,) = tmp_path.glob(f"checkpoint-000003-*.{suffix}")
    with unreadable(path), pytest.raises(ClusterError, match=f"{path.name}.*try again"):
        CheckpointStore(str(tmp_path)).find_newest()
    with unreadable(next(tmp_path.glob("model-*"))), pytest.raises(ClusterError, match="try again"):
        CheckpointStore(str(tmp_path)).find_newest()
    kept = CheckpointStore(str(tmp_path)).find_newest()
    assert kept is not None
    assert kept.manifest.epoch == 3


def test_nothing_is_removed_if_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    fill(str(tmp_path))
    store = reopen(tmp_path)
    kept = store.find_newest()
    assert kept is not None
    there = {path.name for path in tmp_path.iterdir()}
    store.commit(manifest(4, kept.manifest.model), b"state 4")
    older = tmp_path / "checkpoint-000002-000000000.json"
    with unreadable(older), pytest.raises(OSError, match="symbolic links"):
        store.prune(3)
    assert there < {path.name for path in tmp_path.iterdir()}
    store.prune(2)
    assert [name[11:17] for name in store.names()] == ["000003", "000004"]
    newest = CheckpointStore(str(tmp_path)).find_newest()
    assert newest is not None
    assert newest.state == b"state 4"


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    first, second = reopen(tmp_path), reopen(tmp_path)
    model = first.write_model(b"model", "h5")
    first.commit(manifest(1, model), b"first")
    with pytest.raises(InputError, match="another training run is writing to"):
        second.commit(manifest(1, model), b"second")
    later = reopen(tmp_path)  # which resumes
    assert later.find_newest() is not None
    later.commit(manifest(2, model), b"later")
    later.prune(2)
    with pytest.raises(InputError, match="another training run is writing to"):
        first.commit(manifest(3, model), b"first")


def test_a_training_that_resumes_behind_another_one_is_noticed(tmp_path: Path) -> None:
    first = reopen(tmp_path)
    model = first.write_model(b"model", "h5")
    first.commit(manifest(1, model), b"first")
    later = reopen(tmp_path)
    first.commit(manifest(3, model), b"first")
    later.commit(manifest(2, model), b"later")
    with pytest.raises(InputError, match="another training run is writing to"):
        first.commit(manifest(4, model), b"first")


@pytest.mark.parametrize("other_commits_last", [False, True])
def test_of_two_that_begin_at_once_one_goes_on_with_all_its_files(
    other_commits_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
    models = {store: store.write_model(b"model", "h5") for store in (one, other)}
    for store in (one, other):
        store.open()
    first, last = (one, other) if other_commits_last else (other, one)

    def keep(store: CheckpointStore, epoch: int) -> None:
        store.commit(manifest(epoch, models[store]), b"state")
        store.prune(1)

    # Neither sees the other's manifest before it writes its own.
    written = CheckpointStore._write

    def write(store: CheckpointStore, name: str, content: bytes) -> Part:
        if store is last and name.endswith(".state"):
            monkeypatch.setattr(CheckpointStore, "_write", written)
            keep(first, 0)
        return written(store, name, content)

    monkeypatch.setattr(CheckpointStore, "_write", write)
    keep(last, 0)
    with pytest.raises(InputError, match="another training run is writing"):
        keep(first, 1)
    for epoch in (1, 2):
        keep(last, epoch)
    kept = reopen(tmp_path).find_newest(pytest.fail)
    assert kept is not None
    assert (kept.manifest.epoch, kept.model, kept.state) == (2, b"model", b"state")
    assert len(list(tmp_path.glob("model-*"))) == 1


GENERATIONS = Generation(1, [0, 1]), Generation(2, [1], left={"0": "suspended"})


def test_a_worker_that_writes_late_does_not_disturb_those_that_continue(tmp_path: Path) -> None:
    late, current = (CheckpointStore(str(tmp_path), run="elastic") for _ in range(2))
    models = {}

    def keep(store: CheckpointStore, epoch: int, generations: int, step: int = 0) -> None:
        made = manifest(epoch, models[store], step)
        store.commit(replace(made, generations=GENERATIONS[:generations]), b"state")
        store.prune(1)

    for store in (late, current):
        store.open()  # there is no checkpoint yet
        models[store] = store.write_model(b"model", "h5")
    keep(late, 2, 1, step=3)
    keep(current, 2, 2)
    assert current.names() == ["checkpoint-000002-000000000.json"]
    for step in (0, 4):
        with pytest.raises(InputError, match="continues without this worker, and another one"):
            keep(late, 2, 1, step)
    keep(current, 3, 2)
    assert len(list(tmp_path.iterdir())) == 3  # manifest, state, model
    current.clear()
    assert not tmp_path.exists()


def test_a_worker_that_is_suspended_while_it_writes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, current = (CheckpointStore(str(tmp_path), run="elastic") for _ in range(2))
    model = current.write_model(b"model", "h5")
    written = CheckpointStore._write

    def write(store: CheckpointStore, name: str, content: bytes) -> Part:
        if store is late:
            current.commit(replace(manifest(2, model), generations=GENERATIONS), b"state")
        return written(store, name, content)

    monkeypatch.setattr(CheckpointStore, "_write", write)
    with pytest.raises(InputError, match="continues without this worker, and another one"):
        late.commit(replace(manifest(2, model, 3), generations=GENERATIONS[:1]), b"late")
    current.clear()
    assert not tmp_path.exists()
