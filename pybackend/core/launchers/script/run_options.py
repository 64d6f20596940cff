"""Options of `tfdist run`, and their checks."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers.hosts.ssh import (
    HostSlots,
    Ssh,
    parse_hosts,
    ranks_by_host,
    read_hostfile,
)
from pybackend.core.launchers.script import ranks as scripts
from pybackend.core.launchers.script.slurm import find_step_site
from pybackend.core.machine import is_loopback, own_address
from pybackend.core.net.authentication import FILE_VARIABLE, VARIABLE, find_secret
from pybackend.core.net.rendezvous import split_address
from pybackend.core.tf_config import make_tf_config

THIS_MACHINE = "this machine"


# Names, metavar, help, and other arguments of argparse.
_OPTIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("-w --workers", "N", "number of ranks (default: all slots of the hosts)", {"type": int}),
    ("--hosts", "HOST:SLOTS,...", "hosts for ssh: a:2,user@b:2,[fd00::1]:2", {}),
    ("--hostfile", "FILE", 'file instead of --hosts, with lines like "a slots=2" or "a:2"', {}),
    ("--ssh-options", "TEXT", 'options for ssh: "-p 2222 -i key"', {"default": ""}),
    ("--python", "PATH", "Python on the hosts (default: the path of this Python)", {}),
    ("--index", "R", "start only rank R; you start the others yourself", {"type": int}),
    ("--addresses", "HOST:PORT,...", "addresses of all ranks, with --index", {}),
    ("--sbatch", "OPTIONS", "print a Slurm batch script, e.g. --sbatch=--time=60", {}),
    (
        "--env",
        "NAME[=VALUE]",
        "set a variable, or copy it from this environment; may be repeated",
        {"action": "append", "default": []},
    ),
    ("--cwd", "DIR", "working folder of the script (default: this folder)", {}),
    ("--show", "R,...", "print only the output of these ranks", {}),
    ("--output-dir", "DIR", "write the output of each rank R to R.out and R.err in DIR", {}),
    (
        "--grace",
        "SECONDS",
        "time from SIGTERM to SIGKILL (default: 10)",
        {"type": float, "default": 10.0},
    ),
    ("--max-restarts", "K", "restarts after a failure (default: 0)", {"type": int, "default": 0}),
)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    for names, metavar, text, more in _OPTIONS:
        parser.add_argument(*names.split(), metavar=metavar, help=text, **more)
    add, words = parser.add_argument, "SCRIPT [ARGUMENT ...]"
    add("--dry-run", action="store_true", help="print what would start, and start nothing")
    add("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    add("script", nargs=argparse.REMAINDER, metavar=words, help="a Python or R file (*.R)")


def read_run_plan(options: argparse.Namespace) -> scripts.ScriptRun:
    """Check the options, and return the run. Raises `InputError`, which names the option."""
    script = scripts.read_script(options.script, options.is_module)
    folder = os.path.abspath(options.cwd or os.curdir)
    _check_numbers(options)
    addresses = _read_addresses(options)
    ssh = _read_ssh(options)
    sites = _read_sites(options, addresses, ssh)
    size = len(addresses) or sum(len(site.ranks) for site in sites)
    variables = _read_variables(options.env)
    if any(site.address is not None for site in sites):
        try:
            scripts.check_script(script, folder)
            scripts.check_temporary(variables.get("TMPDIR", os.environ.get("TMPDIR")))
        except ClusterError as error:
            raise InputError(str(error)) from None
    return scripts.ScriptRun(
        script,
        size,
        sites,
        folder,
        variables=variables,
        addresses=addresses,
        secret=_read_secret(addresses),
        grace=options.grace,
        restarts=options.max_restarts,
        shown=_read_ranks(options.show, size),
        output=Path(options.output_dir).absolute() if options.output_dir else None,
        ssh_options=ssh.options,
        python=options.python or sys.executable,
    )


def _check_numbers(options: argparse.Namespace) -> None:
    if options.workers is not None and options.workers < 1:
        raise InputError(f"--workers must be at least 1, not {options.workers}")
    if not 0 <= options.grace < float("inf"):
        raise InputError(f"--grace must be a number of seconds, not {options.grace:g}")
    if options.max_restarts < 0:
        raise InputError(f"--max-restarts must be at least 0, not {options.max_restarts}")
    if options.max_restarts and options.index is not None:
        raise InputError(
            "--max-restarts needs all ranks, but --index starts only one: leave one of the "
            "options out"
        )


def _read_ssh(options: argparse.Namespace) -> Ssh:
    try:
        return Ssh(tuple(shlex.split(options.ssh_options)))
    except ValueError as error:
        raise InputError(f"--ssh-options {options.ssh_options}: {error}") from None


def _read_sites(
    options: argparse.Namespace, addresses: Sequence[str], ssh: Ssh
) -> tuple[scripts.HostRanks, ...]:
    has_hosts = options.hosts is not None or options.hostfile is not None
    if options.hosts is not None and options.hostfile is not None:
        raise InputError("use either --hosts or --hostfile")
    if not has_hosts and (options.ssh_options or options.python):
        raise InputError("--ssh-options and --python can only be used with --hosts or --hostfile")
    if addresses:
        if has_hosts:
            raise InputError("--index starts one rank, on this machine: leave out the hosts")
        hosts = [split_address(address)[0] for address in addresses]
        index, own = options.index, hosts[options.index]
        first, size = hosts[:index].count(own), hosts.count(own)
        return (scripts.HostRanks(THIS_MACHINE, (index,), first=first, neighbours=size),)
    if not has_hosts:
        if step := find_step_site(os.environ, options.workers):
            return (step,)
        if options.workers is None:
            raise InputError(
                "specify the number of ranks, as in -w 2, or the hosts, as in --hosts a:2"
            )
        return (scripts.HostRanks(THIS_MACHINE, tuple(range(options.workers))),)
    slots = read_hostfile(options.hostfile) if options.hostfile else parse_hosts(options.hosts)
    workers = options.workers or sum(host.slots for host in slots)
    return sites_of(slots, workers, ssh)


def _read_addresses(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the addresses of all ranks if only one of them is started here; else none."""
    if (options.index is None) != (options.addresses is None):
        raise InputError(
            "use --index and --addresses together: the rank, and the addresses of all ranks"
        )
    if options.index is None:
        return ()
    text = options.addresses.strip()
    try:
        found = json.loads(text) if text.startswith('["') else text.split(",")
        addresses = tuple(str(one).strip() for one in found)
        make_tf_config(addresses, options.index)
    except (ValueError, ClusterError) as error:
        raise InputError(f"--addresses, --index: {error}") from None
    if options.workers not in (None, len(addresses)):
        raise InputError(f"--workers is {options.workers}, but --addresses has {len(addresses)}")
    return addresses


