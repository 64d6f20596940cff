"""Results of a probe: real workers here and on Spark, broken peers, and its messages about them."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from conftest import shared_spark
from threads import Threads

from pybackend import InputError, barrier_run
from pybackend.doctor.machine import inspect_machine
from pybackend.doctor.probe import find_problems, group_by_host, probe
from pybackend.doctor.reach import PATIENCE_SECONDS, REFUSED, TIMED_OUT, try_peers
from pybackend.doctor.spark_master import check_master

pytestmark = pytest.mark.launcher

DRIVER = {**inspect_machine(), "python_version": "3.11.7", "keras": "3.15.1"}


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local-cluster[2,1,1024]") as session:
        yield session


def reserved() -> socket.socket:
    """Reserve a port like launchers: bound, and not listening."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def address(held: socket.socket) -> str:
    return "{}:{}".format(*held.getsockname())


def test_workers_of_this_machine() -> None:
    report = probe("local[3]")
    assert report["problems"] == []
    assert report["verdict"] == "ready: 3 workers on 1 host, and each can reach all others"
    assert [worker["rank"] for worker in report["workers"]] == [0, 1, 2]
    for worker in report["workers"]:
        assert worker["reaches"]
        assert worker["python"] == sys.executable
        assert worker["keras"] == version("keras")
        assert worker["host"] == "127.0.0.1"
    (host,) = report["hosts"]
    assert (host["name"], host["slots"]) == (socket.gethostname(), 3)


@pytest.mark.full
def test_how_many_workers() -> None:
    assert len(probe(None)["workers"]) == 2
    assert probe("local", workers=1)["verdict"] == "ready: 1 worker on 1 host"
    with pytest.raises(InputError, match="`workers`"):
        probe("local", workers=0)
    with pytest.raises(InputError, match="`spark`"):
        probe("yarn")


@pytest.mark.full
def test_every_slot_of_a_cluster(spark: Any) -> None:
    report = probe(spark)
    assert report["problems"] == []
    assert len(report["workers"]) == 2
    assert all(worker["reaches"] for worker in report["workers"])
    assert len(probe(spark, workers=1)["workers"]) == 1


def test_too_many_workers_are_a_problem(spark: Any) -> None:
    report = probe(spark, workers=3)
    assert report["workers"] == []
    assert "at most 2 tasks" in report["problems"][0]
    assert report["verdict"] == "not ready: fix the problem above, then probe again"


