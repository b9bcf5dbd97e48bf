"""What the first rows of a source tell of a query, before it costs anything.

All of it is exact, so it is for the operator alone: it is said in errors and on the terminal, never
in a release. A run looks at its first rows before it is charged, and never after that.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from dpstream.connectors.shared import SharedSource
from dpstream.connectors.write_ahead import WriteAhead
from dpstream.engines.embedded.live_reader import LiveView
from dpstream.engines.query_run import Run
from dpstream.errors import InvalidInput, UnusableFile, lacks_column
from dpstream.group_by.bounding import UnitBucket
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.query.column_types import is_number, is_text
from dpstream.query.query import Bounds, Query
from dpstream.query.row_spec import TIME_UNITS, RowSpec
from dpstream.query.windows import DAY, in_words, instant, iso, within_calendar
from dpstream.records import CheckedSource, Reals, Source, StartOffsets
from dpstream.rows import parse
from dpstream.rows.row_batch import Rows, id_pairs, rows_by_window
from dpstream.rows.row_reader import Reason, RowReader

_LOG = logging.getLogger("dpstream.session")
_SLICE = 10_000  # rows that are parsed at a time
_FIRST = 500  # rows of the first slice: most often they tell all
_KEPT = 1000  # cells of a column that are looked at to tell what is wrong with it
_FILTERED = 100_000  # rows of which WHERE may leave none before looking ends
LOOKED_AT = 1000  # rows of a live source, or of a frame of Spark, before a run begins
_ENOUGH = 10  # rows of a live source that must all be useless before they stop a run
_PATIENCE = 2.0  # seconds that a live source is looked at before its run begins
_FARTHEST_ZONE = 14 * 3600 * 10**6  # microseconds
_YEARS = (instant("1990-01-01", "the first year"), 10 * 366 * DAY)  # since then, and from now on
_SINCE_1970 = {"s": 10**6, "ms": 1000, "us": 1, "ns": 0.001}
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_PARTS = {
    "time": (Reason.TIME, Reason.ARRIVAL, Reason.AHEAD),
    "unit": (Reason.MISSING_UNIT,),
    "keys": (Reason.OVERSIZE_KEY, Reason.UNWRITABLE),
    "values": (Reason.NUMBER, Reason.NOT_FINITE),
}
"""What of a row each reason is about; the others are about the row as a whole."""


@dataclass(kw_only=True, eq=False)
class RowSample:
    """Rows of a source that were looked at, and what would become of them."""

    query: RowSpec
    live: bool
    now: int
    read: int = 0
    usable: int = 0
    outside: int = 0
    late: int = 0
    other_keys: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Of rows that cannot be read: each has one, the first that was found."""
    complete: bool = False
    """Were these all rows there are?"""
    columns: dict[str, str] = field(default_factory=dict)
    """The columns that the query reads, and their types."""
    first: int | None = None
    last: int | None = None
    """The least and the largest time that could be read."""
    rows: list[Rows] = field(default_factory=list)
    """Those that can be used, if nobody else reads the source."""
    cells: dict[str, pa.Array] = field(default_factory=dict)
    """Some cells of each column of the query."""

    @property
    def useless(self) -> bool:
        """Is there nothing among these rows that a release could count?

        Of a live source older rows are no mistake, if their times are right.
        """
        if not self.read or self.usable or self.other_keys:
            return False
        if self.complete:
            return True
        old = self.outside + self.late
        return self.read >= _ENOUGH and (not old or self.other_unit is not None)

    @property
    def likely_unit(self) -> str | None:
        """What a numeric time column counts since 1970, by its size: s, ms, us or ns."""
        numbers = self._numeric_times()
        if numbers is None:
            return None
        middle = float(np.median(numbers))
        for unit, micros in _SINCE_1970.items():
            if _YEARS[0] <= middle * micros <= self.now + _YEARS[1]:
                return unit
        return None

    @property
    def other_unit(self) -> str | None:
        """The likely unit, if the query names another one, or none."""
        query, likely = self.query, self.likely_unit
        other = query.time_origin == 0 and likely != query.time_unit
        return likely if other else None

    def share_usable(self, part: str) -> float:
        """The share of rows whose time, unit, keys or values can be used."""
        bad = sum(self.reasons[reason.value] for reason in _PARTS[part])
        return 1 - bad / self.read if self.read else 1.0

    def contributions(self) -> dict[str, Any]:
        """How many rows units have among these, and what the bounds leave out of them."""
        units = np.concatenate([id_pairs(rows.units) for rows in self.rows])
        _, counts = np.unique(units, return_counts=True)
        query = self.query
        bounds = (
            query.bounds if isinstance(query, Query) else Bounds(rows=1, groups=1, rows_per_group=1)
        )
        slices = [(rows, first, end) for rows in self.rows for *_, first, end in rows.runs]
        bucket, cut, kept = UnitBucket(bounds=bounds), [], 0
        for window, period, rows in rows_by_window(slices):
            if not isinstance(query, Query):
                bucket = UnitBucket(bounds=bounds)  # one row in each window
            mask = np.zeros(len(rows), np.uint8)
            batch, places = (rows.units, rows.groups, rows.digests), np.arange(len(rows))
            differ = isinstance(query, Query) and query.rows_differ
            bucket.keep(window, period, batch, places, mask, by_value=differ)
            if isinstance(query, Query) and query.unit_measures and query.counts_units:
                pairs = id_pairs(rows.units ^ rows.groups[:, ::-1])  # all rows of a unit count
                mask = np.isin(pairs, pairs[mask > 0]).astype(np.uint8)
            kept += int((mask > 0).sum())
            cut.append(id_pairs(rows.units[mask == 0]))
        return {
            "units": len(counts),
            "median_rows": float(np.median(counts)),
            "most_rows": int(counts.max()),
            "rows_left_out": 1 - kept / len(units),
            "units_cut": len(np.unique(np.concatenate(cut))) / len(counts),
        }

    def to_json(self) -> dict[str, Any]:
        """All that is known of these rows, by topic."""
        query = self.query
        facts: dict[str, Any] = {
            "rows": self.read,
            "complete": self.complete,
            "columns": self.columns,
            "usable": self.usable / self.read if self.read else None,
            "usable_parts": {part: self.share_usable(part) for part in _PARTS},
            "unusable": dict(self.reasons.most_common()),
            "outside": self.outside,
            "late": self.late,
            "late_share": self.late / self.read if self.read else 0.0,
            "other_keys": self.other_keys,
            "units": self.contributions() if self.rows else None,
        }
        if query.time_column is not None:
            facts["times"] = {
                "first": iso(self.first),
                "last": iso(self.last),
                "start": iso(query.start),
                "end": iso(query.end),
                "time_unit": query.time_unit,
                "likely_unit": self.likely_unit,
            }
        return facts

    def what_is_wrong(self) -> str:
        """What makes most rows useless, and what to do about it; "" if nothing does."""
        counts = self.reasons + Counter({"outside": self.outside, "late": self.late})
        (reason, _), *_ = [*counts.most_common(1), ("", 0)]
        if reason == "outside":
            return self._outside_words()
        if reason == "late":
            return "they come later than allowed_lateness after their windows; allow more"
        if reason in (Reason.TIME, Reason.AHEAD):
            return self._time_words(reason)
        if reason in (Reason.NUMBER, Reason.NOT_FINITE):
            return self._number_words()
        if reason == Reason.MISSING_UNIT:
            return f"the unit column {self.query.privacy_unit_column!r} is empty; name another"
        return f"the reason is: {reason}" if reason else ""

    def _numeric_times(self) -> Reals | None:
        """The numbers of the time column, if it holds numbers."""
        cells = self.cells.get(self.query.time_column or "")
        if cells is None or not (is_number(cells.type) or is_text(cells.type)):
            return None
        values, _ = parse.numbers(cells, "")
        values = values[np.isfinite(values)]
        return values if len(values) * 2 > len(cells) - cells.null_count else None

    def _unit_words(self) -> str:
        """What a numeric time column seems to count, and how to say it."""
        column, unit = self.query.time_column, self.other_unit
        if unit is None:
            return ""
        given = self.query.time_unit
        said = "no time_unit is given" if given is None else f"time_unit is {given!r}"
        fix = f"say time_unit = {unit!r}"
        if unit not in TIME_UNITS:
            fix = "write them as timestamps, or divide them by 1000 and say time_unit = 'us'"
        return (
            f"the numbers in {column!r} look like {_NAMES[unit]} since 1970, and {said}; {fix} "
            "(among OPTIONS in SQL)"
        )

    def _time_words(self, reason: str) -> str:
        column, query = self.query.time_column, self.query
        if unit := self._unit_words():
            return unit
        if reason == Reason.AHEAD:
            return (
                f"the times in {column!r} are more than {in_words(query.max_ahead)} ahead of this "
                f"machine's clock ({iso(self.now)}): {self._range()}; set the clock, time_zone or "
                "time_unit right"
            )
        cells = self.cells.get(column or "")
        if cells is not None and not is_text(cells.type):
            return (
                f"the times in {column!r} ({cells.type}) are missing, or beyond the years 1 to "
                "9999, as they are where another unit was meant; write them anew"
            )
        shape = _shape(cells)
        if query.time_unit is not None:
            return (
                f"time_unit is {query.time_unit!r} and the column {column!r} holds texts such as "
                f"{shape} (9: a digit, a: a letter); leave time_unit out, or name another column"
            )
        return (
            f"the times in {column!r} look like {shape} (9: a digit, a: a letter), which is not "
            "ISO 8601; write them like 2024-05-01T12:30:00, with Z or an offset, or without one in "
            "the query's time_zone, or as numbers with time_unit"
        )

    def _outside_words(self) -> str:
        query = self.query
        words = f"the times in {query.time_column!r} are {self._range()}, and the query's range is "
        words += f"{iso(query.start)} to {'no end' if query.end is None else iso(query.end)}"
        if unit := self._unit_words():
            return f"{words}; {unit}"
        first, last = self.first or 0, self.last or 0
        before = (query.start or 0) - last
        after = 0 if query.end is None else first - query.end
        if 0 <= max(before, after) < _FARTHEST_ZONE:
            return (
                f"{words}; that is less than a day beside it: are they in another time_zone than "
                f"{query.time_zone!r}? Otherwise set start and end"
            )
        return f"{words}; set start and end, by what is known and not by single rows"

    def _number_words(self) -> str:
        columns = [name for measure in self.query.value_measures for name in measure.columns]
        for name in columns:
            cells = self.cells.get(name)
            if cells is None or not is_text(cells.type) or not len(cells):
                continue
            _, readable = parse.numbers(cells, "")
            if not readable.all():
                _, timed = parse.written_times(cells, "UTC")
                what = "dates or times" if timed.any() else f"texts such as {_shape(cells)}"
                return (
                    f"the column {name!r} must hold numbers to be aggregated and holds "
                    f"{what}; aggregate another column, or count rows"
                )
        return "the numbers to be aggregated are NaN or infinite; aggregate another column"

    def _range(self) -> str:
        return f"from {iso(self.first)} to {iso(self.last)}"


