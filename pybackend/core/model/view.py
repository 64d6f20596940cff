"""View of a model: its layers, optimizers, metrics, variables and custom objects.

No other module walks over the parts of a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

_LIBRARIES = {"keras", "numpy", "tensorflow"}
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class ModelView:
    """Parts of a model, which is searched once for each kind of part.

    Building the model, its first step and callbacks may create further parts, which only a later
    view has (`renewed`). Settings of the parts, such as ``trainable``, are always current.
    """

    model: Any

    def renewed(self) -> ModelView:
        """Return a view that also has the parts that were created since this one."""
        return ModelView(self.model)

    @cached_property
    def layers(self) -> list[Any]:
        """Layers of the model, and the layers that these hold in any attribute."""

        def find_inside(part: Any) -> list[Any]:
            return [leaf for leaf in flatten(vars(part)) if isinstance(leaf, keras.layers.Layer)]

        return reach(self.model, find_inside)[1:]

    @property
    def parts(self) -> list[Any]:
        return [self.model, *self.layers]

    @cached_property
    def other_optimizers(self) -> dict[str, Any]:
        """Optimizers that a train_step may use besides the compiled one, by attribute.

        Keras's own train_step uses none. The inner optimizer of a loss-scaling optimizer does not
        count.
        """
        if not has_own(self.model, "train_step"):
            return {}
        compiled = self.model.optimizer
        found: dict[int, tuple[str, Any]] = {}
        for part in self.parts:
            # TensorFlow holds all of them a second time, in an attribute of its own.
            for name, value in sorted(vars(part).items(), key=lambda item: item[0].startswith("_")):
                for number, leaf in enumerate(flatten(value)):
                    if isinstance(leaf, keras.optimizers.Optimizer) and leaf is not compiled:
                        found.setdefault(id(leaf), (f"{name}[{number}]" if number else name, leaf))
        for optimizer in [compiled, *(one for _, one in list(found.values()))]:
            found.pop(id(getattr(optimizer, "inner_optimizer", None)), None)
        return dict(found.values())

    @property
    def optimizers(self) -> list[Any]:
        """All optimizers, the one given to `compile` first."""
        return [self.model.optimizer, *self.other_optimizers.values()]

    @property
    def optimizer_variables(self) -> list[Any]:
        return [variable for one in self.optimizers for variable in one.variables]

    @cached_property
    def metrics(self) -> list[Any]:
        """Metrics in all attributes of the model and its layers, not only in its ``metrics``."""
        leaves = [leaf for part in self.parts for leaf in flatten(vars(part))]
        return [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]

    @cached_property
    def custom_parts(self) -> list[Any]:
        """User-defined functions, and instances of classes, in the model and its settings."""

        def find_inside(part: Any) -> list[Any]:
            if not _derives_from_keras(type(part)):
                return []
            leaves = flatten([one for one in vars(part).values() if not _is_wrapper(one)])
            return [
                leaf
                for leaf in leaves
                if not inspect.isclass(leaf) and (callable(leaf) or _derives_from_keras(type(leaf)))
            ]

        return list(filter(is_custom, reach(self.model, find_inside)))

    @property
    def custom_objects(self) -> dict[str, Any]:
        """Classes and functions that are not Keras's, by name.

        These are layers, losses, metrics, optimizers, schedules, regularizers, constraints,
        initializers and activations.
        """
        return {one.__name__: one for one in self._custom_kinds if one.__name__.isidentifier()}

    @property
    def equal_names(self) -> list[str]:
        """Names shared by user-defined classes or functions: a file stores one for each name."""
        names = [kind.__name__ for kind in self._custom_kinds]
        return sorted({name for name in names if names.count(name) > 1})

    @property
    def _custom_kinds(self) -> list[Any]:
        kinds = [one if inspect.isfunction(one) else type(one) for one in self.custom_parts]
        return list({id(kind): kind for kind in kinds}.values())

    @property
    def half_variables(self) -> set[int]:
        """Identities of the variables whose layer computes in float16."""
        types: dict[int, str] = {}
        # An inner layer has fewer variables, and its compute type decides.
        for layer in sorted(self.layers, key=lambda one: -len(one.variables)):
            types |= {id(v): str(layer.compute_dtype) for v in layer.variables}
        return {key for key, name in types.items() if name == "float16"}

    @property
    def has_half_layers(self) -> bool:
        return any(str(layer.compute_dtype) in _HALF for layer in self.layers)

    @property
    def has_mixed_layers(self) -> bool:
        """True if a layer is mixed, as defined by `is_mixed`."""
        return any(map(is_mixed, self.layers))

    @property
    def synchronized(self) -> list[Any]:
        """Layers that normalize by the statistics of all workers' rows."""
        return [layer for layer in self.layers if getattr(layer, "synchronized", False)]

    @property
    def unsynchronized(self) -> list[Any]:
        """Layers that normalize by each worker's own rows, a documented difference."""
        return [one for one in self._normalizing if one.trainable and not one.synchronized]

    @property
    def normalizing_variables(self) -> set[int]:
        """Identities of the statistics of batch normalization."""
        return {id(v) for layer in self._normalizing for v in layer.non_trainable_variables}

    @property
    def _normalizing(self) -> list[Any]:
        return [one for one in self.layers if isinstance(one, keras.layers.BatchNormalization)]

    @property
    def has_masked_loss(self) -> bool:
        """True if a mask or an ignored class may exclude rows or time steps from the loss."""
        if find_ignored_class(self.model) is not None:
            return True
        outputs = find_outputs(self.model)
        may_have_steps = outputs is None or any(len(output.shape) >= 3 for output in outputs)
        return may_have_steps and any(map(_makes_mask, self.layers))

    def list_variables(self, without: tuple[type, ...] = ()) -> list[Any]:
        """Return all variables of the model, its losses and metrics, including those in closures.

        From the optimizer, only scalars are included, such as its step count. Variables of objects
        of the classes ``without`` are left out. A new search: a call of the model may create
        variables, even in parts that are known.
        """
        optimizer = getattr(self.model, "optimizer", None)

        def find_inside(part: Any) -> list[Any]:
            if part is optimizer or isinstance(part, (*without, keras.Variable, tf.Variable)):
                return []
            if isinstance(part, tf.random.Generator):
                return [part.state]
            if _may_have_variables(part):
                return flatten(vars(part))
            enclosed = read_closure(part) if inspect.isfunction(part) else []
            return [v for v in enclosed if isinstance(v, keras.Variable | tf.Variable)]

        parts = [one for one in reach(self.model, find_inside) if not isinstance(one, without)]
        variables = [one for one in parts if isinstance(one, keras.Variable | tf.Variable)]
        variables += [v for v in (optimizer.variables if optimizer else ()) if len(v.shape) == 0]
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        return list({id(value): value for value in values}.values())


