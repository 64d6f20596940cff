"""The Params of `TFEstimator` and `TFModel`, beside the arguments of a function."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import Identifiable

from pybackend.errors import InputError
from pybackend.tfos.TFCluster import InputMode


class TFTypeConverters:
    """Converters of the values of Params."""

    @staticmethod
    def toDict(value: Any) -> dict[Any, Any]:
        """A dict as it is; `TypeError` for anything else."""
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict, not {value!r}")
        return value


class _Unbound(Identifiable):
    """What a Param of a class belongs to; each stage gets copies of its own."""

    def __init__(self) -> None:
        self.uid = "undefined"


def _param(name: str, doc: str, convert: Callable[[Any], Any]) -> Any:
    return Param(_Unbound(), name, doc, typeConverter=convert)


def _setter(name: str) -> Callable[..., Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Set the Param `{name}`, and return this stage."
    return set_value


def _getter(name: str) -> Callable[..., Any]:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    get_value.__doc__ = f"Return the value of the Param `{name}`, or its default."
    return get_value


class HasBatchSize(Params):
    """Has the Param ``batch_size``."""

    batch_size = _param("batch_size", "rows of a batch", TypeConverters.toInt)
    setBatchSize = _setter("batch_size")
    getBatchSize = _getter("batch_size")


class HasClusterSize(Params):
    """Has the Param ``cluster_size``."""

    cluster_size = _param("cluster_size", "nodes of the cluster", TypeConverters.toInt)
    setClusterSize = _setter("cluster_size")
    getClusterSize = _getter("cluster_size")


class HasEpochs(Params):
    """Has the Param ``epochs``."""

    epochs = _param("epochs", "how often the rows are fed", TypeConverters.toInt)
    setEpochs = _setter("epochs")
    getEpochs = _getter("epochs")


class HasGraceSecs(Params):
    """Has the Param ``grace_secs``."""

    grace_secs = _param("grace_secs", "ignored: functions are waited for", TypeConverters.toInt)
    setGraceSecs = _setter("grace_secs")
    getGraceSecs = _getter("grace_secs")


class HasInputMapping(Params):
    """Has the Param ``input_mapping``."""

    input_mapping = _param("input_mapping", "columns to inputs", TFTypeConverters.toDict)
    setInputMapping = _setter("input_mapping")
    getInputMapping = _getter("input_mapping")


class HasInputMode(Params):
    """Has the Param ``input_mode``, which must be that Spark feeds the rows."""

    input_mode = _param("input_mode", "who reads the rows: 1, Spark", TypeConverters.toInt)
    getInputMode = _getter("input_mode")

    def setInputMode(self, value: int) -> Any:
        """Set the Param `input_mode`; `InputError` for ``InputMode.TENSORFLOW``."""
        if value == InputMode.TENSORFLOW:
            raise InputError("`input_mode` must be InputMode.SPARK: a DataFrame is fed by Spark")
        return self._set(input_mode=value)


class HasMasterNode(Params):
    """Has the Param ``master_node``."""

    master_node = _param("master_node", "role of the chief node", TypeConverters.toString)
    setMasterNode = _setter("master_node")
    getMasterNode = _getter("master_node")


class HasModelDir(Params):
    """Has the Param ``model_dir``."""

    model_dir = _param("model_dir", "folder of checkpoints", TypeConverters.toString)
    setModelDir = _setter("model_dir")
    getModelDir = _getter("model_dir")


class HasNumPS(Params):
    """Has the Params ``num_ps`` and ``driver_ps_nodes``."""

    num_ps = _param("num_ps", "parameter servers", TypeConverters.toInt)
    driver_ps_nodes = _param("driver_ps_nodes", "must be False", TypeConverters.toBoolean)
    setNumPS = _setter("num_ps")
    getNumPS = _getter("num_ps")
    setDriverPSNodes = _setter("driver_ps_nodes")
    getDriverPSNodes = _getter("driver_ps_nodes")


class HasOutputMapping(Params):
    """Has the Param ``output_mapping``."""

    output_mapping = _param("output_mapping", "outputs to columns", TFTypeConverters.toDict)
    setOutputMapping = _setter("output_mapping")
    getOutputMapping = _getter("output_mapping")


class HasProtocol(Params):
    """Has the Param ``protocol``."""

    protocol = _param("protocol", "ignored: TensorFlow's own", TypeConverters.toString)
    setProtocol = _setter("protocol")
    getProtocol = _getter("protocol")


class HasReaders(Params):
    """Has the Param ``readers``."""

    readers = _param("readers", "for the function: reading threads", TypeConverters.toInt)
    setReaders = _setter("readers")
    getReaders = _getter("readers")


class HasSteps(Params):
    """Has the Param ``steps``."""

    steps = _param("steps", "for the function: most steps", TypeConverters.toInt)
    setSteps = _setter("steps")
    getSteps = _getter("steps")


class HasTensorboard(Params):
    """Has the Param ``tensorboard``."""

    tensorboard = _param("tensorboard", "whether to start TensorBoard", TypeConverters.toBoolean)
    setTensorboard = _setter("tensorboard")
    getTensorboard = _getter("tensorboard")


class HasTFRecordDir(Params):
    """Has the Param ``tfrecord_dir``."""

    tfrecord_dir = _param("tfrecord_dir", "for the function: a folder", TypeConverters.toString)
    setTFRecordDir = _setter("tfrecord_dir")
    getTFRecordDir = _getter("tfrecord_dir")


class HasExportDir(Params):
    """Has the Param ``export_dir``."""

    export_dir = _param("export_dir", "folder of the SavedModel", TypeConverters.toString)
    setExportDir = _setter("export_dir")
    getExportDir = _getter("export_dir")


class HasSignatureDefKey(Params):
    """Has the Param ``signature_def_key``."""

    signature_def_key = _param(
        "signature_def_key", "signature of the SavedModel", TypeConverters.toString
    )
    setSignatureDefKey = _setter("signature_def_key")
    getSignatureDefKey = _getter("signature_def_key")


class HasTagSet(Params):
    """Has the Param ``tag_set``."""

    tag_set = _param("tag_set", "tags of the SavedModel, by commas", TypeConverters.toString)
    setTagSet = _setter("tag_set")
    getTagSet = _getter("tag_set")


class Namespace:
    """Arguments by name, or a list of them as on a command line (``argv``).

    Parameters
    ----------
    d
        A dict, an ``argparse.Namespace``, another `Namespace`, or a list.

    Raises
    ------
    InputError
        It is none of these.
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
    """Has arguments of a function beside its Params."""

    args: Any = None

    def merge_args_params(self) -> Any:
        """The arguments, in which the Params that have a value or a default go before."""
        merged = copy.copy(self.args)
        values = {param.name: self.getOrDefault(param) for param in self.params}
        vars(merged).update(values)
        return merged
