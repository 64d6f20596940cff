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


IN_ARCHIVE = """
import sys
sys.path[0] = sys.argv[1]
import inspect, os, traceback
import cloudpickle
import pybackend.core.launchers.remote.task as task
from pybackend.core.data.mnist_file import find_mnist
from pybackend.core.errors import InputError
from pybackend.core.launchers.package_files import pack_package, read_sources
from pybackend.core.model import file_checks

print(task.__file__)
assert inspect.getsource(file_checks._walk).startswith("def _walk")  # a program is made of it
assert find_mnist(None, 5, lambda: None).subset
assert len(read_sources()) > 100 and len(pack_package()) > 1 << 20  # for other hosts
try:
    find_mnist("/none", None, None)
except InputError:
    traceback.print_exc()
"""


def test_a_bundle_in_a_folder_is_all_that_an_import_needs(tmp_path: Path) -> None:
    Bundle(library()).write(tmp_path)
    archive = tmp_path / LIBRARY
    ran = subprocess.run(
        [sys.executable, "-c", IN_ARCHIVE, str(archive)],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={"KERAS_HOME": str(tmp_path)},
    )
    assert ran.stdout.startswith(str(archive))
    # Not the files of this machine, which another one may not have, or of another release.
    assert 'File "pybackend.zip/pybackend/core/data/mnist_file.py"' in ran.stderr
    assert "raise InputError(" in ran.stderr


def test_threads_pack_one_archive() -> None:
    # The keepers of hosts are compared by it.
    program = (
        "from concurrent.futures import ThreadPoolExecutor as Threads;"
        "from pybackend.core.launchers.package_files import pack_package;"
        "print(len(set(Threads(3).map(lambda _: pack_package(), range(3)))))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.split() == [b"1"]
