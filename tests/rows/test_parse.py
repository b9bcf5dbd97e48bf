"""Times and numbers as they come; what cannot be read is marked."""

from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from dpstream.errors import InvalidInput
from dpstream.query.windows import DAY, SECOND, instant, iso
from dpstream.rows import parse


def times(values, kind=None, *, zone="UTC", unit=None, origin=0):
    """ISO text of each, None where it is not readable."""
    column = pa.chunked_array([pa.array(values, kind)])
    found, readable = parse.times(column, "ts", zone=zone, unit=unit, origin=origin)
    assert found.dtype == np.int64
    return [
        iso(time) if ok else None
        for time, ok in zip(found.tolist(), readable.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    "kind", [*map(pa.timestamp, ("s", "ms")), pa.date32(), pa.date64()], ids=str
)
def test_far_times_do_not_come_round(kind):
    """2^62 seconds, wrapped into 64 bits of microseconds, would be midnight of 1970-01-01."""
    days = pa.types.is_date32(kind)
    counts = pa.array([0, *([2**31 - 1, -(2**31)] if days else [2**62, -(2**63)])])
    far = counts.cast(pa.int32() if days else pa.int64()).view(kind)

    for zone in ("UTC", "Europe/Berlin"):
        found, readable = parse.times(pa.chunked_array([far]), "t", zone=zone, unit=None, origin=0)
        assert readable.tolist() == [True, False, False]
        assert abs(found[0]) <= 3600 * SECOND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-01", "2024-05-01T00:00:00+00:00"),
        ("2024-05-01T10:20", "2024-05-01T10:20:00+00:00"),
        ("2024-05-01 10:20:30", "2024-05-01T10:20:30+00:00"),
        ("2024-05-01T10:20:30.5", "2024-05-01T10:20:30.500000+00:00"),
        ("2024-05-01T10:20:30.123456789", "2024-05-01T10:20:30.123456+00:00"),
        ("2024-05-01T10:20:30Z", "2024-05-01T10:20:30+00:00"),
        ("2024-05-01T10:20:30+02:00", "2024-05-01T08:20:30+00:00"),
        ("2024-05-01T10:20:30-0430", "2024-05-01T14:50:30+00:00"),
        ("2024-05-01T10:20+02", "2024-05-01T08:20:00+00:00"),
        (" 2024-05-01T10:20 ", "2024-05-01T10:20:00+00:00"),
        ("1903-01-02", "1903-01-02T00:00:00+00:00"),
    ],
)
def test_written_times_are_iso_text(text, expected):
    """With or without offset, alone and beside text that is none."""
    assert times([text]) == [expected]
    assert times(["rubbish", text, None]) == [None, expected, None]


BAD = ("", "now", "2024-02-30", "2024-13-01", "2024-05-01T24:00", "2024-05-01T10:60", "24-05-01")
BAD += ("2023-02-29T10:00Z", "2024-05-01T10:20:30+2", "1714557630", "2024-05-01T10:20:60")


@pytest.mark.parametrize("text", BAD)
def test_text_that_is_no_time_is_marked(text):
    """30 February blames its own row alone."""
    good = "2024-05-01T00:00:00+00:00"
    assert times([text]) == [None]
    assert times(["2024-05-01", text, "2024-05-01T00:00Z", text]) == [good, None, good, None]


def test_times_without_offset_are_local():
    """An hour that the clock leaves out or repeats is read the same way every time."""
    rome = times(
        ["2024-07-01", "2024-01-01T12:00", "2024-01-01T12:00Z", "2024-10-27T02:30"],
        zone="Europe/Rome",
    )
    assert rome == [
        "2024-06-30T22:00:00+00:00",
        "2024-01-01T11:00:00+00:00",
        "2024-01-01T12:00:00+00:00",
        "2024-10-27T00:30:00+00:00",
    ]
    (missing,) = times(["2024-03-31T02:30"], zone="Europe/Rome")
    assert missing is not None


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("ns")])
def test_timestamps_are_read_in_any_unit(kind):
    """Without a zone they are local, NULL is not readable."""
    moment = datetime(2024, 7, 1)
    assert times([moment, None], kind) == ["2024-07-01T00:00:00+00:00", None]
    assert times([moment], kind, zone="Europe/Rome") == ["2024-06-30T22:00:00+00:00"]


