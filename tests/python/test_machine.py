"""Cores and memory are those of the smallest limit, on systems as they are set up."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybackend.core.machine import is_loopback, is_own_address, own_address, read_boot
from pybackend.core.machine.capacity import (
    count_cores,
    list_control_groups,
    read_free_memory,
    read_memory,
)
from pybackend.core.machine.processes import (
    find_family,
    is_process,
    list_children,
    name_process,
    read_stat,
)

GB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 1048576 kB\n"  # 16, 8, 1 GiB
NONE = "9223372036854771712"
JOB = "system.slice/slurmstepd.scope/job_7"
POD = "kubepods.slice/kubepods-pod1.slice"


def stat(*, inactive: float = 0, active: float = 0, total: bool = False) -> str:
    prefix = "total_" if total else ""
    numbers = {"anon": 5, f"{prefix}inactive_file": inactive, f"{prefix}active_file": active}
    return "".join(f"{name} {int(number * GB)}\n" for name, number in numbers.items())


def group(folder: str, limit: float | None, used: float, **cached: float) -> dict[str, str]:
    """Return the files of a group of version 2; numbers are GiB."""
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}/memory.max": "max\n" if limit is None else f"{int(limit * GB)}\n",
        f"{base}/memory.high": "max\n",
        f"{base}/memory.current": f"{int(used * GB)}\n",
        f"{base}/memory.stat": stat(**cached),
    }


def old_group(folder: str, limit: float | None, used: float, **cached: float) -> dict[str, str]:
    """Return the files of a group of version 1."""
    base = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{base}/memory.limit_in_bytes": NONE if limit is None else str(int(limit * GB)),
        f"{base}/memory.usage_in_bytes": str(int(used * GB)),
        f"{base}/memory.stat": stat(total=True, **cached),
    }


# By system: line of /proc/self/cgroup, files, GiB of memory, GiB that are free.
SYSTEMS: dict[str, tuple[str, dict[str, str], float, float]] = {
    "Debian 12": (
        "0::/user.slice/user-1000.slice/session-1.scope",
        group("user.slice/user-1000.slice/session-1.scope", None, 3),
        16,
        8,
    ),
    "container of version 2, full of rows that were just written": (
        "0::/",
        group("", 7, 6.5, inactive=5, active=1),
        7,
        6.5,
    ),
    "container of version 1, which shows the path of its host": (
        "9:memory:/docker/4f2a\n8:cpu,cpuacct:/docker/4f2a\n0::/docker/4f2a",
        old_group("", 3, 1, inactive=0.5),
        3,
        2.5,
    ),
    "version 1 with version 2 beside it": (
        "4:memory:/a/b\n0::/",
        {**old_group("a/b", 4, 1), **old_group("", None, 9)},
        4,
        3,
    ),
    "slice of systemd": (
        "0::/work.slice/run-1.scope",
        {**group("work.slice/run-1.scope", None, 1), **group("work.slice", 6, 5, inactive=1)},
        6,
        2,
    ),
    "step of Slurm": (
        f"0::/{JOB}/step_0/user/task_0",
        {
            **group(f"{JOB}/step_0/user/task_0", None, 1),
            **group(f"{JOB}/step_0", 5, 1),
            **group(JOB, 4, 1, active=0.5),
        },
        4,
        3.5,
    ),
    "pod with a limit of its own": (
        f"0::/{POD}/cri-1.scope",
        {**group(f"{POD}/cri-1.scope", 6, 1), **group(POD, 2.5, 2)},
        2.5,
        0.5,
    ),
}


def make(root: Path, lines: str, files: dict[str, str]) -> Path:
    found = {"proc/self/cgroup": lines + "\n", "proc/meminfo": MEMINFO, **files}
    for name, text in found.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_smallest_limit_of_memory_wins(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, files, total, free = SYSTEMS[system]
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 30)
    root = make(tmp_path, lines, files)
    assert read_memory(root) == total * GB
    assert read_free_memory(root) == free * GB


def test_swap_space_counts_as_far_as_a_group_may_use_it(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    files = {**group("a", 2, 2), f"{base}/memory.high": str(GB), f"{base}/memory.swap.max": "max"}
    root = make(tmp_path, "0::/a", files)
    assert (read_free_memory(root), read_free_memory(root, swaps=True)) == (0, GB)
    for name, size in (("max", GB), ("current", GB * 3 // 4)):
        (root / base / f"memory.swap.{name}").write_text(str(size))
    assert read_free_memory(root, swaps=True) == GB // 4


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    assert read_free_memory(tmp_path) == float("inf")
    root = make(tmp_path, "0::/a", {"sys/fs/cgroup/a/memory.max": "many"})
    assert read_free_memory(root) == 8 * GB
    assert read_free_memory(root, swaps=True) == 9 * GB


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        (
            "3:cpu,cpuacct:/x",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            "3:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            64,
        ),
    ],
)
def test_a_quota_limits_cores(
    lines: str, files: Any, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    root = make(tmp_path, lines, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert count_cores(root) == cores


@pytest.fixture
def limited() -> Iterator[Path]:
    """Yield a memory control group with a limit of 300 MB, below the one of this process."""
    for version, parent in list_control_groups("memory"):
        folder = parent / f"tfdist-{uuid.uuid4().hex[:8]}"
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / name).write_text(str(300 << 20))
                yield folder
                return
            finally:
                folder.rmdir()
    pytest.skip("this user cannot make a control group: needs root, or a delegated group")


def test_free_memory_in_a_real_group(limited: Path, tmp_path: Path) -> None:
    code = f"""
