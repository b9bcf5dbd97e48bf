"""Queries that group the rows of each unit: killed, restarted, live, together, moved, erased."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput
from dpstream.privacy.state import read_packed
from dpstream.privacy.state.backup import move
from tests.support.kill_and_replay import AfterReleases, BeforeDiskOperation, kill_and_replay
from tests.support.live_runs import HOUR, ScriptedClock, drop, start_all
from tests.support.runs import PER_UNIT, charges, group_by, published, start, table, write

SESSIONS = PER_UNIT["sessions"]
ALL_SESSIONS = """
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user, time_unit = 's',
                    arrival_column = came, start = '1970-01-01', end = '1970-01-01T08:00',
                    allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 4,
                    max_rows_per_group = 8)
           window_start, COUNT(*) AS sessions
    FROM TUMBLE((SELECT user, session_start, COUNT(*) AS n
                 FROM SESSION(log, DESCRIPTOR(at), INTERVAL '20' MINUTE)
                 GROUP BY user, session_start),
                DESCRIPTOR(session_start), INTERVAL '2' HOUR)
    GROUP BY window_start"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What a run over 600 rows publishes that nobody kills, by name."""
    return {
        name: group_by(asked).unbroken(tmp_path_factory.mktemp("whole"))
        for name, asked in PER_UNIT.items()
    }


def test_sessions_are_those_of_the_rows(tmp_path):
    """Late rows count until their window closes; at six deviations."""
    rows = table(6000)
    write(tmp_path, rows)
    asked = dps.sql(ALL_SESSIONS, name="clicks")
    shown = pa.concat_tables(start(tmp_path, asked)).to_pylist()
    kept = rows.to_pandas()
    kept["window"] = kept["at"] // 7200
    kept = kept[kept["came"] < kept["window"] * 7200 + 3 * 3600].sort_values(["user", "at"])
    new = ~(kept.groupby(["user", "window"])["at"].diff() <= 1200)

    for one, sessions in zip(shown, new.groupby(kept["window"]).sum(), strict=True):
        assert abs(one["sessions"] - sessions) < 6 * one["sessions_stddev"] < sessions / 2


@pytest.mark.parametrize("name", PER_UNIT)
def test_a_run_that_was_broken_off_goes_on(engine, tmp_path, unbroken, name):
    """With rows that wait in what was saved."""
    kills = [AfterReleases(1), AfterReleases(1)]
    after = kill_and_replay(group_by(PER_UNIT[name], every=1, engine=engine), tmp_path, kills)

    assert (after.published, after.charges) == (unbroken[name], 1)


KILLS = [("sessions", 20), ("sessions", 45), ("sessions", 60), ("funnel", 70), ("retention", 50)]


@pytest.mark.parametrize(("name", "nth"), KILLS)
def test_a_killed_run_publishes_the_same_bytes(tmp_path, unbroken, name, nth):
    """Wherever it is killed; the buckets are others than those of the fixture."""
    kind = group_by(PER_UNIT[name], options=EngineOptions(buckets=3, snapshot_every=1, run_id=bytes(
        range(16))))  # fmt: skip
    after = kill_and_replay(kind, tmp_path, BeforeDiskOperation(nth))

    assert (after.published, after.charges) == (unbroken[name], 1)


def test_a_moved_run_goes_on(tmp_path, unbroken):
    """What waits goes along."""
    place = tmp_path / "run"
    write(place, table())
    run = start(place, SESSIONS, every=1)
    for _ in run:
        run.stop()
    move(place / "state", place / "elsewhere", because="a test", who="a test")
    start(place, SESSIONS, state=place / "elsewhere").finish()

    assert published(place) == unbroken["sessions"]


def test_an_erased_unit_leaves_no_row_that_waits(tmp_path):
    """Its rows of open windows go; the others' inner rows are what they were."""
    rows = table(900)
    heavy = pa.table(
        {
            "user": ["heavy"] * 60,
            "page": ["/1"] * 60,
            "at": np.arange(60) * 30 + 7200,
            "came": np.full(60, 7200 + 1800),
            "seconds": np.full(60, 60),
        }
    ).cast(rows.schema)
    query, shown = PER_UNIT["figures"], []
    write(tmp_path, pa.concat_tables([rows, heavy]))
    run = start(tmp_path, query, every=1)
    for _ in run:
        run.stop()
    waiting = _waiting(tmp_path)
    assert start(tmp_path, query).erase_unit("heavy") == 1
    assert waiting - _waiting(tmp_path) == 60
    shown += list(start(tmp_path, query))

    assert not any(60 in one["n"].to_pylist() for one in shown)
    assert start(tmp_path, query).finish().steps_done == 4


