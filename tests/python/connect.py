"""A real Spark Connect server in its own process, and its sessions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
from conftest import FORGE, stop_shared_spark

SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.ui.enabled": "false",
    # Without effect in local mode, but clients can read it.
    "spark.dynamicAllocation.enabled": "true",
}


@contextmanager
def connect_server(
    folder: Path, python: str = sys.executable, master: str = "local[2]", **settings: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a Connect server of two slots during the context; yield its address and process."""
    stop_shared_spark()  # a process has one kind of session
    FORGE.start()
    home = Path(pyspark.__file__).parent
    pairs = {**SETTINGS, **{name.replace("__", "."): value for name, value in settings.items()}}
    arguments = [argument for pair in pairs.items() for argument in ("--conf", "=".join(pair))]
    command = [
        str(home / "bin" / "spark-submit"),
        *("--master", master, "--driver-memory", "1g"),
        *("--driver-java-options", f"-Djava.io.tmpdir={folder}"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *arguments,
        "spark-internal",
    ]
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
        "PYSPARK_PYTHON": python,
    }
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield f"sc://{started_at(server, log)}", server
    finally:
        server.terminate()
        server.wait(timeout=60)


def started_at(server: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the server logs when it listens; it chose a free port."""
    pause = threading.Event()
    for _ in range(1500):
        found = re.search(r"server started at: (\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        assert server.poll() is None, log.read_text(errors="replace")
        pause.wait(0.1)
    raise AssertionError(log.read_text(errors="replace"))


def new_session(url: str) -> Any:
    from pyspark.sql.connect.session import SparkSession

    return SparkSession.builder.remote(url).create()