def _read_secret(addresses: Sequence[str]) -> str | None:
    """Return the secret that the ranks of several drivers share, from its usual places."""
    if not addresses:
        return None
    is_one_machine = all(is_loopback(split_address(address)[0]) for address in addresses)
    is_given = os.environ.get(VARIABLE) or os.environ.get(FILE_VARIABLE)
    # On one machine, the ranks use or create the user's own secret.
    return find_secret(is_one_machine) if is_given or not is_one_machine else None


def _read_variables(given: Sequence[str]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, value = scripts.split_variable(text)
        if value is None and name not in os.environ:
            raise InputError(f"--env {name}: it is not set here; give it a value: {name}=VALUE")
        variables[name] = os.environ[name] if value is None else value
    return variables


def _read_ranks(text: str | None, size: int) -> frozenset[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < size for word in words):
        raise InputError(f"--show {text}: expected ranks from 0 to {size - 1}, as in --show 0")
    return frozenset(map(int, words))


def sites_of(hosts: Sequence[HostSlots], workers: int, ssh: Ssh) -> tuple[scripts.HostRanks, ...]:
    """Return the ranks by host. All but ``localhost``, which is this machine, are reached by ssh.

    Raises `InputError` if there are fewer slots than workers, or this machine has no address for
    another host.
    """
    placed = ranks_by_host(hosts, workers)
    others = [host for host, _ in placed if not is_loopback(host.name)]
    own = _address_here(others[0], ssh) if len(others) < len(placed) and others else scripts.HERE
    return tuple(
        scripts.HostRanks(THIS_MACHINE, tuple(ranks), own)
        if is_loopback(host.name)
        else scripts.HostRanks(host.name, tuple(ranks), None, host)
        for host, ranks in placed
    )


def _address_here(other: HostSlots, ssh: Ssh) -> str:
    try:
        address = own_address(ssh.address(other))
    except ClusterError as error:
        raise InputError(str(error)) from None
    if address is None or is_loopback(address):
        raise InputError(
            f"localhost has no address that {other.name} can reach: in --hosts, use a name or "
            "address of this machine that the other hosts can reach"
        )
    return address