def test_an_erased_unit_begins_no_other_cohort(tmp_path):
    """Its cohort goes, and it stays marked as full."""
    rows = table(900)
    new = pa.table(
        {
            "user": ["new"] * 400,
            "page": ["/1"] * 400,
            "at": np.repeat([10, 10 + 2 * 7200], 200),
            "came": np.repeat([10, 10 + 2 * 7200], 200),
            "seconds": np.full(400, 60),
        }
    ).cast(rows.schema)
    write(tmp_path, pa.concat_tables([rows, new]))
    run = start(tmp_path, PER_UNIT["retention"], every=1)
    for _ in run:
        run.stop()
    waiting = _waiting(tmp_path)
    start(tmp_path, PER_UNIT["retention"]).erase_unit("new")
    assert _waiting(tmp_path) == waiting - 1
    erased = list(start(tmp_path, PER_UNIT["retention"]))

    write(tmp_path / "other", rows)
    other = list(start(tmp_path / "other", PER_UNIT["retention"]))
    assert [one["users"].to_pylist() for one in erased] == [
        one["users"].to_pylist() for one in other[1:]
    ]


def _waiting(place):
    """How many rows wait in the newest snapshot."""
    manifests = sorted((place / "state").glob("manifest-*.dps"), key=lambda p: p.stat().st_mtime)
    chains = read_packed(manifests[-1], kind="manifest")["chains"]
    segments = [
        read_packed(place / "state" / "segments" / name, kind="segment")
        for _, _, chain in chains
        for name, *_ in chain
    ]
    return sum(len(piece["steps"]) for one in segments for piece in one.get("held", ()))


LIVE = """
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 8, delta = 1e-3, privacy_unit_column = user, time_unit = 'us',
                    start = '1970-01-01', end = '1970-01-01 06:00',
                    allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 2)
           window_start, COUNT(*) AS users, SUM(n, contribution_bounds_per_row => (0, 9)) AS n
    FROM (SELECT user, window_start, COUNT(*) AS n
          FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR) GROUP BY user, window_start)
    GROUP BY window_start"""
PLAIN = LIVE.replace("SUM(n, contribution_bounds_per_row => (0, 9)) AS n", "COUNT(*) AS n")
PLAIN = PLAIN[: PLAIN.index("FROM (")] + (
    "FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR) GROUP BY window_start"
)