import os, pathlib, sys
sys.path.insert(0, {os.getcwd()!r})
pathlib.Path({str(limited)!r}, "cgroup.procs").write_text(str(os.getpid()))
from pybackend.core.machine.capacity import read_free_memory, read_memory
print(read_memory() >> 20 if isinstance(read_memory(), int) else int(read_memory()) >> 20)
print(int(read_free_memory()) >> 20)
with open({str(tmp_path / "rows")!r}, "wb") as file:  # fills the page cache
    file.write(bytes(200 << 20))
    os.fsync(file.fileno())
print(int(read_free_memory()) >> 20)
held = bytearray(os.urandom(1 << 20) * 100)
print(int(read_free_memory()) >> 20)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, first, cached, held = map(int, shown.stdout.split())
    assert total == 300
    assert 200 < first <= 300
    assert abs(cached - first) < 30
    assert 60 < first - held < 140


@pytest.mark.full
def test_rows_that_do_not_fit_into_a_real_group_stay_on_disk(limited: Path) -> None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (limited / name).exists():
            (limited / name).write_text(str(1000 << 20))
    code = f"""
import os, pathlib
pathlib.Path({str(limited)!r}, "cgroup.procs").write_text(str(os.getpid()))
import numpy, pybackend
def build():
    import keras
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
rows = numpy.ones((75_000, 1000), "float32"), numpy.ones(75_000, "float32")
in_memory = pybackend.DataOptions(in_memory=True)
pybackend.barrier_train("local", build, rows, workers=1, batch_size=500, data_options=in_memory)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "in_memory: the rows of worker 0 stay on disk, in the same order" in shown.stdout
    assert "worker 0 has 300 MB of rows" in shown.stdout
    assert "epoch 1/1" in shown.stdout


def test_this_process_and_its_children() -> None:
    own = read_stat("self")
    assert (own.parent, own.session) == (os.getppid(), os.getsid(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = name_process(child.pid)
    try:
        assert child.pid in list_children()
        assert {os.getpid(), child.pid} <= find_family(os.getpid())
        assert is_process(name)
        assert not is_process(f"{child.pid}-1")
    finally:
        child.communicate(b"\n")
    assert not is_process(name)


def test_names_and_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.0.1", "::1")))
    assert not any(map(is_loopback, ("node1", "10.0.0.1", "fe80::1%eth0")))
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert not is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")
    assert len(read_boot()) == 36
