"""Params of `TFEstimator` and `TFModel`, and the arguments of a function."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.ml.param import Params, TypeConverters

from pybackend.errors import InputError
from pybackend.ml.params import getter, param, setter
from pybackend.tfos.TFCluster import InputMode


class TFTypeConverters:
    """Converters for Param values."""

    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:
        """Return a dict unchanged; `TypeError` for other types."""
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, not {value!r}")
        return value


class HasBatchSize(Params):
    """Mixin with the Param ``batch_size``."""

    batch_size = param("batch_size", "number of rows per batch", TypeConverters.toInt)
    setBatchSize = setter("batch_size")
    getBatchSize = getter("batch_size")


class HasClusterSize(Params):
    """Mixin with the Param ``cluster_size``."""

    cluster_size = param("cluster_size", "number of nodes of the cluster", TypeConverters.toInt)
    setClusterSize = setter("cluster_size")
    getClusterSize = getter("cluster_size")


class HasEpochs(Params):
    """Mixin with the Param ``epochs``."""

    epochs = param("epochs", "number of times that the rows are fed", TypeConverters.toInt)
    setEpochs = setter("epochs")
    getEpochs = getter("epochs")


class HasGraceSecs(Params):
    """Mixin with the Param ``grace_secs``."""

    grace_secs = param(
        "grace_secs", "ignored: shutdown waits for the functions", TypeConverters.toInt
    )
    setGraceSecs = setter("grace_secs")
    getGraceSecs = getter("grace_secs")


class HasInputMapping(Params):
    """Mixin with the Param ``input_mapping``."""

    input_mapping = param(
        "input_mapping", "mapping from columns to inputs", TFTypeConverters.toDict
    )
    setInputMapping = setter("input_mapping")
    getInputMapping = getter("input_mapping")


class HasInputMode(Params):
    """Mixin with the Param ``input_mode``, which must be ``InputMode.SPARK``."""

    input_mode = param("input_mode", "reader of the rows: 1 (Spark)", TypeConverters.toInt)
    getInputMode = getter("input_mode")

    def setInputMode(self, value: int) -> Any:
        """Set the Param `input_mode`; `InputError` for ``InputMode.TENSORFLOW``."""
        if value == InputMode.TENSORFLOW:
            raise InputError("`input_mode` must be InputMode.SPARK: a DataFrame is fed by Spark")
        return self._set(input_mode=value)


class HasMasterNode(Params):
    """Mixin with the Param ``master_node``."""

    master_node = param("master_node", "role of the chief node", TypeConverters.toString)
    setMasterNode = setter("master_node")
    getMasterNode = getter("master_node")


class HasModelDir(Params):
    """Mixin with the Param ``model_dir``."""

    model_dir = param("model_dir", "folder of checkpoints", TypeConverters.toString)
    setModelDir = setter("model_dir")
    getModelDir = getter("model_dir")


class HasNumPS(Params):
    """Mixin with the Params ``num_ps`` and ``driver_ps_nodes``."""

    num_ps = param("num_ps", "number of parameter servers", TypeConverters.toInt)
    driver_ps_nodes = param("driver_ps_nodes", "must be False", TypeConverters.toBoolean)
    setNumPS = setter("num_ps")
    getNumPS = getter("num_ps")
    setDriverPSNodes = setter("driver_ps_nodes")
    getDriverPSNodes = getter("driver_ps_nodes")


class HasOutputMapping(Params):
    """Mixin with the Param ``output_mapping``."""

    output_mapping = param(
        "output_mapping", "mapping from outputs to columns", TFTypeConverters.toDict
    )
    setOutputMapping = setter("output_mapping")
    getOutputMapping = getter("output_mapping")


class HasProtocol(Params):
    """Mixin with the Param ``protocol``."""

    protocol = param("protocol", "ignored: TensorFlow chooses it", TypeConverters.toString)
    setProtocol = setter("protocol")
    getProtocol = getter("protocol")


class HasReaders(Params):
    """Mixin with the Param ``readers``."""

    readers = param("readers", "number of reader threads, for the function", TypeConverters.toInt)
    setReaders = setter("readers")
    getReaders = getter("readers")


class HasSteps(Params):
    """Mixin with the Param ``steps``."""

    steps = param("steps", "largest number of steps, for the function", TypeConverters.toInt)
    setSteps = setter("steps")
    getSteps = getter("steps")


class HasTensorboard(Params):
    """Mixin with the Param ``tensorboard``."""

    tensorboard = param("tensorboard", "whether to start TensorBoard", TypeConverters.toBoolean)
    setTensorboard = setter("tensorboard")
    getTensorboard = getter("tensorboard")


class HasTFRecordDir(Params):
    """Mixin with the Param ``tfrecord_dir``."""

    tfrecord_dir = param(
        "tfrecord_dir", "folder of TFRecord files, for the function", TypeConverters.toString
    )
    setTFRecordDir = setter("tfrecord_dir")
    getTFRecordDir = getter("tfrecord_dir")


class HasExportDir(Params):
    """Mixin with the Param ``export_dir``."""

    export_dir = param("export_dir", "folder of the SavedModel", TypeConverters.toString)
    setExportDir = setter("export_dir")
    getExportDir = getter("export_dir")


class HasSignatureDefKey(Params):
    """Mixin with the Param ``signature_def_key``."""

    signature_def_key = param(
        "signature_def_key", "signature of the SavedModel", TypeConverters.toString
    )
    setSignatureDefKey = setter("signature_def_key")
    getSignatureDefKey = getter("signature_def_key")


class HasTagSet(Params):
    """Mixin with the Param ``tag_set``."""

    tag_set = param(
        "tag_set", "tags of the SavedModel, separated by commas", TypeConverters.toString
    )
    setTagSet = setter("tag_set")
    getTagSet = getter("tag_set")


class Namespace:
    """Named arguments, or a list of command-line arguments (``argv``).

    Parameters
    ----------
    d
        A dict, an ``argparse.Namespace``, another `Namespace`, or a list.

    Raises
    ------
    InputError
        ``d`` has another type.
    """

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
    """Mixin with arguments of a function in addition to its Params."""

    args: Any = None

    def merge_args_params(self) -> Any:
        """Return the arguments, overridden by all Params that have a value or a default."""
        merged = copy.copy(self.args)
        values = {param.name: self.getOrDefault(param) for param in self.params}
        vars(merged).update(values)
        return merged
