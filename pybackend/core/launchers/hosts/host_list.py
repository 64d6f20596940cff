"""Lists of hosts with their slots: ``"a:2,b:2"``, and hostfiles."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.words import show

# A name never begins with "-", because it is used on command lines.
_ENTRY = re.compile(
    r"(?:(?P<user>[^-@:\s\[\]][^@:\s\[\]]*)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>\w[\w.-]*))"
    r"(?::(?P<slots>\d+))?"
)
_MOST_SLOTS = 1024
_FORM = 'expected "name", "name:slots", "user@name:slots" or "[IPv6 address]:slots"'


@dataclass(frozen=True)
class HostSlots:
    """A host and its number of slots. ``user`` is the user to log in as; None: ssh's default.

    If several jobs run there at once, ``neighbours`` is the number of workers of all of them, and
    ``first`` the number of the first of these slots.
    """

    name: str
    slots: int = 1
    user: str | None = None
    first: int = 0
    neighbours: int | None = None

    @property
    def login(self) -> str:
        """The host as an argument of ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(given: str | Sequence[str]) -> tuple[HostSlots, ...]:
    """Read a list of hosts, in order; a host that is listed twice has the slots of both entries.

    Parameters
    ----------
    given
        ``"a:2,b:2"``, or a sequence of such texts. An entry is ``name``, ``name:slots`` or
        ``user@name:slots``; an IPv6 address must be in brackets. The default is one slot.

    Raises
    ------
    InputError
        An entry cannot be parsed. The message names it.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"`hosts` must be a string like {show('a:2,b:2')}, or a list of them, not {show(given)}"
        )
    entries = [entry.strip() for text in texts for entry in text.split(",")]
    if not any(entries):
        raise InputError(f'`hosts` contains no host: {_FORM}, e.g. "a:2,b:2"')
    return _merge(_parse_entry(entry, "`hosts`") for entry in entries)


def read_hostfile(path: str | os.PathLike[str]) -> tuple[HostSlots, ...]:
    """Read a hostfile in the format of Horovod and Open MPI.

    A line is ``host slots=2`` or ``host:2``; other settings and text after ``#`` are ignored.

    Raises
    ------
    InputError
        The file cannot be read, or a line cannot be parsed. The message names the line.
    """
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hostfile {show(str(path))}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_parse_line(words, f"line {number} of {show(str(path))}"))
    if not found:
        raise InputError(
            f'the hostfile {show(str(path))} lists no hosts: expected lines "host slots=2"'
        )
    return _merge(found)


def divide_slots(hosts: Sequence[HostSlots], workers: int, jobs: int) -> list[list[HostSlots]]:
    """Divide the slots of hosts among jobs with this number of workers each, in order."""
    slots = [replace(host, first=one) for host in hosts for one in range(host.slots)]
    parts = [slots[job * workers : (job + 1) * workers] for job in range(jobs)]
    used = Counter((slot.user, slot.name) for part in parts for slot in part)
    divided = []
    for part in parts:
        by_host: dict[Any, list[HostSlots]] = {}
        for slot in part:
            by_host.setdefault((slot.user, slot.name), []).append(slot)
        divided.append(
            [replace(own[0], slots=len(own), neighbours=used[key]) for key, own in by_host.items()]
        )
    return divided


def ranks_by_host(hosts: Sequence[HostSlots], workers: int) -> list[tuple[HostSlots, range]]:
    """Assign ranks to the slots of hosts, in order; hosts without ranks are left out.

    Raises
    ------
    InputError
        There are fewer slots than workers.
    """
    slots = sum(host.slots for host in hosts)
    if workers > slots:
        listed = ",".join(f"{host.login}:{host.slots}" for host in hosts)
        raise InputError(
            f"`workers` is {workers}, but {listed} has {counted(slots, 'slot')}: "
            f"use at most {slots}, or give hosts more slots (one for each GPU, or for each few "
            "cores)"
        )
    placed, first = [], 0
    for host in hosts:
        ranks = range(first, min(first + host.slots, workers))
        if ranks:
            placed.append((host, ranks))
        first = ranks.stop
    return placed


def _parse_line(words: Sequence[str], place: str) -> HostSlots:
    host = _parse_entry(words[0], place)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "slots":
            host = replace(host, slots=_count(value, word, place))
    return host


def _parse_entry(entry: str, place: str) -> HostSlots:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        hint = "" if entry.count(":") < 2 else "; an IPv6 address must be in brackets"
        raise InputError(f"{place}: {show(entry)} is not a host: {_FORM}{hint}")
    slots = _count(found["slots"] or "1", entry, place)
    return HostSlots(found["address"] or found["name"], slots, found["user"])


def _count(text: str, entry: str, place: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{place}: {show(entry)} must have a whole number of slots, 1 or more")
    if int(text) > _MOST_SLOTS:
        raise InputError(
            f"{place}: {show(entry)} asks for {text} workers on one host. If this is a port: ssh's "
            "port goes into ssh_options, and all other ports are chosen automatically"
        )
    return int(text)


def _merge(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    merged: dict[str, HostSlots] = {}
    for host in hosts:
        known = merged.get(host.login)
        merged[host.login] = (
            host if known is None else replace(known, slots=known.slots + host.slots)
        )
    return tuple(merged.values())
