"""Errors of tasks: what an executor raises on purpose reaches the caller as itself.

Spark wraps whatever a task raises into pages of two languages' stacks. An error of ours travels
through them as one line of JSON, and comes out with its type and its message.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Final

from dpstream import errors
from dpstream.errors import DpstreamError, MissingDependency, StateError

_LOG: Final = logging.getLogger("dpstream.spark")
_TOLD: Final = re.compile(r'TaskFailed: (\["\w+", ".*"\])\s*$', re.MULTILINE)
_OUTRUN: Final = "shuffle map stage with indeterminate output was failed and retried"
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class TaskFailed(Exception):
    """An error of ours on its way to the driver."""

    @classmethod
    def of(cls, problem: DpstreamError) -> TaskFailed:
        """In one line, whatever its message is."""
        return cls(json.dumps([type(problem).__name__, str(problem)]))


def is_passing(problem: Exception) -> bool:
    """Did a job fail only because an executor was lost at a bad moment, so that it may run again?

    Spark repeats the tasks of a lost executor, but not once tasks behind them have come to their
    end: it cannot know that ours give the same rows in any order and at any time.
    """
    return _OUTRUN in str(problem)


def understood(problem: Exception) -> DpstreamError | None:
    """What a failed job means; None: nothing that we know of.

    What Spark had to say is in the log `dpstream.spark`, for those who look for it.
    """
    found = _meaning(str(problem))
    if found is not None:
        _LOG.debug("a job failed on Spark", exc_info=problem)
    return found


def _meaning(text: str) -> DpstreamError | None:
    told = _TOLD.search(text)
    if told is not None:
        name, message = json.loads(told[1])
        kind = getattr(errors, name, StateError)
        found: DpstreamError = kind(message)
        return found
    missing = _MISSING.search(text)
    if missing is not None:
        how = "install it there, or call ship_code(session) before"
        if missing[1].partition(".")[0] != "dpstream":
            how = "install dpstream's dependencies there"
        return MissingDependency(f"executors have no module {missing[1]!r}; {how}")
    if "spark.driver.maxResultSize" in text:
        return StateError(
            "the releases of one job exceed what the driver takes; nothing of this job was "
            "published; raise spark.driver.maxResultSize (and spark.driver.memory), or lower "
            "steps_at_once"
        )
    return None
