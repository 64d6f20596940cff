"""What `tfdist run` would start, as text."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping

from pybackend.launchers.machine_share import share_of_machine
from pybackend.launchers.script.plan import Plan, Site, SshSite
from pybackend.launchers.script.variables import variables_of
from pybackend.launchers.slurm.step_site import StepSite, describe_step


def describe_plan(plan: Plan) -> str:
    """The command of every rank, by host; secrets and ports that are yet to be found have names."""
    return "\n".join(line for site in plan.sites for line in _describe_site(plan, site))


def _describe_site(plan: Plan, site: Site) -> Iterator[str]:
    if isinstance(site, StepSite):
        yield from describe_step(plan, site, os.environ)
        return
    python = sys.executable
    if isinstance(site, SshSite):
        python = site.python
        yield f"the agent on {site.name}, by: {shlex.join(site.command()[:-1])} ..."
    for place, variables in enumerate(_variables(plan, site)):
        yield (
            f"rank {site.ranks[place]} of {plan.world_size} on {site.name} "
            f"(there {site.local_ranks[place]} of {site.local_size}):"
        )
        yield f"  cd {shlex.quote(plan.folder)}"
        for name, value in {**variables, **_share(site, place, variables)}.items():
            yield f"  export {name}={shlex.quote(value)}"
        yield f"  {shlex.join(plan.script.command(python, 'Rscript'))}"


def _share(site: Site, place: int, variables: Mapping[str, str]) -> dict[str, str]:
    """What a rank on this machine gets of it; another host divides itself."""
    if isinstance(site, SshSite):
        return {}
    return share_of_machine(site.local_size, {**os.environ, **variables})[site.local_ranks[place]]


def _variables(plan: Plan, site: Site) -> tuple[dict[str, str], ...]:
    """Those of `variables_of`, with placeholders."""
    hosts = [one.address or one.name for one in plan.sites for _ in one.ranks]
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    made_up = tuple(f"{host}:{port}" for port, host in enumerate(shown, 1))
    found = variables_of(plan, site, plan.addresses or made_up, "<secret>", 0)
    if not plan.addresses:
        for one in found:
            one["TF_CONFIG"] = re.sub(r':(\d+)"', ':<port>"', one["TF_CONFIG"])
    return found
