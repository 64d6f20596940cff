"""Models to and from bytes, text and files: nothing is lost or executed, and damage is reported."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import full
from replicas import named

from pybackend.core.errors import InputError, SerializationError, UnverifiedFileWarning
from pybackend.core.model import serialization
from pybackend.core.model.serialization import (
    decode_base64,
    load_model,
    model_from_base64,
    model_from_bytes,
    model_to_base64,
    model_to_bytes,
    save_model,
    sha256_of,
)

FORMATS = ("h5", "keras")
LOSSES = ["mse", "mae", "mape", "msle", "mean_squared_error", "huber", "cosine_similarity"]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 8)).astype("float32")
Y = RNG.integers(0, 3, 64)


@keras.saving.register_keras_serializable(package="tests")
class Registered(keras.layers.Layer):
    """A layer that Keras knows by name."""

    def call(self, inputs: Any) -> Any:
        return inputs * 2


class Doubled(keras.layers.Layer):
    """A custom layer, named in `custom_objects`."""

    def call(self, inputs: Any) -> Any:
        return inputs * 2


def custom_loss(y_true: Any, y_pred: Any) -> Any:
    """A custom loss."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def sequential() -> Any:
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(3)]
    )


def several_inputs() -> Any:
    one, other = keras.Input((8,), name="one"), keras.Input((8,), name="other")
    joined = keras.layers.Concatenate()([one, other])
    outputs = {
        "a": keras.layers.Dense(3, name="a")(joined),
        "b": keras.layers.Dense(1, name="b")(joined),
    }
    return keras.Model({"one": one, "other": other}, outputs)


def compiled(optimizer: Any = "adam", loss: Any = None, **settings: Any) -> Any:
    model = sequential()
    if loss is None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **settings)
    return model


def trained(optimizer: Any = "adam") -> Any:
    model = compiled(optimizer, metrics=["accuracy"])
    model.fit(X, Y, epochs=2, verbose=0)
    return model


def has_same_predictions(one: Any, other: Any, x: Any = X) -> bool:
    return bool(np.array_equal(one(x), other(x)))


def strip_digest(data: bytes) -> bytes:
    """Return a model file as it was written before files had a digest."""
    content = data[: data.rindex(b"\ntfdist sha256 ")]
    return content[:-2] + b"\0\0" if content.startswith(b"PK") else content


def count_steps(model: Any) -> int:
    return int(model.optimizer.iterations.numpy())


