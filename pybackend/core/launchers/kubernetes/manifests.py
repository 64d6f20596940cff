"""Manifests of a training run: an Indexed Job, and the Service that names its pods."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pybackend.core.launchers.environment.installing import Interpreter, install_command
from pybackend.core.launchers.kubernetes.settings import KubernetesSettings
from pybackend.core.launchers.remote.bundle import as_argument, bootstrap_command

RUN_LABEL = "tfdist.io/run"
CONTAINER = "worker"
INDEX = "batch.kubernetes.io/job-completion-index"
# The pods' only writable folder, with any image.
FOLDER = "/tmp/tfdist"  # noqa: S108 (private to the pod)
# The Python of an environment that the driver sends.
_ROOT, _NAME = f"{FOLDER}/environments", "environment"
_SENT = Interpreter(f"{_ROOT}/{_NAME}/bin/python")
# Not all clusters allow a Service without a port; nothing listens on this one.
_DISCARD_PORT = 9
_DRIVER_SECONDS = 300.0
_RELAY_SECONDS = 30.0
# For a last checkpoint; workers without checkpoints end at once.
_GRACE_SECONDS = 120


def describe_job(
    settings: KubernetesSettings, name: str, workers: int, wanted: str, has_environment: bool
) -> dict[str, Any]:
    """Return the manifest of the Job.

    Individual pods are not restarted: the first failure ends the Job, and Kubernetes stops the
    other pods. The same applies if a node is drained or lost, which ``backoffLimit`` might not
    count.

    Parameters
    ----------
    name
        Name of the Job and the Service.
    wanted
        Packages that the image must have, separated by spaces.
    has_environment
        Whether the driver sends the Python environment of the workers.
    """
    labels = {**settings.labels, "app.kubernetes.io/name": "tfdist", RUN_LABEL: name}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "enableServiceLinks": False,
        "containers": [_describe_container(settings, wanted, has_environment)],
        "volumes": [{"name": "work", "emptyDir": {}}],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "serviceAccountName": settings.service_account,
        # Without a service account, a worker gets no token for Kubernetes.
        "automountServiceAccountToken": None if settings.service_account else False,
        "imagePullSecrets": [{"name": one} for one in settings.image_pull_secrets],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": workers,
            "parallelism": workers,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onPodConditions": [disrupted]}],
            },
            "activeDeadlineSeconds": settings.time_limit,
            "ttlSecondsAfterFinished": settings.ttl,
            "template": {"metadata": {"labels": labels}, "spec": _without_empty(pod)},
        },
    }


def describe_service(
    settings: KubernetesSettings, name: str, job_uid: str | None
) -> dict[str, Any]:
    """Return the manifest of the headless Service, which makes ``NAME-INDEX.NAME`` pod addresses.

    Workers need these names before they are ready. The Job owns the Service, which is deleted with
    it.
    """
    labels = {**settings.labels, "app.kubernetes.io/name": "tfdist", RUN_LABEL: name}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if job_uid is not None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: name},
            "ports": [{"name": "discard", "port": _DISCARD_PORT}],
        },
    }


def host_names(name: str, workers: int) -> tuple[str, ...]:
    """Return the names under which the pods reach each other, by rank."""
    return tuple(f"{name}-{rank}.{name}" for rank in range(workers))


def relay_command(settings: KubernetesSettings) -> list[str]:
    """Return the command that connects the driver to a pod's main process."""
    return [settings.python, "-u", "-c", _program(f"relay({FOLDER!r}, {_RELAY_SECONDS})")]


def _describe_container(
    settings: KubernetesSettings, wanted: str, has_environment: bool
) -> dict[str, Any]:
    waiting = _program(f"wait_for_driver({FOLDER!r}, {_DRIVER_SECONDS})")
    python = _SENT.python if has_environment else settings.python
    bootstrap = bootstrap_command(python, wanted, "kubernetes.task")
    if has_environment:
        unpacking = _program(f"unpack({install_command(_NAME, _ROOT)!r})")
        bootstrap = [settings.python, "-u", "-c", unpacking, *_SENT.start(), *bootstrap]
    resources = {"cpu": settings.cpus, "memory": settings.memory}
    if settings.gpus:
        resources["nvidia.com/gpu"] = str(settings.gpus)
    amounts = {name: amount for name, amount in resources.items() if amount is not None}
    variables = [
        _variable("TFDIST_RANK", "fieldRef", fieldPath=f"metadata.annotations['{INDEX}']"),
        _variable("TFDIST_ADDRESS", "fieldRef", fieldPath="status.podIP"),
        {"name": "TMPDIR", "value": FOLDER},
    ]
    if settings.cpus:
        limit = {"containerName": CONTAINER, "resource": "limits.cpu"}
        variables.append(_variable("TFDIST_CORES", "resourceFieldRef", **limit))
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [settings.python, "-u", "-c", waiting, *bootstrap],
        "env": variables,
        "envFrom": [{"secretRef": {"name": one}} for one in settings.secrets],
        # Exactly as requested: a worker group is as fast as its slowest worker.
        "resources": {"requests": amounts, "limits": amounts} if amounts else None,
        "volumeMounts": [{"name": "work", "mountPath": FOLDER}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return _without_empty(container)


def _variable(name: str, kind: str, **source: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {kind: source}}


def _without_empty(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if value not in (None, [], {})}


def _program(call: str) -> str:
    """Return the argument for Python that defines `boot` and calls one of its functions."""
    text = files("pybackend.core.launchers.kubernetes").joinpath("boot.py").read_text()
    return as_argument(f"{text}\n{call}\n")
