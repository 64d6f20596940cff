"""Requests to Kubernetes, explanations of their errors, and the manifests of what they create."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers.environment.installing import Interpreter, install_command
from pybackend.core.launchers.remote.bundle import as_argument, bootstrap_command
from pybackend.core.words import install, show

_WEEK = 7 * 24 * 3600


@dataclass(frozen=True)
class KubernetesSettings:
    image: str
    namespace: str | None = None
    context: str | None = None
    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    time_limit: int = _WEEK
    ttl: int = 300
    python: str = "python3"
    labels: Mapping[str, str] = field(default_factory=dict)
    patience: float = 600.0


# Timeouts: to connect, and between two parts of a response.
_SECONDS = (10.0, 30.0)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def check_client() -> None:
    """Raise `InputError` if the client is not installed; do not load it."""
    if find_spec("kubernetes") is None:
        raise InputError(
            "kubernetes() needs the package kubernetes, which is not installed: `pip install "
            f"kubernetes`, or `{install('kubernetes')}`"
        )


class Cluster:
    """One namespace of a cluster; a context manager. All objects are mappings, as in manifests.

    Without ``context``, it is the current one of the kubeconfig file or, in a pod, the pod's
    account; without ``namespace``, that of the context. Raises `InputError` if the context does not
    exist, and `ClusterError` if no cluster is configured or a request fails.
    """

    def __init__(self, context: str | None, namespace: str | None) -> None:
        from kubernetes.client import BatchV1Api, CoreV1Api

        self._configuration, own = _load_configuration(context)
        self.namespace = namespace or own
        self._client = self._connect()
        self._core = CoreV1Api(self._client)
        self._batch = BatchV1Api(self._client)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.rest_client.pool_manager.clear()

    def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        create = partial(self._batch.create_namespaced_job, self.namespace, manifest)
        return self._plain(_ask("create the Job", create))

    def create_service(self, manifest: Mapping[str, Any]) -> None:
        create = partial(self._core.create_namespaced_service, self.namespace, manifest)
        _ask("create the Service", create)

    def read_job(self, name: str) -> dict[str, Any] | None:
        """Return a Job; None if it does not exist."""
        read = partial(self._batch.read_namespaced_job, name, self.namespace)
        found = _ask("read the Job", read, unless=404)
        return None if found is None else self._plain(found)

    def delete_job(self, name: str) -> None:
        """Delete a Job and its dependents, pods first; do nothing if it does not exist."""
        from kubernetes.client import V1DeleteOptions

        options = V1DeleteOptions(propagation_policy="Foreground")
        delete = partial(self._batch.delete_namespaced_job, name, self.namespace, body=options)
        _ask("delete the Job", delete, unless=404)

    def list_pods(self, name: str) -> list[dict[str, Any]]:
        options = {"label_selector": f"{RUN_LABEL}={name}"}
        read = partial(self._core.list_namespaced_pod, self.namespace, **options)
        return list(map(self._plain, _ask("list the Job's pods", read).items))

    def list_warnings(self, name: str) -> list[str]:
        """Return warning events for the Job, such as exceeded quotas; empty if not permitted."""
        options = {"field_selector": f"involvedObject.name={name},type=Warning"}
        read = partial(self._core.list_namespaced_event, self.namespace, **options)
        found = _ask("list events", read, unless=403)
        return [f"{one.reason}: {one.message}" for one in found.items] if found else []

    def read_log(self, pod: str, lines: int) -> tuple[str, ...]:
        """Return the end of a pod's log; empty if there is no log."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        read = partial(self._core.read_namespaced_pod_log, container=CONTAINER, tail_lines=lines)
        with suppress(ApiException, HTTPError):
            text = read(pod, self.namespace, _preload_content=False, **_LIMIT).read()
            return tuple(text.decode(errors="replace").splitlines())
        return ()

    def execute(self, pod: str, command: Sequence[str]) -> Any:
        """Return the client's `WSClient`, for binary data, of a command in a pod."""
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        # `stream` modifies its client, so it gets a separate one.
        api = CoreV1Api(self._connect())
        run = partial(stream, api.connect_get_namespaced_pod_exec, pod, self.namespace)
        pipes = {"stdin": True, "stdout": True, "stderr": False, "tty": False, "binary": True}
        options = {"container": CONTAINER, "command": list(command), "_preload_content": False}
        return _ask(f"execute a command in pod {pod}", partial(run, **pipes, **options))

    def _connect(self) -> Any:
        from kubernetes.client import ApiClient

        return ApiClient(self._configuration)

    def _plain(self, found: Any) -> dict[str, Any]:
        plain: dict[str, Any] = self._client.sanitize_for_serialization(found)
        return plain


