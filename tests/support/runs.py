"""Small runs on the embedded engine that tests break off, kill and damage."""

import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.engines.query_run import EngineOptions
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import AfterReleases, KindOfRun

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


SHARING = query(public_groups=[f"/{n}" for n in range(1, 5)], max_groups_contributed=4)
"""Groups have a part of the noise of their last release alike."""
SHARING_CHOSEN = replace(SHARING, choose_groups=True)
"""The same, in periods that choose how many groups of a unit count."""
SHORT = query(
    aggregates=(dps.Count("clicks"),),
    end="1970-01-01T04:00",
    window=dps.Tumble("2 hours"),
    allowed_lateness="1 hour",
    privacy_unit_period="2 hours",
)
"""5 steps, 2 windows: for what is done a hundred times."""

CHOOSING = query(
    aggregates=(dps.Count("clicks"), dps.CountUnits("users")),
    window=dps.Tumble("1 hour"),
    every="30 minutes",
    allowed_lateness="30 minutes",
    privacy_unit_period="2 hours",
    max_groups_contributed="auto",
    epsilon=20,
)
"""17 steps, 8 windows, 4 periods: the bounds of the last two follow from what is published."""
CHOOSING_ALL = replace(
    CHOOSING,
    max_rows_per_group="auto",
    max_rows_contributed=None,
    aggregates=(
        dps.Count("clicks"),
        dps.CountUnits("users"),
        dps.Sum("time", column="seconds", contribution_bounds_per_row=(0, "auto")),
        dps.Avg("mean", column="seconds", contribution_bounds_per_row="auto"),
    ),
)
"""The same, and rows in a group and two clamps besides."""

