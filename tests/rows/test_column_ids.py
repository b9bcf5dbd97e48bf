"""Equal values get equal ids whatever type stores them; different values do not."""

import math
from datetime import date
from decimal import Decimal
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.errors import InvalidInput
from dpstream.rows.row_ids import column_ids
from tests.rows.hashes import KEY, ids


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()],
    ids=str,
)
def test_an_integer_is_its_number_in_every_width(kind):
    """A file that stores a unit as int32 and one that stores it as uint64 mean the same unit."""
    assert ids([0, 5, 127, None], kind) == ids([0, 5, 127, None], pa.int64())


def test_large_unsigned_integers_are_not_the_negative_ones():
    """2^64 - 1 and -1 have the same bits and are different numbers."""
    large = ids([2**64 - 1, 2**63, 2**63 - 1], pa.uint64())

    assert not set(large[:2]) & set(ids([-1, -(2**63)]))
    assert large[2:] == ids([2**63 - 1])


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.uint64(), pa.large_string()),
        pa.run_end_encoded(pa.int32(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [slice(None), slice(3, 5), slice(1, 40)], ids=str)
def test_text_is_text_in_every_type(kind, cut):
    """Equal text has equal ids however it is stored, in slices too."""
    values = ["a", "", None, "b", "a", "a text of more than sixteen bytes", None, "b"] * 10

    assert ids(stored(values, kind)[cut]) == ids(pa.array(values[cut]))


def stored(values, kind):
    plain = pa.array(values)
    if pa.types.is_run_end_encoded(kind):
        return pc.run_end_encode(plain)
    return (plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain).cast(kind)


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary_view(), pa.binary(3)], ids=str)
def test_bytes_are_bytes_in_every_type(kind):
    """Fixed and variable widths agree; text with the same bytes is another value."""
    values = [b"abc", None, b"xyz", b"\0\0\0"]

    assert ids(pa.array(values, kind)[1:]) == ids(values)[1:]
    assert not set(ids(["abc", "xyz"])) & set(ids(values))


def test_an_extension_type_counts_as_its_storage():
    """A UUID column is the column of its texts: what is hashed is what is published."""
    values = [bytes(16), None, KEY]
    texts = [None if value is None else str(UUID(bytes=value)) for value in values]
    storage = pa.array(values, pa.binary(16))

    assert ids(pa.ExtensionArray.from_storage(pa.uuid(), storage)[1:]) == ids(texts)[1:]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.int8(),
        pa.bool_(),
        pa.float32(),
        pa.string(),
        pa.date32(),
        pa.decimal128(9, 2),
    ],
    ids=str,
)
def test_a_slice_is_read_from_its_offset(kind):
    """Values and validity of a slice start in the middle of their buffers."""
    array = pa.array([i % 2 if i % 3 else None for i in range(700)], pa.int8()).cast(
        pa.int32() if kind == pa.date32() else kind
    )
    array = array.cast(kind)

    assert (
        ids(array[13:613]) == ids(array)[13:613] == ids(pa.array(array[13:613].to_pylist(), kind))
    )


def test_chunks_are_one_column():
    """Chunks, empty ones too, give the ids of the rows in order, shared dictionary or not."""
    one, two = pa.array(["a", None, "b"]), pa.array(["b", "c"])
    chunked = pa.chunked_array([one, one[:0], two])

    assert ids(chunked) == ids(one) + ids(two)
    assert ids(chunked.dictionary_encode()) == ids(chunked)
    other = pa.chunked_array(
        [one.dictionary_encode(), two.dictionary_encode(), two[:1].dictionary_encode()]
    )
    assert ids(other) == ids(one) + ids(two) + ids(two)[:1]
    assert column_ids(pa.chunked_array([], pa.string()), KEY).shape == (0, 2)


def test_null_is_a_value_of_its_own():
    """NULL is the same in every type and differs from the empty and the zero of each."""
    nulls = {ids([None], kind)[0] for kind in (pa.null(), pa.int64(), pa.string(), pa.float64())}

    assert len(nulls) == 1
    assert not nulls & set(ids([""]) + ids([b""]) + ids([0]) + ids([0.0]) + ids([False]))


def test_a_null_row_may_hold_anything():
    """What lies under a NULL does not reach its id."""
    validity = pa.py_buffer(bytes([0b101]))
    numbers = pa.Array.from_buffers(pa.int64(), 3, [validity, pa.py_buffer(np.arange(3).tobytes())])
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    text = pa.Array.from_buffers(pa.string(), 3, [validity, offsets, pa.py_buffer(b"abcd")])

    assert ids(numbers) == ids([0, None, 2])
    assert ids(text) == ids(["a", None, "d"])


@pytest.mark.parametrize("values", [["a", None], [None, None], []], ids=str)
def test_nulls_in_a_dictionary(values):
    """A NULL index, a NULL entry and a dictionary without entries all mean NULL."""
    by_index = pa.array(values, pa.string()).dictionary_encode()
    by_entry = pa.DictionaryArray.from_arrays(
        pa.array(range(len(values)), pa.int8()), pa.array(values, pa.string())
    )

    assert ids(by_index) == ids(by_entry) == ids(values, pa.string())


def test_floats_are_canonical():
    """Every NaN is one value, -0.0 is 0.0, float32 is the float64 it stands for."""
    odd_nan = np.array([0xFFF8000000000123], np.uint64).view(np.float64)

    assert ids([math.nan]) == ids(pa.array(odd_nan)) == ids([math.nan], pa.float32())
    assert ids([-0.0]) == ids([0.0])
    assert (
        ids([1.5, math.inf], pa.float32())
        == ids([1.5, math.inf])
        == ids(np.float16([1.5, math.inf]))
    )
    assert ids([1.0]) != ids([1])


