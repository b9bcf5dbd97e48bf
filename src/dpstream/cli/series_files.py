"""Series in files: read them from CSV or Parquet, and write what was released."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.errors import InvalidInput, InvalidParameter, no_column
from dpstream.mechanisms.base import Mechanism
from dpstream.mechanisms.release import RESERVED, Series, as_steps, check_times
from dpstream.records import Integers, Reals

FORMATS = (".csv", ".parquet", ".jsonl")
FILLS = ("0", "hold")
_MOST_STEPS = 10_000_000
_ZONE = re.compile(r"(Z|[+-]\d\d(:?\d\d)?)$")
_INDEX_NAMES = {
    *("step", "index", "idx", "t", "time", "tick", "slot", "bucket", "second", "minute", "hour"),
    *("day", "week", "month", "year"),
}


@dataclass(frozen=True, kw_only=True)
class SeriesRows:
    """Steps x bins, the bins' names, and each step's time: as written, and as a stamp."""

    block: Reals
    names: list[str]
    times: list[Any] | None = None
    stamps: list[Any] | None = None
    by_wall: bool = False
    """Are the stamps what a clock on the wall showed, of times that are written with offsets?"""
    places: Integers | None = None
    """The steps of the block's rows, where others are missing and are held."""
    where: str
    """The file, and how a row number of an error translates to its lines."""

    def check(self, mechanism: Mechanism) -> Integers:
        """The steps as a mechanism takes them; what it cannot use is refused with its place."""
        try:
            return mechanism.check(self.block)
        except InvalidInput as problem:
            raise InvalidInput(f"{self.where}: {problem}") from None


def read_series(
    path: Path,
    *,
    columns: Sequence[str] = (),
    time_column: str | None = None,
    fill: str | None = None,
) -> SeriesRows:
    """The named columns of a .csv or .parquet file; by default all of them but the time.

    `fill`: of steps that are missing, "0": they are steps without events; "hold": nothing is
    published of them, and what was published before them stands there, too.
    """
    if fill not in (None, *FILLS):
        raise InvalidParameter(f"--fill must be one of {', '.join(FILLS)}; got {fill!r}")
    reader = {".csv": _read_csv, ".parquet": _read_parquet}.get(path.suffix.lower())
    if reader is None:
        raise InvalidInput(f"{path} must be a .csv or .parquet file")
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    rows = reader(path, list(dict.fromkeys(columns)), time_column, fill is not None)
    if rows.times is None and not columns:
        _refuse_index(path, rows)
    if fill is not None:
        rows = _filled(rows, fill)
    taken = RESERVED.union(f"{name}_stddev" for name in rows.names)
    if clash := taken.intersection(rows.names):
        raise InvalidInput(
            f"{path}: the result has its own column {min(clash)!r}; rename that of the input, "
            "or leave it out with --column"
        )
    return rows


def _refuse_index(path: Path, rows: SeriesRows) -> None:
    """A column that numbers the steps is their time, and no count."""
    for number, name in enumerate(rows.names if len(rows.names) > 1 else ()):
        rises = np.diff(rows.block[:, number])
        named = name.lower() in _INDEX_NAMES
        if len(rises) > 1 and (rises > 0).all() and (named or (rises == 1).all()):
            others = " ".join(f"--column {each}" for each in rows.names if each != name)
            numbers = ", ".join(f"{value:g}" for value in rows.block[:3, number])
            raise InvalidInput(
                f"{path}: column {name!r} numbers the steps ({numbers}, ...), and would be "
                f"published as if it were a count; say --time-column {name}, or name what is to be "
                f"published: {others}"
            )