LOOKING_BACK = dps.sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY
         OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user, time_unit = 's',
                  arrival_column = came, start = '1970-01-01', end = '1970-01-01T08:00',
                  allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 3,
                  max_rows_per_group = 2)
         page, COUNT(*) AS clicks,
         clicks - LAG(clicks) OVER (PARTITION BY page ORDER BY window_start) AS change,
         SUM(clicks) OVER (PARTITION BY page ORDER BY window_start) AS so_far,
         SMOOTH(clicks) OVER (PARTITION BY page ORDER BY window_start) AS level,
         SHRINK(clicks) OVER () AS shrunk
       FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '2' HOUR) GROUP BY window_start, page
       EMIT EVERY INTERVAL '1' HOUR""",
    name="clicks",
)
"""9 steps, 4 windows, each beside the ones before it."""

_OF_UNITS = """WITH DIFFERENTIAL_PRIVACY
         OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user, time_unit = 's',
                  arrival_column = came, start = '1970-01-01', end = '1970-01-01T08:00',
                  allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 4,
                  max_rows_per_group = 1)"""
PER_UNIT = {
    "figures": dps.sql(
        f"""SELECT {_OF_UNITS} n, first, COUNT(*) AS users, window_start,
              SUM(spent, contribution_bounds_per_row => (0, 200)) AS spent
            FROM (SELECT user, window_start, COUNT(*) AS n, FIRST(page) AS first,
                         SUM(seconds) / 3 AS spent
                  FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '2' HOUR)
                  GROUP BY user, window_start HAVING COUNT(DISTINCT page) < 4)
            GROUP BY window_start, n, first""",
        name="clicks",
    ),
    "sessions": dps.sql(
        f"""SELECT {_OF_UNITS} rows_, window_start, COUNT(*) AS sessions,
              MEDIAN(seconds, contribution_bounds_per_row => (0, 7200)) AS length
            FROM TUMBLE((SELECT user, session_start, COUNT(*) AS rows_,
                                TIMESTAMP_DIFF(session_end, session_start, SECOND) AS seconds
                         FROM SESSION(log, DESCRIPTOR(at), INTERVAL '20' MINUTE)
                         GROUP BY user, session_start, session_end),
                        DESCRIPTOR(session_start), INTERVAL '2' HOUR)
            GROUP BY window_start, rows_""",
        name="clicks",
    ),
    "first rows": dps.sql(
        f"""SELECT {_OF_UNITS} page, window_start, COUNT(DISTINCT user) AS users
            FROM (SELECT user, window_start, page FROM TUMBLE(log, DESCRIPTOR(at),
                         INTERVAL '2' HOUR) WHERE seconds > 3
                  QUALIFY ROW_NUMBER() OVER (PARTITION BY user, window_start ORDER BY at) = 1)
            GROUP BY window_start, page""",
        name="clicks",
    ),
    "funnel": dps.sql(
        f"""SELECT {_OF_UNITS} step, step_name, window_start, COUNT(*) AS users
            FROM FUNNEL(TUMBLE(log, DESCRIPTOR(at), INTERVAL '2' HOUR),
                        steps => (page = '/1' AS one, page <> '/1' AS other, seconds > 30 AS long),
                        within => INTERVAL '1' HOUR)
            GROUP BY window_start, step, step_name EMIT EVERY INTERVAL '1' HOUR""",
        name="clicks",
    ),
    "retention": dps.sql(
        f"""SELECT {_OF_UNITS} lag, window_start, COUNT(*) AS users
            FROM RETENTION(log, DESCRIPTOR(at), first => page = '/1', again => seconds > 9,
                           period => INTERVAL '2' HOUR, lags => 2)
            GROUP BY window_start, lag""",
        name="clicks",
    ),
}
"""4 steps (a funnel's 9), 4 windows that overlap by an hour of lateness: rows wait while others are
published."""


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


def group_by(asked=None, rows=None, **named):
    """Runs of a query, each over the rows that lie in its folder."""
    return KindOfRun(
        prepare=lambda place: write(place, table() if rows is None else rows),
        start=lambda place: start(place, asked, **named),
        published=published,
        charges=lambda place: charges(place / "state" / "ledger"),
    )


def break_off(place, releases, asked=None, **named):
    """Leave a run after some releases, without a snapshot of where it was."""
    assert AfterReleases(releases).strike(group_by(asked, **named), place)


def published(place):
    """Every file of the sink."""
    return {path.name: path.read_bytes() for path in sorted((place / "out").iterdir())}


def whole(place, asked=None, rows=None, **named):
    """What an unbroken run publishes."""
    return group_by(asked, rows, **named).unbroken(place)


def charges(ledger):
    return sum("amount" in record for record in dps.Ledger(ledger).history())


def series(asked, rows):
    """Runs of a mechanism over a query's windows; their sink looks at what comes again."""
    settings = EngineOptions(run_id=RUN, snapshot_every=5)
    return KindOfRun(
        start=lambda place: dps.run(
            asked,
            source=rows,
            sink=CheckingSink(place, lambda: None),
            state=place / "state",
            secret=SECRET,
            options=settings,
        ),
        published=published,
        charges=lambda place: spent_on(place / "state" / "ledger"),
    )


def stepped(mechanism, block):
    """A Runner that is fed row by row, saved after every second step; a file for each release."""

    def start(place):
        with dps.Runner(mechanism, state=place / "state", secret=SECRET, run_id=RUN) as runner:
            for step in range(runner.steps_done, len(block)):
                for release in runner.step(block[step]):
                    keep_release(place / "out", release)
                    yield release
                if step % 2:
                    runner.save()

    return KindOfRun(
        start=start,
        published=published,
        charges=lambda place: spent_on(place / "state" / "ledger"),
    )


def keep_release(folder, release):
    """Write a Runner's release to a file; one that comes again must have the bytes it had."""
    folder.mkdir(exist_ok=True)
    path, content = folder / f"{release.step:04d}", release.values.tobytes()
    if path.exists():
        assert path.read_bytes() == content, f"step {release.step} came again with other values"
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


def spent_on(ledger):
    """What a run was charged for, and how much."""
    (book,) = dps.Ledger(ledger).report()
    return [(line["purpose"], line["amount"], line["charges"]) for line in book["spent_on"]]