def build_model(model: Any, inputs: Any) -> None:
    """Call a model, so that it creates its missing weights."""
    if model.built and all(layer.built for layer in ModelView(model).layers):
        return
    if type(model).call is not keras.Model.call:
        model(inputs)
    else:  # such as a GAN of two networks, which has the weights of its layers
        model.built = True  # otherwise Keras writes no weights


def list_other_variables(model: Any) -> list[Any]:
    """Return the variables that are not weights, such as the states of random generators."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def has_own(part: Any, *methods: str) -> bool:
    """Return whether an object's class overrides one of these methods of Keras."""
    return not all(is_of_keras(getattr(type(part), name)) for name in methods)


def is_of_keras(function: Any) -> bool:
    return str(function.__module__).startswith("keras.")


def is_mixed(layer: Any) -> bool:
    """Return whether a layer computes in half precision with variables in float32."""
    has_map = isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    is_half = str(layer.compute_dtype) in _HALF and str(layer.variable_dtype) == "float32"
    return is_half and not has_map


def find_ignored_class(model: Any) -> Any:
    ignored = [getattr(loss, "ignore_class", None) for loss in flatten(model.loss)]
    return next((number for number in ignored if number is not None), None)


def find_outputs(model: Any) -> Any:
    """Return a model's outputs; None for a subclassed model, which must run first."""
    try:
        return model.outputs or []
    except AttributeError:
        return None


def _makes_mask(layer: Any) -> bool:
    is_masking = isinstance(layer, keras.layers.Masking)
    return has_own(layer, "compute_mask") or is_masking or getattr(layer, "mask_zero", False)


def _may_have_variables(part: Any) -> bool:
    """Return whether this is a part of Keras or TensorFlow, or of a user-defined class."""
    if _derives_from_keras(type(part)) or isinstance(part, tf.Module):
        return True
    if inspect.isclass(part) or inspect.isroutine(part) or not hasattr(part, "__dict__"):
        return False
    return is_custom(part) and not type(part).__module__.startswith("pybackend.")


def read_closure(function: Any) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    return found


def find_replaced_methods(part: Any) -> list[str]:
    """Return the names of methods that an object overrides with attributes."""
    return [
        name
        for name, value in vars(part).items()
        if callable(value) and callable(getattr(type(part), name, None)) and not _is_wrapper(value)
    ]


def _is_wrapper(value: Any) -> bool:
    """Return whether this is Keras's wrapper of a layer's method, such as `build`."""
    return inspect.isfunction(value) and str(value.__globals__["__name__"]).startswith("keras.")


def is_custom(part: Any) -> bool:
    return is_defined_by_user(part if inspect.isfunction(part) else type(part))


def is_defined_by_user(kind: Any) -> bool:
    """Return whether a class or function is neither from a library nor one of our wrappers."""
    module = str(kind.__module__)
    package = module.partition(".")[0]
    is_library = package in _LIBRARIES or package in sys.stdlib_module_names
    return not is_library and not module.startswith("pybackend.core.engine.")


def _derives_from_keras(kind: type) -> bool:
    """Return whether a class is a Keras class, or is derived from one."""
    is_derived = any(base.__module__.startswith("keras.") for base in kind.__mro__)
    return is_derived and hasattr(kind, "__dict__")


def reach(start: Any, find_inside: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return an object and all that ``find_inside`` returns for it and for what it returned."""
    # By identity: a user's class may define ==, or have no hash.
    found = {id(start): start}
    waiting = [start]
    while waiting:
        for part in find_inside(waiting.pop()):
            if id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def flatten(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts; None is not a leaf."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [] if value is None else [value]
