"""Numbers are one unit by their value, and one key, however and wherever they are written."""

import json
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpstream as dps
from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.messages import Decoder
from dpstream.privacy.state import Secret
from dpstream.query.query import Query
from dpstream.rows.number_text import LONGEST, number_text, one_number_spelling
from dpstream.rows.row_reader import RowReader


@st.composite
def numbers(draw):
    """A number, and ways to write it in JSON's grammar."""
    digits = draw(st.integers(-(10**12), 10**12))
    exponent = draw(st.integers(-20, 50))
    return digits, exponent


@st.composite
def spellings(draw, digits, exponent):
    """Zeros before and after the point, exponents of both signs and cases."""
    shift = draw(st.integers(-6, 6))
    whole, power = digits, exponent
    if shift >= 0:
        whole, power = digits * 10**shift, exponent - shift
    text, minus = str(abs(whole)), "-" if whole < 0 else ""
    point = draw(st.integers(0, min(len(text) - 1, 6))) if len(text) > 1 else 0
    if point:
        text, power = f"{text[:-point]}.{text[-point:]}", power + point
    zeros = "0" * draw(st.integers(0, 3))
    text += zeros if "." in text else f".0{zeros}" if draw(st.booleans()) else ""
    plus = draw(st.sampled_from(["", "+"])) if power >= 0 else ""
    letter = draw(st.sampled_from("eE"))
    shown = f"{letter}{plus}{power}" if power or draw(st.booleans()) else ""
    if not digits and draw(st.booleans()):
        minus = "-"
    return f"{minus}{text}{shown}"


@given(st.data())
def test_a_number_has_one_spelling(data):
    """Equal numbers are written alike, and what is written is the number."""
    number = data.draw(numbers())
    one, two = (data.draw(spellings(*number)) for _ in range(2))

    assert number_text(one) == number_text(two)
    assert Decimal(number_text(one)) == Decimal(number[0]).scaleb(number[1])
    assert number_text(number_text(one)) == number_text(one)
    assert len(number_text(one)) <= LONGEST or "e" in number_text(one)


@given(st.lists(st.text("0123456789.-+eE \t_x", max_size=9) | st.none(), max_size=9))
def test_a_column_is_rewritten_cell_by_cell(texts):
    """The quick look misses nothing that must be written anew, in slices too."""
    array = pa.array(["", *texts, ""], pa.string()).slice(1, len(texts))

    expected = [None if text is None else number_text(text) for text in texts]
    assert one_number_spelling(array).to_pylist() == expected


def table_from(source, spelled):
    """One row a number, as one of our sources reads it: u as written, k the same, and text."""
    if source == "csv":
        content = "u,k,t\n" + "".join(f"{text},{text},x\n" for text in spelled)
        parser = CsvParser("test")
        block = content.encode()
        head = parser.head(block, final=True)
        return parser.parse(block[head:], final=True, columns=["u", "k", "t"]).table
    lines = [f'{{"u": {text}, "k": {text}, "t": "x"}}'.encode() for text in spelled]
    if source == "jsonl":
        block = b"\n".join(lines)
        return JsonlParser("test").parse(block, final=True, columns=["u", "k", "t"]).table
    if source == "json messages":
        return Decoder("json").decode(lines, ["u", "k", "t"]).table
    if source == "csv messages":
        rows = [f"{text},{text},x".encode() for text in spelled]
        return Decoder("csv", header=["u", "k", "t"]).decode(rows, ["u", "k", "t"]).table
    assert source == "quoted"
    strings = [json.dumps(text) for text in spelled]
    lines = [f'{{"u": {text}, "k": {text}, "t": "x"}}'.encode() for text in strings]
    return Decoder("json").decode(lines, ["u", "k", "t"]).table


def rows_of(table, **more):
    query = Query(
        privacy_unit_column="u", keys=["k"], epsilon=1, delta=1e-9, max_groups_contributed=1, **more
    )
    reader = RowReader(query, Secret.of(bytes(32)), bytes(16))
    reader.learn({field.name: field.type for field in table.schema})
    rows, aside = reader.read(table, "test")
    assert not aside.rejected, aside.rejected[0].reason
    return rows


SOURCES = ["csv", "jsonl", "json messages", "csv messages", "quoted"]


@given(st.data(), st.sampled_from(SOURCES), st.sampled_from(SOURCES))
def test_a_person_is_one_unit_in_every_text_source(data, one, other):
    """By value: 5, 5.0, 5e0 and "5" are one; numbers that differ are different units."""
    number = data.draw(numbers())
    spelled = [data.draw(spellings(*number)) for _ in range(3)]
    units = [bytes(each) for s in (one, other) for each in rows_of(table_from(s, spelled)).units]
    assert len(set(units)) == 1

    another = str(number[0] + 1) + f"e{number[1]}"
    assert bytes(rows_of(table_from(other, [another])).units[0]) != units[0]


