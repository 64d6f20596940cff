"""Spark ML stages that train with a function on a `TFCluster` and predict with a SavedModel."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, takewhile
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Params, TypeConverters

from pybackend.core.data.spark_rows import column_as_array
from pybackend.core.errors import InputError
from pybackend.ml.params import param
from pybackend.tfos import TFCluster
from pybackend.tfos.saved_model import SavedModel, apply_saved_model

_SIGNATURE = "serving_default"
_INT, _TEXT = TypeConverters.toInt, TypeConverters.toString
_FLAG = TypeConverters.toBoolean


class TFTypeConverters:
    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, not {value!r}")
        return value


_DICT = TFTypeConverters.toDict
# Defaults of the Params, by name; those of the mixins are added below.
_DEFAULTS: dict[str, Any] = {
    "driver_ps_nodes": False,
    "input_mode": TFCluster.InputMode.SPARK,
    "num_ps": 0,
}


def _mixin(name: str, doc: str, convert: Any, default: Any, title: str = "") -> Any:
    """Return the class ``HasTitle``: one Param, with ``setTitle`` and ``getTitle``."""
    _DEFAULTS[name] = default
    title = title or "".join(map(str.capitalize, name.split("_")))
    members = zip((name, f"set{title}", f"get{title}"), param(name, doc, convert), strict=True)
    return type(f"Has{title}", (Params,), {"__module__": __name__, **dict(members)})


HasBatchSize: Any = _mixin("batch_size", "number of rows per batch", _INT, 100)
HasClusterSize: Any = _mixin("cluster_size", "number of nodes of the cluster", _INT, 1)
HasEpochs: Any = _mixin("epochs", "number of times that the rows are fed", _INT, 1)
HasGraceSecs: Any = _mixin("grace_secs", "ignored: shutdown waits for the functions", _INT, 30)
HasInputMapping: Any = _mixin("input_mapping", "mapping from columns to inputs", _DICT, {})
HasMasterNode: Any = _mixin("master_node", "role of the chief node", _TEXT, "chief")
HasModelDir: Any = _mixin("model_dir", "folder of checkpoints", _TEXT, None)
HasOutputMapping: Any = _mixin("output_mapping", "mapping from outputs to columns", _DICT, {})
HasProtocol: Any = _mixin("protocol", "ignored: TensorFlow chooses it", _TEXT, "grpc")
HasReaders: Any = _mixin("readers", "number of reader threads, for the function", _INT, 1)
HasSteps: Any = _mixin("steps", "largest number of steps, for the function", _INT, 1000)
HasTensorboard: Any = _mixin("tensorboard", "whether to start TensorBoard", _FLAG, False)
HasTFRecordDir: Any = _mixin(
    "tfrecord_dir", "folder of TFRecord files, for the function", _TEXT, None, "TFRecordDir"
)
HasExportDir: Any = _mixin("export_dir", "folder of the SavedModel", _TEXT, None)
HasSignatureDefKey: Any = _mixin("signature_def_key", "signature of the SavedModel", _TEXT, None)
HasTagSet: Any = _mixin("tag_set", "tags of the SavedModel, separated by commas", _TEXT, None)


class HasInputMode(Params):
    input_mode, getInputMode = param("input_mode", "reader of the rows: 1 (Spark)", _INT)[::2]

    def setInputMode(self, value: int) -> Any:
        """Set the Param; `InputError` for ``InputMode.TENSORFLOW``."""
        if value == TFCluster.InputMode.TENSORFLOW:
            raise InputError("`input_mode` must be InputMode.SPARK: a DataFrame is fed by Spark")
        return self._set(input_mode=value)


class HasNumPS(Params):
    num_ps, setNumPS, getNumPS = param("num_ps", "number of parameter servers", _INT)
    driver_ps_nodes, setDriverPSNodes, getDriverPSNodes = param(
        "driver_ps_nodes", "must be False", _FLAG
    )


class Namespace(argparse.Namespace):
    """Named arguments of a dict or namespace, or a list of command-line arguments (``argv``)."""

    argv: list[str] | None = None

    def __init__(self, d: Any) -> None:
        if isinstance(d, list):
            self.argv = d
        elif isinstance(d, (Mapping, argparse.Namespace)):
            vars(self).update(d if isinstance(d, Mapping) else vars(d))
        else:
            raise InputError(f"arguments must be a dict, a namespace or a list, not {d!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.argv or list(vars(self)))

    def __contains__(self, key: object) -> bool:
        return key in list(self)

    def __repr__(self) -> str:
        return repr(self.argv) if self.argv else super().__repr__()

    def __eq__(self, other: object) -> bool:
        if self.argv:
            return self.argv == (other.argv if isinstance(other, Namespace) else other)
        return isinstance(other, Namespace) and vars(self) == vars(other)


class TFParams(Params):
    args: Any = None

    def _set_up(self, args: Any) -> None:
        self.args = Namespace(args)
        # A subclass may have Params of its own.
        known = [one.name for one in self.params if one.name in _DEFAULTS]
        self._setDefault(**{name: copy.copy(_DEFAULTS[name]) for name in known})

    def merge_args_params(self) -> Any:
        """Return the arguments, overridden by all Params that have a value or a default."""
        merged = copy.copy(self.args)
        values = {param.name: self.getOrDefault(param) for param in self.params}
        vars(merged).update(values)
        return merged


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
        self._set_up(tf_args)

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
                "`input_mapping` contains a column that `dataset` does not have: its columns "
                f"are {known}"
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
        self._set_up(tf_args)

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

    Rows have at least ``num_tensors`` values; None ends them.
    """
    rows = takewhile(lambda row: row is not None, iterable)
    while some := list(islice(rows, batch_size)):
        yield [[row[index] for row in some] for index in range(num_tensors)]
