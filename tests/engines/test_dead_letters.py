"""Rows that cannot be used are set aside with a reason; the feed is that of the good rows alone."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support.kill_and_replay import BeforeDiskOperation, kill_and_replay
from tests.support.long import part_of
from tests.support.runs import group_by, published, query, start, table

MALFORMED = part_of(100_000)
QUERY = query(max_key_bytes=64)
LONG = "x" * 65

CSV = {
    b",/1,10,20,5": "missing unit",
    b"u,/1,never,20,5": "unparsable time",
    b"u,/1,1e300,20,5": "unparsable time",
    b"u,/1,10,soon,5": "unparsable arrival time",
    b"u,/1,10,20,many": "not a number",
    b"u,/1,10,20,-inf": "NaN or infinite number",
    f"u,{LONG},10,20,5".encode(): "oversize key",
    b"u,/1,10,20": "it has 4 fields but the header has 5",
    b"u\xff,/1,10,20,5": "it is not UTF-8 text",
    b'u,"/1"x,10,20,5': "its quoting is broken",
}
JSON = {
    b'{"user": null, "page": "/1", "at": 10, "came": 20, "seconds": 5}': "missing unit",
    b'{"page": "/1", "at": 10, "came": 20, "seconds": 5}': "missing unit",
    b'{"user": "u", "page": "/1", "at": "never", "came": 20, "seconds": 5}': "unparsable time",
    b'{"user": "u", "page": "/1", "at": 10, "came": [], "seconds": 5}': "the value of 'came'",
    b'{"user": "u", "page": "/1", "at": 10, "came": null}': "unparsable arrival time",
    b'{"user": "u", "page": "/1", "at": 10, "came": 20, "seconds": "many"}': "not a number",
    b'{"user": "u", "page": "/1", "at": 10, "came": 20, "seconds": NaN}': "NaN is no JSON value",
    b'{"user": "u", "page": "/1", "at": 10, "came": 20, "seconds": 1e999}': "NaN or infinite",
    f'{{"user": "u", "page": "{LONG}", "at": 10, "came": 20}}'.encode(): "oversize key",
    b'{"user": "u", "page": "/1", "at": 10, "came": 20': "it is not JSON",
    b'["u", "/1", 10, 20, 5]': "it is not a JSON object",
    b'{"user": "\xff", "page": "/1", "at": 10, "came": 20}': "it is not UTF-8 text",
    b'{"user": "\\ud800", "page": "/1", "at": 10, "came": 20}': "half of a surrogate pair",
}


def good_lines(suffix):
    rows = table().to_pylist()
    if suffix == "jsonl":
        return [json.dumps(row).encode() for row in rows]
    return [",".join(map(str, row.values())).encode() for row in rows]


def write_lines(path, lines):
    path.parent.mkdir(exist_ok=True)
    head = [b"user,page,at,came,seconds"] if path.suffix == ".csv" else []
    path.write_bytes(b"\n".join([*head, *lines, b""]))


def letters(place):
    """Everything that was set aside, file by file."""
    found = sorted((place / "state" / "dead-letters").iterdir())
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("suffix", "malformed"), [("csv", CSV), ("jsonl", JSON)])
def test_a_flood_of_malformed_rows(tmp_path, suffix, malformed):
    """100,000 of them among 600 good rows: none is lost, none changes a byte of the feed."""
    good = good_lines(suffix)
    bad = [list(malformed)[number % len(malformed)] for number in range(MALFORMED)]
    mixed = good + bad
    order = np.random.default_rng(2).permutation(len(mixed))
    write_lines(tmp_path / "good" / f"rows.{suffix}", good)
    write_lines(tmp_path / "mixed" / f"rows.{suffix}", [mixed[n] for n in order])
    for name in ("good", "mixed"):
        place = tmp_path / name
        run = start(place, QUERY, source=place / f"rows.{suffix}").finish()
    aside = letters(tmp_path / "mixed")

    assert published(tmp_path / "mixed") == published(tmp_path / "good")
    assert any(len(pq.read_table(path)) for path in (tmp_path / "good" / "out").glob("*.parquet"))
    assert not (tmp_path / "good" / "state" / "dead-letters").exists()
    assert run.operator.rejected_rows >= MALFORMED  # a chunk that is read again counts again
    assert len(aside) == MALFORMED
    expected = Counter(malformed[line] for line in bad)
    for reason, count in expected.items():
        assert sum(reason in one["reason"] for one in aside) == count, reason


def test_each_letter_says_where_it_was(tmp_path):
    """The line's number, the reason and the text, so that the operator finds and mends it."""
    good = good_lines("csv")
    write_lines(tmp_path / "rows.csv", [*good[:3], b"u,/1", *good[3:]])
    start(tmp_path, QUERY, source=tmp_path / "rows.csv").finish()
    (letter,) = letters(tmp_path)

    assert letter["where"].endswith("rows.csv, line 5")
    assert letter["reason"] == "it has 2 fields but the header has 5"
    assert letter["row"] == "u,/1"


def test_a_restart_neither_loses_nor_repeats_letters(tmp_path):
    """Rows are set aside under the name of their chunk: read again, they replace themselves."""
    lines = [*good_lines("csv"), *CSV] * 2
    kind = replace(
        group_by(),
        prepare=lambda place: write_lines(place / "rows.csv", lines),
        start=lambda place: start(place, QUERY, source=place / "rows.csv"),
    )
    for nth in range(5, 125, 12):
        after = kill_and_replay(kind, tmp_path / str(nth), BeforeDiskOperation(nth))

        assert len(letters(after.place)) == 2 * len(CSV)


def test_text_in_parquet_that_is_none(tmp_path):
    """A key may hold bytes that are not UTF-8; only that row goes."""
    rows = table()
    pq.write_table(rows, tmp_path / "good.parquet")
    allowed = pc.CastOptions(pa.string(), allow_invalid_utf8=True)
    broken = pc.cast(pa.array([b"\xff\xfe"]), options=allowed)
    odd = rows.slice(0, 1).set_column(1, "page", broken)
    pq.write_table(pa.concat_tables([rows, odd]), tmp_path / "mixed.parquet")
    for name in ("good", "mixed"):
        (tmp_path / name).mkdir()
        start(tmp_path / name, QUERY, source=tmp_path / f"{name}.parquet").finish()

    assert published(tmp_path / "mixed") == published(tmp_path / "good")
    assert [one["reason"] for one in letters(tmp_path / "mixed")] == ["invalid UTF-8"]


def test_a_long_path_does_not_stop_the_feed(tmp_path):
    """One bad row in a file of a deep folder is set aside like any other."""
    place = tmp_path / ("folder" * 20) / ("папка" * 10)
    place.mkdir(parents=True)
    write_lines(place / "rows.csv", [*good_lines("csv"), b"u,/1"])
    start(place, QUERY, source=place / "rows.csv").finish()

    assert len(letters(place)) == 1
