"""Threads that work on hash buckets; compiled loops run without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")

FEW = 1 << 14
"""Rows or groups that are sooner done than handed to a thread."""


class Workers:
    """Does one thing to every bucket, on as many threads as there are."""

    def __init__(self, threads: int) -> None:
        # Twice as many: units of one step and groups of the step before are worked on at once.
        self._pool = ThreadPoolExecutor(2 * threads) if threads > 1 else None

    @property
    def several(self) -> bool:
        """Are there threads besides the caller's?"""
        return self._pool is not None

    def each(
        self, work: Callable[[T, U], R], one: Iterable[T], two: Iterable[U], *, size: int = FEW
    ) -> list[R]:
        """work(a, b) for each bucket and what belongs to it; a little (`size`) of it right here."""
        pairs = list(zip(one, two, strict=True))
        if self._pool is None or size < FEW:
            return [work(a, b) for a, b in pairs]
        return list(self._pool.map(lambda pair: work(*pair), pairs))

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
