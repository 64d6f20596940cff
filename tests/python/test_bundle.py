"""The bundle for a host, unpacked and run by a real process as on a host."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import wait_for

from pybackend.core.launchers.remote.bootstrap import MARK
from pybackend.core.launchers.remote.bundle import LIBRARY, Bundle, bootstrap_command, library

# Stands for this package: prints what it found, and waits for the end.
TASK = """
import json, os, sys
def run(folder, pipe, channel):
    print("noise")
    found = {n: open(os.path.join(folder, n)).read() for n in ("one", "rows/two")}
    os.write(channel, json.dumps([folder, found]).encode() + b"\\n")
    pipe.read()
"""


@contextmanager
def bootstrap(tmp_path: Path, wanted: str = "json nonesuch") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        bootstrap_command(sys.executable, wanted, "hosts.ssh_task.run"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        yield process


def greeting(process: subprocess.Popen[bytes]) -> dict[str, object]:
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    line = process.stdout.readline()
    assert line.startswith(MARK)
    found: dict[str, object] = json.loads(line[len(MARK) :])
    return found


def test_a_bundle_arrives_runs_and_goes(tmp_path: Path) -> None:
    # A file in the working directory must not replace a real module.
    (tmp_path / "tempfile.py").write_text("raise ImportError('not this one')")
    rows = tmp_path / "given"
    rows.write_text("3 4")
    library = io.BytesIO()
    with zipfile.ZipFile(library, "w") as packed:
        for folder in ("", "core/", "core/launchers/", "core/launchers/hosts/"):
            packed.writestr(f"pybackend/{folder}__init__.py", "")
        packed.writestr("pybackend/core/launchers/hosts/ssh_task.py", TASK)
    contents = {LIBRARY: library.getvalue(), "one": b"1"}
    with bootstrap(tmp_path) as process:
        assert greeting(process)["missing"] == ["nonesuch"]
        assert process.stdin is not None
        assert process.stdout is not None
        Bundle({**contents, "rows/two": rows}).send(process.stdin.write)
        folder, found = json.loads(process.stdout.readline())
        assert found == {"one": "1", "rows/two": "3 4"}
        assert Path(folder).parent == tmp_path
        process.stdin.close()
        # Its end is the end of everything: the folder was removed before.
        assert process.stdout.read() == b""
        assert not Path(folder).exists()
        assert process.wait(timeout=60) == 0


def test_a_host_that_is_killed_while_it_unpacks_keeps_nothing(tmp_path: Path) -> None:
    with bootstrap(tmp_path) as process:
        greeting(process)
        assert process.stdin is not None
        process.stdin.write(b'[["part", 100]]\nonly this')
        wait_for(lambda: list(tmp_path.glob("tfdist-*/part")))
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not list(tmp_path.glob("tfdist-*")))


def test_a_python_that_is_not_wanted_just_ends(tmp_path: Path) -> None:
    with bootstrap(tmp_path) as process:
        greeting(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_in_a_folder_is_all_that_an_import_needs(tmp_path: Path) -> None:
    Bundle(library()).write(tmp_path)
    program = "import cloudpickle, pybackend.core.launchers.remote.task as t; print(t.__file__)"
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[0] = {str(tmp_path / LIBRARY)!r}; {program}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert shown.stdout.startswith(str(tmp_path))
