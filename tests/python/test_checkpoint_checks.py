"""Differences from the training of a checkpoint are named, with what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import pytest

from pybackend.core.data.checkpoint_checks import (
    check_is_same,
    check_rows_are_as_many,
    describe_settings,
    find_difference,
    shorten,
)
from pybackend.core.data.checkpoint_store import Manifest, Part
from pybackend.core.errors import InputError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.report import Generation
from pybackend.core.job.worker_options import Elastic
from pybackend.core.model.compile_settings import describe_config, describe_rate, describe_structure

JOB = TrainingJob(2, epochs=3, seed=5, batches=(20, 20, 10))


def described(**settings: Any) -> str:
    """Describe a model of one layer, as `describe_structure` does."""
    layer = {"units": 3, "activation": "relu", "name": "dense_1"} | settings
    layers = [{"class_name": "Dense", "config": layer}]
    return shorten(describe_config([{"config": {"layers": layers}}, {"optimizer": "adam"}]))


OF_MODEL = {
    "learning_rate": 0.01,
    "model": described(),
    "weights": ["float32 (6, 3)", "float32 (3,)"],
}
KEPT = Manifest(
    1, 0, 2, 5, False, {**describe_settings(JOB), **OF_MODEL}, Part("model", ""), "h5", "", None
)


@pytest.mark.parametrize(
    ("settings", "of_model", "message"),
    [
        ({"seed": 8}, {}, "`seed` was 5, but is now 8: pass seed=5, or choose another folder"),
        ({"floatx": "float16"}, {}, r"call keras.config.set_floatx\('float32'\) first"),
        ({"batches": (20, 10, 20)}, {}, "its data set had batches of different sizes"),
        (
            {},
            {"model": described(units=4, activation="tanh")},
            "its model differs: `units` of Dense 'dense' was 3, but is now 4. Build and compile it",
        ),
        ({}, {"model": ""}, "its model differs: it has different compile settings or layer arg"),
        ({}, {"learning_rate": {"class_name": "CosineDecay"}}, "was 0.01, but is now CosineDecay"),
        (
            {},
            {"weights": ["float32 (6, 3)"]},
            r"number 1 was float32 \(3,\), but is now not there",
        ),
    ],
)
def test_what_differs_is_named(settings: Any, of_model: Any, message: str) -> None:
    check_is_same("run", KEPT, JOB, {**describe_settings(JOB), **OF_MODEL})
    job = replace(JOB, **settings)
    with pytest.raises(InputError, match=message):
        check_is_same("run", KEPT, job, {**describe_settings(job), **OF_MODEL, **of_model})


def test_the_learning_rate_may_differ_and_older_releases_stored_a_digest() -> None:
    here = {**describe_settings(JOB), **OF_MODEL, "learning_rate": 0.001}
    check_is_same("run", KEPT, JOB, here)
    older = replace(KEPT, job={**KEPT.job, "model": 64 * "a"})
    with pytest.raises(InputError, match="it has different compile settings"):
        check_is_same("run", older, JOB, here)


def test_the_learning_rate_is_that_of_the_models_own_optimizer() -> None:
    def build(outer: Any, inner: float = 0.5, momentum: float = 0.0) -> Any:
        base = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)], name="base")
        base.compile(keras.optimizers.SGD(inner), "mse")
        model = keras.Sequential([keras.Input((2,)), base, keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(outer, momentum=momentum)
        model.compile(keras.optimizers.LossScaleOptimizer(sgd), "mse")
        return model

    def compare(one: Any, other: Any) -> str | None:
        return find_difference(*(shorten(describe_structure(model)) for model in (one, other)))

    schedule = keras.optimizers.schedules.CosineDecay(0.1, 5)
    assert compare(build(0.1), build(0.2)) is None
    assert compare(build(0.1), build(schedule)) is None
    assert [describe_rate(build(0.25)), describe_rate(keras.Model())] == [0.25, None]
    assert describe_rate(build(schedule))["config"]["initial_learning_rate"] == 0.1
    found = compare(build(0.1), build(0.1, inner=0.25))
    assert found == "`learning_rate` of SGD 'sgd' was 0.5, but is now 0.25"
    found = compare(build(0.1), build(0.1, momentum=0.5))
    assert found == "`momentum` of SGD 'sgd' was 0.0, but is now 0.5"


def test_an_older_release_cut_other_batches() -> None:
    job = replace(JOB, batches=None)
    described = {**describe_settings(job), **OF_MODEL}
    for counts, is_other in (([51, 50], True), ([64, 64], False), ([20, 50], False)):
        known = {**described, "data": [[count, "a"] for count in counts]}
        older = replace(KEPT, job={name: one for name, one in known.items() if name != "cut"})
        if is_other:
            with pytest.raises(InputError, match="batches were cut by an older release"):
                check_is_same("run", older, job, known)
        else:
            check_is_same("run", older, job, known)


def test_who_may_resume_within_an_epoch_of_elastic_training() -> None:
    elastic, described = replace(JOB, workers=3, elastic=Elastic()), describe_settings(JOB)
    within = replace(KEPT, step=4)
    grown = replace(within, generations=(Generation(1, [0, 1]),))
    check_is_same("run", grown, elastic, described)
    for job in (elastic, replace(JOB, workers=3)):
        check_is_same("run", replace(grown, step=0), job, described)
        check_is_same("run", KEPT, job, described)
    with pytest.raises(InputError, match="during an epoch of elastic training: resume with worke"):
        check_is_same("run", grown, JOB, described)
    with pytest.raises(InputError, match="2 workers trained on their shards: resume with wor"):
        check_is_same("run", within, replace(elastic, workers=2), described)


def test_rows_that_every_worker_has_are_compared_for_other_numbers_of_workers() -> None:
    there = replace(KEPT, job={**KEPT.job, "data": [[25, "a"], [25, "a"]]})
    job = replace(JOB, workers=3, shuffle="global")
    check_is_same("run", there, job, {"data": [[25, "a"]] * 3})
    for rows in ([[25, "b"]] * 3, [[50, "a"]]):
        with pytest.raises(InputError, match="its `data` has different rows"):
            check_is_same("run", there, job, {"data": rows})


def test_rows_of_elastic_training_are_compared_for_any_number_of_workers() -> None:
    elastic, described = replace(JOB, workers=3, elastic=Elastic()), {"data": [[50, "a"]]}
    there = replace(KEPT, job={**KEPT.job, **described}, generations=(Generation(1, [0, 1]),))
    for saved in (there, replace(there, step=4)):
        check_is_same("run", saved, elastic, described)
        with pytest.raises(InputError, match="its `data` has different rows"):
            check_is_same("run", saved, elastic, {"data": [[50, "b"]]})
    # A plain training run shards the rows, and may read them in another order.
    for shards in ([[25, "a"], [25, "b"]], [[50, "c"]]):
        plain = replace(KEPT, job={**KEPT.job, "data": shards})
        check_is_same("run", plain, elastic, described)
        check_is_same("run", there, JOB, {"data": shards})
        with pytest.raises(InputError, match="its `data` has different rows"):
            check_is_same("run", plain, elastic, {"data": [[49, "a"]]})


def test_other_numbers_of_rows_are_refused_before_the_start() -> None:
    dealt = replace(KEPT, job={**KEPT.job, "data": [[25, "a"], [24, "b"]]})
    for rows in (49, None):
        check_rows_are_as_many("run", dealt, {"train": rows, "validation": 7})
    with pytest.raises(InputError, match="its `data` had 49 rows, but now has 50"):
        check_rows_are_as_many("run", dealt, {"train": 50})
    shared = replace(KEPT, job={**KEPT.job, "data": [[25, "a"], [25, "a"]]})
    check_rows_are_as_many("run", shared, {"train": 25})  # each worker has all rows
    kept = replace(KEPT, job={"data": None, "validation_data": [[2, "a"], [0, ""]]})
    with pytest.raises(InputError, match="its `validation_data` had 2 rows, but now has 3"):
        check_rows_are_as_many("run", kept, {"train": 9, "validation": 3})
