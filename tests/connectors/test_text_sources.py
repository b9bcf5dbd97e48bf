import csv
import gzip
import io
import json
import tracemalloc
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dpstream.connectors.files.csv import CsvParser
from dpstream.connectors.files.jsonl import JsonlParser
from dpstream.connectors.files.text import TextFile
from dpstream.connectors.registry import open_source
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.records import Batch, Rejected
from tests.support.long import part_of
from tests.support.reading import read_all
from tests.support.reading import rows as rows_of

PARSERS = {"csv": CsvParser, "jsonl": JsonlParser}


def read(
    folder: Path, content: bytes | str, kind: str = "csv", block: int = 64, columns=None
) -> tuple[list[dict], list[Rejected]]:
    """All rows of a file read in small blocks."""
    path = folder / f"rows.{kind}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    file = TextFile(path, PARSERS[kind](path.name), name=path.name, block=block)
    rows, bad = [], []
    position, done = None, False
    while not done:
        batch = file.read(position, columns)
        rows += batch.table.to_pylist()
        bad += batch.rejected
        position, done = batch.position, batch.done
    file.close()
    return rows, bad


@pytest.mark.parametrize("block", [3, 7, 64, 1 << 20])
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_quoted_cells_may_hold_commas_quotes_and_line_ends(tmp_path, block, ending):
    """A block is cut at a record, wherever its bytes end."""
    content = ending.join(
        ["a,b", '1,"x,y"', '2,"line\none\n\nand two"', '3,"say ""hi"""', '4,""', ""]
    )

    rows, bad = read(tmp_path, content, block=block)

    assert rows == [
        {"a": "1", "b": "x,y"},
        {"a": "2", "b": "line\none\n\nand two"},
        {"a": "3", "b": 'say "hi"'},
        {"a": "4", "b": ""},
    ]
    assert bad == []


@pytest.mark.parametrize("block", [16, 200, 1 << 20])
def test_csv_agrees_with_the_standard_reader_on_random_cells(tmp_path, block):
    """Quotes, commas, line ends and letters of several bytes, as a CSV writer puts them."""
    random = np.random.default_rng(5)
    pieces = np.array(["a", "ü", "€", "😀", '"', ",", "\n", "\r\n", " ", "", "0"])
    cells = [["".join(random.choice(pieces, 3)) for _ in range(3)] for _ in range(200)]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["a", "b", "c"], *cells])

    rows, bad = read(tmp_path, text.getvalue(), block=block)

    assert [list(row.values()) for row in rows] == cells
    assert bad == []


def test_a_row_of_another_width_is_rejected_with_its_line(tmp_path):
    """The rows around it are read, also behind a cell that spans lines."""
    rows, bad = read(tmp_path, 'a,b\n1,"x\ny"\n2\n3,4,5\n\n6,7\n')

    assert rows == [{"a": "1", "b": "x\ny"}, {"a": "6", "b": "7"}]
    assert [(one.where, one.row) for one in bad] == [
        ("rows.csv, line 4", "2"),
        ("rows.csv, line 5", "3,4,5"),
    ]
    assert bad[1].reason == "it has 3 fields but the header has 2"


def test_a_stray_quote_costs_its_own_line_only(tmp_path):
    """A quote that opens and never closes does not swallow the rows behind it."""
    rows, bad = read(tmp_path, 'a,b\n1,"x\n2,y\n3,"z" w\n4,q"q\n5,"last', block=1 << 20)

    assert [row["a"] for row in rows] == ["2", "4"]
    assert rows[1]["b"] == 'q"q'
    assert [one.where for one in bad] == [f"rows.csv, line {line}" for line in (2, 4, 6)]
    assert all("quoting" in one.reason for one in bad)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_line_that_is_not_utf8_is_rejected_alone(tmp_path, kind):
    """Whatever columns are wanted; overlong forms and surrogates are no UTF-8 either."""
    wrong = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
    texts = [b"plain", "ü€😀".encode(), *wrong, b"end"]
    if kind == "csv":
        content = b"a,b\n" + b"".join(b"%d,%s\n" % line for line in enumerate(texts))
    else:
        content = b"".join(b'{"a": %d, "b": "%s"}\n' % line for line in enumerate(texts))

    rows, bad = read(tmp_path, content, kind, block=1 << 20)
    projected, again = read(tmp_path, content, kind, block=32, columns=["a"])

    assert [row["a"] for row in rows] == ["0", "1", "7"]
    assert rows[1]["b"] == "ü€😀"
    assert len(bad) == len(wrong)
    assert projected == [{"a": row["a"]} for row in rows]
    assert again == bad


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.timeout(60)
def test_very_many_malformed_rows_are_rejected_one_by_one(tmp_path, kind):
    """Their line numbers are right, and the good rows come through."""
    count = part_of(100_000, of=4)
    good, wrong = ("{0},{0}", "{0}") if kind == "csv" else ('{{"a": {0}, "b": {0}}}', '{{"a": {0}')
    lines = [(wrong if i % 2 else good).format(i) for i in range(2 * count)]
    header = ["a,b"] if kind == "csv" else []

    rows, bad = read(tmp_path, "\n".join([*header, *lines]), kind, block=1 << 18)

    assert len(rows) == len(bad) == count
    assert rows[-1] == dict.fromkeys("ab", str(2 * count - 2))
    assert bad[-1].where == f"rows.{kind}, line {2 * count + len(header)}"


