"""Training runs as runs of MLflow."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pybackend.tracking as tracking
from pybackend.core.api.calls import explain_arguments
from pybackend.core.api.observer import Tracked, Tracker
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult

_ADVICE = "Check MLFLOW_TRACKING_URI or `tracking_uri`, and that the server runs"
_STEP_SECONDS = 5.0
# MLflow's limits for one request, and for a tag.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
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
    tracking.check_text(experiment=experiment, run_name=run_name, tracking_uri=tracking_uri)
    tracking.check_flags(nested=nested, steps=steps, log_model=log_model)
    named = tracking.check_tags(tags)
    tracking.check_package("mlflow", "MLflow")
    return MlflowTracker(experiment, run_name, named, nested, tracking_uri, steps, log_model)


@dataclass(frozen=True)
class MlflowTracker(Tracker):
    """Settings of `track_mlflow`."""

    experiment: str | None
    run_name: str | None
    tags: dict[str, str]
    nested: bool
    tracking_uri: str | None
    steps: bool
    log_model: bool
    parent: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    system: str = field(default="MLflow", repr=False)

    def for_trial(self, number: int, arguments: Mapping[str, Any]) -> MlflowTracker:
        """Return the settings for a child of the run that is active in this thread, if any is."""
        active = tracking.load_package("mlflow", "MLflow").active_run()
        name = f"{self.run_name or 'trial'}-{number}"
        parent = active and active.info.run_id
        return replace(self, run_name=name, parent=parent, arguments=arguments)

    def begin(self, prepared: PreparedTraining) -> Tracked:
        mlflow = tracking.load_package("mlflow", "MLflow")
        try:
            with _few_retries():
                return _MlflowRun(mlflow, self, prepared)
        except Exception as error:  # of its stores and servers
            raise tracking.explain_start(self.system, _ADVICE, error) from error


class _MlflowRun(Tracked):
    """A run. A thread sends the metrics, so that workers never wait for the server.

    MLflow's own client object is used with the run's ID, because its module-level functions write
    to whatever run is active, which the caller's code may change.
    """

    def __init__(self, mlflow: Any, tracker: MlflowTracker, prepared: PreparedTraining) -> None:
        if tracker.tracking_uri is not None:
            mlflow.set_tracking_uri(tracker.tracking_uri)
        self._mlflow, self._tracker = mlflow, tracker
        self._is_silent = prepared.job.verbose == 0
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._is_own = active is None or tracker.nested
        if self._is_own:
            active = mlflow.start_run(
                experiment_id=self._find_experiment(),
                run_name=tracker.run_name,
                nested=active is not None,
                parent_run_id=tracker.parent,
            )
        self._id = active.info.run_id
        self._pending: list[Any] = []
        self._sent = time.monotonic()
        self._sender = ThreadPoolExecutor(1, "tfdist-mlflow")
        self._sending: Future[None] | None = None
        try:
            self._set_tags({**tracking.describe_origin(), **tracker.tags})
            settings = tracking.describe_parameters(prepared.settings)
            self._log_parameters(tracking.add_arguments(settings, tracker.arguments))
            with self._artifacts() as folder:
                tracking.write_plan(prepared, folder)
        except BaseException:
            self._end("FAILED")
            raise

    def log(self, axis: Literal["epoch", "step"], number: int, values: Mapping[str, float]) -> None:
        """Send metrics now, at the end of an epoch, or every few seconds."""
        self._add(values, number)
        if axis == "epoch" or time.monotonic() - self._sent >= _STEP_SECONDS:
            self._send()

    def finish(self, result: TrainResult) -> None:
        try:
            self._add(tracking.describe_result(result), result.initial_epoch + result.epochs)
            self._conclude()
            self._set_tags(tracking.describe_hosts(result))
            with self._artifacts() as folder:
                tracking.write_result(result, folder, reads_model=self._tracker.log_model)
            if self._tracker.log_model and result.model_uri is None:
                self._log_model(result)
        finally:
            self._end("FINISHED")

    def fail(self, error: BaseException) -> None:
        try:
            with _few_retries():
                self._conclude()
                text = f"{type(error).__name__}: {error}"
                self._set_tags({"tfdist.error": text[:_MOST_CHARACTERS]})
                with self._artifacts() as folder:
                    tracking.write_failure(error, folder)
        finally:
            self._end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    @contextlib.contextmanager
    def _artifacts(self) -> Iterator[Path]:
        """Yield a folder, whose files become artifacts."""
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            yield Path(folder)
            self._client.log_artifacts(self._id, folder)

    def _find_experiment(self) -> str | None:
        name = self._tracker.experiment
        if name is None:
            return None
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        kind = self._mlflow.entities.RunTag
        self._client.log_batch(self._id, tags=[kind(name, text) for name, text in tags.items()])

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        kind = self._mlflow.entities.Param
        all_params = [kind(name, str(value)) for name, value in parameters.items()]
        for first in range(0, len(all_params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=all_params[first : first + _MOST_PARAMS])

    def _add(self, values: Mapping[str, float], number: int) -> None:
        kind, now = self._mlflow.entities.Metric, int(time.time() * 1000)  # milliseconds
        self._pending += [kind(name, value, now, number) for name, value in values.items()]

    def _send(self) -> None:
        """Start to send what is pending; raise the error of an earlier attempt."""
        if self._sending is not None and self._sending.done():
            self._sending.result()  # `api/observer.py` turns the error into a note
        metrics, self._pending = self._pending, []
        self._sent = time.monotonic()
        self._sending = self._sender.submit(self._write, self._sending, metrics)

    def _write(self, earlier: Future[None] | None, metrics: list[Any]) -> None:
        if earlier is not None:
            earlier.result()  # after an error, no further attempt
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def _conclude(self) -> None:
        """Wait until all metrics are sent; raise the first error."""
        self._send()
        self._sender.shutdown()
        if self._sending is not None:
            self._sending.result()

    def _log_model(self, result: TrainResult) -> None:
        """Record the model, or only its weights if Keras cannot write it to a file."""
        if result.model_format == "weights.h5":
            with self._artifacts() as folder:
                tracking.write_model(result, folder)
            return
        flavor = tracking.load_package("mlflow.keras", "MLflow")
        versions = result.settings["versions"]
        # Else MLflow loads the model in another process to find out what it needs.
        needed = [f"{name}=={versions[name]}" for name in ("keras", "tensorflow", "numpy")]
        model = result.model
        with self._quiet():
            flavor.log_model(
                model,
                name="model",
                signature=_sign(model),
                pip_requirements=[one for one in needed if not one.endswith("None")],
            )

    def _end(self, status: str) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        if not self._is_own:
            return
        active = self._mlflow.active_run()
        with self._quiet(), _few_retries():
            if active is not None and active.info.run_id == self._id:
                self._mlflow.end_run(status)
            else:  # the caller's code has started others, or ended this one
                self._client.set_terminated(self._id, status)

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        silent = contextlib.redirect_stdout(io.StringIO())
        return silent if self._is_silent else contextlib.nullcontext()


def _sign(model: Any) -> Any:
    """Return a model's signature: its inputs and outputs, for any number of rows."""
    import numpy as np
    from keras import tree
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def describe(tensors: list[Any], names: list[Any]) -> Any:
        return Schema(
            [
                TensorSpec(
                    np.dtype(str if tensor.dtype == "string" else tensor.dtype),
                    tuple(-1 if size is None else size for size in tensor.shape),
                    *names[index : index + 1],
                )
                for index, tensor in enumerate(tensors)
            ]
        )

    inputs = list(getattr(model, "inputs", None) or ())
    outputs = tree.flatten(getattr(model, "outputs", None) or ())
    if not inputs or not outputs:
        return None
    # MLflow takes names for all inputs of a schema, or for none.
    named = [tensor.name for tensor in inputs] if len(inputs) > 1 else []
    keys = list(getattr(model, "output_names", ())) if len(outputs) > 1 else []
    return ModelSignature(describe(inputs, named), describe(outputs, keys))


@contextlib.contextmanager
def _few_retries() -> Iterator[None]:
    if _RETRIES in os.environ:
        yield
        return
    os.environ[_RETRIES] = "2"
    try:
        yield
    finally:
        os.environ.pop(_RETRIES, None)
