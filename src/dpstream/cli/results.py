"""Write a released series: CSV, Parquet or JSON lines, the same bytes for the same values."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.series import Series

FORMATS = (".csv", ".parquet", ".jsonl")


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


def write(series: Series, path: Path) -> None:
    """Put the series under `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    if path.suffix.lower() == ".parquet":
        pq.write_table(pa.table(series.columns()), temporary)
    else:
        text = as_csv(series) if path.suffix.lower() == ".csv" else as_jsonl(series)
        temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def as_csv(series: Series) -> str:
    """A header and one line a step; an unknown stddev is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(series.columns())
    for record in records(series):
        writer.writerow(_cell(value) for value in record.values())
    return text.getvalue()


def as_jsonl(series: Series) -> str:
    """One JSON object a line and step."""
    return "".join(json.dumps(record) + "\n" for record in records(series))


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


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool) else value
