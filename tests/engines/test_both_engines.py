"""One suite for every engine: the same rows, schedule, secret and run id give the same releases."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

import dpstream as dps
from benchmarks import queries
from benchmarks.asked_queries import ALL, COMPUTED, JOINED, UNITED
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.spark import SparkEngine
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, StateError
from dpstream.privacy.state import Secret
from dpstream.privacy.state.inspection import describe
from tests.engines.test_dead_letters import (
    CSV,
    REASONS,
    TYPED,
    good_lines,
    hostile_rows,
    letters,
    write_lines,
)
from tests.support.fixed import RUN, SECRET
from tests.support.live_runs import ScriptedClock, arrivals, start_live, whole_live
from tests.support.long import is_long
from tests.support.runs import (
    CHOOSING,
    CHOOSING_ALL,
    LOOKING_BACK,
    PER_UNIT,
    SHARING,
    SHARING_CHOSEN,
    break_off,
    charges,
    published,
    query,
    start,
    table,
    whole,
    write,
)

HOUR = 3_600_000_000
SOME = [one for one in ALL if one.spark] if is_long() else [JOINED[8], UNITED[2], COMPUTED[1]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run of the embedded engine publishes, with other buckets."""
    place = tmp_path_factory.mktemp("expected")
    return whole(place, options=EngineOptions(buckets=3, threads=2, snapshot_every=4, run_id=RUN))


def releases(tables):
    """What a release says, apart from the types of Parquet files."""
    return [(t.schema.metadata, t.to_pydict()) for t in tables]


