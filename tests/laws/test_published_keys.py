"""A published key is a function of its group's id: no row shows its own spelling of it."""

import datetime as dt
import json
import sqlite3
from decimal import Decimal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

import dpstream as dps
from dpstream.connectors.encode import jsonl
from dpstream.connectors.registry import open_sink
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, StateError
from dpstream.query.column_types import canonical_type
from dpstream.rows.column_values import canonical, types_of, unwritable
from dpstream.rows.row_ids import column_ids
from dpstream.serve.release_segments import key_values
from dpstream.serve.release_store import ReleaseStore
from tests.support.long import some_examples

KEY = bytes(range(16))
DAY = 86_400_000


class Reading(pa.ExtensionType):
    """A type of somebody's own, over any other."""

    def __init__(self, storage):
        super().__init__(storage, "dpstream.tests.reading")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls(storage)


FLOATS = {
    np.float16: [0x0000, 0x8000, 0x7E00, 0x7E01, 0xFE00, 0x3C00],
    np.float32: [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x3F800000],
    np.float64: [0, 1 << 63, 0x7FF8 << 48, (0x7FF8 << 48) + 7, 0xFFF8 << 48, 0x3FF0 << 48],
}
"""Bits: both zeros, three NaNs, one."""


def bits(values, kind):
    """An array whose values lie in memory as given, under NULLs too."""
    width = kind.bit_width // 8
    raw = b"".join(int(value).to_bytes(width, "little", signed=value < 0) for value in values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(raw)])


def floats(kind, dtype):
    return bits(FLOATS[dtype], kind)


def plain():
    """Every type of single values that is no wrapper, and values of it, some of them equal."""
    found = [
        pa.array([0, 1, 100, 1], kind)
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        )
    ]
    found += [floats(pa.float16(), np.float16), floats(pa.float32(), np.float32)]
    found.append(floats(pa.float64(), np.float64))
    found += [
        pa.array([Decimal("1.50"), Decimal("1.5"), Decimal("0.00"), Decimal("-1")], kind)
        for kind in (
            *(pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(20, 2), pa.decimal256(60, 2)),
        )
    ]
    found += [pa.array([True, False, True]), pa.array([dt.date(2024, 5, 1)] * 2, pa.date32())]
    found.append(bits([0, 1, DAY - 1, DAY, -1, -DAY, 2**62], pa.date64()))
    times = (*(pa.time32(unit) for unit in ("s", "ms")), *(pa.time64(u) for u in ("us", "ns")))
    found += [bits([0, 1, 86_399, 1], kind) for kind in times]
    found += [
        bits([0, 1, -1, 10**9, 1], kind)
        for unit in ("s", "ms", "us", "ns")
        for kind in (
            *(pa.timestamp(unit), pa.timestamp(unit, "UTC"), pa.timestamp(unit, "Asia/Tokyo")),
            pa.duration(unit),
        )
    ]
    texts = ["a", "", "a", "5", "5.0", "\u00e9", "e\u0301"]
    found += [pa.array(texts).cast(k) for k in (pa.string(), pa.large_string(), pa.string_view())]
    raw = pa.array([b"ab", b"cd", b"ab"])
    found += [raw, raw.cast(pa.large_binary()), raw.cast(pa.binary_view()), raw.cast(pa.binary(2))]
    found.append(pa.nulls(3))
    return found