def test_unclosed_quotes_everywhere_stay_cheap(tmp_path):
    """Each is given up at the next quote, so the work grows with the file and not faster."""
    lines = [f'{i},"open' if i % 2 else f"{i},fine" for i in range(200_000)]

    rows, bad = read(tmp_path, "\n".join(["a,b", *lines]), block=1 << 20)

    assert len(rows) == len(bad) == 100_000


def test_json_numbers_have_one_spelling_and_no_other_scalar_changes(tmp_path):
    """Equal numbers are alike, and not rounded; absent keys and nulls are null; keys may join."""
    content = (
        '{"a": 18446744073709551617, "b": "x"}\n\n'
        '{"b":1.50,"a":-0,"c":true}\r\n'
        ' { "a" : 1E+2 , "b" : null } \n'
        "{}\n"
        '{"a": "ü\\u00fc\\n\\"", "\\u0062": "\\ud83d\\ude00"}\n'
    )

    rows, bad = read(tmp_path, content, "jsonl", block=1 << 16)

    assert bad == []
    assert rows == [
        {"a": "18446744073709551617", "b": "x", "c": None},
        {"a": "0", "b": "1.5", "c": "true"},
        {"a": "100", "b": None, "c": None},
        {"a": None, "b": None, "c": None},
        {"a": 'üü\n"', "b": "😀", "c": None},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": [1]}', "the value of 'a' is a list"),
        ('{"a": {"b": 1}}', "the value of 'a' is an object"),
        ("[1]", "not a JSON object"),
        ('{"a": 1', "not JSON"),
        ('{"a": 01}', "not JSON"),
        ('{"a": fxlse}', "not JSON"),
        ('{"a": 1.}', "not JSON"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ('{"a": 1} x', "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ('{"a": "\t"}', "not JSON"),
        ('{"a": "\\x"}', "not JSON"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ("oops", "not JSON"),
    ],
)
def test_a_line_that_is_no_flat_object_is_rejected(tmp_path, line, reason):
    """It says why, and the lines around it are read."""
    rows, bad = read(tmp_path, f'{{"a": 1}}\n{line}\n{{"a": 2}}', "jsonl", block=1 << 16)

    assert [row["a"] for row in rows] == ["1", "2"]
    assert len(bad) == 1
    assert bad[0].where == "rows.jsonl, line 2"
    assert reason in bad[0].reason
    assert bad[0].row == line[:4096]


def test_a_nested_value_that_nobody_wants_is_skipped(tmp_path):
    """Braces and quotes inside its strings do not end it."""
    content = '{"deep": {"x": ["}\\"]", {"y": 1}]}, "a": 1}\n{"a": 2}\n'

    assert read(tmp_path, content, "jsonl", columns=["a"]) == ([{"a": "1"}, {"a": "2"}], [])


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.csv.gz", "rows.ndjson.gz"])
def test_reading_again_from_any_position_gives_the_same_rows(tmp_path, name, monkeypatch):
    """Also by a new process, which begins in the middle of the file."""
    header = ["a,b"] if "csv" in name else []
    good = "{0},x{0}" if header else '{{"a": {0}, "b": "x{0}"}}'
    lines = [*header, *(good.format(i) if i % 10 else "bad" for i in range(2000))]
    content = "\n".join(lines).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    small = partial(TextFile, block=997)
    monkeypatch.setattr("dpstream.connectors.files.source.TextFile", small)
    batches: list[Batch] = read_all(open_source(path))
    positions = [None, *(batch.position for batch in batches)]

    assert len(batches) > 10
    assert sum(batch.table.num_rows for batch in batches) == 1800
    backwards = open_source(path)
    for position, first in reversed(list(zip(positions, batches, strict=False))):
        for source in (backwards, open_source(path)):
            again = source.read(str(path), position)
            assert again.table == first.table
            assert again.rejected == first.rejected
            assert again.position == first.position
        assert json.loads(json.dumps(again.position)) == again.position


def test_a_projection_gives_the_wanted_columns_in_file_order(tmp_path):
    """The order of the file, not that of the wish."""
    rows, _ = read(tmp_path, "a,b,c\n1,2,3\n", columns=["c", "a"])

    assert rows == [{"a": "1", "c": "3"}]


def test_a_wanted_column_that_the_file_lacks_is_named(tmp_path):
    """With the columns that there are."""
    with pytest.raises(InvalidInput, match=r"rows\.csv has no column 'user'; its columns are a, b"):
        read(tmp_path, "a,b\n1,2\n", columns=["user"])


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    """Spreadsheets write one."""
    assert read(tmp_path, "\ufeffa,b\n1,2\n")[0] == [{"a": "1", "b": "2"}]
    assert read(tmp_path, '\ufeff{"a": 1}\n', "jsonl")[0] == [{"a": "1"}]


@pytest.mark.parametrize("header", ["a,a", "\n1,2", ",", "a,\udcff"])
def test_a_header_must_name_the_columns(tmp_path, header):
    """Names that repeat, are absent or are no text are refused."""
    with pytest.raises(InvalidInput, match="line 1"):
        read(tmp_path, f"{header}\n1,2\n".encode(errors="surrogateescape"))


@pytest.mark.parametrize(("kind", "content"), [("csv", "a,b\n"), ("csv", ""), ("jsonl", "")])
def test_a_file_without_rows_is_read(tmp_path, kind, content):
    """It has the wanted columns and no rows."""
    assert read(tmp_path, content, kind, columns=["a"]) == ([], [])


@pytest.mark.parametrize("damage", [slice(None, -20), slice(12, None)])
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    """Cut short, or with other bytes where its data should be."""
    content = gzip.compress(b"a\n" + b"".join(b"%d\n" % i for i in range(5000)))
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(content[:10] + content[damage] if damage.start else content[damage])

    with pytest.raises(InvalidInput, match=r"rows\.csv\.gz cannot be read"):
        read_all(open_source(path))


MIB = 1 << 20
LONG = b"x" * (3 * MIB)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("last", [True, False], ids=["at the end", "in between"])
def test_a_line_that_is_too_long_is_set_aside_alone(tmp_path, ending, last):
    """What is kept of it is its beginning; the rows beside it are read, and no others are lost."""
    rows = [b"a", b"1", LONG, b"2"] if "csv" in ending else [b'{"a": "1"}', LONG, b'{"a": "2"}']
    content = b"\n".join(rows[:-1] if last else rows)
    path = tmp_path / f"rows{ending}"
    path.write_bytes(gzip.compress(content, 1) if ending.endswith(".gz") else content)
    source = open_source(path, options={"max_row_bytes": MIB})

    batches = read_all(source, columns=["a"])
    assert [row["a"] for row in rows_of(batches)] == ["1", "2"][: 2 - last]
    (bad,) = [row for batch in batches for row in batch.rejected]
    assert bad.where.endswith(f"line {rows.index(LONG) + 1}")
    assert bad.reason == f"it has {3 * MIB + (not last)} bytes, more than max_row_bytes = {MIB}"
    assert len(bad.row) == 4096


def test_a_long_line_is_never_in_memory_as_a_whole(tmp_path):
    """A line of a gigabyte, from a small gzip file, takes a few blocks."""
    path = tmp_path / "rows.csv.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b"a\n1\n")
        for _ in range(256):
            file.write(bytes(MIB))
        file.write(b"\n2\n")
    source = open_source(path, options={"max_row_bytes": MIB})
    tracemalloc.start()
    try:
        batches = read_all(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(batch.table.num_rows for batch in batches) == 2
    assert peak < 16 * MIB


@pytest.mark.parametrize(
    ("head", "words"),
    [(LONG, "line 1 must be a header"), (b"a," * len(LONG), "no line ends within 1048576 bytes")],
    ids=["one name", "many"],
)
def test_a_header_without_end_is_refused(tmp_path, head, words):
    """A binary file named .csv must not fill the memory."""
    (tmp_path / "rows.csv").write_bytes(head)
    with pytest.raises(InvalidInput, match=words):
        read_all(open_source(tmp_path / "rows.csv", options={"max_row_bytes": MIB}))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path):
    """With its size as it is, the limit, and the option that allows more."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"1\n" * 50_000))
    assert sum(batch.table.num_rows for batch in read_all(open_source(path))) == 50_000

    refused = r"rows\.csv\.gz has more than max_unpacked_bytes = 100000 bytes when it is unpacked"
    with pytest.raises(InvalidInput, match=refused):
        read_all(open_source(path, options={"max_unpacked_bytes": 100_000}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_row_bytes": 1000}, "max_row_bytes must be a whole number from 1048576"),
        ({"max_unpacked_bytes": "1 GB"}, "max_unpacked_bytes must be a whole number"),
        ({"max_rows": 5}, "files have no option 'max_rows'; max_row_bytes, max_unpacked_bytes"),
    ],
)
def test_limits_are_checked(tmp_path, options, words):
    """Before a file is opened."""
    with pytest.raises(InvalidParameter, match=words):
        open_source(tmp_path, growing=True, options=options)


def test_gzip_is_unpacked_once(tmp_path, monkeypatch):
    """A block that ends inside a line does not begin the file again."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"12345\n" * 500_000))
    rewinds = []
    monkeypatch.setattr("gzip._GzipReader._rewind", lambda self: rewinds.append(self._pos))
    batches = read_all(open_source(path, options={"max_row_bytes": MIB}))
    assert sum(batch.table.num_rows for batch in batches) == 500_000
    assert len(batches) > 2
    assert rewinds == []


CSV_PIECES = [b"a", b",", b",", b'"', b"\n", b"\n", b"\r", b"\xff", "é".encode()]
JSON_PIECES = [
    b"{",
    b"}",
    b'"',
    b":",
    b",",
    b"0",
    b"-",
    b"e",
    b"null",
    b"\\",
    b"\\u00e9",
    b"\\ud800",
]
JSON_PIECES += [b"\n", b" ", b"[", b"\xff", b"\x01", b"\r", b'"a": ', b"true", b'{"b": 1}\n']
LINES = b'{"a": "x\\n", "b": -1.5e3, "c": "", "d": null}\n{"b": false, "a": 12}\n'


def test_broken_csv_reads_the_same_in_blocks_of_every_size(tmp_path):
    """Rows and rejected lines are a function of the file, not of how it is cut."""
    random = np.random.default_rng(11)
    for _ in range(40):
        content = b"h,g\n" + b"".join(random.choice(np.array(CSV_PIECES, dtype=object), 30))
        whole = read(tmp_path, content, block=1 << 16)

        assert [read(tmp_path, content, block=size) for size in (1, 2, 5)] == [whole] * 3


def test_broken_json_lines_are_judged_as_the_json_module_does(tmp_path):
    """The compiled scanner accepts nothing that the module refuses, and reads the same values."""
    random = np.random.default_rng(12)
    for _ in range(150):
        content = bytearray(LINES)
        for _ in range(random.integers(1, 4)):
            at = random.integers(len(content))
            piece = JSON_PIECES[random.integers(len(JSON_PIECES))]
            content[at : at + random.integers(2)] = piece
        rows, bad = read(tmp_path, bytes(content), "jsonl", block=1 << 16)

        expected = [by_json_module(line) for line in bytes(content).split(b"\n") if line.strip()]
        good = [row for row in expected if row is not None]
        assert [{k: v for k, v in row.items() if v is not None} for row in rows] == good
        assert len(bad) == len(expected) - len(good)
        projected = [
            read(tmp_path, bytes(content), "jsonl", block=size, columns=["a"]) for size in (7, 999)
        ]
        assert projected[0] == projected[1]


def by_value(number: str) -> str:
    """A number's one spelling, if it is not too long."""
    value = Decimal(number)
    return format(value.normalize(), "f") if value else "0"


def by_json_module(line: bytes) -> dict[str, str] | None:
    """The non-null scalars of a line as strings, or None if it is no flat object."""
    try:
        row = json.loads(line.decode(), parse_int=by_value, parse_float=by_value)
        json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is refused here
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or any(isinstance(one, dict | list) for one in row.values()):
        return None
    spelled = {True: "true", False: "false"}
    return {k: spelled.get(v, v) for k, v in row.items() if v is not None}
