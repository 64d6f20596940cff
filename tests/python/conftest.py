"""Shared by the test modules: a small model, small data, real Spark sessions, and grouping."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

# Before TensorFlow is imported anywhere: the workers' settings, without log lines.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TFDIST_FORK_SERVER"] = "0"
# Marks the processes of this test run; workers inherit it, including Spark's. It has a terminator,
# so that it is not a prefix of another run's mark. A program that a test starts may import this
# file, too: its processes belong to the test's run.
if "PYTEST_CURRENT_TEST" not in os.environ:
    os.environ["TFDIST_TEST_RUN"] = f"{os.getpid()}."

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "forge"))
from threads import stack_of
from warm import OF_SPARK, Forge

# Chooses the exactness cases of a daily run, in all of its processes; a run's header shows it.
SAMPLE_SEED = os.environ.setdefault("TFDIST_SAMPLE_SEED", str(random.randrange(1_000_000)))

# A busy machine must not make a test fail.
hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")


FORGE = Forge()
AT_END = ExitStack()
"""Closed when the last test of this process has ended."""

# Modules that share a Spark session run in one process, one after the other. Any other module
# runs in any free process. The longest come first.
GROUPS = {
    "checks": ["test_checks"],
    "spark": [
        "test_distributor",
        "test_probe",
        "test_routes",
        "test_spark",
        "test_spark_barrier",
        "test_tuning_spark",
    ],
    "frames": [
        "test_dfutil",
        "test_ml",
        "test_particles",
        "test_predicted_columns",
        "test_tfrecords",
        "test_scoring",
        "test_sql_spark",
        "test_tfos",
        "test_tfos_pipeline",
    ],
}
# Modules that start workers or other programs. Others are `fast`, unless they need Keras.
ALONE = [
    "test_verdict",
    "test_audit_suite",
    "test_exact_cases",
    "test_exact",
    "test_slurm",
    "test_script_slurm",
    "test_place",
    "test_connect",
    "test_spark_sessions",
    "test_detached_job",
    "test_sessions",
    "test_fork_server_spark",
    "test_explain",
    "test_standalone",
    "test_kubernetes",
    "test_joined",
    "test_hosts",
    "test_ssh_host",
    "test_driver",
    "test_run_hosts",
    "test_elastic",
    "test_elastic_checkpoints",
    "test_function",
    "test_batches",
    "test_local",
    "test_fork_server",
    "test_gpus",
    "test_scaling",
    "test_parameter_server",
    "test_examples",
    "test_migrating",
    "test_readme",
    "test_callbacks",
    "test_cli",
    "test_collective",
    "test_collective_peers",
    "test_data",
    "test_deploy",
    "test_engine",
    "test_epochs",
    "test_exact_keras",
    "test_exact_random",
    "test_exact_shards",
    "test_exact_together",
    "test_exactness",
    "test_exchange",
    "test_frames",
    "test_hosts_ssh",
    "test_in_process",
    "test_janitor",
    "test_learning_rate",
    "test_local_steps",
    "test_mnist_example",
    "test_notebook",
    "test_object_store",
    "test_planning",
    "test_quiet",
    "test_r_function",
    "test_recovery",
    "test_remote_task",
    "test_reporting",
    "test_rendezvous",
    "test_resources",
    "test_sources",
    "test_sql",
    "test_ssh",
    "test_tensorboard",
    "test_tf_config",
    "test_tracking",
    "test_train",
    "test_transfer",
    "test_tuning",
    "test_warm",
]
_GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}
_RANK = {module: rank for rank, module in enumerate([*_GROUP_OF, *ALONE])}


def group_of(item: pytest.Item) -> str:
    """Return the group of a test: the tests of a group run in the same process."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else _GROUP_OF.get(item.module.__name__, item.module.__name__)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests, and mark them with their groups.

    With a number in TFDIST_TEST_SEED, the tests of each module run in random order.
    """
    if seed := os.environ.get("TFDIST_TEST_SEED"):
        random.Random(int(seed)).shuffle(items)
        items.sort(key=lambda item: item.module.__name__)
    items.sort(key=lambda item: _RANK.get(item.module.__name__, len(_RANK)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if is_fast(item.path):
            item.add_marker("fast")


@functools.cache
def is_fast(path: Path) -> bool:
    """Return whether a module's tests start nothing and do not need Keras (`make test-fast`)."""
    keras = r"^ *(import|from) (keras|tensorflow|replicas)"
    return path.stem not in _RANK and not re.search(keras, path.read_text(), re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Prevent `make test-fast` from importing modules that it does not run."""
    is_module = collection_path.name.startswith("test_") and collection_path.stem != "test_checks"
    is_asked = config.getoption("markexpr") == "fast"
    return (is_asked and is_module and not is_fast(collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Limit garbage collection to the objects of the tests, not those of all modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_distributed(config: pytest.Config) -> bool:
    """Return whether xdist distributes this run's tests, in its controller and its processes."""
    return hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of a distributed run a folder for temporary files, and a forge.

    The controller's folder contains the others, and marks all processes of the run.
    """
    # In a shell's background this process ignores Ctrl-C, and so would the processes of tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_distributed(config):
        folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name
        if not hasattr(config, "workerinput"):
            config.add_cleanup(lambda: end_all(folder.name))
    # For the processes that tests start, which may also import this file.
    os.environ.update(FORGE.variables())


def pytest_report_header() -> str:
    """Show which exactness cases this run tests."""
    return f"sample of the exactness cases: TFDIST_SAMPLE_SEED={SAMPLE_SEED}"


def end_all(folder: str) -> None:
    """End the processes with temporary files in this folder that are still running."""
    for pid, command in marked_processes(f"TMPDIR={folder}"):
        if pid != os.getpid():
            print(f"still runs: {command[:200]!r}", file=sys.stderr)
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fork workers, unless the mark `launcher` makes their start part of the test.

    With False, the mark exempts one test of a module.
    """
    mark = item.get_closest_marker("launcher")
    if sys.platform != "linux" or (mark and False not in mark.args):
        with FORGE.hidden():
            return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", FORGE.popen)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Interrupt a test at its time limit, and again every half minute while it does not end.

    A test that is interrupted once may wait again, without a limit, on its way out: for a thread of
    an executor, or for a process at the end of a `with`.
    """

    def interrupt(number: int, frame: Any) -> None:
        for thread in threading.enumerate():
            print(stack_of(thread), file=sys.stderr)
        pytest.fail(f"Timeout (>{settings.timeout:g} s) from pytest-timeout.")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, 30)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> bool:
    """Stop the timer when a test has ended."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def pytest_unconfigure() -> None:
    """If a thread keeps the process from ending, end it after a minute, and show its stack."""
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the shared Spark of a group when another group begins."""
    if nextitem is not None and group_of(item) != group_of(nextitem):
        stop_shared_spark()


def pytest_sessionfinish() -> None:
    """Stop what tests have shared."""
    stop_shared_spark()
    FORGE.close()
    AT_END.close()


def full(*values: Any, **options: Any) -> Any:
    """Return a parameter of a test that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def build_dense() -> Any:
    """Build a small dense classifier of 8 features and 3 classes; SGD with momentum."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


@pytest.fixture
def dense_model() -> Any:
    """Call `build_dense` with a fixed seed."""
    import keras

    keras.utils.set_random_seed(11)
    return build_dense()


@pytest.fixture(scope="session")
def rows() -> tuple[Any, Any]:
    """Return 500 rows of 8 float32 features and a label from 0 to 2."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(500, 8)).astype("float32"), rng.integers(0, 3, 500)


@pytest.fixture(scope="module")
def trained(request: Any, tmp_path_factory: Any) -> dict[str, Any]:
    """Results of the workers for a module's CASES, of those that this session tests."""
    from replicas import chosen, train_all

    return train_all(chosen(request.module.CASES, request), tmp_path_factory.mktemp("cases"))


def stop_at_end(rank: int) -> Any:
    """A callback that stops (SIGSTOP) one worker when its training has ended."""
    import keras

    class StopAtEnd(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            import os
            import signal

            if os.environ["TFDIST_RANK"] == str(rank):
                os.kill(os.getpid(), signal.SIGSTOP)

    return StopAtEnd()


_SHARED = ExitStack()
_SHARED_SESSIONS: dict[str, Any] = {}


@contextmanager
def shared_spark(master: str) -> Iterator[Any]:
    """A real Spark session that modules share, until one asks for another master."""
    session = _SHARED_SESSIONS.get(master)
    if session is None:
        stop_shared_spark()
        settings = {f"spark__executorEnv__{OF_SPARK}": "1"}
        session = _SHARED.enter_context(_started(master, **settings))
        _SHARED_SESSIONS[master] = session
    yield session
    session.catalog.clearCache()


def stop_shared_spark() -> None:
    """Stop the session, if one runs."""
    _SHARED_SESSIONS.clear()
    _SHARED.close()


@contextmanager
def spark_session(master: str, **settings: str) -> Iterator[Any]:
    """Start a real Spark session for one test, and stop it afterwards."""
    stop_shared_spark()
    with _started(master, **settings) as session:
        yield session


@contextmanager
def _started(master: str, **settings: str) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    FORGE.start()  # for its executors
    builder = (
        SparkSession.builder.master(master)
        .appName("tfdist-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def record_outcome(name: str, shown: float | str, notes: Sequence[str] = ()) -> None:
    """Record the result of a case, if `scripts/exactness.py` started pytest."""
    if path := os.environ.get("TFDIST_EXACTNESS"):
        module = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        line = {"module": Path(module).stem, "name": name, "shown": shown, "notes": list(notes)}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest absolute difference between the weights of two models."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a.astype("float64") - b).max()) for a, b in pairs)


def worker_processes() -> list[int]:
    """Return process ids of the running tfdist workers that this test run started."""
    ours = marked_processes()
    return FORGE.workers() + [pid for pid, command in ours if b"pybackend.core.worker" in command]


def marked_processes(mark: str | None = None) -> list[tuple[int, bytes]]:
    """Return ids and command lines of the processes with this text in their environment.

    None: the mark of this test run. The words of a command line end with zero bytes.
    """
    wanted = (mark or f"TFDIST_TEST_RUN={os.environ['TFDIST_TEST_RUN']}").encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if wanted in (entry / "environ").read_bytes():
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found


@functools.cache
def python_without_blanks() -> str:
    """Return this Python, by a link if its path has blanks, at which some programs split it."""
    if " " not in sys.executable:
        return sys.executable
    root = RLIB.parent
    folder = AT_END.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
    link = Path(folder, "checkout")
    link.symlink_to(root)
    return str(link / Path(sys.executable).relative_to(root))


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    from pybackend.core.machine.processes import read_main_thread

    state = read_main_thread(pid)
    return state is not None and state[0] != "Z"


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Poll a condition of another process that has no event to wait for, until a time limit.

    On a busy machine a process may take long to start or to end.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        pause.wait(0.05)


# Filled by `make r-setup`: reticulate and keras3, for functions written in R.
RLIB = Path(__file__).parents[2] / ".rlib"
# For R processes that tests start.
R_VARIABLES = {
    "R_LIBS": str(RLIB),
    "R_LIBS_USER": "NULL",
    "RETICULATE_PYTHON": sys.executable,
    "SPARKLYR_CONFIG_FILE": str(RLIB.parent / "scripts" / "sparklyr.yml"),
}
needs_r = pytest.mark.skipif(
    not (RLIB / "keras3").is_dir() and os.environ.get("TFDIST_TEST_REQUIRE") != "1",
    reason="NO R PACKAGES: RUN make r-setup",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of a megabyte."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system: {mounted.stderr!r}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
