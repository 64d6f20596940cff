"""Lines of ranks, assembled from pieces of output."""

from __future__ import annotations

import pytest

from pybackend.core.launchers.script import driver
from pybackend.core.launchers.script.driver import LineSplitter


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntw", b"o\n", b"three"], [[b"one"], [b"two"], [], [b"three"]]),
        ([b"\n\n"], [[b"", b""], []]),
        ([b"of Windows\r\n"], [[b"of Windows"], []]),
        ([b"10%\r20%\r", b"30%\r", b"\n"], [[], [], [b"30%"], []]),
        ([b"10%\r", b"20%"], [[], [], [b"20%"]]),
        ([b"\r10%", b"\r20%"], [[], [], [b"20%"]]),
        ([b"x" * 65536, b"y\n"], [[], [b"x" * 65536 + b"y"], []]),
        ([b"x" * 65537, b"y\n"], [[b"x" * 65537], [b"y"], []]),
    ],
)
def test_lines_are_put_together(pieces: list[bytes], expected: list[list[bytes]]) -> None:
    lines = LineSplitter()
    assert [*map(lines.add, pieces), lines.end()] == expected


def test_a_progress_bar_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_REDRAW_SECONDS", 0.0)
    lines = LineSplitter()
    assert lines.add(b"\r\r") == []
    assert lines.add(b"10%\r20%\r3") == [b"20%"]
    assert lines.add(b"0%") == []
    assert lines.add(b"\r") == [b"30%"]
    assert lines.add(b"\n\n") == [b""]
