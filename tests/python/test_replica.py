"""Rows that should be in memory, and do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybackend.core.collective import Alone
from pybackend.core.data.row_store import write_columns
from pybackend.core.engine.replica import fit_in_memory


class Beside(Alone):
    """Rank 0 of two; the other has as much memory, and this multiple of the rows."""

    def __init__(self, times: float, same_machine: bool) -> None:
        self._times, self._machine = times, same_machine

    def all_gather(self, part: Any) -> list[Any]:
        return [part, part * np.array([self._times, 1, self._machine])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_columns(tmp_path / "train", {"x": np.zeros((1000, 10), "float32")})
    return tmp_path / "train"


def decide(folder: Path, limit: int | None, collective: Any = None) -> tuple[bool, list[str]]:
    notes: list[Any] = []
    fits = fit_in_memory([folder], limit, collective or Alone(), notes.append)
    return fits, [note.text for note in notes]


def test_rows_that_fit_are_kept(folder: Path) -> None:
    assert decide(folder, None) == (True, [])
    assert decide(folder, 200_000) == (True, [])


def test_rows_that_do_not_fit_stay_on_disk(folder: Path) -> None:
    fits, (note,) = decide(folder, 60_000)
    assert not fits
    assert "the rows of worker 0 stay on disk, in the same order" in note
    assert "has 40" in note
    assert "may use only 30000 bytes of memory" in note


def test_another_workers_rows_are_named(folder: Path) -> None:
    fits, (note,) = decide(folder, 200_000, Beside(4, same_machine=False))
    assert fits
    assert "the rows of worker 1 stay on disk" in note


def test_workers_of_one_machine_share_what_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pybackend.core.engine.replica.read_free_memory", lambda: 120_000.0)
    assert decide(folder, None, Beside(1, same_machine=False)) == (True, [])
    for limit in (None, 120_000):
        fits, (note,) = decide(folder, limit, Beside(1, same_machine=True))
        assert not fits
    assert "the rows of workers 0 and 1 stay on disk" in note
