"""Training runs as runs of MLflow."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import pybackend.tracking as tracking
from pybackend.core.api.calls import explain_arguments
from pybackend.core.api.observer import Tracked, Tracker
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.words import show, term

_STEP_SECONDS = 5.0
# MLflow's limits for one request, and for a tag.
_MOST = {"metrics": 1000, "params": 100, "tags": 100}
_MOST_CHARACTERS = 5000
# MLflow retries for minutes otherwise, while this session waits.
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


@explain_arguments
def track_mlflow(
    *,
    experiment: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, str] | None = None,
    nested: bool = False,
    tracking_uri: str | None = None,
    steps: bool = True,
    log_model: bool = True,
) -> Tracker:
    """Record a training run in MLflow. Pass the result in ``callbacks`` of `barrier_train`.

    This session makes one run and records it. Workers neither import MLflow nor connect to its
    server. The run has

    - the settings as parameters (``TrainResult.settings``, with the seed and the versions);
    - the metrics of each epoch, and within an epoch those of the first worker's rows every few
      seconds (``step/loss``, ``step/rows_per_second``), whose steps are counted over all epochs;
    - at the end, the times and rows per second of the call and of each of the first 64 workers
      (``system/``), the audit (``audit/``) and the test metrics of `train_mnist` (``test/``);
    - the artifacts ``plan.txt``, ``report.html`` (`report`) and ``result.json``;
    - the model with its signature, for ``mlflow.keras.load_model``;
    - tags: the version of tfdist, the hosts, the digest of the model, and the git commit of the
      working directory.

    If training fails, the run ends as FAILED with the error as the tag ``tfdist.error``, and
    ``report.html`` shows a worker's failure. After Ctrl-C it ends as KILLED. A run that is active
    in this session (``with mlflow.start_run():``) is used and stays open. If the server fails
    during training, a note reports it once, and training continues.

    Parameters
    ----------
    experiment
        Name of the experiment, which is created if necessary. None (default): the active one.
    run_name
        Name of the run. None (default): MLflow chooses one.
    tags
        Further tags, as text by name.
    nested
        True: if a run is active, this run is its child. The trials of `train_many` always are.
    tracking_uri
        Sets the URI of the tracking server for this session, as ``mlflow.set_tracking_uri``. None
        (default): as set before, or in MLFLOW_TRACKING_URI.
    steps
        Whether metrics are recorded within epochs, too.
    log_model
        Whether the model is recorded. With ``uri`` in `ModelOptions`, only its URI is. False also
        leaves the model out of the report, so that this session need not import TensorFlow.

    Returns
    -------
    Tracker
        An object for ``callbacks``. Each training with it makes a new run.

    Raises
    ------
    InputError
        MLflow is not installed (``pip install 'tfdist[mlflow]'``), or an argument is invalid.

    Examples
    --------
    >>> callbacks = [track_mlflow(experiment="digits")]  # doctest: +SKIP
    """
    tags = {} if tags is None else tags
    if not isinstance(tags, Mapping) or not all(isinstance(name, str) for name in tags):
        raise InputError(f"`tags` must be a {term('dict')} of text, not {show(tags)}")
    texts = {name: str(value) for name, value in tags.items()}
    return MlflowTracker(run_name, steps, log_model, experiment, texts, nested, tracking_uri)


class _MlflowRun(tracking.TrackedRun):
    """A run. A thread sends the metrics, so that workers never wait for the server.

    MLflow's own client object is used with the run's ID, because its module-level functions write
    to whatever run is active, which the caller's code may change.
    """

    def __init__(self, mlflow: Any, tracker: MlflowTracker, prepared: PreparedTraining) -> None:
        super().__init__(tracker)
        if tracker.tracking_uri is not None:
            mlflow.set_tracking_uri(tracker.tracking_uri)
        self._mlflow, self._kinds = mlflow, mlflow.entities
        self._is_silent = prepared.job.verbose == 0
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._is_own = active is None or tracker.nested
        if self._is_own:
            active = mlflow.start_run(
                experiment_id=self._find_experiment(tracker.experiment),
                run_name=tracker.run_name,
                nested=active is not None,
                parent_run_id=tracker.parent,
            )
        self._id = active.info.run_id
        self._pending: list[Any] = []
        self._sent = time.monotonic()
        self._sender = ThreadPoolExecutor(1, "tfdist-mlflow")
        self._sending: Future[Any] = self._sender.submit(bool)
        try:
            self._set_tags({**tracking.describe_origin(), **tracker.tags})
            settings = tracking.describe_parameters(prepared, tracker)
            self._write("params", [self._kinds.Param(k, str(v)) for k, v in settings.items()])
            self._add_plan(prepared)
        except BaseException as error:
            self._end(error)
            raise

    def log(self, axis: Literal["epoch", "step"], number: int, values: Mapping[str, float]) -> None:
        """Send metrics now, at the end of an epoch, or every few seconds."""
        self._add(values, number)
        if axis == "epoch" or time.monotonic() - self._sent >= _STEP_SECONDS:
            self._send()

    def fail(self, error: BaseException) -> None:
        with _few_retries():
            super().fail(error)

    def _add_result(self, result: TrainResult) -> None:
        self._add(tracking.describe_result(result), result.initial_epoch + result.epochs)
        self._conclude()
        self._set_tags(tracking.describe_hosts(result))

    def _add_error(self, text: str) -> None:
        self._conclude()
        self._set_tags({"tfdist.error": text[:_MOST_CHARACTERS]})

    def _add_files(self, folder: str, kind: str) -> None:
        self._client.log_artifacts(self._id, folder)

    def _find_experiment(self, name: str | None) -> str | None:
        if name is None:
            return None
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        self._write("tags", [self._kinds.RunTag(name, text) for name, text in tags.items()])

    def _write(self, kind: str, values: Sequence[Any]) -> None:
        for first in range(0, len(values), _MOST[kind]):
            self._client.log_batch(self._id, **{kind: values[first : first + _MOST[kind]]})

    def _add(self, values: Mapping[str, float], number: int) -> None:
        now = int(time.time() * 1000)  # milliseconds
        self._pending += [self._kinds.Metric(k, v, now, number) for k, v in values.items()]

    def _send(self) -> None:
        """Start to send what is pending; raise the error of an earlier attempt."""
        if self._sending.done():
            self._sending.result()  # `api/observer.py` turns the error into a note
        metrics, self._pending = self._pending, []
        self._sent = time.monotonic()
        self._sending = self._sender.submit(self._write_metrics, self._sending, metrics)

    def _write_metrics(self, earlier: Future[Any], metrics: list[Any]) -> None:
        earlier.result()  # after an error, no further attempt
        self._write("metrics", metrics)

    def _conclude(self) -> None:
        """Wait until all metrics are sent; raise the first error."""
        self._send()
        self._sender.shutdown()
        self._sending.result()

    def add_model(self, result: TrainResult) -> None:
        """Record the model, or only its weights if Keras cannot write it to a file."""
        if result.model_format == "weights.h5":
            super().add_model(result)
            return
        versions = result.settings["versions"]
        # Else MLflow loads the model in another process to find out what it needs.
        needed = [f"{name}=={versions[name]}" for name in ("keras", "tensorflow", "numpy")]
        model = result.model
        with self._quiet():
            self._mlflow.keras.log_model(
                model,
                name="model",
                signature=_sign(model),
                pip_requirements=[one for one in needed if not one.endswith("None")],
            )

    def _end(self, error: BaseException | None) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        if not self._is_own:
            return
        stopped = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        status = "FINISHED" if error is None else stopped
        active = self._mlflow.active_run()
        with self._quiet(), _few_retries():
            if active is not None and active.info.run_id == self._id:
                self._mlflow.end_run(status)
            else:  # the caller's code has started others, or ended this one
                self._client.set_terminated(self._id, status)

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        silent = contextlib.redirect_stdout(io.StringIO())
        return silent if self._is_silent else contextlib.nullcontext()


@dataclass(frozen=True)
class MlflowTracker(tracking.RunTracker):
    """Settings of `track_mlflow`."""

    experiment: str | None
    tags: dict[str, str]
    nested: bool
    tracking_uri: str | None
    parent: str | None = None

    system = "MLflow"
    package = "mlflow"
    run = _MlflowRun
    advice = "Check MLFLOW_TRACKING_URI or `tracking_uri`, and that the server runs"

    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> MlflowTracker:
        """Return the settings for a child of the run that is active in this thread, if any is."""
        import mlflow

        name = f"{self.run_name or 'trial'}-{number}"
        active = mlflow.active_run()
        parent = active and active.info.run_id
        return replace(self, run_name=name, parent=parent, arguments=arguments)

    def begin(self, prepared: PreparedTraining) -> Tracked:
        with _few_retries():
            return super().begin(prepared)


def _sign(model: Any) -> Any:
    """Return a model's signature: its inputs and outputs, for any number of rows."""
    import numpy as np
    from keras import tree
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def describe(tensor: Any, *name: str) -> Any:
        dtype = np.dtype(str if tensor.dtype == "string" else tensor.dtype)
        return TensorSpec(dtype, tuple(-1 if n is None else n for n in tensor.shape), *name)

    inputs = list(getattr(model, "inputs", None) or ())
    outputs = tree.flatten(getattr(model, "outputs", None) or ())
    if not inputs or not outputs:
        return None
    # MLflow takes names for all inputs of a schema, or for none.
    named = [one.name for one in inputs] if len(inputs) > 1 else []
    keys = list(getattr(model, "output_names", ())) if len(outputs) > 1 else []
    return ModelSignature(
        Schema([describe(one, *named[n : n + 1]) for n, one in enumerate(inputs)]),
        Schema([describe(one, *keys[n : n + 1]) for n, one in enumerate(outputs)]),
    )


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    is_set = _RETRIES in os.environ
    os.environ.setdefault(_RETRIES, "2")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_RETRIES, None)
