"""The local launcher: results, failures, and leftovers."""

from __future__ import annotations

import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cloudpickle import dumps
from conftest import FORGE, build_dense, full, is_running, stop_at_end, wait_for, worker_processes
from contract import System, contract
from failing import KINDS, fail, nothing_left
from leaks import find_in_commands, know_token

from pybackend import (
    InputError,
    Recovery,
    WorkerFailedError,
    barrier_run,
    barrier_train,
    make_tf_config,
)
from pybackend.core.errors import ClusterError, SerializationError, TfdistError
from pybackend.core.job.job import FUNCTION, FunctionJob, make_job
from pybackend.core.job.messages import Order
from pybackend.core.job.value_codec import decode_value
from pybackend.core.launchers import local
from pybackend.core.launchers.child import Child
from pybackend.core.launchers.local import LocalLauncher
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.worker import _failure as worker_failure
from pybackend.types import WorkerContext

pytestmark = pytest.mark.launcher


def folders() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "tfdist-*")))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    before = folders()
    yield
    wait_for(lambda: not worker_processes())
    assert folders() <= before


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setenv("GREETING", "hi")
    before = folders()

    def left() -> list[Any]:
        return [*worker_processes(), *(folders() - before)]

    return System("local", "'local'", variables={"GREETING": "hi"}, left=left)


TestContract = contract(
    "test_an_exception_names_its_worker_and_the_reason",
    "test_a_worker_that_is_killed_is_named_with_the_signal",
    "test_ctrl_c_leaves_nothing_behind",
    "test_nothing_outlives_a_driver_that_is_killed",
)


def test_barrier_run_returns_one_value_per_rank() -> None:
    def work(context: WorkerContext, factor: int) -> Any:
        import os

        return {
            "rank": context.rank,
            "size": context.world_size,
            "config": os.environ["TF_CONFIG"] == context.tf_config,
            "array": np.arange(3) * factor * context.rank,
        }

    values = barrier_run(None, work, 10, workers=2, verbose=0)
    assert [v["rank"] for v in values] == [0, 1]
    assert all(v["size"] == 2 and v["config"] for v in values)
    assert values[1]["array"].tolist() == [0, 10, 20]


def test_roles_are_given_in_the_order_of_the_ranks_and_named_arguments_to_the_function() -> None:
    def work(context: WorkerContext, factor: int, *, offset: int) -> Any:
        import json

        config = json.loads(context.tf_config)
        tasks = {role: len(addresses) for role, addresses in config["cluster"].items()}
        return context.role, context.index, tasks, 2 * factor + offset

    roles = {"worker": 1, "chief": 1, "evaluator": 1}
    values = barrier_run(None, work, 10, offset=1, roles=roles, verbose=0)
    tasks = {"chief": 1, "worker": 1}
    assert values == [
        ("chief", 0, tasks, 21),
        ("worker", 0, tasks, 21),
        ("evaluator", 0, {**tasks, "evaluator": 1}, 21),
    ]


@pytest.mark.full
def test_a_process_of_a_cluster_trains_alone_if_it_says_so(monkeypatch: Any) -> None:
    monkeypatch.setenv("TF_CONFIG", make_tf_config(["10.0.0.1:2222", "10.0.0.2:2222"], 0))
    rows = np.zeros((4, 8), "float32"), np.zeros(4)
    result = barrier_train("local", build_dense, rows, workers=2, verbose=0)
    assert [worker.rows for worker in result.workers] == [2, 2]


@pytest.mark.full
def test_tensorflow_can_use_the_reserved_addresses_and_serves_whoever_connects() -> None:
    """Check in the second half the docs' warning, which another TensorFlow may make obsolete."""

    def work(context: WorkerContext) -> Any:
        import socket
        from pathlib import Path

        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        summed = strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        )
        port = int(context.addresses[context.rank].rpartition(":")[2])
        sockets = Path("/proc/net/tcp6").read_text() + Path("/proc/net/tcp").read_text()
        everywhere = any(f"{zeros * '0'}:{port:04X}" in sockets for zeros in (8, 32))
        with socket.create_connection(("127.0.0.1", port), 30) as stranger:
            # The beginning of HTTP/2, with empty settings; the answer is settings, too.
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, *bytes(5)]))
            answers = stranger.recv(9)[3] == 4
        return strategy.num_replicas_in_sync, float(summed), everywhere, answers

    assert barrier_run("local", work, workers=2, verbose=0) == [(2, 2.0, True, True)] * 2


