"""Processes that are started by hand and make the same call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FORGE, R_VARIABLES, full, marked_processes, needs_r, wait_for
from contract import Joined, System, contract
from mnist_case import CASE, IN_PYTHON, IN_R, check_files, describe
from namespaces import Network, network, no_namespaces
from programs.joined import build, make_rows
from standalone import low_port

from pybackend import barrier_run, barrier_train
from pybackend.types import WorkerContext

PROGRAM = Path(__file__).parent / "programs" / "joined.py"
SECRET = "a secret of these tests alone"
LIMIT = 150


def free_addresses(count: int) -> list[str]:
    """Return loopback addresses with free ports that no connection takes meanwhile."""
    ports = set[int]()
    while len(ports) < count:
        ports.add(low_port())
    return [f"127.0.0.1:{port}" for port in ports]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setenv("TFDIST_SECRET", SECRET)
    return Joined(lambda: free_addresses(2), tmp_path)


TestContract = contract("test_a_worker_that_is_killed_is_named_with_the_signal")


class Process:
    """One of the processes."""

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        enter: Sequence[str] = (),
        variables: Mapping[str, str] = {"TFDIST_SECRET": SECRET},
        program: Sequence[str] = (sys.executable, str(PROGRAM)),
        **options: Any,
    ) -> None:
        spec = json.dumps({"index": index, "addresses": addresses, **options})
        self.process = subprocess.Popen(
            [*enter, *program, spec],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )

    def text(self) -> str:
        """Return its whole output, up to its end."""
        text = self.process.communicate(timeout=LIMIT)[0]
        assert SECRET not in text
        return text

    def result(self) -> Any:
        """Return the result that it got from the call."""
        text = self.text()
        assert self.process.returncode == 0, text
        return json.loads(text.splitlines()[-1])

    def failure(self) -> str:
        """Return the last line of its traceback, and the following lines."""
        text = self.text()
        assert self.process.returncode == 1, text
        return text.rpartition("\npybackend.core.errors.")[2]


@contextmanager
def group(*processes: Process) -> Iterator[None]:
    """End the remaining processes."""
    try:
        yield
    finally:
        for one in processes:
            one.process.kill()
            one.process.communicate()


def train_here(workers: int, rows: int = 60, **options: Any) -> Any:
    """Train the same with workers that this process starts."""
    data = make_rows(rows)
    return barrier_train("local", build, data, workers=workers, batch_size=8, verbose=0, **options)


@pytest.mark.full
def test_all_get_the_result_of_one_call_in_any_order_of_start() -> None:
    FORGE.start()
    addresses = free_addresses(3)
    started = [Process(index, addresses, seed=5, epochs=2, calls=2) for index in (2, 1, 0)]
    with group(*started):
        results = [one.result() for one in started]
    assert results[0] == results[1] == results[2]
    here = train_here(3, seed=5, epochs=2)
    assert results[0]["digest"] == here.workers[0].weights_sha256
    assert results[0]["history"] == here.history
    assert results[0]["rows"] == [20, 20, 20]
    assert results[0]["figures"] == ["accuracy", "loss"]


@pytest.mark.full
@needs_r
def test_mnist_in_both_languages(tmp_path: Path) -> None:
    FORGE.start()
    addresses = free_addresses(2)
    own = {"folder": str(tmp_path), "arguments": CASE}
    variables = {"TFDIST_SECRET": SECRET, **R_VARIABLES}
    started = [
        Process(index, addresses, program=program, variables=variables, **own)
        for index, program in enumerate([(sys.executable, IN_PYTHON), ("Rscript", IN_R)])
    ]
    with group(*started):
        for one in started:
            text = one.text()
            assert one.process.returncode == 0, text
    check_files(tmp_path, 2)


@pytest.mark.full
@pytest.mark.parametrize("program", [IN_PYTHON, pytest.param(IN_R, marks=needs_r)])
def test_mnist_by_tfdist_run(program: str, tmp_path: Path) -> None:
    FORGE.start()
    done = subprocess.run(
        [sys.executable, "-m", "pybackend", "run", "-w", "2", program, describe(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **R_VARIABLES},
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_files(tmp_path, 2)


@pytest.mark.full
def test_a_seed_is_drawn_once_for_all() -> None:
    FORGE.start()
    addresses = free_addresses(2)
    started = [Process(index, addresses, rows=17) for index in (0, 1)]
    with group(*started):
        first, second = (one.result() for one in started)
    assert first == second
    again = train_here(2, rows=17, seed=first["seed"])
    assert again.workers[0].weights_sha256 == first["digest"]


def test_who_is_missing_is_named_to_all() -> None:
    addresses = free_addresses(3)
    started = [Process(index, addresses, recovery={"timeout": 10}) for index in (0, 2)]
    with group(*started):
        texts = [one.failure() for one in started]
    for text in texts:
        assert f"worker 1 ({addresses[1]}) did not connect within 10 s" in text


def test_a_first_process_that_never_comes_is_named() -> None:
    addresses = free_addresses(2)
    with group(late := Process(1, addresses, recovery={"timeout": 3})):
        text = late.failure()
    assert f"worker 0 ({addresses[0]}) did not respond at {addresses[0]} within 3 s" in text


@pytest.mark.parametrize(
    ("own", "found"),
    [
        full({"epochs": 2}, "`epochs` is 2 in worker 1 ("),
        full({"seed": 1}, "`seed` is 1 in worker 1 ("),
        ({"rows": 59}, "`data` has 59 rows in worker 1 ("),
    ],
)
def test_calls_that_differ_are_refused_in_all(own: Any, found: str) -> None:
    FORGE.start()
    addresses = free_addresses(2)
    started = [Process(0, addresses), Process(1, addresses, **own)]
    with group(*started):
        texts = [one.failure() for one in started]
    for text in texts:
        assert text.startswith("InputError: ")
        assert found in text


def test_a_machine_that_has_too_little_is_named_to_all() -> None:
    addresses = free_addresses(2)
    wanted = {"cpus": os.cpu_count()}
    started = [Process(index, addresses, resources=wanted) for index in (0, 1)]
    with group(*started):
        texts = [one.failure() for one in started]
    for text in texts:
        assert text.startswith("InputError: 2 workers need ")
        assert f", but the machine of worker 0 ({addresses[0]}) has " in text


@pytest.mark.full
def test_another_secret_is_named_on_both_sides() -> None:
    addresses = free_addresses(2)
    other = {"TFDIST_SECRET": "quite another secret"}
    started = [
        Process(0, addresses, recovery={"timeout": 15}),
        Process(1, addresses, variables=other),
    ]
    with group(*started):
        first, second = (one.failure() for one in started)
    assert "connections had the wrong secret" in first
    assert "the two have different secrets" in second


@pytest.mark.full
def test_a_worker_that_is_killed_is_started_again_by_all(tmp_path: Path) -> None:
    FORGE.start()
    addresses = free_addresses(2)
    options = {
        "seed": 5,
        "epochs": 2,
        "kill_at": (1, 1, 2, str(tmp_path / "mark")),
        "recovery": {"uri": str(tmp_path / "kept"), "restarts": 1},
    }
    started = [Process(index, addresses, **options) for index in range(2)]
    with group(*started):
        results = [one.result() for one in started]
    assert (tmp_path / "mark").exists()
    here = train_here(2, seed=5, epochs=2)
    for result in results:
        assert result["digest"] == here.workers[0].weights_sha256
        assert result["history"] == here.history


@pytest.mark.full
def test_models_that_functions_build_are_compared() -> None:
    FORGE.start()
    addresses = free_addresses(2)
    started = [Process(index, addresses, breaks=(1, "differ")) for index in range(2)]
    with group(*started):
        texts = [one.failure() for one in started]
    for text in texts:
        what = "the model of worker 1 has a different structure, or was compiled differently"
        assert what in text


@pytest.mark.full
def test_a_worker_that_fails_before_all_are_linked_ends_the_call_at_once() -> None:
    FORGE.start()
    addresses = free_addresses(2)
    began = time.monotonic()
    started = [Process(index, addresses, fails_to_read=True) for index in range(2)]
    with group(*started):
        texts = [one.failure() for one in started]
    for text in texts:
        assert text.startswith(
            "WorkerFailedError: worker 0 on 127.0.0.1 failed: ValueError: no such file"
        )
    # The default timeout of a silent peer is 300 s.
    assert time.monotonic() - began < LIMIT


@pytest.mark.full
def test_values_of_any_size_come_back() -> None:
    addresses = free_addresses(2)
    started = [Process(index, addresses, value_bytes=3_000_000) for index in range(2)]
    with group(*started):
        assert [one.result() for one in started] == [[3_000_000] * 2] * 2


@pytest.mark.full
def test_the_model_is_where_the_first_process_has_written_it(tmp_path: Path) -> None:
    FORGE.start()
    addresses = free_addresses(2)
    started = [
        Process(index, addresses, model_options={"uri": str(tmp_path / f"{index}.h5")})
        for index in range(2)
    ]
    with group(*started):
        results = [one.result() for one in started]
    assert results[0] == results[1]
    assert [str(path) for path in tmp_path.iterdir()] == [results[0]["model_uri"]]


@pytest.mark.launcher
@pytest.mark.parametrize(("victim", "survivor"), [(0, 1), full(1, 0)])
def test_a_process_that_is_killed_is_named_and_leaves_nothing(
    victim: int, survivor: int, tmp_path: Path
) -> None:
    addresses = free_addresses(2)
    variables = {
        "TFDIST_SECRET": SECRET,
        "TMPDIR": str(tmp_path),
        "TFDIST_TEST_MARK": tmp_path.name,
    }
    started = [
        Process(index, addresses, variables=variables, breaks=(victim, "kill"))
        for index in range(2)
    ]
    with group(*started):
        text = started[survivor].failure()
        assert started[victim].process.wait(LIMIT) == -signal.SIGKILL
    assert f"worker {victim}" in text.splitlines()[0]
    assert "ended" in text
    mark = f"TFDIST_TEST_MARK={tmp_path.name}"
    wait_for(lambda: not marked_processes(mark) and not list(tmp_path.iterdir()))


@pytest.mark.full
@pytest.mark.launcher
def test_a_first_process_that_is_stopped_with_its_worker_is_named() -> None:
    addresses = free_addresses(2)
    started = [
        Process(index, addresses, breaks=(0, "stop"), recovery={"timeout": 15})
        for index in range(2)
    ]
    with group(*started):
        text = started[1].failure()
        assert "worker 0 on 127.0.0.1 failed: ProcessLost" in text.splitlines()[0]
        started[0].process.send_signal(signal.SIGCONT)
        assert "Error" in started[0].failure()


@pytest.mark.full
def test_what_mpirun_has_started_by_a_wrapper_joins() -> None:
    FORGE.start()
    spec = json.dumps({"index": None, "seed": 5})
    wrapper = ("sh", "-c", '"$@"; exit $?', "sh")  # which does not execute the program
    done = subprocess.run(
        ["mpiexec", "-n", "2", *wrapper, sys.executable, str(PROGRAM), spec],
        capture_output=True,
        text=True,
        env={**os.environ, "TFDIST_SECRET": SECRET},
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 2
    assert results[0] == results[1]
    assert results[0]["digest"] == train_here(2, seed=5).workers[0].weights_sha256


@pytest.mark.full
def test_functions_on_workers_can_make_a_call_together() -> None:
    def work(context: WorkerContext) -> Any:
        result = barrier_train(
            None, build, (np.zeros((6, 8), "float32"), np.zeros(6)), verbose=0, seed=1
        )
        return context.rank, [worker.rows for worker in result.workers]

    assert barrier_run("local", work, workers=2, verbose=0) == [(0, [3, 3]), (1, [3, 3])]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    """Create four hosts with their own addresses and names."""
    problem = no_namespaces()
    if problem:
        pytest.skip(f"no network namespaces: {problem}")
    with network(["a", "b", "c", "d"]) as made:
        yield made


@pytest.mark.full
@needs_r
@pytest.mark.launcher
def test_four_hosts_in_two_languages_with_names_and_addresses_of_both_kinds(
    hosts: Network, tmp_path: Path
) -> None:
    a, b, c, d = hosts.hosts
    addresses = ["a:2222", f"{b.address}:2222", f"[{c.address6}]:2222", "d-6:2222"]
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    variables = {"TFDIST_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    own = {"variables": variables}
    in_r = {
        "program": ("Rscript", str(PROGRAM.with_suffix(".R"))),
        "variables": {**variables, **R_VARIABLES},
        "programs": str(PROGRAM.parent),
    }
    started = [
        Process(index, addresses, host.enter, seed=5, **(in_r if index == 3 else own))
        for index, host in enumerate(hosts.hosts)
    ]
    with group(*started):
        *results, result_of_r = (one.result() for one in started)
    assert results[0] == results[1] == results[2]
    assert results[0]["digest"] == train_here(4, seed=5).workers[0].weights_sha256
    assert results[0]["hosts"] == [a.address, b.address, c.address6, d.address6]
    assert result_of_r == {name: results[0][name] for name in ("seed", "rows", "hosts")}


def test_a_host_whose_own_name_is_for_itself_alone(hosts: Network) -> None:
    a, b = hosts.hosts[:2]
    file = Path("/etc/netns", str(a.namespace), "hosts")
    known = file.read_text()
    file.write_text(f"127.0.1.1 a\n{b.address} b\n")
    try:
        addresses = ["a:2222", "a:2223", "b:2222"]
        started = [
            Process(index, addresses, host.enter, value_bytes=8)
            for index, host in enumerate([a, a, b])
        ]
        with group(*started):
            assert [one.result() for one in started] == [[8, 8, 8]] * 3
    finally:
        file.write_text(known)


def test_a_secret_is_needed_off_the_loopback(hosts: Network, tmp_path: Path) -> None:
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    with group(one := Process(0, ["a:2222", "b:2222"], hosts.hosts[0].enter, variables)):
        text = one.failure()
    assert "processes on several machines need a shared secret" in text
    assert "tfdist secret" in text
