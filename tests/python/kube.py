"""A stand-in for a Kubernetes cluster: an API server on the loopback for Jobs, their pods and their
Services, which checks manifests against the published schemas, and runs pods as processes.

Nodes are the hosts of `namespaces.network`. As on a cluster, names of pods work only by a Service
that selects them, a Job fails with its first pod, and what belongs to a Job goes with it.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
from kubelet import PodProcess
from namespaces import Network, network
from websockets import WebSocket, accept_key

NAMESPACE = "physics"
ABSENT_IMAGE = "registry/absent:1"
INDEX = "batch.kubernetes.io/job-completion-index"
_KINDS = {"jobs": "Job", "pods": "Pod", "services": "Service", "events": "Event"}
_PATH = re.compile(r"/(?:api|apis/batch)/v1/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(?:/(\w+))?")


class Kube:
    """A cluster; tests may read all its attributes.

    Attributes
    ----------
    objects
        Manifests with their states, by kind and name.
    processes
        Processes of the started pods, by name.
    quota
        Maximum number of pods of a Job.
    is_slow
        True if the next end of a pod is processed only when a client reads a Job.
    """

    def __init__(self, hosts: Network, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        self.processes: dict[str, PodProcess] = {}
        self.quota = 1000
        self.is_slow = False
        self._ends: list[tuple[Any, int, str]] = []
        self._nodes = hosts.hosts
        self.addresses = tuple(host.address for host in hosts.hosts)
        self._names = {h.name: Path("/etc/netns", str(h.namespace), "hosts") for h in self._nodes}
        self._plain_names = {name: path.read_text() for name, path in self._names.items()}
        self._lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._write_kubeconfig()

    @property
    def kubeconfig(self) -> Path:
        """Path of the configuration for clients."""
        return self.folder / "kubeconfig"

    def close(self) -> None:
        """Stop everything."""
        for process in self.processes.values():
            process.signal(9)
        self._server.shutdown()
        self._server.server_close()

    def is_empty(self) -> bool:
        """Return whether no object exists."""
        with self._lock:
            return not any(self.objects[kind] for kind in ("jobs", "pods", "services"))

    def pods(self) -> list[Any]:
        """Return all pods, by index."""
        with self._lock:
            return sorted(self.objects["pods"].values(), key=lambda pod: _index(pod))

    def create(self, resource: str, made: Any) -> Any:
        """Create a Job or a Service, as `kubectl create` does."""
        kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)
        metadata = made["metadata"]
        with self._lock:
            metadata.update(uid=secrets.token_hex(8), namespace=NAMESPACE)
            self.objects[resource][metadata["name"]] = made
            if resource == "jobs":
                made["status"] = {}
                for index in range(made["spec"]["completions"]):
                    if index < self.quota:
                        self._make_pod(made, index)
                    else:
                        self._warn(made, "FailedCreate", "exceeded quota: pods")
            self._write_names()
        return made

    def delete_job(self, name: str) -> None:
        """Delete a Job and, when its pods have ended, all objects that belong to it."""
        with self._lock:
            job = self.objects["jobs"].get(name)
            if job is None:
                return
            job["metadata"]["deletionTimestamp"] = _now()
            for pod in self._pods_of(name):
                self.delete_pod(pod)
            self._collect()

    def delete_pod(self, pod: Any, reason: str | None = None) -> None:
        """Delete a pod, with a reason that Kubernetes counts as a disruption, or without one."""
        with self._lock:
            if reason:
                said = {"type": "DisruptionTarget", "status": "True", "reason": reason}
                pod["status"]["conditions"].append(said)
            pod["metadata"].setdefault("deletionTimestamp", _now())
            name = pod["metadata"]["name"]
            if name in self.processes and pod["status"]["phase"] == "Running":
                self.processes[name].end(pod["spec"]["terminationGracePeriodSeconds"])
            else:
                self._collect()

    def answer(self, resource: str, name: str | None, query: Mapping[str, str]) -> Any:
        """Return one object, or those with a label; None if there is none."""
        with self._lock:
            if resource == "jobs" and self._ends:
                self.is_slow = False
                while self._ends:
                    self._take_end(*self._ends.pop(0))
            if name:
                return json.loads(json.dumps(self.objects[resource].get(name)))
            label, _, value = query.get("labelSelector", "").partition("=")
            found = [
                one
                for one in self.objects[resource].values()
                if not label or one["metadata"]["labels"].get(label) == value
            ]
            listed = {"kind": f"{_KINDS[resource]}List", "apiVersion": "v1", "items": found}
            return json.loads(json.dumps({**listed, "metadata": {}}))

    def _make_pod(self, job: Any, index: int) -> None:
        name = f"{job['metadata']['name']}-{index}"
        pod = json.loads(json.dumps(job["spec"]["template"]))
        pod["metadata"].update(
            name=f"{name}-{secrets.token_hex(3)}",
            annotations={INDEX: str(index)},
            ownerReferences=[_owner(job)],
        )
        pod["spec"]["hostname"] = name
        pod.update(kind="Pod", apiVersion="v1", status={"phase": "Pending", "conditions": []})
        self.objects["pods"][pod["metadata"]["name"]] = pod
        container = pod["spec"]["containers"][0]
        if "nvidia.com/gpu" in container.get("resources", {}).get("limits", {}):
            self._leave_pending(pod)
            return
        node = self._nodes[(len(self.objects["pods"]) - 1) % len(self._nodes)]
        pod["spec"]["nodeName"] = node.name
        if container["image"] == ABSENT_IMAGE:
            message = f'Back-off pulling image "{ABSENT_IMAGE}": not found'
            _set_state(pod, "waiting", reason="ImagePullBackOff", message=message)
            return
        self._start(pod)

    def _warn(self, job: Any, reason: str, message: str) -> None:
        name = f"{job['metadata']['name']}.{secrets.token_hex(3)}"
        self.objects["events"][name] = {
            "metadata": {"name": name, "labels": {}},
            "involvedObject": {"kind": "Job", "name": job["metadata"]["name"]},
            "type": "Warning",
            "reason": reason,
            "message": message,
        }

    def _leave_pending(self, pod: Any) -> None:
        count = len(self._nodes)
        message = f"0/{count} nodes are available: {count} Insufficient nvidia.com/gpu."
        said = {"reason": "Unschedulable", "message": message}
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **said}]

    def _start(self, pod: Any) -> None:
        name = pod["metadata"]["name"]
        node = next(one for one in self._nodes if one.name == pod["spec"]["nodeName"])

        def end(code: int, reason: str) -> None:
            with self._lock:
                if self.is_slow:
                    self._ends.append((pod, code, reason))
                else:
                    self._take_end(pod, code, reason)

        self.processes[name] = PodProcess(node, pod, self.folder / f"{name}.log", end)
        pod["status"]["phase"] = "Running"
        pod["status"]["podIP"] = node.address
        _set_state(pod, "running", startedAt=_now())

    def _take_end(self, pod: Any, code: int, reason: str) -> None:
        """Act as the kubelet and the Job controller when a pod has ended."""
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        _set_state(pod, "terminated", exitCode=code, reason=reason, finishedAt=_now())
        job = self.objects["jobs"].get(_owner_of(pod))
        if job is not None and code and not job["status"].get("conditions"):
            job["status"]["conditions"] = [_explain_failure(pod)]
            for other in self._pods_of(job["metadata"]["name"]):
                if other["status"]["phase"] == "Running":
                    self.delete_pod(other)
            wait = job["spec"]["ttlSecondsAfterFinished"]
            timer = threading.Timer(wait, self.delete_job, [job["metadata"]["name"]])
            timer.daemon = True
            timer.start()
        self._collect()

    def _collect(self) -> None:
        """Remove deleted objects that have ended."""
        for name, pod in list(self.objects["pods"].items()):
            if "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] != "Running":
                del self.objects["pods"][name]
        for name, job in list(self.objects["jobs"].items()):
            if "deletionTimestamp" in job["metadata"] and not self._pods_of(name):
                del self.objects["jobs"][name]
        for name, service in list(self.objects["services"].items()):
            if _owner_of(service) not in self.objects["jobs"]:
                del self.objects["services"][name]
        self._write_names()

    def _write_names(self) -> None:
        known = ""
        for service in self.objects["services"].values():
            name, selector = service["metadata"]["name"], service["spec"]["selector"]
            for pod in self.objects["pods"].values():
                labels = pod["metadata"]["labels"]
                is_selected = selector.items() <= labels.items()
                if is_selected and pod["spec"]["subdomain"] == name and "podIP" in pod["status"]:
                    known += f"{pod['status']['podIP']} {pod['spec']['hostname']}.{name}\n"
        for node, path in self._names.items():
            path.write_text(self._plain_names[node] + known)

    def _pods_of(self, job: str) -> list[Any]:
        return [pod for pod in self.objects["pods"].values() if _owner_of(pod) == job]

    def _write_kubeconfig(self) -> None:
        url = f"http://127.0.0.1:{self._server.server_port}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "me", "namespace": NAMESPACE},
                }
            ],
        }
        self.kubeconfig.write_text(json.dumps(content))


@contextmanager
def kube_cluster(folder: Path) -> Iterator[Kube]:
    """Run a cluster of two nodes; remove everything at the end."""
    with network(["node-a", "node-b"]) as hosts:
        cluster = Kube(hosts, folder)
        try:
            yield cluster
        finally:
            cluster.close()


def _handler(cluster: Kube) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            found = self._route()
            if found is None:
                return
            resource, name, part, query = found
            if part == "exec":
                self._execute(str(name))
            elif part == "log":
                lines = cluster.processes[str(name)].read_log()
                self._send(200, "".join(lines[-int(query["tailLines"][0]) :]).encode())
            else:
                plain = {key: values[0] for key, values in query.items()}
                answer = cluster.answer(resource, name, plain)
                self._answer(200, answer) if answer else self._refuse(404, f"{name} not found")

        def do_POST(self) -> None:
            found = self._route()
            if found is None:
                return
            try:
                self._answer(201, cluster.create(found[0], json.loads(self.body)))
            except kubernetes_validate.ValidationError as error:
                self._refuse(422, error.message)

        def do_DELETE(self) -> None:
            found = self._route()
            if found is None:
                return
            if cluster.answer("jobs", found[1], {}) is None:
                self._refuse(404, f'jobs.batch "{found[1]}" not found')
            else:
                cluster.delete_job(str(found[1]))
                self._answer(200, {"kind": "Status", "status": "Success"})

        def _route(self) -> tuple[str, str | None, str | None, dict[str, list[str]]] | None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            matched = _PATH.fullmatch(url.path)
            if self.headers.get("Authorization") != f"Bearer {cluster.token}":
                self._refuse(401, "Unauthorized")
            elif matched is None:
                self._refuse(404, f"nothing at {url.path}")
            elif matched[1] != NAMESPACE:
                self._refuse(403, f'User "me" cannot use the namespace "{matched[1]}"')
            else:
                return matched[2], matched[3], matched[4], parse_qs(url.query)
            return None

        def _execute(self, pod: str) -> None:
            command = parse_qs(urlsplit(self.path).query)["command"]
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", accept_key(self.headers["Sec-WebSocket-Key"]))
            self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):
                _run_command(cluster.processes[pod], command, WebSocket(self.rfile, self.wfile))

        def _refuse(self, code: int, message: str) -> None:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            self._answer(code, {**status, "message": message})

        def _answer(self, code: int, content: Any) -> None:
            self._send(code, json.dumps(content).encode(), "application/json")

        def _send(self, code: int, content: bytes, kind: str = "text/plain") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _run_command(pod: PodProcess, command: list[str], client: WebSocket) -> None:
    """Execute a command until it or its client ends."""
    with pod.execute(command) as process:
        assert process.stdin is not None

        def bring(channel: int, source: Any) -> None:
            with suppress(OSError):
                while block := source.read(1 << 15):
                    client.send(bytes([channel]) + block)

        def finish() -> None:
            for thread in outputs:
                thread.join()
            with suppress(OSError):
                client.send(b"\x03" + b'{"status": "Success"}')
                client.close()

        outputs = [
            threading.Thread(target=bring, args=pair, daemon=True)
            for pair in ((1, process.stdout), (2, process.stderr))
        ]
        for thread in outputs:
            thread.start()
        last = threading.Thread(target=finish, daemon=True)
        last.start()
        with suppress(OSError):
            for message in client.messages():
                rest = memoryview(message)[1:]
                while rest:
                    rest = rest[process.stdin.write(rest) :]
        process.stdin.close()
        last.join()


def _explain_failure(pod: Any) -> dict[str, str]:
    said = {"reason": "BackoffLimitExceeded", "message": "Job has reached the backoff limit"}
    if any(one["type"] == "DisruptionTarget" for one in pod["status"]["conditions"]):
        message = f"Pod {pod['metadata']['name']} has condition DisruptionTarget matching FailJob"
        said = {"reason": "PodFailurePolicy", "message": message}
    return {"type": "Failed", "status": "True", "lastTransitionTime": _now(), **said}


def _set_state(pod: Any, state: str, **said: Any) -> None:
    status = {"name": "worker", "ready": state == "running", "state": {state: said}}
    pod["status"]["containerStatuses"] = [{**status, "image": "", "imageID": "", "restartCount": 0}]


def _owner(job: Any) -> dict[str, Any]:
    metadata = job["metadata"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }


def _owner_of(made: Any) -> str:
    return made["metadata"].get("ownerReferences", [{"name": ""}])[0]["name"]


def _index(pod: Any) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
