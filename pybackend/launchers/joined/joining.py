"""Rank of this process among several, from TF_CONFIG, srun or mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pybackend.errors import ClusterError, InputError
from pybackend.job.arguments import name_arguments
from pybackend.launchers.joined.place import (
    Place,
    find_mpi_place,
    find_slurm_place,
    split_host,
)
from pybackend.net.secret import FILE_VARIABLE, VARIABLE
from pybackend.tf_config import ClusterSpec, make_tf_config, names_cluster, read_tf_config


@name_arguments
def join(addresses: Sequence[str] | str, index: int, *, secret_file: str | None = None) -> None:
    """Make this process one of several that train together and that you start yourself.

    Call it in every process with the same addresses. Then call `barrier_train` or a similar
    function with None as its first argument. All processes must make the same call. They can start
    in any order. They connect to the first address and train, and each gets the result. `join` sets
    TF_CONFIG (and TFDIST_SECRET_FILE) in this process's environment; setting these variables
    yourself has the same effect.

    Parameters
    ----------
    addresses
        ``host:port`` of every process, in the same order everywhere, as a list or separated by
        commas. Each process listens on its own address.
    index
        Index of this process in the addresses, from 0.
    secret_file
        File with the shared secret, made by `tfdist secret`. None (default): TFDIST_SECRET or
        TFDIST_SECRET_FILE, or ``~/.config/tfdist/secret``. Not needed on the loopback interface.

    Raises
    ------
    ClusterError, InputError
        An address is invalid. The message names it and the fix.
    """
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    config = make_tf_config(listed, index)
    if secret_file is not None:
        path = os.path.abspath(os.path.expanduser(secret_file))
        if not os.path.exists(path):
            raise InputError(
                f"`secret_file` is {path}, which does not exist: `tfdist secret` creates one"
            )
        os.environ.pop(VARIABLE, None)  # which has precedence
        os.environ[FILE_VARIABLE] = path
    os.environ["TF_CONFIG"] = config


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the `Place` of this process, from TF_CONFIG, srun or mpirun; None: it is the only one.

    Raises
    ------
    ClusterError, InputError
        The environment variables are invalid.
    """
    text = environment.get("TF_CONFIG", "")
    if names_cluster(text):
        return _of_tf_config(text)
    # In an allocation, processes of mpirun also have Slurm's variables, but of its daemons.
    return find_mpi_place(environment) or find_slurm_place(environment)


def _of_tf_config(text: str) -> Place | None:
    try:
        spec = read_tf_config(text)
    except ClusterError as error:
        raise ClusterError(
            f'{error}. To train on this machine alone, pass "local", or unset TF_CONFIG'
        ) from error
    if spec.rank is None:
        raise InputError(
            f"TF_CONFIG specifies that this process is {spec.role} {spec.index}: only the chief "
            'and the workers train. To train on this machine alone, pass "local"'
        )
    if spec.world_size == 1:
        return None
    addresses = _addresses(spec)
    hosts = [split_host(address) for address in addresses]
    own = hosts[spec.rank]
    return Place(
        spec.rank,
        len(addresses),
        addresses[0],
        spec.address,
        "TF_CONFIG",
        tuple(addresses),
        hosts[: spec.rank].count(own),
        hosts.count(own),
    )


def _addresses(spec: ClusterSpec) -> list[str]:
    listed = [*spec.cluster.get("chief", {}).values(), *spec.cluster.get("worker", {}).values()]
    if len(listed) < spec.world_size:
        raise InputError(
            f"TF_CONFIG lists the addresses of only {len(listed)} of {spec.world_size} processes: "
            "list all of them"
        )
    return listed
