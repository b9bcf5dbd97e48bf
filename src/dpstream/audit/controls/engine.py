"""The engine with one line changed, each time another.

All claim the (epsilon, delta) of the query's plan.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.audit.query_samplers import spelled
from dpstream.connectors.sources.table import TableSource
from dpstream.privacy.query_spend import Doors
from dpstream.records import Reals, Words
from dpstream.stages.bounding import FIRST, KEPT, UnitBucket, Verdicts
from dpstream.stages.flow import Flow
from dpstream.stages.hashing import column_ids
from dpstream.stages.measures import Measure
from dpstream.stages.perturb import Noisy
from dpstream.stages.plan import Plan, WindowPlan
from dpstream.stages.query import Query
from dpstream.stages.query_bounds import Bounds
from dpstream.stages.row_ids import RowIds
from dpstream.stages.row_reader import RowReader
from dpstream.stages.rows import RowKeys, Rows, Setting
from dpstream.stages.schedule import Due


class NoPlusOne(Plan):
    """A threshold without the + 1.

    True: a key with one unit more than the pre-threshold, which its neighbour never looks at, shows
    with more than the probability that the tail allows for.
    """

    @lru_cache(maxsize=8)  # noqa: B019
    def window(self, releases: int) -> WindowPlan:
        """One lower."""
        plan: WindowPlan = super().window(releases)
        return replace(plan, thresholds=plan.thresholds - 1)


class PerTrigger(Plan):
    """Key selection with the tail of all releases given to each, as DP-SQLP prints it.

    True: T releases may each show a key that nobody should see, so up to T times the tail.
    """

    def _quantiles(self, releases: int) -> Reals:
        one: Reals = super()._quantiles(1)
        return np.full(releases, one[0])


class OffByOne(Flow):
    """Keeps one row and one group more of a unit than the plan was made for."""

    def reset(self) -> None:
        """Wider bounds."""
        super().reset()
        b = self.query.bounds
        wider = Bounds(rows=b.rows + 1, groups=b.groups + 1, rows_per_group=b.rows_per_group)
        self.state.units = [UnitBucket(bounds=wider) for _ in range(self.buckets)]


class CountedTwice(Flow):
    """Counts a unit for each of its rows in a group, where it should count once.

    True: with K rows per group the distinct units move by K, and a key with one unit looks like a
    key with K.
    """

    def bound(self, window: int, period: int, rows: Rows) -> Verdicts:
        """Every row that is kept is a first one."""
        verdicts = super().bound(window, period, rows)
        return np.where(verdicts > 0, np.uint8(KEPT | FIRST), np.uint8(0))


class Uncapped(Flow):
    """Counts every row that a unit offers, where a public number of them counts.

    True: the rows offered move by all rows of a unit, and their noise is for `debias_rows`.
    """

    def offered(self, period: int, rows: Rows) -> int:
        """All of them."""
        return len(rows)


class OneRowOffered(Plan):
    """Noise on the rows offered as if a unit offered one, where it may offer `debias_rows`.

    True: a factor is missing, so the total's part of mu grows by it.
    """

    def _sensitivity(self, measure: Measure) -> Fraction:
        true = super()._sensitivity(measure)
        return true / self._reached(measure) if measure.kind == "offered" else true


class TouchedOnly(Flow):
    """Publishes a key only at the releases since which it had rows.

    True: that a key is shown at all then says that somebody was there.
    """

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._touched: dict[int, set[bytes]] = {}

    def aggregate(self, window: int, rows: Rows, verdicts: Verdicts) -> None:
        """Note who had rows."""
        super().aggregate(window, rows, verdicts)
        touched = self._touched.setdefault(window, set())
        touched.update(group.tobytes() for group in rows.groups[verdicts > 0])

    def perturb(self, due: Due, spend: Doors) -> list[Noisy]:
        """Only those who had rows."""
        touched = self._touched.pop(due.window, set())
        return [noisy.part(_among(noisy.ids, touched)) for noisy in super().perturb(due, spend)]


def _among(ids: Words, known: set[bytes]) -> Any:
    return np.array([one.tobytes() in known for one in ids], bool)


class DataWatermark(RowReader):
    """Puts a row into the latest step that any row before it was in: a watermark from the data.

    True: one row dated late moves all rows behind it, whoever they belong to.
    """

    def _columns(self, table: pa.Table, reasons: Any, arrived: Any, once: Any) -> dict[str, Any]:
        columns = super()._columns(table, reasons, arrived, once)
        return columns | {"steps": np.maximum.accumulate(columns["steps"])}


class KeyAsSpelled(RowReader):
    """Shows a key as the row spells it that brought it, where equal keys should look equal.

    True: -0.0 and 0.0 are one group, and its published bytes say whose row came first.
    """

    def _columns(self, table: pa.Table, reasons: Any, arrived: Any, once: Any) -> dict[str, Any]:
        columns = super()._columns(table, reasons, arrived, once)
        return columns | {"spelled": table.select(self.query.keys)}

    def _identified(self, columns: dict[str, Any], aside: Setting) -> Rows:
        """The groups are known by now; what they look like is left as it came."""
        columns["keys"] = columns.pop("spelled")
        return super()._identified(columns, aside)


class _SpelledIds(RowIds):
    def names(self, units: pa.Array) -> Words:
        return column_ids(units, self._keys.units)


class UnitBySpelling(RowReader):
    """Takes a unit by how it is written, where one number is one unit.

    True: who is written 5, 5.0, 5e0 and " 5" is four units, and contributes four times.
    """

    def _begin(self, query: Query, keys: RowKeys) -> None:
        super()._begin(query, keys)
        self.ids = _SpelledIds(query, keys)


def units_as_text(table: pa.Table) -> TableSource:
    """The rows with each user's number as it is written, without the quotes of text."""
    names = [text.strip('"') for text in spelled(table)]
    return TableSource(table.set_column(0, "user", pa.array(names)))


class TypeFromData(Flow):
    """A count is an integer until bounding has dropped a row, and a float from then on.

    True: the type of a column says whether anybody had more rows than the bounds allow.
    """

    def bound(self, window: int, period: int, rows: Rows) -> Verdicts:
        """Note whether all were kept."""
        verdicts = super().bound(window, period, rows)
        self._dropped = getattr(self, "_dropped", False) or not verdicts.all()
        return verdicts

    def _table(self, *args: Any) -> pa.Table:
        table, names = super()._table(*args), [a.name for a in self.query.aggregates]
        kind = pa.float64() if getattr(self, "_dropped", False) else pa.int64()
        for name in names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast(kind))
        return table
