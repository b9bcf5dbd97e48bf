"""Columns in the type that they have in a run: cast by value, row by row, or refused by type."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.query.column_types import NAMES, canonical_type, declared_types, named_type
from dpstream.rows.column_values import in_type, python_values, unwritable

NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
INSTANT = pa.timestamp("us", "UTC")
CASES = [
    (pa.array([5, -1, None]), pa.uint64(), [5, "lost", None]),
    (pa.array([2**63, 5], pa.uint64()), pa.int64(), ["lost", 5]),
    (pa.array([5.0, 5.5, float("nan"), -(2.0**63), 2.0**63, None]), pa.int64(),
     [5, "lost", "lost", -(2**63), "lost", None]),
    (pa.array([2**53, 2**53 + 1, 2**60, -(2**63), 2**63 - 1]), pa.float64(),
     [2.0**53, "lost", 2.0**60, -(2.0**63), "lost"]),
    (pa.array([2**64 - 1, 2**63], pa.uint64()), pa.float64(), ["lost", 2.0**63]),
    (pa.array([Decimal("1.50"), Decimal("1.25")]), pa.decimal128(5, 1), [Decimal("1.5"), "lost"]),
    (pa.array([Decimal("7.00"), Decimal("7.50")]), pa.int64(), [7, "lost"]),
    (pa.array([7, 10**6]), pa.decimal128(5, 1), [Decimal("7.0"), "lost"]),
    (pa.array([1.5, 5.0, -0.0, 1e30]), pa.string(), ["1.5", "5", "0", "1" + "0" * 30]),
    (pa.array([Decimal("1.50"), None]), pa.string(), ["1.5", None]),
    (pa.array([True, False]), pa.string(), ["true", "false"]),
    (pa.array([" 5", "+5", "007", "5.0", "", "x", "5.5", "9" * 20, None]), pa.int64(),
     [5, 5, 7, 5, None, "lost", "lost", "lost", None]),
    (pa.array(["1.5", "1e3", "-0", "1e999", "nan", "inf"]), pa.float64(),
     [1.5, 1000.0, 0.0, "lost", "lost", "lost"]),
    (pa.array(["1.5", "1.0000000001", "1e3"]), NAMES["NUMERIC"],
     [Decimal("1.5"), "lost", Decimal(1000)]),
    (pa.array(["true", " FALSE", "1", "yes"]), pa.bool_(), [True, False, "lost", "lost"]),
    (pa.array(["2024-05-01", "2024-02-30", "1 May"]), pa.date32(),
     [dt.date(2024, 5, 1), "lost", "lost"]),
    (pa.array(["12:30", "12:30:01.5", "25:00"]), pa.time64("us"),
     [dt.time(12, 30), dt.time(12, 30, 1, 500_000), "lost"]),
    (pa.array(["2024-05-01T12:00Z", "2024-05-01 14:00+02:00", "2024-05-01 12:00", "noon"]),
     INSTANT, [NOON, NOON, NOON, "lost"]),
    (pa.array([NOON], pa.timestamp("ns", "Asia/Tokyo")), pa.timestamp("s", "UTC"), [NOON]),
    (pa.array([1_500, 2_000], pa.int64()).view(pa.timestamp("ms")), pa.timestamp("s"),
     ["lost", dt.datetime(1970, 1, 1, 0, 0, 2)]),
    (pa.array([1_500, 2_000], pa.int64()).view(pa.duration("ms")), pa.duration("s"),
     ["lost", dt.timedelta(seconds=2)]),
    (pa.nulls(2), pa.int64(), [None, None]),
    (pa.array([], pa.date32()), pa.int64(), []),
]  # fmt: skip


@pytest.mark.parametrize(("array", "kind", "expected"), CASES, ids=lambda item: str(item)[:30])
def test_values_are_cast_exactly_or_lost(array, kind, expected):
    """Each row by itself, in any company."""
    made, lost = in_type(array, kind)
    one_by_one = [in_type(array.slice(row, 1), kind) for row in range(len(array))]

    assert made.type == kind
    found = zip(made.to_pylist(), lost.tolist(), strict=True)
    assert ["lost" if gone else value for value, gone in found] == expected
    assert [value.to_pylist()[0] for value, _ in one_by_one] == made.to_pylist()
    assert [bool(gone[0]) for _, gone in one_by_one] == lost.tolist()
    assert all(value is None for value, gone in zip(made.to_pylist(), lost, strict=True) if gone)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.date32(), pa.int64()),
        (pa.bool_(), pa.int64()),
        (pa.binary(), pa.string()),
        (pa.string(), pa.binary()),
        (pa.float64(), pa.decimal128(9, 2)),
        (pa.decimal128(9, 2), pa.float64()),
        (pa.timestamp("us"), INSTANT),
        (pa.date32(), pa.timestamp("us")),
        (pa.duration("s"), pa.time32("s")),
        (pa.date32(), pa.string()),
    ],
    ids=str,
)
def test_kinds_that_never_meet_are_told_by_their_types(old, new, tmp_path):
    """No value decides it. Files that are there are refused, with what to do; in those that come
    later each row that has a value is set aside.
    """
    some = {pa.bool_(): True, pa.binary(): b"5", pa.string(): "5"}.get(old)
    values = pa.array([some], old) if some is not None else pa.array([5]).cast(pa.int32())
    if some is None:
        values = pa.array([Decimal(5)], old) if pa.types.is_decimal(old) else _five(old)
    made, lost = in_type(pa.concat_arrays([values, pa.nulls(1, old)]), new)
    assert (made, lost.tolist()) == (pa.nulls(2, new), [True, False])

    paths = [tmp_path / "first.parquet", tmp_path / "second.parquet"]
    for path, column in zip(paths, (pa.nulls(1, new), values), strict=True):
        pq.write_table(pa.table({"u": ["ann"], "k": column}), path)
    asked = {"privacy_unit_column": "u", "keys": ["k"], "epsilon": 1, "delta": 1e-9}
    for more, source in (({}, paths), ({"column_types": {"k": new}}, paths[1])):
        query = dps.Query(**asked, max_groups_contributed=1, **more)
        with pytest.raises(InvalidInput, match=r"'k' is .* in this run and .*column_types="):
            dps.run(query, source=source)


def _five(kind):
    if pa.types.is_floating(kind):
        return pa.array([5.0])
    return pa.array([5], pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


FAR = (2**63 - 1, -(2**63))
DAY = 86_400
LAST, FIRST = 253_402_300_799, -62_135_596_800  # seconds of the years 9999 and 1
UNITS = {"s": 1, "ms": 1000, "us": 10**6}
EDGES = [
    (pa.timestamp(unit, zone), [FIRST * n, LAST * n], [FIRST * n - 1, (LAST + 1) * n, *FAR, 2**62])
    for unit, n in UNITS.items()
    for zone in (None, "UTC", "Asia/Tokyo", "America/New_York")
]
EDGES += [(pa.timestamp("ns", zone), [1, *FAR], []) for zone in (None, "America/New_York")]
EDGES += [
    (pa.date32(), [FIRST // DAY, LAST // DAY], [FIRST // DAY - 1, LAST // DAY + 1, 2**31 - 1])
]
EDGES += [(pa.time32("s"), [0, DAY - 1], [DAY, -1]), (pa.time64("ns"), [1], [DAY * 10**9, *FAR])]
EDGES += [(pa.duration(unit), [2**42, -(2**42)], FAR) for unit in ("s", "ms")]
EDGES += [(pa.duration(unit), [0, *FAR], []) for unit in ("us", "ns")]
EDGES += [(pa.decimal128(5, 2), [99_999, -99_999], [100_000, 2**31])]
EDGES += [(pa.decimal256(76, 0), [10**76 - 1], [10**76])]


@pytest.mark.parametrize(("kind", "fine", "beyond"), EDGES, ids=str)
def test_keys_beyond_dates_and_numbers_are_told_row_by_row(kind, fine, beyond):
    """Each by itself, whatever stands beside it; NULL is a key like any other."""
    width = kind.bit_width // 8
    raw = b"".join(n.to_bytes(width, "little", signed=True) for n in [*fine, *beyond, 0])
    valid = pa.py_buffer(((1 << len(fine) + len(beyond)) - 1).to_bytes(8, "little"))
    keys = pa.Array.from_buffers(kind, len(fine) + len(beyond) + 1, [valid, pa.py_buffer(raw)])
    expected = [False] * len(fine) + [True] * len(beyond) + [False]

    assert unwritable(keys).tolist() == expected
    assert [bool(unwritable(keys.slice(n, 1))[0]) for n in range(len(keys))] == expected
    assert len(python_values(keys)) == len(keys)  # every one can be shown to the operator


def test_decimals_of_thousands_are_whole_numbers():
    """No file format but Arrow's own has a scale below zero."""
    assert canonical_type(pa.decimal128(5, -3)) == pa.decimal128(8, 0)
    assert canonical_type(pa.decimal128(30, -10)) == pa.decimal256(40, 0)
    assert (
        in_type(pa.array([Decimal("5e3")], pa.decimal128(5, -3)), pa.int64())[0][0].as_py() == 5000
    )


