"""Payloads of messages: rows, poison, and nothing that reaches from one message into another."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.connectors.messages import Decoder
from dpstream.errors import InvalidInput, InvalidParameter

FIELDS = ["user", "page"]


def place(number):
    return f"clicks, message {number}"


def formats():
    return {
        "json": Decoder("json"),
        "csv": Decoder("csv", header=FIELDS),
        "headed": Decoder("csv"),
        "arrow": Decoder("arrow"),
    }


def stream(table):
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue().to_pybytes()


def decoded(kind, messages, columns=FIELDS):
    found = formats()[kind].decode(messages, columns)
    bad = found.rejected(messages, place)
    assert len(found.origin) == found.table.num_rows
    return found.table.to_pylist(), [(one.where, one.reason) for one in bad]


def test_json_objects_and_poison():
    """An object a message, over several lines if it likes."""
    rows, bad = decoded("json", [
        b'{"user": "a", "page": 1, "more": [1]}',
        b'{\n  "user": "b",\n  "page": null\n}\n',
        b'{"user": "c"}\n{"user": "d", "page": "x"}',
        b"",
        None,
        b'{"user": "e"',
        b'{"user": [1]}',
        b"\xff\xfe",
        b"[1]",
    ])  # fmt: skip

    assert [row["user"] for row in rows] == ["a", "b"]
    assert [row["page"] for row in rows] == ["1", None]
    assert [where for where, _ in bad] == [place(n) for n in (2, 3, 4, 5, 6, 7, 8)]
    assert "not JSON" in dict(bad)[place(5)]


def test_csv_lines_and_poison():
    """Quotes that never close cost their own message and no other."""
    rows, bad = decoded("csv", [b"a,1", b'b,"x', b'c,"y,z"', b"d", b"", b'"e\nf",2', b"g,\xff"])

    found = [(row["user"], row["page"]) for row in rows]
    assert found == [("a", "1"), ("c", "y,z"), ("e\nf", "2")]
    assert [where for where, _ in bad] == [place(n) for n in (1, 3, 4, 6)]


def test_arrow_values_are_text():
    """Of whatever type they are; a message that lacks a column is no row."""
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    first = pa.table({"user": [1, 2], "page": ["x", None], "at": pa.array([noon] * 2)})
    second = pa.table({"user": pa.array(["1"]).dictionary_encode(), "page": ["y"], "at": [1.5]})
    broken = bytearray(stream(first))
    broken[40:60] = b"\xff" * 20
    rows, bad = decoded(
        "arrow",
        [stream(first), stream(second), b"", b"garbage", bytes(broken), stream(first.select([0]))],
        ["user", "page", "at"],
    )

    assert [row["user"] for row in rows] == ["1", "2", "1"]
    assert [row["page"] for row in rows] == ["x", None, "y"]
    assert [row["at"] for row in rows] == ["2024-05-01 12:00:00.000000Z"] * 2 + ["1.5"]
    assert [where for where, _ in bad] == [place(n) for n in (2, 3, 4, 5)]


def test_an_offset_that_lies_is_no_crash():
    """Text of an Arrow message is checked before it is used."""
    table = pa.table({"user": ["abc", "defg"], "page": ["x", "y"]})
    whole = bytearray(stream(table))
    at = whole.index(b"abcdefg")
    offsets = whole.rindex((3).to_bytes(4, "little") + (7).to_bytes(4, "little"), 0, at)
    whole[offsets : offsets + 4] = (10**6).to_bytes(4, "little")
    rows, bad = decoded("arrow", [bytes(whole), stream(table)])

    assert len(rows) == 2
    assert [where for where, _ in bad] == [place(0)]


LINES = st.sampled_from([
    b'{"user": "a", "page": "1"}', b'{"user": "b"}\n{"user": "c"}', b'{"user": ', b"a,1", b'a,"1',
    b'"b,2', b'b","2', b'x"y,"z', b"c,3\nd,4", b"e", b"", b"\n", b"\r", b'"f\n', b',"', b"\xff,1",
])  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "csv", "headed"])
@given(messages=st.lists(LINES, max_size=6))
def test_a_message_is_read_alone(kind, messages):
    """Together they give the rows that each gives by itself."""
    together, bad = decoded(kind, messages)
    alone = [decoded(kind, [one]) for one in messages]

    assert together == [row for rows, _ in alone for row in rows]
    expected = [(place(n), why) for n, (_, found) in enumerate(alone) for _, why in found]
    assert sorted(bad) == sorted(expected)


def test_every_column_without_a_choice():
    """Whatever the messages have."""
    assert decoded("json", [b'{"a": 1}', b'{"b": 2}'], None)[0] == [
        {"a": "1", "b": None},
        {"a": None, "b": "2"},
    ]
    assert decoded("csv", [b"a,1"], None)[0] == [{"user": "a", "page": "1"}]
    both = [stream(pa.table({"a": [1]})), stream(pa.table({"b": [2]}))]
    assert decoded("arrow", both, None)[0] == [{"a": "1", "b": None}, {"a": None, "b": "2"}]


def test_what_cannot_be_is_refused():
    """A format that is not there, a header without csv, a column that the header does not have."""
    with pytest.raises(InvalidParameter, match="one of json, csv, arrow; got 'xml'"):
        Decoder("xml")
    with pytest.raises(InvalidParameter, match="the format is json"):
        Decoder("json", header=FIELDS)
    for message in (b"a,1", b'a,"1"'):
        with pytest.raises(InvalidInput, match="no column 'time'"):
            formats()["csv"].decode([message], ["time"])


def ipc(table: pa.Table, *, file: bool = False, compression: str | None = None) -> bytes:
    """A table as an Arrow stream or file."""
    out = pa.BufferOutputStream()
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return out.getvalue().to_pybytes()


LONG_TEXT = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100, np.int32)), ["x" * 100_000])


@pytest.mark.parametrize("file", [False, True], ids=["stream", "file"])
@pytest.mark.parametrize(
    ("table", "compression"),
    [
        (pa.table({"a": np.zeros(1_000_000)}), "zstd"),
        (pa.table({"a": np.zeros(1_000_000)}), "lz4"),
        (pa.table({"a": pa.nulls(1_000_000)}), None),
        (pa.table({"a": LONG_TEXT}), None),
    ],
    ids=["zstd", "lz4", "nulls", "one long value"],
)
def test_an_arrow_message_that_unpacks_to_too_much_is_set_aside(table, compression, file):
    """Before it is unpacked, and alone; a small one of the same kind is read."""
    decoder = Decoder("arrow")
    decoder.max_unpacked = 4 << 20
    big = ipc(table, file=file, compression=compression)
    small = ipc(table.slice(0, 2), file=file, compression=compression)
    assert len(big) < 1 << 20

    found = decoder.decode([small, big, small], ["a"])
    assert found.origin.tolist() == [0, 0, 2, 2]
    ((at, reason),) = found.bad
    assert (at, reason) == (
        1,
        f"it takes more than {4 << 20} bytes when it is decoded; send it in parts",
    )
