"""A standalone Spark cluster of three hosts, each a network namespace with its own address.

The driver is in the root namespace, on the address of the bridge that links them; nothing of it is
reachable from outside this machine. Where namespaces cannot be made, the hosts are three loopback
addresses: the same cluster, but no firewall between its hosts.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import R_VARIABLES, spark_session
from namespaces import Host, isolated, network, no_namespaces

HOSTS = 3
# R code that creates `sc`, a sparklyr connection; needs `Cluster.variables_for_r`.
CONNECT_IN_R = """
config <- sparklyr::spark_config()
config[["sparklyr.shell.driver-memory"]] <- "1g"
config[["spark.driver.host"]] <- config[["spark.driver.bindAddress"]] <- Sys.getenv("TEST_DRIVER")
config[["spark.cores.max"]] <- 3L
config[["spark.executor.cores"]] <- 1L
config[["spark.executor.memory"]] <- "512m"
sc <- sparklyr::spark_connect(master = Sys.getenv("TEST_MASTER"), config = config)
"""
# A limit for a busy machine; it usually takes 5 s.
_START_SECONDS = 180.0


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``work`` contains all files of its hosts."""

    master: str
    driver: str
    hosts: tuple[Host, ...]
    work: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def session(self, python: str = sys.executable, **settings: str) -> Iterator[Any]:
        """Start a Spark session with one executor of one core on each host."""
        with spark_session(
            self.master,
            **{
                "spark__driver__host": self.driver,
                "spark__driver__bindAddress": self.driver,
                "spark__cores__max": str(HOSTS),
                "spark__executor__cores": "1",
                "spark__executor__memory": "512m",
                **settings,
            },
        ) as session:
            session.sparkContext.pythonExec = python
            yield session

    @contextmanager
    def firewall(self, *hosts: int) -> Iterator[None]:
        """Cut the connections between these hosts; the driver and all others still reach them."""
        with isolated([self.hosts[number] for number in hosts]):
            yield

    def revive(self) -> None:
        """Restart Spark's worker on each host where it has ended, as a supervisor does."""
        for place, process in enumerate(self.workers):
            if process.poll() is not None:
                self.workers[place] = _start_worker(self, self.hosts[place])

    def variables_for_r(self) -> dict[str, str]:
        """Return the environment of an R session for `CONNECT_IN_R`."""
        import pyspark

        return {
            **R_VARIABLES,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "TEST_DRIVER": self.driver,
            "TEST_MASTER": self.master,
        }

    def leftovers(self) -> list[Path]:
        """Return the remaining folders of tfdist's workers."""
        return list(self.work.glob("tmp/tfdist-*"))


@contextmanager
def standalone_cluster(work: Path) -> Iterator[Cluster]:
    """Start the cluster in the folder ``work``; stop its processes and network at the end."""
    (work / "tmp").mkdir(parents=True)
    with ExitStack() as stack:
        driver, hosts = stack.enter_context(_network())
        log = work / "master.log"
        stack.callback(_end, _daemon(log, work, [], driver, "master.Master", ["--webui-port", "0"]))
        master = _logged(log, r"Starting Spark master at (spark://\S+)")
        cluster = Cluster(master, driver, tuple(hosts), work)
        stack.callback(lambda: [_end(worker) for worker in cluster.workers])
        for host in hosts:
            cluster.workers.append(_start_worker(cluster, host))
        for host in hosts:
            _logged(log, rf"Registering worker ({re.escape(host.address)}):")
        yield cluster


@contextmanager
def _network() -> Iterator[tuple[str, list[Host]]]:
    """Return the driver's address, and the hosts."""
    problem = no_namespaces()
    if problem:
        print(
            f"\nWARNING: no network namespaces ({problem}): the cluster's hosts are loopback "
            "addresses, and what needs a firewall between them is skipped",
            file=sys.stderr,
        )
        yield "127.0.0.1", [Host(f"h{n}", f"127.0.1.{n + 1}") for n in range(HOSTS)]
        return
    with network([f"h{n}" for n in range(HOSTS)]) as made:
        yield made.address, list(made.hosts)


def _start_worker(cluster: Cluster, host: Host) -> subprocess.Popen[bytes]:
    work, address = cluster.work, host.address
    options = ["--cores", "2", "--memory", "2g", "--webui-port", "0"]
    options += ["--work-dir", str(work / f"executors-{address}"), cluster.master]
    return _daemon(
        work / f"worker-{address}.log", work, host.enter, address, "worker.Worker", options
    )


def _daemon(
    log: Path, work: Path, enter: Sequence[str], address: str, name: str, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a master or a worker."""
    import pyspark

    home = Path(pyspark.__file__).parent
    # The cluster must end when a test run is killed.
    mortal = ["setpriv", "--pdeathsig", "KILL"]
    command = [*mortal, *enter, f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "--host", address, "--port", "0", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(home, work, address),
        )


def _environment(home: Path, work: Path, address: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": address,  # tells a test's Python its host
        "SPARK_LOCAL_DIRS": str(work / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "TMPDIR": str(work / "tmp"),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a daemon; a worker can stop its executors, too."""
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _logged(log: Path, pattern: str) -> str:
    """Wait for a line of a log; return its first group."""
    deadline = time.monotonic() + _START_SECONDS
    while not (found := re.search(pattern, log.read_text(errors="replace"))):
        assert time.monotonic() < deadline, f"no {pattern!r} in\n{log.read_text()[-3000:]}"
        time.sleep(0.1)
    return found[1]


def low_port() -> int:
    """Return a free port below those that the system uses for outgoing connections.

    No connection takes it before the caller listens on it.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def executors(host: Host) -> list[int]:
    """Return the process ids of the executors on a host."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any("CoarseGrainedExecutorBackend" in w for w in words) and host.address in words:
            found.append(int(entry.name))
    return found
