"""Smoothing a group, and the memory it reads."""

import statistics
from functools import partial

import numpy as np
import pytest

from dpstream.errors import InvalidParameter
from dpstream.mechanisms import Pegasus, PegasusW
from dpstream.mechanisms.parts.grouping import History, smooth
from dpstream.privacy.state import pack, unpack


def history(columns, longest=4):
    made = History.of(bins=len(columns[0]), longest=longest, dtype=np.float64)
    for column in columns:
        made = made.append(np.array(column))
    return made


@pytest.mark.parametrize(
    ("smoother", "expected"),
    [
        ("median", [7.0, 10.0, 6.0]),
        ("mean", [7.0, 10.0, 7.0]),
        # (7 - 7) / 1 + 7, (14 - 10) / 2 + 10, (12 - 7) / 4 + 7
        ("james_stein", [7.0, 12.0, 8.25]),
    ],
)
def test_smoothers_by_hand(smoother, expected):
    """Groups of 1, 2 and 4: an even group's median is the mean of its two middle values."""
    noisy = history([[99, 99, 5], [-99, 99, 7], [99, 6, 4], [7, 14, 12]])

    assert smooth(noisy, np.array([1, 2, 4]), smoother).tolist() == expected


def test_medians_of_odd_groups():
    """The middle one, whatever the order."""
    assert smooth(history([[3], [-8], [90]]), np.array([3]), "median").tolist() == [3.0]


def test_medians_of_groups_of_any_length():
    """Short and long groups, with ties, as the textbook has them."""
    rng = np.random.default_rng(7)
    columns = rng.integers(-9, 9, (60, 5)).astype(float)
    noisy = history(columns.tolist(), longest=60)
    for _ in range(100):
        size = rng.integers(1, 61, 5)
        expected = [statistics.median(columns[60 - n :, j]) for j, n in enumerate(size)]
        assert smooth(noisy, size, "median").tolist() == expected


@pytest.mark.parametrize("mechanism", [PegasusW, partial(Pegasus, lo=0, hi=9)])
def test_an_unknown_smoother_is_refused(mechanism):
    """By name, with the choices, which are the same for both forms of PeGaSuS."""
    size = {"window": 3} if mechanism is PegasusW else {}
    for smoother in ("mean", "median", "james_stein"):
        assert mechanism(epsilon=1, smoother=smoother, **size).smoother == smoother
    with pytest.raises(InvalidParameter, match="mean, median, james_stein; got 'mode'"):
        mechanism(epsilon=1, smoother="mode", **size)


def newest(made, count):
    return made.block[0, made.end - count : made.end].tolist()


def test_history_keeps_the_newest_for_ever_in_bounded_memory():
    """After any number of steps the last `longest` values are there, in order."""
    made = History.of(bins=1, longest=3, dtype=np.int64)
    for value in range(50):
        made = made.append(np.array([value]))
        count = min(value + 1, 3)
        assert newest(made, count) == list(range(value + 1 - count, value + 1))
        assert made.block.shape == (1, 6)


def test_an_older_history_is_never_changed():
    """Going back and on with other values disturbs neither branch, also from far back."""
    kept = [History.of(bins=1, longest=3, dtype=np.int64)]
    for value in range(20):
        kept.append(kept[-1].append(np.array([value])))
    for back in range(3, 20):
        branch = kept[back].append(np.array([100])).append(np.array([101]))
        assert newest(branch, 3) == [back - 1, 100, 101]
    for step in range(3, 21):
        assert newest(kept[step], 3) == [step - 3, step - 2, step - 1]


def test_a_stored_history_goes_on():
    """Packed and unpacked, it takes the next value like the original."""
    made = history([[1], [2]])
    copy = unpack(pack(made, kind="x"), kind="x")

    assert newest(copy.append(np.array([3.0])), 3) == newest(made.append(np.array([3.0])), 3)
    assert newest(made.append(np.array([8.0])), 2) == [2.0, 8.0]
