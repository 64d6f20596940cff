"""Spark session on the tests' cluster: a master and workers on separate hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

WORKERS = 2


@contextmanager
def standalone_session(**settings: str) -> Iterator[Any]:
    """Start a cluster, and a session as in `start_session`."""
    with standalone() as cluster, start_session(cluster, **settings) as session:
        yield session


def start_session(cluster: Any, **settings: str) -> AbstractContextManager[Any]:
    """Start a session with two executors of one core, both registered before the first job."""
    session: AbstractContextManager[Any] = cluster.session(
        **{
            # With more executors than workers, a worker may get one that is not warm.
            "spark__cores__max": str(WORKERS),
            "spark__executor__memory": "1500m",
            # Otherwise all rows may be cached on the executor that registers first.
            "spark__scheduler__minRegisteredResourcesRatio": "1.0",
            # Otherwise a stage waits 3 s for executors that have cached its rows and are busy.
            "spark__locality__wait": "0",
            "spark__executorEnv__TF_NUM_INTRAOP_THREADS": "1",
            "spark__executorEnv__TF_CPP_MIN_LOG_LEVEL": "3",
            **settings,
        }
    )
    return session


@contextmanager
def standalone() -> Iterator[Any]:
    """Start a cluster whose executors are on this machine, and import modules of this folder."""
    here = Path(__file__).parent
    os.environ["TFDIST_TEST_FORGE"] = ""  # workers start as users' do, and are not forked
    sys.path.insert(0, str(here.parent / "tests" / "python"))
    from standalone import standalone_cluster

    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *([given] if given else [])])
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        standalone_cluster(Path(folder) / "cluster") as cluster,
        _routes(cluster),
    ):
        yield cluster


@contextmanager
def _routes(cluster: Any) -> Iterator[None]:
    """Give hosts a default route, by which TensorFlowOnSpark finds their address.

    Nobody answers there. So name servers have no route, and looking up a name fails at once, rather
    than after a minute. The routes are deleted with the hosts.
    """
    lines = Path("/etc/resolv.conf").read_text().splitlines()
    servers = [line.split()[1] for line in lines if line.startswith("nameserver")]
    routes = [["unreachable", server] for server in servers if ":" not in server]
    for host in cluster.hosts:
        if host.namespace:
            for route in [*routes, ["default", "via", cluster.driver]]:
                subprocess.run([*host.enter, "ip", "route", "add", *route], check=True)
    yield
