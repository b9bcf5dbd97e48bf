"""Rows one by one: what is used, what is set aside, and where each belongs."""

import json
from datetime import date

import numpy as np
import pyarrow as pa
import pytest

from dpstream.errors import InvalidInput
from dpstream.privacy.state import Secret
from dpstream.query.aggregates import Count, Sum
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.rows import row_ids
from dpstream.rows.row_reader import ParsedColumns, RowReader

HOUR = 3600


def reader_of(table=None, **facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "window": Tumble("6 hours"),
        "every": "2 hours",
        "epsilon": 1,
        "delta": 1e-6,
        "max_groups_contributed": 2,
        "aggregates": (
            Count(),
            Sum("s", column="x", contribution_bounds_per_row=(0, 10), quantum=1),
        ),
    }
    reader = RowReader(Query(**common | facts), Secret(bytes(32)), bytes(16))
    types = None if table is None else {f.name: f.type for f in table.schema}
    reader.learn(types)
    return reader


def table_of(rows, **more):
    user, key, ts, x = zip(*rows, strict=True)
    columns = {"user": user, "key": key, "ts": ts, "x": x} | more
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def read(rows, *, more=None, arrived=None, **facts):
    table = table_of(rows, **(more or {}))
    reader = reader_of(table, **facts)
    return reader.read(table, "file.csv", arrived=arrived)


def test_rows_have_window_step_and_grid_values():
    """The window of the event time, the first trigger after it, clamped values about their middle;
    sorted by step."""
    found, aside = read([("b", "k", 13 * HOUR, 99), ("a", "k", 2 * HOUR, 4), ("a", "k", 0, None)])

    assert found.windows.tolist() == [0, 0, 2]
    assert found.steps.tolist() == [0, 1, 6]
    assert found.values[:, 0].tolist() == [0 - 5, 4 - 5, 10 - 5]
    assert found.runs == [(0, 0, 0, 0, 1), (1, 0, 0, 1, 2), (6, 2, 0, 2, 3)]
    assert (found.units[0] == found.units[1]).all()
    assert (found.units[0] != found.units[2]).any()
    assert (aside.rejected, aside.outside, aside.late, aside.other_keys) == ([], 0, 0, 0)
    assert found.bytes > 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((None, "k", "0", "1"), "missing unit"),
        (("", "k", "0", "1"), "missing unit"),
        (("u", "k", "soon", "1"), "unparsable time"),
        (("u", "k", "", "1"), "unparsable time"),
        (("u", "k", "9e17", "1"), "unparsable time"),
        (("u", "k", "0", "many"), "not a number"),
        (("u", "k", "0", "nan"), "NaN or infinite number"),
        (("u", "k", "0", "-inf"), "NaN or infinite number"),
        (("u", "k" * 4097, "0", "1"), "oversize key"),
        (("u", "é" * 2049, "0", "1"), "oversize key"),
        ((None, "k", "soon", "many"), "missing unit"),  # the first reason counts
    ],
)
def test_rows_that_cannot_be_used_are_set_aside_with_a_reason(row, reason):
    """Where they were, why, and the row itself, cut short; the others go on."""
    good = ("v", "k", "0", "1")
    found, aside = read([good, row, good])

    assert len(found) == 2
    (rejected,) = aside.rejected
    assert (rejected.where, rejected.reason) == ("file.csv, row 1", reason)
    assert len(rejected.row) <= 4096
    if len(row[1]) < 1000:
        assert json.loads(rejected.row)["ts"] == row[2]


def test_keys_of_the_largest_size_are_used():
    """The bound is on bytes."""
    found, aside = read([("u", "é" * 2048, "0", "1")])
    assert len(found) == 1
    assert not aside.rejected
    found, aside = read([("u", "éé", "0", "1")], max_key_bytes=3)
    assert len(aside.rejected) == 1


def test_an_arrival_that_cannot_be_read_is_set_aside():
    """It would have no step."""
    found, aside = read([("u", "k", "0", "1")] * 2, more={"at": ["x", "3"]}, arrival_column="at")
    assert len(found) == 1
    assert [r.reason for r in aside.rejected] == ["unparsable arrival time"]