def test_no_command_line_shows_the_token(monkeypatch: Any) -> None:
    token = know_token(monkeypatch, local)

    def look(context: WorkerContext) -> tuple[list[str], bool, int]:
        mode = os.stat(os.environ["TMPDIR"]).st_mode & 0o777
        return find_in_commands(token), bool(find_in_commands("pybackend")), mode

    assert barrier_run(None, look, workers=2, verbose=0) == [([], True, 0o700)] * 2
    assert token not in repr(Order(token, ()))


@pytest.mark.launcher(False)
def test_a_killed_worker_is_the_cause_and_its_peers_the_consequence(rows: Any) -> None:
    import keras

    class KillRankOne(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            import os
            import signal

            if os.environ["TFDIST_RANK"] == "1" and batch == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerFailedError, match="SIGKILL") as caught:
        barrier_train(
            None, build_dense, rows, workers=3, batch_size=10, callbacks=[KillRankOne()], verbose=0
        )
    assert caught.value.rank == 1
    assert "with `restarts` in `recovery`, it restarts" in str(caught.value)
    assert "PeerLostError" in {f.exception_type for f in caught.value.others}


def test_a_worker_may_fork() -> None:
    def work(context: WorkerContext) -> Any:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2])

    assert barrier_run(None, work, workers=1, verbose=0) == [[1, 2]]


def test_an_end_by_any_signal_is_told() -> None:
    def work(context: WorkerContext) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGRTMIN + 6)

    with pytest.raises(WorkerFailedError, match="killed by signal"):
        barrier_run(None, work, workers=1, verbose=0)


def test_files_of_the_current_directory_do_not_stand_in_for_modules(
    tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('this is not the real queue')")
    monkeypatch.chdir(tmp_path)
    assert barrier_run(None, lambda context: context.rank, workers=1, verbose=0) == [0]


def test_what_a_worker_has_started_ends_with_it() -> None:
    def work(context: WorkerContext) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid

    (pid,) = barrier_run(None, work, workers=1, verbose=0)
    wait_for(lambda: not is_running(pid))


DRIVER = """
import pybackend
def work(context):
    import os, signal
    print("pid", os.getpid(), flush=True)
    signal.pause()
pybackend.barrier_run(None, work, workers=2, verbose=2)
"""


RETURNING = """
import pybackend
def work(context):
    import os, time
    folder = os.environ["TMPDIR"]
    for number in range(3_000):
        os.mkdir(f"{folder}/{number}")
    print("folder", folder, flush=True)
    while len(os.listdir(folder)) > 3_000:
        time.sleep(0.001)
    # The removal of the folder has begun, and this process has no more to do.
pybackend.barrier_run(None, work, workers=1, verbose=2)
"""


def test_a_worker_that_returns_when_its_driver_has_died_leaves_no_folder() -> None:
    driver = subprocess.Popen([sys.executable, "-c", RETURNING], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().split()[-1])
    driver.kill()
    driver.communicate(timeout=60)
    wait_for(lambda: not folder.exists())


def test_a_zip_of_a_spark_session_that_has_ended_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "pybackend-0123456789abcdef.zip"
    with zipfile.ZipFile(old, "w") as packed:
        packed.writestr("pybackend/__init__.py", "raise ImportError('of another session')")
    monkeypatch.setattr(sys, "path", [str(old), *sys.path])
    assert barrier_run(None, lambda context: context.rank, workers=1, verbose=0) == [0]


@pytest.mark.full
@pytest.mark.launcher(False)
def test_epoch_lines_are_printed_as_they_happen(rows: Any, capsys: Any) -> None:
    barrier_train(None, build_dense, rows, workers=2, epochs=2, batch_size=64)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Starting 2 workers")
    # On a busy machine, some phases of the start last.
    lines = [line for line in lines if not line.endswith(" ...")]
    assert lines[0].startswith("epoch 1/2  loss ")
    assert "accuracy" in lines[0]
    assert len(lines) == 2


@pytest.mark.launcher(False)
def test_a_label_out_of_range_is_the_first_line_and_said_once(rows: Any) -> None:
    x, y = rows[0][:40], np.full(40, 3)

    def build() -> Any:  # whose labels are not checked beforehand
        class Own(keras.losses.SparseCategoricalCrossentropy):
            pass

        model = build_dense()
        model.compile("sgd", Own(from_logits=True))
        return model

    with pytest.raises(WorkerFailedError) as caught:
        barrier_train(None, build, (x, y), workers=2, verbose=0)
    first, *others = str(caught.value).splitlines()
    assert "Received a label value of 3" in first
    assert "encode the classes of the label as 0, 1, 2" in others[-1]


@pytest.mark.parametrize("args", [(), (1, 2)])
def test_a_function_that_takes_other_arguments_is_refused_here(args: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"called as fn\(context, \*args\)"):
        barrier_run(None, (lambda: 1) if not args else (lambda context, a: a), *args, workers=2)


@pytest.mark.full
@pytest.mark.launcher(False)
def test_a_worker_that_is_stopped_after_the_last_step_is_named(rows: Any) -> None:
    with pytest.raises(WorkerFailedError, match="stopped") as caught:
        barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            recovery=Recovery(timeout=3),
            callbacks=[stop_at_end(rank=1)],
            verbose=0,
        )
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.1")
    assert caught.value.exception_type == "WorkerStalled"


