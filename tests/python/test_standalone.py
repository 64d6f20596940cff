"""Three hosts of a standalone Spark cluster: features and typical faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import pytest
from conftest import build_dense, largest_difference, needs_r, worker_processes
from killing import KillAt
from pythons import python_without
from standalone import CONNECT_IN_R, HOSTS, Cluster, executors, standalone_cluster

import pybackend
from pybackend import ClusterError, Recovery, WorkerFailedError, barrier_run, barrier_train
from pybackend.core.launchers.spark.stage import TOO_LONG

pytestmark = [pytest.mark.full, pytest.mark.timeout(420)]

# For a busy machine, if there is no other end.
PATIENCE = 240.0
# Usually 3 s, of which Spark gives an ending task 2; otherwise a loss is noticed only after
# minutes.
ENDED_WITHIN = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path_factory.mktemp("standalone") / "work") as running:
        yield running


@pytest.fixture(scope="module")
def spark(cluster: Cluster) -> Iterator[Any]:
    with cluster.session() as session:
        yield session


@pytest.fixture(scope="module")
def data(rows: Any) -> tuple[Any, Any]:
    return rows[0][:90], rows[1][:90]


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> float:
    """Wait for an action of another process; return its duration."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"it did not happen within {seconds:g} s"
        time.sleep(0.05)
    return time.monotonic() - began


def endless(started: Path) -> dict[str, Any]:
    """Return arguments of a training that writes a file when it starts, and does not end."""

    def touch(batch: int, logs: Any) -> None:
        started.touch()

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=touch)]
    return {"workers": HOSTS, "epochs": 10**6, "verbose": 0, "callbacks": callbacks}


def test_arrays_give_the_weights_of_this_machine_from_three_hosts_one_of_which_is_lost(
    cluster: Cluster, spark: Any, data: Any, capsys: Any, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"workers": HOSTS, "epochs": 2, "batch_size": 20, "seed": 5}
    there = barrier_train(spark, build_dense, data, **arguments)
    assert "epoch 2/2" in capsys.readouterr().out  # live, from another host
    (tmp_path / "mark.victim").write_text(str(executors(cluster.hosts[1])[0]))
    again = barrier_train(
        spark,
        build_dense,
        data,
        **arguments,
        callbacks=[KillAt(0, 1, 0, tmp_path / "mark")],
        recovery=Recovery(str(tmp_path / "kept"), every=1, restarts=1),
    )
    said = capsys.readouterr().out
    assert "restarting from the newest checkpoint (restart 1 of 1)" in said
    # For one of them: the worker trains on while its executor is dying.
    assert "resumes from the checkpoint of epoch" in said
    assert again.history == there.history
    assert again.workers[0].weights_sha256 == there.workers[0].weights_sha256
    here = barrier_train(None, build_dense, data, **arguments)
    assert largest_difference(there.model, here.model) <= 1e-6
    assert {w.host for w in there.workers} == {host.seen_as for host in cluster.hosts}
    assert len({w.pid for w in there.workers}) == HOSTS
    assert len({w.weights_sha256 for w in there.workers}) == 1
    until(lambda: not cluster.leftovers())


def test_a_dataframe_with_fewer_rows_than_hosts_is_every_row_once(
    spark: Any, data: Any, dense_model: Any
) -> None:
    x, y = data[0][:2], data[1][:2]
    frame = spark.createDataFrame(
        [([float(n) for n in a], int(b)) for a, b in zip(x, y, strict=True)],
        "x array<double>, label int",
    )
    result = barrier_train(
        spark, dense_model, frame, workers=HOSTS, epochs=2, batch_size=2, verbose=0
    )
    assert sum(w.rows for w in result.workers) == 2
    assert 0 in [w.rows for w in result.workers]
    # One step with all rows in each epoch, so that the order of Spark's rows does not matter.
    dense_model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(dense_model, result.model) <= 1e-6


def test_a_parameter_server_on_another_host_holds_what_a_third_one_trains(
    spark: Any, data: Any, dense_model: Any, cluster: Cluster
) -> None:
    x, y = data
    frame = spark.createDataFrame(
        [([float(n) for n in a], int(b)) for a, b in zip(x, y, strict=True)],
        "x array<double>, label int",
    )
    result = barrier_train(
        spark,
        dense_model,
        frame,
        exchange=pybackend.ParameterServer(),
        workers=1,
        epochs=2,
        verbose=0,
    )
    assert {w.host for w in result.workers} == {host.seen_as for host in cluster.hosts}
    assert sum(w.rows for w in result.workers) == 90
    assert result.workers[0].steps == int(result.model.optimizer.iterations.numpy()) == 2 * 3
    assert result.history["loss"][1] < result.history["loss"][0]


