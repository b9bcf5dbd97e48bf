"""Growing tables of ids, against dicts."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dpstream.errors import StateError
from dpstream.group_by.hash_tables import SLICE, HashTable, row_bits, split


def random_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def reference(known, ids):
    """Row numbers in the order of first appearance."""
    return [known.setdefault(tuple(one), len(known)) for one in ids.tolist()]


@given(st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=5), st.booleans())
@examples(max_examples=60)
def test_rows_are_numbered_by_first_appearance(batches, crowded):
    """As a dict does it, batch after batch, also where all ids want the same slot and tag."""
    ids = random_ids(41)
    if crowded:
        ids[:, 1] &= np.uint64(3)
        ids[:, 0] >>= np.uint64(33)
    ids[0] = 0
    table, known = HashTable(), {}
    for batch in batches:
        wanted = ids[np.array(batch, np.int64)]
        assert table.rows(wanted).tolist() == reference(known, wanted)
        assert table.used == len(known)


def test_a_table_grows_and_loses_nothing():
    """Through many doublings of rows and index; columns keep their numbers, new ones are 0."""
    table, known = HashTable(2), {}
    ids = random_ids(3 * SLICE)
    rng = np.random.default_rng(1)
    expected = np.zeros(len(ids), np.int64)
    for start in range(0, len(ids), SLICE // 2):
        part = np.concatenate(
            [ids[start : start + SLICE // 2], ids[rng.integers(0, start + 1, 99)]]
        )
        rows = table.rows(part)
        assert rows.tolist() == reference(known, part)
        np.add.at(table.numbers[:, 0], rows, 1)
        np.add.at(expected, rows, 1)
        assert table.numbers[: table.used, 0].tolist() == expected[: table.used].tolist()
    assert table.used == len(ids)
    assert (table.ids[: table.used] == ids).all()
    assert not table.numbers[: table.used, 1].any()
    assert table.bytes >= table.stored >= len(ids) * (16 + 16)


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_table_grows_where_it_is(refused, monkeypatch):
    """Past the size from which it has memory of its own; also where addresses are few."""
    real, asked = mmap.mmap, []

    def given(number, size, **flags):
        asked.append(size)
        if refused and size > 1 << 26:
            raise OSError("no such addresses")
        return real(number, size, **flags)

    monkeypatch.setattr(mmap, "mmap", given)
    table, ids = HashTable(1), random_ids(900_000)
    for start in range(0, len(ids), 300_000):
        places = np.arange(start, start + 300_000)
        assert np.array_equal(table.rows(ids, places), places)
    assert table.used == len(ids)
    assert np.array_equal(table.rows(ids), np.arange(len(ids)))
    assert table.used == len(ids)
    assert max(asked) > 1 << 30
    assert len(asked) > 3 or not refused
    assert table.bytes < 64 * len(ids)


def test_a_slot_has_room_for_every_row():
    """The row's number and bits of the id share 32 bits, whatever the number of slots."""
    for slots in (512, 2048, 1 << 19, 1 << 32):
        index = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint32), (slots,), (0,))
        bits = int(row_bits(index))
        assert (1 << bits) == slots
        assert bits <= 32


def test_some_rows_of_a_batch_are_looked_up_by_their_places():
    """Others leave no trace."""
    ids, table = random_ids(10), HashTable()
    assert table.rows(ids, np.array([7, 2, 7])).tolist() == [0, 1, 0]
    assert table.used == 2


@given(st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=40), st.booleans()), max_size=6))
@examples(max_examples=60)
def test_deltas_make_the_same_table(steps):
    """Applied in order they give rows, columns and index of the original, at every snapshot."""
    ids = random_ids(61)
    original, copy = HashTable(1), HashTable(1)
    since = 0
    for numbers, snapshot in steps:
        rows = original.rows(ids[np.array(numbers, np.int64)])
        np.add.at(original.numbers[:, 0], rows, 1)
        if snapshot:
            copy.apply(original.delta(since))
            since = original.used
            assert copy.used == original.used
            assert (copy.ids[: copy.used] == original.ids[: copy.used]).all()
            mine, theirs = copy.numbers, original.numbers
            assert (mine[: copy.used] == theirs[: copy.used]).all()
    copy.apply(original.delta(since))
    probe = ids[::-1].copy()
    assert copy.rows(probe).tolist() == original.rows(probe).tolist()
    assert (copy.numbers[: copy.used] == original.numbers[: copy.used]).all()


def test_a_delta_out_of_order_is_refused():
    """A snapshot with a part missing must not be taken for a whole one."""
    table, other = HashTable(), HashTable()
    table.rows(random_ids(5))
    later = table.delta(3)
    with pytest.raises(StateError, match="snapshot"):
        other.apply(later)


def test_a_delta_is_a_copy():
    """It is written while the table goes on."""
    ids, table = random_ids(300), HashTable(1)
    rows = table.rows(ids)
    first = table.delta(0)
    table.rows(ids[:10])
    second = table.delta(200)
    table.numbers[rows] += 5
    assert not first["new"][:, 2].any()
    assert second["older"].tolist() == list(range(10))
    assert not second["changed"].any()


@given(st.integers(1, 20), st.integers(0, 300), st.integers(0, 3))
@examples(max_examples=40)
def test_split_puts_each_row_into_one_bucket_by_its_id(buckets, count, seed):
    """Every row taken, once, in order; equal ids share a bucket."""
    ids = random_ids(50)[np.random.default_rng(seed).integers(0, 50, count)]
    taken = (np.arange(count) % 3 != 1).astype(np.uint8)
    order, ends = np.empty(count, np.int64), np.empty(buckets, np.int64)
    split(ids, taken, buckets, order, ends)
    parts = np.split(order[: ends[-1]], ends[:-1])

    assert len(parts) == buckets
    assert sorted(np.concatenate(parts).tolist()) == np.flatnonzero(taken).tolist()
    assert all((np.diff(part) > 0).all() for part in parts)
    home = {}
    for number, part in enumerate(parts):
        for row in part.tolist():
            assert home.setdefault(tuple(ids[row].tolist()), number) == number


def test_buckets_share_the_ids_evenly():
    """Within 6 deviations of equal shares; false alarm below 1e-7."""
    ids = random_ids(60_000, seed=5)
    order, ends = np.empty(len(ids), np.int64), np.empty(7, np.int64)
    split(ids, np.ones(len(ids), np.uint8), 7, order, ends)
    shares = np.diff(ends, prepend=0)
    assert (abs(shares - len(ids) / 7) < 6 * np.sqrt(len(ids) / 7)).all()
