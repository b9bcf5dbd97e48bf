"""UNION ALL of private queries: each pays from one book, and their rows come together."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.spark import SparkEngine
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    LedgerError,
    StateError,
)
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import BeforeDiskOperation, KindOfRun, kill_and_replay
from tests.support.runs import charges, published

OPTIONS = """WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {}, delta = 1e-6,
    privacy_unit_column = user, time_unit = 's', start = '1970-01-01', end = '1970-01-01T04:00',
    max_groups_contributed = 4, max_rows_per_group = 1)"""
WINDOWS = "TUMBLE(log, DESCRIPTOR(at), INTERVAL '2' HOUR)"
PAGES = f"""SELECT {OPTIONS.format(4)} page, window_start, COUNT(*) AS n FROM {WINDOWS}
    GROUP BY page, window_start ORDER BY page"""
ALL = f"""SELECT {OPTIONS.format(2)} 'all' AS page, window_start, COUNT(DISTINCT user) AS n
    FROM {WINDOWS} WHERE at > 0 GROUP BY window_start"""
TEXT = f"({PAGES}) UNION ALL ({ALL})"
NUMBERS = TEXT.replace("'all' AS page", "at AS page").replace("0 GROUP BY", "0 GROUP BY at,")


def log():
    rows = range(2400)
    return pa.table(
        {
            "user": [row % 600 for row in rows],
            "page": [f"p{row // 600 % 2}" for row in rows],
            "at": [row * 6 for row in rows],
        }
    )


def start(place, text=TEXT, **named):
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "log.parquet").exists():
        pq.write_table(log(), place / "log.parquet")
    known = {
        "source": str(place / "log.parquet"),
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": EngineOptions(run_id=RUN),
    }
    return dps.run(text, **(known | named))


def test_releases_have_the_rows_of_all_branches(engine, tmp_path):
    """In the order of the branches, with the error bar of each; the sink has each by its name."""
    releases = list(start(tmp_path, engine=engine))

    assert [release["page"].to_pylist() for release in releases] == [["p0", "p1", "all"]] * 2
    for release in releases:
        one, other, whole = release["n"].to_pylist()
        spreads = release["n_stddev"].to_pylist()
        assert abs(one - 600) < 8 * spreads[0]
        assert abs(other - 600) < 8 * spreads[0]
        assert abs(whole - 600) < 8 * spreads[2]
        assert spreads[0] == spreads[1] != spreads[2]
    assert sorted(path.name[:7] for path in (tmp_path / "out").glob("*.parquet")) == [
        *["query_1"] * 2,
        *["query_2"] * 2,
    ]
    assert charges(tmp_path / "state" / "ledger") == 2


@pytest.mark.spark
def test_spark_publishes_the_same_bytes(session, tmp_path):
    """Each branch, in the sink and in what is iterated over."""
    engine = SparkEngine(session, buckets=2, steps_at_once=4)
    here = start(tmp_path / "here").collect().table
    there = start(tmp_path / "there", engine=engine).collect().table

    assert there.equals(here)
    assert published(tmp_path / "there") == published(tmp_path / "here")


@pytest.mark.parametrize("nth", [20, 45, 80])
def test_a_killed_union_goes_on(tmp_path, nth):
    """Wherever it is killed: the bytes of an unbroken one, and each branch is charged once."""
    kind = KindOfRun(
        start=start, published=published, charges=lambda p: charges(p / "state" / "ledger")
    )
    whole = kind.unbroken(tmp_path / "whole")
    after = kill_and_replay(kind, tmp_path / "run", BeforeDiskOperation(nth))

    assert after.published == whole
    assert after.charges == 2


def test_each_branch_pays_from_one_book(tmp_path):
    """Without a book one is opened for the sum; a book with room for one branch refuses both."""
    ledger = dps.Ledger()
    ledger.open("stream", dps.sql(PAGES).promise(epsilon=4.2, delta=2e-6))
    with pytest.raises(BudgetExceeded, match="query_2"):
        start(tmp_path, ledger=ledger, state=None)
    assert not ledger.report()[0]["spent_on"]

    (book,) = _books(start(tmp_path))
    assert book["terms"]["epsilon"] == "6"
    assert [line["query"] for line in book["spent_on"]] == ["query_1", "query_2"]


def _books(run):
    run.finish()
    ledger = dps.Ledger(run.parts.runs["query_1"].folder.parent / "ledger")
    try:
        return ledger.report()
    finally:
        ledger.close()


def test_several_tables_have_a_source_each(tmp_path):
    """By their names; a table without a source is named."""
    text = TEXT.replace("TUMBLE(log", "TUMBLE(other", 1)
    rows = {"log": log(), "other": log().slice(0, 1200)}
    first, second = dps.run(text, source=rows, secret=SECRET)

    assert min(first["n"].to_pylist()) > 500
    found = dict(zip(second["page"].to_pylist(), second["n"].to_pylist(), strict=True))
    assert found.pop("all") > 500  # the other table ends with the first window
    assert all(abs(n) < 100 for n in found.values())
    with pytest.raises(InvalidParameter, match="no source is given for 'other'"):
        dps.run(text, source={"log": log()})
    with pytest.raises(InvalidParameter, match="name a source for each"):
        dps.run(text, source=log())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace("AS n", "AS m", 1), "'query_1' has page, window_start, m, .*AS$"),
        (TEXT.replace("'2' HOUR", "'1' HOUR", 1), "the same windows, start, end and EMIT"),
        (f"{TEXT} ORDER BY n", "ORDER stands behind a UNION ALL"),
        (TEXT.replace("UNION ALL", "UNION"), "UNION ALL alone"),
        (TEXT.replace("column = user", "column = at", 1), "changing all rows with one 'at'"),
        (
            TEXT.replace("'all' AS page, window", "at AS page, window").replace(
                "GROUP BY w", "GROUP BY at, w"
            ),
            "CAST one of them",
        ),
        (f"({PAGES}) UNION ALL SELECT 'all' AS page, 5 AS n FROM log", "query is not private"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, text, words):
    """Before anything is charged."""
    ledger = dps.Ledger()
    ledger.open("stream", dps.sql(PAGES).promise(epsilon=20, delta=1e-5))
    with pytest.raises((InvalidParameter, InvalidInput, LedgerError), match=words):
        start(tmp_path, text, ledger=ledger).finish()

    assert not ledger.report()[0]["spent_on"]


class _FullAt(CheckingSink):
    """A sink that takes nothing of one query, and counts what comes of others."""

    def __init__(self, place, name):
        super().__init__(place, lambda: None)
        self.name, self.taken = name, 0

    def write(self, name, window, trigger, table):
        if name == self.name:
            raise OSError("no space left")
        self.taken += 1
        super().write(name, window, trigger, table)


def test_a_branch_that_fails_ends_all(tmp_path):
    """The others would draw, and wait in memory, for releases that never come."""
    sink = _FullAt(tmp_path, "query_1")
    text = TEXT.replace("'2' HOUR", "'15' MINUTE")
    with pytest.raises(StateError, match="no space left"):
        start(tmp_path, text, sink=sink).finish()

    assert sink.taken < 8  # of 16: a write may fail while the next table is made
    assert len(list(start(tmp_path, text))) > 8  # it goes on where it was
