"""Run SQL through a time-series mechanism, from the text to the tables, many times.

Nothing stands in for anything: the text is compiled, rows are read, one of each unit enters a
window, and the mechanism's runner charges a ledger and draws its noise at its own addresses. Where
a mechanism treats every bin by itself (`SideBySide` says why that will do), a query over thousands
of public groups is as many runs, for a unit's rows are in the groups of one run; otherwise every
run is a query of its own, with a secret of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from dpstream.audit.query_runs import Unseen
from dpstream.audit.query_samplers import Scenario, table_of
from dpstream.connectors.sources.table import TableSource
from dpstream.engines.query_run import Options
from dpstream.engines.series import SeriesRun
from dpstream.records import Integers, Reals
from dpstream.sql import sql
from dpstream.stages.series_query import SeriesQuery

WINDOWS = 6
"""Of 8 hours each, the length of a scenario's steps."""
_GROUPS = 4_000  # in one query: the text has an upper limit


@dataclass(frozen=True, kw_only=True)
class SqlRuns:
    """A sampler over a statement; `options`: those of its privacy clause, but for the groups."""

    options: str
    groups: int = 1
    apart: bool = True
    """May groups be runs?"""
    run: type[SeriesRun] = SeriesRun

    def __call__(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        """What each run publishes in all windows, and which windows repeat an earlier one."""
        together = _GROUPS // self.groups if self.apart else 1
        parts = [min(together, runs - done) for done in range(0, runs, together)]
        return np.concatenate(
            [
                self._once(data, many, number.to_bytes(4, "big") + secret[4:])
                for number, many in enumerate(parts)
            ]
        )

    def _once(self, data: Scenario, runs: int, secret: bytes) -> Reals:
        query = series_query(self.options, self.groups * runs)
        rows = table_of(data, runs, self.groups, windows=False)
        made = self.run(
            query=query,
            source=TableSource(rows),
            aside=Unseen(),
            secret=secret,
            options=Options(run_id=secret[:16]),
        )
        tables = sorted(made, key=lambda table: table["window_start"][0].as_py())
        values = np.array([_column(table, "n") for table in tables])
        held = np.array([_column(table, "held") for table in tables])
        shown = np.stack([values, held]).reshape(2, len(tables), runs, self.groups)
        return shown.transpose(2, 0, 1, 3).reshape(runs, -1)


def _column(table: pa.Table, name: str) -> Reals:
    """In the order of the groups' numbers."""
    keys: Integers = table["key"].to_numpy()
    found: Reals = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
    return found[np.argsort(keys)]


@lru_cache(maxsize=8)
def series_query(options: str, groups: int) -> SeriesQuery:
    """The statement, with its public groups; rows may come a window late."""
    named = ", ".join(str(group) for group in range(groups))
    query = sql(
        f"""
        SELECT WITH DIFFERENTIAL_PRIVACY
               OPTIONS (privacy_unit_column = user, {options}, public_groups = ({named}))
               key, window_start, COUNT(*) AS n
        FROM TUMBLE(visits, DESCRIPTOR(ts), INTERVAL '8' HOUR)
        GROUP BY key, window_start
        """,
        time_unit="s",
        start="1970-01-01",
        end="1970-01-03",
        arrival_column="seen",
        allowed_lateness="8 hours",
    )
    assert isinstance(query, SeriesQuery)
    return query
