"""Addresses by which other hosts reach one, on separate hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Network, network, no_namespaces

import pybackend

pytestmark = pytest.mark.skipif(bool(no_namespaces()), reason="NO NETWORK NAMESPACES")

PROGRAM = """
import json, sys
from pybackend.core.errors import ClusterError
from pybackend.core.launchers.remote.task import find_own_address
found = []
for hosts, rank, reached in json.loads(sys.argv[1]):
    try:
        found.append(find_own_address(hosts, rank, reached))
    except ClusterError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def there() -> Iterator[Network]:
    with network(["a", "b"]) as made:
        yield made


def test_a_host_has_an_address_for_the_others(there: Network) -> None:
    a, b = there.hosts
    # As Debian's installer writes it.
    names = Path("/etc/netns", str(a.namespace), "hosts")
    names.write_text(names.read_text() + "127.0.1.1 debian\n")
    cases = {
        # The name, if it resolves to an address that others may use.
        json.dumps([["a", "b"], 0, None]): a.address,
        json.dumps([["a-6", "b"], 0, a.address]): a.address6,
        json.dumps([[a.address6, b.address6], 0, None]): a.address6,
        # Otherwise the address by which ssh connected.
        json.dumps([["debian", "b"], 0, a.address]): a.address,
        json.dumps([["only-the-driver-knows", "b"], 0, a.address6]): a.address6,
        # Otherwise the route to the others.
        json.dumps([["debian", "b"], 0, None]): a.address,
        json.dumps([["localhost", "b-6"], 0, "127.0.0.1"]): a.address6,
    }
    nowhere = [["debian", "debian"], 0, "127.0.0.1"]
    given = json.dumps([*map(json.loads, cases), nowhere])
    shown = subprocess.run(
        [*a.enter, sys.executable, "-c", PROGRAM, given],
        env={"PYTHONPATH": str(Path(pybackend.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    *found, refused = json.loads(shown.stdout)
    assert found == list(cases.values())
    assert refused.startswith("the other hosts cannot reach debian")
