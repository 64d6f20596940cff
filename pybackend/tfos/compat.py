"""Functions that hide differences between versions of TensorFlow and Keras from users."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

# Names that Keras 3 generates for inputs.
_MADE_UP = re.compile(r"(input_layer|keras_tensor|input)(_\d+)?")


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a model as a SavedModel, with the signature ``serving_default``.

    Its inputs are named after the model's inputs; a single unnamed input is called ``<first
    layer>_input``. Its outputs are named after their layers. For a subclassed model, Keras chooses
    the names.

    Parameters
    ----------
    model
        A Keras 3 model, or a tf_keras model if TF_USE_LEGACY_KERAS is set.
    is_chief
        All other nodes write, too, because a strategy may need them to, but their files are
        deleted.
    """
    if is_chief:
        _export(model, export_dir)
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        _export(model, str(Path(folder) / "model"))


def disable_auto_shard(options: Any) -> None:
    """Set ``tf.data.Options`` for a data set that belongs to one worker."""
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


def is_gpu_available() -> bool:
    """Return whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _export(model: Any, folder: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        model.save(folder, save_format="tf")
        return
    if not getattr(model, "inputs", None):  # a subclassed model
        model.export(folder, verbose=False)
        return
    import tensorflow as tf

    # A Sequential model that was never called has `inputs`, but no `input`.
    nesting = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    layers = (one for one in model.layers if not isinstance(one, keras.layers.InputLayer))
    inputs = [str(tensor.name) for tensor in model.inputs]
    if len(inputs) == 1 and _MADE_UP.fullmatch(inputs[0]):
        inputs = [f"{next(layers, model).name}_input"]
    specs = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=name)
        for tensor, name in zip(model.inputs, inputs, strict=True)
    ]
    names = list(getattr(model, "output_names", None) or [model.layers[-1].name])

    def serve(*inputs: Any) -> dict[str, Any]:
        nested = keras.tree.pack_sequence_as(nesting, list(inputs))
        return dict(zip(names, keras.tree.flatten(model(nested, training=False)), strict=True))

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve, input_signature=specs)
    archive.write_out(folder, verbose=False)
