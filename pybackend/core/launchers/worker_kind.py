"""Description of a worker's start, which all workers of one fork server have in common."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pybackend.core.machine.capacity import list_gpus

# Variables that no import reads; those of sshd and of systemd differ in each connection, so that
# no later call forked its workers (test_later_calls_use_it_and_nothing_is_left).
_OWN = (
    *("TMPDIR", "TFDIST_RANK", "TFDIST_WORKER", "TFDIST_HOST"),
    *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "KRB5CCNAME"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "XDG_SESSION_ID"),
)
# Ends of paths that change when packages are installed, but not with a user's files.
_OF_PACKAGES = (".zip", "-packages")
# logind's cgroup of a connection, which has no limits of its own.
_LOGIN = re.compile(r"/session-\w+\.scope$", re.MULTILINE)
# Variables that TensorFlow's import sets, in this process or in the worker; None: to any value.
_SET_BY_IMPORT = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY": "1",
    "HDF5_PLUGIN_PATH": "disable",
    "TF2_BEHAVIOR": "1",
    "TPU_ML_PLATFORM": "Tensorflow",
    "TPU_ML_PLATFORM_VERSION": None,
}
# GPUs of AMD, and those of Windows.
_DEVICES = (Path("/dev/kfd"), Path("/dev/dxg"))
# Lines of /proc/PID/status.
_INHERITED = ("CapEff", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "Umask")
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "RSS", "STACK")


@dataclass(frozen=True)
class WorkerKind:
    """All that a worker gets at its start: its Python, packages, environment, limits and user."""

    python: str
    variables: Mapping[str, str]
    inherited: Any

    def digest(self) -> str:
        """Return 32 characters that are equal for equal kinds."""
        content = self.python, sorted(self.variables.items()), self.inherited
        return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def describe_worker(variables: Mapping[str, str], python: str) -> WorkerKind | None:
    """Return the kind of worker that this process would start; None if it must not be forked."""
    # What TensorFlow does with a GPU after a fork was not tested.
    numbers = [number for number in list_gpus(variables) if not number.startswith("-")]
    has_gpus = numbers or any(device.exists() for device in _DEVICES)
    if sys.platform != "linux" or has_gpus:
        return None
    try:
        status = Path("/proc/thread-self/status").read_text().splitlines()
        inherited = (
            [line for line in status if line.startswith(_INHERITED)],
            Path("/proc/self/oom_score_adj").read_text(),
            _LOGIN.sub("", Path("/proc/self/cgroup").read_text()),
            [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS],
            (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
            (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
            sorted(os.sched_getaffinity(0)),
            os.stat("/proc/self/ns/pid").st_ino,  # containers may share the namespace of names
            _read_times(variables.get("PYTHONPATH", "").split(os.pathsep)),
        )
    except OSError:
        return None
    fixed = {name: value for name, value in variables.items() if name not in _OWN}
    for name, value in _SET_BY_IMPORT.items():
        if fixed.get(name) == value or value is None:
            fixed.pop(name, None)
    return WorkerKind(python, fixed, inherited)


def _read_times(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return when packages in these places were last installed or removed."""
    places = [path for path in paths if path.endswith(_OF_PACKAGES) and os.path.exists(path)]
    return [(path, os.stat(path).st_mtime_ns) for path in places]