def wrapped():
    """Types that wrap another: dictionaries, runs, extensions, and those within each other."""
    found = []
    for values in (floats(pa.float64(), np.float64), floats(pa.float32(), np.float32)):
        places = pa.array([5, 4, 3, 2, 1, 0, 1], pa.int8())
        found.append(pa.DictionaryArray.from_arrays(places, values))
        ends = pa.array(range(1, len(values) + 1), pa.int32())
        found.append(pa.RunEndEncodedArray.from_arrays(ends, values))
        found.append(pa.ExtensionArray.from_storage(Reading(values.type), values))
    days = bits([0, 5, DAY - 1, DAY], pa.date64())
    found.append(pa.ExtensionArray.from_storage(Reading(days.type), days))
    found.append(pa.DictionaryArray.from_arrays(pa.array([3, 2, 1, 0]), days))
    inner = pa.ExtensionArray.from_storage(Reading(pa.float64()), floats(pa.float64(), np.float64))
    found.append(pa.ExtensionArray.from_storage(Reading(inner.type), inner))
    found.append(
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 2, pa.binary(16)))
    )
    found.append(pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2, -1], pa.int8())))
    found.append(pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a":1}', '{"a": 1}'])))
    return found


ACCEPTED = [*plain(), *wrapped()]
REFUSED = [
    pa.month_day_nano_interval(),
    pa.list_(pa.int8()),
    pa.list_(pa.int8(), 2),
    pa.large_list(pa.int8()),
    pa.list_view(pa.int8()),
    pa.large_list_view(pa.int8()),
    pa.struct([("a", pa.int8())]),
    pa.map_(pa.string(), pa.int8()),
    pa.dense_union([pa.field("a", pa.int8())]),
    pa.sparse_union([pa.field("a", pa.int8())]),
    pa.fixed_shape_tensor(pa.int8(), [2]),
    pa.dictionary(pa.int8(), pa.list_(pa.int8())),
]


def shown(array, row):
    """The bytes of one row as Arrow hands them over, after what a release does to keys."""
    try:
        taken = array.take(pa.array([row]))
    except pa.ArrowNotImplementedError:  # of views and runs
        taken = array.slice(row, 1)
    return in_bytes(pa.table({"k": taken}))


def in_bytes(table):
    """A table as Arrow sends it: Python's values may hide what is in it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def spellings(ids, array):
    """For each id, how its rows are shown."""
    found = {}
    for row, one in enumerate(map(bytes, ids)):
        found.setdefault(one, set()).add(shown(array, row))
    return found


def test_every_type_of_arrow_is_here():
    """One that a later version adds is looked at before it can be a key."""
    known = {kind.id for kind in REFUSED} | {array.type.id for array in ACCEPTED}
    every = {number for name, number in vars(pa.lib).items() if name.startswith("Type_")}
    never = {pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME}  # Python makes none

    assert every - never - known == set()


@pytest.mark.parametrize("array", ACCEPTED, ids=lambda array: str(array.type))
@some_examples(20, of=2)
@given(data=st.data())
def test_equal_ids_are_shown_in_one_way(array, data):
    """Whatever rows there are, in whatever order, some of them NULL over any bits."""
    places = data.draw(st.lists(st.integers(0, len(array) - 1), min_size=1, max_size=8))
    nulls = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    rows = pa.concat_arrays([array.slice(place, 1) for place in places])
    if pa.types.is_primitive(array.type) or pa.types.is_decimal(array.type):
        mask = pa.py_buffer(np.packbits(~np.array(nulls), bitorder="little"))
        rows = pa.Array.from_buffers(rows.type, len(rows), [mask, *rows.buffers()[1:]])
    made = canonical(rows)

    assert made.type == canonical_type(array.type)
    made.validate(full=True)
    ids = column_ids(made, KEY)
    assert all(len(ways) == 1 for ways in spellings(ids, made).values())
    assert len(spellings(ids, made)) == len({shown(made, row) for row in range(len(made))})


def test_rows_as_they_came_would_show_their_spelling():
    """The control: without the canonical form the law does not hold for these types."""
    broken = {
        str(array.type)
        for array in ACCEPTED
        if any(len(ways) > 1 for ways in spellings(column_ids(array, KEY), array).values())
    }

    assert {"halffloat", "float", "double", "date64[ms]"} <= broken
    assert any("extension" in kind for kind in broken)


def query(**more):
    asked = {
        "name": "q",
        "privacy_unit_column": "u",
        "keys": ["k"],
        "epsilon": 8,
        "delta": 1e-3,
        "max_groups_contributed": 1,
        "pre_threshold": 0,
    }
    return dps.Query(**asked | more)


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_types_without_single_values_are_refused_before_anything_is_charged(kind, tmp_path):
    """As a key and as a unit, with what to do."""
    ledger = dps.Ledger(tmp_path / "ledger")
    for name, other in (("k", "u"), ("u", "k")):
        source = pa.table({name: pa.nulls(3, kind), other: [1, 2, 3]})
        with pytest.raises(InvalidInput, match=f"{name!r} has the type.*use one of its fields"):
            dps.run(query(), source=source, ledger=ledger).finish()
    assert list(ledger.history()) == []


VARIANTS = {
    "date64": (bits([DAY] * 50, pa.date64()), bits([DAY + 12_345_678, *[DAY] * 49], pa.date64())),
    "zeros": (pa.array([0.0] * 50), pa.array([-0.0, *[0.0] * 49])),
    "nans": (
        bits([0x7FF8 << 48] * 50, pa.float64()),
        bits([(0xFFF8 << 48) + 9, *[0x7FF8 << 48] * 49], pa.float64()),
    ),
    "half": (bits([0] * 50, pa.float16()), bits([0x8000, *[0] * 49], pa.float16())),
}
VARIANTS |= {
    "extension": tuple(
        pa.ExtensionArray.from_storage(Reading(pa.float64()), each) for each in VARIANTS["zeros"]
    ),
    "runs": tuple(
        pa.RunEndEncodedArray.from_arrays(pa.array(range(1, 51), pa.int32()), each)
        for each in VARIANTS["zeros"]
    ),
    "bool8": tuple(
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([first, *[1] * 49], pa.int8()))
        for first in (1, 2)
    ),
}


SINKS = ["csv:{}/csv", "jsonl:{}/jsonl", "{}/parquet", "{}/r.sqlite", "{}/r.duckdb", "delta:{}/d"]


def everywhere(column, place):
    """All that a run over 50 users shows, in tables and in every kind of sink."""
    place.mkdir()
    run = dps.run(
        query(),
        source=pa.table({"u": range(50), "k": column}),
        sink=[each.format(place) for each in SINKS],
        secret=bytes(32),
        options=EngineOptions(run_id=bytes(16)),
    )
    tables = [in_bytes(table) for table in run if len(table)]
    shown = [path.read_bytes() for name in ("csv", "jsonl", "parquet")
             for path in sorted((place / name).glob("q*"))]  # fmt: skip
    shown.append(sqlite3.connect(place / "r.sqlite").execute("SELECT * FROM q").fetchall())
    shown.append(duckdb.connect(str(place / "r.duckdb")).execute("SELECT * FROM q").fetchall())
    delta = DeltaTable(str(place / "d" / "q")).to_pyarrow_table()
    shown.append(in_bytes(delta))
    assert len(shown) == 6
    return [tables, *map(repr, shown)]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_row_that_comes_first_does_not_show_in_any_sink(name, tmp_path):
    """Two runs with the same noise, one user's spelling apart: not one byte differs."""
    usual, other = VARIANTS[name]

    one, two = everywhere(usual, tmp_path / "one"), everywhere(other, tmp_path / "two")

    assert one == two
    assert len(one[0]) == 1  # something was shown


def every_type_of_key():
    """Two rows of a release with a column of each type."""
    made = {str(array.type): array.slice(0, 2) for array in map(canonical, ACCEPTED)}
    about = {"run": "r", "release_index": 1}
    return pa.table(made).replace_schema_metadata({"dpstream": json.dumps(about)})


def test_every_sink_writes_every_type_that_a_key_has(tmp_path):
    """An empty table first, then rows: no type that is accepted stops a run after its charge."""
    rows = every_type_of_key()
    for spec in SINKS:
        sink = open_sink(spec.format(tmp_path))
        sink.write("q", 0, 1, rows.slice(0, 0))
        sink.write("q", 0, 2, rows)
        sink.close()
    assert rows.num_columns >= 25
    found = sqlite3.connect(tmp_path / "r.sqlite").execute("SELECT count(*) FROM q").fetchall()
    assert found == [(2,)]


def keys_at_the_edges():
    """The least and largest values that are not set aside, of each kind, and NULL."""
    first, last = -62_135_596_800, 253_402_300_799
    made = {
        f"{unit} {zone}": bits([first * n, last * n], pa.timestamp(unit, zone))
        for unit, n in (("s", 1), ("ms", 1000), ("us", 10**6))
        for zone in (None, "UTC", "Asia/Tokyo", "America/New_York")
    }
    made |= {
        "ns": bits([2**63 - 1, -(2**63), 1], pa.timestamp("ns", "America/New_York")),
        "day": bits([first // 86_400, last // 86_400], pa.date32()),
        "time": bits([1, 86_400 * 10**9 - 1], pa.time64("ns")),
        "seconds": bits([2**42, -(2**42)], pa.duration("s")),
        "micros": bits([2**63 - 1, -(2**63)], pa.duration("us")),
        "text": pa.array(["\0", "\u2028\u2029\x85\x0b\x1c", '\r\n",;\t\\', "\\.", "\U0010ffff"]),
        "bytes": pa.array([b"", b"\xff\xfe", b"\0"]),
        "signed": pa.array([2**63 - 1, -(2**63)]),
        "unsigned": pa.array([2**64 - 1], pa.uint64()),
        "float": pa.array([float("nan"), float("inf"), -float("inf"), 5e-324, -1.7e308]),
        "decimal": pa.array([Decimal(10**38 - 1), Decimal(1 - 10**38)], pa.decimal128(38, 0)),
        "wide": pa.array([Decimal(10**76 - 1)], pa.decimal256(76, 0)),
    }
    return {name: pa.concat_arrays([a, pa.nulls(5 - len(a), a.type)]) for name, a in made.items()}


def test_every_sink_writes_every_key_that_is_not_set_aside(tmp_path):
    """Also the server's: so no key that a row can latch stops a run after its charge."""
    keys = keys_at_the_edges()
    about = {"run": "r", "release_index": 1, "releases": 2, "window_start": None}
    about |= {"window_end": None, "trigger_time": None}
    rows = pa.table(keys).replace_schema_metadata({"dpstream": json.dumps(about)})
    assert not any(unwritable(array).any() for array in keys.values())
    served = ReleaseStore(tmp_path / "served", keys={"q": [*keys]})
    for sink in (*(open_sink(spec.format(tmp_path)) for spec in SINKS), served):
        sink.write("q", 0, 1, rows)
        sink.write("q", 0, 2, rows)
        sink.close()
    served.shut()

    assert all(len(json.loads(line)) == len(keys) for line in jsonl(rows).split(b"\n")[:-1])
    shown = [json.dumps(key) for key in key_values(rows, [*keys])]
    assert len({*shown}) == 5
    delta = DeltaTable(str(tmp_path / "d" / "q")).to_pyarrow_table()
    assert delta["text"].to_pylist() == keys["text"].to_pylist() * 2


def test_a_database_says_why_it_refuses(tmp_path):
    """Not that its transaction was given up, which follows from that."""
    sink = open_sink(tmp_path / "r.duckdb")
    far = pa.table({"k": bits([2**63 - 1], pa.timestamp("s", "UTC"))})
    with pytest.raises(StateError, match="Could not convert"):
        sink.write("q", 0, 1, far)


def test_a_file_of_another_type_shows_the_same_keys(tmp_path):
    """The first schema holds; what comes later is cast by value, or set aside with the reason."""
    source = [tmp_path / f"{n}.parquet" for n in range(3)]
    parts = [
        pa.table({"u": range(200), "k": pa.array([5] * 200)}),
        pa.table({"u": range(200, 400), "k": pa.array([5.0] * 199 + [None])}),
        pa.table({"u": range(400, 402), "k": pa.array([5.5, 2.0**70])}),
    ]
    for path, part in zip(source, parts, strict=True):
        pa.parquet.write_table(part, path)
    run = dps.run(query(), source=[str(path) for path in source])
    (table,) = run

    assert table.schema.field("k").type == pa.int64()
    assert table["k"].to_pylist() == [5]
    assert abs(table["count"][0].as_py() - 399) < 20
    assert [one.reason for one in run.operator.latest] == ["not of its column's type"] * 2


def test_a_missing_integer_of_pandas_does_not_change_the_type():
    """pandas has floats then; that a type is published depends on no row: it must be declared."""
    import pandas as pd

    frames = [pd.DataFrame({"u": np.arange(50), "k": [5] * 50}) for _ in range(2)]
    frames[1].loc[3, "k"] = None
    objects = pd.DataFrame({"u": np.arange(50), "k": pd.Series([5] * 50, dtype=object)})
    for frame in (frames[1], objects):
        with pytest.raises(InvalidInput, match=r"'k' of the data frame.*column_types="):
            dps.run(query(), source=frame)
        with pytest.raises(InvalidInput, match=r"'k' of the data frame.*column_types="):
            dps.run_all([query()], source=frame)
    sql = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-3,
        privacy_unit_column = u, max_groups_contributed = 1) k + 1 AS j, COUNT(*) AS n
        FROM t GROUP BY j"""
    with pytest.raises(InvalidInput, match="'k' of the data frame"):
        dps.run(dps.sql(sql), source=frames[1])

    for frame in (*frames, objects):
        run = dps.run(query(column_types={"k": "INT64"}), source=frame)
        told = run.schema
        (table,) = run
        assert (table.schema, table["k"].to_pylist()) == (told, [5])
        assert table.schema.field("k").type == pa.int64()


def test_one_object_of_another_kind_costs_its_own_row():
    """What can be written as text is text, as in every text source; the rest is set aside."""
    import pandas as pd

    odd = [5, 2.0, Decimal("1.50"), dt.date(2024, 5, 1), 2**80, None, np.nan]
    never = [b"a", ["a"], {"a": 1}, "\ud800", object()]
    column = pd.Series(["a"] * 50 + odd + never, dtype=object)
    frame = pd.DataFrame({"u": np.arange(len(column)), "k": column, "other": "x"})
    run = dps.run(query(), source=frame)
    (table,) = run

    assert table["k"].to_pylist() == ["a"]
    assert run.operator.read == len(column)
    assert {one.reason for one in run.operator.latest} == {"not of its column's type: k"}
    assert [one.where for one in run.operator.latest] == [f"table, row {57 + n}" for n in range(5)]
    assert json.loads(run.operator.latest[1].row) == {"k": "['a']"}
    assert not dps.run(query(keys=["other"]), source=frame).finish().operator.rejected_rows

    declared = query(column_types={"k": "INT64"})
    run = dps.run(declared, source=pd.DataFrame({"u": range(50), "k": [7] * 49 + ["x"]}))
    assert [table["k"].to_pylist() for table in run] == [[7]]
    assert [one.reason for one in run.operator.latest] == ["not of its column's type"]


def test_a_column_of_objects_that_changes_its_type_must_be_declared():
    """Truth values alone are published as such; beside others they would be text."""
    import pandas as pd

    mixed = pd.DataFrame({"u": range(50), "k": pd.Series([True] * 49 + ["x"], dtype=object)})
    with pytest.raises(InvalidInput, match="truth values beside others"):
        dps.run(query(), source=mixed)
    with pytest.raises(InvalidInput, match="'k' holds values of the type object"):
        dps.run(query(), source=pd.DataFrame({"u": range(2), "k": [object(), object()]}))
    twice = pd.DataFrame([[1, "a"]], columns=["k", "k"])
    with pytest.raises(InvalidInput, match="columns of a table must differ; got k, k"):
        dps.run(query(), source=twice)


def test_text_and_missing_keys_of_pandas_need_no_declaration():
    """Text is text, whatever else a frame holds."""
    import pandas as pd

    frame = pd.DataFrame({"u": [*range(49), 1.5], "k": ["a"] * 49 + [None]})

    (table,) = dps.run(query(), source=frame)
    assert table["k"].to_pylist() == ["a"]


def test_types_are_those_of_what_is_computed():
    """SQL's own expressions have types too; a key that is computed is canonical like any other."""
    sql = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-3,
        privacy_unit_column = u, max_groups_contributed = 1) k * -1 AS j, COUNT(*) AS n
        FROM t GROUP BY j"""
    asked = dps.sql(sql)
    assert types_of(asked, {"u": pa.int8(), "k": pa.float32()})["j"] == pa.float64()
    (table,) = dps.run(asked, source=pa.table({"u": range(50), "k": [0.0] * 50}))

    assert str(table["j"].to_pylist()) == "[0.0]"  # not -0.0
    assert pc.all(pc.equal(table["j"], 0.0)).as_py()