def _filled(rows: SeriesRows, fill: str) -> SeriesRows:
    """Every step from the first to the last: with zeros, or to be held."""
    if rows.stamps is None or rows.times is None:
        raise InvalidInput(
            f"{rows.where}: --fill needs to know which steps are missing; name their time with "
            "--time-column"
        )
    places = check_times(rows.stamps, "time", gaps=True)
    stamps = np.asarray(rows.stamps, dtype="datetime64[s]")
    if places[-1] >= _MOST_STEPS:
        row = int(np.diff(places).argmax()) + 1
        raise InvalidInput(
            f"{rows.where}: --fill would make {int(places[-1]) + 1:,} steps, and at most "
            f"{_MOST_STEPS:,} are made; the most are missing before row {row} ({rows.times[row]}): "
            "is that time as it should be?"
        )
    steps = np.arange(int(places[-1]) + 1)
    if len(steps) == len(stamps):
        return rows
    every = stamps[0] + steps * ((stamps[-1] - stamps[0]) // int(places[-1]))
    if not (every[places] == stamps).all():
        months = stamps.astype("datetime64[M]")
        each = (months[-1] - months[0]) // int(places[-1])
        within = stamps[0] - months[0].astype("datetime64[s]")
        every = (months[0] + steps * each).astype("datetime64[s]") + within
    if rows.by_wall:
        times = _at_wall(rows, places, every)
    else:
        times = [_written_like(rows.times[0], each) for each in every]
    for place, written in zip(places, rows.times, strict=True):
        times[place] = written
    numbers = isinstance(rows.stamps[0], int)
    filled = [int(each.astype(np.int64)) for each in every] if numbers else [*every]
    if fill == "hold":
        return replace(rows, times=times, stamps=filled, places=places)
    block = np.zeros((len(steps), rows.block.shape[1]))
    block[places] = rows.block
    return replace(rows, block=block, times=times, stamps=filled)


def _written_like(example: Any, time: np.datetime64) -> Any:
    """A time as those of the file are written."""
    if not isinstance(example, str) or example.isdecimal():
        number = int(time.astype(np.int64))
        return str(number) if isinstance(example, str) else number
    day, zone = example[:10], _ZONE.search(example, 10)
    if zone:  # the stamps of such a file are in UTC
        example = example[: zone.start()]
        offset = datetime.fromisoformat(day + "T00:00" + zone.group()).utcoffset()
        time = time + np.timedelta64(offset)
    unit: Any = {7: "M", 10: "D", 13: "h", 16: "m"}.get(len(example), "s")
    text = str(np.datetime_as_string(time, unit=unit)) + (zone.group() if zone else "")
    return text if "T" in example else text.replace("T", " ")


def _at_wall(rows: SeriesRows, places: Integers, every: Sequence[np.datetime64]) -> list[Any]:
    """Each step's time with the offset of the rows around it, which must have the same."""
    assert rows.times is not None
    zones = [_zone_of(written) for written in rows.times]
    times = []
    for step, stamp in enumerate(every):
        row = int(np.searchsorted(places, step, side="right")) - 1
        if places[row] != step and zones[row] != zones[row + 1]:
            raise InvalidInput(
                f"{rows.where}: steps are missing between {rows.times[row]} and "
                f"{rows.times[row + 1]}, where the clock changes, and the file does not say on "
                "which day; write these steps into it"
            )
        offset = datetime.fromisoformat(f"2000-01-01T00:00{zones[row]}").utcoffset()
        times.append(_written_like(rows.times[row], stamp - np.timedelta64(offset)))
    return times


def _zone_of(written: str) -> str:
    """The offset that a time is written with; "" if it has none."""
    zone = _ZONE.search(written, 10)
    return "" if zone is None else zone.group()


def hold_gaps(series: Series, rows: SeriesRows) -> Series:
    """What was published before a step that is missing stands there, too; that costs nothing.

    The mechanism has seen the rows that are there alone, so any w steps have at most w of them.
    """
    if rows.places is None or not len(series):
        return series
    whole = len(series) == len(rows.places)
    steps = np.arange(int(rows.places[-1]) + 1 if whole else int(rows.places[len(series)]))
    places = rows.places[: len(series)]
    source = np.searchsorted(places, steps, side="right") - 1
    there = np.isin(steps, places)
    return replace(
        series,
        values=series.values[source],
        stddev=series.stddev[source],
        paid=[bool(own and series.paid[at]) for own, at in zip(there, source, strict=True)],
        held=[bool(not own or series.held[at]) for own, at in zip(there, source, strict=True)],
        times=None if rows.times is None else rows.times[: len(steps)],
    )


def _read_parquet(path: Path, columns: list[str], time: str | None, gaps: bool) -> SeriesRows:
    try:
        table = pq.read_table(path)
    except pa.ArrowException as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidInput(f"{path} cannot be read as Parquet: {reason}") from None
    _require(path, [*columns, *([time] if time else [])], table.column_names)
    if columns:
        temporal = [f.name for f in table.schema if pa.types.is_temporal(f.type)]
        kept = [name for name in table.column_names if name in (*columns, time, *temporal[:1])]
        table = table.select(kept)
    if table.num_rows == 0:
        raise InvalidInput(f"{path} has no rows")
    block, names, stamps = as_steps(table, time_column=time, gaps=gaps)
    times: list[Any] | None = None
    by_wall = False
    if stamps is not None and isinstance(stamps[0], datetime):  # of a time zone
        times = [moment.isoformat() for moment in stamps]
        stamps, by_wall = _stamps_of(times)
    elif stamps is not None:
        times = [str(t) if isinstance(t, np.datetime64) else t.item() for t in stamps]
    where = str(path)
    return SeriesRows(
        block=block, names=names or [], times=times, stamps=stamps, by_wall=by_wall, where=where
    )


def _read_csv(path: Path, columns: list[str], time: str | None, gaps: bool) -> SeriesRows:
    header, lines, rows = _cells(path)
    _require(path, [*columns, *([time] if time else [])], header)
    cells = {name: list(column) for name, *column in zip(header, *rows, strict=True)}
    if time is None:
        others = (name for name in header if name not in columns)
        time = next((name for name in others if _is_date(cells[name][0])), None)
    names = columns or [name for name in header if name != time]
    if not names:
        raise InvalidInput(f"{path} has no column to publish besides its time {time!r}")

    def convert(name: str, parse: Callable[[str], Any], advice: str, kind: str = "") -> list[Any]:
        values = []
        for cell, line in zip(cells[name], lines, strict=True):
            try:
                values.append(parse(cell))
            except ValueError:
                shown = f"is {cell!r}{kind}" if cell.strip() or not kind else "is empty"
                place = f"{path}, line {line}, column {name!r}"
                raise InvalidInput(f"{place} {shown}; {advice}") from None
        return values

    advice = "name the columns to publish with --column"
    advice += ", the time column with --time-column" if time is None else ""
    kind = ", which is not a finite number"
    block = np.column_stack([convert(name, _finite, advice, kind) for name in names])
    where = f"{path} (row 0 is line {lines[0]})"
    if time is None:
        return SeriesRows(block=block, names=names, where=where)
    times = cells[time] = [cell.strip() for cell in cells[time]]
    by_wall = False
    if times[0].isdecimal():
        stamps = convert(time, int, "it must be a whole number, as the first row")
    else:
        advice = "it must be a date or time such as 2024-01-31 or 2024-01-31T12:00:00"
        convert(time, _stamp, advice)
        stamps, by_wall = _stamps_of(times)
    try:
        check_times(stamps, time, gaps=gaps)
    except InvalidInput as problem:
        raise InvalidInput(f"{where}: {problem}") from None
    return SeriesRows(
        block=block, names=names, times=times, stamps=stamps, by_wall=by_wall, where=where
    )


def _stamps_of(times: Sequence[str]) -> tuple[list[np.datetime64], bool]:
    """Stamps of written times, and whether they are what a clock on the wall showed.

    So they are where each is the same time of day, as local days are, whatever its offset: days
    have one length then, although one of 23 hours is among them. Otherwise they are in UTC.
    """
    zones = [_zone_of(written) for written in times]
    bare = [written.removesuffix(zone) for written, zone in zip(times, zones, strict=True)]
    by_wall = all(zones) and len({written[10:] for written in bare}) == 1
    return [_stamp(written) for written in (bare if by_wall else times)], by_wall


def _cells(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """Header, and each row's cells with its line number; every row as wide as the header."""
    lines: list[int] = []
    rows: list[list[str]] = []
    blank = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            for row in reader:
                if not row:
                    blank = blank or reader.line_num
                    continue
                if blank:
                    raise InvalidInput(f"{path}, line {blank} is empty; every step needs a row")
                if len(row) != len(header):
                    raise InvalidInput(
                        f"{path}, line {reader.line_num} has {len(row)} cells but the header has "
                        f"{len(header)}; write 0 for a bin without events"
                    )
                lines.append(reader.line_num)
                rows.append(row)
        except csv.Error as problem:
            raise InvalidInput(f"{path}, line {reader.line_num}: {problem}") from None
        except UnicodeDecodeError as problem:
            raise InvalidInput(f"{path} is not UTF-8 text: {problem}") from None
    if not rows:
        raise InvalidInput(f"{path} has a header but no rows")
    return header, lines, rows


def _check_header(path: Path, header: list[str]) -> None:
    if not any(header):
        raise InvalidInput(f"{path} is empty; a header and at least one row are needed")
    if any(_is_number(name) for name in header):
        raise InvalidInput(
            f"{path}, line 1 must be a header with column names; got {','.join(header)}"
        )
    if "" in header or len(set(header)) < len(header):
        raise InvalidInput(f"{path}, line 1: column names must be there and differ; got {header}")


def _require(path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    for name in wanted:
        if name not in there:
            raise no_column(str(path), name, there)


def _stamp(text: str) -> np.datetime64:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return np.datetime64(text, "s")  # such as 2024-01
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return np.datetime64(moment, "s")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _is_number(text: str) -> bool:
    try:
        return _finite(text) is not None
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        return not (_is_number(text) or np.isnat(_stamp(text.strip())))
    except ValueError:
        return False


def check_target(path: Path | None, formats: tuple[str, ...] = FORMATS) -> None:
    """Refuse what could not be written, before any budget is spent."""
    if path is None:
        return
    if path.suffix.lower() not in formats:
        raise InvalidParameter(f"{path} must end in {' or '.join(formats)}")
    if not path.parent.is_dir():
        raise InvalidParameter(f"there is no folder {path.parent} to write {path.name} to")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidParameter(f"{path} cannot be written")


def write_series(series: Series, path: Path) -> None:
    """Put the series under `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    if path.suffix.lower() == ".parquet":
        pq.write_table(pa.table(series.columns()), temporary)
    else:
        text = as_csv(series)
        if path.suffix.lower() == ".jsonl":
            text = "".join(json.dumps(record) + "\n" for record in records(series))
        temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def as_csv(series: Series) -> str:
    """A header and one line a step; an unknown stddev is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(series.columns())
    for record in records(series):
        cells = record.values()
        writer.writerow(json.dumps(cell) if isinstance(cell, bool) else cell for cell in cells)
    return text.getvalue()


def records(series: Series) -> Iterator[dict[str, Any]]:
    """One plain dict a step, ready for JSON."""
    columns = series.columns()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, map(_plain, values), strict=True))


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value
