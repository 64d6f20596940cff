"""Calls of a function on all executors, by a job that needs only Python there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.spark.jobs import give_up_after, run_watched
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.slots import count_slots

_LIMIT_SECONDS = 60.0


def ask_executors(session: Any, look: Callable[[], Any]) -> list[Any]:
    """Return the JSON values of a function that is called in as many tasks as there are slots.

    A function that is defined inside another function is pickled as code; any other function needs
    its module on the executors.

    Raises
    ------
    ClusterError
        No answer within a minute. Spark's own errors are passed on.
    """
    late = ClusterError(f"no executor answered within {_LIMIT_SECONDS:g} s")
    pause = give_up_after(_LIMIT_SECONDS, late)
    texts = run_watched(session, lambda: _ask(session, look), pause, idle_seconds=math.inf)
    return [json.loads(text) for text in texts]


def _ask(session: Any, look: Callable[[], Any]) -> list[str]:
    def answer(_: Any) -> str:
        import json

        return json.dumps(look())

    count = count_slots(session)
    if not is_connect(session):
        return list(session.sparkContext.parallelize(range(count), count).map(answer).collect())
    from pyspark.sql.functions import udf

    numbers = session.range(0, count, 1, count)
    # With Arrow, executors would need pyarrow.
    rows = numbers.select(udf(answer, "string", useArrow=False)("id")).collect()
    return [row[0] for row in rows]
