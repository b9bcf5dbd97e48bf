"""Kernels are kept on disk where that is possible, and work where it is not."""

import pytest
from numba.core import caching

from dpstream.compiled import COMPILING, _Tell, compiled, njit


def doubled(value: int) -> int:
    return 2 * value


def test_a_kernel_is_cached():
    """A second start finds the machine code."""
    assert compiled(doubled)._cache.cache_path


def test_without_a_writable_folder_a_kernel_still_runs(monkeypatch):
    """A read-only container without a home is slow to start, and says so."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        kernel = compiled(doubled)

    assert kernel(21) == 42


def test_other_problems_are_not_swallowed(monkeypatch):
    """Only the missing folder is made up for."""

    def broken(*_):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(caching.CacheImpl, "__init__", broken)
    with pytest.raises(RuntimeError, match="fire"):
        njit(cache=True)(doubled)


def test_who_listens_is_told_that_code_is_compiled(caplog, monkeypatch):
    """Once, and not when the machine code is on disk already."""
    monkeypatch.setattr(_Tell, "told", False)
    with caplog.at_level("INFO", logger="dpstream.compiled"):
        for _ in range(2):
            njit(cache=False)(doubled)(21)

    assert [record.message for record in caplog.records] == [COMPILING]
