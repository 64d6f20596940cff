"""The rank of a process among the tasks of a real srun."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from slurm import Slurm, needs_slurm, slurm_cluster

from pybackend import ClusterError
from pybackend.core.launchers.joined.place import find_slurm_place
from pybackend.core.launchers.slurm.commands import expand_counts, expand_nodes

pytestmark = [pytest.mark.launcher, needs_slurm]

SHOW = """
import json, os, socket
from pybackend.core.launchers.joined.place import find_slurm_place
place = find_slurm_place(os.environ)
shown = place and [place.rank, place.size, place.meeting, place.peers]
print(json.dumps([socket.gethostname(), shown]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm_cluster() as running:
        yield running


def places(cluster: Slurm, *options: str, before: tuple[str, ...] = ()) -> list[Any]:
    """Start tasks; return, by rank, the host, the meeting, and the hosts that the task knows."""
    out = cluster.run(*before, "srun", *options, sys.executable, "-c", SHOW)
    shown = [json.loads(line) for line in out.splitlines()]
    found = sorted(
        (rank, size, meeting, host, peers) for host, (rank, size, meeting, peers) in shown
    )
    assert [rank for rank, *_ in found] == list(range(len(shown)))
    assert {size for _, size, *_ in found} == {len(shown)}
    return [(host, meeting, peers) for _, _, meeting, host, peers in found]


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["-n4", "-N3"], ["n2", "n2", "n10", "n11"]),
        (["-n4", "-N3", "-m", "block:cyclic"], ["n2", "n2", "n10", "n11"]),
        (["-n4", "-N3", "-m", "cyclic"], ["n2", "n10", "n11", "n2"]),
        (["-n2", "-w", "n11,n10"], ["n10", "n11"]),
    ],
)
def test_rank_is_procid_and_the_meeting_is_on_its_first_host(
    cluster: Slurm, options: list[str], hosts: list[str]
) -> None:
    found = places(cluster, *options)
    assert [host for host, *_ in found] == hosts
    assert [peers for *_, peers in found] == [hosts] * len(hosts)
    assert {meeting.partition(":")[0] for _, meeting, _ in found} == {hosts[0]}
    [port] = {int(meeting.partition(":")[2]) for _, meeting, _ in found}
    assert 20_000 <= port < 32_000


def test_steps_of_one_allocation_are_apart(cluster: Slurm) -> None:
    show = f"'{sys.executable}' -c '{SHOW}'"
    twice = f"for part in 0 1; do srun -N2 -n2 --relative=$part {show}; done"
    shown = map(json.loads, cluster.run("salloc", "-N3", "-n3", "sh", "-c", twice).splitlines())
    meetings = {meeting for _, (_, _, meeting, _) in shown}
    assert {meeting.partition(":")[0] for meeting in meetings} == {"n2", "n10"}
    assert len({meeting.partition(":")[2] for meeting in meetings}) == 2


def test_arbitrary_order_comes_from_its_file(cluster: Slurm) -> None:
    file = cluster.folder / "hosts-by-rank"
    file.write_text("n11\nn2\nn11\n")
    found = places(cluster, "-n3", "-m", "arbitrary", before=("env", f"SLURM_HOSTFILE={file}"))
    assert [host for host, *_ in found] == ["n11", "n2", "n11"]
    assert {meeting.partition(":")[0] for _, meeting, _ in found} == {"n11"}
    assert [peers for *_, peers in found] == [[]] * 3


def test_what_is_no_group(cluster: Slurm) -> None:
    assert json.loads(cluster.run("srun", "-n1", sys.executable, "-c", SHOW))[1] is None
    script = f"#!/bin/sh\n'{sys.executable}' -c '{SHOW}'\n"
    (cluster.folder / "batch.sh").write_text(script)
    output = cluster.folder / "batch.out"
    cluster.run("sbatch", "-W", "-n3", "-o", str(output), str(cluster.folder / "batch.sh"))
    assert json.loads(output.read_text())[1] is None


def test_an_order_that_no_variable_tells() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    with pytest.raises(ClusterError, match="SLURM_HOSTFILE=None"):
        find_slurm_place({**step, "SLURM_DISTRIBUTION": "arbitrary"})


@pytest.mark.parametrize(
    "nodes", ["n2", "n[2,10-11]", "m1,n[2-3],x", "rack[01-02]n[007-012]", "r1c[09-11]"]
)
def test_nodes_are_those_that_slurm_lists(cluster: Slurm, nodes: str) -> None:
    assert expand_nodes(nodes) == cluster.run("scontrol", "show", "hostnames", nodes).split()


def test_tasks_per_node() -> None:
    assert expand_counts("2,1(x2),4") == [2, 1, 1, 4]