def test_a_firewall_between_two_hosts_is_named_before_rows_are_moved(
    cluster: Cluster, spark: Any, data: Any
) -> None:
    if cluster.hosts[0].port is None:
        pytest.skip("WARNING, not tested: a firewall needs network namespaces")
    one, two = (cluster.hosts[number].address for number in (0, 1))
    message = ""
    for _ in range(2):  # Spark itself may wait for a host that it cannot reach: then it logs this
        began = time.monotonic()
        with cluster.firewall(0, 1), pytest.raises(ClusterError) as caught:
            barrier_train(spark, build_dense, data, workers=HOSTS, verbose=0)
        message = str(caught.value)
        if not message.startswith(TOO_LONG):
            assert time.monotonic() - began < 80  # Spark's own transfers wait for minutes
            break
    assert any(
        f"on {a} cannot reach worker" in message and f"at {b}:" in message
        for a, b in ((one, two), (two, one))
    )
    assert "No route to host" in message or "timed out" in message
    for part in ("firewall", "net.ipv4.ip_local_port_range", "tfdist doctor --master"):
        assert part in message


def test_the_doctor_names_the_two_hosts_of_a_firewall(cluster: Cluster) -> None:
    if cluster.hosts[0].port is None:
        pytest.skip("WARNING, not tested: a firewall needs network namespaces")
    settings = {
        "spark.driver.host": cluster.driver,
        "spark.driver.bindAddress": cluster.driver,
        "spark.cores.max": str(HOSTS),
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.pyspark.python": sys.executable,
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = [sys.executable, "-m", "pybackend", "doctor", "--workers", str(HOSTS), *conf]
    with cluster.firewall(0, 1):
        told = subprocess.run(
            [*command, "--master", cluster.master],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )
    assert told.returncode == 1, told.stdout + told.stderr
    one, two = (cluster.hosts[number].address for number in (0, 1))
    problems = [line for line in told.stdout.splitlines() if line.startswith("problem:")]
    assert len(problems) == 2, told.stdout + told.stderr
    assert all(one in line and two in line and "a firewall between" in line for line in problems), (
        problems
    )
    assert "1 slot here, which can reach all other workers" in told.stdout


JOIN = """
import sys
from pybackend.core.collective import join_mesh
from pybackend.core.errors import ClusterError
from pybackend.core.net.rendezvous import listen
peers, rank = sys.argv[2:], int(sys.argv[1])
try:
    with listen(peers[rank].partition(":")[0]) as server:
        join_mesh(server, peers, rank, "token", 300.0)
except ClusterError as error:
    print(error)
"""


def test_a_worker_that_cannot_reach_another_says_so(cluster: Cluster) -> None:
    if cluster.hosts[0].port is None:
        pytest.skip("WARNING, not tested: a firewall needs network namespaces")
    peers = [f"{host.address}:40000" for host in cluster.hosts]
    began = time.monotonic()
    with cluster.firewall(0, 1):
        shown = subprocess.run(
            [*cluster.hosts[0].enter, sys.executable, "-c", JOIN, "0", *peers[:2]],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": str(Path(pybackend.__file__).parents[1])},
        ).stdout
    assert time.monotonic() - began < 100  # not the 300 s timeout of a silent worker
    assert f"worker 0 on {cluster.hosts[0].address} cannot reach worker 1 at {peers[1]} (" in shown


@contextmanager
def other_python(cluster: Cluster, spark: Any, folder: Path, without: str) -> Iterator[Path]:
    """Run workers on the last host in an environment without the packages of a pattern."""
    python_without(folder, without)
    (site,) = folder.glob("env/lib/python*/site-packages")
    wrapper = folder / "python"
    wrapper.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        [ "$SPARK_LOCAL_IP" = {cluster.hosts[-1].address} ] && exec {folder}/env/bin/python "$@"
        exec {sys.executable} "$@"
        """)
    )
    wrapper.chmod(0o755)
    context, before = spark.sparkContext, spark.sparkContext.pythonExec
    context.pythonExec = str(wrapper)
    try:
        yield site
    finally:
        context.pythonExec = before


@pytest.mark.launcher
def test_another_version_of_tensorflow_on_one_host_is_named(
    cluster: Cluster, spark: Any, data: Any, tmp_path: Path
) -> None:
    with other_python(cluster, spark, tmp_path, "tensorflow*.dist-info") as site:
        fake = site / "tensorflow_cpu-2.20.0.dist-info"
        fake.mkdir()
        (fake / "METADATA").write_text("Name: tensorflow-cpu\nVersion: 2.20.0\n")
        with pytest.raises(WorkerFailedError) as caught:
            barrier_train(spark, build_dense, data, workers=HOSTS, verbose=0)
    odd = caught.value
    assert (odd.host, odd.exception_type) == (cluster.hosts[-1].seen_as, "ClusterError")
    message = str(odd).splitlines()[0]
    assert f"worker {odd.rank} on {odd.host} has TensorFlow 2.20.0, worker " in message
    assert "install the same version on every host" in message
    assert "PYSPARK_PYTHON" in message


@pytest.mark.launcher
def test_a_host_without_tensorflow_is_named_with_its_python(
    cluster: Cluster, spark: Any, data: Any, tmp_path: Path
) -> None:
    with (
        other_python(cluster, spark, tmp_path, "tensorflow*"),
        pytest.raises(WorkerFailedError) as caught,
    ):
        barrier_train(spark, build_dense, data, workers=HOSTS, verbose=0)
    message = str(caught.value).splitlines()[0]
    python = tmp_path / "env/bin/python"
    assert f"on {cluster.hosts[-1].seen_as} has no TensorFlow: its Python is {python}" in message
    assert f"`{python} -m pip install tensorflow==" in message


def test_ctrl_c_ends_the_workers_and_the_session_lives_on(
    cluster: Cluster, spark: Any, data: Any, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    interrupted: list[float] = []

    def interrupt() -> None:
        until(started.exists)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        barrier_train(spark, build_dense, data, **endless(started))
    until(lambda: not worker_processes())
    assert time.monotonic() - interrupted[0] < ENDED_WITHIN
    thread.join()
    until(lambda: not cluster.leftovers())
    assert barrier_run(spark, lambda context: context.rank, workers=HOSTS) == [0, 1, 2]


def test_a_lost_executor_is_named_and_nothing_is_tried_again(
    cluster: Cluster, spark: Any, data: Any, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    killed: list[float] = []

    def kill() -> None:
        until(started.exists)
        killed.append(time.monotonic())
        for executor in executors(cluster.hosts[0]):
            os.kill(executor, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerFailedError, match=r"Spark lost executor \d.*137") as caught:
        barrier_train(spark, build_dense, data, **endless(started))
    thread.join()
    assert caught.value.exception_type == "ExecutorLost"
    assert caught.value.host == cluster.hosts[0].seen_as
    assert "memoryOverhead" in str(caught.value)
    until(lambda: not worker_processes())
    assert time.monotonic() - killed[0] < ENDED_WITHIN
    # Spark starts another executor, and the session can be used.
    assert barrier_run(spark, lambda context: context.rank, workers=HOSTS) == [0, 1, 2]


DRIVER = """
import sys
from pathlib import Path
from killing import KillAt
from pythons import python_without
from standalone import Cluster
from test_standalone import build_dense, endless
import numpy as np, pybackend
cluster = Cluster(sys.argv[1], sys.argv[2], (), Path(sys.argv[3]))
x, y = np.ones((30, 8), "float32"), np.zeros(30, int)
with cluster.session() as session:
    pybackend.barrier_train(session, build_dense, (x, y), **endless(Path(sys.argv[4])))
"""


@pytest.mark.launcher
def test_a_driver_that_dies_leaves_no_worker_and_no_folder(
    cluster: Cluster, spark: Any, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    paths = [str(Path(__file__).parent), str(Path(pybackend.__file__).parents[1])]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.master, cluster.driver, cluster.work, started],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    ) as driver:
        try:
            until(lambda: started.exists() or driver.poll() is not None)
            assert len(worker_processes()) == HOSTS
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # its JVM too, as when a host fails
    assert until(lambda: not worker_processes()) < ENDED_WITHIN
    assert until(lambda: not cluster.leftovers()) < ENDED_WITHIN
    assert barrier_run(spark, lambda context: context.rank, workers=HOSTS) == [0, 1, 2]


IN_R = """
inputs <- 4L
model_fn <- function() {
  keras <- reticulate::import("keras")
  input <- keras$Input(reticulate::tuple(inputs))
  model <- keras$Sequential(list(input, keras$layers$Dense(3L)))
  model$compile("sgd", keras$losses$SparseCategoricalCrossentropy(from_logits = TRUE))
  model
}
killer <- reticulate::import_from_path("killing", Sys.getenv("TEST_MODULES"))
mark <- file.path(getwd(), "mark")
train <- function(...) {
  tfdist::barrier_train(
    sc,
    model_fn = model_fn,
    data = iris,
    label = "Species",
    workers = 3,
    epochs = 2,
    verbose = 1,
    seed = 1,
    callbacks = list(killer$KillAt(1L, 1L, 0L, mark)),
    ...
  )
}
again <- train(recovery = tfdist::recovery("kept", every = 1, restarts = 1))
stopifnot(file.exists(mark))
fit <- train()
weights <- lapply(list(fit, again), function(one) one$model$get_weights())
cat("equal", identical(weights[[1]], weights[[2]]), identical(fit$history, again$history), "\n")
cat("hosts", fit$workers$host, "\\n")
cat("rows", fit$workers$rows, "\\n")
sparklyr::spark_disconnect(sc)
"""


@needs_r
@pytest.mark.timeout(600)
@pytest.mark.launcher
def test_sparklyr_runs_functions_of_r_on_three_hosts_and_a_worker_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    ended = subprocess.run(
        ["Rscript", "-e", CONNECT_IN_R + IN_R],
        cwd=tmp_path,
        env={
            **os.environ,
            **cluster.variables_for_r(),
            "TEST_MODULES": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    shown = ended.stdout
    hosts = next(line for line in shown.splitlines() if line.startswith("hosts"))
    assert set(hosts.split()[1:]) == {host.seen_as for host in cluster.hosts}
    assert "epoch 1/2" in shown  # live
    assert "SIGKILL; restarting from the newest checkpoint (restart 1 of 1)" in shown
    assert "equal TRUE TRUE" in shown
    assert "rows 50 50 50" in shown
    until(lambda: not cluster.leftovers())
