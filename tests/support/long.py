"""How much of a long test is done: all of it with DPSTREAM_LONG=1, else a fixed part.

`make long` runs every file that imports this one.
"""

import os

from hypothesis import settings

PART = 10
"""Without DPSTREAM_LONG one case in this many is tried, always the same ones."""


def is_long() -> bool:
    """Is every case wanted?"""
    return "DPSTREAM_LONG" in os.environ


def part_of(count: int, *, of: int = PART) -> int:
    """So many cases, or one in `of` of them."""
    return count if is_long() else max(1, count // of)


def some_examples(count: int, *, of: int = PART) -> settings:
    """So many examples of a property, or one in `of` of them; the same ones every time."""
    return settings(
        max_examples=part_of(count, of=of), derandomize=True, deadline=None, database=None
    )
