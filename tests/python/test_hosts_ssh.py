"""Lists of hosts in the forms that users write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybackend.core.errors import InputError
from pybackend.core.launchers.hosts.ssh import HostSlots, parse_hosts, ranks_by_host, read_hostfile


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:2,b:2", [HostSlots("a", 2), HostSlots("b", 2)]),
        (["a", "b-1.example.org:3"], [HostSlots("a"), HostSlots("b-1.example.org", 3)]),
        ("ann@a:2", [HostSlots("a", 2, "ann")]),
        ("[fd00::1]:2, ann@[fd00::2]", [HostSlots("fd00::1", 2), HostSlots("fd00::2", 1, "ann")]),
        ("a,b,a:2", [HostSlots("a", 3), HostSlots("b")]),
    ],
)
def test_lists_are_read(given: Any, expected: list[HostSlots]) -> None:
    assert list(parse_hosts(given)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a:2,b:two", "'b:two' is not a host"),
        ("a:0", "'a:0' must have a whole number of slots, 1 or more"),
        ("a,,b", "'' is not a host"),
        ("", "contains no host"),
        ("fd00::1", "must be in brackets"),
        # Never an option on ssh's command line.
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("-l@a", "'-l@a' is not a host"),
        ({"a": 2}, "must be a string"),
        (3, "must be a string"),
    ],
)
def test_a_wrong_entry_is_named(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_hosts(given)


def test_hostfiles_of_horovod_and_open_mpi_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\n\na slots=2 max_slots=4\nann@b:3  # fast\n[fd00::1]\na slots=1\n")
    expected = (HostSlots("a", 3), HostSlots("b", 3, "ann"), HostSlots("fd00::1"))
    assert read_hostfile(file) == expected
    file.write_text("a\nb slots=x\n")
    with pytest.raises(InputError, match=r"line 2 of .*: 'slots=x' must have a whole number"):
        read_hostfile(file)
    file.write_text("# none\n")
    with pytest.raises(InputError, match="lists no hosts"):
        read_hostfile(file)
    with pytest.raises(InputError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "absent")


def test_ranks_fill_hosts_in_order() -> None:
    a, b, c = parse_hosts("a:2,b:2,c")
    assert ranks_by_host([a, b, c], 3) == [(a, range(2)), (b, range(2, 3))]
    with pytest.raises(InputError, match=r"`workers` is 6, but a:2,b:2,c:1 has 5 slots"):
        ranks_by_host([a, b, c], 6)