@pytest.fixture(scope="module", autouse=True)
def without_graphs() -> Iterator[None]:
    """Run eagerly: tracing a graph takes longer than the work of these small models."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="module")
def model(without_graphs: None) -> Any:
    keras.utils.set_random_seed(5)
    return trained()


@pytest.fixture(scope="module", params=FORMATS)
def data(model: Any, request: Any) -> bytes:
    return model_to_bytes(model, format=request.param)


# --- there and back ---


@pytest.mark.parametrize("include_optimizer", [full(False), True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_trained_model_comes_back_and_trains_on(
    model: Any, format: Any, include_optimizer: bool
) -> None:
    again = model_from_base64(
        model_to_base64(model, format=format, include_optimizer=include_optimizer)
    )
    assert has_same_predictions(again, model)
    assert again.to_json() == model.to_json()
    assert again.loss.get_config() == model.loss.get_config()
    assert count_steps(again) == (count_steps(model) if include_optimizer else 0)
    before = count_steps(again)
    history = again.fit(X, Y, verbose=0).history
    assert set(history) == {"accuracy", "loss"}
    assert count_steps(again) == before + 2


@pytest.mark.parametrize(
    "make",
    [
        full(lambda: keras.optimizers.Adam(0.01)),
        full(
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5),
                momentum=0.9,
                nesterov=True,
            )
        ),
        full(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=1.0)),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01)),
    ],
    ids=["Adam", "SGD with a schedule", "AdamW", "LossScale"],
)
@pytest.mark.parametrize("format", FORMATS)
def test_with_its_optimizers_state_training_continues_as_if_never_interrupted(
    format: Any, make: Callable[[], Any]
) -> None:
    model = trained(make())
    again = model_from_bytes(model_to_bytes(model, format=format, include_optimizer=True))
    for one in (model, again):
        one.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("format", ["h5", full("keras")])
def test_without_its_state_the_optimizer_starts_from_zero(format: Any) -> None:
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25, momentum=0.9))
    for model in (trained(wrapped), trained(keras.optimizers.SGD(0.25, momentum=0.9))):
        data = model_to_bytes(model, format=format)
        again = model_from_bytes(data)
        assert type(again.optimizer) is type(model.optimizer)
        inner = getattr(again.optimizer, "inner_optimizer", again.optimizer)
        inner.build(again.trainable_variables)
        assert int(inner.iterations.numpy()) == 0
        assert float(inner.learning_rate) == 0.25
        momenta = [v.numpy() for v in inner.variables if "momentum" in v.path]
        assert len(momenta) == 4
        assert not any(value.any() for value in momenta)


@pytest.mark.parametrize("include_optimizer", [full(False), True])
@pytest.mark.parametrize("format", FORMATS)
def test_saving_leaves_the_model_as_it_is(format: Any, include_optimizer: bool) -> None:
    model = trained()
    before = json.dumps(model.get_compile_config()), model.get_weights(), count_steps(model)
    model_to_bytes(model, format=format, include_optimizer=include_optimizer)
    assert json.dumps(model.get_compile_config()) == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before[1], strict=True))
    assert count_steps(model) == before[2]
    assert model_from_bytes(model_to_bytes(model, format="keras")).compiled


@pytest.mark.parametrize("format", FORMATS)
def test_several_inputs_and_outputs(format: Any) -> None:
    model = several_inputs()
    model.compile(
        "sgd",
        {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"},
        metrics={"a": ["accuracy"], "b": ["mae"]},
        loss_weights={"a": 1.0, "b": 0.5},
    )
    again = model_from_bytes(model_to_bytes(model, format=format))
    x = {"one": X, "other": X[::-1]}
    for name, predicted in model(x).items():
        assert np.array_equal(again(x)[name], predicted)
    y = {"a": Y, "b": X[:, :1]}
    figures = [m.evaluate(x, y, verbose=0, return_dict=True) for m in (model, again)]
    for name in ("loss", "a_loss", "b_loss", "a_accuracy"):
        assert figures[0][name] == pytest.approx(figures[1][name], rel=1e-6)


@pytest.mark.parametrize("loss", named(LOSSES, ["mse"]))
@pytest.mark.parametrize("format", FORMATS)
def test_losses_and_metrics_may_be_given_by_name(format: Any, loss: str) -> None:
    model = compiled("sgd", loss, metrics=["mse", "mae"])
    again = model_from_bytes(model_to_bytes(model, format=format))
    y = np.eye(3, dtype="float32")[Y]
    figures = [m.evaluate(X, y, verbose=0, return_dict=True) for m in (model, again)]
    assert set(figures[0]) == {"loss", "mse", "mae"}
    assert list(figures[1].values()) == pytest.approx(list(figures[0].values()), rel=1e-5)


COMPILED: dict[str, Callable[[], dict[str, Any]]] = {
    "names": lambda: {"loss": "mse", "metrics": ["mae", "mse"], "weighted_metrics": ["mape"]},
    "by output": lambda: {
        "loss": {"a": "mse", "b": keras.losses.LogCosh(name="own")},
        "loss_weights": {"a": 1.0, "b": 0.25},
        "metrics": {"a": ["mae", keras.metrics.MeanSquaredError("own")], "b": "cosine_similarity"},
        "weighted_metrics": {"b": ["mae"]},
    },
    "settings": lambda: {"loss": "mae", "jit_compile": True, "steps_per_execution": 4},
    "eager": lambda: {"loss": ["mae"], "metrics": [["mse"]], "run_eagerly": True},
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("format", FORMATS)
def test_what_compile_was_given_comes_back_as_it_was(
    format: Any, name: str, tmp_path: Path
) -> None:
    x, y = {"one": X, "other": X[::-1]}, {"a": X[:, :3], "b": X[:, :1]}
    model = several_inputs()
    if name != "by output":
        model, x, y = sequential(), X, X[:, :3]
    model.compile("sgd", **COMPILED[name]())
    config = model.get_compile_config()
    with serialization.silence_keras():  # Keras removes the optimizer from the model's settings
        model.save(tmp_path / "model.h5")
    again = model_from_bytes(model_to_bytes(model, format=format))
    assert type(again.optimizer) is type(model.optimizer)
    assert {**again.get_compile_config(), "optimizer": None} == {**config, "optimizer": None}
    figures = [m.evaluate(x, y, verbose=0, return_dict=True) for m in (model, again)]
    assert list(figures[0]) == list(figures[1])
    assert list(figures[1].values()) == pytest.approx(list(figures[0].values()), rel=1e-6)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_whether_the_loss_is_scaled_comes_back(format: Any, scales: bool) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled("sgd", "mse", auto_scale_loss=scales)
        again = model_from_bytes(model_to_bytes(model, format=format))
    finally:
        keras.config.set_dtype_policy("float32")
    kinds = [isinstance(m.optimizer, keras.optimizers.LossScaleOptimizer) for m in (model, again)]
    assert kinds == [scales, scales]


def test_an_h5_file_with_short_names_is_read_by_keras_alone(tmp_path: Path) -> None:
    path = save_model(compiled("sgd", ["mse"]), tmp_path / "model.h5")
    assert keras.saving.load_model(path).compiled


def test_a_loss_that_h5_cannot_hold_is_rejected_when_saving_and_fits_in_keras() -> None:
    model = compiled("sgd", "crossentropy")
    with pytest.raises(SerializationError, match=r"'crossentropy' .* use format='keras'"):
        model_to_bytes(model)
    assert model_from_bytes(model_to_bytes(model, format="keras")).loss == "crossentropy"


@pytest.mark.parametrize("format", FORMATS)
def test_an_uncompiled_model_stays_uncompiled(format: Any) -> None:
    model = sequential()
    again = model_from_bytes(model_to_bytes(model, format=format, include_optimizer=True))
    assert not again.compiled
    assert has_same_predictions(again, model)


@pytest.mark.parametrize("include_optimizer", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_loading_without_compiling(model: Any, format: Any, include_optimizer: bool) -> None:
    data = model_to_bytes(model, format=format, include_optimizer=include_optimizer)
    again = model_from_bytes(data, compile=False)
    assert not again.compiled
    assert has_same_predictions(again, model)


@pytest.mark.parametrize("format", FORMATS)
def test_custom_objects(format: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), Registered(), Doubled(), keras.layers.Dense(3)])
    model.compile("sgd", custom_loss)
    data = model_to_bytes(model, format=format)
    own = {"Doubled": Doubled, "custom_loss": custom_loss}
    assert has_same_predictions(model_from_bytes(data, custom_objects=own), model)
    reason = r"(Could not locate|Unknown layer).*\. Name custom layers, .* in `custom_objects`"
    with pytest.raises(SerializationError, match=reason):
        model_from_bytes(data)


@keras.saving.register_keras_serializable(package="tests")
class Custom(keras.Model):
    """A model of a custom class."""

    def __init__(self, units: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="tests")
class CustomStep(keras.Model):
    """A functional model with a custom training step."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def custom_step() -> Any:
    inputs = keras.Input((8,))
    return CustomStep(inputs, keras.layers.Dense(3)(inputs))