_LIMIT = {"_request_timeout": _SECONDS}


def _load_configuration(context: str | None) -> tuple[Any, str]:
    from kubernetes.client import Configuration

    # Not all releases have types.
    config: Any = import_module("kubernetes.config")
    configuration = Configuration()
    try:
        config.load_kube_config(context=context, client_configuration=configuration)
        contexts, current = config.list_kube_config_contexts()
        chosen = next((one for one in contexts if one["name"] == context), current)
        return configuration, chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        if context is not None:
            raise InputError(f"`context` is {show(context)}: {error}") from error
        if not _OWN_NAMESPACE.exists():
            raise ClusterError(
                f"no Kubernetes cluster is configured: {str(error).rstrip('.')}. Log in to it, so "
                "that `kubectl get pods` works here, or set KUBECONFIG"
            ) from error
    config.load_incluster_config(client_configuration=configuration)
    return configuration, _OWN_NAMESPACE.read_text().strip()


# What to do, by HTTP status.
_ADVICE = {
    401: ". Log in to the cluster again",
    403: ". Request the permission, or use another `namespace`",
}


def _ask(what: str, request: Callable[..., Any], unless: int | None = None) -> Any:
    """Return the response to a request; None if it fails with the HTTP status ``unless``.

    Other failures raise a `ClusterError`.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return request(**_LIMIT)
    except ApiException as error:
        # A WebSocket that fails has status 0.
        if unless is not None and error.status == unless:
            return None
        reason = str(error.reason or error)
        with suppress(TypeError, ValueError, KeyError):
            reason = str(json.loads(error.body)["message"])
        advice = _ADVICE.get(error.status or 0, "")
        raise ClusterError(f"Kubernetes could not {what}: {reason}{advice}") from error
    except HTTPError as error:
        raise ClusterError(
            f"Kubernetes did not respond when asked to {what}: {error}. Try `kubectl get pods`"
        ) from error


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

    ``wanted`` are the packages that the image must have, separated by spaces. ``has_environment``
    is True if the driver sends a Python environment.
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
            # No pod is restarted: the first failure ends the Job, and Kubernetes stops the others.
            "backoffLimit": 0,
            # The same if a node is drained or lost, which `backoffLimit` might not count.
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
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
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    owners = [] if job_uid is None else [owner]
    metadata = _without_empty({"name": name, "labels": labels, "ownerReferences": owners})
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
    return tuple(f"{name}-{rank}.{name}" for rank in range(workers))


def relay_command(settings: KubernetesSettings) -> list[str]:
    return [settings.python, "-u", "-c", _program(f"relay({FOLDER!r}, {_RELAY_SECONDS})")]


def _describe_container(
    settings: KubernetesSettings, wanted: str, has_environment: bool
) -> dict[str, Any]:
    waiting = _program(f"wait_for_driver({FOLDER!r}, {_DRIVER_SECONDS})")
    python = _SENT.python if has_environment else settings.python
    bootstrap = bootstrap_command(python, wanted, "kubernetes.pod.run")
    if has_environment:
        unpacking = _program(f"unpack({install_command(_NAME, _ROOT)!r})")
        bootstrap = [settings.python, "-u", "-c", unpacking, *_SENT.start(), *bootstrap]
    gpus = str(settings.gpus) if settings.gpus else None
    resources = {"cpu": settings.cpus, "memory": settings.memory, "nvidia.com/gpu": gpus}
    amounts = _without_empty(resources)
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
    text = files("pybackend.core.launchers.kubernetes").joinpath("boot.py").read_text()
    return as_argument(f"{text}\n{call}\n")
