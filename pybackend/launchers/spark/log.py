"""Spark's own log on the driver's terminal: without the stack of a failure that we explain."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any

# They write the stack of a task that failed: the first in local mode, the second always.
_LOGGERS = ("org.apache.spark.executor.Executor", "org.apache.spark.scheduler.TaskSetManager")
_LOG4J = "org.apache.logging.log4j"
# What stays after a job: Spark's shells hide less by a filter, which says WARN as well.
_USUAL = "WARN"


class QuietLog:
    """Silences these loggers of a classic session's JVM from `start` to `stop`.

    Spark's public names set the level of everything, and do not say what it was. So log4j is asked,
    by SQL that is evaluated on the driver while a query is planned; no Spark job is run. Where SQL
    may not do this, the log is as it was.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin; the job need not wait for it."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Have the levels set back."""
        self._stopped.set()

    def _run(self) -> None:
        with suppress(Exception):
            before = self._levels()
            self._set(dict.fromkeys(before, "OFF"))
            self._stopped.wait()
            self._set(before)

    def _levels(self) -> dict[str, str]:
        """Loggers to silence with the level to return to; one at OFF is somebody else's."""
        shown = self._evaluate(f"'{_LOG4J}.LogManager', 'getLogger', '{name}'" for name in _LOGGERS)
        found = (re.match(r"([\w.]+):(\w+)", text) for text in shown)
        levels = {match[1]: match[2] for match in found if match}
        return {
            name: level if level in ("ERROR", "FATAL") else _USUAL
            for name, level in levels.items()
            if level != "OFF"
        }

    def _set(self, levels: dict[str, str]) -> None:
        configurator = f"'{_LOG4J}.core.config.Configurator', 'setLevel'"
        if levels:
            self._evaluate(f"{configurator}, '{name}', '{level}'" for name, level in levels.items())

    def _evaluate(self, calls: Any) -> list[str]:
        columns = ", ".join(f"reflect({call})" for call in calls)
        (row,) = self._session.sql(f"SELECT {columns} FROM VALUES (1) AS one(x)").collect()
        return list(row)
