"""Keep freed memory for the next batch instead of giving it back to the system.

An engine allocates and frees the same hundred megabytes again and again. By default large blocks
go back to the system when they are freed, and every page of the next one is a page fault; on a
virtual machine that has cost a quarter of the whole time. This changes the allocator of the whole
process, so it is left to programs: the command line does it, a library call does not.
"""

from __future__ import annotations

import ctypes
import sys

import pyarrow as pa

_TRIM, _TOP_PAD, _MMAP, _ARENAS = -1, -2, -3, -8  # glibc's names: M_TRIM_THRESHOLD and so on


def keep_freed_memory() -> bool:
    """Tell glibc and Arrow to reuse memory; False where there is no glibc to tell."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_ARENAS, 1), (_MMAP, 32 << 20), (_TRIM, 1 << 30), (_TOP_PAD, 64 << 20))
    done = all(tune(option, value) for option, value in wanted)
    if done:
        pa.set_memory_pool(pa.system_memory_pool())
    return done
