"""A long life: simulated triggers of three queries on one ledger, killed every few hundred.

Log and ledger are compacted as they go. All of it, 100,000 triggers in five lives of many kills, is
`make long`; `make test` does a part.
"""

import hashlib
import json
import os
import threading
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.state import journal
from dpstream.records import Batch
from dpstream.session import Runs
from tests.support.fixed import SECRET
from tests.support.live_runs import ScriptedClock
from tests.support.long import is_long
from tests.support.processes import kill_this_process, run_in_fork
from tests.support.runs import options

MINUTE = 60_000_000
SEEDS, TRIGGERS, LIVES = (range(5), 20_000, (200, 900)) if is_long() else (range(1), 600, (80, 130))
"""Of all three queries together, for each seed; how many there are between two kills."""
COMMON = {
    "privacy_unit_column": "user",
    "privacy_unit_period": "1 hour",
    "delta": 1e-6,
    "time_column": "at",
    "time_unit": "us",
    "start": "1970-01-01",
    "window": dps.Tumble("1 hour"),
    "every": "1 minute",
    "max_groups_contributed": 2,
    "max_rows_per_group": 3,
}
QUERIES = [
    dps.Query(name="pages", keys=("page",), epsilon=4, **COMMON),
    dps.Query(name="known", keys=("page",), epsilon=1, public_groups=["/1", "/2"], **COMMON),
    dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit = 'w_event',
        w = 60, mechanism = 'uniform', privacy_unit_column = user, time_unit = 'us',
        public_groups = ('/1', '/2'), start = '1970-01-01') window_start, page, COUNT(*) AS n
        FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' MINUTE) GROUP BY window_start, page""",
        name="series",
    ),
]