def sample_rows(
    query: RowSpec,
    source: Any,
    *,
    now: int,
    most: int,
    live: bool,
    own: bool = False,
) -> RowSample:
    """Look at rows of a source until there are `most`, and one that can be used unless it is live.

    It ends where WHERE leaves nothing of many rows: they tell nothing.
    `own`: nobody else reads the source, so it may be read on; a source that starts somewhere in a
    server's log is otherwise read from its beginning alone.
    """
    sample = RowSample(query=query, live=live, now=now)
    reader = RowReader(query, Secret.of(None), mint_run_id())  # ids that nobody else has
    chunks = _frame_chunks(source, query, most) if isinstance(source, SampledFrame) else None
    sample.complete, seen = not live, 0
    for kinds, table, rejected in chunks or _chunks(query, source, own=own, sample=sample):
        if not sample.columns:
            reader.learn(kinds)
            known = {} if kinds is None else kinds
            names = query.source_columns
            sample.columns = {name: str(known.get(name, "text")) for name in names}
        sample.read += len(rejected)
        sample.reasons.update(each.reason for each in rejected)
        start = 0
        while start < len(table):
            size = _FIRST if not start else _SLICE
            _add(sample, reader, table.slice(start, size), keep=own)
            start += size
            seen += size
            told = sample.usable + sample.other_keys > 0 and sample.read >= most
            if told or (live and sample.read >= most) or (not sample.read and seen >= _FILTERED):
                sample.complete = False
                return sample
    if chunks is not None:
        sample.complete = not live and sample.read < most
    return sample


