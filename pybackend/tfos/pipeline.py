"""Spark ML stages that train with a function on a `TFCluster` and predict with a SavedModel."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping
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


def _mixin(name: str, doc: str, convert: Any, title: str = "") -> Any:
    """Return the class ``HasTitle``: one Param, with ``setTitle`` and ``getTitle``."""
    title = title or "".join(map(str.capitalize, name.split("_")))
    members = zip((name, f"set{title}", f"get{title}"), param(name, doc, convert), strict=True)
    return type(f"Has{title}", (Params,), {"__module__": __name__, **dict(members)})


HasBatchSize: Any = _mixin("batch_size", "number of rows per batch", _INT)
HasClusterSize: Any = _mixin("cluster_size", "number of nodes of the cluster", _INT)
HasEpochs: Any = _mixin("epochs", "number of times that the rows are fed", _INT)
HasGraceSecs: Any = _mixin("grace_secs", "ignored: shutdown waits for the functions", _INT)
HasInputMapping: Any = _mixin(
    "input_mapping", "mapping from columns to inputs", TFTypeConverters.toDict
)
HasMasterNode: Any = _mixin("master_node", "role of the chief node", _TEXT)
HasModelDir: Any = _mixin("model_dir", "folder of checkpoints", _TEXT)
HasOutputMapping: Any = _mixin(
    "output_mapping", "mapping from outputs to columns", TFTypeConverters.toDict
)
HasProtocol: Any = _mixin("protocol", "ignored: TensorFlow chooses it", _TEXT)
HasReaders: Any = _mixin("readers", "number of reader threads, for the function", _INT)
HasSteps: Any = _mixin("steps", "largest number of steps, for the function", _INT)
HasTensorboard: Any = _mixin("tensorboard", "whether to start TensorBoard", _FLAG)
HasTFRecordDir: Any = _mixin(
    "tfrecord_dir", "folder of TFRecord files, for the function", _TEXT, "TFRecordDir"
)
HasExportDir: Any = _mixin("export_dir", "folder of the SavedModel", _TEXT)
HasSignatureDefKey: Any = _mixin("signature_def_key", "signature of the SavedModel", _TEXT)
HasTagSet: Any = _mixin("tag_set", "tags of the SavedModel, separated by commas", _TEXT)


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


class Namespace:
    """Named arguments of a dict or namespace, or a list of command-line arguments (``argv``)."""

    argv: list[str] | None = None

    def __init__(self, d: Any) -> None:
        if isinstance(d, list):
            self.argv = d
        elif isinstance(d, Mapping):
            vars(self).update(d)
        elif isinstance(d, (argparse.Namespace, Namespace)):
            vars(self).update(vars(d))
        else:
            raise InputError(f"arguments must be a dict, a namespace or a list, not {d!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.argv or list(vars(self)))

    def __repr__(self) -> str:
        if self.argv:
            return repr(self.argv)
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({shown})"

    def __eq__(self, other: object) -> bool:
        if self.argv:
            return self.argv == (other.argv if isinstance(other, Namespace) else other)
        return isinstance(other, Namespace) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class TFParams(Params):
    args: Any = None

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

    Rows have at least ``num_tensors`` values; None ends them.
    """
    tensors: list[list[Any]] = [[] for _ in range(num_tensors)]
    for row in iterable:
        if row is None:
            break
        for index, values in enumerate(tensors):
            values.append(row[index])
        if len(tensors[0]) >= batch_size:
            yield tensors
            tensors = [[] for _ in range(num_tensors)]
    if tensors[0]:
        yield tensors
