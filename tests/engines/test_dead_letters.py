"""Rows that cannot be used are set aside with a reason; the feed is that of the good rows alone."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from tests.support.kill_and_replay import BeforeDiskOperation, kill_and_replay
from tests.support.live_runs import ScriptedClock
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


HOSTILE = {
    "at": pa.timestamp("ms"),
    "day": pa.date32(),
    "price": pa.decimal128(5, 2),
    "moment": pa.timestamp("s", "Asia/Tokyo"),
}
"""Columns of rows that name a time, or a key, beyond what anybody can use."""


def hostile_rows():
    """Good rows of typed keys, and the same with rows that each break one column."""
    rows = table()
    count = len(rows)
    at = pa.array(np.array(rows["at"]) * 1000).view(HOSTILE["at"])
    keys = {
        "day": pa.array(np.arange(count) % 3 + 2_932_894, pa.int32()).view(HOSTILE["day"]),
        "price": bits([99_999] * count, HOSTILE["price"]),
        "moment": pa.array([253_402_300_799] * count).view(HOSTILE["moment"]),
    }
    good = pa.table({"user": rows["user"], "at": at, **keys})
    beyond = {"at": [2**63 - 1, 2**60, -(2**60)], "day": [2_932_897, 2**31 - 1, -(2**31)]}
    beyond |= {"price": [100_000, 2**31 - 1], "moment": [253_402_300_800, 2**50]}
    bad = [
        good.slice(0, 1).set_column(
            good.column_names.index(name), name, bits([value], HOSTILE[name])
        )
        for name, values in beyond.items()
        for value in values
    ]
    return good, pa.concat_tables([*bad, good.slice(0, count // 2), *bad, good.slice(count // 2)])


def bits(values, kind):
    width = kind.bit_width // 8
    raw = b"".join(int(value).to_bytes(width, "little", signed=True) for value in values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(raw)])


TYPED = query(
    keys=("day", "price", "moment"),
    aggregates=(dps.Count("clicks"),),
    time_unit=None,
    arrival_column=None,
    allowed_lateness="0 seconds",
)
REASONS = {
    "unparsable time": 6,
    "key beyond dates and numbers that every sink can write": 14,
}
EVERYWHERE = ["csv:{}/csv", "jsonl:{}/jsonl", "{}/out", "{}/r.sqlite", "{}/r.duckdb", "delta:{}/d"]


def test_a_far_time_or_key_costs_its_own_row_in_every_sink(tmp_path):
    """No sink meets what it cannot write; the releases are those of the good rows alone."""
    for name, rows in zip(("good", "mixed"), hostile_rows(), strict=True):
        place = tmp_path / name
        place.mkdir()
        pq.write_table(rows, place / "rows.parquet", store_decimal_as_integer=True)
        run = start(place, TYPED, sink=[spec.format(place) for spec in EVERYWHERE]).finish()

    assert published(tmp_path / "mixed") == published(tmp_path / "good")
    assert any(len(pq.read_table(path)) for path in (tmp_path / "good" / "out").glob("*.parquet"))
    assert Counter(one["reason"] for one in letters(tmp_path / "mixed")) == REASONS
    assert run.operator.rejected_rows >= sum(REASONS.values())


def test_a_restart_sets_the_same_far_rows_aside(tmp_path):
    """Killed anywhere: the same bytes, one charge, the same letters."""

    def prepare(place):
        place.mkdir(parents=True, exist_ok=True)
        _, mixed = hostile_rows()
        pq.write_table(mixed, place / "rows.parquet", store_decimal_as_integer=True)

    kind = replace(group_by(TYPED), prepare=prepare)
    for nth in (9, 40, 90):
        after = kill_and_replay(kind, tmp_path / str(nth), BeforeDiskOperation(nth))
        assert Counter(one["reason"] for one in letters(after.place)) == REASONS


def test_far_rows_of_a_live_directory(tmp_path):
    """A run that goes by the clock sets them aside too, and goes on after a kill; a later file
    whose column has another type costs its own rows.
    """
    good, mixed = hostile_rows()
    other = good.set_column(2, "day", pa.array([5] * len(good)))
    asked = replace(TYPED, max_ahead=query(max_ahead="1000 hours").max_ahead)
    releases = {}
    for name, files in (("good", [good]), ("mixed", [mixed, other])):
        folder = tmp_path / name / "in"
        folder.mkdir(parents=True)
        for number, rows in enumerate(files):
            pq.write_table(rows, folder / f"{number}.parquet", store_decimal_as_integer=True)
        common = {"source": folder, "live": True, "clock": ScriptedClock(), "every": 5}
        for steps in (1, 3):  # the second start takes the first step again: it was not saved
            with start(tmp_path / name, asked, **common) as run:
                list(islice(run, steps))
        releases[name] = published(tmp_path / name)
    found = Counter(one["reason"] for one in letters(tmp_path / "mixed"))

    assert releases["mixed"] == releases["good"]
    assert any(len(pq.read_table(path)) for path in (tmp_path / "good" / "out").glob("*.parquet"))
    assert found == REASONS | {"not of its column's type": len(good)}


def test_a_long_path_does_not_stop_the_feed(tmp_path):
    """One bad row in a file of a deep folder is set aside like any other."""
    place = tmp_path / ("folder" * 20) / ("папка" * 10)
    place.mkdir(parents=True)
    write_lines(place / "rows.csv", [*good_lines("csv"), b"u,/1"])
    start(place, QUERY, source=place / "rows.csv").finish()

    assert len(letters(place)) == 1