def test_the_end_of_memory_has_advice() -> None:
    from tensorflow.errors import InternalError, ResourceExhaustedError

    for error in (MemoryError(), ResourceExhaustedError(None, None, "OOM when allocating")):
        assert "lower batch_size" in worker_failure(1, "host", error).advice
    full = "cudaSetDevice() on GPU:0 failed. Status: out of memory"
    failure = worker_failure(1, "host", InternalError(None, None, full))
    assert "TF_FORCE_GPU_ALLOW_GROWTH" in failure.advice
    shared = InternalError(None, None, "aborted by: NCCL: invalid usage")
    assert "NCCL needs one GPU per worker" in worker_failure(1, "host", shared).advice


@pytest.mark.launcher(False)
@pytest.mark.parametrize("how", [full("slow"), "stopped"])
def test_a_slow_worker_is_waited_for_and_a_stopped_one_is_named(rows: Any, how: str) -> None:
    import keras

    class Pause(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            import os
            import signal
            import time

            if os.environ["TFDIST_RANK"] == "0" and batch == 1:
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(4.5)

    def train() -> Any:
        return barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            recovery=Recovery(timeout=3),
            callbacks=[Pause()],
            verbose=0,
        )

    if how == "slow":
        result = train()
        assert result.epochs == 1
        # On a busy machine the other one may be late, too, but not by the whole pause.
        assert result.workers[1].waited > 1
    else:
        with pytest.raises(WorkerFailedError) as caught:
            train()
        assert (caught.value.rank, caught.value.exception_type) == (0, "WorkerStalled")


@pytest.mark.full
def test_a_function_that_is_quiet_for_longer_than_the_timeout_is_left_alone() -> None:
    job = replace(make_job(FunctionJob, {"workers": 1, "verbose": 0}), timeout=0.5)
    outcome = LocalLauncher().launch(job, {FUNCTION: dumps((sleep, (2.0,)))}, {}, print)
    assert decode_value(outcome.reports[0].value) == 2.0


def sleep(context: WorkerContext, seconds: float) -> float:
    import time

    time.sleep(seconds)
    return seconds


def test_a_stopped_worker_ends_with_a_driver_that_is_killed() -> None:
    before = folders()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline().split()[-1]) for _ in range(2)]
    os.kill(pids[0], signal.SIGSTOP)
    driver.kill()
    driver.communicate(timeout=60)
    wait_for(lambda: not any(map(is_running, pids)))
    for folder in folders() - before:
        wait_for(lambda folder=folder: not os.path.exists(folder))


