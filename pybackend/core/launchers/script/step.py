"""Agent that starts the ranks of `tfdist run` as the tasks of a Slurm step, by srun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from typing import IO, Any

from pybackend.core.errors import ClusterError
from pybackend.core.job.messages import Note
from pybackend.core.launchers.script.agent import Agent, Stream
from pybackend.core.launchers.script.agent import run as run_agent
from pybackend.core.launchers.script.slurm import step_command
from pybackend.core.launchers.slurm import commands
from pybackend.core.net.authentication import new_token

# The whole step, in place of a rank.
_STEP = -1
# srun labels each line with its task.
_LABEL = re.compile(rb" *(\d+): (.*\n?)", re.DOTALL)
_TASKS_ENDED = re.compile(rb"srun: error: \S+: tasks? ([\d,-]+): (.*)")
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}


class StepAgent(Agent):
    """Agent that starts all ranks with srun, on this machine; Slurm decides where each runs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._name = f"tfdist-{new_token()[:8]}"
        self._ended: set[int] = set()
        self._partial: dict[Stream, bytes] = {}

    def reserve(self) -> Sequence[str]:
        """Return placeholders: only the tasks themselves will know their addresses."""
        return ["srun"] * len(self.task.site.ranks)

    def start(self, addresses: Sequence[str]) -> None:
        task, ranks = self.task, self.task.site.ranks
        words = step_command(task, len(ranks), self._name, os.environ)
        self.run(_STEP, words, {**self.variables, **task.variables}, signal.SIGTERM)
        self.listen(ranks[0])

    def forward(self, rank: int, stream: Stream, block: bytes) -> None:
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
        if labelled := _LABEL.fullmatch(line):
            super().forward(int(labelled[1]), stream, labelled[2])
            return
        self._note(line.decode(errors="replace").rstrip("\n"))  # a message of srun itself
        if ended := _TASKS_ENDED.match(line):
            status = _status_of(ended[2].decode(errors="replace"))
            for task in commands.expand_nodes(f"[{ended[1].decode()}]"):
                self.end(int(task), status)

    def end(self, rank: int, status: int) -> None:
        """Report that a rank has ended; when the step ends, report all remaining ranks."""
        for each in self.task.site.ranks if rank == _STEP else (rank,):
            if each not in self._ended:
                self._ended.add(each)
                super().end(each, status)

    def kill(self) -> None:
        super().kill()
        # srun may end before its tasks do.
        if len(self._ended) < len(self.task.site.ranks):
            self.deliver(_STEP, signal.SIGKILL)

    def deliver(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to all tasks, or to srun if they have not started yet."""
        try:
            steps = self._find_steps()
            for step in steps:
                with contextlib.suppress(ClusterError):  # it is just ending
                    commands.ask("scancel", f"--signal={number.name.removeprefix('SIG')}", step)
        except ClusterError as error:
            self._note(f"tfdist: {number.name} was not forwarded: {error}")
            steps = []
        if not steps:
            for process in self.processes.values():
                process.send_signal(number)

    def _find_steps(self) -> list[str]:
        job = os.environ["SLURM_JOB_ID"]
        shown = commands.ask("squeue", "--steps", "--noheader", f"--job={job}", "--format=%i %j")
        steps = [line.split() for line in shown.splitlines()]
        return [number for number, name in steps if name == self._name]

    def _note(self, text: str) -> None:
        self.meetings[self.task.site.ranks[0]](Note(text))


def run(folder: str, pipe: IO[bytes], channel: int) -> None:
    """Run the step for the driver that started this process, as `agent.run` does."""
    run_agent(folder, pipe, channel, StepAgent)


def _status_of(text: str) -> int:
    """Return the exit status that srun reports, or the negated signal number."""
    if exited := re.search(r"exit code (\d+)", text):
        return int(exited[1])
    if "Out Of Memory" in text:
        return -signal.SIGKILL
    return -_SIGNALS.get(text.partition(" (")[0].strip(), signal.SIGTERM)
