"""A record with some fields changed, several times a step."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


def changed(record: _T, **fields: Any) -> _T:
    """`dataclasses.replace`, in half of the time, for records without cached properties.

    >>> from dpstream.mechanisms.parts.pid import Pid
    >>> changed(Pid(), interval=3.0)
    Pid(interval=3.0, errors=())
    """
    return type(record)(**(record.__dict__ | fields))
