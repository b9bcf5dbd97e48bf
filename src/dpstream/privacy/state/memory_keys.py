"""What a query asks of its windows' keys, and keys that live in memory alone."""

from __future__ import annotations

import threading
from secrets import token_bytes
from typing import Protocol

from dpstream.errors import StateError
from dpstream.privacy.state.secret import Secret


class WindowKeySource(Protocol):
    """The keys of one query's windows; another query has windows, and keys, of its own."""

    def mint(self, window: int) -> bytes:
        """Make the window's key before its first draw; a second call returns it."""

    def get(self, window: int) -> bytes:
        """The key of a window that was minted."""

    def erase(self, window: int) -> None:
        """Forget the window's key for good."""


class MemoryWindowKeys:
    """Random keys of a run that keeps no state: they end with the process, or when erased.

    >>> keys = MemoryWindowKeys()
    >>> keys.mint(0) == keys.get(0) != keys.mint(1)
    True
    """

    def __init__(self, *, derived_for_tests: Secret | None = None) -> None:
        self._keys: dict[int, bytes] = {}
        self._erased, self._final = set[int](), 0  # windows 0 to final - 1 are erased too
        self._lock, self._derived = threading.Lock(), derived_for_tests

    def mint(self, window: int) -> bytes:
        """Make the window's key; a second call returns it."""
        with self._lock:
            self._refuse_erased(window)
            return self._keys.setdefault(window, self._draw(window))

    def get(self, window: int) -> bytes:
        """The key of a window that was minted and not erased."""
        with self._lock:
            self._refuse_erased(window)
            if window not in self._keys:
                raise StateError(f"the key of window {window} was never minted")
            return self._keys[window]

    def erase(self, window: int) -> None:
        """Forget the window's key; it is never minted again."""
        with self._lock:
            self._keys.pop(window, None)
            self._erased.add(window)
            while self._final in self._erased:
                self._erased.remove(self._final)
                self._final += 1

    def _refuse_erased(self, window: int) -> None:
        if window in self._erased or 0 <= window < self._final:
            raise StateError(f"window {window} is final: its key was erased and no noise is left")

    def _draw(self, window: int) -> bytes:
        if self._derived is None:
            return token_bytes(32)
        return self._derived.key("window key for tests", window.to_bytes(8, "big", signed=True))
