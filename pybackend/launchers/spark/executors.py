"""Questions to the executors, by a job that needs nothing there but Python."""

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
    """What a function returns in as many tasks as there are slots; its values are JSON's.

    A function that is defined inside another one travels as code; any other needs its module on the
    executors.

    Raises
    ------
    ClusterError
        No answer within a minute. What Spark raises is passed on.
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
