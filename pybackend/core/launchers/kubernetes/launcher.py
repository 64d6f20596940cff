"""Workers as the pods of a Job, started from any machine that can reach the cluster."""

from __future__ import annotations

import json
import re
import secrets as random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job import arguments
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit, Note
from pybackend.core.launchers import base
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.kubernetes import cluster as kube
from pybackend.core.launchers.kubernetes.pod import PodChannel
from pybackend.core.launchers.kubernetes.watch import KubernetesWatch
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.package_files import package_root
from pybackend.core.launchers.remote.bundle import Bundle
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group, run_on_hosts
from pybackend.core.launchers.remote.task import RemoteTask, files_of_ranks, pack_task
from pybackend.core.machine.janitor import guarded, swept_folder
from pybackend.core.net.authentication import new_token
from pybackend.core.words import setting, show, show_bytes

# Time limit for all workers to connect, from the first connection.
_MEET_SECONDS = 600.0
_DELETED_SECONDS = 30.0
_LOOK_SECONDS = 0.2
# Large modules are imported only when needed, which is rare: a line of text means that the driver
# deleted the Job itself.
_DELETE = """import sys
if not sys.stdin.readline():
    sys.path[:0] = [sys.argv[1]]
    from pybackend.core.launchers.kubernetes.cluster import Cluster
    with Cluster(sys.argv[2] or None, sys.argv[3]) as cluster:
        cluster.delete_job(sys.argv[4])
"""


@arguments.name_arguments
def kubernetes(
    image: str,
    *,
    namespace: str | None = None,
    context: str | None = None,
    cpus: float | str | None = None,
    memory: str | None = None,
    gpus: int | None = None,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] | None = None,
    secrets: Sequence[str] | None = None,
    service_account: str | None = None,
    image_pull_secrets: Sequence[str] | None = None,
    time_limit: int | None = None,
    ttl: int | None = None,
    python: str | None = None,
    labels: Mapping[str, str] | None = None,
    patience: float | None = None,
) -> KubernetesLauncher:
    """Run workers on a Kubernetes cluster. Pass it as the first argument of a call.

    Each call creates a Job with one pod per worker, shows what the pods are waiting for and their
    progress, returns the result, and deletes the Job. This package, the model and the rows are sent
    to the pods through the API server, so neither the pods nor this machine need to be reachable
    from outside. The pods connect to each other. Ctrl-C, or the end of this process, deletes the
    Job.

    Parameters
    ----------
    image
        Container image with TensorFlow, and Python of the same release as this one (e.g. 3.11). If
        `Resources` has an ``environment``, any image with Python 3.9 or later, ``tar`` and a C
        library that fits: ``"python:3.12-slim"``.
    namespace, context
        Namespace and context. None (default): those of ``kubectl``; in a pod, that pod's namespace
        and account.
    cpus, memory, gpus
        Resources of each worker, used as both request and limit: ``4`` or ``"500m"``; ``"8Gi"``;
        ``1``.
    node_selector
        Labels of the nodes on which workers may run.
    tolerations
        Taints to tolerate, as in a pod's manifest.
    secrets
        Names of Secrets in the namespace, whose keys become environment variables of the workers.
    service_account
        Service account of the pods. None (default): the namespace's default, without its token.
    image_pull_secrets
        Names of the Secrets that nodes use to pull the image.
    time_limit
        Seconds after which Kubernetes ends the Job. None (default): a week.
    ttl
        Seconds that a finished Job is retained if this process could not delete it. None (default):
        300.
    python
        Python in the image. None (default): ``"python3"``.
    labels
        Further labels of the Job, its pods and the Service.
    patience
        Seconds within which all pods must be running. None (default): 600. ``float("inf")``: no
        limit.

    Raises
    ------
    InputError
        An argument is invalid. The message names it.

    Examples
    --------
    >>> import pybackend
    >>> cluster = pybackend.kubernetes(image="registry/tf:1", cpus=4, memory="8Gi", gpus=1)
    >>> result = pybackend.barrier_train(cluster, model, (x, y), workers=4)  # doctest: +SKIP
    """
    # All arguments by name: no other variable exists here yet.
    return KubernetesLauncher(check_settings(**locals()))