@given(st.data(), st.sampled_from(["jsonl", "json messages"]))
def test_a_json_number_is_one_key_with_one_spelling(data, source):
    """No row shows how it wrote the number; text is text, and stays as it is."""
    number = data.draw(numbers())
    spelled = [data.draw(spellings(*number)) for _ in range(3)]
    rows = rows_of(table_from(source, spelled))

    assert len({bytes(each) for each in rows.groups}) == 1
    assert len(set(rows.keys["k"].to_pylist())) == 1
    quoted = rows_of(table_from("quoted", spelled))
    assert sorted(quoted.keys["k"].to_pylist()) == sorted(spelled)


def test_text_is_text():
    """What is no number in JSON's grammar counts as it is written; spaces count there too."""
    texts = [
        "7",
        "007",
        "+7",
        "7.",
        ".7",
        "0x7",
        "ann",
        " ann",
        "1_0",
        "1.2.3",
        "NaN",
        "-",
        "\u0667",
    ]
    table = pa.table({"u": texts, "k": texts})

    assert len({bytes(each) for each in rows_of(table).units}) == len(texts)


def test_numbers_with_spaces_around_them_are_the_numbers():
    """As CSV files and JSON strings have them."""
    texts = ["5", " 5", "5\t", " 5.0 ", "5e0", "\n5"]
    rows = rows_of(pa.table({"u": texts, "k": texts}))

    assert len({bytes(each) for each in rows.units}) == 1
    assert len({bytes(each) for each in rows.groups}) == len(texts)  # a key of text is text


ARROW = [
    pa.array([5], pa.int8()),
    pa.array([5], pa.uint64()),
    pa.array([5.0], pa.float16()),
    pa.array([5.0]),
    pa.array([Decimal("5.00")], pa.decimal128(9, 2)),
    pa.array([Decimal("5.0")], pa.decimal256(50, 1)),
    pa.array(["5"]),
    pa.array([" 5e0"], pa.large_string()),
    pa.array([5]).dictionary_encode(),
]


@pytest.mark.parametrize("declared", ["INT64", "FLOAT64", "STRING", "NUMERIC", "uint64"])
@pytest.mark.parametrize("column", ARROW, ids=lambda array: str(array.type))
def test_a_number_is_one_unit_and_one_key_in_every_type(declared, column):
    """A declared type takes every other kind of number by value."""
    asked = {"column_types": {"u": declared, "k": declared}}
    first = rows_of(pa.table({"u": pa.array([5]), "k": pa.array([5])}), **asked)
    never = {"FLOAT64": pa.types.is_decimal, "NUMERIC": pa.types.is_floating}
    if declared in never and never[declared](column.type):
        with pytest.raises(AssertionError, match="not of its column's type"):
            rows_of(pa.table({"u": column, "k": column}), **asked)
        return  # most decimals are no binary fractions
    rows = rows_of(pa.table({"u": column, "k": column}), **asked)

    assert (rows.units == first.units).all()
    if declared != "STRING" or not pa.types.is_large_string(column.type):  # text is text
        assert (rows.groups == first.groups).all()
        assert rows.keys["k"].equals(first.keys["k"])


def test_arrow_messages_are_the_numbers_that_json_messages_are():
    """A topic may change its format: its users stay who they were."""

    def stream(values):
        table = pa.table({"u": values, "k": values})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    arrow = Decoder("arrow").decode([stream(column) for column in ARROW], ["u", "k"]).table
    json_ = Decoder("json").decode([b'{"u": 5.0, "k": 50e-1}'], ["u", "k"]).table
    rows = rows_of(pa.concat_tables([arrow, json_]))

    assert len({bytes(each) for each in rows.units}) == 1
    assert set(rows.keys["k"].to_pylist()) == {"5", " 5e0"}


def test_one_person_is_counted_once_however_it_is_written(tmp_path):
    """Four spellings, one unit: the bound of one row holds for all of them together."""
    ways = ("{}", "{}.0", "{}e0", '" {}"')
    lines = [f'{{"u": {way.format(u)}, "k": "a"}}' for u in range(1, 501) for way in ways]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    query = dps.Query(
        privacy_unit_column="u",
        keys=["k"],
        public_groups=["a"],
        epsilon=8,
        delta=1e-9,
        max_groups_contributed=1,
    )
    (table,) = dps.run(query, source=str(path))

    # noise is beyond 6 standard deviations less often than 2e-9
    spread = 6 * table["count_stddev"][0].as_py()
    assert abs(table["count"][0].as_py() - 500) < spread < 100
