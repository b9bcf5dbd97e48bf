"""Spans around what a run does, where somebody exports them; otherwise they cost next to nothing.

A span has the names and numbers of the schedule alone: no key, no unit, no value, no count of rows,
and of an error its kind. How long it took is exact, and so for the operator alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Starter = Callable[[str, dict[str, str | int]], AbstractContextManager[None]]
_starter: Starter | None = None


def span(name: str, **facts: str | int) -> AbstractContextManager[None]:
    """What is done inside, as a span of the one around it."""
    return nullcontext() if _starter is None else _starter(name, facts)


@contextmanager
def exported(starter: Starter) -> Iterator[None]:
    """Spans go there while this lasts.

    >>> from contextlib import contextmanager
    >>> @contextmanager
    ... def tell(name, facts):
    ...     print("begin", name, facts)
    ...     yield
    ...     print("end", name)
    >>> with exported(tell), span("trigger", query="pages"):
    ...     pass
    begin trigger {'query': 'pages'}
    end trigger
    """
    global _starter
    before, _starter = _starter, starter
    try:
        yield
    finally:
        _starter = before
