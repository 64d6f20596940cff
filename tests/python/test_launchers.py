"""Launchers of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pybackend
from pybackend.core.errors import InputError
from pybackend.core.launchers import launcher_for

PACKAGE = """
from pybackend.core.launchers.local import LocalLauncher


class Queue(LocalLauncher):
    where = "a queue"


def launcher_of(target):
    return Queue() if target == "queue://lab" else None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with an entry point."""
    (tmp_path / "lab_queue.py").write_text(PACKAGE)
    info = tmp_path / "lab_queue-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-queue\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tfdist.launchers]\nlab = lab_queue:launcher_of\n")
    monkeypatch.syspath_prepend(tmp_path)


def who(context: Any) -> int:
    return int(context.rank)


@pytest.mark.usefixtures("installed")
def test_a_package_may_bring_a_launcher() -> None:
    assert launcher_for("queue://lab").where == "a queue"
    assert pybackend.barrier_run("queue://lab", who, workers=2, verbose=0) == [0, 1]
    with pytest.raises(InputError, match="not 'queue://other'"):
        launcher_for("queue://other")