def test_a_group_that_has_failed_can_be_launched_again(tmp_path: Path) -> None:
    """Start again as a restart does: the same launcher, the same job, the same files."""

    def work(context: WorkerContext, marker: str) -> int:
        from pathlib import Path

        if context.rank == 1 and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("only the first time")
        return context.rank

    launcher, job = LocalLauncher(), make_job(FunctionJob, {"workers": 2, "verbose": 0})
    files = {FUNCTION: dumps((work, (str(tmp_path / "failed"),)))}
    with pytest.raises(WorkerFailedError, match="only the first time"):
        launcher.launch(job, files, {}, print)
    for _ in range(2):
        outcome = launcher.launch(job, files, {}, print)
        assert [decode_value(report.value) for report in outcome.reports] == [0, 1]


def test_the_states_of_processes_are_logged_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(FunctionJob, {"workers": 2, "verbose": 0})
    work = dumps((lambda context: os._exit(3) if context.rank else context.all_gather(1), ()))
    with caplog.at_level("DEBUG", "tfdist"), pytest.raises(WorkerFailedError):
        LocalLauncher().launch(job, {FUNCTION: work}, {}, print)
    states = {
        rank: [re.sub(r"PID \d+", "PID", text.partition(": process ")[2]) for text in texts]
        for rank, texts in {
            rank: [r.getMessage() for r in caplog.records if vars(r).get("rank") == rank]
            for rank in (0, 1)
        }.items()
    }
    begin = ["started (PID)", "joined (rank 1 of 2)"]
    assert [text for text in states[1] if text] == [*begin, "ended (status 3)", "closed"]
    assert states[0][:2] == ["started (PID)", "joined (rank 0 of 2)"]
    assert states[0][-1] == "closed"


def test_a_child_cannot_start_twice_and_a_state_that_is_late_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = make_job(FunctionJob, {"workers": 1, "verbose": 0})
    with Child(job, 0, "127.0.0.1", print) as child:
        child.start({FUNCTION: dumps((lambda context: None, ()))})
        with pytest.raises(RuntimeError, match="a child that is STARTED cannot become STARTED"):
            child.start({})
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait().failure is not None
        with caplog.at_level("DEBUG", "tfdist"):
            child.go(Order("token", (child.address,)))
        assert caplog.messages == [
            "worker 0 on 127.0.0.1: process joined, after ended (rank 0 of 1)"
        ]
        child.kill()  # its PID may belong to another process
        assert not child.is_closed
    assert child.is_closed


def test_a_child_passes_a_notice_on_once(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(FunctionJob, {"workers": 1, "verbose": 0})
    with (
        caplog.at_level("DEBUG", "tfdist"),
        Child(job, 0, "127.0.0.1", print, notice=lambda: True) as child,
    ):
        child.start({FUNCTION: dumps((lambda context: None, ()))})
        failure = child.wait().failure
        assert failure is not None
        assert failure.exception_type == "Preempted"
    states = [text.partition(": process ")[2] for text in caplog.messages]
    assert states[1:] == ["notified", "ended (killed by SIGTERM)", "closed"]


def test_the_log_is_printed_with_times() -> None:
    code = "from pybackend.core.job.job import LOGGER; LOGGER.debug('a'); LOGGER.info('b')"
    for level, wanted in {"debug": ["a", "b"], "INFO": ["b"], "": [], "loud": []}.items():
        printed = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TFDIST_LOG": level},
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        ).stderr
        pattern = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} tfdist (?:DEBUG|INFO): (.)$"
        assert re.findall(pattern, printed, re.MULTILINE) == wanted
        assert len(printed.splitlines()) == len(wanted)


@pytest.mark.full
@pytest.mark.launcher(False)
def test_runs_that_fail_one_after_the_other_leave_nothing(tmp_path: Path) -> None:
    FORGE.start()
    fail("kill")  # made once for all runs
    mark = f"TFDIST_TEST_RUN={os.environ['TFDIST_TEST_RUN']}"
    with nothing_left(mark, tmp_path):
        for kind in [*KINDS, "kill", "exit with status 0", "raise in a function"]:
            fail(kind)


