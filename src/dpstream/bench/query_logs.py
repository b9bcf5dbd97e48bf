"""The logs that the queries read: the real ones, or made-up rows with the same columns."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from dpstream.bench.streams import VARIABLE
from dpstream.errors import InvalidParameter
from dpstream.records import Integers

Columns = dict[str, object]
_DAY: Final = 86_400


def log_file(name: str, folder: Path, *, rows: int) -> tuple[Path, bool]:
    """Where a log is, and whether it is a real one; a made-up one is written to `folder`."""
    named = os.environ.get(VARIABLE)
    real = Path(named or "", f"events_{name}.csv")
    if named and real.exists():
        return real, True
    path = folder / f"{name}-{rows}.csv"
    if not path.exists():
        if name not in _MADE:
            raise InvalidParameter(f"a log must be one of {', '.join(_MADE)}; got {name!r}")
        pa_csv.write_csv(pa.table(_MADE[name](rows, np.random.default_rng(rows))), path)
    return path, False


def _skewed(rng: np.random.Generator, size: int, count: int, *, q: float, s: float) -> Integers:
    """Numbers below `count`, the smaller the likelier: Zipf-Mandelbrot(q, s)."""
    weights = (np.arange(1, count + 1) + q) ** -s
    return rng.choice(count, size, p=weights / weights.sum())


def _tweets(rows: int, rng: np.random.Generator) -> Columns:
    return {
        "sec": np.sort(rng.integers(0, _DAY, rows)),
        "user": rng.integers(0, rows // 2, rows),
        "target": _skewed(rng, rows, 2_000, q=3, s=1.4),
        "kind": rng.choice(["RT", "MT", "RE"], rows, p=[0.6, 0.3, 0.1]),
    }


def _orders(rows: int, rng: np.random.Generator) -> Columns:
    quantity = rng.integers(1, 80, rows) * rng.choice([1, -1], rows, p=[0.97, 0.03])
    return {
        "minute": np.sort(rng.integers(0, 207 * 1_440, rows)),
        "customer": rng.integers(10_000, 10_000 + rows // 20, rows),
        "stock_code": np.char.add("S", _skewed(rng, rows, 300, q=5, s=1.2).astype(str)),
        "quantity": quantity,
    }


def _ratings(rows: int, rng: np.random.Generator) -> Columns:
    return {
        "unix_ts": np.sort(rng.integers(789_652_009, 1_476_640_644, rows)),
        "user": rng.integers(1, max(rows // 20, 2), rows),
        "movie": _skewed(rng, rows, 900, q=10, s=1.1),
        "rating": rng.integers(1, 11, rows) / 2,
        "main_genre": rng.choice(["Drama", "Comedy", "Action", "Horror"], rows),
    }


def _visits(rows: int, rng: np.random.Generator) -> Columns:
    paths = np.array(["/", "/blog/a", "/blog/b", "/images/x.png", "/projects/y", "/About"])
    return {
        "unix_ts": np.sort(rng.integers(1_747_476_300, 1_747_476_300 + 3 * _DAY, rows)),
        "client": rng.integers(1, max(rows // 5, 2), rows),
        "method": rng.choice(["GET", "POST"], rows, p=[0.98, 0.02]),
        "path": paths[rng.integers(0, len(paths), rows)],
        "status": rng.choice([200, 304, 404], rows, p=[0.9, 0.05, 0.05]),
    }


def _synthetic(rows: int, rng: np.random.Generator) -> Columns:
    """As the paper makes it: both laws are Zipf-Mandelbrot; rows lie anywhere in the day."""
    each = 1 + _skewed(rng, rows // 4, 1_000, q=26, s=6.738)
    users = np.repeat(np.arange(len(each)), each)
    size = len(users)
    return {
        "sec": rng.integers(0, _DAY, size),
        "user": users,
        "key": _skewed(rng, size, max(rows // 100, 10), q=1_000, s=1.4),
    }


_MADE: Final[dict[str, Callable[[int, np.random.Generator], Columns]]] = {
    "higgs_twitter_20120704": _tweets,
    "online_retail_2010_2011": _orders,
    "movielens_100k_2016": _ratings,
    "apache_weblog_2015": _visits,
    "synthetic": _synthetic,
}
