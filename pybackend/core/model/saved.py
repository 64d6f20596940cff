"""The model in a checkpoint: its file, and the trained state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pybackend.core.data.checkpoint_store import SavedCheckpoint
from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job.job import WEIGHTS
from pybackend.core.job.values import decode_state
from pybackend.core.model.quiet import import_tensorflow
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.words import call_of, show


def restore_saved(
    saved: SavedCheckpoint, model: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Any:
    """Return the model of a checkpoint; parameters and errors as in `load_checkpoint`."""
    import_tensorflow()
    from pybackend.core.model.compare import hash_weights
    from pybackend.core.model.transfer import read_weights
    from pybackend.core.model.view import list_other_variables

    manifest = saved.manifest
    if saved.model is None:
        raise SerializationError(
            f"the model file {manifest.model.name}, which all checkpoints there share, is missing "
            "or damaged. Training can resume without it: repeat the original call with "
            f"{call_of('Recovery', ..., resume=True)}, which writes it again"
        )
    if model is not None:
        model = model() if callable(model) and not hasattr(model, "weights") else model
        read_weights(model, saved.model, manifest.model_format, manifest.inputs)
    elif manifest.model_format == WEIGHTS:
        raise InputError(
            "Keras cannot write a complete file of this model: pass `model`, a function that "
            "builds it"
        )
    else:
        model = model_from_bytes(saved.model, custom_objects=custom_objects, safe_mode=safe_mode)
    # If the initial weights are equal, their order is the same.
    if hash_weights(model) != manifest.model_weights:
        raise SerializationError(
            "this is not the model that was trained: its weights differ, or are in a different "
            "order"
        )
    state = decode_state(saved.state)
    _assign(model.weights, state.get("final") or state["variables"])
    if model.compiled and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
        # Weights come first, then the generators; the optimizer's follow.
        first = len(model.weights) + len(list_other_variables(model))
        _assign(model.optimizer.variables, state["variables"][first:])
    return model


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=False):
        if tuple(variable.shape) != value.shape:
            raise SerializationError(
                f"the checkpoint has an array of shape {show(value.shape)} for {variable.path}, "
                f"which has {show(tuple(variable.shape))}"
            )
        variable.assign(value)
