"""The options `Recovery` and `DataOptions`, and errors that refer to saved checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybackend import (
    ClusterError,
    DataOptions,
    InputError,
    Recovery,
    SerializationError,
    barrier_train,
)
from pybackend.core.job.storage_options import check_recovery, pointing_to


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [("epoch", None, None), (20.0, 20, None), ("600s", None, 600.0), ("1.5 h", None, 5400.0)],
)
def test_every_is_an_epoch_steps_or_a_time(every: Any, steps: Any, seconds: Any) -> None:
    kept = Recovery("run", every=every).checkpoint
    assert kept is not None
    assert (kept.steps, kept.seconds) == (steps, seconds)
    assert kept.uri == os.path.abspath("run")
    assert check_recovery(Path("run")) == Recovery("run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uri": ""}, "`uri` of a checkpoint"),
        ({"uri": "run", "every": "weekly"}, "'10min' or '1h', not 'weekly'"),
        ({"uri": "run", "every": "0s"}, "not '0s'"),
        ({"uri": "run", "every": True}, "not True"),
        ({"uri": "run", "every": 0}, "`every` must be at least 1"),
        ({"uri": "run", "keep": 0}, "`keep` must be at least 1"),
        ({"uri": "run", "resume": 1}, "`resume` must be True or False"),
    ],
)
def test_wrong_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recovery(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recovery": 3}, "`recovery` must be a Recovery, a path or a URI"),
        ({"restarts": 1}, r"pass `recovery=Recovery\(restarts=...\)`"),
        ({"resume": True}, r"pass `recovery=Recovery\(..., resume=True\)`"),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        barrier_train(None, lambda: None, ([[1.0]], [0]), **arguments)


def test_a_pipeline_is_kept_between_epochs_only() -> None:
    with pytest.raises(InputError, match="needs every='epoch'"):
        barrier_train(None, lambda: None, lambda context: None, recovery=Recovery("r", every=5))


def test_errors_say_where_the_training_was_kept() -> None:
    kept = Recovery("/shared/run").checkpoint
    for error, kind in (
        (ClusterError("altered"), ClusterError),
        (OSError(28), SerializationError),
        (MemoryError(), SerializationError),
    ):
        with pytest.raises(kind, match=r"load_checkpoint\('/shared/run'\)"), pointing_to(kept):
            raise error
    with (
        pytest.raises(ClusterError, match="sees no checkpoint at '/shared/run'"),
        pointing_to(kept, lambda: False),
    ):
        raise ClusterError("altered")
    with pytest.raises(ClusterError, match="altered") as caught, pointing_to(None):
        raise ClusterError("altered")
    assert str(caught.value) == "altered"


def test_what_a_backup_callback_cannot_do_names_it(tmp_path: Path, dense_model: Any) -> None:
    import keras

    backup = keras.callbacks.BackupAndRestore(tmp_path / "kept", save_freq=2)
    data = (np.ones((8, 8)), np.ones(8))
    for given, options, message in (
        (
            lambda context: None,
            {},
            "BackupAndRestore is replaced by `recovery`: .* every=",
        ),
        (data, {"recovery": str(tmp_path / "own")}, "either a folder in `recovery` or one Backup"),
    ):
        with pytest.raises(InputError, match=message):
            barrier_train("local", dense_model, given, callbacks=[backup], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repartition": "no"}, "`repartition` must be True or False"),
        ({"in_memory": "yes"}, "`in_memory` must be True or False"),
        ({"tensors": ["a"]}, "`tensors` must map column names"),
        ({"tensors": {"a": "uint8"}}, "`tensors` of 'a' must be (dtype, shape)"),
        ({"tensors": {"a": ("text", (1,))}}, "`tensors` of 'a' must be (dtype"),
        ({"tensors": {"a": ("str", (1,))}}, "'str' is not a numeric type"),
        ({"tensors": {"a": ("uint8", (0,))}}, "must be positive whole numbers"),
        ({"tensors": {"a": ("uint8", (2.5,))}}, "must be positive whole numbers"),
        ({"tensors": {"a": ("uint8", (3, None))}}, "only the first may be None"),
        ({"tensors": {"a": ("uint8", (True, 2))}}, "must be positive whole"),
        ({"categories": {"a": "red"}}, "`categories` of 'a' must be a list of values"),
        ({"categories": {"a": []}}, "`categories` of 'a' must be distinct values"),
        ({"categories": {"a": [[1], [2]]}}, "`categories` of 'a' must be distinct"),
        ({"categories": {"a": ["x", "x"]}}, "`categories` of 'a' must be distinct"),
        ({"tfrecord_spec": ["a"]}, "`tfrecord_spec` must map feature names"),
        ({"tfrecord_spec": {"a": "int32"}}, "`tfrecord_spec` has the type 'int32'"),
    ],
)
def test_a_wrong_data_option_is_named(options: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        DataOptions(**options)
    assert message in str(error.value)


def test_shapes_of_r_become_tuples_of_whole_numbers() -> None:
    given: Any = {"a": ["uint8", [28.0, np.int32(28)]], "b": ["int32", [None]], "c": ["int8", 4]}
    given["d"] = ["float32", [None, 3.0]]
    assert DataOptions(tensors=given).tensors == {
        "a": ("uint8", (28, 28)),
        "b": ("int32", (None,)),
        "c": ("int8", (4,)),
        "d": ("float32", (None, 3)),
    }


def test_options_without_entries_are_as_if_not_given() -> None:
    assert DataOptions(tensors={}, categories={}) == DataOptions()
