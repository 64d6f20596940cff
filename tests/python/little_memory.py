"""Check model files in a process with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Without TensorFlow, which reserves gigabytes of addresses.
_PROGRAM = """
import pathlib, resource, sys
import h5py, numpy
from pybackend.core.errors import SerializationError
from pybackend.core.model.file_checks import check_file
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20),) * 2)
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        check_file(path, is_intact=True)
    except SerializationError as error:
        assert not isinstance(error.__cause__, MemoryError), path
        print("rejected")
"""


def check_in_little_memory(folder: Path) -> int:
    """Count the files in a folder that a process with 30 MB of memory rejects."""
    shown = subprocess.run(
        [sys.executable, "-c", _PROGRAM, folder],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.count("rejected")
