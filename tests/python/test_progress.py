"""The lines that a user sees while a training runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pybackend.api.progress import epoch_line, printer
from pybackend.job.messages import EpochEnded, PrintedLine, Reported, Waits

EPOCH = EpochEnded(1, 3, 4.06, {"loss": 0.29123, "accuracy": 0.9145, "f1": [0.5, 0.25]})
LINE = PrintedLine("hello", rank=1)


def test_an_epoch_is_one_line() -> None:
    assert epoch_line(EPOCH) == "epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)"


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [(0, []), (1, [epoch_line(EPOCH)]), (2, [epoch_line(EPOCH), "[1] hello"])],
)
def test_what_each_level_shows(verbose: int, shown: list[str], capsys: Any) -> None:
    show = printer(verbose)
    for event in (EPOCH, replace(EPOCH, rank=1), LINE, Reported()):
        show(event)
    assert capsys.readouterr().out.splitlines() == shown


def test_of_workers_in_a_chain_the_one_for_whom_all_wait_is_named_once(capsys: Any) -> None:
    show = printer(1)
    chain = [Waits(peer, 60.0, False, rank) for rank, peer in ((3, 0), (2, 1), (0, 2))]
    for event in chain + [replace(event, seconds=62.0, is_second=True) for event in chain]:
        show(event)
    (line,) = capsys.readouterr().out.splitlines()
    assert "wait for worker 1, for 62 s" in line
