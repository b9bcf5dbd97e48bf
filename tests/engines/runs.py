"""Small runs that tests break off, kill and damage."""

import os
import time
import traceback
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dpstream as dps
from benchmarks.recovery_child import killer, watched
from dpstream.engines.query_run import EngineOptions

SECRET, RUN = bytes(range(32)), bytes(range(16))
HOUR = 3600


def query(**changes):
    """10 steps, 2 windows that overlap by an hour of lateness, 2 periods."""
    asked = {
        "name": "clicks",
        "privacy_unit_column": "user",
        "keys": ("page",),
        "aggregates": (
            dps.Count("clicks"),
            dps.Sum("seconds", column="seconds", contribution_bounds_per_row=(0, 60)),
            dps.Avg("mean", column="seconds", contribution_bounds_per_row=(0, 60)),
        ),
        "epsilon": 8,
        "delta": 1e-5,
        "time_column": "at",
        "time_unit": "s",
        "arrival_column": "came",
        "start": "1970-01-01",
        "end": "1970-01-01T08:00",
        "window": dps.Tumble("4 hours"),
        "every": "1 hour",
        "allowed_lateness": "2 hours",
        "privacy_unit_period": "4 hours",
        "max_groups_contributed": 3,
        "max_rows_per_group": 2,
    }
    return dps.Query(**(asked | changes))


SHORT = query(
    aggregates=(dps.Count("clicks"),),
    end="1970-01-01T04:00",
    window=dps.Tumble("2 hours"),
    allowed_lateness="1 hour",
    privacy_unit_period="2 hours",
)
"""5 steps, 2 windows: for what is done a hundred times."""


def table(rows=600, seed=1):
    """Rows in no order; some come too late, some users pass the bounds."""
    rng = np.random.default_rng(seed)
    at = rng.integers(0, 8 * HOUR, rows)
    return pa.table(
        {
            "user": [f"user {n}" for n in rng.integers(0, rows // 4, rows)],
            "page": [f"/{n}" for n in np.minimum(rng.zipf(1.6, rows), 9)],
            "at": at,
            "came": at + rng.exponential(HOUR, rows).astype(np.int64),
            "seconds": rng.integers(0, 70, rows),
        }
    )


def write(place, rows):
    """The rows as the source of the runs in `place`."""
    place.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, place / "rows.parquet", row_group_size=200)


def start(place, asked=None, *, every=2, fixed=True, **named):
    """A run over `place/rows.parquet`, with all that it leaves beside that file."""
    settings = {
        "source": place / "rows.parquet",
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET if fixed else None,
        "options": options(every, RUN if fixed else None),
    }
    return dps.run(asked or query(), **(settings | named))


def options(every=2, run_id=RUN):
    return EngineOptions(buckets=2, threads=2, snapshot_every=every, run_id=run_id)


def break_off(place, releases, asked=None, **named):
    """Leave a run after some releases, without a snapshot of where it was."""
    running = iter(start(place, asked, **named))
    for _ in range(releases):
        next(running)
    running.close()


def published(place):
    """Every file of the sink."""
    return {path.name: path.read_bytes() for path in sorted((place / "out").iterdir())}


def whole(place, asked=None, rows=None, **named):
    """What an unbroken run publishes."""
    write(place, table() if rows is None else rows)
    start(place, asked, **named).finish()
    return published(place)


def charges(ledger):
    return sum("amount" in record for record in dps.Ledger(ledger).history())


def forked(work):
    """Do the work in a process of its own; how it ended: 0, 1 for an exception, or -signal."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(work, nth, where="any", torn=False):
    """Do the work in a process that kills itself before an operation on the disk."""
    job = {"kill": {"where": where, "nth": nth, "torn": torn}}

    def inside():
        with watched(killer(job, Counter())):
            work()

    return forked(inside)


def until(reached, seconds=30):
    """Poll."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)