class KubernetesLauncher(base.QueuedLauncher):
    """One pod per worker; events arrive on the calling thread. Returned by `kubernetes`."""

    def __init__(self, settings: kube.KubernetesSettings) -> None:
        self.settings = settings

    def __repr__(self) -> str:
        return f"kubernetes({self.settings.image!r})"

    @property
    def where(self) -> str:
        return f"pods of a Kubernetes cluster (image {self.settings.image})"

    def check(self, job: Job) -> None:
        base.reject_fork_server(job)
        kube.check_client()

    def describe(self, job: Job) -> base.Submission:
        workers = 1 if job.is_elastic else job.workers
        planned = self._plan(workers, job.resources.environment is not None)
        texts = [json.dumps(document, indent=2) for document in planned]
        documents = dict(zip(("job.json", "service.json"), texts, strict=True))
        later = ("the last letters of the names, which are random", "the nodes that run the pods")
        return base.Submission(("its own pod",) * job.workers, documents, later)

    def plan(self, workers: int = 2) -> list[dict[str, Any]]:
        """Return the manifests of a call, the Job and its Service, without using a cluster.

        The Service's owner reference is left out, because the Job's UID is not known yet. The
        manifests do not contain the model or the rows.
        """
        arguments.check_whole_number("workers", workers, least=1)
        return self._plan(workers, has_environment=False)

    def _plan(self, workers: int, has_environment: bool) -> list[dict[str, Any]]:
        name = _new_name()
        return [
            kube.describe_job(self.settings, name, workers, _TRAINING, has_environment),
            kube.describe_service(self.settings, name, None),
        ]

    def launch(
        self, job: Job, files: base.Files, datasets: base.DataSets, on_event: Emit
    ) -> base.Outcome:
        self.check(job)
        packed = pack_for(job, lambda text: on_event(Note(text)))
        name, places = _new_name(), job.most_workers
        # The others connect to an elastic worker at the address in its environment.
        hosts = ("localhost",) if job.is_elastic else kube.host_names(name, job.workers)
        member = Member(job, files, None, new_token(), None, False, remedy=_REMEDY)
        reached = kube.Cluster(self.settings.context, self.settings.namespace)
        with reached as cluster, swept_folder() as folder:
            contents = pack_task(RemoteTask(member, hosts), folder, datasets)
            way = _Pods(self.settings, cluster, name, contents, folder, packed)
            return run_on_hosts(way, job, datasets, on_event, places, _REMEDY)


@dataclass(frozen=True)
class _Pods(Way):
    """A `Way` that creates a Job with a pod for each worker; the names begin with ``name``."""

    settings: kube.KubernetesSettings
    cluster: kube.Cluster
    name: str
    contents: Mapping[str, bytes]
    folder: Path
    packed: PackedEnvironment | None

    def name_host(self, number: int, place: int) -> str:
        return f"{self.name}-{number}"

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        job, meeting, packed = start.job, start.meeting, self.packed
        name, workers = start.name(self.name), job.workers
        command, patience = kube.relay_command(self.settings), self.settings.patience
        contents = {**self.contents, **start.post()}

        def join(pod: str, rank: int) -> PodChannel:
            bundle = Bundle({**contents, **files_of_ranks(self.folder, [rank])})
            return PodChannel(self.cluster, pod, command, rank, meeting, bundle, packed)

        if packed is not None:
            size = show_bytes(packed.size)
            start.note(Note(f"sending the Python environment ({size}) to each pod"))
        with self._created(name, job, start.note):
            given = (self.cluster, name, workers, meeting, join, start.note, patience)
            watch, hosts = KubernetesWatch(*given), kube.host_names(name, workers)
            run = partial(run_group, meeting, job, hosts, look=watch.look, explain=watch.explain)
            try:
                yield partial(run, meet_seconds=max(_MEET_SECONDS, patience))
            finally:
                for channel in watch.channels.values():
                    channel.close()
                for channel in watch.channels.values():
                    channel.wait()

    @contextmanager
    def _created(self, name: str, job: Job, on_event: Emit) -> Iterator[None]:
        # A function may not need TensorFlow.
        wanted = _FUNCTION if job.kind == "run" else _TRAINING
        has_environment, cluster = job.resources.environment is not None, self.cluster
        manifest = kube.describe_job(self.settings, name, job.workers, wanted, has_environment)
        where = (package_root(), self.settings.context or "", cluster.namespace, name)
        with guarded([sys.executable, "-c", _DELETE, *where]) as let_go:
            try:
                uid = cluster.create_job(manifest)["metadata"]["uid"]
                cluster.create_service(kube.describe_service(self.settings, name, uid))
                yield
            finally:
                try:
                    _delete(cluster, name)
                    let_go()
                except ClusterError as error:  # the result, or the first error, has precedence
                    on_event(Note(f"{error}. If the Job still exists: `kubectl delete job {name}`"))


