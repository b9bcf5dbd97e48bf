"""Joins and unions where they live: by the clock, killed, restarted, several queries at once."""

import os

import pyarrow as pa
import pytest
from pyarrow import csv

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.privacy.state import Secret
from dpstream.rows.row_reader import RowReader
from tests.support.fixed import SECRET
from tests.support.kill_and_replay import BeforeDiskOperation, KindOfRun, kill_and_replay
from tests.support.live_runs import TIMES, ScriptedClock, rows, seconds_before
from tests.support.runs import charges, options, published

PAGES = pa.table({"page": ["/1", "/2", "/2"], "kind": ["x", "y", "both"]})
OPTIONS = """WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-5,
    privacy_unit_column = user, time_unit = 'us', start = '1970-01-01',
    end = '1970-01-01 06:00', allowed_lateness = INTERVAL '1' HOUR, max_groups_contributed = 2,
    max_rows_per_group = 3, public_groups = (SELECT kind FROM pages))"""
TEXT = f"""
    WITH u AS (SELECT user, page, at FROM a UNION ALL SELECT who AS user, page, at FROM b)
    SELECT {OPTIONS} kind, window_start, COUNT(*) AS n
    FROM TUMBLE(u, DESCRIPTOR(at), INTERVAL '3' HOUR) JOIN pages USING (page)
    GROUP BY kind, window_start EMIT EVERY INTERVAL '1' HOUR"""
LAST = ["live-w000000-t000004.parquet", "live-w000001-t000004.parquet"]


def query(name="live"):
    return dps.with_tables(dps.sql(TEXT, name=name), public={"pages": PAGES})


def drop(folder, name, table):
    """Put a file there whole, once."""
    if not (folder / name).exists():
        csv.write_csv(table, folder / f".{name}")
        os.rename(folder / f".{name}", folder / name)


def arrivals(place):
    """Files that come into one directory and the other in turn, and into both at the end."""
    events = []
    for number, time in enumerate(TIMES):
        for folder in "ab" if number == len(TIMES) - 1 else "ab"[number % 2]:
            table = rows(seconds_before(time), user=folder if number % 3 else "both")
            if folder == "b":
                table = table.rename_columns(["who", "page", "at"])
            file = f"{9 - number}.csv"
            events.append((time, lambda f=folder, n=file, t=table: drop(place / f, n, t)))
    return events


def start(place, **named):
    for folder in "ab":
        (place / folder).mkdir(parents=True, exist_ok=True)
    keep = place / "clock"
    now = int(keep.read_text()) if keep.exists() else 0
    settings = {
        "source": {"a": place / "a", "b": place / "b"},
        "live": True,
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": options(),
        "clock": ScriptedClock(now, arrivals(place), keep),
    }
    return dps.run(query(), **(settings | named))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes."""
    place = tmp_path_factory.mktemp("whole")
    start(place).finish()
    return published(place)


@pytest.mark.parametrize(("nth", "on_done"), [(12, "keep"), (60, "keep"), (95, "delete")])
def test_a_killed_run_publishes_the_same_bytes(tmp_path, expected, nth, on_done):
    """Every partition is replayed to where its step had read it, and joined to the same table."""
    kind = KindOfRun(
        start=lambda place: start(place, on_done=on_done),
        published=published,
        charges=lambda place: charges(place / "state" / "ledger"),
    )
    after = kill_and_replay(kind, tmp_path / "run", BeforeDiskOperation(nth))

    assert after.published.keys() == expected.keys()
    assert [after.published[name] for name in LAST] == [expected[name] for name in LAST]
    assert after.charges == 1


def test_queries_that_unite_the_same_sources_share_them(tmp_path):
    """Two queries over one read of each directory have the same rows."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
    book = dps.Ledger(tmp_path / "book")
    book.open("stream", query().promise(epsilon=40, delta=1e-2))
    runs = dps.run_all(
        [query("one"), query("two")],
        source={"a": tmp_path / "a", "b": tmp_path / "b"},
        live=True,
        ledger=book,
        secret=SECRET,
        clock=ScriptedClock(0, arrivals(tmp_path)),
    )
    for _ in runs:
        pass

    read = [runs.runs[name].operator.read for name in ("one", "two")]
    assert read == [len(arrivals(tmp_path)) * 12] * 2


def digests(asked, source):
    """One for each row, over all that the engine keeps of it."""
    reader = RowReader(asked, Secret.of(bytes(32)), bytes(16))
    reader.learn(None)
    table = source.select(asked.source_columns)
    return sorted(map(tuple, reader.read(table, "")[0].digests.tolist()))


def test_united_rows_are_those_of_one_stream():
    """Ids, groups, times and values, whatever the sources call their columns."""
    first, second = (rows(seconds_before(time)) for time in TIMES[:2])
    text = TEXT.replace("FROM TUMBLE(u,", "FROM TUMBLE(c,").partition("SELECT WITH")[2]
    one = dps.with_tables(dps.sql(f"SELECT WITH{text}"), public={"pages": PAGES})
    empty = pa.nulls(len(first), pa.string())
    marked = [
        pa.table(
            {
                "$table": pa.array([name] * len(table), pa.string()),
                **{f"a.{n}": c if name == "a" else empty for n, c in named(table).items()},
                "b.who": table["user"] if name == "b" else empty,
                "b.page": table["page"] if name == "b" else empty,
                "b.at": named(table)["at"] if name == "b" else empty,
            }
        )
        for name, table in (("a", first), ("b", second))
    ]
    both = pa.table(named(pa.concat_tables([first, second])))

    ours = sorted(digests(query(), marked[0]) + digests(query(), marked[1]))
    assert ours == digests(one, both)
    assert digests(query(), pa.concat_tables(marked)) == ours


def named(table):
    return {name: table[name].cast(pa.string()) for name in table.column_names}


def test_sources_that_cannot_be_united_are_refused(tmp_path):
    """Each table has a source, and all are live or none."""
    (tmp_path / "a").mkdir()
    table = rows([1]).rename_columns(["who", "page", "at"])

    with pytest.raises(InvalidParameter, match="no source is given for 'b'"):
        dps.run(query(), source={"a": rows([1])}, ledger=dps.Ledger())
    source = {"a": tmp_path / "a", "b": table}
    with pytest.raises(InvalidParameter, match="all live, or none"):
        dps.run(query(), source=source, live=True, ledger=dps.Ledger())
