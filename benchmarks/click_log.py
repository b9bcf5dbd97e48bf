"""A day of clicks with the shape of a real log, in Parquet; the same rows from the same seed.

The laws are those of the synthetic data of Zhang et al., "Differentially Private Stream Processing
at Scale", 2023: users have Zipf-Mandelbrot(26, 6.738) numbers of rows, rows have
Zipf-Mandelbrot(1000, 1.4) keys. Columns: `ts` (microseconds, UTC, sorted, evenly spread over the
day), `user_id` (15 bytes), `url` (15 to 40 bytes). The files are written with PyArrow's defaults,
which are Spark's too: Snappy, and dictionaries where they pay.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.errors import InvalidParameter
from dpstream.records import Reals

VARIABLE: Final = "DPSTREAM_BENCH_CACHE"
DAY: Final = 86_400_000_000  # microseconds
START: Final = datetime(2023, 7, 1, tzinfo=UTC)
FILES: Final = 24
ROW_GROUP: Final = 2**20
ROWS_LAW: Final = (26.0, 6.738)
KEYS_LAW: Final = (1000.0, 1.4)
MOST_ROWS: Final = 10_000  # of one user; beyond it the law has a mass of 10^-15

_ABOUT: Final = "_about.json"  # readers of Parquet folders pass over names that begin so
_SCHEMA: Final = pa.schema(
    [("ts", pa.timestamp("us", "UTC")), ("user_id", pa.string()), ("url", pa.string())]
)
_SECTIONS: Final = ("news", "sport", "travel", "culture", "politics", "marketplace", "photography")
_SLUGS: Final = ("is", "map", "video", "archive", "a-long-story", "what-we-know-so-far")

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ClickLog:
    """Which log: how many records, over how many keys, from which seed.

    `first`: what the laws call the smallest number of rows and the first key, 1 or 0.
    `uniform`: every key is as frequent as the others, as in that paper's largest data.
    """

    records: int
    keys: int = 1_000_000
    seed: int = 2023
    first: int = 1
    uniform: bool = False

    def __post_init__(self) -> None:
        """Refuse a log without rows, or with more keys than a URL has digits for."""
        if self.records < 1:
            raise InvalidParameter(f"records must be at least 1; got {self.records}")
        if not 1 <= self.keys <= 1_000_000:
            raise InvalidParameter(f"keys must be in 1 to 1,000,000; got {self.keys}")
        if self.first not in (0, 1):
            raise InvalidParameter(f"first must be 0 or 1; got {self.first}")

    @property
    def name(self) -> str:
        """What tells this log from others, as a file name."""
        name = f"clicks-{self.records}-{self.keys}-{self.seed}"
        return name + "-from0" * (not self.first) + "-uniform" * self.uniform


def records_of(users: int, *, first: int = 1) -> int:
    """How many records so many users have on average.

    >>> records_of(10_000_000, first=0)
    59046774
    """
    law = zipf_mandelbrot(MOST_ROWS, *ROWS_LAW, first=first)
    return round(users * float(law @ np.arange(1, MOST_ROWS + 1)))


def zipf_mandelbrot(size: int, q: float, s: float, *, first: int = 1) -> Reals:
    """P(k) = (k + q)^-s / sum, for k = `first` and so on, `size` numbers in all.

    >>> zipf_mandelbrot(3, 1.0, 1.0).round(3).tolist()
    [0.462, 0.308, 0.231]
    """
    weights: Reals = (np.arange(first, first + size, dtype=np.float64) + q) ** -s
    weights /= weights.sum()
    return weights


def parts(log: ClickLog) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """(times, users, ranks of keys) of each file, in time order.

    One 32-bit number per record is held for the whole log (240 MB for 60 million), because every
    user's rows are spread over the whole day; all else is held for one file at a time.
    """
    shuffling, *per_file = np.random.SeedSequence(log.seed).spawn(1 + FILES)
    users = _users(log, np.random.default_rng(shuffling))
    law = (0.0, 0.0) if log.uniform else KEYS_LAW
    cumulative = np.cumsum(zipf_mandelbrot(log.keys, *law, first=log.first))
    begins = [log.records * file // FILES for file in range(FILES + 1)]
    for file, seed in enumerate(per_file):
        rng = np.random.default_rng(seed)
        rows = np.arange(begins[file], begins[file + 1])
        # One row in each of `records` equal slices of the day: sorted as they come.
        times = ((rows + rng.random(len(rows))) * (DAY / log.records)).astype(np.int64)
        ranks = np.searchsorted(cumulative, rng.random(len(rows)) * cumulative[-1], side="right")
        yield times, users[begins[file] : begins[file + 1]], ranks.astype(np.int32)


def _users(log: ClickLog, rng: np.random.Generator) -> Numbers:
    """The user of each record: as many rows each as the law says (the last one's are cut)."""
    records, law = log.records, zipf_mandelbrot(MOST_ROWS, *ROWS_LAW, first=log.first)
    mean = float(law @ np.arange(1, MOST_ROWS + 1))
    enough = int(records / mean * 1.02) + 1_000
    rows = 1 + np.searchsorted(np.cumsum(law), rng.random(enough)).astype(np.int32)
    users = np.repeat(np.arange(enough, dtype=np.int32), rows)[:records]
    rng.shuffle(users)
    return users


def urls(keys: int) -> pa.Array:
    """The key of each rank, most frequent first; 15 to 40 bytes.

    >>> urls(3).to_pylist()
    ['/news/is/000000', '/sport/is/000001', '/travel/is/000002']
    """
    slugs = len(_SECTIONS)
    return pa.array(
        f"/{_SECTIONS[rank % slugs]}/{_SLUGS[rank // slugs % len(_SLUGS)]}/{rank:06d}"
        for rank in range(keys)
    )


def user_names(users: Numbers) -> pa.Array:
    """Ten digits each, made without a Python object per row.

    >>> user_names(np.array([7, 1234567])).to_pylist()
    ['user-0000000007', 'user-0001234567']
    """
    text = np.empty((len(users), 15), dtype=np.uint8)
    text[:, :5] = np.frombuffer(b"user-", dtype=np.uint8)
    left = users.astype(np.uint32)
    for place in range(14, 4, -1):
        left, digit = np.divmod(left, np.uint32(10))
        text[:, place] = digit + ord("0")
    ends = np.arange(0, 15 * len(users) + 1, 15, dtype=np.int32)
    return pa.StringArray.from_buffers(len(users), pa.py_buffer(ends), pa.py_buffer(text))


def files(log: ClickLog) -> Path:
    """The folder of the log's Parquet files, written now unless an earlier run has done so."""
    home = cache()
    folder = home / log.name
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Under another name until complete: a run that is cut short leaves no half a log behind.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{log.name}.", dir=home))
    try:
        write(log, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write(log: ClickLog, folder: Path) -> None:
    """Write `part-00.parquet` and so on, with row groups of up to 2^20 rows, and `_about.json`."""
    names, seen, last = urls(log.keys), np.zeros(log.keys, dtype=bool), 0
    start = int(START.timestamp()) * 1_000_000
    for file, (times, users, ranks) in enumerate(parts(log)):
        seen[ranks], last = True, max(last, int(users.max(initial=0)))
        with pq.ParquetWriter(folder / f"part-{file:02d}.parquet", _SCHEMA) as writer:
            for begin in range(0, len(times), ROW_GROUP):
                rows = slice(begin, begin + ROW_GROUP)
                columns = [
                    pa.array(times[rows] + start, type=_SCHEMA.field("ts").type),
                    user_names(users[rows]),
                    names.take(pa.array(ranks[rows])),
                ]
                writer.write_table(pa.table(columns, schema=_SCHEMA), row_group_size=ROW_GROUP)
    about = {"records": log.records, "users": last + 1, "keys": int(seen.sum())}
    (folder / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def about(folder: Path) -> dict[str, int]:
    """How many records, users and keys are in the files."""
    found: dict[str, int] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return found


def cache() -> Path:
    """Where logs stay between runs: the folder DPSTREAM_BENCH_CACHE names, or a temporary one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(tempfile.gettempdir()) / f"dpstream-bench-{os.getuid()}"