def _add(sample: RowSample, reader: RowReader, table: pa.Table, *, keep: bool) -> None:
    """What becomes of some rows."""
    query = sample.query
    prepared = table if query.prepare is None else query.prepare(table)
    for name in query.columns if len(sample.cells) < len(query.columns) else ():
        cells = parse.whole_column(prepared[name])[:_KEPT]
        if len(cells):
            sample.cells[name] = cells
    if query.time_column is not None and len(prepared):
        column = prepared[query.time_column]
        if query.time_unit is None and is_number(column.type) and sample.other_unit:
            raise InvalidInput(f"{sample._unit_words()}; nothing was charged")
        times, readable = parse.times(
            column,
            query.time_column,
            zone=query.time_zone,
            unit=query.time_unit_micros,
            origin=query.time_origin,
        )
        times = times[readable & within_calendar(times)]
        if len(times):
            least, largest = int(times.min()), int(times.max())
            sample.first = least if sample.first is None else min(sample.first, least)
            sample.last = largest if sample.last is None else max(sample.last, largest)
    arrived = None
    if sample.live and query.time_column is not None:
        arrived = max(0, int(query.schedule.step_of(np.array([sample.now]))[0]))
    rows, unused = reader.read(table, "the first rows", arrived=arrived)
    left = len(prepared) - len(unused.rejected) - unused.outside - unused.other_keys
    usable = min(len(rows), left)  # a row may be in several windows
    sample.usable += usable
    sample.outside += unused.outside
    sample.late += left - usable
    sample.other_keys += unused.other_keys
    sample.read += left + len(unused.rejected) + unused.outside + unused.other_keys
    sample.reasons.update(each.reason for each in unused.rejected)
    if keep and len(rows) and query.per_unit is None:  # bounds are for inner rows
        sample.rows.append(rows)


