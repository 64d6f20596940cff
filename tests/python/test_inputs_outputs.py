"""The arrays of a model's inputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

from pybackend import InputError, WorkerFailedError, barrier_train
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import to_rows
from pybackend.core.model.inputs_outputs import (
    check_features,
    check_input_names,
    check_output_names,
    check_text,
    find_text_inputs,
    name_inputs,
    reshape_rows,
)
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes


def _model(*names: str, by_name: bool = False) -> Any:
    inputs = {name: keras.Input((4,), name=name) for name in names}
    listed = list(inputs.values())
    joined = keras.layers.add(listed) if len(listed) > 1 else listed[0]
    given = inputs if by_name else listed if len(listed) > 1 else listed[0]
    return keras.Model(given, keras.layers.Dense(1)(joined))


@pytest.mark.parametrize(
    ("names", "columns", "found"),
    [
        (["a"], ["x/z", "y"], "one input, a, but x has arrays named z: pass one array"),
        (["a"], ["x/#0", "x/#1", "y"], "one input, a, but x has 2 arrays"),
        (["a", "b"], ["x", "y"], "the inputs a, b, but x has one array: pass {'a': ..., 'b'"),
        (["a", "b"], ["x", "y"], "(a, b) is read as (x, y); if all are inputs, pass ((a, b),)"),
        (["a", "b"], ["x/#0", "x/#1", "x/#2", "y"], "but x has 3 arrays"),
        (["a", "b"], ["x/a", "y/b"], "but x has arrays named a: pass"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_other_inputs_are_refused(
    names: list[str], columns: list[str], found: str, by_name: bool
) -> None:
    with pytest.raises(InputError) as caught:
        check_input_names(_model(*names, by_name=by_name), columns)
    assert found in str(caught.value)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_models_own_are_taken(by_name: bool) -> None:
    for columns in (["x/a", "x/b", "y"], ["x/#0", "x/#1"], ["x/b", "x/a", "x/more"]):
        check_input_names(_model("a", "b", by_name=by_name), columns)
    check_input_names(_model("a", by_name=by_name), ["x", "y"])
    check_input_names(_model("a", by_name=by_name), ["x/a", "y"])
    check_input_names(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), ["x", "y"])
    check_input_names(keras.Sequential([keras.layers.Dense(1)]), ["x/whatever", "y"])


def test_other_outputs_and_text_for_numbers_are_refused() -> None:
    inputs = keras.Input((4,), name="a")
    model = keras.Model(inputs, {name: keras.layers.Dense(1)(inputs) for name in "pq"})
    check_output_names(model, ["x", "y/p", "y/q"])
    check_output_names(model, ["x", "y/#0", "y/#1"])
    check_output_names(keras.Sequential([keras.layers.Dense(1)]), ["x", "y/p"])
    for columns in (["x", "y/p", "y/z"], ["x", "y/p"]):
        with pytest.raises(InputError, match="the model has the outputs p, q, but y has arrays"):
            check_output_names(model, columns)
    model.compile("sgd", "mse")
    check_output_names(model, ["x", "y/p", "y/q", "sample_weight"])
    check_output_names(model, ["x", "y/p", "y/q", "sample_weight/p", "sample_weight/q"])
    with pytest.raises(InputError, match="labels for 2 outputs, but sample weights for 1"):
        check_output_names(model, ["x", "y/p", "y/q", "sample_weight/p"])
    with pytest.raises(InputError, match="outputs p, q, but there are labels for 1"):
        check_output_names(model, ["x", "y"])
    check_output_names(model, ["x"])
    model.compile("sgd", {"p": "mse"})  # only labels of p
    check_output_names(model, ["x", "y"])
    model.compile("sgd", {"p": "mse", "q": "mae"})
    with pytest.raises(InputError, match="outputs p, q, but there are labels for 1"):
        check_output_names(model, ["x", "y"])
    with pytest.raises(InputError, match="x is text, but the model's input takes float32"):
        check_text(model, {"x": ()})
    check_text(keras.Sequential([keras.Input((1,), dtype="string")]), {"x": ()})


def test_inputs_that_take_text_are_known_by_name() -> None:
    words, numbers = keras.Input((1,), dtype="string", name="w"), keras.Input((1,), name="n")
    lookup = keras.layers.StringLookup(vocabulary=["a"], output_mode="one_hot")
    joined = keras.layers.Concatenate()([lookup(words), numbers])
    assert find_text_inputs(keras.Model({"first": words, "second": numbers}, joined)) == ["first"]
    assert find_text_inputs(keras.Model([numbers, words], joined)) == ["w"]
    assert find_text_inputs(_model("a")) == []
    assert find_text_inputs(keras.Sequential([keras.layers.Dense(1)])) is None


def test_inputs_without_a_name_have_that_of_their_layer_before_and_after_a_file() -> None:
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((2, 2)), keras.Input((3,))]
    flat = [keras.layers.Flatten()(one) for one in inputs]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    first, second = name_inputs(model)
    assert [first, second] == [one.name for one in model.layers[:2]]
    x = np.arange(56, dtype="float32").reshape(8, 7)
    given = {f"x/{second}": x[:, 4:], f"x/{first}": x[:, :4]}
    for one in (model, model_from_bytes(model_to_bytes(model))):
        assert list(name_inputs(one)) == [first, second]
        check_features(one, {second: [], first: []}, {first: list("abcd"), second: list("efg")})
        check_input_names(one, given)
        with pytest.raises(InputError, match=f"the inputs {', '.join(sorted((first, second)))}: "):
            check_features(one, None, {})
        rows = reshape_rows(to_rows(given), one)
        batch = nest(rows.take(np.arange(len(rows))))
        found = one.predict(batch[0] if len(batch) == 1 else batch, verbose=0)
        expected = model.predict([x[:, :4].reshape(8, 2, 2), x[:, 4:]], verbose=0)
        assert np.array_equal(found, expected)


def test_a_model_that_workers_build_is_compared_with_the_names_of_a_table() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "label": [0, 1]})

    def wide() -> Any:
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    expected = r"input takes 7 numbers per row \(shape \(7,\)\), but there are 2 features: a, b"
    for model, kind in ((wide(), InputError), (wide, WorkerFailedError)):
        with pytest.raises(kind, match=expected):
            barrier_train("local", model, frame, workers=1, verbose=0)


def test_text_for_an_input_that_takes_numbers_is_named() -> None:
    frame = pd.DataFrame({"t": ["u", "v"], "y": [1.0, 2.0]})
    for model, data, kind, what in (
        (_regression(), frame, InputError, "column 't' is text, .*'one_hot'"),
        (_regression, frame, WorkerFailedError, "x is text, but the model's input takes float32"),
        (_regression, (frame[["t"]].to_numpy(), frame["y"]), WorkerFailedError, "x is text, but"),
    ):
        with pytest.raises(kind, match=what):
            barrier_train("local", model, data, label="y", workers=1, verbose=0)


def _regression() -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_inputs_in_a_mapping_have_its_names_in_any_order() -> None:
    inputs = {"b": keras.Input((3,), name="b"), "a": keras.Input((2, 2), name="a")}
    model = keras.Model(inputs, keras.layers.Flatten()(inputs["a"]))
    assert list(name_inputs(model)) == ["a", "b"]
    x = np.zeros((1, 4), "float32")
    rows = reshape_rows(to_rows({"x/b": x[:, :3], "x/a": x}), model)
    assert {name: shape for name, (_, shape) in rows.spec.items()} == {"x/b": (3,), "x/a": (2, 2)}