class HalfMinutes(ScriptedClock):
    """Stops whenever rows come, between two triggers; after a kill it goes on just before that.

    Rows belong to the trigger that follows when they are seen.
    """

    def __init__(self, keep):
        kept = int(keep.read_text()) if keep.exists() else 0
        super().__init__(max(0, kept - 2 * MINUTE // 3), keep=keep)

    def wait(self, until, stop):
        rows_come = (self.time + MINUTE // 2) // MINUTE * MINUTE + MINUTE // 2
        super().wait(min(until, rows_come), stop)


class EveryMinute:
    """A live source that can be read again from anywhere: a chunk of rows each minute."""

    bounded, replayable = False, True

    def __init__(self, clock):
        self._clock = clock

    def partitions(self):
        return ["rows"]

    def columns(self, partition):
        return {"user": pa.string(), "page": pa.string(), "at": pa.int64()}

    def read(self, partition, position, *, columns=None, until=None):
        number = position or 0
        at = number * MINUTE + MINUTE // 2
        come = at <= self._clock.now() if until is None else number < until
        size = 6 if come else 0
        rows = {
            "user": [f"u{(number * 7 + n * n) % 50}" for n in range(size)],
            "page": [f"/{1 + (number + n) % 2}" for n in range(size)],
            "at": [at] * size,
        }
        schema = pa.schema(list(self.columns(partition).items()))
        table = pa.table(rows, schema=schema)
        return Batch(table=table, position=number + bool(size), done=not size)

    def close(self):
        pass


class Noted:
    """A sink that notes the digest of each release, again whenever it comes again."""

    def __init__(self, path, most):
        self._file, self._left = path.open("a"), most

    def write(self, name, window, trigger, table):
        """The process is killed after so many releases, when all queries have taken a step.

        (One that has not logged its step sees rows of later on after a restart, as it must.)
        """
        content = hashlib.sha256(b"".join(json.dumps(row).encode() for row in rows_of(table)))
        print(name, window, trigger, content.hexdigest()[:16], file=self._file, flush=True)
        self._left -= 1
        if self._left <= 0 and name == "series":
            kill_this_process()

    def close(self):
        self._file.close()


def rows_of(table):
    return [{name: str(value) for name, value in row.items()} for row in table.to_pylist()]


def live_on(place, *, most=1 << 40, compacted=True):
    """One life of the three queries: to the end, or until a kill after `most` releases."""
    place.mkdir(exist_ok=True)
    clock = HalfMinutes(place / "clock")

    def now():
        moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=clock.now())
        return moment.isoformat(timespec="milliseconds")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers, "_now", now)
        patch.setattr(ledgers, "_VERBATIM", timedelta(hours=1))
        patch.setattr(ledgers, "_WORTHWHILE", 64)
        patch.setattr(ledgers, "_KEEP", 64)
        patch.setattr(journal, "LARGE", (1 << 14) if compacted else (1 << 40))
        patch.setattr(os, "fsync", lambda descriptor: None)  # kills lose nothing that is written
        book = dps.Ledger(place / "book", backups=timedelta(hours=1))
        book.open("users", QUERIES[0].promise(epsilon=20, delta=1e-2))
        sink, runs = Noted(place / "published", most), []
        for dataset, asked in (("users", QUERIES[:2]), ("series", QUERIES[2:])):
            runs.append(
                dps.run_all(
                    asked, source=EveryMinute(clock), live=True, sink=sink, dataset=dataset,
                    state=place / dataset, secret=SECRET, ledger=book, clock=clock,
                    options=options(every=20),
                )
            )  # fmt: skip
        found = []
        with Runs.together(runs) as both:
            for number, _ in enumerate(both):
                assert not both.failures  # one that fails stops alone
                if number % 20 == 19:
                    found.append(measure(place))
                if clock.now() > (TRIGGERS // 3 + 1) * MINUTE:
                    both.stop()
        book.close()
    return found


def measure(place):
    """What must not grow: bytes of memory, threads, open files, files on disk and their bytes."""
    status = Path("/proc/self/status").read_text().split("\n")
    (memory,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
    sizes = {}
    for path in place.rglob("*"):
        with suppress(FileNotFoundError):  # it is gone since it was listed
            if path.is_file() and path.name != "published":
                sizes[path] = path.stat().st_size
    journals = [path for path in sizes if path.name == "book" or path.suffix == ".log"]
    return {
        "memory": memory,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "journals": sum(sizes[path] for path in journals),
    }


def published(place):
    """(query, window, trigger) -> the digest, which must be the same whenever it came."""
    found = defaultdict(set)
    for line in (place / "published").read_text().splitlines():
        *name, content = line.split()
        found[tuple(name)].add(content)
    assert [name for name, contents in found.items() if len(contents) > 1] == []
    return {name: contents.pop() for name, contents in found.items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What a life without kills publishes, and what it takes as it goes on."""
    place = tmp_path_factory.mktemp("soak") / "whole"
    measured = live_on(place, compacted=False)
    return published(place), measured


def test_nothing_grows_in_a_process(unbroken):
    """Memory, threads, open files, files on disk."""
    expected, measured = unbroken
    third = len(measured) // 3
    # pools start their threads when they are first needed; what leaks at a trigger leaks hundreds
    slack = {"memory": 16 << 20, "threads": 4, "descriptors": 4, "files": 6}

    assert len(expected) >= TRIGGERS
    for what, more in slack.items():
        first, last = (
            max(m[what] for m in part) for part in (measured[:-third], measured[-third:])
        )
        assert last <= first + more, what


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_life_with_kills_is_as_one_without(tmp_path, unbroken, seed):
    """The same bytes; what lies on the disk does not grow from life to life."""
    (expected, measured), sizes, rng = unbroken, [], np.random.default_rng(seed)
    status = -9
    while status == -9:
        most = int(rng.integers(*LIVES))
        status = run_in_fork(lambda most=most: live_on(tmp_path / "killed", most=most))
        sizes.append(measure(tmp_path / "killed"))

    assert status == 0
    assert published(tmp_path / "killed") == expected
    assert len(sizes) > TRIGGERS / max(LIVES)
    for what in ("files", "bytes", "journals"):
        early, late = (max(m[what] for m in part) for part in (sizes[:-2], sizes[-2:]))
        assert late < 1.3 * early, what
    assert sizes[-1]["journals"] < measured[-1]["journals"] * 0.7
