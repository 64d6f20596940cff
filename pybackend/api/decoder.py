"""Decode the model of a result from the bytes that its workers sent, in this or another session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import cloudpickle

from pybackend.api.checkpoints import sees_some
from pybackend.job.checkpoint import Checkpoint, pointing_to
from pybackend.job.pickling import pickle_value
from pybackend.model.file_checks import check_digest
from pybackend.model.quiet import import_tensorflow
from pybackend.model.serialization import model_from_bytes


@dataclass(frozen=True)
class Decoder:
    """Build a model from its file or its weights. It can be pickled.

    Attributes
    ----------
    kind, digest
        As `TrainResult.model_format` and `TrainResult.model_sha256`.
    make_copy
        Returns the model as it was before the training; None if the file is enough.
    inputs, weights
        The workers' description of the model, for `pybackend.model.transfer.restore`.
    """

    kind: str
    digest: str
    make_copy: Callable[[], Any] | None
    custom_objects: Mapping[str, Any]
    safe_mode: bool
    inputs: Any
    weights: str
    checkpoint: Checkpoint | None
    verbose: int

    def __call__(self, data: bytes) -> Any:
        """Return the model from the content of its file, or of its weights file."""
        import_tensorflow(self.verbose)
        with pointing_to(self.checkpoint, partial(sees_some, self.checkpoint)):
            if self.make_copy is None:
                return model_from_bytes(
                    data,
                    custom_objects=self.custom_objects,
                    safe_mode=self.safe_mode,
                    sha256=self.digest,
                )
            from pybackend.model.transfer import restore

            check_digest(data, self.digest)
            return restore(self.make_copy(), data, self.kind, self.inputs, self.weights)

    def __reduce__(self) -> Any:
        # Functions and classes of a session are sent as code, as to the workers.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        owners = [part for part in (self.make_copy, *self.custom_objects.values()) if part]
        return _restore, (pickle_value(values, "the result's model", owners),)


def _restore(content: bytes) -> Decoder:
    # Only called when the user unpickles a result; sockets never carry such a pickle.
    return Decoder(**cloudpickle.loads(content))
