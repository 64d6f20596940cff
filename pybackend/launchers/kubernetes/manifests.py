"""What a training is for Kubernetes: an Indexed Job, and the Service that names its pods."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pybackend.launchers.kubernetes.settings import KubernetesSettings
from pybackend.launchers.remote.bundle import bootstrap_command

RUN_LABEL = "tfdist.io/run"
CONTAINER = "worker"
INDEX = "batch.kubernetes.io/job-completion-index"
# The pods' only writable place, whatever their image is like.
FOLDER = "/tmp/tfdist"  # noqa: S108 (the pod has it to itself)
# A Service without a port is not allowed everywhere; nothing listens on this one.
_DISCARD_PORT = 9
_DRIVER_SECONDS = 300.0
_RELAY_SECONDS = 30.0
# For a last checkpoint: whoever has nothing to keep ends at once.
_GRACE_SECONDS = 120
# Under the interpreter's own options: its current folder must not stand in for real modules.
_RUN = "import base64,sys;del sys.path[0];exec(base64.b64decode('{}'))"


def describe_job(
    settings: KubernetesSettings, name: str, workers: int, wanted: str
) -> dict[str, Any]:
    """The manifest of the Job.

    A gang is not restarted pod by pod: the first that fails ends the Job, and Kubernetes ends the
    others. So does a pod whose node is drained or lost, which ``backoffLimit`` might not count.

    Parameters
    ----------
    name
        Of the Job and the Service.
    wanted
        Packages that the image must have, with blanks between them.
    """
    labels = {**settings.labels, "app.kubernetes.io/name": "tfdist", RUN_LABEL: name}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "enableServiceLinks": False,
        "containers": [_describe_container(settings, wanted)],
        "volumes": [{"name": "work", "emptyDir": {}}],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "serviceAccountName": settings.service_account,
        # Without an account of its own a worker has nothing to say to Kubernetes.
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
    """The manifest of the headless Service, by which ``NAME-INDEX.NAME`` is a pod's address.

    Workers need these names before they are ready for anything else. The Service belongs to the
    Job, and goes with it.
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
    """The names by which the pods know each other, by rank."""
    return tuple(f"{name}-{rank}.{name}" for rank in range(workers))


def relay_command(settings: KubernetesSettings) -> list[str]:
    """The command that joins the driver to a pod's main process."""
    return [settings.python, "-u", "-c", _program(f"relay({FOLDER!r}, {_RELAY_SECONDS})")]


def _describe_container(settings: KubernetesSettings, wanted: str) -> dict[str, Any]:
    waiting = _program(f"wait_for_driver({FOLDER!r}, {_DRIVER_SECONDS})")
    bootstrap = bootstrap_command(settings.python, wanted, "kubernetes.task")
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
        # As much as it asked for, neither less nor more: a gang is as fast as its slowest member.
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
    """Python's argument that defines `boot` and calls one of its functions."""
    text = files("pybackend.launchers.kubernetes").joinpath("boot.py").read_text()
    return _RUN.format(base64.b64encode(f"{text}\n{call}\n".encode()).decode())
