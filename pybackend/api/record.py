"""All figures of a training as JSON text: what a report is written from, now or in years."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# Large, or of no use without the session.
_LEFT_OUT = {"model_base64"}
_LEFT_OUT_OF_WORKERS = {"value", "inputs", "failure"}


def encode_record(fields: Mapping[str, Any]) -> str:
    """JSON text of what `TrainResult.to_dict` gives, but for the model's file.

    Each worker has ``rows_per_second`` as well. What is no number in JSON is text: ``"NaN"``,
    ``"Infinity"``, ``"-Infinity"``, as Python's ``float()`` reads them.
    """
    record = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    record["model_bytes"] = _count_bytes(fields["model_base64"]) or None
    record["workers"] = [_describe_worker(worker, fields) for worker in fields["workers"]]
    return json.dumps(_make_plain(record))


def _count_bytes(base64: str) -> int:
    return len(base64) * 3 // 4 - base64[-2:].count("=")


def _describe_worker(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in worker.items() if name not in _LEFT_OUT_OF_WORKERS}
    return {**kept, "rows_per_second": _find_throughput(worker, fields)}


def _find_throughput(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> float | None:
    """Rows that a worker trains on in a second of its steps, waiting included.

    None if it is not known how long steps took, or if the number of workers has changed.
    """
    times, steps = worker["step_times"], worker["steps"]
    if not times or not steps or len(set(fields["workers_by_epoch"])) > 1:
        return None
    seconds = sum(times[part] for part in ("data", "compute", "communication", "waiting"))
    rows = worker["rows"] * fields["epochs"] / steps
    # With `steps_per_epoch` an epoch does not use all rows.
    most = (fields.get("settings") or {}).get("batch_size")
    return min(rows, most or math.inf) / seconds if seconds > 0 else None


def _make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _make_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
