"""Whole columns of text at a glance."""

import pyarrow as pa
import pytest

from dpstream.rows.number_text import is_ascii, lengths


@pytest.mark.parametrize("where", [0, 7, 8, 500, 999])
def test_one_character_that_is_not_ascii_is_seen_anywhere(where):
    """In a full word or in the bytes after the last one, but not outside a slice."""
    texts = ["abc"] * 1000
    texts[where] = "caf\u00e9"
    array = pa.array(texts)

    assert not is_ascii(array)
    assert is_ascii(pa.array(["abc"] * 1000))
    for rest in (array.slice(where + 1), array.slice(0, where)):
        assert is_ascii(rest) or not len(rest)


def test_shortest_and_longest_of_a_slice():
    """Rows before and after it do not count; other types and no rows have no limits."""
    array = pa.array(["", "four", "five5", None, "longest of all"])

    assert lengths(array.slice(1, 2)) == (4, 5)
    assert lengths(array) == (0, 14)
    for other in (pa.array([1, 2]), array.cast(pa.large_string()), array.slice(0, 0)):
        low, high = lengths(other)
        assert low == 0
        assert high > 1 << 60
        assert not is_ascii(other) or not len(other)