def test_types_have_the_names_of_bigquery_and_of_arrow():
    """Whatever the case; the types themselves too, in the form that is published."""
    given = {"b": "int64", "a": "Timestamp", "c": pa.date64(), "d": "float32", "e": "string"}

    assert dict(declared_types(given)) == {
        "a": INSTANT,
        "b": pa.int64(),
        "c": pa.date32(),
        "d": pa.float64(),
        "e": pa.string(),
    }
    assert all(canonical_type(kind) == kind == named_type(name) for name, kind in NAMES.items())


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"u": "INTEGER PLEASE"}, "knows no type 'INTEGER PLEASE'; use one of INT64"),
        ({"u": 5}, "takes names of types"),
        ({"u": pa.list_(pa.int8())}, "column_types: the type list.*cannot name a unit"),
        (7, "must be columns and their types"),
        ({"other": "INT64"}, "names 'other', and the query reads u, k; leave it out"),
    ],
)
def test_what_is_no_declaration_is_refused(given, because):
    with pytest.raises(InvalidParameter, match=because):
        dps.Query(
            privacy_unit_column="u", keys=["k"], epsilon=1, delta=1e-9, max_groups_contributed=1,
            column_types=given,
        )  # fmt: skip


def test_declared_types_hold_before_filters_and_for_times(tmp_path):
    """Text becomes numbers and times before SQL sees it; a row that does not is set aside once."""
    path = tmp_path / "rows.csv"
    lines = [f"{u}.0,{u % 3},2024-05-01T0{u % 4}:00:00Z" for u in range(300)]
    path.write_text("\n".join(["u,k,t", *lines, "7,x,2024-05-01T01:00:00Z", "8,1,noon"]))
    asked = dps.sql("""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 9, delta = 1e-3,
               privacy_unit_column = u, max_groups_contributed = 1,
               start = '2024-05-01', end = '2024-05-02',
               column_types = (u = INT64, k = INT64, t = TIMESTAMP))
               window_start, k, COUNT(*) AS n FROM TUMBLE(log, DESCRIPTOR(t), INTERVAL '1' DAY)
        WHERE k < 2 GROUP BY window_start, k""")
    run = dps.run(asked, source=str(path))
    before = run.schema
    (table,) = run

    assert table.schema.remove_metadata() == before
    assert sorted(table["k"].to_pylist()) == [0, 1]
    assert [one.reason for one in run.operator.latest] == ["not of its column's type"] * 2
    assert run.operator.rejected_rows == 2


def test_public_keys_are_read_as_rows_are():
    """By value, in the column's type; one key in two spellings is listed twice."""
    common = {
        "privacy_unit_column": "u",
        "keys": ["k"],
        "epsilon": 9,
        "delta": 1e-3,
        "max_groups_contributed": 1,
    }
    rows = pa.table({"u": range(50), "k": [dt.date(2024, 5, 1)] * 50})
    (table,) = dps.run(dps.Query(**common, public_groups=["2024-05-01"]), source=rows)
    assert table["k"].to_pylist() == [dt.date(2024, 5, 1)]

    texts = rows.set_column(1, "k", pa.array(["5"] * 50))
    (table,) = dps.run(dps.Query(**common, public_groups=[5.0]), source=texts)
    assert table["k"].to_pylist() == ["5"]
    assert table["count"][0].as_py() > 30
    with pytest.raises(InvalidInput, match="lists one key twice"):
        dps.run(dps.Query(**common, public_groups=[5.0, "5"]), source=texts).finish()
    with pytest.raises(InvalidInput, match=r"must fit its type date32.*got 'today'"):
        dps.run(dps.Query(**common, public_groups=["today"]), source=rows).finish()
