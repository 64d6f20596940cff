"""Callbacks of a resumed training: their restored state, and what must not differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from pybackend.core.engine.checkpoint.training_state import (
    continue_log,
    describe_callback,
    find_lost,
    read_callback,
    restore_callback,
)
from pybackend.core.errors import InputError
from pybackend.core.job.value_codec import decode_state, encode_state


def resume(then: Any, change: dict[str, Any], now: Any) -> Any:
    """Change a callback as training does, save its state, and restore it into another one."""
    first = describe_callback(then)
    vars(then).update(change)
    state = decode_state(encode_state(read_callback(then, first)))
    own = describe_callback(now)
    now.set_model(keras.Sequential())
    restore_callback(now, state, own)
    return now


def test_what_training_changed_comes_back() -> None:
    stopping = keras.callbacks.EarlyStopping
    change = {
        "best_weights": [np.ones(3)],
        "min_delta": -0.1,
        "monitor_op": keras.ops.less,
        "wait": 1,
    }
    found = resume(stopping(min_delta=0.1), change, stopping(min_delta=0.1))
    assert (found.min_delta, found.monitor_op, found.wait) == (-0.1, keras.ops.less, 1)
    np.testing.assert_array_equal(found.best_weights, [np.ones(3)])


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({"patience": 2}, {"patience": 5}, "its patience is 2 in .* but 5 now"),
        ({"min_delta": 0.1}, {"min_delta": 0.2}, "EarlyStopping: its min_delta is 0.1"),
        ({"monitor": "loss"}, {"monitor": "val_loss"}, "its monitor is 'loss'"),
    ],
)
def test_a_setting_that_differs_is_refused(then: Any, now: Any, message: str) -> None:
    stopping = keras.callbacks.EarlyStopping
    with pytest.raises(InputError, match=message):
        resume(stopping(**then), {"min_delta": -0.1}, stopping(**now))


def test_paths_are_those_of_the_new_call(tmp_path: Path) -> None:
    saving = keras.callbacks.ModelCheckpoint
    found = resume(saving("a.keras"), {"best": 0.5}, saving(tmp_path / "b.keras"))
    assert (found.filepath, found.best) == (str(tmp_path / "b.keras"), 0.5)
    other = tmp_path / "other.csv"
    other.write_text("rows of another training")
    begun = tmp_path / "log.csv"
    begun.touch()
    resume(keras.callbacks.CSVLogger(begun), {}, keras.callbacks.CSVLogger(other))
    assert other.read_text() == "rows of another training"
    old, new = (
        keras.callbacks.TensorBoard(str(tmp_path / name), write_graph=False) for name in "ab"
    )
    resume(old, {"_train_dir": str(tmp_path / "a" / "train")}, new)
    assert not [v for v in vars(new).values() if isinstance(v, str) and f"{tmp_path}/a" in v]


def test_a_log_loses_the_rows_of_repeated_epochs_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"

    def log(epochs: range, logger: Any) -> None:
        for epoch in epochs:
            logger.on_epoch_end(epoch, {"loss": 0.5})

    then, now = (keras.callbacks.CSVLogger(path) for _ in range(2))
    first = describe_callback(then)
    then.on_train_begin()
    begun = read_callback(then, first)
    log(range(2), then)
    state = read_callback(then, first)
    log(range(2, 4), then)
    for kept, epochs in ((state, range(2, 4)), (begun, range(4))):
        own = describe_callback(now)
        continue_log(now)
        now.on_train_begin()
        restore_callback(now, kept, own)
        log(epochs, now)
        now.on_train_end()
        first_of_rows = [line.partition(",")[0] for line in path.read_text().splitlines()]
        assert first_of_rows == ["epoch", "0", "1", "2", "3"]
        now = keras.callbacks.CSVLogger(path)
    then.on_train_end()


def test_what_is_not_kept_is_named() -> None:
    class Watching(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.file, self.path, self.seen = object(), Path("log"), [1]

    watching = Watching()
    assert find_lost([watching]) == []
    watching.on_train_begin()
    assert find_lost([watching]) == ["Watching.file"]


class Counts(keras.callbacks.Callback):
    """Has an attribute from the start, one over its class's default, and one that is set later."""

    seen = 0
    compare: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.best = 9.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen += 1
        self.best, self.latest, self.compare = 1.0, [epoch], keras.ops.less


def test_no_method_or_property_is_replaced() -> None:
    kept, fresh = Counts(), Counts()
    first = describe_callback(kept)
    kept.on_epoch_end(3)
    state = read_callback(kept, first)
    state["values"] |= {"on_epoch_end": 1, "model": 2, "_model": 3, "__dict__": {}, "__class__": 4}
    restore_callback(fresh, state, describe_callback(fresh))
    assert (fresh.best, fresh.seen, fresh.latest) == (1.0, 1, [3])
    assert fresh.compare is keras.ops.less
    assert vars(fresh) == vars(kept)
