"""Places where a secret could leak: command lines, and files that other users can read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pybackend.core.net.authentication import new_token


def know_token(monkeypatch: Any, launcher: Any) -> str:
    """Make a launcher's module use the same token for all calls; return it."""
    token = new_token()
    monkeypatch.setattr(launcher, "new_token", lambda: token)
    return token


def find_in_commands(text: str) -> list[str]:
    """Return the command lines on this machine that contain a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(entry.read_bytes().decode(errors="replace"))
    return [command for command in found if text in command]


def find_in_files(folder: Path, text: str) -> list[str]:
    """Return the files in a folder that contain a text and that other users can read."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _is_open(Path(place, name), 0o011)]
        for path in (Path(place, name) for name in names):
            with suppress(OSError):
                is_seen = path.is_file() and _is_open(path, 0o044)
                if is_seen and text.encode() in path.read_bytes():
                    found.append(str(path))
    return found


def _is_open(path: Path, mode: int) -> bool:
    return bool(path.stat().st_mode & mode)