@pytest.mark.parametrize("make", [Custom, custom_step])
def test_a_model_of_a_custom_class_needs_the_keras_format(make: Callable[[], Any]) -> None:
    model = make()
    model.compile("sgd", "mse")
    model(X)
    with pytest.raises(SerializationError, match=r"functional and Sequential .* format='keras'"):
        model_to_bytes(model)
    again = model_from_bytes(model_to_bytes(model, format="keras"))
    assert type(again) is type(model)
    assert has_same_predictions(again, model)


def test_a_model_that_keras_cannot_describe_is_named() -> None:
    class Undescribed(keras.Model):
        def __init__(self, anything: Any) -> None:
            super().__init__(name="undescribed")

    with pytest.raises(
        SerializationError, match=r"(?s)'undescribed' as \.keras: .*`get_config\(\)`"
    ):
        model_to_bytes(Undescribed(object()), format="keras")


def test_nothing_is_printed_or_warned(model: Any, capfd: Any) -> None:
    for format in FORMATS:
        model_from_bytes(model_to_bytes(model, format=format, include_optimizer=True))
    assert capfd.readouterr() == ("", "")


# --- files ---


@pytest.mark.parametrize("format", FORMATS)
def test_files_there_and_back(model: Any, format: Any, tmp_path: Path) -> None:
    path = save_model(model, tmp_path / "new" / f"model.{format}")
    assert [p.name for p in path.parent.iterdir()] == [f"model.{format}"]
    assert has_same_predictions(load_model(str(path)), model)
    assert has_same_predictions(keras.saving.load_model(path), model)


