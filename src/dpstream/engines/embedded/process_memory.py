"""Keep freed memory for the next batch instead of giving it back to the system.

An engine allocates and frees the same hundred megabytes again and again. By default large blocks
go back to the system when they are freed, and every page of the next one is a page fault; on a
virtual machine that has cost a quarter of the whole time. So the heap is kept, and it is made of
large pages. This changes the allocator of the whole process, so it is left to programs: the
command line does it, a library call does not.
"""

from __future__ import annotations

import ctypes
import sys

import pyarrow as pa

# glibc's names: M_TRIM_THRESHOLD and so on
_TRIM, _TOP_PAD, _MMAP, _MMAPS, _ARENAS = -1, -2, -3, -4, -8
_SETTINGS = ((_ARENAS, 1), (_MMAP, 32 << 20), (_TRIM, (1 << 31) - 1), (_TOP_PAD, 64 << 20))
_HEAP = 1 << 30  # bytes of addresses; memory is taken as it is used
_PAGE, _LARGE_PAGES = 4096, 14  # MADV_HUGEPAGE


def keep_freed_memory() -> bool:
    """Tell glibc and Arrow to reuse memory; False where there is no glibc to tell."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        tune, malloc, free = libc.mallopt, libc.malloc, libc.free
    except (OSError, AttributeError):
        return False
    done = all(tune(option, value) for option, value in _SETTINGS)
    if done:
        _use_large_pages(libc, tune, malloc, free)
        pa.set_memory_pool(pa.system_memory_pool())
    return done


def _use_large_pages(libc: ctypes.CDLL, tune, malloc, free) -> None:  # type: ignore[no-untyped-def]
    """Stretch the heap once and ask for large pages there; a refusal loses nothing."""
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    tune(_MMAPS, 0)  # so that the block is a part of the heap
    block = malloc(_HEAP)
    if block:
        start = -(-block // _PAGE) * _PAGE
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HEAP - _PAGE), _LARGE_PAGES)
        free(block)
    tune(_MMAPS, 1 << 16)
