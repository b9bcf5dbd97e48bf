"""Time-series mechanisms through SQL, as whole paths: what is shipped, and what is broken.

The hard pair: a unit with five rows in each window that is protected, four in time and one that
comes a window late, all in one group, so that every row that is let in too much adds up. Each
window's one count moves the same bin the same way, which costs most where noise is drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpstream.audit.controls.series import EntersAgain
from dpstream.audit.neighbours import Pair
from dpstream.audit.query_samplers import Scenario
from dpstream.audit.series_runs import WINDOWS, SqlRuns
from dpstream.audit.targets import Target

EPSILON, W, DELTA = 2, 3, 0.01
_W_EVENT = f"epsilon = {EPSILON}, privacy_unit = 'w_event', w = {W}"
_UNIFORM = f"{_W_EVENT}, mechanism = 'uniform'"
_COUNTER = f"epsilon = {EPSILON}, delta = {DELTA}, privacy_unit = 'event', mechanism = 'tree'"


def crowding(windows: range, *, others: tuple[int, ...] = (5,), name: str = "") -> Pair:
    """A unit with five rows in each of these windows; `others` in turn, from window to window."""
    base = tuple(
        (0, window, others[window % len(others)])
        for window in range(WINDOWS)
        if others[window % len(others)]
    )
    unit = tuple(place for step in windows for place in (*((0, step),) * 4, (0, step, 1)))
    return Pair(
        name=f"a unit with 5 rows in windows {windows[0]} to {windows[-1]}{name}",
        one=Scenario(others=base, unit=unit),
        two=Scenario(others=base),
    )


ALL = crowding(range(1, 1 + W))  # the first window is still open when its late rows come


def _target(name: str, about: str, sample: Any, *pairs: Pair, **facts: Any) -> Any:
    usual: dict[str, Any] = {"epsilon": float(EPSILON), "runs": (8_000, 60_000)}
    return lambda: Target(name=name, about=about, sample=sample, pairs=pairs, **usual | facts)


def series_targets() -> dict[str, Callable[[], Target]]:
    """By name."""
    return {
        "sql_w_event": _target(
            "sql_w_event",
            f"SQL through uniform noise, w = {W}: from the text to the tables.",
            SqlRuns(options=_UNIFORM),
            *(ALL, crowding(range(W))),
            simple=True,
        ),
        "sql_event": _target(
            "sql_event",
            "SQL through a tree of sums, one window of a unit: from the text to the tables.",
            SqlRuns(options=_COUNTER),
            *(crowding(range(1)), crowding(range(1, 2))),
            delta=DELTA,
            simple=True,
        ),
        "sql_pacer": _target(
            "sql_pacer",
            f"SQL through the default mechanism, pacer, w = {W}: every run a query.",
            SqlRuns(options=_W_EVENT, apart=False),
            *(crowding(range(W), others=(40, 0), name=", jumping counts"), crowding(range(W))),
            runs=(300, 2_000),
        ),
    }


def broken_series() -> dict[str, Callable[[], Target]]:
    """By name."""
    facts: dict[str, Any] = {"control": True, "runs": (8_000, 40_000)}
    return {
        "sql_unit_enters_again": _target(
            "sql_unit_enters_again",
            "A unit whose rows come in two steps enters a window twice.",
            SqlRuns(options=_UNIFORM, run=EntersAgain),
            ALL,
            **facts,
        ),
        "sql_w_forgotten": _target(
            "sql_w_forgotten",
            f"Promised for {W} windows, but the mechanism is made for one.",
            SqlRuns(options=_UNIFORM.replace(f"w = {W}", "w = 1")),
            ALL,
            **facts,
        ),
    }