def test_rows_outside_the_public_range_are_dropped():
    """Neither first nor last window follows from the data."""
    found, aside = read([("u", "k", t, 1) for t in (-1, 0, 24 * HOUR - 1, 24 * HOUR, 10**9)])
    assert found.windows.tolist() == [0, 3]
    assert aside.outside == 3


def test_late_rows_are_dropped():
    """After the last trigger of their own window; what other rows do is of no account."""
    arrivals = [1, 8 * HOUR - 1, 8 * HOUR, 30 * HOUR]
    found, aside = read(
        [("u", "k", 1, 1)] * 4,
        more={"at": arrivals},
        arrival_column="at",
        allowed_lateness="2 hours",
    )
    assert found.steps.tolist() == [0, 3]
    assert aside.late == 2


def test_rows_of_a_live_source_belong_to_the_step_that_reads_them():
    """Late or far ahead of the clock by that step's time."""
    times = [0, 7 * HOUR, 8 * HOUR + 1800, 9 * HOUR + 1]
    found, aside = read([("u", "k", t, 1) for t in times], arrived=3, max_ahead="1 hour")
    assert found.steps.tolist() == [3, 3]
    assert found.windows.tolist() == [1, 1]
    assert aside.late == 1  # the first window had its last trigger at 6 hours
    assert [r.reason for r in aside.rejected] == ["time too far ahead of the clock"]


def test_null_is_an_ordinary_key():
    """And different from empty text and from the word."""
    found, aside = read([("u", key, 0, 1) for key in (None, "", "null", None)])
    assert not aside.rejected
    assert len(np.unique(found.groups, axis=0)) == 3
    assert (found.groups[0] == found.groups[3]).all()


def test_other_keys_than_the_public_ones_go_before_bounding():
    """Public keys are read in the type of the column."""
    rows = [("u", key, 0, 1) for key in ("1", "2", "3", None)]
    table = table_of(rows)
    reader = reader_of(table, public_groups=[1, "3", None])
    found, aside = reader.read(table, "t")
    assert aside.other_keys == 1
    assert len(found) == 3
    assert reader.public_table().to_pydict() == {"key": ["1", "3", None]}
    numbered = table_of([("u", key, 0, 1) for key in (1, 2, 3)])
    reader = reader_of(numbered, public_groups=[1, 3])
    assert reader.read(numbered, "t")[1].other_keys == 1
    with pytest.raises(InvalidInput, match="public_groups"):
        reader_of(numbered, public_groups=["one"]).read(numbered, "t")


def test_equal_floats_are_one_key_and_look_alike():
    """Zero has two signs and NaN many bits: which one came must not be seen."""
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    table = pa.table(
        {
            "user": ["u"] * 4,
            "key": pa.array(np.array([0.0, -0.0, *odd]), from_pandas=False),
            "ts": [0] * 4,
            "x": [1] * 4,
        }
    )
    found, _ = reader_of(table).read(table, "t")
    assert len(np.unique(found.groups, axis=0)) == 2
    bits = found.keys["key"].to_numpy().view(np.uint64)
    assert bits[0] == bits[1] == 0
    assert bits[2] == bits[3]


def test_a_user_is_a_unit_of_its_own_in_every_period():
    """Ids differ between periods, and not within one."""
    rows = [("u", "k", t, 1) for t in (0, HOUR, 12 * HOUR, 23 * HOUR)]
    found, _ = read(rows, privacy_unit_period="12 hours")
    assert found.periods.tolist() == [0, 0, 1, 1]
    units = [unit.tobytes() for unit in found.units]
    assert units[0] == units[1] != units[2] == units[3]
    forever, _ = read(rows)
    assert len(np.unique(forever.units, axis=0)) == 1


def test_a_user_has_one_id_in_every_width_of_its_type():
    """Later chunks may hold narrower integers, floats or text; a row with a date is set aside."""
    wide = table_of([(5, "k", 0, 1)])
    reader = reader_of(wide)
    narrow = wide.set_column(0, "user", pa.array([5], pa.int16()))
    one, two = (reader.read(table, "t")[0] for table in (wide, narrow))
    assert (one.units == two.units).all()
    for same in (pa.array([5.0]), pa.array(["5"]), pa.array([" 5.0"])):
        found, aside = reader.read(wide.set_column(0, "user", same), "t")
        assert (found.units == one.units).all()
        assert not aside.rejected
    day = pa.array([date(2024, 5, 1)])
    for other in (pa.array([5.5]), pa.array(["5x"]), pa.array([2.0**70]), day):
        found, aside = reader.read(wide.set_column(0, "user", other), "t")
        assert (len(found), [one.reason for one in aside.rejected]) == (
            0, ["not of its column's type"]
        )  # fmt: skip


