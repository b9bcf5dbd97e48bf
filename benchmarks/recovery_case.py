"""What is killed in the bench of recovery, what may be damaged in it, and how it is compared."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.connectors.encode import parquet
from dpstream.connectors.registry import AllSinks, open_sink
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum
from dpstream.query.query import Query
from dpstream.query.windows import Tumble

SECRET, RUN = bytes(range(32)), bytes(range(16))
_DAY, _HOUR = 86_400, 3_600
_NUMBERS = ("final", "minted")  # of the folder of keys: they hold no key

# 38 steps, 6 windows that overlap by their lateness, 3 periods
QUERY = Query(
    name="clicks",
    privacy_unit_column="user",
    keys=("page",),
    aggregates=(
        Count("clicks"),
        CountUnits("users"),
        Sum("seconds", column="seconds", contribution_bounds_per_row=(0, 600)),
        Avg("mean", column="seconds", contribution_bounds_per_row=(0, 600)),
    ),
    epsilon=6,
    delta=1e-6,
    time_column="at",
    time_unit="s",
    arrival_column="came",
    start="1970-01-01",
    end="1970-01-02",
    window=Tumble("4 hours"),
    every="40 minutes",
    allowed_lateness="80 minutes",
    privacy_unit_period="8 hours",
    max_groups_contributed=6,
    max_rows_per_group=2,
)


def write_source(folder: Path, *, rows: int = 4_000) -> list[Path]:
    """The same rows as Parquet (several row groups, in no order) and as CSV; some are malformed."""
    rng = np.random.default_rng(4)
    at = rng.integers(0, _DAY, rows)
    units = [f"user {n}" if n else None for n in rng.integers(0, rows // 5, rows)]
    table = pa.table(
        {
            "user": pa.array(units, pa.string()),
            "page": pa.array([f"/{n}" for n in np.minimum(rng.zipf(1.4, rows), 40)]),
            "at": pa.array(at),
            "came": pa.array(at + (rng.exponential(_HOUR, rows)).astype(np.int64)),
            "seconds": pa.array(rng.integers(0, 700, rows)),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "clicks.parquet", row_group_size=rows // 6)
    pyarrow.csv.write_csv(table, folder / "clicks.csv")
    return [folder / "clicks.parquet", folder / "clicks.csv"]


class CheckingSink:
    """A directory and a database; a release that comes again must have the bytes it had."""

    def __init__(self, folder: Path, on_new: Callable[[], None]) -> None:
        self._out, self._on_new = folder / "out", on_new
        both = [open_sink(folder / "out"), open_sink(folder / "out.sqlite")]
        self._sinks = AllSinks([one for one in both if one is not None])

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Write to both; without the file, this is the first step after a restart."""
        path = self._out / f"{name}-w{window:06d}-t{trigger:06d}.parquet"
        if path.exists() and path.read_bytes() != parquet(table):
            raise AssertionError(f"{path.name} came again with other bytes")
        if not path.exists():
            self._on_new()
        self._sinks.write(name, window, trigger, table)

    def fence(self, name: str, run: str) -> None:
        """Say which run the releases are from."""
        self._sinks.fence(name, run)

    def close(self) -> None:
        """Close both."""
        self._sinks.close()


def damage(state: Path, what: str, rng: np.random.Generator) -> None:
    """Spoil something durable that a second copy, or a replay, stands in for."""
    if what == "log" and (state / "run.dps").exists():
        _cut_last_record(state / "inputs.log", state.with_name("cut"), rng)
    manifests = sorted(state.glob("manifest-*.dps"), key=_number)
    if what == "snapshot" and len(manifests) > 1:
        newest = _number(manifests[-1])
        segments = [path for path in (state / "segments").iterdir() if _number(path) == newest]
        spoilt = [manifests[-1], *sorted(segments)][int(rng.integers(0, 1 + len(segments)))]
        os.truncate(spoilt, int(rng.integers(0, spoilt.stat().st_size)))


def _cut_last_record(log: Path, marker: Path, rng: np.random.Generator) -> None:
    """Cut inside the last step's line, but never two steps in a row: only one can be torn."""
    content = log.read_bytes()
    cut_before = int(marker.read_text()) if marker.exists() else 0
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    if b'"step"' in content[last:] and len(content) > cut_before:
        marker.write_text(str(len(content)))
        os.truncate(log, int(rng.integers(last, len(content))))


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


def published(folder: Path) -> dict[str, str]:
    """A digest of every file of the sink, and of every table of the database."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "out").iterdir())
    }
    database = sqlite3.connect(folder / "out.sqlite")
    names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    for (name,) in names.fetchall():
        rows = database.execute(f'SELECT * FROM "{name}" ORDER BY rowid').fetchall()
        found[f"sqlite {name}"] = hashlib.sha256(repr(rows).encode()).hexdigest()
    database.close()
    return found


def difference(folder: Path, expected: dict[str, str], *, same_keys: bool) -> str:
    """What differs from an unbroken run, in words; nothing: ""."""
    mine = published(folder)
    if mine.keys() != expected.keys():
        return f"other releases: {sorted(mine.keys() ^ expected.keys())[:3]}"
    other = [name for name in mine if mine[name] != expected[name]]
    if same_keys and other:
        return f"other bytes: {other[:3]}"
    return ""


def left_behind(state: Path) -> str:
    """What a run that is over should not leave, in words: a second charge, keys, segments."""
    ledger = Ledger(state / "ledger")
    charges = sum("amount" in record for record in ledger.history())
    ledger.close()
    if charges != 1:
        return f"charged {charges} times"
    left = [path.name for path in (state / "segments").iterdir()]
    left += [path.name for path in (state / "windows").iterdir() if path.name not in _NUMBERS]
    return f"left behind: {sorted(left)[:3]}" if left else ""
