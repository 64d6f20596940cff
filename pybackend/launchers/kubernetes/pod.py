"""The driver's side of one pod: the channel to its worker."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from pybackend.errors import ClusterError
from pybackend.job.packages import TITLES
from pybackend.launchers.kubernetes.channel import Channel
from pybackend.launchers.kubernetes.cluster import Cluster
from pybackend.launchers.remote.bootstrap import MARK
from pybackend.launchers.remote.bundle import Bundle
from pybackend.launchers.remote.greeting import HostGreeting, read_greeting
from pybackend.net.meeting import MeetingServer
from pybackend.net.shared_lines import SharedLines

_GREETING_SECONDS = 120.0
_BEAT_SECONDS = 5.0
# Its worker beats every five; a node that is gone without a word ends no connection.
_SILENT_SECONDS = 90.0
# Kubernetes says that a container runs a moment before commands can be executed in it.
_ATTEMPTS = 3
_END_SECONDS = 5.0


class PodChannel:
    """A pod that runs, and its worker.

    Parameters
    ----------
    cluster, pod, command
        Where to execute which command.
    rank
        Of the worker.
    meeting
        Adopts it.
    bundle
        Makes what it gets.

    Attributes
    ----------
    obstacle
        Why its Python cannot run workers.
    trouble
        What was wrong with the channel, of which the pod's end may be the cause.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: str,
        command: list[str],
        rank: int,
        meeting: MeetingServer,
        bundle: Callable[[int], Bundle],
    ) -> None:
        self._pod = pod
        self._rank = rank
        self._meeting = meeting
        self._bundle = bundle
        self._channel: Channel | None = None
        self._closed = threading.Event()
        self._is_sent = False
        self._has_greeted = False
        self._began = self._looked = time.monotonic()
        self.trouble: ClusterError | None = None
        self.obstacle: ClusterError | None = None
        self.has_ended = threading.Event()
        threading.Thread(target=self._follow, args=(cluster, command), daemon=True).start()

    def check(self) -> None:
        """Give up a pod that is silent; `has_ended` tells the rest.

        Raises
        ------
        ClusterError
            It cannot run workers.
        """
        now = time.monotonic()
        has_rested = now > self._looked + _SILENT_SECONDS / 2  # this process was stopped
        self._looked = now
        if has_rested and self._channel:
            self._channel.heard = now
        if self.obstacle is not None:
            raise self.obstacle
        if not self._has_greeted and now > self._began + _GREETING_SECONDS:
            raise ClusterError(
                f"pod {self._pod} runs, but its Python has not begun within "
                f"{_GREETING_SECONDS:.0f} s. See `kubectl logs {self._pod}`"
            )
        if self._is_sent and self._channel and now > self._channel.heard + _SILENT_SECONDS:
            self.close()

    def close(self) -> None:
        """Close the lifeline: what runs in the pod ends."""
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def wait(self) -> None:
        """Wait for the end of the connection."""
        self.has_ended.wait(2 * _END_SECONDS)

    def _follow(self, cluster: Cluster, command: list[str]) -> None:
        """All that happens on the channel, to its end."""
        try:
            self._channel = channel = self._open(cluster, command)
            if self._closed.is_set():  # meanwhile
                channel.close()
            with contextlib.suppress(OSError, ValueError):
                self._talk(channel)
            channel.close()
            channel.release(_END_SECONDS)
        except ClusterError as error:
            self.trouble = error
        except Exception as error:  # whatever it is, the driver must not wait for this pod
            self.trouble = ClusterError(f"the driver cannot join pod {self._pod}: {error!r}")
        finally:
            self.has_ended.set()

    def _open(self, cluster: Cluster, command: list[str]) -> Channel:
        for attempt in range(_ATTEMPTS):
            try:
                return Channel(cluster.execute(self._pod, command))
            except ClusterError:
                if attempt == _ATTEMPTS - 1 or self._closed.wait(1.0):
                    raise
        raise AssertionError

    def _talk(self, channel: Channel) -> None:
        said = line = b""
        for line in channel.reading:
            if line.startswith(MARK):
                break
            said = line.strip() or said
        else:
            reason = said.decode(errors="replace") or "the connection ended"
            self.trouble = ClusterError(f"the driver cannot join pod {self._pod}: {reason}")
            return
        self._has_greeted = True
        self.obstacle = self._find_obstacle(read_greeting(line, f"pod {self._pod}"))
        if self.obstacle is not None:
            return
        lines = SharedLines(channel.reading, channel.writing)
        self._meeting.adopt(lines.connect(self._rank), self._rank)
        threading.Thread(target=self._send, args=(channel, lines), daemon=True).start()
        lines.read()

    def _send(self, channel: Channel, lines: SharedLines) -> None:
        """Send the bundle, and from then on show that the driver is there."""
        with contextlib.suppress(OSError, ValueError):
            self._bundle(self._rank).send(lines.write)
            channel.heard = time.monotonic()
            self._is_sent = True
            while not self.has_ended.wait(_BEAT_SECONDS):
                lines.beat()

    def _find_obstacle(self, greeting: HostGreeting) -> ClusterError | None:
        """Why the Python of the image cannot run workers."""
        python, version = greeting.python, ".".join(map(str, greeting.version))
        own = ".".join(map(str, sys.version_info[:2]))
        if greeting.version[:2] != sys.version_info[:2]:
            return ClusterError(
                f"{python} in the image is Python {version}, but here it is {own}, and functions "
                f"do not travel from one to the other. Use an image with Python {own}, or name "
                "another Python of this image: kubernetes(..., python=...)"
            )
        if not greeting.missing:
            return None
        package = greeting.missing[0]
        return ClusterError(
            f"the image has no {TITLES.get(package, package)} for {python}. Install it in the "
            "image, or name another Python of this image: kubernetes(..., python=...)"
        )
