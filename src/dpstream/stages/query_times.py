"""The times of a query: understood, checked against each other, and laid out as a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpstream.errors import InvalidParameter
from dpstream.stages.schedule import Schedule
from dpstream.stages.ticks import DAY, SECOND, Ticks, duration, instant

if TYPE_CHECKING:
    from dpstream.stages.query import Query

TIME_UNITS = {"us": 1, "ms": 1000, "s": SECOND, "min": 60 * SECOND, "h": 3600 * SECOND, "day": DAY}
"""What one unit of a numeric time column may be, in microseconds."""


def checked_times(query: Query) -> dict[str, Any]:
    """The query's durations and instants, by name; those that do not go together are refused."""
    found: dict[str, Any] = {
        name: duration(getattr(query, name), name, least=0)
        for name in ("allowed_lateness", "max_ahead")
    }
    if query.every is not None:
        found["every"] = duration(query.every, "every")
    if query.period != "forever":
        found["period"] = duration(query.period, "period")
    for name in ("start", "end", "time_origin"):
        if getattr(query, name) is not None:
            found[name] = instant(getattr(query, name), name, query.time_zone)
    if query.triggers is not None:
        times = (instant(time, "a trigger", query.time_zone) for time in query.triggers)
        found["triggers"] = tuple(times)
    _refuse_contradictions(query)
    return found


def _refuse_contradictions(query: Query) -> None:
    if query.every is not None and query.triggers is not None:
        raise InvalidParameter("give every= or triggers=, not both")
    if query.window is not None:
        query.window.check(query.time_zone)
    if query.time_unit is not None and query.time_unit not in TIME_UNITS:
        raise InvalidParameter(
            f"time_unit must be one of {', '.join(TIME_UNITS)}; got {query.time_unit!r}"
        )
    timed = (query.window, query.every, query.triggers, query.start, query.end, query.arrival)
    if query.time is None and any(item is not None for item in timed):
        raise InvalidParameter(
            "window, every, triggers, start, end and arrival need time=, the column of the "
            "event time"
        )
    if query.time is None and query.period != "forever":
        raise InvalidParameter("a period needs time=, the column of the event time")
    if query.time is not None and query.window is None and query.start is None:
        raise InvalidParameter(
            "a query with a time column needs its public range: start= and end= (or a window "
            "and a live source); taken from the data it would reveal the first and last row"
        )


def schedule_of(query: Query) -> Schedule:
    """When what is published, once the times are understood."""
    if query.time is None or query.start is None:
        return Schedule()
    window, edges = query.window, None
    if window is not None:
        edges = Ticks(origin=query.start, size=window.cell, zone=query.time_zone)
    ticks: Ticks | tuple[int, ...] | None = query.triggers  # type: ignore[assignment]
    if query.every is not None:
        ticks = Ticks(origin=query.start, size=query.every, zone=query.time_zone)
    return Schedule(
        start=query.start,
        end=query.end,
        edges=edges,
        kind="tumble" if window is None else window.kind,
        cells=1 if window is None else window.cells,
        triggers=ticks,
        lateness=query.allowed_lateness,
    )
