"""What has been deployed, and taken away again: a table to which rows are only added."""

from __future__ import annotations

from datetime import datetime, timezone

from pybackend.sql.connections import Connection

TABLE = "tfdist_models"


class Registry:
    """The table of a database, which is created if there is none."""

    def __init__(self, database: Connection) -> None:
        self._database = database
        database.take_turns()
        text, double = database.text_type, database.double_type
        database.execute(
            f"CREATE TABLE IF NOT EXISTS {TABLE} (name {text}, version integer, action {text}, "
            f"done_at {text}, difference {double})"
        )

    def next_version(self, name: str) -> int:
        """The number of the next deployment; none is given twice."""
        return max((version for version, _ in self._events(name)), default=0) + 1

    def live_versions(self, name: str) -> list[int]:
        """The versions that are deployed, in order."""
        events = self._events(name)
        gone = {version for version, action in events if action == "undeploy"}
        return sorted({version for version, _ in events} - gone)

    def add(self, name: str, version: int, action: str, difference: float | None) -> None:
        """Note that a version was deployed ("deploy") or taken away ("undeploy")."""
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._database.execute(
            f"INSERT INTO {TABLE} VALUES (?, ?, ?, ?, ?)",
            (name, version, action, at, difference),
        )

    def _events(self, name: str) -> list[tuple[int, str]]:
        found = self._database.execute(
            f"SELECT version, action FROM {TABLE} WHERE name = ?",
            (name,),
        )
        return [(int(version), str(action)) for version, action in found]
