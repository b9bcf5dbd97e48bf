"""FUNNEL and RETENTION as they are written and published: figures, shares, their intervals."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.sql_compiler.published_shares import Confidence

DAY = 86_400
START = datetime(2024, 5, 1, tzinfo=UTC)
OPTIONS = (
    "epsilon = 8, delta = 1e-6, privacy_unit_column = user, start = '2024-05-01', "
    "end = '2024-05-06', max_groups_contributed = 15"
)
FUNNEL = "steps => (page = 'a' AS see, page = 'b' AS try, page = 'c' AS buy)"


@pytest.fixture(scope="module")
def log():
    """Five days of pages of 3,000 users, half of them on a phone."""
    rng = np.random.default_rng(5)
    users = rng.integers(0, 3_000, 20_000)
    return pa.table(
        {
            "user": users,
            "page": np.array(["a", "b", "c"])[np.minimum(rng.zipf(1.8, 20_000) - 1, 2)],
            "phone": users % 2 == 0,
            "ts": np.datetime64("2024-05-01", "s") + np.sort(rng.integers(0, 5 * DAY, 20_000)),
        }
    )


def reached(rows, within):
    """How many users reach each step, of (ts, page) of each user; one row after the other."""
    counts = [0, 0, 0]
    for mine in rows.values():
        ways, best = [], 0  # (when it began, steps)
        for ts, page in sorted(mine):
            step = "abc".index(page)
            ways += [(b, s + 1) for b, s in ways if s == step and ts - b <= within]
            ways += [(ts, 1)] if step == 0 else []
            best = max([best, *(s for _, s in ways)])
        for step in range(best):
            counts[step] += 1
    return counts


def by_user(log, key=lambda row: row["user"]):
    """(ts, page) of each user, or whatever the key is."""
    found = defaultdict(list)
    for row in log.to_pylist():
        found[key(row)].append((row["ts"], row["page"]))
    return found


def near(found, deviation, truth):
    """At six deviations: a false alarm in 5e8."""
    return abs(found - truth) <= 6 * deviation


def test_a_funnel_counts_who_reaches_each_step(log):
    """By a key, too; shares are of the step before."""
    query = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS}, max_rows_per_group = 1)
               phone, step, step_name, COUNT(*) AS users
        FROM FUNNEL(log, DESCRIPTOR(ts), {FUNNEL}, within => INTERVAL '36' HOUR, by => phone)
        GROUP BY phone, step, step_name"""
    (release,) = dps.run(dps.sql(query), source=log)
    rows = release.to_pylist()
    assert [row["step_name"] for row in rows] == ["see", "try", "buy"] * 2
    for phone in (True, False):
        mine = by_user(log.filter(pa.array(np.asarray(log["phone"]) == phone)))
        truths = reached(mine, timedelta(hours=36))
        for row, truth in zip((r for r in rows if r["phone"] == phone), truths, strict=True):
            assert near(row["users"], row["users_stddev"], truth)
            if row["step"] > 1:
                before = truths[row["step"] - 2]
                assert row["users_share_low"] <= row["users_share"] <= row["users_share_high"]
                assert abs(row["users_share"] - truth / before) < 0.1
            else:
                assert row["users_share"] is row["users_share_low"] is None


