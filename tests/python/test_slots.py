"""Calls that share a session: settings that last as long as a call needs them, slots in turn."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
from conftest import wait_for
from threads import Threads

from pybackend.core.launchers.spark import slots
from pybackend.core.launchers.spark.sessions import hold, small_batches
from pybackend.core.launchers.spark.slots import take_slots

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


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


class Settings(dict[str, str]):
    """A session's settings."""

    set = dict.__setitem__
    unset = dict.__delitem__


class Context:
    """A SparkContext with only the needed attributes."""


@pytest.mark.parametrize("before", [{}, {RECORDS: "10000"}, {RECORDS: "500"}])
def test_objects_of_one_session_share_its_setting(before: dict[str, str]) -> None:
    context, settings = Context(), Settings(before)
    first, second = (
        small_batches(SimpleNamespace(conf=settings, sparkContext=context)) for _ in range(2)
    )
    first.__enter__()
    lowered = settings[RECORDS]
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings[RECORDS] == lowered == ("500" if before.get(RECORDS) == "500" else "2000")
    second.__exit__(None, None, None)
    assert settings == before


def test_slots_are_taken_in_turn() -> None:
    owner, ended, began = object(), threading.Event(), list[int]()

    def work(workers: int) -> None:
        with take_slots(owner, workers, 4, print):
            began.append(workers)
            ended.wait(60)

    with take_slots(object(), 4, 4, print):  # another session has other slots
        threads = [threading.Thread(target=work, args=(count,)) for count in (3, 2, 1)]
        for place, thread in enumerate(threads):
            thread.start()
            wait_for(lambda place=place: place > 0 or began == [3])
        assert began == [3]  # nor does a call for 1 overtake the one for 2
        ended.set()
        for thread in threads:
            thread.join(60)
    assert sorted(began) == [1, 2, 3]


def test_a_long_wait_names_what_holds_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_QUIET_SECONDS", 0.01)
    owner, said = object(), list[str]()
    with take_slots(owner, 2, 2, said.append):
        with Threads() as pool:
            waits = pool.submit(wait_in_vain, owner)
            text = waits.result(60)
        with take_slots(object(), 2, 2, said.append):
            pass
    assert re.fullmatch(
        r"a training run is waiting for 1 of the session's 2 slots: other training runs of this "
        r"process occupy them \(workers=2 for \d+ s\)",
        text,
    )
    with take_slots(owner, 2, 2, said.append):  # a call that has given up is not waited for
        assert not said


def wait_in_vain(owner: object) -> str:
    with pytest.raises(KeyboardInterrupt) as info, take_slots(owner, 1, 2, interrupt):
        pass
    return str(info.value)


def interrupt(text: str) -> None:
    raise KeyboardInterrupt(text)
