"""The compiled hash gives the published function, for every length and place in a buffer."""

import numpy as np
import pytest

from dpstream.rows.siphash import hash_rows, hash_slices
from tests.rows.hashes import KEY

# `openssl mac -macopt hexkey:000102...0f -macopt size:16 SIPHASH` of the bytes 0, 1, 2, ...
VECTORS = [
    (0, "a3817f04ba25a8e66df67214c7550293"),
    (1, "da87c1d86b99af44347659119b22fc45"),
    (3, "9c70b60c5267a94e5f33b6b02985ed51"),
    (7, "a1f1ebbed8dbc153c0b84aa61ff08239"),
    (8, "3b62a9ba6258f5610f83e264f31497b4"),
    (9, "264499060ad9baabc47f8b02bb6d71ed"),
    (12, "d626b266905ef35882634df68532c125"),
    (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
    (16, "6ee2a4ca67b054bbfd3315bf85230577"),
    (23, "c9d184ddd5a9f5e0cf8ce29a9abf691c"),
    (24, "2db479ae78bd50d8882a8a178a6132ad"),
    (31, "2939b0183223fafc1723de4f52c43d35"),
    (40, "df6a301e95c95dad97ae0cc8c6913bd8"),
    (120, "4a1dad72344c458518c52d5216880cd9"),
    (127, "6b01f8d78740d48842333afe3e87c23d"),
    (128, "d1b4bd390255083ddabe483d6e7af066"),
    (135, "531c325ea1ed88393890b101f331fb23"),
    (300, "ce005a406d14b36d5386b5f7a7e1b311"),
]

LENGTHS = [0, 1, 7, 8, 9, 12, 40, 127, 128, 129, 500]


def frozen(array):
    array.flags.writeable = False
    return array


def siphash(messages, dtype=np.int64, spare=0):
    """Each message's hash; the buffer ends `spare` bytes behind the last one."""
    data = np.frombuffer(b"".join(messages) + bytes([255] * spare), np.uint8)
    offsets = np.cumsum([0, *map(len, messages)]).astype(dtype)
    out = np.empty((len(messages), 2), np.uint64)
    hash_slices(frozen(data), frozen(offsets), frozen(np.frombuffer(KEY, np.uint64)), out)
    return [row.tobytes().hex() for row in out]


def counting(length):
    return bytes(i % 256 for i in range(length))


@pytest.mark.parametrize(("length", "expected"), VECTORS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_hash_is_siphash_2_4_128(length, expected, dtype):
    """A message alone in a buffer of its own size has the hash that OpenSSL gives."""
    assert siphash([counting(length)], dtype) == [expected]


def test_a_tile_gives_every_message_its_own_hash():
    """Messages of all lengths side by side, over several tiles, keep their vectors and places."""
    known = dict(VECTORS)
    lengths = list(known) * 41

    assert siphash([counting(n) for n in lengths]) == [known[n] for n in lengths]


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_behind_a_message_do_not_count(length):
    """The last word of a message is cut at its end, whatever follows in the buffer."""
    message = counting(length)

    assert siphash([message], spare=9) == siphash([message]) == siphash([message, b"x" * 9])[:1]


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_a_row_of_words_hashes_as_its_bytes(rows):
    """Columns of one or two words a row give the hash of the row's bytes in order."""
    pairs = np.arange(2 * rows, dtype=np.uint64).reshape(rows, 2) ** np.uint64(5)
    single = np.arange(rows, dtype=np.int64) - 7
    addresses = [pairs.ctypes.data, pairs.ctypes.data + 8, single.ctypes.data]
    out = np.empty((rows, 2), np.uint64)

    hash_rows(
        np.array(addresses, np.uint64),
        np.array([16, 16, 8], np.uint64),
        frozen(np.frombuffer(KEY, np.uint64)),
        out,
    )

    whole = [pairs[i].tobytes() + single[i].tobytes() for i in range(rows)]
    assert [row.tobytes().hex() for row in out] == siphash(whole)
