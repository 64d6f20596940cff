"""Environment variables with which a script finds its worker group."""

from __future__ import annotations

from collections.abc import Sequence

from pybackend.errors import InputError
from pybackend.job.arguments import is_variable_name
from pybackend.launchers.script.plan import HostRanks, ScriptRun
from pybackend.net.rendezvous import new_token
from pybackend.tf_config import make_tf_config

# Variables that `tfdist run` itself sets.
NAMES = frozenset(
    (
        "TF_CONFIG",
        "TFDIST_SECRET",
        "TFDIST_RESTART",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    )
)


def split_variable(text: str) -> tuple[str, str | None]:
    """Return name and value of ``NAME=VALUE``; the value of ``NAME`` alone is None.

    Raises
    ------
    InputError
        The name is invalid, or `tfdist run` sets it itself.
    """
    name, equals, value = text.partition("=")
    if name in NAMES:
        raise InputError(f"--env {text}: tfdist sets it itself")
    if not is_variable_name(name):
        raise InputError(
            f"--env {text}: expected NAME=VALUE or NAME; a name consists of letters, digits and "
            "'_', and does not begin with a digit"
        )
    return name, value if equals else None


def choose_secret(plan: ScriptRun) -> str | None:
    """Return the secret of one start; None if its drivers, on one machine, share no secret."""
    return plan.secret if plan.addresses else new_token()


def variables_of(
    plan: ScriptRun, site: HostRanks, addresses: Sequence[str], secret: str | None, restart: int
) -> tuple[dict[str, str], ...]:
    """Return the variables of each rank of a site, including those that the user set."""
    common = {**plan.variables, "WORLD_SIZE": str(plan.world_size), "TFDIST_RESTART": str(restart)}
    if secret is not None:
        common["TFDIST_SECRET"] = secret
    return tuple(
        {
            **common,
            "TF_CONFIG": make_tf_config(addresses, rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(site.local_size),
        }
        for rank, local_rank in zip(site.ranks, site.local_ranks, strict=True)
    )
