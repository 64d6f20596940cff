"""Temporary folders of a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from conftest import wait_for

from pybackend.core.machine.janitor import swept_folder

PROGRAM = """
from pybackend.core.machine.janitor import swept_folder
with swept_folder() as folder:
    (folder / "part").write_text("x")
    print(folder, flush=True)
    input()
"""

KILLED = """
import os, pathlib, signal, sys
from pybackend.core.machine.janitor import swept_folder
make = pathlib.Path.mkdir
def die(folder, **options):
    make(folder, **options)
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.mkdir = die
with swept_folder(sys.argv[1]):
    pass
"""


def test_a_folder_goes_with_its_block() -> None:
    with swept_folder() as folder:
        (folder / "inner").mkdir()
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a_folder_goes_with_a_killed_process() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert (folder / "part").exists()
        os.kill(owner.pid, signal.SIGKILL)
    wait_for(lambda: not folder.exists())


def test_a_process_that_is_killed_as_soon_as_there_is_a_folder_leaves_none(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    wait_for(lambda: not list(tmp_path.iterdir()))


def test_a_forked_process_that_holds_the_pipe_does_not_delay_the_end() -> None:
    with swept_folder() as folder:
        fork = os.fork()
        if not fork:
            signal.pause()
            os._exit(0)
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    assert not folder.exists()