def _arrivals(place):
    """Each hour 40 users have 3 rows, of which one comes an hour late."""

    def action(hour, late):
        users = [f"u{n}" for n in range(40)] * (1 if late else 2)
        at = [hour * HOUR + n for n in range(len(users))]
        rows = pa.table({"user": users, "page": ["/1"] * len(users), "at": pa.array(at)})
        return lambda: drop(place / "in", f"{hour}-{late}.parquet", rows)

    return [
        *((hour * HOUR + HOUR // 2, action(hour, False)) for hour in range(6)),
        *((hour * HOUR + 3 * HOUR // 2, action(hour, True)) for hour in range(6)),
    ]


def test_two_queries_live_one_of_them_per_unit(tmp_path):
    """Rows that come within the lateness are of their unit's inner row."""
    queries = [dps.sql(LIVE, name="units"), dps.sql(PLAIN, name="plain", max_rows_per_group=9)]
    for _ in start_all(tmp_path, queries, ScriptedClock(0, _arrivals(tmp_path))):
        pass
    shown = {
        (name, w): pq.read_table(next((tmp_path / "out").glob(f"{name}-w00000{w}-*"))).to_pylist()
        for name in ("units", "plain")
        for w in (0, 1)
    }
    for window in (0, 1):
        (units,), (plain,) = shown["units", window], shown["plain", window]
        # six deviations: 40 users, 9 rows each
        assert abs(units["users"] - 40) < 6 * units["users_stddev"] < 40
        assert abs(units["n"] - 360) < 6 * units["n_stddev"] < 360
        assert abs(plain["n"] - 360) < 6 * plain["n_stddev"]
    assert charges(tmp_path / "book") == 2


BESIDE = LIVE[: LIVE.index("window_start, COUNT")]
FUNNEL = f"""{BESIDE} window_start, step, COUNT(*) AS users
    FROM FUNNEL(TUMBLE(log, DESCRIPTOR(at), INTERVAL '3' HOUR),
                steps => (page = '/1' AS one, page = '/1' AS two, page = '/2' AS other))
    GROUP BY window_start, step EMIT EVERY INTERVAL '1' HOUR"""
RETENTION = f"""{BESIDE} window_start, lag, COUNT(*) AS users
    FROM RETENTION(log, DESCRIPTOR(at), first => page = '/1', again => TRUE,
                   period => INTERVAL '3' HOUR, lags => 1)
    GROUP BY window_start, lag"""


def test_a_funnel_and_cohorts_live_side_by_side(tmp_path):
    """The funnel fills while its window is open; whoever began in the first one is back."""
    queries = [
        dps.sql(FUNNEL, name="funnel", max_groups_contributed=6),
        dps.sql(RETENTION, name="cohorts"),
    ]
    for _ in start_all(tmp_path, queries, ScriptedClock(0, _arrivals(tmp_path))):
        pass

    def shown(name, window, release):
        (path,) = (tmp_path / "out").glob(f"{name}-w00000{window}-t00000{release}*")
        return pq.read_table(path).to_pylist()

    for release in (1, 4):  # of window 0, with an hour of lateness
        for row, truth in zip(shown("funnel", 0, release), (40, 40, 0), strict=True):
            assert abs(row["users"] - truth) < 6 * row["users_stddev"] < 40
    assert [row["lag"] for row in shown("cohorts", 0, 1)] == [0]
    for row, truth in zip(shown("cohorts", 1, 1), (0, 40), strict=True):
        assert abs(row["users"] - truth) < 6 * row["users_stddev"] < 40
    assert charges(tmp_path / "book") == 2


def test_inner_rows_that_cannot_be_used_are_told_without_their_values(tmp_path):
    """A key that is too long; the letter names no value, and no unit."""
    rows = pa.table({"user": ["a", "a", "b", "c"], "x": ["secret", "sea", "x", "y"]})
    query = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-3,
             privacy_unit_column = user) key, COUNT(*) AS n
           FROM (SELECT user, MAX(x) AS key FROM log GROUP BY user) GROUP BY key""",
        max_key_bytes=3,
        max_groups_contributed=1,
    )
    run = dps.run(query, source=rows, state=tmp_path / "state", dead_letters=tmp_path / "dead")
    run.finish()
    letters = "".join(path.read_text() for path in (tmp_path / "dead").rglob("*.jsonl"))

    assert run.operator.rejected_rows == 1
    assert letters.count("an inner row") == letters.count("oversize key") == 1
    assert "secret" not in letters
    assert '"a"' not in letters


def test_whole_numbers_beyond_those_of_floats_end_no_run_and_are_told_nowhere(tmp_path):
    """The query is paid for when it meets them."""
    found = [2**53 + 1, -(2**53) - 1, 2**62]
    rows = pa.table({"user": ["a", "b", "c", "d"], "x": [*found, 3]})
    query = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-3,
             privacy_unit_column = user)
             COUNT(*) AS n, SUM(y, contribution_bounds_per_row => (0, 9)) AS y,
             SUM(z, contribution_bounds_per_row => (0, 9)) AS z
           FROM (SELECT user, SUM(x) AS y, AVG(x) AS z FROM log GROUP BY user)"""
    )
    run = dps.run(query, source=rows, state=tmp_path / "state", dead_letters=tmp_path / "dead")
    (release,) = run
    told = str(run.operator.counts()) + "".join(
        path.read_text() for path in (tmp_path / "dead").rglob("*") if path.is_file()
    )
    assert release.num_rows == 1
    assert not any(str(abs(value)) in told for value in found)


def test_numbers_are_looked_at_before_they_wait():
    """A text that is no number costs its own row."""
    rows = pa.table({"user": ["a", "a", "b"], "x": ["1", "much", "2"]})
    query = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-3,
             privacy_unit_column = user)
             SUM(y, contribution_bounds_per_row => (0, 9)) AS n
           FROM (SELECT user, SUM(x) AS y FROM log GROUP BY user)"""
    )
    run = dps.run(query, source=rows)
    run.finish()
    assert run.operator.counts()["rejected"] == 1
    with pytest.raises(InvalidInput, match="has no column 'x'"):
        dps.run(query, source=rows.drop_columns(["x"]))
