"""Workers on hosts over ssh: real servers, each in its own network namespace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import leaks
import mnist_case
import numpy as np
import pytest
import test_elastic
from cloudpickle import register_pickle_by_value
from conftest import build_dense, needs_r, wait_for
from contract import System, contract
from detaching import assert_same, drivers, submit_and_kill, train_here
from killing import KillAt
from leaks import find_in_commands, find_in_files, know_token
from namespaces import run as run_command
from pythons import python_with
from sshd import SshHosts, no_ssh_hosts, ssh_hosts

import pybackend
from pybackend.core.errors import ClusterError, InputError, WorkerFailedError
from pybackend.core.job.job import FunctionJob
from pybackend.core.launchers.hosts import launcher

# The tests are not installed on the hosts.
register_pickle_by_value(leaks)
register_pickle_by_value(test_elastic)
pytestmark = pytest.mark.skipif(bool(no_ssh_hosts()), reason="NO HOSTS WITH SSH")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Start the hosts a and b."""
    with ssh_hosts(["a", "b"], tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(there: SshHosts) -> Iterator[None]:
    yield
    wait_for(lambda: left_on(there) == [])


def left_on(there: SshHosts) -> list[Any]:
    """Return the processes and files on the hosts."""
    processes = [line for host in range(2) for line in there.processes(host).values()]
    return [*processes, *there.files()]


@pytest.fixture
def system(there: SshHosts) -> System:
    return System(
        pybackend.hosts("a,b", ssh_options=there.options, environment={"GREETING": "hi"}),
        f"pybackend.hosts('a,b', ssh_options={there.options})",
        hosts=tuple(host.address for host in there.hosts),
        variables={"GREETING": "hi"},
        left=lambda: left_on(there),
    )


TestContract = contract("test_nothing_outlives_a_driver_that_is_killed")


def describe(context: Any) -> Any:
    import os

    variables = ("TFDIST_HOST", "OMP_NUM_THREADS", "GREETING")
    return [context.rank, *map(os.environ.get, variables)]


@pytest.mark.full
def test_mnist_on_hosts_as_on_this_machine(there: SshHosts) -> None:
    result = pybackend.train_mnist(
        pybackend.hosts("a,b", ssh_options=there.options), verbose=0, **mnist_case.CASE
    )
    mnist_case.check(result.model)
    assert [worker.host for worker in result.workers] == [h.address for h in there.hosts]


def build_wider(units: int) -> Any:
    """Return a model that reports the threads and the host of its worker, as its layers' names."""
    import os

    import keras

    threads = os.environ["OMP_NUM_THREADS"]
    host = os.environ.get("SSH_CONNECTION", "here here here").split()[2].replace(".", "-")
    layers = [keras.Input((8,)), keras.layers.Dense(units), keras.layers.Dense(3, name=host)]
    model = keras.Sequential(layers, name=f"threads{threads}")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.full
def test_trials_share_the_slots_of_hosts(there: SshHosts, rows: Any) -> None:
    trials = pybackend.train_many(
        pybackend.hosts("a:1,b:2", ssh_options=there.options),
        build_wider,
        rows,
        grid={"units": [2, 4, 6, 8]},
        epochs=2,
        seed=1,
        verbose=0,
    )
    assert trials.parallelism == 3
    assert [trial.status for trial in trials.trials] == ["completed"] * 4
    hosts = [trial.model.layers[-1].name for trial in trials.trials[:3]]
    a, b = (host.address.replace(".", "-") for host in there.hosts)
    assert hosts == [a, b, b]
    cores = len(os.sched_getaffinity(0))
    threads = [trial.model.name for trial in trials.trials[:3]]
    assert threads == [f"threads{max(1, cores // neighbours)}" for neighbours in (1, 2, 2)]
    alone = pybackend.barrier_train(
        "local",
        lambda: build_wider(2),
        rows,
        workers=1,
        epochs=2,
        seed=1,
        verbose=0,
    )
    assert trials.trials[0].result is not None
    assert trials.trials[0].result.history == alone.history
    with pytest.raises(InputError, match=r"the hosts have 3 slots.*use at most 1"):
        pybackend.train_many(
            pybackend.hosts("a:1,b:2", ssh_options=there.options),
            build_wider,
            rows,
            grid={"units": [2, 4]},
            workers_per_trial=2,
            parallelism=2,
        )


@pytest.mark.full
def test_a_detached_job_restarts_after_its_session_was_killed(
    there: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    name = submit_and_kill(f"""
        from killing import KillAt
        job = pybackend.submit_training(
            pybackend.hosts("a,b", ssh_options={there.options!r}), build, rows(), epochs=2,
            callbacks=[KillAt(1, 1, 2, {str(tmp_path / "mark")!r}), slow(0.2)],
            recovery=pybackend.Recovery({str(tmp_path / "kept")!r}, every=2, restarts=1), **SETTINGS
        )
    """)
    result = pybackend.attach_job(name).result(300, verbose=0)
    assert len(result.restarts) == 1
    assert_same(result, train_here())
    wait_for(lambda: not drivers())


@pytest.mark.full
@needs_r
def test_mnist_from_r(there: SshHosts, tmp_path: Path) -> None:
    mnist_case.check_r(tmp_path, "hosts", hosts="a,b", ssh_options=there.options)


@pytest.mark.full
def test_workers_that_all_have_all_rows_and_one_is_killed(
    there: SshHosts, dense_model: Any, rows: Any, tmp_path: Path, capsys: Any
) -> None:
    results = [
        pybackend.barrier_train(
            place,
            dense_model,
            rows,
            workers=2,
            epochs=4,
            seed=3,
            shuffle="global",
            validation_split=0.2,
            callbacks=[
                KillAt(1, 1, 2, tmp_path / "mark"),
                pybackend.Observer(on_epoch_end=lambda epoch, logs: epoch == 2),
            ],
            recovery=pybackend.Recovery(str(tmp_path / str(number)), every=2, restarts=1 - number),
        )
        for number, place in enumerate((pybackend.hosts("b:2", ssh_options=there.options), "local"))
    ]
    shown = capsys.readouterr().out
    assert shown.count("SIGKILL; restarting from the newest checkpoint (restart 1 of 1)") == 1
    digests = {worker.weights_sha256 for result in results for worker in result.workers}
    assert len(digests) == 1
    assert results[0].history == results[1].history
    assert [result.epochs for result in results] == [2, 2]


@pytest.mark.full
def test_a_host_is_lost_another_one_joins_and_a_worker_is_told_to_end(
    there: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "killed.victim").write_text("parent")  # its host is lost with it
    killer = KillAt(0, 1, 2, tmp_path / "killed")
    script = test_elastic.Script(tmp_path, told=1, by=2)
    hosts = pybackend.hosts("a,b:2", ssh_options=there.options)
    settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 500, "verbose": 0}
    result = test_elastic.train(killer, script, target=hosts, **settings)
    generations = result.generations[:4]
    assert [generation.workers for generation in generations] == [[0, 1], [1], [1, 2], [2]]
    lost, told = (generations[number].left.popitem() for number in (1, 3))
    assert lost == ("0", "the process that runs the workers on its host was killed")
    assert told[0] == "1"
    assert "received SIGTERM; it left the training after epoch" in told[1]
    assert {worker.host for worker in result.workers} == {there.hosts[1].address}
    test_elastic.check_exact(result)


class SleepWhileWriting(keras.callbacks.Callback):
    """Suspends the first host between two files of a checkpoint; the other waits for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.asleep, self.awake = str(folder / "asleep"), str(folder / "awake")

    def on_train_begin(self, logs: Any = None) -> None:
        from pybackend.core.data.checkpoint_store import CheckpointStore

        asleep, written = Path(self.asleep), CheckpointStore._write

        def write(store: Any, name: str, content: bytes) -> Any:
            part = written(store, name, content)
            if name.endswith(".state") and not asleep.exists():
                pids = os.getppid(), os.getpid()
                asleep.write_text(" ".join(map(str, pids)))
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(0.5)  # another thread may take the signal
            return part

        if os.environ["TFDIST_RANK"] == "0":
            CheckpointStore._write = write

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        while epoch == 2 and not Path(self.awake).exists():
            time.sleep(0.1)


@pytest.mark.full
def test_a_host_that_writes_a_checkpoint_late_does_not_disturb_the_others(
    there: SshHosts, tmp_path: Path
) -> None:
    sleep, kept = SleepWhileWriting(tmp_path), tmp_path / "kept"
    link = str(there.hosts[0].port)

    def suspend() -> None:
        asleep = Path(sleep.asleep)
        wait_for(lambda: asleep.exists() and len(asleep.read_text().split()) == 2)
        run_command("ip", "link", "set", link, "down")
        try:
            wait_for(lambda: list(kept.glob("checkpoint-*.json")))
        finally:
            run_command("ip", "link", "set", link, "up")
            agent, worker = map(int, asleep.read_text().split())
            os.kill(worker, signal.SIGCONT)
            time.sleep(1)  # the worker writes, or not
            os.kill(agent, signal.SIGCONT)
            Path(sleep.awake).touch()

    suspending = threading.Thread(target=suspend)
    suspending.start()
    hosts = pybackend.hosts("a,b", ssh_options=there.options)
    settings = {"workers": pybackend.Elastic(2), "verbose": 0}
    recovery = pybackend.Recovery(kept, every=2, timeout=6)
    result = test_elastic.train(sleep, target=hosts, recovery=recovery, **settings)
    suspending.join()
    assert [generation.workers for generation in result.generations] == [[0, 1], [1]]
    test_elastic.check_result(result)
    states, manifests = (len(list(kept.glob(f"*.{end}"))) for end in ("state", "json"))
    assert states == manifests == recovery.keep


@pytest.mark.full
def test_hosts_without_python_run_workers_in_the_environment_of_the_call(
    there: SshHosts, tmp_path: Path, capsys: Any
) -> None:
    def find(context: Any) -> list[str]:
        import numpy

        return [sys.executable, numpy.__file__]

    environment = python_with(tmp_path, "numpy", "cloudpickle").parents[1]
    hosts = pybackend.hosts("a,b", ssh_options=there.options, python="/nowhere/python")
    resources = pybackend.Resources(environment=environment)
    found = pybackend.barrier_run(hosts, find, resources=resources)
    shown = capsys.readouterr().out
    assert "packing the Python environment" in shown
    assert re.search(r"sending the Python environment \(.* MB\) to a, b", shown)
    for host, paths in zip("ab", found, strict=True):
        cache = f"{there.folder}/cache-{host}/tfdist/environments/tfdist-environment-"
        assert all(path.startswith(cache) for path in paths)
    assert pybackend.barrier_run(hosts, find, resources=resources) == found
    assert "the Python environment" not in capsys.readouterr().out
    nowhere = pybackend.hosts("a,c", ssh_options=there.options)
    with pytest.raises(ClusterError, match="cannot reach c over ssh"):
        pybackend.barrier_run(nowhere, find, resources=resources)


def test_ssh_is_asked_for_the_address_of_each_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def address(ssh: Any, host: Any) -> str:
        asked.append(host.name)
        return f"{host.name}.net"

    monkeypatch.setattr(launcher.Ssh, "address", address)
    monkeypatch.setattr(launcher, "run_on_hosts", lambda way, *others: way.task.hosts)
    found = pybackend.hosts("a:2,b:30,c").launch(FunctionJob(3), {}, {}, print)
    assert (found, asked) == (("a.net", "a.net", "b.net"), ["a", "b"])


@pytest.mark.full
def test_slots_are_filled_in_order_and_share_the_cores(there: SshHosts) -> None:
    hosts = pybackend.hosts("a:2,b:2", ssh_options=there.options, environment={"GREETING": "hi"})
    a, b = (host.address for host in there.hosts)
    cores = os.cpu_count() or 1
    half = str(max(1, cores // 2))
    found = pybackend.barrier_run(hosts, describe, workers=3)
    assert found == [[0, a, half, "hi"], [1, a, half, "hi"], [2, b, str(cores), "hi"]]
    assert len(pybackend.barrier_run(hosts, describe)) == 4
    with pytest.raises(InputError, match="`workers` is 5, but a:2,b:2 has 4 slots"):
        pybackend.barrier_run(hosts, describe, workers=5)


def test_rows_may_be_kept_elsewhere_and_nobody_is_shown_the_token(
    there: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = there.folder / "tmp-b" / "scratch"
    elsewhere.mkdir()
    hosts = pybackend.hosts("a", ssh_options=there.options, environment={"TMPDIR": str(elsewhere)})
    token, place = know_token(monkeypatch, launcher), there.folder

    def look(context: Any) -> Any:
        shown = find_in_commands(token), bool(find_in_commands("pybackend"))
        return os.environ["TMPDIR"], *shown, find_in_files(place, token)

    ((folder, *shown),) = pybackend.barrier_run(hosts, look)
    assert folder.startswith(f"{elsewhere}/tfdist-")
    assert shown == [[], True, []]
    elsewhere.rmdir()


@pytest.mark.full
def test_workers_have_resources_on_each_host(there: SshHosts) -> None:
    def run(listed: str, **wanted: Any) -> Any:
        machines = pybackend.hosts(listed, ssh_options=there.options)
        resources = pybackend.Resources(**wanted)
        return pybackend.barrier_run(machines, describe, resources=resources, verbose=0)

    cores = os.cpu_count() or 1
    assert [v[2] for v in run("a,b:1", cpus=1, memory="1GB", gpus=0)] == ["1", "1"]
    with pytest.raises(ClusterError, match=rf"2 workers need {2 * cores} cpus .*, but b has \d+"):
        run("a,b:2", cpus=cores)
    with pytest.raises(ClusterError, match=r"a worker needs 1 gpus, but a has 0"):
        run("a", gpus=1)


@pytest.mark.full
def test_hosts_may_be_ipv6_addresses(there: SshHosts) -> None:
    addresses = [str(host.address6) for host in there.hosts]
    listed = [f"[{address}]" for address in addresses]
    found = pybackend.barrier_run(
        pybackend.hosts(listed, ssh_options=there.options), lambda context: context.addresses
    )
    assert [address.rpartition(":")[0] for address in found[0]] == listed


def kill_the_agent(context: Any) -> None:
    import os
    import signal

    if context.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)


def test_a_killed_agent_is_named(there: SshHosts) -> None:
    hosts = pybackend.hosts("a,b", ssh_options=there.options)
    message = "the process that runs the workers on its host was killed"
    with pytest.raises(WorkerFailedError, match=message) as caught:
        pybackend.barrier_run(hosts, kill_the_agent)
    assert (caught.value.rank, caught.value.exception_type) == (1, "HostLost")
    started, *_, lost = [one for one in caught.value.timeline if one.rank == 1]
    assert (started.state, lost.state, lost.host) == ("started", "failed", "b")


def test_hosts_that_cannot_be_used_are_named(there: SshHosts) -> None:
    def hosts(**changed: Any) -> Any:
        return pybackend.hosts("a,b", **{"ssh_options": there.options, **changed})

    with pytest.raises(
        ClusterError, match=r"cannot reach [ab] over ssh, which reports: ssh: connect"
    ):
        pybackend.barrier_run(hosts(ssh_options=["-p", "23", *there.options]), describe)
    with pytest.raises(ClusterError, match=r"[ab] has no Python at /opt/none"):
        pybackend.barrier_run(hosts(python="/opt/none"), describe)
    bare = "/usr/bin/python3"
    with pytest.raises(ClusterError, match=rf"[ab] has no TensorFlow for {bare}"):
        pybackend.barrier_predict(hosts(python=bare), build_dense, np.zeros((4, 8), "float32"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hosts": "a:x"}, "'a:x' is not a host"),
        ({}, "pass either `hosts`"),
        ({"hosts": "a", "hostfile": "b"}, "pass either `hosts`"),
        ({"hosts": "a", "python": 3}, "`python` must be a path, not 3"),
        ({"hosts": "a", "ssh_options": "-p 22"}, "`ssh_options` must be a list of words"),
        ({"hosts": "a", "ssh_options": ["-p 22"]}, r"two words, \['-p', '22'\]"),
        ({"hosts": "a", "ssh_options": 22}, "`ssh_options` must be a list of words"),
        ({"hosts": "a", "environment": {"A": 1}}, "`environment` must be like"),
        ({"hosts": "a", "environment": {"1A": "x"}}, "'1A', which is not a valid variable name"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pybackend.hosts(**wrong)


def leave_the_network(context: Any) -> None:
    import threading

    if context.rank == 1:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        threading.Event().wait()


@pytest.mark.full
def test_a_host_that_goes_away_is_named(there: SshHosts) -> None:
    options = ["-o", "ServerAliveInterval=1", *there.options]
    b = there.hosts[1]
    began = time.monotonic()
    try:
        with pytest.raises(WorkerFailedError, match="not responding") as caught:
            pybackend.barrier_run(pybackend.hosts("a,b", ssh_options=options), leave_the_network)
        assert (caught.value.rank, caught.value.host) == (1, "b")
        assert time.monotonic() - began < 90
    finally:
        run_command(*b.enter, "ip", "link", "set", "eth0", "up")
        run_command(*b.enter, "ip", "address", "add", f"{b.address6}/64", "dev", "eth0", "nodad")
    wait_for(lambda: left_on(there) == [])
