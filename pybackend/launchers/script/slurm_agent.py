"""Agent of `tfdist run` in an allocation: it starts all ranks with srun, as one step."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping

from pybackend.errors import ClusterError
from pybackend.launchers.script.agent import Agent, serve_here
from pybackend.launchers.script.messages import (
    Deliver,
    Ended,
    Prepare,
    Printed,
    StartRanks,
    Stream,
    own_python,
)
from pybackend.launchers.script.plan import NAMES
from pybackend.launchers.script.slurm_site import step_command
from pybackend.launchers.slurm.nodes import expand_nodes
from pybackend.launchers.slurm.queue import ask
from pybackend.net.rendezvous import new_token

# The whole step, in place of a rank.
_STEP = -1
# srun labels each line with its task.
_LABEL = re.compile(rb" *(\d+): (.*\n?)", re.DOTALL)
_TASKS_ENDED = re.compile(rb"srun: error: \S+: tasks? ([\d,-]+): (.*)")
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
# Each rank gets its own from Slurm.
_OF_RANKS = NAMES - {"TFDIST_SECRET", "TFDIST_RESTART"}


class StepAgent(Agent):
    """Agent that serves the driver; Slurm decides where each rank runs."""

    def __init__(self, orders: int, answers: int, variables: Mapping[str, str]) -> None:
        super().__init__(orders, answers, variables)
        self._name = f"tfdist-{new_token()[:8]}"
        self._ended: set[int] = set()
        self._partial: dict[Stream, bytes] = {}

    def serve(self) -> None:
        """Serve the driver; srun may end before its tasks do."""
        try:
            super().serve()
        finally:
            if self._is_running():
                self._signal(signal.SIGKILL)

    def _is_running(self) -> bool:
        return hasattr(self, "_prepared") and len(self._ended) < len(self._prepared.ranks)

    def _reserve(self, order: Prepare) -> tuple[str, ...]:
        """Return placeholders: only the tasks themselves will know their addresses."""
        return tuple(f"srun:{rank + 1}" for rank in order.ranks)

    def _start(self, order: StartRanks) -> None:
        given = {k: v for k, v in order.variables[0].items() if k not in _OF_RANKS}
        script, folder = self._prepared.script, self._prepared.folder
        words = step_command(script, len(self._prepared.ranks), folder, self._name, os.environ)
        variables = {**os.environ, **own_python(os.environ, sys.executable), **given}
        self._run(_STEP, words, variables, signal.SIGTERM)

    def _print(self, rank: int, stream: Stream, block: bytes) -> None:
        """Forward output in whole lines, because each begins with its rank."""
        # Not `splitlines`: a carriage return of a progress bar does not end a line of srun.
        *lines, rest = (self._partial.pop(stream, b"") + block).split(b"\n")
        for line in lines:
            self._read_line(stream, line + b"\n")
        if block:
            self._partial[stream] = rest
        elif rest:
            self._read_line(stream, rest)

    def _read_line(self, stream: Stream, line: bytes) -> None:
        labelled = _LABEL.fullmatch(line)
        if labelled:
            rank, text = int(labelled[1]), labelled[2].decode("latin-1")
            self._say(Printed(rank, stream, text))
            return
        os.write(2, line)  # a message of srun itself
        ended = _TASKS_ENDED.match(line)
        if ended:
            status = _status_of(ended[2].decode(errors="replace"))
            for task in expand_nodes(f"[{ended[1].decode()}]"):
                self._say_ended(int(task), status)

    def _say_ended(self, rank: int, status: int) -> None:
        """Report that a rank has ended; when the step ends, report all remaining ranks."""
        for each in self._prepared.ranks if rank == _STEP else (rank,):
            if each not in self._ended:
                self._ended.add(each)
                self._say(Ended(each, status))

    def _deliver(self, order: Deliver) -> None:
        self._signal(signal.Signals(order.signal))

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all tasks, or to srun if they have not started yet."""
        try:
            steps = self._find_steps()
            for step in steps:
                with contextlib.suppress(ClusterError):  # it is just ending
                    ask("scancel", f"--signal={number.name.removeprefix('SIG')}", step)
        except ClusterError as error:
            os.write(2, f"tfdist: {number.name} was not forwarded: {error}\n".encode())
            steps = []
        if not steps:
            for process in self._processes.values():
                process.send_signal(number)

    def _find_steps(self) -> list[str]:
        job = os.environ["SLURM_JOB_ID"]
        shown = ask("squeue", "--steps", "--noheader", f"--job={job}", "--format=%i %j")
        steps = [line.split() for line in shown.splitlines()]
        return [number for number, name in steps if name == self._name]


def main() -> None:
    """Serve the driver that started this process."""
    serve_here(StepAgent)


def _status_of(text: str) -> int:
    """Return the exit status that srun reports, or the negated signal number."""
    exited = re.search(r"exit code (\d+)", text)
    if exited:
        return int(exited[1])
    if "Out Of Memory" in text:
        return -signal.SIGKILL
    return -_SIGNALS.get(text.partition(" (")[0].strip(), signal.SIGTERM)
