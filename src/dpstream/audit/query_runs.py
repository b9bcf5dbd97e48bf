"""Run a planned query over a table, on a book of its own: the engine's path without its disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from dpstream.connectors.sources.table import ROWS, TableSource
from dpstream.engines.chunks import ChunkReader
from dpstream.engines.inputs import FileInput
from dpstream.errors import InvalidParameter
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret
from dpstream.records import Rejected, Source
from dpstream.stages.flow import Flow, Publication
from dpstream.stages.plan import Plan
from dpstream.stages.row_reader import RowReader


def run_plan(
    plan: Plan,
    table: pa.Table,
    *,
    secret: bytes,
    run: bytes,
    flow: Callable[[Plan, RowReader], Flow],
    reader: type[RowReader] = RowReader,
    chunk: int = ROWS,
    source: Callable[[pa.Table], Source] | None = None,
    memory: int = 1 << 20,
    through: Callable[[QuerySpend], QuerySpend] = lambda spend: spend,
) -> Iterator[tuple[int, Publication]]:
    """(step, what is published), step by step; `through` may stand between flow and noise.

    `source`: what is read in place of the table itself, made of it.
    """
    steps = plan.query.schedule.steps
    if steps is None:
        raise InvalidParameter("an audit runs over a table; give the query start= and end=")
    book, key = Ledger(), Secret(secret)
    book.admit("audit", plan.terms(), "an audit")
    keys = MemoryWindowKeys(derived_for_tests=key)
    real = QuerySpend(run=run, query=plan.query.name, ledger=book, dataset="audit", keys=keys)
    plan.pay(real, "audit")
    spend, rows = through(real), reader(plan.query, key, run)
    made = flow(plan, rows)
    read = TableSource(table, rows=chunk) if source is None else source(table)
    files = FileInput(ChunkReader(read, rows, Unseen()), memory=memory)
    try:
        for step in range(steps):
            pieces = files.take(step)
            spend.begin(step)
            for publication in made.step(step, pieces, spend):
                yield step, publication
                if publication.due.release == publication.due.releases:
                    made.evict(publication.due.window)
            made.evict_periods(step + 1)
    finally:
        files.close()
        made.close()


class Unseen:
    """Nobody looks at the rows that are set aside."""

    def rejected(self, chunk: str, rows: list[Rejected]) -> None:
        """Dropped."""

    def count(self, *, read: int, outside: int, late: int, other_keys: int) -> None:
        """Not counted."""

    def lagged(self, seconds: float) -> None:
        """Not told."""
