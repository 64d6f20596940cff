"""Training as Jobs of a stand-in for Kubernetes, and the ways to end them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kubernetes_validate
import mnist_case
import numpy as np
import pytest
import test_elastic
from cloudpickle import register_pickle_by_value
from conftest import needs_r, python_without_blanks, wait_for
from contract import System, contract
from endless import PATIENCE, EndlessCall, endless_driver
from kube import ABSENT_IMAGE, NAMESPACE, Kube, kube_cluster
from leaks import find_in_commands, find_in_files, know_token
from namespaces import no_namespaces
from pythons import python_with
from told import check_goes_on

import pybackend
from pybackend import ClusterError, InputError, WorkerFailedError, barrier_run, barrier_train
from pybackend.core.launchers.environment.archive import pack_environment_of
from pybackend.core.launchers.kubernetes import cluster as own_client
from pybackend.core.launchers.kubernetes import launcher
from pybackend.core.launchers.kubernetes.watch import KubernetesJob, PodState

# The tests are not in the pods.
register_pickle_by_value(test_elastic)
pytestmark = pytest.mark.launcher

# The same release, without packages.
BARE_PYTHON = os.path.realpath(sys.executable)
# Releases whose manifests have all fields of these; older ones ignore some of them.
VERSIONS = ["1.26", "1.29", "1.32", "1.35", "1.37"]
FULL = {
    "image": "registry/tf:1",
    "namespace": "physics",
    "cpus": 4,
    "memory": "8Gi",
    "gpus": 1,
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "secrets": ["s3-keys"],
    "service_account": "trainer",
    "image_pull_secrets": ["registry-login"],
    "time_limit": 3600,
    "ttl": 60,
    "python": "/opt/python",
    "labels": {"team": "physics"},
    "patience": 60,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    if reason := no_namespaces():
        pytest.skip(reason)
    with kube_cluster(tmp_path_factory.mktemp("kube")) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Kube, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    """Make the cluster the current one; check that no test leaves anything in it."""
    monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
    yield running
    wait_for(running.is_empty, PATIENCE)
    for process in running.processes.values():
        process.wait(PATIENCE)
    running.processes.clear()


def target(image: str = "registry/tf:1", **arguments: Any) -> Any:
    """Return the launcher; the pods have this Python."""
    return pybackend.kubernetes(image, python=python_without_blanks(), patience=60, **arguments)


@pytest.fixture
def system(cluster: Kube) -> System:
    expression = f"pybackend.kubernetes('registry/tf:1', python={python_without_blanks()!r}, ttl=1)"

    def left() -> list[Any]:
        return [] if cluster.is_empty() else [cluster.objects]

    return System(target(), expression, hosts=cluster.addresses, left=left)


TestContract = contract("test_a_worker_that_is_killed_is_named_with_the_signal")


def wait_forever(context: Any) -> None:
    import threading

    print("worker is here", flush=True)
    threading.Event().wait(300)


def have_begun(cluster: Kube) -> bool:
    """Return whether two workers run, from their output."""
    logs = [process.read_log() for process in cluster.processes.values()]
    return sum("worker is here\n" in log for log in logs) == 2


def endless_call(cluster: Kube) -> EndlessCall:
    """Start a run of two workers."""
    return EndlessCall(
        lambda: barrier_run(target(), wait_forever, workers=2), lambda: have_begun(cluster)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_what_kubernetes_publishes(version: str) -> None:
    for arguments in ({"image": "registry/tf:1"}, FULL):
        for manifest in pybackend.kubernetes(**arguments).plan(workers=4):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_plan_says_all_that_was_asked_for() -> None:
    job, service = pybackend.kubernetes(**FULL).plan(workers=4)
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 3600)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    amounts = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"pool": "gpu"}, "trainer")
    assert pod["imagePullSecrets"] == [{"name": "registry-login"}]
    assert service["spec"]["publishNotReadyAddresses"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert labels["team"] == "physics"
    other, _ = pybackend.kubernetes(**FULL).plan(workers=4)
    assert other["metadata"]["name"] != job["metadata"]["name"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": None}, "`image` must name a container image"),
        ({"image": "two words"}, "`image` must be text without spaces"),
        ({"namespace": "My_Space"}, "`namespace` must be the name of a namespace"),
        ({"cpus": "four"}, "`cpus` must be a quantity such as 4"),
        ({"cpus": 0}, "`cpus` must be a quantity"),
        ({"memory": "8Gb"}, "`memory` must be a quantity such as '8Gi'"),
        ({"memory": 8}, "`memory` must have a unit"),
        ({"gpus": 0.5}, "`gpus` must be a whole number"),
        ({"node_selector": {"pool": 1}}, "`node_selector` has pool=1"),
        ({"tolerations": [{"keys": "gpu"}]}, "`tolerations` must be like"),
        ({"secrets": ["S3 keys"]}, "`secrets` must be a name"),
        ({"time_limit": 0}, "`time_limit` must be at least 1"),
        ({"labels": {"tfdist.io/run": "x"}}, "`labels` cannot have"),
        ({"patience": -1}, "`patience` must be a positive number"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pybackend.kubernetes(**{"image": "registry/tf:1", **arguments})


def test_without_the_client() -> None:
    program = (
        "import sys; sys.modules['kubernetes'] = None; import importlib.util as u; "
        "import pybackend; assert 'kubernetes.client' not in sys.modules; "
        "pybackend.barrier_run(pybackend.kubernetes('x'), print, workers=2)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "InputError: kubernetes() needs the package kubernetes" in ended.stderr


def test_without_the_client_a_plan_is_shown_and_a_training_says_so_at_once() -> None:
    program = (
        "import sys; sys.modules['kubernetes'] = None; import numpy, pybackend\n"
        "arguments = (pybackend.kubernetes('x'), lambda: None, numpy.ones((8, 2)))\n"
        "assert 'job.json' in pybackend.plan(*arguments, workers=2).documents\n"
        "pybackend.barrier_train(*arguments, workers=2)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "InputError: kubernetes() needs the package kubernetes" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.full
def test_mnist_as_on_this_machine(cluster: Kube, capsys: pytest.CaptureFixture[str]) -> None:
    result = pybackend.train_mnist(target(cpus=1), **mnist_case.CASE)
    shown = capsys.readouterr().out
    assert "2 of 2 pods running on node-a, node-b" in shown
    assert "epoch 1/1" in shown
    mnist_case.check(result.model)


@pytest.mark.full
@needs_r
def test_mnist_from_r(cluster: Kube, tmp_path: Path) -> None:
    mnist_case.check_r(
        tmp_path, "kubernetes", image="registry/tf:1", python=python_without_blanks()
    )


@pytest.mark.full
def test_a_worker_that_uses_too_much_memory(cluster: Kube) -> None:
    def use(context: Any) -> None:
        import threading

        held = bytearray(b"x") * (3 << 30 if context.rank == 1 else 1)
        threading.Event().wait(300)
        del held

    with pytest.raises(WorkerFailedError, match="OOMKilled") as caught:
        barrier_run(target(memory="1Gi"), use, workers=2, verbose=0)
    assert (caught.value.rank, caught.value.host) == (1, "node-b")
    assert caught.value.exception_type == "OutOfMemory"
    assert "request more `memory`" in str(caught.value)


def test_a_job_that_fails_between_two_questions(
    cluster: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier information about its pods does not show how they ended."""
    run = endless_call(cluster)
    monkeypatch.setattr(cluster, "is_slow", True)
    cluster.processes[cluster.pods()[1]["metadata"]["name"]].signal(signal.SIGKILL)
    error = run.failure()
    assert (error.rank, error.host) == (1, "node-b")
    assert "ended without a report: status" in str(error)


