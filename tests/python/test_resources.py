"""Resources of each worker: their syntax, division, errors and limits."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybackend import InputError, Resources, WorkerFailedError, barrier_run, barrier_train
from pybackend.core.job.codec import encode
from pybackend.core.job.job import FunctionJob, Job
from pybackend.core.launchers import local
from pybackend.core.launchers.joined.gathering import find_share
from pybackend.core.launchers.joined.place import Place
from pybackend.core.launchers.shares import Machine, find_shortage, share_of_machine
from pybackend.core.launchers.slurm.jobs import SlurmSettings
from pybackend.core.launchers.slurm.launcher import with_resources
from pybackend.core.launchers.watches import MemoryWatch
from pybackend.core.machine.capacity import count_cores, list_gpus, read_meminfo
from pybackend.core.machine.processes import find_family
from pybackend.types import WorkerContext

pytestmark = pytest.mark.launcher

CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("4g", 4 << 30),
        (" 1.5 T ", 3 << 39),
        ("7000000b", 7_000_000),
        (2e9, 2 * 10**9),
    ],
)
def test_memory_is_a_number_or_a_text(memory: Any, expected: int) -> None:
    assert Resources(memory=memory).bytes == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"cpus": 0},
        {"cpus": 1.5},
        {"gpus": -1},
        {"memory": "much"},
        {"memory": "4 PB"},
        {"memory": 0},
        {"memory": True},
        {"memory": float("nan")},
        {"fork_server": "yes"},
    ],
)
def test_wrong_resources_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must be"):
        Resources(**wrong)


def test_resources_travel_with_the_job() -> None:
    job = FunctionJob(2, resources=Resources(cpus=2.0, memory="1g"))  # type: ignore[arg-type]
    assert Job.from_json(encode(job)) == job


def test_only_resources_are_resources() -> None:
    with pytest.raises(InputError, match="`resources` must be a Resources"):
        barrier_run(None, print, resources={"cpus": 2})  # type: ignore[arg-type]


def test_more_workers_than_memory_are_refused_before_they_start(monkeypatch: Any) -> None:
    monkeypatch.setattr(local, "read_free_memory", lambda swaps: 4e9)
    assert 0 < read_meminfo("MemAvailable") <= read_meminfo("MemTotal") < math.inf
    with pytest.raises(
        InputError, match=r"20 workers need .* 5.03 GB of .* has 4 GB free"
    ) as caught:
        barrier_train("local", lambda: None, (np.ones((20, 1)), np.ones(20)), workers=20)
    assert "start no more than about one worker per core" in str(caught.value)
    # The traceback has no frames of this package.
    assert len(traceback.extract_tb(caught.tb)) == 2


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(2, ["0,1", "2,3"]), (1, ["0", "1"]), (0, ["", ""]), (None, ["0", "1"])],
)
def test_gpus_are_divided(gpus: int | None, expected: list[str], tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia1", "nvidia0", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    devices = list_gpus({}, tmp_path)
    # A container may have only some of the machine's; CUDA counts those that it sees.
    assert devices == ["0", "1", "2", "3", "4"]
    shares = share_of_machine(2, resources=Resources(gpus=gpus), gpus=devices)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == expected


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        (Resources(cpus=3), "2 workers need 6 cpus (3 each), but b has 4"),
        (Resources(memory="5GB"), "2 workers need 10 GB of memory (5 GB each), but b has 8 GB"),
        (Resources(gpus=1), "2 workers need 2 gpus (1 each), but b has 1"),
        (Resources(cpus=2, memory="4GB", gpus=0), ""),
        (Resources(), ""),
    ],
)
def test_a_machine_that_has_too_little_is_named(resources: Resources, text: str) -> None:
    found = find_shortage(resources, 2, Machine(4, 8 * 10**9, ["0", "-1"]), "b")
    assert (found or "").partition(":")[0] == text


def test_nothing_starts_where_there_is_too_little(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"2 workers need .* but this machine has"):
        barrier_run("local", print, workers=2, resources=Resources(cpus=count_cores()))
    assert capfd.readouterr().out == ""


def test_a_job_of_slurm_asks_for_what_its_workers_are_to_have() -> None:
    made = with_resources(SlurmSettings(gpus=2), Resources(cpus=3, memory="1GiB"))
    assert (made.cpus, made.gpus, made.options) == (3, 2, {"mem-per-cpu": "342M"})
    with pytest.raises(InputError, match=r"slurm\(cpus=2\) differs"):
        with_resources(SlurmSettings(cpus=2), Resources(cpus=3))
    with pytest.raises(InputError, match="so does 'mem' in `options`"):
        with_resources(SlurmSettings(options={"mem": "4G"}), Resources(memory="1g"))


SCRIPT = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "5,6"}
STEP = {"SLURM_CPUS_PER_TASK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("source", "environment", "resources", "expected"),
    [
        ("TF_CONFIG", {}, Resources(), (None, ["1"])),
        ("TF_CONFIG", {}, Resources(cpus=1, gpus=1), (1, ["1"])),
        ("TF_CONFIG", {}, Resources(gpus=2), "2 workers need 4 gpus (2 each), but"),
        ("TF_CONFIG", SCRIPT, Resources(gpus=2), (None, ["5", "6"])),
        ("TF_CONFIG", SCRIPT, Resources(gpus=3), "2 workers need 6 gpus (3 each), but"),
        ("srun", STEP, Resources(), (3, ["0", "1"])),
        ("srun", STEP, Resources(cpus=2, gpus=0), (2, [])),
        ("srun", STEP, Resources(cpus=4), "2 workers need 8 cpus (4 each), but"),
    ],
)
def test_processes_that_join_share_what_is_not_divided_yet(
    source: str, environment: dict[str, str], resources: Resources, expected: Any
) -> None:
    place = Place(1, 2, "a:1", None, source, ("a:1", "a:2"), local_rank=1, local_size=2)
    machine = Machine(os.cpu_count() or 1, 8 * 10**9, ["0", "1"])
    share = find_share(place, resources, environment, machine)
    if isinstance(expected, str):
        assert share.shortage is not None
        assert share.shortage.startswith(f"{expected} the machine of worker 1 (a:2) has ")
    else:
        cores = expected[0] or max(1, count_cores() // 2)
        assert (share.cores, share.gpus, share.shortage) == (cores, expected[1], None)


def show(context: WorkerContext) -> Any:
    import os

    names = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return [os.environ.get(name) for name in names]


def test_workers_have_what_they_are_to_have() -> None:
    wanted = Resources(cpus=1, memory="2GB", gpus=0)
    values = barrier_run("local", show, workers=2, resources=wanted, verbose=0)
    assert values == [["1", "1", ""]] * 2


def grow(context: WorkerContext, megabytes: int) -> None:
    import subprocess
    import sys

    if context.rank == 1:  # its child processes count, too
        text = f"kept = bytearray({megabytes} << 20); import time; time.sleep(600)"
        subprocess.run([sys.executable, "-c", text], check=False)


def test_a_worker_that_takes_more_memory_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        barrier_run("local", grow, 600, workers=2, resources=Resources(memory="400MB"), verbose=0)
    assert time.monotonic() - began < 120
    error = caught.value
    assert (error.rank, error.exception_type) == (1, "MemoryExceeded")
    pattern = r"worker 1 used \d+ MB of its 400 MB \(resources=Resources\(memory=\.\.\.\)\)"
    assert re.search(pattern, str(error))
    assert "give it more `memory`" in str(error)


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """Start a process, a child in its own session, and an orphan of a child that ended."""
    program = """
