"""Calls that share a session: settings that last as long as one needs them, slots in turn."""

from __future__ import annotations

import threading

import pytest
from conftest import wait_for

from pybackend.launchers.spark.held import hold
from pybackend.launchers.spark.turns import take_slots


def test_a_change_lasts_until_the_last_call_ends() -> None:
    owner, settings = object(), {"rows": "10000"}

    def lower() -> str:
        before = settings["rows"]
        settings["rows"] = "2000"
        return before

    def restore(before: str) -> None:
        settings["rows"] = before

    first, second = (hold("rows", owner, lower, restore) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings["rows"] == "2000"
    second.__exit__(None, None, None)
    assert settings["rows"] == "10000"
    with pytest.raises(ZeroDivisionError), hold("rows", owner, lower, restore):
        _ = 1 / 0
    assert settings["rows"] == "10000"


def test_slots_are_taken_in_turn() -> None:
    owner, ended, began = object(), threading.Event(), list[int]()

    def work(workers: int) -> None:
        with take_slots(owner, workers, 4):
            began.append(workers)
            ended.wait(10)

    with take_slots(object(), 4, 4):  # another session's slots are others
        threads = [threading.Thread(target=work, args=(count,)) for count in (3, 2, 1)]
        for place, thread in enumerate(threads):
            thread.start()
            wait_for(lambda place=place: place > 0 or began == [3])
        assert began == [3]  # nor does one of 1 overtake the one of 2
        ended.set()
        for thread in threads:
            thread.join(10)
    assert sorted(began) == [1, 2, 3]