@pytest.mark.full
def test_a_pod_that_is_evicted(cluster: Kube) -> None:
    run = endless_call(cluster)
    cluster.delete_pod(cluster.pods()[1], reason="EvictionByEvictionAPI")
    error = run.failure()
    # From the pod, if the driver still sees it, or from the Job's status.
    assert error.exception_type in ("Evicted", "Disrupted")
    assert (error.rank, error.host) == (1, "node-b")


@pytest.mark.full
def test_a_training_whose_pod_is_evicted_goes_on(
    cluster: Kube, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pods have their own /tmp, so the checkpoints are outside of it."""

    def evict() -> None:
        cluster.delete_pod(cluster.pods()[0], reason="EvictionByEvictionAPI")

    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        said = check_goes_on(target(), Path(shared), evict, capsys)
    assert "failed: Evicted: its pod" in said


@pytest.mark.full
def test_a_training_goes_on_while_a_pod_goes_and_another_comes(
    cluster: Kube, capsys: pytest.CaptureFixture[str]
) -> None:
    def evict(begun: Path) -> None:
        wait_for(begun.exists, PATIENCE)
        first = next(p for p in cluster.pods() if "-0-0-" in p["metadata"]["name"])
        cluster.delete_pod(first, reason="EvictionByEvictionAPI")

    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        stop = test_elastic.StopWhenJoined(Path(shared), number=2)
        evictor = threading.Thread(target=evict, args=(Path(stop.begun),))
        evictor.start()
        settings = {"workers": pybackend.Elastic(2, max=2), "epochs": 500}
        result = test_elastic.train(stop, target=target(), **settings)
        evictor.join()
    assert [generation.workers for generation in result.generations] == [[0, 1], [1], [1, 2]]
    assert (
        "was evicted, as when a node is drained; the process received"
        in result.generations[1].left["0"]
    )
    assert "1 of 1 pods running on node-a" in capsys.readouterr().out
    test_elastic.check_exact(result)


def test_a_job_that_somebody_deletes_has_shown_nobody_its_token(
    cluster: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = know_token(monkeypatch, launcher)
    run = endless_call(cluster)
    shown = json.dumps(cluster.objects)
    shown += "".join(line for pod in cluster.processes.values() for line in pod.read_log())
    assert "worker is here" in shown
    assert token not in shown
    assert find_in_commands("pybackend")
    assert find_in_commands(token) == find_in_files(cluster.folder, token) == []
    cluster.delete_job(next(iter(cluster.objects["jobs"])))
    error = run.failure()
    assert error.exception_type == "Deleted", error
    assert token not in str(error)


@pytest.mark.parametrize(("second", "kind"), [(4, "Deleted"), (35, "Stopped")])
def test_a_job_that_fails_as_it_is_deleted_was_deleted(second: int, kind: str) -> None:
    at = "2026-01-01T00:00:{:02d}Z".format
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    status = {"conditions": [{**failed, "lastTransitionTime": at(5)}]}
    job = KubernetesJob({"metadata": {"deletionTimestamp": at(second)}, "status": status})
    pod = PodState({"metadata": {"name": "a-0", "deletionTimestamp": at(4)}, "spec": {}})
    assert job.explain(pod)[0] == kind


@pytest.mark.full
def test_pods_that_find_no_node(cluster: Kube, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = pybackend.kubernetes("registry/tf:1", gpus=1, patience=5)
    with pytest.raises(ClusterError, match=r"within 5 s.*Insufficient nvidia.com/gpu"):
        barrier_run(waiting, print, workers=2)
    assert "pending: 0/2 nodes are available" in capsys.readouterr().out


@pytest.mark.full
def test_more_pods_than_a_quota_allows(cluster: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "quota", 0)
    with pytest.raises(ClusterError, match=r"0 of 2 pods.*FailedCreate: exceeded quota: pods"):
        barrier_run(pybackend.kubernetes("registry/tf:1", patience=5), print, workers=2)


def test_an_image_that_cannot_be_pulled(cluster: Kube) -> None:
    with pytest.raises(ClusterError, match="ImagePullBackOff") as caught:
        barrier_run(target(ABSENT_IMAGE), print, workers=2)
    assert "check that the `image` exists" in str(caught.value)


def test_what_kubernetes_does_not_allow(cluster: Kube) -> None:
    with pytest.raises(ClusterError, match='cannot use the namespace "other"'):
        barrier_run(target(namespace="other"), print, workers=2)
    with pytest.raises(InputError, match="`context` is 'absent'"):
        barrier_run(target(context="absent"), print, workers=2)


@pytest.mark.full
def test_an_image_without_the_python_that_was_named(cluster: Kube) -> None:
    with pytest.raises(WorkerFailedError, match="ended without a report: status 127") as caught:
        barrier_run(pybackend.kubernetes("registry/tf:1", python="/no/python"), print, workers=2)
    assert "/no/python" in "".join(caught.value.log)


@pytest.mark.full
def test_an_image_without_tensorflow(cluster: Kube, dense_model: Any, rows: Any) -> None:
    plain = pybackend.kubernetes("registry/tf:1", namespace=NAMESPACE, python=BARE_PYTHON)
    with pytest.raises(ClusterError, match="the image has no TensorFlow for"):
        barrier_train(plain, dense_model, rows, workers=2)


def find_packages(context: Any) -> list[str]:
    import numpy

    return [sys.executable, numpy.__file__]


@pytest.mark.full
def test_an_image_without_packages_runs_workers_in_the_environment_of_the_call(
    cluster: Kube, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = python_with(tmp_path, "numpy", "cloudpickle").parents[1]
    resources = pybackend.Resources(environment=environment)
    plain = pybackend.kubernetes("python:3.12-slim", python=BARE_PYTHON)
    found = barrier_run(plain, find_packages, workers=2, resources=resources)
    said = capsys.readouterr().out
    assert re.search(r"sending the Python environment \(.* MB\) to each pod", said)
    assert all(path.startswith("/tmp/tfdist/environments/") for one in found for path in one)
    shown = pybackend.plan(plain, lambda: None, np.ones((8, 2)), workers=2, resources=resources)
    command = json.loads(shown.documents["job.json"])["spec"]["template"]["spec"]["containers"][0]
    assert "/tmp/tfdist/environments/environment/bin/python" in command["command"]


def test_an_environment_that_a_pod_cannot_unpack(cluster: Kube, tmp_path: Path) -> None:
    whole = pack_environment_of(
        str(python_with(tmp_path, "numpy", "cloudpickle").parents[1]), tmp_path / "whole.tar.gz"
    )
    half = tmp_path / "half.tar.gz"
    half.write_bytes(Path(whole.path).read_bytes()[: whole.size // 2])
    with pytest.raises(ClusterError, match=r"on pod tfdist-\S+, in /tmp/.*: Unexpected EOF"):
        barrier_run(target(), print, workers=1, resources=pybackend.Resources(environment=half))


DRIVER = """
import sys, pybackend

def wait(context):
    import threading
    print("worker is here", flush=True)
    threading.Event().wait(300)

launcher = pybackend.kubernetes("registry/tf:1", python=sys.argv[1], ttl=1)
pybackend.barrier_run(launcher, wait, workers=2)
"""


def driver_of_two(cluster: Kube) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return endless_driver(DRIVER, python_without_blanks(), has_begun=lambda: have_begun(cluster))


@pytest.mark.full
def test_a_driver_whose_machine_is_gone(cluster: Kube) -> None:
    """No driver can delete the Job: the pods end by themselves, and the Job expires."""
    with driver_of_two(cluster) as driver:
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        driver.send_signal(signal.SIGSTOP)  # so that it notices nothing
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        driver.kill()
    wait_for(cluster.is_empty, PATIENCE)


def test_a_web_socket_that_cannot_be_opened_is_an_error() -> None:
    from kubernetes.client import ApiException

    def fail(**options: Any) -> None:
        raise ApiException(status=0, reason="Handshake status 403 Forbidden")

    with pytest.raises(ClusterError, match="could not execute a command: Handshake status 403"):
        own_client._ask("execute a command", fail)