def test_instants_and_dates_are_read():
    """A zone of the column's own goes before that of the query."""
    aware = pa.timestamp("us", tz="America/New_York")
    moment = datetime(2024, 7, 1, tzinfo=UTC)
    assert times([moment], aware, zone="Europe/Rome") == ["2024-07-01T00:00:00+00:00"]
    for kind in (pa.date32(), pa.date64()):
        assert times([date(2024, 7, 1)], kind) == ["2024-07-01T00:00:00+00:00"]
        assert times([date(2024, 7, 1)], kind, zone="Europe/Rome") == ["2024-06-30T22:00:00+00:00"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([3, None, 2**62], pa.int64()),
        ([3, None, 2**63], pa.uint64()),
        ([3.0, float("nan"), 1e300], pa.float64()),
        (["3", "", "1e300"], pa.string()),
        (["3", "x", "inf"], pa.string()),
    ],
)
def test_counted_times_have_a_unit_and_an_origin(values, kind):
    """Numbers too large for a time are marked, and never wrap around."""
    origin = instant("2024-01-01", "origin")
    expected = ["2024-01-04T00:00:00+00:00", None, None]
    assert times(values, kind, unit=DAY, origin=origin) == expected
    assert times([values[0]], kind, unit=DAY, origin=origin) == expected[:1]
    assert times([values[2]], kind, unit=DAY, origin=origin) == [None]


def test_fractions_of_a_unit_count():
    """Seconds with decimals, also before 1970; floor, so that no time is moved ahead."""
    found = times([1.5, -0.5, -1e-7], pa.float64(), unit=SECOND)
    assert found[0] == "1970-01-01T00:00:01.500000+00:00"
    assert found[1] == "1969-12-31T23:59:59.500000+00:00"
    assert found[2] == "1969-12-31T23:59:59.999999+00:00"


def test_columns_that_hold_no_times_are_refused():
    """By their type alone, with what to do."""
    with pytest.raises(InvalidInput, match="time_unit"):
        times([1, 2])
    with pytest.raises(InvalidInput, match="'ts'"):
        times([True])
    with pytest.raises(InvalidInput, match="'x'"):
        parse.numbers(pa.chunked_array([pa.array([date(2024, 1, 1)])]), "x")


def numbers(values, kind=None):
    """Each number; "null", "odd" (NaN or infinite) or "bad" where it is none."""
    found, readable = parse.numbers(pa.chunked_array([pa.array(values, kind)]), "x")
    words = []
    for value, ok in zip(found.tolist(), readable.tolist(), strict=True):
        if not ok:
            words.append("bad")
        elif np.isnan(value):
            words.append("null")
        else:
            words.append("odd" if np.isinf(value) else value)
    return words


def test_written_numbers():
    """Plain decimal text; empty is NULL; a NaN that is written is not NULL."""
    text = ["1", " -2.50 ", "+.5", "7.", "1e3", "", None, "nan", "-Infinity", "inf"]
    expected = [1, -2.5, 0.5, 7, 1000, "null", "null", "odd", "odd", "odd"]
    assert numbers(text) == expected
    assert numbers(text, pa.large_string()) == expected
    assert numbers(pa.array(text).dictionary_encode()) == expected


@pytest.mark.parametrize("text", ["x", "1,5", "0x10", "1e", "--1", "1 2", "nano", "½", "1_000"])
def test_text_that_is_no_number_is_marked(text):
    """And only its own row."""
    assert numbers([text, "1"]) == ["bad", 1]


def test_a_written_number_beyond_floats_is_not_null():
    """1e999 is infinite to a computer, and set aside like other infinite numbers."""
    assert numbers(["1e999", "-1e999", "1"]) in (["odd", "odd", 1], ["bad", "bad", 1])


def test_typed_numbers():
    """Any width; NULL stays NULL, NaN in the data is odd."""
    assert numbers([1, None, -3], pa.int8()) == [1, "null", -3]
    assert numbers([2**64 - 1], pa.uint64()) == [2.0**64]
    assert numbers([1.5, None, float("nan"), float("inf")]) == [1.5, "null", "odd", "odd"]
    assert numbers([True, False, None]) == [1, 0, "null"]
    assert numbers([Decimal("1.25"), None]) == [1.25, "null"]
    assert numbers([], pa.int64()) == []


def test_long_columns_in_many_chunks_are_one():
    """Dictionaries are read as what they hold."""
    parts = [pa.array(["a", "b"]), pa.array(["c"])]
    assert parse.whole_column(pa.chunked_array(parts)).to_pylist() == ["a", "b", "c"]
    coded = pa.chunked_array([part.dictionary_encode() for part in parts])
    assert parse.whole_column(coded).to_pylist() == ["a", "b", "c"]
    assert parse.whole_column(pa.chunked_array([], pa.string())).to_pylist() == []
