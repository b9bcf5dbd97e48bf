"""Releases that were printed, kept in the state directory so that they can be printed again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.connectors.sinks import DirectorySink
from dpstream.connectors.storage import safe_name
from dpstream.session.budget import AnyQuery


class Kept:
    """A sink beside the terminal; its folder is made by the first release, in a state that is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sink: DirectorySink | None = None

    @classmethod
    def beside(cls, state: Path | None, query: AnyQuery) -> Kept | None:
        """In a state directory; None without one, and for a query that never ends."""
        if state is None or query.schedule.steps is None:
            return None
        return cls(state / "released")

    def write(self, query: str, window: int, trigger: int, table: pa.Table) -> None:
        """Keep a release, unless it is there."""
        if self._sink is None:
            self._sink = DirectorySink(self._folder)
        self._sink.write(query, window, trigger, table)

    def close(self) -> None:
        """Nothing is held open."""

    def releases(self, query: str) -> list[pa.Table]:
        """What is there, in the order in which it was published."""
        found = [
            pq.read_table(path) for path in self._folder.glob(f"{safe_name(query)}-w*.parquet")
        ]
        return sorted(found, key=_place)


def _place(release: pa.Table) -> tuple[str, int]:
    facts = json.loads(release.schema.metadata[b"dpstream"])
    return facts["trigger_time"] or "", facts["window"]
