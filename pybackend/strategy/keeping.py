"""Checkpoints of an asynchronous training, between two epochs: all its steps have ended then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pybackend.collective import Alone
from pybackend.data.state_file import encode_state
from pybackend.engine.job_identity import describe_training
from pybackend.engine.resume import describe_model, open_checkpoints
from pybackend.engine.save import SavingPlan, encode_trained
from pybackend.job.job import Job, argument_of
from pybackend.job.messages import Emit
from pybackend.model.load import LoadedModel

History = dict[str, list[Any]]


def variables_of(model: Any) -> list[Any]:
    """What training changes, in the order of all checkpoints: weights, the rest, the optimizer."""
    weights = {id(variable) for variable in model.weights}
    others = [variable for variable in model.variables if id(variable) not in weights]
    return [*model.weights, *others, *model.optimizer.variables]


class Keeping:
    """Keeps a training after each epoch, if its job says so.

    Attributes
    ----------
    epoch, history
        Where the training begins: epochs that are done, and their figures.
    """

    def __init__(
        self,
        job: Job,
        loaded: LoadedModel,
        plan: SavingPlan,
        inputs: Any,
        counts: Mapping[str, Sequence[int]],
        emit: Emit,
    ) -> None:
        self._model = loaded.model
        self._timeout = job.timeout
        self.epoch, self.history = job.initial_epoch, History()
        self._checkpoints = None
        if job.checkpoint is None:
            return
        described = describe_training(job, self._model, [], {}, Alone())
        # How they are dealt to which process makes no difference.
        described |= {argument_of(name): [[sum(rows), ""]] for name, rows in counts.items()}
        manifest = describe_model(job, self._model, plan, inputs, described)
        found = open_checkpoints(job, Alone(), manifest, lambda: encode_trained(loaded, plan), emit)
        self._checkpoints = found
        if found.start.state is not None:
            self.epoch, self.history = found.start.epoch, found.start.state["history"]
            values = found.start.state["variables"]
            for variable, value in zip(variables_of(self._model), values, strict=True):
                variable.assign(value)

    def keep(self, epoch: int) -> None:
        """Keep the model as it is now, after so many epochs."""
        found = self._checkpoints
        if found is None or found.writer is None or found.manifest is None:
            return
        found.writer.check()
        arrays = [np.array(variable.numpy()) for variable in variables_of(self._model)]
        state = encode_state({"variables": arrays, "history": self.history})
        found.writer.submit(replace(found.manifest, epoch=epoch), state)

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._checkpoints is not None:
            self._checkpoints.wait(self._timeout)