def test_a_folder_for_temporary_files_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    named = re.escape(f"{gone}, the folder for temporary files (TMPDIR), no longer exists: ")
    with pytest.raises(ClusterError, match=named):
        barrier_train("local", build_narrow, (np.zeros((4, 8)), np.zeros(4)), workers=2)
    with pytest.raises(ClusterError, match=named), swept_folder():
        pass
    # Of a worker, while it runs: its folder is its TMPDIR.
    monkeypatch.setenv("TMPDIR", str(gone))
    error = SerializationError("Keras cannot write the model")
    advice = worker_failure(1, "host", error).advice
    assert advice.startswith(f"the worker's folder, {gone}, was deleted while the worker ran: set ")


@pytest.mark.full
@pytest.mark.parametrize("where", ["driver", "worker"])
def test_a_full_disk_is_named(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, where: str, tmp_path_factory: Any
) -> None:
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    x, y = np.zeros((100_000, 8), "float32"), np.zeros(100_000, int)
    data: Any = (x, y)
    if where == "worker":
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = str(tmp_path_factory.mktemp("rows") / "rows.parquet")
        pq.write_table(pa.table({"a": x[:, 0], "label": y}), data)
    arguments = {"label": "label"} if where == "worker" else {}
    with pytest.raises(
        TfdistError, match=r"the disk that contains .* is full: .* of 1\.05 MB are free"
    ) as caught:
        barrier_train(None, build_narrow, data, workers=2, verbose=0, **arguments)
    assert str(small_disk) in str(caught.value)
    assert "TMPDIR" in str(caught.value)
    assert list(small_disk.iterdir()) == []


def build_narrow() -> Any:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


_CALLS_AT_THE_LIMIT = """
import os, resource, sys, time
import pybackend

def count():
    return len(os.listdir("/proc/self/fd"))

def call(context):
    return context.rank

pybackend.barrier_run("local", call, workers=1, verbose=0)
usual, most = count(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for spare in map(int, sys.argv[1:]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(spare):
            os.close(held.pop())
    try:
        print(spare, pybackend.barrier_run("local", call, workers=2, verbose=0))
    except pybackend.ClusterError as error:
        print(spare, error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    for descriptor in held:
        os.close(descriptor)
    for _ in range(100):  # readers of ended workers close their pipes
        if count() <= usual:
            break
        time.sleep(0.1)
    print(count() - usual, "left")
"""


def test_a_session_without_free_descriptors_says_so_and_leaks_none(tmp_path: Path) -> None:
    spares = ["0", "1", "2", "4", "7", "11", "13", "40"]
    script = tmp_path / "limit.py"
    script.write_text(_CALLS_AT_THE_LIMIT)
    before = folders()
    done = subprocess.run(
        [sys.executable, str(script), *spares], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    left = [int(line.removesuffix(" left")) for line in lines[1::2]]
    # subprocess.Popen before Python 3.11.4 does not close a pipe if it cannot have another one.
    lost = 2 * len(spares) if sys.version_info < (3, 11, 4) else 0
    assert len(left) == len(spares)
    assert left[0] == 0
    assert max(left) <= lost
    for line in lines[:8:2]:
        assert "too many open files: the limit of this process is 128" in line
    assert lines[-2] == "40 [0, 1]"
    assert folders() <= before


@pytest.mark.parametrize("ends", ["well", "killed"])
def test_a_daemon_that_a_function_has_started_ends_with_it(ends: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def work(context: WorkerContext) -> None:
        program = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
        program += "open(sys.argv[1] + '~', 'w').write(str(os.getpid())); "
        program += "os.replace(sys.argv[1] + '~', sys.argv[1]); time.sleep(600)"
        subprocess.run([sys.executable, "-c", program, str(note)], check=True, close_fds=True)
        wait_for(note.exists)
        if ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    if ends == "killed":
        with pytest.raises(WorkerFailedError, match="SIGKILL"):
            barrier_run("local", work, workers=1, verbose=0)
    else:
        barrier_run("local", work, workers=1, verbose=0)
    assert not is_running(int(note.read_text()))