import subprocess, sys
run = [sys.executable, "-c", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"]
own = subprocess.Popen(run, start_new_session=True)
left = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
subprocess.run([sys.executable, "-c", left, *run])
print("left", flush=True)
own.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_all_that_a_worker_has_started_counts(family: subprocess.Popen[str]) -> None:
    assert family.stdout is not None
    shown = {family.stdout.readline().strip() for _ in range(3)}
    started = {int(line) for line in shown - {"left"}}
    assert find_family(family.pid) == {family.pid, *started}
    used = MemoryWatch(family.pid, 1).look()
    alone = MemoryWatch(next(iter(started)), 1).look()
    assert used is not None
    assert alone is not None
    assert used > alone > 1 << 20
    assert MemoryWatch(family.pid, None).look() is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Create a control group with 100 MB of memory, for a worker that joins it."""
    group = CGROUP / f"tfdist-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("NO RIGHT TO MAKE A CONTROL GROUP")
    try:
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        yield group
    finally:
        group.rmdir()


# The counters are the machine's: a worker that another test kills at that moment would count.
@pytest.mark.full
def test_the_end_by_the_system_is_told_from_others(small_group: Path) -> None:
    def fill(context: WorkerContext, group: str) -> None:
        if group:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
            bytearray(300 << 20)
        os.kill(os.getpid(), signal.SIGKILL)

    found = []
    for group in (str(small_group), ""):
        with pytest.raises(WorkerFailedError) as caught:
            barrier_run("local", fill, group, workers=1, verbose=0)
        found.append(caught.value.exception_type)
    assert found == ["OutOfMemory", "ProcessDied"]
