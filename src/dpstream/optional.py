"""Packages that come with an extra: taken when they are needed, with a word on how to get them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dpstream.errors import MissingDependency


def optional(module: str, *, extra: str, who: str = "this") -> Any:
    """The module, or an error that names who needs it and the extra it comes with.

    >>> optional("no.such", extra="plot", who="it")
    Traceback (most recent call last):
    dpstream.errors.MissingDependency: it needs no; install it with: pip install 'dpstream[plot]'
    """
    try:
        return import_module(module)
    except ImportError:
        raise MissingDependency(
            f"{who} needs {module.partition('.')[0]}; install it with: "
            f"pip install 'dpstream[{extra}]'"
        ) from None