# Keras itself warns that HDF5 is old.
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.filterwarnings("ignore::pybackend.UnverifiedFileWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_files_that_keras_wrote_are_read_and_train_on(format: Any, tmp_path: Path) -> None:
    model = trained(keras.optimizers.SGD(0.05, momentum=0.9))
    model.save(tmp_path / f"model.{format}")
    again = load_model(tmp_path / f"model.{format}")
    assert has_same_predictions(again, model)
    assert np.isfinite(again.fit(X, Y, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_text_is_written_as_it_is(model: Any, format: Any, tmp_path: Path) -> None:
    text = model_to_base64(model, format=format)
    path = save_model(text, tmp_path / f"model.{format}")
    assert path.read_bytes() == base64.b64decode(text)


def test_a_file_that_exists_is_replaced_or_kept_whole(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    path.write_bytes(b"old")
    with pytest.raises(SerializationError):
        save_model("not base64!", path)
    assert path.read_bytes() == b"old"
    save_model(model, path)
    assert load_model(path).compiled
    assert [p.name for p in tmp_path.iterdir()] == ["model.h5"]


def test_a_link_beside_the_file_is_not_followed(model: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    for name in (".model.h5.partial", "model.h5.partial", "model.h5"):
        (tmp_path / name).symlink_to(other)
    save_model(model, tmp_path / "model.h5")
    assert other.read_text() == "mine"
    assert not (tmp_path / "model.h5").is_symlink()


@pytest.mark.parametrize("name", ["model", "model.hdf5", "model.pb", "model.H5"])
def test_other_file_names_are_rejected(model: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"name the file \*\.h5 or \*\.keras"):
        save_model(model, tmp_path / name)


def test_text_of_one_format_is_not_named_as_the_other(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a \.h5 file: end the name in \.h5"):
        save_model(model_to_base64(model), tmp_path / "model.keras")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model file at '.*missing\.h5'"):
        load_model(tmp_path / "missing.h5")


# --- the digest ---


def test_the_digest_is_sha256_of_the_bytes(data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    assert sha256_of(data) == digest
    assert sha256_of(base64.b64encode(data).decode()) == digest
    assert model_from_bytes(data, sha256=digest.upper()).compiled


def test_a_single_altered_bit_is_noticed_by_the_digest(data: bytes) -> None:
    digest = sha256_of(data)
    for place in (0, len(data) // 2, len(data) - 1):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(SerializationError, match=f"expected {digest}: it was altered"):
            model_from_bytes(bytes(altered), sha256=digest)


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_noticed_by_the_digest_that_a_file_carries(model: Any, format: Any) -> None:
    data = model_to_bytes(model, format=format)
    mark = data.rindex(b"\ntfdist sha256 ")
    for place in (*range(20, mark, mark // 40), len(data) - 1):
        altered = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(SerializationError, match="the SHA-256 stored in it"):
            model_from_bytes(altered)
    with pytest.raises(SerializationError, match="the SHA-256 stored in it"):
        model_from_bytes(data[:-1])


@pytest.mark.parametrize("format", FORMATS)
def test_files_without_a_digest_are_read(model: Any, format: Any) -> None:
    again = model_from_bytes(strip_digest(model_to_bytes(model, format=format)))
    assert has_same_predictions(again, model)


def test_the_first_file_without_a_digest_is_a_warning(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(serialization, "_has_warned", threading.Event())
    path = save_model(model, tmp_path / "model.h5")
    load_model(path)
    load_model(save_model(model, tmp_path / "model.keras"))
    path.write_bytes(strip_digest(path.read_bytes()))
    load_model(path, sha256=sha256_of(path.read_bytes()))
    with pytest.warns(UnverifiedFileWarning, match=r"^model\.h5 has no digest, so damage"):
        load_model(path)
    load_model(path)  # a second warning would be an error


# --- text ---


@pytest.mark.parametrize("width", [60, 64, 72, 76])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_with_line_breaks_is_read(model: Any, width: int, end: str) -> None:
    text = model_to_base64(model)
    broken = end.join(text[i : i + width] for i in range(0, len(text), width)) + end
    assert decode_base64(broken) == base64.b64decode(text)
    assert sha256_of(broken) == sha256_of(text)


@pytest.mark.parametrize("text", ["a", "abc", "ab!=", "{}", "äöü=", "QU=D", "\x00\x00\x00\x00"])
def test_text_that_is_not_base64_is_rejected(text: str) -> None:
    with pytest.raises(SerializationError, match="this is not base64 text"):
        model_from_base64(text)


@pytest.mark.parametrize("text", [None, 5, b"QUJD", ["QUJD"]])
def test_values_that_are_not_text_are_rejected(text: Any) -> None:
    with pytest.raises(InputError, match="expected base64 text, not "):
        model_from_base64(text)


@pytest.mark.parametrize("content", ["QUJD", 5, None, [1, 2], Path("model.h5")])
def test_values_that_are_not_bytes_are_rejected(content: Any) -> None:
    with pytest.raises(InputError, match="expected the bytes of a model file, not "):
        model_from_bytes(content)


def test_bytes_may_come_as_r_has_them(model: Any, data: bytes) -> None:
    assert has_same_predictions(model_from_bytes(bytearray(data)), model)
    assert has_same_predictions(model_from_bytes(memoryview(data)), model)


# --- wrong models ---


@pytest.mark.parametrize("wrong", [None, "model.h5", X, keras.layers.Dense(1), keras.Sequential])
def test_values_that_are_not_models_are_rejected(wrong: Any) -> None:
    with pytest.raises(InputError, match="expected a Keras model, not "):
        model_to_bytes(wrong)


@pytest.mark.parametrize("format", ["hdf5", ".h5", "", None, "tf"])
def test_another_format_is_rejected(model: Any, format: Any) -> None:
    with pytest.raises(InputError, match="`format` must be 'h5' or 'keras', not "):
        model_to_bytes(model, format=format)


# --- damage ---


@pytest.mark.parametrize("content", [b"", b"PK", b"\x89HDF", b"hello, world", bytes(5000)])
def test_garbage_is_not_a_model(content: bytes) -> None:
    with pytest.raises(SerializationError, match=f"these {len(content)} bytes are neither"):
        model_from_bytes(content)


@pytest.mark.parametrize("magic", [b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"])
def test_garbage_behind_the_right_first_bytes_is_damage(magic: bytes) -> None:
    with pytest.raises(SerializationError, match="truncated or corrupted"):
        model_from_bytes(magic + bytes(range(256)) * 20)


def test_truncation_anywhere_is_reported(data: bytes) -> None:
    mark = data.rindex(b"\ntfdist sha256 ")
    for number, end in enumerate([*range(0, mark, mark // 60), mark - 1]):
        # Without a digest another process checks the file first, which takes time.
        digest = None if number % 10 == 0 else sha256_of(data[:end])
        with pytest.raises(SerializationError, match=r"truncated|neither|damaged"):
            model_from_bytes(data[:end], sha256=digest)


def test_damage_anywhere_in_a_keras_file_is_reported(model: Any) -> None:
    data = strip_digest(model_to_bytes(model, format="keras"))
    untouched = model_from_bytes(data).get_weights()
    rejected = 0
    for place in range(0, len(data), len(data) // 200):
        altered = data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]
        try:
            again = model_from_bytes(altered)
        except SerializationError:
            rejected += 1
        else:  # a date, or another part of the archive without information about the model
            for one, other in zip(again.get_weights(), untouched, strict=True):
                np.testing.assert_array_equal(one, other)
    assert rejected > 150


def test_a_damaged_description_in_an_h5_file_is_reported(model: Any) -> None:
    data = strip_digest(model_to_bytes(model))
    for text in (b'{"class_name"', b'"Dense"', b'"units"', b'"optimizer"', b'"Adam"'):
        assert text in data
        with pytest.raises(SerializationError, match="Keras cannot load this model"):
            model_from_bytes(data.replace(text, b"?" * len(text)))


def test_a_damaged_member_of_a_keras_file_is_named(model: Any) -> None:
    data = strip_digest(model_to_bytes(model, format="keras"))
    place = data.index(b"\x89HDF") + 200
    altered = data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]
    with pytest.raises(SerializationError, match=r"damaged at 'model\.weights\.h5'"):
        model_from_bytes(altered)


def test_an_archive_of_something_else_is_not_a_model() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(SerializationError, match=r"damaged at 'config\.json'"):
        model_from_bytes(archive.getvalue())


def test_weights_alone_are_not_a_model(model: Any, tmp_path: Path) -> None:
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(SerializationError, match=r"does not contain a model.* not only weights"):
        model_from_bytes((tmp_path / "model.weights.h5").read_bytes())


# --- hostile and foreign files ---


@pytest.mark.parametrize("format", FORMATS)
def test_code_in_a_file_runs_only_if_asked_for(
    format: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    mark = tmp_path / "ran"
    monkeypatch.setenv("TFDIST_TEST_MARK", str(mark))
    leave_mark = keras.layers.Lambda(
        lambda x: (open(__import__("os").environ["TFDIST_TEST_MARK"], "w").close(), x)[1]
    )
    data = model_to_bytes(keras.Sequential([keras.Input((8,)), leave_mark]), format=format)
    mark.unlink()
    with pytest.raises(SerializationError, match="safe_mode=False"):
        model_from_bytes(data)
    assert not mark.exists()
    model_from_bytes(data, safe_mode=False)(X)
    assert mark.exists()


OBJECTS = [
    {"module": "os", "class_name": "system", "config": "touch {mark}", "registered_name": None},
    {"module": "builtins", "class_name": "exec", "config": "open({mark!r}, 'w')"},
    {"module": "subprocess", "class_name": "Popen", "config": {"args": ["touch", "{mark}"]}},
    {"module": "os", "class_name": "function", "config": "system", "registered_name": "system"},
]


@pytest.mark.parametrize("place", ["activation", "layer"])
@pytest.mark.parametrize("wrong", OBJECTS, ids=lambda wrong: wrong["module"])
@pytest.mark.parametrize("format", FORMATS)
def test_functions_that_run_code_are_not_taken_for_parts_of_a_model(
    format: Any, wrong: Any, place: str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    # Any object that is called with a layer's input, or its settings, leaves the mark.
    text = json.dumps(wrong).replace("{mark!r}", repr(str(mark))).replace("{mark}", str(mark))

    def change(description: Any) -> None:
        layer = description["config"]["layers"][1]
        target, key = (layer["config"], "activation") if place == "activation" else (layer, None)
        if key:
            target[key] = json.loads(text)
        else:
            target.update(json.loads(text))

    data = change_description(model_to_bytes(sequential(), format=format), change)
    with pytest.raises(SerializationError, match="Keras cannot load this model"):
        model_from_bytes(data)(X)
    assert not mark.exists()


def change_description(data: bytes, change: Callable[[Any], None]) -> bytes:
    """Return a model file, without a digest, whose description of the model was altered."""
    if not data.startswith(b"PK"):
        file = io.BytesIO(data)
        with h5py.File(file, "r+") as opened:
            description = json.loads(opened.attrs["model_config"])
            change(description)
            opened.attrs["model_config"] = json.dumps(description)
        return file.getvalue()
    altered = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(altered, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                description = json.loads(content)
                change(description)
                content = json.dumps(description).encode()
            new.writestr(name, content)
    return altered.getvalue()


def as_keras_2_wrote_it(data: bytes) -> bytes:
    """Return a model file that claims to be written by Keras 2."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        file = io.BytesIO(data)
        with h5py.File(file, "r+") as opened:
            opened.attrs["keras_version"] = b"2.15.0"
        return file.getvalue()
    altered = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(altered, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "metadata.json":
                content = json.dumps({**json.loads(content), "keras_version": "2.15.0"}).encode()
            new.writestr(name, content)
    return altered.getvalue()


@pytest.mark.parametrize("safe_mode", [True, False])
def test_files_of_keras_2_are_rejected(data: bytes, safe_mode: bool) -> None:
    with pytest.raises(SerializationError, match=r"written by Keras 2\.15\.0, not Keras 3"):
        model_from_bytes(as_keras_2_wrote_it(data), safe_mode=safe_mode)


def test_a_file_without_a_version_is_rejected(model: Any) -> None:
    file = io.BytesIO(model_to_bytes(model))
    with h5py.File(file, "r+") as opened:
        del opened.attrs["keras_version"]
    with pytest.raises(SerializationError, match=r"written by Keras \(unknown\)"):
        model_from_bytes(file.getvalue())
