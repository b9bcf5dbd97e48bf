"""Log lines for the operator: time, level, query and release, as text or as JSON.

No line has a value of the data in it: no key, no unit, no raw row; how many rows there were is said
at the level `debug` alone. So an error that is not ours is told by its kind and place: its own
words may quote what it has met.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpstream.errors import DpstreamError, InvalidParameter

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FORMAT, LEVEL = "DPSTREAM_LOG_FORMAT", "DPSTREAM_LOG_LEVEL"
"""Variables of the environment; the process that runs a pipeline for a server gets them, too."""


class LineFormatter(logging.Formatter):
    """One record: a line of text, or a JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, and what the record's `facts` are."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            facts["exception"] = where_and_what(record.exc_info[1])
        if self._as_json:
            return json.dumps(facts, default=str)
        words = [str(facts.pop(name)) for name in ("time", "level", "logger", "message")]
        words[1] = words[1].upper()
        words += [f"{name}={value}" for name, value in facts.items() if name != "exception"]
        text = "\n".join([" ".join(words), *facts.get("exception", [])])
        return text.replace("\n", "\n  ")  # what follows is no line of its own


def where_and_what(problem: BaseException) -> list[str]:
    """The places an error went through and its kind; its words only if they are ours."""
    frames = traceback.extract_tb(problem.__traceback__)
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return [*places, in_our_words(problem)]


def in_our_words(problem: BaseException) -> str:
    """An error's kind, and its message if dpstream or the system has written it."""
    kind = type(problem).__name__
    if isinstance(problem, DpstreamError):
        return f"{kind}: {problem}"
    if isinstance(problem, OSError) and problem.strerror:
        return f"{kind}: {problem.strerror}{f': {problem.filename}' if problem.filename else ''}"
    return kind


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record; those of other packages from warnings on."""
        if record.name.partition(".")[0] == "dpstream" or record.levelno >= logging.WARNING:
            self.stream = sys.stderr
            super().emit(record)


@contextmanager
def log_to_stderr(
    style: str | None, level: str | None, *, export: bool = False
) -> Iterator[LineFormatter | None]:
    """Log lines go to standard error while this lasts; nothing changes if neither is given.

    `export`: processes that are started meanwhile do the same.
    """
    for given, allowed, name in ((style, FORMATS, "format"), (level, LEVELS, "level")):
        if given is not None and given.lower() not in allowed:
            raise InvalidParameter(
                f"--log-{name} must be one of {', '.join(allowed)}; got {given!r}"
            )
    if style is None and level is None:
        yield None
        return
    style, level = (style or "text").lower(), (level or "info").lower()
    environment = {name: os.environ.get(name) for name in (FORMAT, LEVEL)}
    if export:
        os.environ |= {FORMAT: style, LEVEL: level}
    root, package, handler = logging.getLogger(), logging.getLogger("dpstream"), _Stderr()
    formatter = LineFormatter(as_json=style == "json")
    handler.setFormatter(formatter)
    before = package.level
    package.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield formatter
    finally:
        root.removeHandler(handler)
        package.setLevel(before)
        for name, was in environment.items() if export else ():
            os.environ.pop(name, None)
            os.environ |= {} if was is None else {name: was}