def test_decimals_are_equal_as_numbers():
    """Scale and width do not count, and no digit is lost."""
    short = ids([Decimal("1.5"), Decimal(100), Decimal(0), None], pa.decimal128(9, 1))

    assert ids([Decimal("1.500"), Decimal(100), Decimal(0), None], pa.decimal256(60, 3)) == short
    assert ids([Decimal("1.50"), Decimal(100), Decimal(0), None], pa.decimal64(9, 2)) == short
    assert ids(pa.array([Decimal("1E+2")], pa.decimal128(3, -2))) == short[1:2]
    nearly = [Decimal(10**75), Decimal(10**75 + 1)]
    assert len(set(ids(nearly, pa.decimal256(76, 0)))) == 2


TIMES = [pa.timestamp, lambda unit: pa.timestamp(unit, "UTC"), pa.duration]


@pytest.mark.parametrize("kind", TIMES)
def test_instants_are_equal_in_every_unit(kind):
    """One instant has one id: in seconds, milliseconds, micro- and nanoseconds."""
    seconds = ids(pa.array([0, -1, 86400, None], kind("s")))

    for unit, factor in (("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        same = [0, -factor, 86400 * factor, None]
        assert ids(pa.array(same, pa.int64()).cast(kind(unit))) == seconds


@pytest.mark.parametrize("kind", TIMES)
def test_nanoseconds_between_microseconds_are_instants_of_their_own(kind):
    """Nothing is rounded."""
    nanos = ids(pa.array([1000, 1001, 1, -1], kind("ns")))

    assert nanos[:1] == ids(pa.array([1], kind("us")))
    assert len({*nanos, *ids(pa.array([0, 1001, -1], kind("us")))}) == 4 + 3


@pytest.mark.parametrize("kind", TIMES)
def test_instants_beyond_the_microseconds_do_not_wrap_around(kind):
    """Seconds whose microseconds exceed 64 bits are not the instant with the remaining bits."""
    far, farther = 2**63 // 10**6 + 1, 2**63 // 10**3 + 1
    seconds = ids(pa.array([far, farther, -far, -farther], kind("s")))

    assert seconds[::2] == ids(pa.array([far * 1000, -far * 1000], kind("ms")))
    for unit, factor in (("us", 10**6), ("ms", 10**3)):
        remaining = [wrapped(value * factor) for value in (farther, -farther)]
        assert not set(seconds) & set(ids(pa.array(remaining, kind(unit))))
    remaining = [wrapped(value * 10**6) for value in (far, -far)]
    assert not set(seconds) & set(ids(pa.array(remaining, kind("us"))))


def wrapped(value):
    return (value + 2**63) % 2**64 - 2**63


def test_kinds_of_times_are_apart():
    """A day, an instant with and without zone, a time of day and a duration are not one value."""
    same = [
        ids(pa.array([0], pa.date32())),
        ids(pa.array([0], pa.timestamp("s"))),
        ids(pa.array([0], pa.timestamp("s", "Europe/Berlin"))),
        ids(pa.array([0], pa.time32("s"))),
        ids(pa.array([0], pa.duration("s"))),
        ids([0]),
    ]

    assert len({one for (one,) in same}) == len(same)
    assert same[2] == ids(pa.array([0], pa.timestamp("ns", "UTC")))
    assert same[3] == ids(pa.array([0], pa.time64("ns")))
    assert ids([date(2024, 2, 29), date(1960, 1, 1)], pa.date64()) == ids(
        [date(2024, 2, 29), date(1960, 1, 1)]
    )


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.struct([("a", pa.int64())]),
        pa.map_(pa.string(), pa.int64()),
        pa.month_day_nano_interval(),
    ],
    ids=str,
)
def test_nested_types_are_refused(kind, rows):
    """The error names the type and the fix, whatever the rows are."""
    with pytest.raises(InvalidInput, match=r"type .*(list|struct|map|interval).*cast it"):
        column_ids(pa.nulls(rows, kind), KEY)


SCALARS = st.one_of(
    st.tuples(st.just(pa.int64()), st.none()),
    st.tuples(st.sampled_from([pa.int64(), pa.uint8(), pa.uint64()]), st.integers(0, 255)),
    st.tuples(st.just(pa.int64()), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(pa.uint64()), st.integers(0, 2**64 - 1)),
    st.tuples(st.just(pa.bool_()), st.booleans()),
    st.tuples(st.sampled_from([pa.float64(), pa.float32()]), st.floats(width=32)),
    st.tuples(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]), st.text()),
    st.tuples(st.sampled_from([pa.string(), pa.binary()]), st.sampled_from(["", "a", "ab", "a\0"])),
    st.tuples(st.just(pa.binary()), st.binary()),
)


def meaning(kind, value):
    """What a value is, apart from the type that stores it."""
    if value is None:
        return ("null",)
    if pa.types.is_floating(kind):
        return ("float", "nan" if math.isnan(value) else value + 0.0)
    if pa.types.is_binary(kind):
        return ("binary", value.encode() if isinstance(value, str) else value)
    return (type(value).__name__, value)


@given(st.lists(SCALARS, min_size=2, max_size=12))
def test_ids_are_equal_exactly_for_equal_values(scalars):
    """Over all pairs of a mixed list: equal ids if and only if equal values."""
    meanings = [meaning(kind, value) for kind, value in scalars]
    found = [ids(pa.array([value], kind))[0] for kind, value in scalars]

    assert len(set(found)) == len(set(meanings)) == len(set(zip(found, meanings, strict=True)))
