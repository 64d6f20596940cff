"""Detection of this process's rank from its environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pybackend import join, make_tf_config
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers import count_workers, launcher_for
from pybackend.core.launchers.joined.launcher import JoinedLauncher
from pybackend.core.launchers.joined.place import find_place
from pybackend.core.launchers.local import LocalLauncher

PAIR = ["10.0.0.1:2222", "10.0.0.2:2222"]
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_tf_config_says_who_a_process_is() -> None:
    place = find_place({"TF_CONFIG": make_tf_config(["a:1", "b:1", "b:2"], 2)})
    assert place is not None
    assert (place.rank, place.size, place.meeting, place.own) == (2, 3, "a:1", "b:2")
    assert (place.local_rank, place.local_size) == (1, 2)
    assert not place.is_one_machine


def test_a_chief_is_the_first() -> None:
    text = make_tf_config(["b:1", "c:1"], chief="a:1", index=1)
    place = find_place({"TF_CONFIG": text})
    assert place is not None
    assert (place.rank, place.size, place.meeting, place.own) == (2, 3, "a:1", "c:1")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": '{"cluster": {}, "environment": "cloud"}'},
        {"TF_CONFIG": make_tf_config(["a:1"], 0)},
        {"TF_CONFIG": make_tf_config([], role="chief", chief="a:1", ps=["b:2"])},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_alone_has_no_place(environment: dict[str, str]) -> None:
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'cluster'", "TF_CONFIG is not JSON"),
        (make_tf_config(["a:1"], role="ps", ps=["b:2"], index=0), "this process is ps 0"),
        (
            json.dumps(
                {"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}}
            ),
            "lists the addresses of only 1 of 2 processes",
        ),
    ],
)
def test_a_description_that_makes_no_sense_is_named(text: str, found: str) -> None:
    with pytest.raises((ClusterError, InputError), match=found):
        find_place({"TF_CONFIG": text})


def test_mpirun_says_who_a_process_is_but_not_where_the_first_one_is() -> None:
    with pytest.raises(InputError, match="-x MASTER_ADDR=node1 -x MASTER_PORT=29500"):
        find_place(OPEN_MPI)
    place = find_place({**OPEN_MPI, "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place.rank, place.size, place.meeting) == (3, 4, "[fd00::1]:29500")
    assert (place.local_rank, place.local_size) == (1, 2)


def test_processes_of_one_mpirun_on_one_machine_meet_on_the_loopback() -> None:
    one_machine = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job-7"}
    places = [find_place({**one_machine, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)]
    assert all(place and place.is_one_machine for place in places)
    (meeting,) = {place.meeting for place in places if place}
    other = find_place({**one_machine, "PMIX_NAMESPACE": "job-8"})
    assert other is not None
    assert other.meeting != meeting
    hydra = find_place({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    assert hydra is not None
    assert (hydra.rank, hydra.is_one_machine) == (1, True)


SLURM_STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (OPEN_MPI, ("mpirun", 3, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, ("mpirun", 2, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, ("mpirun", 1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("srun", 1, 2)),
    ],
)
def test_mpirun_in_an_allocation_is_not_the_srun_of_its_daemons(
    variables: dict[str, str], found: tuple[str, int, int]
) -> None:
    meeting = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    place = find_place({**SLURM_STEP, **variables, **meeting})
    assert place is not None
    assert (place.source, place.rank, place.size) == found


def test_only_a_call_without_a_launcher_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")  # which is restored
    assert isinstance(launcher_for(None), LocalLauncher)
    join(PAIR, 1)
    monkeypatch.setenv("TFDIST_SECRET", "a secret of this test")
    joined = launcher_for(None)
    assert isinstance(joined, JoinedLauncher)
    assert isinstance(launcher_for("local"), LocalLauncher)
    assert count_workers(joined, None) == 2
    with pytest.raises(InputError, match="`workers` is 3, but 2 processes were started"):
        count_workers(joined, 3)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [((PAIR, 2), "`index` is 2"), ((["a:1", "a:1"], 0), "is the address of worker")],
)
def test_wrong_addresses_are_named(
    arguments: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", "")  # which is restored
    with pytest.raises(ClusterError, match=found):
        join(*arguments)
