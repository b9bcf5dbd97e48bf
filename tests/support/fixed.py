"""Randomness that is the same whenever a test runs again, alone or among others.

A test says which secret and run id it means by SECRET and RUN. What dpstream draws from the system
besides (secrets, run ids, keys of windows, tokens) comes from the test's name here, so that a test
which passes goes on passing. Programs that a test starts draw from the system.
"""

import base64
import hashlib
import itertools
import os
from functools import cache

import pytest

SECRET, RUN = bytes(range(32)), bytes(range(16))
"""The secret and the run id of tests that look at certain noise."""


class FixedRandomness:
    """A plugin: system randomness of a test is a hash of its name and of how often it has drawn.

    Each fork of a test draws other bytes than the test and its other forks.
    """

    def __init__(self) -> None:
        # Imported when conftest has said where machine code is kept.
        from dpstream.privacy.state import secret, window_keys

        self._begin("")
        secret.token_bytes = window_keys.token_bytes = self.token_bytes
        secret.token_urlsafe = self.token_urlsafe
        os.register_at_fork(before=lambda: next(self._forks), after_in_child=self._begin_fork)

    def token_bytes(self, size: int = 32) -> bytes:
        """As `secrets.token_bytes`."""
        number = next(self._draws)  # of one thread alone
        return hashlib.shake_256(f"{self._name} {number}".encode()).digest(size)

    def token_urlsafe(self, size: int = 32) -> str:
        """As `secrets.token_urlsafe`."""
        return base64.urlsafe_b64encode(self.token_bytes(size)).rstrip(b"=").decode()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._begin(item.nodeid)

    def _begin(self, name: str) -> None:
        self._name, self._draws, self._forks = name, itertools.count(), itertools.count()

    def _begin_fork(self) -> None:
        self._begin(f"{self._name} after {self._draws} in fork {self._forks}")


@cache
def fixed_randomness() -> FixedRandomness:
    """The plugin; one, since a test may start pytest in its process."""
    return FixedRandomness()
