"""Ids of columns and groups, digests of rows, and digests of all rows together."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.errors import InvalidParameter
from dpstream.rows.row_ids import column_ids, combine, group_ids, multiset_digest, row_digests
from tests.rows.hashes import KEY, ids


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.nulls(1), "c293ab68efe6f296bd92a49d6257801d"),
        (pa.array([True]), "3bb10c7c4e5c6914d0c13f7c660386ed"),
        (pa.array([7]), "d6dd6beeb3fe09021e7c679eba180f1a"),
        (pa.array([0.5]), "a46b8d02f1bfa43adc017710da63cd81"),
        (pa.array(["seven"]), "7c9c31ebf1d9f4ac25b3b6025a8c79c8"),
        (pa.array([b"seven"]), "3f6f5c0a4447e9a1ec1b870fe9a95325"),
        (pa.array([Decimal("1.50")]), "2094259b2d4c10326ceae0d1c26c610c"),
        (pa.array([1], pa.date32()), "20ac975b023cdc3b0923c952550a72e7"),
        (pa.array([1], pa.timestamp("us")), "59ba250510c08951c557ffd1c7091b05"),
        (pa.array([1], pa.timestamp("us", "UTC")), "b15c4d00c12caa9c55b691b158f9a50c"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_stored_ids_do_not_change(array, expected):
    """Ids are kept with the state. These were put together from calls of OpenSSL alone."""
    assert ids(array) == [expected]


def test_stored_digests_do_not_change():
    """The same for a group of two columns and for a row of three words."""
    group = group_ids([pa.array(["a"]), pa.array([7])], KEY)
    row = row_digests([np.array([[1, 2]], np.uint64), np.array([-3])], KEY)

    assert group.tobytes().hex() == "e67889dce59990601d8148673057b1bf"
    assert row.tobytes().hex() == "a35e9978c6969b7f6d4e065a653c18fc"


@given(st.lists(st.one_of(st.none(), st.text(), st.text(min_size=100, max_size=150))))
def test_an_id_does_not_depend_on_the_other_rows(values):
    """A row has the id that it has alone."""
    assert ids(values, pa.string()) == [ids([value], pa.string())[0] for value in values]


def test_the_key_decides():
    """Under another key nothing is equal, and a key of another size is refused."""
    assert not (column_ids(pa.array(["a"]), KEY) == column_ids(pa.array(["a"]), bytes(16))).any()
    with pytest.raises(InvalidParameter, match="16 bytes, got 32"):
        column_ids(pa.array(["a"]), bytes(32))


def test_groups_are_apart_by_every_column():
    """A single column is its own id; moving a character, a column or a NULL gives another group."""
    single = group_ids([pa.array(["ab", "a"])], KEY)
    assert (single == column_ids(pa.array(["ab", "a"]), KEY)).all()

    rows = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("ab", None), (None, "ab"), ("a", "a")]
    pairs = group_ids([pa.array(column) for column in zip(*rows, strict=True)], KEY)
    triple = group_ids([pa.array(["a"]), pa.array(["b"]), pa.array([None], pa.string())], KEY)
    everything = [tuple(row) for row in (*single.tolist(), *pairs.tolist(), *triple.tolist())]
    assert len(set(everything)) == 2 + len(rows) + 1


@pytest.mark.parametrize("columns", [[], [pa.array(["a", "b"]), pa.array(["a"])]], ids=len)
def test_groups_need_columns_of_one_length(columns):
    """A shorter column would be read beyond its end."""
    with pytest.raises(InvalidParameter, match="at least one column, all of one length, got"):
        group_ids(columns, KEY)


def test_row_digests_see_every_word_and_the_order_of_columns():
    """One changed bit, a swap of columns or one column more changes a row's digest alone."""
    one, two = np.arange(600, dtype=np.int64), np.arange(600, dtype=np.float64)
    wide = np.arange(1200, dtype=np.uint64).reshape(600, 2)
    first = row_digests([one, wide, two], KEY)
    changed = wide.copy()
    changed[300, 1] ^= np.uint64(1)
    second = row_digests([one, changed, two], KEY)

    assert np.flatnonzero((first != second).any(axis=1)).tolist() == [300]
    assert (first[1:] != row_digests([two, wide, one], KEY)[1:]).all()
    assert (row_digests([one], KEY) != row_digests([one, np.zeros(600)], KEY)).all()
    assert (
        row_digests([wide[::2], one[::-2]], KEY)[0] == row_digests([wide[:1], one[-1:]], KEY)
    ).all()


@pytest.mark.parametrize(
    "words",
    [
        [],
        [np.zeros(2), np.zeros(3)],
        [np.zeros((2, 3))],
        [np.zeros(2, np.int32)],
        [np.zeros(2, object)],
    ],
    ids=["none", "lengths", "shape", "width", "objects"],
)
def test_rows_that_cannot_be_digested_are_refused(words):
    """Columns of different lengths, or not of 8-byte items, would be read beyond their ends."""
    with pytest.raises(InvalidParameter, match="got"):
        row_digests(words, KEY)


def test_a_multiset_digest_ignores_order_and_counts_copies():
    """Any order and any split give one digest; a row more, less or twice gives another."""
    digests = row_digests([np.arange(1000)], KEY)
    whole = multiset_digest(digests)
    exact = sum(int(low) | int(high) << 64 for low, high in digests.tolist()) % 2**128

    assert whole == (exact, 1000)
    assert multiset_digest(digests[::-1]) == whole
    assert combine(multiset_digest(digests[:300]), multiset_digest(digests[300:])) == whole
    assert multiset_digest(digests[1:])[0] != whole[0]
    assert multiset_digest(np.concatenate([digests[:1], digests]))[0] != whole[0]
    assert multiset_digest(digests[:0]) == (0, 0)
