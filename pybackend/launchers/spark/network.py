"""Check, before Spark moves rows, that the executors' hosts can reach each other.

Spark's own transfers wait minutes for a host behind a firewall, before any Python runs in a task.
This stage moves no data, and takes a fraction of a second if the network works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.spark.session import ask
from pybackend.net.dialing import find_unreachable

SCHEMA = "rank int, problem string"
# Spark itself may wait for a peer to pass on the task's code: then this stage does not end.
LIMIT_SECONDS = 90.0
TOO_LONG = (
    f"Spark's executors did not report within {LIMIT_SECONDS:g} s whether they reach each other: "
    "either they cannot, or their hosts are overloaded. "
)
# Number of other hosts that each host tries: enough to find hosts behind a firewall in one round.
_MOST = 64


def check_network(session: Any, workers: int, collect: Callable[[Any], Sequence[Any]]) -> None:
    """Raise an error if the hosts of a job's tasks cannot all reach each other.

    Parameters
    ----------
    collect
        Runs a DataFrame's job and returns its rows, within `LIMIT_SECONDS`.

    Raises
    ------
    ClusterError
        After about ten seconds; names the two hosts, the address and what to do.
    """
    plan = ask(session, "a plan", lambda: _plan(session, workers))
    rows = collect(plan)
    problems = [row["problem"] for row in sorted(rows, key=lambda row: row["rank"])]
    if problems:
        more = f" ({len(problems)} of {workers} workers cannot reach another)"
        raise ClusterError(problems[0] + more)


def _plan(session: Any, workers: int) -> Any:
    return session.range(0, workers, 1, workers).mapInArrow(look, SCHEMA, barrier=True)


def look(_: Iterator[Any]) -> Iterator[Any]:
    """Yield a row of `SCHEMA` if another task's host is unreachable; runs in each task.

    Executors are known by the port of their connection with the driver. Usually no process listens
    there, and a refused connection shows that the network lets it through.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    peers = [str(info.address) for info in context.getTaskInfos()]
    others = [(rank + step) % len(peers) for step in range(1, min(len(peers), _MOST + 1))]
    problem = find_unreachable(peers, rank, others)
    if problem:
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([problem])], names=["rank", "problem"]
        )
