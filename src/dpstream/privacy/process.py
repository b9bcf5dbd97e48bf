"""Which process this is, without a system call: every step of every run asks.

A forked child that went on with its parent's run would draw its parent's noise again.
"""

from __future__ import annotations

import os

_number = os.getpid()


def this_process() -> int:
    """The number of this process.

    >>> this_process() == os.getpid()
    True
    """
    return _number


def _look_again() -> None:
    global _number
    _number = os.getpid()


os.register_at_fork(after_in_child=_look_again)
