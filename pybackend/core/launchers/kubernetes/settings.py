"""Checked arguments of `kubernetes`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number, check_positive, check_whole_number
from pybackend.core.words import setting, show

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}
_WEEK = 7 * 24 * 3600

_EXAMPLE = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True)
class KubernetesSettings:
    """Arguments of `kubernetes`, checked and with defaults filled in."""

    image: str
    namespace: str | None = None
    context: str | None = None
    cpus: str | None = None
    memory: str | None = None
    gpus: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    time_limit: int = _WEEK
    ttl: int = 300
    python: str = "python3"
    labels: Mapping[str, str] = field(default_factory=dict)
    patience: float = 600.0


def check_settings(**given: Any) -> KubernetesSettings:
    """Check the arguments of `kubernetes`, and fill in defaults for None.

    Raises
    ------
    InputError
        An argument is invalid. The message names it.
    """
    checked: dict[str, Any] = {
        name: _CHECKS[name](name, value) for name, value in given.items() if value is not None
    }
    if "image" not in checked:
        raise InputError(
            f"`image` must name a container image, e.g. {show('registry/tf:1')}, not {show(None)}"
        )
    return KubernetesSettings(**checked)


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or not value.strip() or " " in value:
        raise InputError(f"`{name}` must be text without spaces, not {show(value)}")
    return value


def _check_namespace(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise InputError(
            f"`{name}` must be the name of a namespace (a-z, 0-9 and '-'), not {show(value)}"
        )
    return value


def _check_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(
            f"`{name}` must be a name that Kubernetes allows (a-z, 0-9, '-' and '.'), not "
            f"{show(value)}"
        )
    return value


def _check_names(name: str, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence):
        raise InputError(f"`{name}` must be a list of names, not {show(value)}")
    return tuple(_check_name(name, one) for one in listed)


def _check_quantity(name: str, value: Any) -> str:
    number = as_number(value)
    text = f"{number:g}" if number is not None else value
    if not isinstance(text, str) or not _QUANTITY.fullmatch(text) or not re.search("[1-9]", text):
        example = {
            "cpus": f"4, 0.5 or {show('500m')}",
            "memory": f"{show('8Gi')} or {show('500M')}",
        }[name]
        raise InputError(f"`{name}` must be a quantity such as {example}, not {show(value)}")
    if name == "memory" and re.fullmatch(r"[\d.]+[mun]?", text):
        raise InputError(
            f"`memory` must have a unit, as in {show('8Gi')} or {show('500M')}, not {show(value)}"
        )
    return text


def _check_labels(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InputError(f"`{name}` must be like {show({'team': 'physics'})}, not {show(value)}")
    for key, text in value.items():
        if not (isinstance(key, str) and _LABEL_KEY.fullmatch(key)):
            raise InputError(
                f"`{name}` has the key {show(key)}, which is not a valid Kubernetes label"
            )
        if not (isinstance(text, str) and _LABEL_VALUE.fullmatch(text)):
            raise InputError(
                f"`{name}` has {setting(**{key: text})}: expected text of at most 63 letters, "
                "digits, '-', '_' and '.'"
            )
        if name == "labels" and key.partition("/")[0] in ("tfdist.io", "batch.kubernetes.io"):
            raise InputError(
                f"`labels` cannot have {show(key)}: tfdist finds its pods by this label"
            )
    return dict(value)


def _check_tolerations(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    listed = [value] if isinstance(value, Mapping) else value
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise InputError(f"`{name}` must be a list of mappings, not {show(value)}")
    for one in listed:
        if not isinstance(one, Mapping) or not one or not set(one) <= _TOLERATION:
            raise InputError(f"`{name}` must be like {show([_EXAMPLE])}, not {show(one)}")
    return tuple(dict(one) for one in listed)


def _check_count(name: str, value: Any) -> int:
    return check_whole_number(name, value, least=0)


def _check_limit(name: str, value: Any) -> int:
    return check_whole_number(name, value, least=1)


_CHECKS = {
    "image": _check_text,
    "namespace": _check_namespace,
    "context": _check_text,
    "cpus": _check_quantity,
    "memory": _check_quantity,
    "gpus": _check_count,
    "node_selector": _check_labels,
    "tolerations": _check_tolerations,
    "secrets": _check_names,
    "service_account": _check_name,
    "image_pull_secrets": _check_names,
    "time_limit": _check_limit,
    "ttl": _check_count,
    "python": _check_text,
    "labels": _check_labels,
    "patience": check_positive,
}