def test_digests_tell_rows_apart_and_copies_not():
    """Unit, group, time and value: all that is kept of a row."""
    base = ("u", "k", 0, 1)
    rows = [base, base, ("v", "k", 0, 1), ("u", "l", 0, 1), ("u", "k", 1, 1), ("u", "k", 0, 2)]
    found, _ = read(rows)
    assert len(np.unique(found.digests, axis=0)) == 5
    other = RowReader(reader_of().query, Secret(bytes(32)), bytes([1] * 16))
    other.learn({"user": pa.string(), "key": pa.string()})
    again = other.read(table_of(rows), "t")[0]
    assert not (found.digests == again.digests).any()
    assert (found.units == again.units).all()  # so that queries of one source hash them once
    other = RowReader(reader_of().query, Secret(bytes([1] * 32)), bytes(16))
    other.learn({"user": pa.string(), "key": pa.string()})
    again = other.read(table_of(rows), "t")[0]
    assert not (found.units == again.units).any()
    assert not (found.groups == again.groups).any()


def test_queries_of_one_source_hash_a_text_once(monkeypatch):
    """Units and equal lists of keys, whatever else differs; ids are those of a query by itself."""
    rows = [("u", "k", 0, 1), ("v", "l", 0, 1), ("u", "l", 1, 2)]
    alone = [read(rows, privacy_unit_period=period)[0] for period in ("forever", "1 hour")]
    calls, hashed = [], row_ids.column_ids
    monkeypatch.setattr(row_ids, "column_ids", lambda *of: calls.append(of) or hashed(*of))
    shared, together = ParsedColumns(), []
    for run, period in enumerate(("forever", "1 hour")):
        reader = RowReader(
            reader_of(privacy_unit_period=period).query, Secret(bytes(32)), bytes([run] * 16)
        )
        reader.learn({"user": pa.string(), "key": pa.string()})
        together.append(reader.read(table_of(rows), "t", parsed=shared)[0])

    assert len(calls) == 2  # the units and the keys, of both queries
    assert (together[0].units == alone[0].units).all()
    assert (together[0].groups == alone[1].groups).all()
    assert not (together[0].units == together[1].units).any()


ASKED = (
    {},
    {"max_key_bytes": 3},
    {"public_groups": ["k", "l"]},
    {"public_groups": ["l"], "max_key_bytes": 3},
    {"privacy_unit_column": "other", "public_groups": ["l"]},
    {"keys": ("user",), "privacy_unit_column": "other"},
    {"keys": ("user", "key"), "privacy_unit_column": "other"},
    {"keys": ()},
)


@pytest.mark.parametrize("order", [1, -1])
def test_what_queries_share_is_what_each_has_by_itself(order):
    """Also of rows that some of them cannot use: ids, keys, and why a row is rejected."""
    rows = [("u", "k", 0, 1), (None, "k", 0, 1), ("v", "long", 1, 2), ("w", "l", 0, None)]
    rows += [("w", None, 2, 3), ("", "long", 3, 1), ("v", "k", 90_000, 1), ("w", "l", -1, "x")]
    rows = [(user, key, at, None if x is None else str(x)) for user, key, at, x in rows]
    table = table_of(rows, other=["a", "b", None, "d", "e", "f", "g", "h"])
    shared = ParsedColumns()
    for facts in ASKED[::order] + ASKED:
        facts = {"aggregates": (Sum("s", column="x", contribution_bounds_per_row=(0, 9)),)} | facts
        mine, why = reader_of(table, **facts).read(table, "t", arrived=0, parsed=shared)
        alone, expected = reader_of(table, **facts).read(table, "t", arrived=0)

        assert why == expected
        assert mine.keys.equals(alone.keys)
        for name in ("units", "groups", "digests", "values", "windows", "steps"):
            assert np.array_equal(getattr(mine, name), getattr(alone, name))
        assert len(mine) or why.other_keys


