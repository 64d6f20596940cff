"""Pods as processes on the hosts of `namespaces.network`. Each pod has its own first process, /tmp,
host name and address, and ends whole with its first process, as in a container.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from namespaces import Host

# A pod has a /tmp of its own, in which this Python is seen again if it lies below /tmp.
_START = """
mount -t tmpfs none /mnt
for kept in "$3" "$4"; do
  case "$kept" in /tmp/*) mkdir -p "/mnt$kept"; mount --bind "$kept" "/mnt$kept";; esac
done
mount -t tmpfs none /tmp
for kept in "$3" "$4"; do
  case "$kept" in /tmp/*) mkdir -p "$kept"; mount --move "/mnt$kept" "$kept";; esac
done
umount /mnt
mkdir "$1"; hostname "$2"; shift 4; exec "$@"
"""
_ROOT = Path(__file__).parents[2]
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


class PodProcess:
    """Processes of one pod; ``on_end`` gets its exit code and the reason."""

    def __init__(
        self,
        host: Host,
        pod: Mapping[str, Any],
        log: Path,
        on_end: Callable[[int, str], None],
    ) -> None:
        self._host = host
        self._log = log
        self._was_out_of_memory = False
        container = pod["spec"]["containers"][0]
        mounted = container["volumeMounts"][0]["mountPath"]
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": "/tmp",
            **{v["name"]: self._value(v, pod) for v in container["env"]},
        }
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        shell = ["sh", "-ec", _START, "sh", mounted, pod["spec"]["hostname"]]
        shell += [str(_ROOT), sys.base_prefix]
        with log.open("wb") as output:
            self._outer = subprocess.Popen(
                [*host.enter, *isolated, "--mount-proc", *shell, *container["command"]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )
        limit = container.get("resources", {}).get("limits", {}).get("memory")
        threading.Thread(target=self._follow, args=(on_end, limit), daemon=True).start()

    def execute(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start another process in the pod, with pipes."""
        entered = ["nsenter", f"--target={self._first()}", "--mount", "--uts", "--net", "--pid"]
        entered += ["--root", "--wd"]  # those of the pod, where this process runs in a chroot
        return subprocess.Popen(
            [*entered, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=self.environment,
        )

    def end(self, grace: float) -> None:
        """Send SIGTERM, and kill the pod after some seconds."""
        self.signal(signal.SIGTERM)

        def insist() -> None:
            try:
                self._outer.wait(grace)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)

        threading.Thread(target=insist, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send the first process a signal."""
        if first := self._first():
            os.kill(first, number)

    def read_log(self) -> list[str]:
        """Return the pod's output."""
        return self._log.read_text(errors="replace").splitlines(keepends=True)

    def wait(self, seconds: float) -> None:
        """Wait until the pod ends."""
        self._outer.wait(seconds)

    def _value(self, variable: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "resourceFieldRef" in source:
            return str(pod["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        path = source["fieldRef"]["fieldPath"]
        if path == "status.podIP":
            return self._host.address
        return str(pod["metadata"]["annotations"][re.findall("'(.*)'", path)[0]])

    def _first(self) -> int:
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        deadline = time.monotonic() + 5
        while self._outer.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):  # it has ended
                if found := children.read_text().split():
                    return int(found[0])
        return 0

    def _follow(self, on_end: Callable[[int, str], None], limit: str | None) -> None:
        while limit and self._outer.poll() is None:
            if self._used() > int(limit[:-2]) * _UNITS[limit[-2:]]:
                self._was_out_of_memory = True
                self.signal(signal.SIGKILL)
                break
            time.sleep(0.1)
        status = self._outer.wait()
        code = status if status >= 0 else 128 - status
        if self._was_out_of_memory:
            on_end(137, "OOMKilled")
        else:
            on_end(code, "Error" if code else "Completed")

    def _used(self) -> int:
        """Return the memory in bytes of all processes of the pod."""
        try:
            own = os.readlink(f"/proc/{self._first()}/ns/pid")
        except OSError:
            return 0
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") == own:
                    total += int((folder / "statm").read_text().split()[1]) * 4096
            except OSError:  # it has ended
                continue
        return total
