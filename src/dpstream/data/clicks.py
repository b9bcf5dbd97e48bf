"""A made-up day of clicks for the demo: the same rows every time, nobody's data."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dpstream.records import Integers, Words

PAGES = ("home", "news", "weather", "sport", "shop", "jobs", "travel", "help", "about", "imprint")
DAY = "2024-05-01"
_START = 1_714_521_600  # DAY at midnight, UTC


def clicks(rows: int = 60_000, users: int = 12_000) -> pa.Table:
    """Columns user, page, at (seconds since 1970) and seconds spent; page n is 0.6 as likely as the
    one before, `weather` is looked at in the morning only.

    >>> clicks(3).column_names
    ['user', 'page', 'at', 'seconds']
    """
    numbers = np.arange(rows, dtype=np.uint64)
    user = _mix(numbers, 1) % np.uint64(users)
    likely = np.cumsum(0.6 ** np.arange(len(PAGES)))
    page = np.searchsorted(likely / likely[-1], _uniform(numbers, 2)).astype(np.int64)
    at = (np.sort(_uniform(numbers, 3)) * 86_400).astype(np.int64)
    page = np.where((page == 2) & (at > 36_000), 0, page)
    seconds: Integers = (5 + 295 * _uniform(numbers, 4) ** 3).astype(np.int64)
    return pa.table(
        {
            "user": pa.array([f"user-{number:05d}" for number in user.tolist()]),
            "page": pa.array([PAGES[number] for number in page.tolist()]),
            "at": pa.array(at + _START),
            "seconds": pa.array(seconds),
        }
    )


def _uniform(numbers: Words, stream: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return (_mix(numbers, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(numbers: Words, stream: int) -> Words:
    """Well-spread words from a counter: the mixing of Steele, Lea, Flood's SplitMix, 2014."""
    word = (numbers + np.uint64(stream << 40)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(word ^ (word >> np.uint64(31)), np.uint64)