def _chunks(query: RowSpec, source: Source, *, own: bool, sample: RowSample) -> Iterator[Any]:
    """(types, table, rejected lines) of chunk after chunk; files that cannot be used are left out.

    If none of the files can be used, that is raised as a run would; of a live source, whose next
    files may be whole, if all that were looked at lack a column.
    """
    columns, marks, looked_at = query.source_columns, [], 0
    partitions, began = source.partitions(), time.monotonic()
    read = source.peek if isinstance(source, SharedSource) else source.read
    for partition in partitions:
        if sample.live and not own and time.monotonic() > began + _PATIENCE:
            break  # each that is empty may let its reader wait
        looked_at += 1
        if isinstance(source, CheckedSource) and (mark := source.check(partition, columns)):
            marks.append(mark)
            continue
        kinds, position, done = source.columns(partition), None, False
        while not done:
            batch = read(partition, position, columns=columns)
            yield kinds, batch.table, batch.rejected
            done = batch.done or batch.position == position
            if not done and not own and (not source.bounded or isinstance(source, StartOffsets)):
                sample.complete, done = False, True
            position = batch.position
    said = [mark["reason"] for mark in marks]
    if looked_at == len(said) > 0 and (source.bounded or all(map(lacks_column, said))):
        raise UnusableFile(said[0])


