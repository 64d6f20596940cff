"""Spark ML stages that train with a function on a `TFCluster` and predict with a SavedModel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.ml import Estimator, Model

from pybackend.data.dataframe import column_as_array
from pybackend.errors import InputError
from pybackend.launchers import SavedModel, apply_saved_model
from pybackend.tfos import TFCluster
from pybackend.tfos.params import (
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasExportDir,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
    Namespace,
    TFParams,
    TFTypeConverters,
)

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasEpochs",
    "HasExportDir",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProtocol",
    "HasReaders",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
    "Namespace",
    "TFEstimator",
    "TFModel",
    "TFParams",
    "TFTypeConverters",
    "yield_batch",
]

_SIGNATURE = "serving_default"


class TFEstimator(
    Estimator["TFModel"],
    TFParams,
    HasInputMapping,
    HasClusterSize,
    HasNumPS,
    HasInputMode,
    HasMasterNode,
    HasProtocol,
    HasGraceSecs,
    HasTensorboard,
    HasModelDir,
    HasExportDir,
    HasTFRecordDir,
    HasBatchSize,
    HasEpochs,
    HasReaders,
    HasSteps,
):
    """Estimator that trains with a function, on a cluster to which Spark feeds a DataFrame's rows.

    Parameters
    ----------
    train_fn
        Called on each node as ``train_fn(args, ctx)``: the arguments and Params in one
        `Namespace`, and a `TFNodeContext`. Rows are tuples of the columns of ``input_mapping``,
        sorted by name; ML vectors become arrays.
    tf_args
        A dict, a namespace, or a list of command-line arguments, which the function gets unchanged.
    export_fn
        Not supported: it belongs to TensorFlow 1.
    """

    def __init__(self, train_fn: Any, tf_args: Any, export_fn: Any = None) -> None:
        super().__init__()
        if not callable(train_fn):
            kind = type(train_fn).__name__
            raise InputError(f"`train_fn` must be a function of (args, ctx), not {kind}")
        if export_fn is not None:
            raise InputError(
                "`export_fn` belongs to TensorFlow 1: call compat.export_saved_model(model, "
                "args.export_dir, ctx.job_name == 'chief') in train_fn"
            )
        self.train_fn = train_fn
        self.args = Namespace(tf_args)
        self._setDefault(
            input_mapping={},
            cluster_size=1,
            num_ps=0,
            driver_ps_nodes=False,
            input_mode=TFCluster.InputMode.SPARK,
            master_node="chief",
            protocol="grpc",
            tensorboard=False,
            model_dir=None,
            export_dir=None,
            tfrecord_dir=None,
            batch_size=100,
            epochs=1,
            readers=1,
            steps=1000,
            grace_secs=30,
        )

    def _fit(self, dataset: Any) -> TFModel:
        merged = self.merge_args_params()
        rows = self._select(dataset)
        cluster = TFCluster.run(
            dataset.sparkSession.sparkContext,
            self.train_fn,
            self.args.argv or merged,
            merged.cluster_size,
            merged.num_ps,
            merged.tensorboard,
            TFCluster.InputMode.SPARK,
            master_node=merged.master_node,
            driver_ps_nodes=merged.driver_ps_nodes,
        )
        try:
            cluster.train_lists(rows, merged.epochs)
        except BaseException as error:
            cluster.abort(f"fit() was interrupted by {type(error).__name__}")
            raise
        cluster.shutdown(grace_secs=merged.grace_secs)
        return self._copyValues(TFModel(self.args))

    def _select(self, dataset: Any) -> Any:
        """Return the columns to feed, with ML vectors as arrays."""
        names = sorted(self.getInputMapping())
        if not names:
            raise InputError(
                "`input_mapping` is empty: set the columns to feed with "
                "setInputMapping({'column': 'name'})"
            )
        types = {field.name: field.dataType for field in dataset.schema.fields}
        columns = [
            column_as_array(dataset, name, types[name]).alias(name) if name in types else name
            for name in names
        ]
        try:
            return dataset.select(columns)
        except AnalysisException as error:
            known = ", ".join(map(repr, dataset.columns))
            raise InputError(
                "`input_mapping` names a column that `dataset` does not have: its columns are "
                f"{known}"
            ) from error


class TFModel(
    Model,
    TFParams,
    HasInputMapping,
    HasOutputMapping,
    HasBatchSize,
    HasModelDir,
    HasExportDir,
    HasSignatureDefKey,
    HasTagSet,
):
    """Transformer that computes the outputs of the SavedModel in ``export_dir`` for a DataFrame.

    ``input_mapping`` maps columns to inputs of the signature. ``output_mapping`` maps outputs to
    the columns of the result, which has no other columns. Each of Spark's Python processes loads
    the model once.

    Parameters
    ----------
    tf_args
        As in `TFEstimator`.
    """

    def __init__(self, tf_args: Any) -> None:
        super().__init__()
        self.args = Namespace(tf_args)
        self._setDefault(
            input_mapping={},
            output_mapping={},
            batch_size=100,
            model_dir=None,
            export_dir=None,
            signature_def_key=None,
            tag_set=None,
        )

    def _transform(self, dataset: Any) -> Any:
        merged = self.merge_args_params()
        if not merged.export_dir:
            raise InputError("`export_dir` is not set: set it to the folder of a SavedModel")
        tags = tuple(merged.tag_set.split(",")) if merged.tag_set else None
        model = SavedModel(merged.export_dir, tags, merged.signature_def_key or _SIGNATURE)
        inputs = {tensor: column for column, tensor in sorted(merged.input_mapping.items())}
        outputs = dict(sorted(merged.output_mapping.items()))
        return apply_saved_model(dataset, model, inputs, outputs, merged.batch_size)


def yield_batch(
    iterable: Iterable[Any], batch_size: int, num_tensors: int = 1
) -> Iterator[list[list[Any]]]:
    """Yield batches of rows, each as one list per tensor; the last batch may be smaller.

    Parameters
    ----------
    iterable
        Rows of at least ``num_tensors`` values; None ends them.
    """
    tensors: list[list[Any]] = [[] for _ in range(num_tensors)]
    for row in iterable:
        if row is None:
            break
        for place, values in enumerate(tensors):
            values.append(row[place])
        if len(tensors[0]) >= batch_size:
            yield tensors
            tensors = [[] for _ in range(num_tensors)]
    if tensors[0]:
        yield tensors
