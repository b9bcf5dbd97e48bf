"""Text columns of Parquet files, read from their pages: what Arrow reads, or left to Arrow."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.connectors.sources.parquet import ParquetFile
from dpstream.connectors.sources.parquet_strings import strings

MANY = [f"user-{number * 7919 % 4001:05d}" for number in range(6000)]
ODD = ["", "a", "caf\u00e9", "x" * 15, "y" * 16, "z" * 17, "long " * 5000, "", "\u4e2d\u6587"] * 40
KINDS = {
    "one by one": {"use_dictionary": False},
    "by dictionary": {"use_dictionary": True},
    "by dictionary, until it is large": {"dictionary_pagesize_limit": 9000},
}


def written(path, values, *, nullable=True, **options):
    """A file with one column, in pages of about a kilobyte."""
    field = pa.field("text", pa.string(), nullable=nullable)
    table = pa.table([pa.array(values, pa.string())], schema=pa.schema([field]))
    small = {"data_page_size": 1024, "write_batch_size": 64}
    pq.write_table(table, path, **(small | options))
    return path


def read(path, *, optional=True):
    """The first chunk, by ourselves."""
    with pa.OSFile(str(path)) as file:
        chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
        return strings(file, chunk, optional=optional)


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [MANY, ODD, ["same"] * 999, ["one"], [""] * 50], ids=len)
def test_strings_are_those_that_arrow_reads(tmp_path, codec, kind, values):
    """Whatever the encoding and the compression, short and long, many and few."""
    path = written(tmp_path / "f.parquet", values, compression=codec, **KINDS[kind])

    found = read(path)

    assert found is not None
    assert found.to_pylist() == values
    found.validate(full=True)


def test_a_column_that_cannot_be_null_has_no_levels(tmp_path):
    """Then the values begin where the page begins."""
    path = written(tmp_path / "f.parquet", MANY, nullable=False)

    assert read(path, optional=False).to_pylist() == MANY


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([*MANY, None], {}),
        ([None] * 10, {}),
        (MANY, {"data_page_version": "2.0"}),
        (MANY, {"compression": "lz4"}),
        (MANY, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}),
    ],
    ids=["a NULL", "nothing else", "pages of version 2", "LZ4", "another encoding"],
)
def test_what_is_unusual_is_left_to_arrow(tmp_path, values, options):
    """And the source delivers it all the same."""
    path = written(tmp_path / "f.parquet", values, **options)

    assert read(path) is None
    assert ParquetFile(path, name="f").read(None, None).table["text"].to_pylist() == values


def test_columns_keep_their_places_and_types(tmp_path):
    """Text from its pages beside what Arrow reads, in the order of the file."""
    table = pa.table(
        {"n": [1, 2], "text": ["a", "b"], "list": [["x"], ["y", "z"]], "t": ["c", "d"]}
    )
    pq.write_table(table, tmp_path / "f.parquet", use_dictionary=False)

    batch = ParquetFile(tmp_path / "f.parquet", name="f").read(None, ["t", "n", "list", "text"])

    assert batch.table.equals(table)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_left_to_arrow_or_is_in_the_text_alone(tmp_path, kind):
    """Every byte of a chunk is spoilt in turn: no crash, never a row too many or too few."""
    values = MANY[:150]
    options = KINDS[kind] | {"dictionary_pagesize_limit": 900}
    path = written(tmp_path / "f.parquet", values, compression="none", **options)
    whole = path.read_bytes()
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    outcomes = set()
    for place in range(4, 4 + chunk.total_compressed_size):
        for bit in (1, 128):
            spoilt = bytearray(whole)
            spoilt[place] ^= bit
            found = strings(pa.BufferReader(bytes(spoilt)), chunk, optional=True)
            outcomes.add(found is None)
            if found is not None:
                found.validate()
                assert len(found) == len(values)
    assert outcomes == {True, False}


def test_a_chunk_that_ends_early_is_left_to_arrow(tmp_path):
    """At whatever byte."""
    path = written(tmp_path / "f.parquet", MANY[:150], compression="none")
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    end = 4 + chunk.total_compressed_size
    for size in range(4, end, 7):
        assert strings(pa.BufferReader(path.read_bytes()[:size]), chunk, optional=True) is None
    assert strings(pa.BufferReader(path.read_bytes()[:end]), chunk, optional=True) is not None