@runtime_checkable
class SampledFrame(Protocol):
    """A DataFrame that another engine reads."""

    def columns(self, partition: str) -> Any:
        """The types of its columns."""

    def first_rows(self, columns: Sequence[str], most: int) -> pa.Table | None:
        """Some of its rows; None of a frame that streams."""


def _frame_chunks(source: SampledFrame, query: RowSpec, most: int) -> Iterator[Any]:
    """The first rows of a DataFrame that another engine reads; none of one that streams."""
    table = source.first_rows(query.source_columns, most)
    if table is not None:
        yield source.columns(""), table, []


@runtime_checkable
class EndingNow(Protocol):
    """A live source of a server that can be read up to where it ends now, and no further."""

    def until_now(self) -> str:
        """What `until` has to say for that; "" while the server does not tell."""


_OR_ANYWAY = (
    "nothing was charged; --anyway (anyway=True in Python) runs it all the same; other queries of "
    "its pipeline begin when it is taken out, or its [[query]] says anyway = true"
)


def refuse_over(run: Run) -> None:
    """Refuse a live run all of whose triggers were over before it began; nothing is charged yet.

    Rows belong to the first trigger after their arrival, so all its windows would be empty. One
    that has begun, and was charged, goes on instead: what it has read is in its log.
    """
    steps, inner = run.steps, run.source
    if not run.live or run.history is not None or steps is None or steps < 1:
        return
    last = run.query.schedule.time_of(steps - 1)
    if last is None or last > run.clock.now() or getattr(inner, "bounded", False):
        return
    until = ""
    if isinstance(inner, LiveView):
        shared = inner.shared
        if shared.tails:
            return  # others read it, or this query did before it failed: rows have come in time
        with shared.lock:
            until = shared.source.until_now() if isinstance(shared.source, EndingNow) else ""
    advice = (
        f"to read what is there by now, add until={until} to the source's address"
        if until
        else "to read what is there by now: give a server's source its `until`, read files without "
        "live (without --live, live = true), and put what comes by a pipe into a file"
    )
    raise InvalidInput(
        f"the query {run.query.name!r} would spend its budget for nothing: its last trigger was "
        f"{iso(last)}, and rows of a live source count from when they arrive, so all its windows "
        f"would be empty; {advice}; or give a range that goes on; {_OR_ANYWAY}"
    )


def refuse_useless(run: Run) -> None:
    """Refuse a run over rows none of which can be used; it is called before the run is charged.

    Over files every row was looked at then, so nothing but empty tables would come of it. Of a live
    source what is there by now was looked at; a pipe cannot be looked at without reading it.
    """
    for source in (run.source, run.history):
        if source is None:
            continue
        inner = source.shared.source if isinstance(source, LiveView) else source
        if isinstance(inner, WriteAhead) or not getattr(inner, "replayable", True):
            _LOG.info("query %r: a pipe is not looked at before it is read", run.query.name)
            continue
        most = LOOKED_AT if run.live or isinstance(source, SampledFrame) else 1
        sample = sample_rows(run.query, source, now=run.clock.now(), most=most, live=run.live)
        if not sample.read:
            _LOG.info("query %r: there are no rows yet to be looked at", run.query.name)
        if sample.useless:
            raise useless(run.query.name, sample)


def useless(query: str, sample: RowSample) -> InvalidInput:
    """The refusal of a query over rows none of which can be used."""
    return InvalidInput(
        f"the query {query!r} would spend its budget for nothing: none of the {sample.read} rows "
        f"{'there are' if sample.complete else 'that were looked at'} can be used; "
        f"{sample.what_is_wrong()}; dpstream check tells more; {_OR_ANYWAY}"
    )


def _shape(cells: pa.Array | None) -> str:
    """The most usual form of texts, with 9 for digits and a for letters: no value is told.

    >>> _shape(pa.array(["01/05/2024 12:00", "02/05/2024 13:30", "?"]))
    "'99/99/9999 99:99'"
    """
    texts = [] if cells is None else [text for text in cells.to_pylist() if text]
    forms = Counter(re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", str(each)))[:40] for each in texts)
    return repr(forms.most_common(1)[0][0]) if forms else "nothing"
