"""Answers of the bridge to R: envelopes of plain data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from pybackend import bridge
from pybackend.bridge import capture, capture_shown
from pybackend.core.api.display import choose_lines
from pybackend.core.errors import (
    ClusterError,
    Failure,
    InputError,
    PeerLostError,
    SerializationError,
    WorkerFailedError,
)
from pybackend.core.model.serialization import save_model


def fail(error: BaseException) -> None:
    raise error


def test_a_value_arrives_in_an_envelope() -> None:
    assert capture(divmod, 17, 5) == {"ok": True, "value": (3, 2)}
    assert capture(sorted, [1, 3, 2], reverse=True) == {"ok": True, "value": [3, 2, 1]}


def test_nul_which_r_cannot_hold_is_written_out() -> None:
    shown: list[Any] = []

    def work() -> dict[str, Any]:
        choose_lines(1).line("one\0two")
        return {"lines": ["a\0b", 3], "array": np.zeros(2)}

    envelope = capture_shown(lambda kind, fields: shown.append(fields), work)
    assert shown == [{"text": r"one\0two"}]
    assert envelope["value"]["lines"] == [r"a\0b", 3]
    assert capture(fail, InputError("\0"))["error"]["message"] == r"\x00"


@pytest.mark.parametrize("kind", [InputError, ClusterError, SerializationError])
def test_an_error_arrives_as_data(kind: Any) -> None:
    envelope = capture(fail, kind("`workers` must be at least 1"))
    assert envelope == {
        "ok": False,
        "error": {
            "class": kind.__name__,
            "message": "`workers` must be at least 1",
            "rank": None,
            "host": None,
            "exception_type": None,
            "traceback": None,
            "log": [],
            "timeline": [],
        },
    }


def test_a_failed_worker_arrives_with_all_its_fields() -> None:
    failure = Failure(2, "node-c", "ValueError", "bad", traceback="Traceback ...", log=("a", "b"))
    error = capture(fail, WorkerFailedError([failure]))["error"]
    assert error["class"] == "WorkerFailedError"
    assert error["message"].startswith("worker 2 on node-c failed: ValueError: bad")
    assert (error["rank"], error["host"], error["exception_type"]) == (2, "node-c", "ValueError")
    assert (error["traceback"], error["log"]) == ("Traceback ...", ["a", "b"])
    assert json.loads(json.dumps(error)) == error


def test_a_lost_peer_arrives_with_rank_and_host() -> None:
    error = capture(fail, PeerLostError(1, "node-b", "was silent for 3 s"))["error"]
    assert (error["class"], error["rank"], error["host"]) == ("PeerLostError", 1, "node-b")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError(), ValueError("no")])
def test_other_errors_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        capture(fail, error)


def test_a_model_at_a_uri_is_read_and_copied(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    uri = str(tmp_path / "model.h5")
    save_model(model, uri)
    read = bridge.read_model(f"file://{uri}")
    np.testing.assert_array_equal(read.get_weights()[0], model.get_weights()[0])
    bridge.copy_model(uri, str(tmp_path / "copy.h5"))
    assert (tmp_path / "copy.h5").read_bytes() == (tmp_path / "model.h5").read_bytes()
    for fail_with in (bridge.read_model, lambda uri: bridge.copy_model(uri, "copy.h5")):
        error = capture(fail_with, str(tmp_path / "absent.h5"))["error"]
        assert error["class"] == "SerializationError"
        assert "absent.h5 cannot be read" in error["message"]


def test_all_that_r_calls_exists() -> None:
    calls = re.compile(r"""(?:bridge\$|call_bridge\(\s*")(\w+)""")
    files = Path(__file__).parents[2].glob("rpkg/R/*.R")
    names = {name for file in files for name in calls.findall(file.read_text())}
    assert len(names) > 30
    assert {name for name in names if not callable(getattr(bridge, name, None))} == set()
