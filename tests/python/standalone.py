"""A standalone Spark cluster of three hosts, each a network namespace with an address of its own.

The driver is in the root namespace, on the address of the bridge that links them; nothing of it is
reachable from outside this machine. Where namespaces cannot be made, the hosts are three loopback
addresses: the same cluster, but no firewall between its hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import spark_session
from namespaces import Host, isolated, network, no_namespaces

HOSTS = 3
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Cluster:
    """A running cluster; ``work`` holds all that its hosts write."""

    master: str
    driver: str
    hosts: tuple[Host, ...]
    work: Path

    @contextmanager
    def session(self, python: str = sys.executable, **settings: str) -> Iterator[Any]:
        """A Spark session with one executor of one core on each host."""
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
        """These hosts cannot reach each other, while the driver and all others reach them."""
        with isolated([self.hosts[number] for number in hosts]):
            yield

    def leftovers(self) -> list[Path]:
        """Folders of tfdist's workers that are still there."""
        return list(self.work.glob("tmp/tfdist-*"))


@contextmanager
def standalone_cluster(work: Path) -> Iterator[Cluster]:
    """Start it, in the folder ``work``; on leaving, its processes and its network are gone."""
    (work / "tmp").mkdir(parents=True)
    with ExitStack() as stack:
        driver, hosts = stack.enter_context(_network())
        log = _daemon(stack, work, [], driver, "master.Master", ["--webui-port", "0"])
        master = _logged(log, r"Starting Spark master at (spark://\S+)")
        for host in hosts:
            options = ["--cores", "2", "--memory", "2g", "--webui-port", "0"]
            options += ["--work-dir", str(work / f"executors-{host.address}"), master]
            _daemon(stack, work, host.enter, host.address, "worker.Worker", options)
        for host in hosts:
            _logged(log, rf"Registering worker ({re.escape(host.address)}):")
        yield Cluster(master, driver, tuple(hosts), work)


@contextmanager
def _network() -> Iterator[tuple[str, list[Host]]]:
    """The driver's address, and the hosts."""
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


def _daemon(
    stack: ExitStack,
    work: Path,
    enter: Sequence[str],
    address: str,
    name: str,
    options: Sequence[str],
) -> Path:
    """Start a master or a worker; returns its log."""
    import pyspark

    home = Path(pyspark.__file__).parent
    log = work / f"{name}-{address}.log"
    # A test run that is killed must not leave a cluster behind.
    mortal = ["setpriv", "--pdeathsig", "KILL"]
    command = [*mortal, *enter, f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", address, "--port", "0", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(home, work, address),
        )
    stack.callback(_end, process)
    return log


def _environment(home: Path, work: Path, address: str) -> Mapping[str, str]:
    return {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": address,  # by which a test's own Python knows its host
        "SPARK_LOCAL_DIRS": str(work / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "TMPDIR": str(work / "tmp"),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a daemon; a worker takes its executors along if it is asked to."""
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _logged(log: Path, pattern: str) -> str:
    """Wait for a line of a log; its first group."""
    deadline = time.monotonic() + _START_SECONDS
    while not (found := re.search(pattern, log.read_text(errors="replace"))):
        assert time.monotonic() < deadline, f"no {pattern!r} in\n{log.read_text()[-3000:]}"
        time.sleep(0.1)
    return found[1]


def executors(host: Host) -> list[int]:
    """Process ids of the executors on a host."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any("CoarseGrainedExecutorBackend" in w for w in words) and host.address in words:
            found.append(int(entry.name))
    return found
