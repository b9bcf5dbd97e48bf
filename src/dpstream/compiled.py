"""Numba's decorators, with machine code kept on disk wherever that is possible.

Numba keeps it in NUMBA_CACHE_DIR, else beside the source, else in the user's cache folder. Where
none of them can be written (a read-only container, a service without a home) it refuses to compile
at all; here such a function is compiled anew at every start, and one warning says so.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])

_SLOW_START = (
    "compiled code cannot be kept: neither the installed package nor the user's cache folder can "
    "be written, so every start compiles again; name a folder in NUMBA_CACHE_DIR"
)


COMPILING = "compiling; this is done once per installation and may take half a minute"


class _Tell(event.Listener):
    """Says once per process that code is being compiled, in the log `dpstream.compiled`."""

    told = False

    def on_start(self, event: Any) -> None:
        """Machine code was not found on disk."""
        if not self.told:
            _Tell.told = True
            logging.getLogger("dpstream.compiled").info(COMPILING)

    def on_end(self, event: Any) -> None:
        """Nothing more to say."""


event.register("numba:compile", _Tell())  # type: ignore[no-untyped-call]


def _with_fallback(decorator: Callable[..., Any], **options: Any) -> Any:
    def compile_(function: Any) -> Any:
        try:
            return decorator(**options)(function)
        except RuntimeError as problem:
            if "no locator" not in str(problem):
                raise
            warnings.warn(_SLOW_START, RuntimeWarning, stacklevel=2)
            return decorator(**options | {"cache": False})(function)

    return compile_


njit = partial(_with_fallback, numba.njit)
"""`numba.njit` that falls back to no cache."""
vectorize = partial(_with_fallback, numba.vectorize)
"""`numba.vectorize` that falls back to no cache."""


def compiled(function: F) -> F:
    """Compile without the GIL and keep the machine code on disk."""
    made: F = njit(nogil=True, cache=True)(function)
    return made