def test_executors_whose_python_has_nothing_are_named(
    spark: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    bare = tmp_path / "python"  # runs without the packages of this environment
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    report = probe(spark)
    assert report["workers"] == []
    (problem,) = report["problems"]
    for name in ("TensorFlow", "Keras", "numpy", "cloudpickle", "pyarrow"):
        assert f"{name} is not installed" in problem
    assert f" for {sys.executable} on {socket.gethostname()}: run " in problem


def test_workers_do_not_import_tensorflow() -> None:
    def loaded_modules(context: Any) -> list[str]:
        import sys

        from pybackend.doctor.reach import inspect_worker

        inspect_worker(context)
        return [name for name in ("tensorflow", "keras", "h5py") if name in sys.modules]

    assert barrier_run(None, loaded_modules, workers=1, verbose=0) == [[]]


def test_all_reach_each_other_though_one_begins_late() -> None:
    held = [reserved() for _ in range(3)]
    addresses = [address(one) for one in held]
    try:
        with Threads() as pool:
            early = [pool.submit(try_peers, addresses, rank) for rank in (0, 1)]
            # Neither can have ended: each has one more to reach.
            assert not any(future.done() for future in early)
            late = try_peers(addresses, 2)
            found = [future.result(PATIENCE_SECONDS + 5) for future in early] + [late]
    finally:
        for one in held:
            one.close()
    assert found == [{"unreached": [], "listen_error": None}] * 3


def test_a_worker_that_never_listens_is_refused_within_the_limit() -> None:
    with reserved() as one, reserved() as silent:
        began = time.monotonic()
        found = try_peers([address(one), address(silent)], 0, patience=0.5)
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert found == {"unreached": [{"rank": 1, "reason": REFUSED}], "listen_error": None}


@pytest.mark.full
def test_a_worker_that_listens_elsewhere_is_refused_and_reaches_the_others() -> None:
    with reserved() as one, reserved() as two, reserved() as elsewhere:
        announced, true = ([address(one), address(x)] for x in (two, elsewhere))
        with Threads() as pool:
            other = pool.submit(try_peers, true, 1, patience=5)
            found = try_peers(announced, 0, patience=2)
            assert found["unreached"] == [{"rank": 1, "reason": REFUSED}]
            assert other.result(30) == {"unreached": [], "listen_error": None}


def test_a_host_that_swallows_packets_times_out() -> None:
    with socket.socket() as full, reserved() as own:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # Linux drops connections when the queue is full
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        found = try_peers([address(own), address(full)], 0, patience=0.5)
        for one in waiting:
            one.close()
    assert found["unreached"] == [{"rank": 1, "reason": TIMED_OUT}]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, reserved() as other:
        found = try_peers([address(taken), address(other)], 0, patience=0.2)
    assert found["listen_error"] == "address already in use"


def worker(rank: int, host: str, **others: Any) -> dict[str, Any]:
    """Return the report of a worker of a real cluster, without the cluster."""
    return {
        **DRIVER,
        "rank": rank,
        "host": host,
        "hostname": f"node{host[-1]}",
        "address": f"{host}:4100{rank}",
        "ports": [32768, 60999],
        "unreached": [],
        "listen_error": None,
        "reaches": True,
        **others,
    }


def missed(rank: int, reason: str = TIMED_OUT) -> dict[str, Any]:
    return {"rank": rank, "reason": reason}


def test_a_good_cluster_has_no_problems() -> None:
    cluster = [worker(0, "10.0.0.1"), worker(1, "10.0.0.1"), worker(2, "10.0.0.2")]
    assert find_problems(cluster, DRIVER, on_spark=True) == []


def test_different_versions() -> None:
    cluster = [
        worker(0, "10.0.0.1"),
        worker(1, "10.0.0.2"),
        worker(2, "10.0.0.3", tensorflow="2.20.0"),
    ]
    number = DRIVER["tensorflow"]
    assert find_problems(cluster, DRIVER, on_spark=True) == [
        f"hosts have different versions of TensorFlow: {number} on 10.0.0.1, 10.0.0.2; 2.20.0 on "
        "10.0.0.3: install the same version on all of them"
    ]


def test_versions_unlike_the_driver() -> None:
    cluster = [
        worker(0, "10.0.0.1", keras="3.14.0"),
        worker(1, "10.0.0.2", keras="3.14.0", python_version="3.12.1"),
    ]
    assert find_problems(cluster, DRIVER, on_spark=True) == [
        "Python 3.12 on 10.0.0.2 differs from the driver's 3.11, but functions are sent as code "
        "that runs only on the same minor version: set PYSPARK_PYTHON to a Python 3.11 that exists "
        "there",
        "the driver has Keras 3.15.1 and the workers have 3.14.0: install the same version on "
        "all of them, because models are sent between them as files",
    ]
    assert find_problems(cluster[:1], {**DRIVER, "keras": None}, on_spark=True) == []
    (other,) = find_problems(
        [worker(0, "10.0.0.1", python_version="3.11.2")], DRIVER, on_spark=True
    )
    assert (
        "is Python 3.11.2 on the workers and 3.11.7 here: they load a different libpython" in other
    )


def test_missing_and_old_packages() -> None:
    python = "/usr/bin/python3"
    cluster = [
        worker(0, "10.0.0.1"),
        worker(1, "10.0.0.2", python=python, tensorflow=None, h5py="3.1.0"),
        worker(2, "10.0.0.2", python=python, tensorflow=None, h5py="3.1.0"),
        worker(3, "10.0.0.3", pyarrow="14.0.0"),
    ]
    assert find_problems(cluster, DRIVER, on_spark=True) == [
        "TensorFlow is not installed, h5py 3.1.0 is too old for /usr/bin/python3 on 10.0.0.2: run "
        "/usr/bin/python3 -m pip install 'tensorflow>=2.18' 'h5py>=3.10' there",
        f"pyarrow 14.0.0 is too old for {sys.executable} on 10.0.0.3: run {sys.executable} "
        "-m pip install 'pyarrow>=15' there",
    ]
    assert len(find_problems(cluster, DRIVER, on_spark=False)) == 1


def test_hosts_that_do_not_reach_each_other() -> None:
    cluster = [
        worker(0, "10.0.0.1"),
        worker(1, "10.0.0.1"),
        worker(2, "10.0.0.3", unreached=[missed(0), missed(1)]),
        worker(3, "10.0.0.4", unreached=[missed(2, REFUSED)]),
        worker(4, "10.0.0.5", unreached=[missed(3, "no route to host")], ports=None),
    ]
    assert find_problems(cluster, DRIVER, on_spark=True) == [
        "worker 2 on 10.0.0.3 cannot reach worker 0 at 10.0.0.1:41000 (timed out after 3 s); the "
        "same for 1 more pair of workers there: a firewall between the two hosts: open the TCP "
        "ports 32768-60999 of 10.0.0.1 to 10.0.0.3, or set SPARK_LOCAL_IP on 10.0.0.1 to an "
        "address that 10.0.0.3 can reach",
        "worker 3 on 10.0.0.4 cannot reach worker 2 at 10.0.0.3:41002 (refused): a firewall "
        "rejects it, or the address belongs to another machine (a container, or a host behind "
        "NAT): open the TCP ports 32768-60999 of 10.0.0.3 to 10.0.0.4, or set SPARK_LOCAL_IP on "
        "10.0.0.3 to an address that 10.0.0.4 can reach",
        "worker 4 on 10.0.0.5 cannot reach worker 3 at 10.0.0.4:41003 (no route to host): the "
        "network between the two hosts: fix the route, or set SPARK_LOCAL_IP on 10.0.0.4 to an "
        "address that 10.0.0.5 can reach",
    ]


def test_workers_of_one_host_and_many_pairs() -> None:
    alone = [worker(0, "10.0.0.1", unreached=[missed(1)]), worker(1, "10.0.0.1", ports=None)]
    (problem,) = find_problems(alone, DRIVER, on_spark=True)
    assert problem.endswith("a firewall on that host: open all TCP ports to its own workers")
    many = [worker(0, "10.0.0.1")]
    many += [worker(n, f"10.0.1.{n}", unreached=[missed(0)]) for n in range(1, 15)]
    many_problems = find_problems(many, DRIVER, on_spark=True)
    assert len(many_problems) == 11
    assert many_problems[-1] == "and the same between 4 more pairs of hosts"


def test_a_cause_is_named_and_not_its_consequences() -> None:
    cluster = [
        worker(0, "10.0.0.1", listen_error="address already in use"),
        worker(1, "10.0.0.2", unreached=[missed(0, REFUSED)]),
    ]
    (problem,) = find_problems(cluster, DRIVER, on_spark=True)
    assert problem.startswith("worker 0 on 10.0.0.1 cannot listen at 10.0.0.1:41000")
    loopback = [
        worker(0, "127.0.1.1", hostname="a", unreached=[missed(1, REFUSED)]),
        worker(1, "127.0.1.1", hostname="b", unreached=[missed(0, REFUSED)]),
    ]
    assert find_problems(loopback, DRIVER, on_spark=True) == [
        "a, b joined as 127.0.1.1, which no other host can reach: in /etc/hosts there, give the "
        "host's own name its real address, or set SPARK_LOCAL_IP there"
    ]


def test_what_is_printed_of_a_host() -> None:
    found = {
        "python": "/usr/bin/python3",
        "tensorflow": "2.21.0",
        "numpy": "2.4.6",
        "h5py": None,
        "cloudpickle": "3.1.2",
        "pyarrow": "26.0.1",
        "rscript": "/usr/bin/Rscript",
        "r": "4.2.2",
        "reticulate": "1.47.0",
        "rpy2": "3.6.9",
        "rpy2_problem": "ffi.error: symbol 'R_getVar' not found",
        "cores": 8,
        "memory_gb": 31.0,
        "gpus": ["NVIDIA H200", "NVIDIA H200"],
    }
    no_r = {"rscript": None, "r": None, "reticulate": None, "rpy2": None, "rpy2_problem": None}
    bare = {**no_r, "cores": 1, "memory_gb": None}
    cluster = [
        worker(0, "10.0.0.1", **found),
        worker(1, "10.0.0.1", **found, unreached=[missed(2)], reaches=False),
        worker(2, "10.0.0.2", **{**found, **bare, "gpus": []}),
    ]
    one, two = group_by_host(cluster)
    assert (one["name"], one["slots"]) == ("10.0.0.1 (node1)", 2)
    assert one["lines"] == [
        "Python 3.11.7, /usr/bin/python3",
        "TensorFlow 2.21.0, Keras 3.15.1, numpy 2.4.6, no h5py, cloudpickle 3.1.2, pyarrow 26.0.1",
        "R 4.2.2, /usr/bin/Rscript, reticulate 1.47.0, rpy2 3.6.9, which cannot be used: "
        "ffi.error: symbol 'R_getVar' not found; install it for R before 4.5 with "
        "rpy2-rinterface==3.6.5 and rpy2-robjects==3.6.4",
        "8 cores, 31 GB of memory, 2 GPUs (NVIDIA H200)",
        "2 slots here, of which 1 cannot reach all other workers",
    ]
    assert two["lines"][2:] == [
        "no R, no reticulate, no rpy2",
        "1 core, unknown memory, no GPU",
        "1 slot here, which can reach all other workers",
    ]


def test_masters() -> None:
    for master in (
        ["local", "local[4]", "local[*]", "local[2,3]", "local-cluster[2, 1, 1024]"],
        ["spark://h:7077", "spark://a:7077,b:7077", "spark://[fd00::1]:7077"],
        ["sc://h", "sc://h:1/;token=x", "yarn", "k8s://https://host:443"],
    ):
        assert [check_master(one) for one in master] == master


@pytest.mark.parametrize(
    "master", ["", "spark://h", "spark:/h:7077", "local[a]", "local 2", "http://h:1", "spark://h:x"]
)
def test_what_is_not_a_master(master: str) -> None:
    with pytest.raises(InputError, match="is not a Spark master"):
        check_master(master)
