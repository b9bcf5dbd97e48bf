"""Columns of one chunk, parsed once for all queries that read it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar

T = TypeVar("T")


class ParsedColumns:
    """Remembers what was made of a chunk; queries that come later, or at once, need not make it.

    Only what does not depend on a query's secret keys belongs here: ids differ from run to run.
    """

    def __init__(self) -> None:
        self._lock, self._known = RLock(), dict[Hashable, Any]()

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What was made under this name, or is made now."""
        with self._lock:
            if what not in self._known:
                self._known[what] = make()
            found: T = self._known[what]
            return found