def test_windows_may_overlap(log):
    """Each has a funnel of its own."""
    query = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS})
               window_start, step, COUNT(DISTINCT user) AS users
        FROM FUNNEL(HOP(log, DESCRIPTOR(ts), INTERVAL '1' DAY, INTERVAL '2' DAY), {FUNNEL})
        GROUP BY window_start, step"""
    for release in dps.run(dps.sql(query, max_groups_contributed=18), source=log):
        rows = release.to_pylist()
        start, end = (rows[0][name] for name in ("window_start", "window_end"))
        inside = [start <= ts.replace(tzinfo=UTC) < end for ts in log["ts"].to_pylist()]
        truths = reached(by_user(log.filter(pa.array(inside))), timedelta(days=9))
        for row, truth in zip(rows, truths, strict=True):
            assert near(row["users"], row["users_stddev"], truth)


@pytest.mark.parametrize("delta", [1e-6, 0])
def test_cohorts_and_who_came_back(log, delta):
    """Each window a diagonal; the share is of the cohort's own size, an earlier window's."""
    options = OPTIONS.replace("delta = 1e-6, ", f"delta = {delta}, " if delta else "")
    query = f"""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({options})
               window_start, lag, COUNT(*) AS users
        FROM RETENTION(log, DESCRIPTOR(ts), first => page = 'b', again => page = 'a',
                       period => INTERVAL '1' DAY, lags => 2)
        GROUP BY window_start, lag"""
    asked = dps.sql(query)
    assert asked.bounds.groups == 3
    first = START.replace(tzinfo=None)
    days = by_user(log, key=lambda row: (row["user"], (row["ts"] - first).days))
    there = defaultdict(dict)
    for (user, day), rows in days.items():
        there[user][day] = {page for _, page in rows}
    truths = defaultdict(int)
    for mine in there.values():
        cohort = min((day for day, pages in mine.items() if "b" in pages), default=None)
        for day, pages in mine.items():
            if cohort is not None and (day == cohort or (day > cohort and "a" in pages)):
                truths[day, day - cohort] += 1
    for day, release in enumerate(dps.run(asked, source=log)):
        rows = release.to_pylist()
        assert [row["lag"] for row in rows] == [*range(min(day, 2) + 1)]
        for row in rows:
            lag = row["lag"]
            assert row["cohort"] == START + timedelta(days=day - lag)
            assert near(row["users"], row["users_stddev"], truths[day, lag])
            if lag:
                truth = truths[day, lag] / truths[day - lag, 0]
                assert abs(row["users_share"] - truth) < 0.25
                assert 0 <= row["users_share_low"] <= row["users_share_high"] <= 1
            else:
                assert row["users_share"] is None


def test_a_funnel_is_selected_from_like_any_private_query(log):
    """A SELECT around it reads its shares, too."""
    query = f"""
        SELECT step_name, users_share AS part FROM (
          SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS})
                 step, step_name, COUNT(*) AS users
          FROM FUNNEL(log, DESCRIPTOR(ts), {FUNNEL}) GROUP BY step, step_name)
        WHERE step > 1"""
    (release,) = dps.run(dps.sql(query), source=log)
    assert release["step_name"].to_pylist() == ["try", "buy"]
    assert {"part", "part_low", "part_high"} <= {*release.column_names}


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize(("part", "whole", "scale"), [(40, 60, 8), (2, 60, 8), (55, 60, 0.4)])
def test_intervals_of_shares_hold_the_true_one(normal, part, whole, scale):
    """In at least 95 of 100 cases; at five deviations of 20,000 trials (3e-7)."""
    rng, trials = np.random.default_rng(3), 20_000
    if normal:
        noise = rng.normal(0, scale, (2, trials))
        deviation = scale
    else:  # the difference of two geometric numbers is discrete Laplace noise
        p = 1 - np.exp(-1 / scale)
        noise = rng.geometric(p, (2, trials)) - rng.geometric(p, (2, trials))
        deviation = np.sqrt(2 * (1 - p)) / p
    deviations = np.full(trials, deviation)
    sure = Confidence(level=0.95, normal=normal)
    low, high = sure.interval((part + noise[0], deviations), (whole + noise[1], deviations))
    held = np.mean((low <= part / whole) & (part / whole <= high))
    assert held >= 0.95 - 5 * np.sqrt(0.95 * 0.05 / trials)
    assert scale > 1 or np.mean(high - low) < 0.2


OF_PYTHON = {
    "epsilon": 8,
    "delta": 1e-6,
    "privacy_unit_column": "user",
    "start": "2024-05-01",
    "end": "2024-05-06",
}


def test_python_writes_the_same_queries(log):
    """And they run."""
    steps = {"see": "page = 'a'", "try": "page = 'b'", "buy": "page = 'c'"}
    asked = dps.funnel(
        steps=steps, time_column="ts", within="36 hours", by=["phone"], window=dps.Tumble("1 day"),
        every="12 hours", max_groups_contributed=15, **OF_PYTHON
    )  # fmt: skip
    tables = list(dps.run(asked, source=log))
    assert len(tables) == 10
    assert {"phone", "step", "users_share_high"} <= {*tables[-1].column_names}

    options = OF_PYTHON | {"privacy_unit_period": "forever"}
    asked = dps.retention(
        first="page = 'b'", again="page = 'a'", period="1 day", lags=2, time_column="ts",
        by={"mobile": "IF(phone, 'yes', 'no')"}, **options
    )  # fmt: skip
    tables = list(dps.run(asked, source=log))
    assert {*tables[4]["mobile"].to_pylist()} == {"yes", "no"}
    assert {*tables[4]["lag"].to_pylist()} == {0, 1, 2}

    asked = dps.sessions(
        gap="6 hours", window="1 day", time_column="ts", most=4, longest="12 hours",
        by={"entry": "FIRST(page)"}, max_groups_contributed=5, **OF_PYTHON
    )  # fmt: skip
    tables = list(dps.run(asked, source=log))
    assert {*tables[0]["entry"].to_pylist()} == {"a", "b", "c"}
    assert all(0 <= value <= 12 * 3600 for value in tables[0]["seconds_p50"].to_pylist())


def test_a_unit_in_one_window_is_in_as_many_groups_as_there_are_steps():
    """Nobody need say so; of several windows, or further keys, it must be said."""
    options = OF_PYTHON | {"time_column": "ts", "steps": {"a": "x = 1", "b": "x = 2"}}
    daily = options | {"window": "1 day"}
    assert dps.funnel(**options).max_groups_contributed == 2
    assert dps.funnel(**daily, privacy_unit_period="1 day").max_groups_contributed == 2
    for more in ({}, {"privacy_unit_period": "2 days"}):
        with pytest.raises(dps.errors.InvalidParameter, match="max_groups_contributed"):
            dps.funnel(**daily, **more)
    with pytest.raises(dps.errors.InvalidParameter, match="max_groups_contributed"):
        dps.funnel(**options, by=["y"])


def test_python_says_what_is_wrong():
    """With the line to write."""
    with pytest.raises(dps.errors.InvalidParameter, match=r"write \['phone'\]"):
        dps.funnel(steps={"a": "x = 1", "b": "x = 2"}, time_column="ts", by="phone", **OF_PYTHON)
    with pytest.raises(dps.errors.InvalidParameter, match="whose sessions"):
        dps.sessions(gap="1 hour", window="1 day", time_column="ts", most=4, longest="1 hour")
    with pytest.raises(dps.errors.InvalidParameter, match="within must be"):
        dps.funnel(steps={"a": "x = 1", "b": "x = 2"}, time_column="ts", within=0.5, **OF_PYTHON)


def test_cohorts_have_no_bounds_to_choose(log):
    """A unit is in as many groups as there are lags, and one more."""
    asked = dps.retention(
        first="TRUE", again="TRUE", period="1 day", lags=2, time_column="ts", **OF_PYTHON
    )
    with pytest.raises(dps.errors.InvalidParameter, match="in 3 groups at most"):
        dps.bounds(asked, log, public=True)
