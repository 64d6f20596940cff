"""Expand Slurm's short forms of node names and of tasks per node.

Slurm's own command for this, ``scontrol show hostnames``, is missing in most containers.
"""

from __future__ import annotations

import itertools
import re


def expand_nodes(text: str) -> list[str]:
    """Return node names in Slurm's order: ``n2, n10, n11`` for ``n[2,10-11]``."""
    # A comma within brackets does not separate nodes.
    nodes = re.findall(r"(?:[^,\[\s]|\[[^\]]*\])+", text)
    return [name for node in nodes for name in _expand(node)]


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node: ``2, 1, 1`` for ``2,1(x2)``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _expand(node: str) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", node)
    choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    """Return ``007, 008, 012`` for ``007-008,012``."""
    found: list[str] = []
    for first, last in re.findall(r"(\w+)(?:-(\w+))?", ranges):
        if not last:
            found.append(first)
            continue
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