def test_rows_in_any_order_late_ones_too(engine, tmp_path, expected):
    """600 rows in no order, 2 hours of lateness, 2 windows, 3 aggregates: the same bytes."""
    write(tmp_path, table())
    run = start(tmp_path, engine=engine).finish()

    assert published(tmp_path) == expected
    came = np.array(table()["came"]) // 3600
    at = np.array(table()["at"]) // 3600
    assert run.operator.late == int((came >= at // 4 * 4 + 6).sum()) > 0


def test_rows_that_are_all_useless_cost_nothing(engine, tmp_path):
    """Refused before anything is charged or kept; a run that was charged is not looked at."""
    write(tmp_path, table())
    wrong = query(start="1990-01-01", end="1990-01-01T08:00", arrival_column=None)
    with pytest.raises(InvalidInput, match="set start and end, by what is known"):
        start(tmp_path, wrong, engine=engine)
    assert not (tmp_path / "state").exists()
    break_off(tmp_path, 1, wrong, engine=engine, anyway=True)
    start(tmp_path, wrong, engine=engine).finish()

    assert charges(tmp_path / "state" / "ledger") == 1


@pytest.mark.parametrize("done", [1, 5])
def test_a_run_that_was_broken_off_goes_on(engine, tmp_path, expected, done):
    write(tmp_path, table())
    break_off(tmp_path, done, engine=engine)
    assert published(tmp_path) != expected
    start(tmp_path, engine=engine).finish()

    assert published(tmp_path) == expected
    assert charges(tmp_path / "state" / "ledger") == 1


def test_earlier_windows_are_known_after_a_break(engine, tmp_path):
    """Differences, running totals and levels go on from what was published before."""
    unbroken = whole(tmp_path / "whole", LOOKING_BACK)
    write(tmp_path / "broken", table())
    break_off(tmp_path / "broken", 6, LOOKING_BACK, engine=engine)
    last = list(start(tmp_path / "broken", LOOKING_BACK, engine=engine))[-1]

    assert published(tmp_path / "broken") == unbroken
    assert last["change"].null_count < len(last)
    assert last["level"].to_pylist() != last["clicks"].to_pylist() != last["shrunk"].to_pylist()


@pytest.mark.parametrize(("done", "asked"), [(4, CHOOSING), (11, CHOOSING), (11, CHOOSING_ALL)])
def test_bounds_are_chosen_alike_after_a_break(engine, tmp_path, done, asked):
    """Before the first choice and after it, rows dated ahead of their periods wait; the tables say
    which bound they have."""
    rows = table(1500)
    early = np.maximum(np.array(rows["came"]) - 2 * 3600, 0)
    rows = rows.set_column(3, "came", pa.array(early))
    unbroken = whole(tmp_path / "whole", asked, rows=rows)
    write(tmp_path / "broken", rows)
    break_off(tmp_path / "broken", done, asked, engine=engine)
    last = list(start(tmp_path / "broken", asked, engine=engine))[-1]
    bounds = json.loads(last.schema.metadata[b"dpstream"])["bounds"]

    assert published(tmp_path / "broken") == unbroken
    assert bounds["max_groups_contributed"] != asked.first_choice
    clamps = bounds.get("contribution_bounds_per_row", {"time": [0.0, 60.0]})
    assert clamps["time"] != [0.0, 10.0]
    assert describe(tmp_path / "broken" / "state")["bounds"] == bounds
    assert bounds["since"] in ("1970-01-01T04:00:00+00:00", "1970-01-01T06:00:00+00:00")


def test_keys_are_due_without_data(engine, tmp_path):
    """Nothing comes after the first hour: every trigger publishes, with noise that moves on."""
    rows = table(4000)
    rows = rows.set_column(2, "at", pa.array(np.array(rows["at"]) % 3000))
    rows = rows.set_column(3, "came", rows["at"])
    write(tmp_path, rows)
    asked = query(allowed_lateness="0 seconds", epsilon=20, delta=1e-3)
    tables = list(start(tmp_path, asked, engine=engine))
    first = [t for t in tables if t["window_start"].to_pylist()[:1] == [_epoch()]]

    assert len(tables) == 8
    assert len(first) == 4
    assert all(len(one) for one in first)
    shown = [dict(zip(*(t[c].to_pylist() for c in ("page", "clicks")), strict=True)) for t in first]
    assert all(one.keys() >= before.keys() for before, one in pairwise(shown))
    figures = [tuple(one[page] for page in shown[0]) for one in shown]
    assert len(shown[0]) > 3
    assert len(set(figures)) == 4


def _epoch():
    return pa.scalar(0, pa.timestamp("us", tz="UTC")).as_py()


VARIANTS = {
    "sqlp": query(strategy="sqlp", epsilon=30),
    "debiased": query(debias="global", max_groups_contributed=1, confidence=0.9),
    "hop": query(window=dps.Hop("4 hours", slide="1 hour"), allowed_lateness="1 hour"),
    "cumulate": query(window=dps.Cumulate("4 hours", step="2 hours"), nonnegative=True),
    "public": query(public_groups=["/1", "/2", "nobody"], min_change=0.5),
    "no keys": query(keys=()),
    "variance, once": query(
        aggregates=(
            dps.Variance("v", column="seconds", contribution_bounds_per_row=(0, 60)),
            dps.CountUnits("units"),
        ),
        every=None,
        weights={"units": 3},
    ),
    "weighted keys": query(aggregates=(), weighted_keys=True, max_groups_contributed=5),
    "pairs of columns": query(
        aggregates=(
            dps.Correlation(
                "r",
                columns=("seconds", "at"),
                contribution_bounds_per_row=((0, 60), (0, 28_800)),
            ),
            dps.Slope(
                "s",
                columns=("seconds", "at"),
                contribution_bounds_per_row=((0, 60), (0, 28_800)),
            ),
        ),
        confidence=0.9,
    ),
    "quantiles": query(
        aggregates=(
            dps.Quantile("q", column="seconds", q=[0, 0.5, 1], contribution_bounds_per_row=(0, 60)),
            dps.Quantile("p", column="seconds", q=0.9, contribution_bounds_per_row=(0, 60)),
            dps.Histogram("h", column="seconds", edges=[0, 10, 60]),
            dps.Count("n"),
        ),
        confidence=0.9,
    ),
    "by choice": query(
        aggregates=(
            dps.Quantile(
                "q",
                column="seconds",
                q=[0.5, 0.9],
                contribution_bounds_per_row=(0, 60),
                mechanism="exponential",
            ),
            dps.Count("n"),
        ),
    ),
    "without delta": query(
        public_groups=["/1", "/2", "nobody"],
        delta=0,
        every=None,
        max_rows_per_group=2,
        aggregates=(
            dps.Quantile("q", column="seconds", q=0.5, contribution_bounds_per_row=(0, 60)),
            dps.Sum("s", column="seconds", contribution_bounds_per_row=(0, 60)),
        ),
    ),
    "a median alone, without delta": query(
        public_groups=["/1", "/2", "nobody"],
        delta=0,
        every=None,
        report_bias=False,
        aggregates=(
            dps.Quantile("q", column="seconds", q=0.5, contribution_bounds_per_row=(0, 60)),
        ),
    ),
    "looking back": LOOKING_BACK,
    "chosen bounds": CHOOSING,
    "chosen rows and clamps": CHOOSING_ALL,
    "noise that groups share": query(
        public_groups=[f"/{n}" for n in range(1, 5)],
        max_groups_contributed=4,
        max_rows_per_group=2,
        every=None,
        correlated_noise=True,
    ),
    "noise that groups share at last": SHARING,
    "noise that chosen groups share": SHARING_CHOSEN,
    "sets of keys": query(
        keys=("page", "seconds"),
        aggregates=(dps.Count("n"), dps.CountUnits("units")),
        grouping_sets=(("page", "seconds"), ("page",), ()),
        epsilon=12,
    ),
    "sets of public keys": query(
        keys=("page", "seconds"),
        public_groups=[(f"/{n}", seconds) for n in range(1, 5) for seconds in (3, 30)],
        grouping_sets=(("page", "seconds"), ("page",), ("seconds",), ()),
        grouping_set_weights=(2, 1, 1, 1),
        aggregates=(
            dps.Count("n"),
            dps.Avg("mean", column="seconds", contribution_bounds_per_row=(0, 60)),
        ),
    ),
    **PER_UNIT,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_query(engine, tmp_path, name):
    """What one process publishes, an engine publishes, in the schema that it tells beforehand."""
    write(tmp_path / "one", table(1500))
    write(tmp_path / "other", table(1500))
    one = list(start(tmp_path / "one", VARIANTS[name]))
    run = start(tmp_path / "other", VARIANTS[name], engine=engine)
    told = run.schema
    other = list(run)

    assert releases(one) == releases(other)
    assert {str(t.schema.remove_metadata()) for t in [*one, *other]} == {str(told)}
    assert sum(map(len, one)) > 0


def test_sql_with_expressions_order_and_limit(engine):
    """WHERE and computed columns before, ORDER BY and LIMIT after."""
    asked = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY
             OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user,
                      max_groups_contributed = 3)
             LOWER(page) AS place, COUNT(*) AS n
           FROM clicks WHERE seconds > 5 GROUP BY place ORDER BY n DESC LIMIT 3"""
    )
    settings = {"source": table(3000), "secret": SECRET, "options": EngineOptions(run_id=RUN)}
    one = list(dps.run(asked, **settings))
    other = list(dps.run(asked, **settings, engine=engine))

    assert releases(one) == releases(other)
    assert len(other[0]) == 3


def test_sql_with_lists_json_times_parameters_and_a_function_in_python(engine):
    """Executors compute what one process does, and import the function's module."""
    rows = table(3000)
    odd = ['{"a": ["x", "y"]}', "{", None, '{"a": [1]}'] * 750
    rows = rows.append_column("doc", pa.array(odd))
    asked = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY
             OPTIONS (epsilon = 20, delta = 1e-5, privacy_unit_column = user,
                      max_groups_contributed = 9)
             first(LOWER(page)) AS place, item, WIDTH_BUCKET(seconds, 0, @high, 2) AS bucket,
             COUNT(*) AS n
           FROM clicks LEFT JOIN UNNEST(JSON_VALUE_ARRAY(doc, '$.a')) AS item
           WHERE DATE_ADD(DATE '2024-01-31', INTERVAL 1 MONTH) < DATE '2024-03-01'
           GROUP BY ALL""",
        params={"high": 60},
        functions={"first": "tests.sql_compiler.test_user_functions:first_letter"},
    )
    settings = {"source": rows, "secret": SECRET, "options": EngineOptions(run_id=RUN)}
    one = list(dps.run(asked, **settings))
    other = list(dps.run(asked, **settings, engine=engine))

    assert releases(one) == releases(other)
    assert len(other[0]) > 3


MONTHLY = dps.sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY
         OPTIONS (epsilon = 8, delta = 1e-5, privacy_unit_column = user, time_unit = 's',
                  privacy_unit_period = INTERVAL '1' MONTH, time_zone = 'Europe/Rome',
                  start = '2024-01-01', end = '2024-06-01', max_groups_contributed = 1,
                  max_rows_per_group = 4, public_groups = ('a', 'b'))
         page, window_start, COUNT(*) AS clicks
       FROM TUMBLE(log, DESCRIPTOR(at), INTERVAL '1' MONTH) GROUP BY page, window_start
       EMIT EVERY INTERVAL '7' DAY""",
    name="clicks",
)


def test_months_are_windows_and_periods(engine, tmp_path):
    """Of a zone's calendar; broken off and begun again, the same bytes; bounds renew monthly."""
    rng = np.random.default_rng(5)
    at = np.sort(rng.integers(0, 152 * 24, 4000)) * 3600 + 1_704_063_600  # from Rome's 1 January
    rows = pa.table({"user": rng.integers(0, 300, 4000), "page": ["a"] * 4000, "at": at})
    expected = whole(tmp_path / "whole", MONTHLY, rows)
    write(tmp_path / "again", rows)
    break_off(tmp_path / "again", 11, MONTHLY, rows=rows, engine=engine)
    start(tmp_path / "again", MONTHLY, engine=engine).finish()

    assert published(tmp_path / "again") == expected
    last = {}
    for path in sorted((tmp_path / "whole" / "out").glob("*.parquet")):
        (row,) = (row for row in pq.read_table(path).to_pylist() if row["page"] == "a")
        last[row["window_start"]] = row
    local = pa.compute.month(pa.array(at, pa.timestamp("s", "Europe/Rome"))).to_numpy()
    kept = [Counter(np.asarray(rows["user"])[local == month].tolist()) for month in range(1, 6)]
    truth = [sum(min(4, count) for count in users.values()) for users in kept]
    assert [str(one)[:13] for one in last] == [
        "2023-12-31 23", "2024-01-31 23", "2024-02-29 23", "2024-03-31 22", "2024-04-30 22"
    ]  # fmt: skip
    for one, true in zip(last.values(), truth, strict=True):
        assert abs(one["clicks"] - true) < 5.65 * one["clicks_stddev"]


KEYS = {
    "integers": pa.array([1, None, -(2**62)] * 300, pa.int64()),
    "floats": pa.array([0.5, None, float("nan")] * 300),
    "dates": pa.array([1, None, 20_000] * 300, pa.int32()).cast(pa.date32()),
    "times": pa.array([1, None, 2**45] * 300, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    "naive times": pa.array([1, None, 2**45] * 300, pa.int64()).cast(pa.timestamp("ms")),
    "unsigned": pa.array([1, None, 2**64 - 1] * 300, pa.uint64()),
    "decimals": pa.array([1, None, 10**12] * 300, pa.int64()).cast(pa.decimal128(30, 2)),
    "bytes": pa.array([b"", None, b"\xff"] * 300),
    "booleans": pa.array([True, None, False] * 300),
}


def test_types_of_keys(engine, tmp_path):
    """Keys of every type, NULL among them, come out in the type that they came in."""
    rows = pa.table({"user": range(900), "text": ["ä", None, ""] * 300, **KEYS})
    pq.write_table(rows, tmp_path / "rows.parquet")
    names = ["text", *KEYS]
    asked = dps.Query(
        privacy_unit_column="user", keys=names, epsilon=10, delta=1e-4, max_groups_contributed=1
    )
    settings = {"source": tmp_path / "rows.parquet", "secret": SECRET}
    settings["options"] = EngineOptions(run_id=RUN)
    (one,) = dps.run(asked, **settings)
    (other,) = dps.run(asked, **settings, engine=engine)

    assert len(other) == 3
    assert one.schema == other.schema
    assert repr(one.to_pylist()) == repr(other.to_pylist())  # NaN is equal to itself there


def test_keys_that_no_sink_can_write(engine, tmp_path):
    """Every engine sets the same rows aside, for the same reason."""
    good, mixed = hostile_rows()
    for name, rows in (("good", good), ("mixed", mixed)):
        (tmp_path / name).mkdir()
        pq.write_table(rows, tmp_path / name / "rows.parquet", store_decimal_as_integer=True)
        start(tmp_path / name, TYPED, engine=engine).finish()

    assert published(tmp_path / "mixed") == published(tmp_path / "good")
    assert Counter(one["reason"] for one in letters(tmp_path / "mixed")) == REASONS


def test_rows_that_cannot_be_used(engine, tmp_path):
    """They are set aside with place and reason; the feed is that of the good rows alone."""
    good = good_lines("csv")
    asked = query(max_key_bytes=64)
    for name, lines in (("good", good), ("mixed", [*good[:100], *CSV, *good[100:]])):
        write_lines(tmp_path / name / "rows.csv", lines)
        place = tmp_path / name
        run = start(place, asked, source=place / "rows.csv", engine=engine).finish()
    found = letters(tmp_path / "mixed")

    assert published(tmp_path / "mixed") == published(tmp_path / "good")
    assert len(found) == len(CSV)
    for reason in CSV.values():
        assert any(reason in one["reason"] and "rows.csv, " in one["where"] for one in found)
    assert run.operator.rejected_rows >= len(CSV)


def test_what_does_not_fit_into_the_book(engine, tmp_path):
    """Refused before a row is read, and nothing is left behind."""
    write(tmp_path, table())
    ledger = dps.Ledger(tmp_path / "book")
    ledger.open("stream", query().promise(epsilon=1, delta=1e-6))

    with pytest.raises(BudgetExceeded):
        list(start(tmp_path, ledger=ledger, engine=engine))
    assert not (tmp_path / "state").exists()
    assert charges(tmp_path / "book") == 0


def test_another_query_is_refused(engine, tmp_path):
    write(tmp_path, table())
    break_off(tmp_path, 1, engine=engine)

    with pytest.raises(StateError, match="belongs to another query: epsilon was"):
        list(start(tmp_path, query(epsilon=9), engine=engine))


@pytest.fixture(scope="module")
def expected_live(tmp_path_factory):
    return whole_live(tmp_path_factory.mktemp("live"))


def test_live_files_belong_to_the_trigger_after_them(engine, tmp_path, expected_live):
    """Triggers go by the clock, with data or without."""
    assert whole_live(tmp_path, engine=engine) == expected_live


def test_a_live_run_goes_on(engine, tmp_path, expected_live):
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    running = iter(start_live(tmp_path, clock, engine=engine))
    for _ in range(3):
        next(running)
    running.close()
    start_live(tmp_path, clock, engine=engine).finish()

    assert published(tmp_path) == expected_live


def test_a_live_query_needs_times(engine, tmp_path):
    (tmp_path / "in").mkdir()
    timeless = dps.Query(
        privacy_unit_column="user", keys=["page"], epsilon=1, delta=1e-6, max_groups_contributed=1
    )
    with pytest.raises(InvalidParameter, match="a live source needs a query with time="):
        dps.run(timeless, source=tmp_path / "in", live=True, engine=engine)


def test_every_release_says_what_it_is(engine, tmp_path):
    write(tmp_path, table())
    made = list(start(tmp_path, engine=engine))
    told = [json.loads(t.schema.metadata[b"dpstream"]) for t in made]

    assert [(one["window"], one["release_index"]) for one in told] == [
        *((0, release) for release in (1, 2, 3, 4)),
        *((window, release + 4 * (window == 0)) for release in (1, 2) for window in (0, 1)),
        *((1, release) for release in (3, 4, 5, 6)),
    ]
    assert len({one["run"] for one in told}) == 1


@pytest.mark.timeout(300)
def test_joined_and_united_rows(engine, tmp_path):
    """Public tables, registries and several sources: the same bytes on both engines."""
    for name, rows in (("a", range(400)), ("b", range(300, 700))):
        lines = "".join(f"{row % 90},p{row % 7},{row}\n" for row in rows)
        (tmp_path / f"{name}.csv").write_text(f"user,page,v\n{lines}")
    text = """WITH u AS (SELECT user, page FROM a UNION ALL SELECT user, page FROM b WHERE v > 350)
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 5, delta = 1e-6,
        privacy_unit_column = user, max_groups_contributed = 2, public_groups = TABLE pages)
        kind, COUNT(*) AS n FROM u JOIN pages USING (page) LEFT JOIN users USING (user)
        WHERE (plan IS NULL OR plan <> 'x') AND page IN (SELECT page FROM pages WHERE kind <> 'n')
              AND LENGTH(page) <= (SELECT MAX(LENGTH(kind)) FROM pages) + 1 GROUP BY kind"""
    tables = {
        "public": {"pages": pa.table({"page": ["p1", "p1", "p3"], "kind": ["m", "n", "o"]})},
        "registry": {"users": pa.table({"user": [1, 2, 3], "plan": ["x", "y", None]})},
    }

    def run(**named):
        source = {name: tmp_path / f"{name}.csv" for name in "ab"}
        options = EngineOptions(run_id=RUN)
        found = dps.run(
            dps.sql(text), source=source, secret=SECRET, options=options, **tables, **named
        )
        return releases(found)

    assert run(engine=engine) == run()


def test_files_meet_the_table_that_the_run_began_with(engine, tmp_path):
    """Without a clock nothing is read anew, and a run goes on with its copy of a changed table."""
    text = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-5,
        privacy_unit_column = user, public_groups = ('x', 'y'), max_groups_contributed = 2)
        kind, COUNT(*) AS n FROM log JOIN pages USING (page) GROUP BY kind"""
    rows = pa.table({"user": list(range(400)), "page": ["a", "b"] * 200})
    pages = pa.table({"page": ["a", "b"], "kind": ["x", "y"]})
    csv.write_csv(pages, tmp_path / "pages.csv")
    pq.write_table(rows, tmp_path / "rows.parquet")
    named = {
        "source": str(tmp_path / "rows.parquet"),
        "public": {"pages": dps.Refreshed(tmp_path / "pages.csv", every="1 day")},
        "secret": SECRET,
        "options": EngineOptions(run_id=RUN),
    }
    (embedded,) = dps.run(dps.sql(text), **named)
    named |= {"engine": engine, "state": tmp_path / "state", "sink": tmp_path / "out"}
    (found,) = dps.run(dps.sql(text), **named)
    csv.write_csv(pages.slice(1), tmp_path / "pages.csv")
    dps.run(dps.sql(text), **named).finish()

    assert found["n"].to_pylist() == embedded["n"].to_pylist()
    assert sum(found["n"].to_pylist()) > 350


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("asked", SOME, ids=lambda one: one.name)
def test_bench_queries_on_spark(asked, session, tmp_path, monkeypatch):
    """What the command and Python publish, byte for byte; all of them in a long run."""
    monkeypatch.delenv("DPSTREAM_DATA", raising=False)
    Secret.create(tmp_path / "secret", value=bytes(range(32)))
    source, _ = queries.log_file(asked.log, tmp_path, rows=6_000)
    engine = SparkEngine(session, buckets=2)

    assert queries.all_ways(asked, source, tmp_path, engine=engine)["identical"]


def test_a_table_of_the_newest_releases(engine, tmp_path):
    """`output="upsert"` leaves the rows of the last release, as the embedded engine has them."""
    query = dps.Query(
        name="pages", privacy_unit_column="user", keys=["page"], public_groups=["a", "b"],
        epsilon=5, delta=1e-6, max_groups_contributed=1, start="1970-01-01", end="1970-01-02",
        time_column="at", time_unit="s", every="12 hours", window=dps.Tumble("1 day"),
        privacy_unit_period="1 day",
    )  # fmt: skip
    rows = pa.table({"user": range(400), "page": ["a", "b"] * 200, "at": [3600, 80_000] * 200})
    pq.write_table(rows, tmp_path / "rows.parquet")
    named = {"source": str(tmp_path / "rows.parquet"), "secret": SECRET}
    named |= {"options": EngineOptions(run_id=RUN)}
    *_, last = dps.run(query, **named)
    file = tmp_path / "out.sqlite"
    dps.run(query, sink=file, output="upsert", engine=engine, **named).finish()

    with closing(sqlite3.connect(file)) as db:
        found = db.execute("SELECT page, count, release FROM pages ORDER BY page").fetchall()
    assert found == sorted((row["page"], row["count"], 2) for row in last.to_pylist())
