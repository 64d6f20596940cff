"""A second run of the few tests that failed, when nothing else runs any more.

Many tests kill, stop and interrupt processes, and three lanes share the cores: one that fails there
and passes alone has met a race, its own or the product's. It is named at the end, to be looked for;
it does not hide what fails each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lane import Ended, Lane, run_lane
from lane_results import list_failed, show

# More of them are no accident.
MOST = 3


def run_again(lanes: Sequence[Ended], factor: float, folder: Path) -> list[Ended]:
    """Run the failed tests once more, of R their files, if they are all that failed, and few."""
    failed = {one.lane.name: list_failed(one.lane) for one in lanes if one.problem}
    if not failed or not all(failed.values()) or sum(map(len, failed.values())) > MOST:
        return list(lanes)
    return [
        _judge(one, failed[one.lane.name], factor, folder) if one.problem else one for one in lanes
    ]


def _judge(ended: Ended, failed: Sequence[str], factor: float, folder: Path) -> Ended:
    lane = ended.lane
    name = f"{lane.name}-again"
    if lane.report.exists():
        report = str(lane.report.with_name(f"{name}.xml"))
        only = ("--last-failed", f"--junitxml={report}")
    else:
        files = sorted({test.partition(":")[0] for test in failed})
        only = (f"R_FILES={' '.join(files)}",)
    again = Lane(name, (*lane.command, *only), lane.budget)
    own = folder / name
    own.mkdir()
    found = run_lane(again, factor, own)
    show(found)
    seconds = ended.seconds + found.seconds
    if found.problem:
        return replace(ended, seconds=seconds)
    return replace(ended, seconds=seconds, problem="", unstable=tuple(failed))