_TRAINING, _FUNCTION = "tensorflow numpy", "numpy"
_REMEDY = "use the same image tag for all workers, and remove older images from the nodes"


def _new_name() -> str:
    return f"tfdist-{random.token_hex(4)}"


def _delete(cluster: kube.Cluster, name: str) -> None:
    cluster.delete_job(name)
    deadline = time.monotonic() + _DELETED_SECONDS
    while cluster.read_job(name) is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}

_EXAMPLE = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}


def check_settings(**given: Any) -> kube.KubernetesSettings:
    """Check the arguments of `kubernetes`; None becomes the default. Raises `InputError`."""
    checked = {k: _CHECKS[k](k, value) for k, value in given.items() if value is not None}
    if "image" not in checked:
        raise InputError(
            f"`image` must name a container image, e.g. {show('registry/tf:1')}, not {show(None)}"
        )
    return kube.KubernetesSettings(**checked)


def _matches(pattern: re.Pattern[str], wanted: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value.isprintable() or not pattern.fullmatch(value):
            raise InputError(f"`{name}` must be {wanted}, not {show(value)}")
        return value

    return check


_check_text = _matches(re.compile("[^ ]+"), "text without spaces")
_check_name = _matches(_NAME, "a name that Kubernetes allows (a-z, 0-9, '-' and '.')")


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence):
        raise InputError(f"`{name}` must be a list of names, not {show(value)}")
    return tuple(_check_name(name, one) for one in ([value] if isinstance(value, str) else value))


def _check_quantity(name: str, value: Any) -> str:
    number = arguments.as_number(value)
    text = f"{number:g}" if number is not None else value
    sizes = f"{show('8Gi')} or {show('500M')}"
    if not isinstance(text, str) or not _QUANTITY.fullmatch(text) or not re.search("[1-9]", text):
        example = sizes if name == "memory" else f"4, 0.5 or {show('500m')}"
        raise InputError(f"`{name}` must be a quantity such as {example}, not {show(value)}")
    if name == "memory" and re.fullmatch(r"[\d.]+[mun]?", text):
        raise InputError(f"`memory` must have a unit, as in {sizes}, not {show(value)}")
    return text


def _check_labels(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InputError(f"`{name}` must be like {show({'team': 'physics'})}, not {show(value)}")
    for key, text in value.items():
        if not (isinstance(key, str) and _LABEL_KEY.fullmatch(key)):
            raise InputError(
                f"`{name}` has the key {show(key)}, which is not a valid Kubernetes label"
            )
        if not (isinstance(text, str) and _LABEL_VALUE.fullmatch(text)):
            raise InputError(
                f"`{name}` has {setting(**{key: text})}: expected text of at most 63 letters, "
                "digits, '-', '_' and '.'"
            )
        if name == "labels" and key.partition("/")[0] in ("tfdist.io", "batch.kubernetes.io"):
            raise InputError(
                f"`labels` cannot have {show(key)}: tfdist finds its pods by this label"
            )
    return dict(value)


def _check_tolerations(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    listed = [value] if isinstance(value, Mapping) else value
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise InputError(f"`{name}` must be a list of mappings, not {show(value)}")
    for one in listed:
        if not isinstance(one, Mapping) or not one or not set(one) <= _TOLERATION:
            raise InputError(f"`{name}` must be like {show([_EXAMPLE])}, not {show(one)}")
    return tuple(dict(one) for one in listed)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("image", "context", "python"), _check_text),
    **dict.fromkeys(("cpus", "memory"), _check_quantity),
    **dict.fromkeys(("labels", "node_selector"), _check_labels),
    **dict.fromkeys(("secrets", "image_pull_secrets"), _check_names),
    **dict.fromkeys(("gpus", "ttl"), arguments.Whole(0)),
    "namespace": _matches(_NAMESPACE, "the name of a namespace (a-z, 0-9 and '-')"),
    "tolerations": _check_tolerations,
    "service_account": _check_name,
    "time_limit": arguments.Whole(1),
    "patience": arguments.check_positive,
}