def test_queries_of_one_source_look_at_keys_once(monkeypatch):
    """Also at which of them are listed; a query with another list looks again."""
    table, calls = table_of([("u", "k", 0, 1), ("v", "l", 0, 1)]), []
    for name in ("_keys", "_units", "_is_public"):
        real = getattr(RowReader, name)
        noted = lambda *of, real=real, name=name: calls.append(name) or real(*of)  # noqa: E731
        monkeypatch.setattr(RowReader, name, noted)
    shared = ParsedColumns()
    for listed in (["k"], ["k"], ["k", "l"]):
        reader_of(table, public_groups=listed).read(table, "t", parsed=shared)

    assert sorted(calls) == ["_is_public", "_is_public", "_keys", "_units"]


@pytest.mark.parametrize("time", ["0001-01-01", "9999-12-31T23:59:59", "junk", None])
def test_a_bad_time_in_a_calendar_zone_stops_nothing(time):
    """Not with calendar windows, periods and triggers, and not in the look at steps either."""
    rows = [("u", "k", time, 1), ("u", "k", "2024-03-31T05:00", 1)]
    facts = {
        "time_unit": None,
        "start": "2024-03-30",
        "end": "2024-04-02",
        "window": Tumble("1 day"),
        "every": "1 day",
        "privacy_unit_period": "1 day",
        "time_zone": "Europe/Rome",
    }
    found, _ = read(rows, **facts)
    assert found.windows.tolist() == found.steps.tolist() == [1]
    late, _ = read(rows, more={"at": [r[2] for r in rows[::-1]]}, arrival_column="at", **facts)
    assert len(late) == 0
    table = table_of(rows).select(["ts"])
    assert reader_of(table_of(rows), **facts).steps_of(table).tolist() == [-1, 1]


def test_steps_are_found_from_the_times_alone():
    """The look ahead and the reading agree on every row."""
    rng = np.random.default_rng(0)
    times = rng.integers(-HOUR, 26 * HOUR, 200)
    table = table_of([("u", "k", int(t), 1) for t in times])
    reader = reader_of(table)
    steps = reader.steps_of(table.select(["ts"]))
    found, _ = reader.read(table, "t")
    assert sorted(steps[steps >= 0].tolist()) == found.steps.tolist()


def test_a_query_without_times_has_one_step_and_one_group():
    """All rows of a query without keys are one group."""
    facts = {"time_column": None, "time_unit": None, "start": None, "end": None, "window": None}
    found, _ = read([("u", "k", 5, 1), ("v", "l", 6, 1)], every=None, keys=(), **facts)
    assert found.steps.tolist() == found.windows.tolist() == [0, 0]
    assert not found.groups.any()


def test_an_empty_batch_is_no_rows():
    """With the right columns and types."""
    table = table_of([("u", "k", 0, 1)]).slice(0, 0)
    found, aside = reader_of(table).read(table, "t")
    assert len(found) == 0
    assert found.runs == []
    assert not aside.rejected
    assert found.values.shape == (0, 1)


def test_a_chunk_without_values_has_any_type():
    """A source that builds its chunks from lists gives an empty one columns of type null."""
    table = table_of([("a", "k", 0, 1)])
    reader = reader_of(table)

    empty = pa.table({name: pa.nulls(0) for name in table.column_names})
    nobody = table.set_column(0, "user", pa.nulls(1))
    never = table.set_column(2, "ts", pa.nulls(1))

    assert len(reader.read(empty, "t")[0]) == 0
    assert "unit" in reader.read(nobody, "t")[1].rejected[0].reason
    assert "time" in reader.read(never, "t")[1].rejected[0].reason


def test_a_unit_that_is_no_text_costs_its_own_row_where_units_are_numbers():
    """Where they are text it is a unit like any other: it is hashed and never shown."""
    raw = pa.array([b"5", b"\xff"]).view(pa.string())
    rows = table_of([("5", "a", 1, 1), ("6", "a", 1, 1)]).set_column(0, "user", raw)
    for kind, used in (("INT64", 1), (None, 2)):
        reader = reader_of(table_of([(5 if kind else "5", "a", 1, 1)]))
        read, aside = reader.read(rows, "file.parquet")

        assert len(read) == used
        assert [one.reason for one in aside.rejected] == ["invalid UTF-8"] * (2 - used)
