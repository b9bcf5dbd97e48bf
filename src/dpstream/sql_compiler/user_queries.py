"""Questions about users in Python: `dps.sessions`, `dps.funnel`, `dps.retention`.

Each writes the SQL that asks the same, and compiles it: conditions and columns are expressions of
single rows in SQL, options are those of the privacy clause by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.query.query import Query
from dpstream.query.windows import DAY, SECOND, Cumulate, Hop, Tumble, duration, months_in
from dpstream.sql_compiler.compile_sql import compile_sql, warn_of_remarks

Expressions = Mapping[str, str] | Sequence[str]
"""Expressions of rows by the names of what they make, or names of columns."""


def funnel(
    *,
    steps: Mapping[str, str],
    time_column: str,
    within: Any = None,
    strict: bool = False,
    by: Expressions = (),
    window: Any = None,
    every: Any = None,
    name: str = "funnel",
    **options: Any,
) -> Query:
    """How many units reach each of several steps in order, and their share of the step before.

    `steps`: conditions in SQL, by the names of steps, in order. `within`: how long after its first
    step a unit must reach a later one. `strict`: no other row of the unit in between. `by`: a
    funnel for each value. `window`: a length of time, or `Tumble`, `Hop`, `Cumulate`; without it
    from `start` to `end`. `every`: publish windows at these intervals, not once. `options` are
    those of the privacy clause, as `dps.sql` takes them.

    >>> query = funnel(steps={"home": "page = '/'", "buy": "page = '/buy'"}, time_column="ts",
    ...     within="1 hour", window="1 day", every="1 hour", epsilon=1, delta=1e-9,
    ...     privacy_unit_column="user", privacy_unit_period="1 day", max_groups_contributed=2)
    >>> query.keys, query.public_groups
    (('step', 'step_name'), ((1, 'home'), (2, 'buy')))
    """
    more = {"within": _interval(within, "within"), "strict": "TRUE" if strict else None}
    keys, listed = _names_of(by), [f"({steps[step]}) AS {_quoted(step)}" for step in steps]
    table = _windowed(time_column, window)
    arguments = ["steps => (" + ", ".join(listed) + ")", *_by(by)]
    arguments += [f"{argument} => {value}" for argument, value in more.items() if value]
    columns = [*_window_columns(window), *keys, "step", "step_name"]
    text = _statement(columns, f"FUNNEL({', '.join([table, *arguments])})", "COUNT(*) AS users")
    if every is not None:
        text += f" EMIT EVERY {_interval(every, 'every')}"
    return _compiled(text, name, options)


def retention(
    *,
    first: str,
    again: str,
    period: Any,
    lags: int,
    time_column: str,
    by: Expressions = (),
    name: str = "retention",
    **options: Any,
) -> Query:
    """How many units of each cohort come back after so many periods, and their share of it.

    A unit is of the cohort of the period in which its first row with `first` lies, for ever, and
    comes back in a later one where it has a row with `again`: conditions in SQL. `by`: columns of
    the row with which a unit began. `options` are those of the privacy clause.

    >>> query = retention(first="event = 'signup'", again="TRUE", period="7 days", lags=8,
    ...     time_column="ts", epsilon=1, privacy_unit_column="user", privacy_unit_period="forever")
    >>> query.keys, query.bounds.groups
    (('lag',), 9)
    """
    arguments = [
        *("log", f"DESCRIPTOR({_quoted(time_column)})", f"first => ({first})"),
        *(f"again => ({again})", f"period => {_interval(period, 'period')}", f"lags => {lags}"),
        *_by(by),
    ]
    columns = ["window_start", *_names_of(by), "lag"]
    text = _statement(columns, f"RETENTION({', '.join(arguments)})", "COUNT(*) AS users")
    return _compiled(text, name, options)


def sessions(
    *,
    gap: Any,
    window: Any,
    time_column: str,
    most: int,
    longest: Any,
    quantiles: Sequence[float] = (0.5,),
    by: Mapping[str, str] | None = None,
    name: str = "sessions",
    **options: Any,
) -> Query:
    """How many sessions there are in each window, and quantiles of their lengths in seconds.

    A session is rows of a unit at most `gap` apart; it ends with its window. `most`: how many of a
    unit count in a window (and key); `longest`: longer ones count as so long. `by`: figures of a
    session's rows in SQL, by name, such as {"entry": "FIRST(page)"}. `options` are those of the
    privacy clause.

    >>> query = sessions(gap="30 minutes", window="1 day", time_column="ts", most=8,
    ...     longest="2 hours", quantiles=[0.5, 0.95], epsilon=1, delta=1e-9,
    ...     privacy_unit_column="user", privacy_unit_period="1 day", max_groups_contributed=1)
    >>> [each.name for each in query.aggregates]
    ['sessions', 'seconds_p50', 'seconds_p95']
    """
    unit = options.get("privacy_unit_column")
    if not isinstance(unit, str):
        raise InvalidParameter(
            f"privacy_unit_column must be the name of a column; got {unit!r}; whose sessions?"
        )
    by = by or {}
    seconds = duration(longest, "longest") / SECOND
    made = [f"{figure} AS {_quoted(each)}" for each, figure in by.items()]
    inner = ", ".join(
        [
            *(_quoted(unit), "session_start"),
            "TIMESTAMP_DIFF(session_end, session_start, SECOND) AS seconds",
            *made,
        ]
    )
    of_sessions = (
        f"(SELECT {inner} FROM SESSION(log, DESCRIPTOR({_quoted(time_column)}), "
        f"{_interval(gap, 'gap')}) GROUP BY {_quoted(unit)}, session_start, session_end)"
    )
    figures = ["COUNT(*) AS sessions"]
    for q in quantiles:
        bounds = f"contribution_bounds_per_row => (0, {seconds:g})"
        figures.append(f"PERCENTILE_CONT(seconds, {q}, {bounds}) AS seconds_p{100 * q:g}")
    table = _around(of_sessions, "session_start", window)
    columns = [*_window_columns(window), *(_quoted(each) for each in by)]
    text = _statement(columns, table, ", ".join(figures))
    return _compiled(text, name, {"max_rows_per_group": most} | options)


def _compiled(text: str, name: str, options: dict[str, Any]) -> Query:
    compiled = compile_sql(text, name, **options)
    warn_of_remarks(compiled, stacklevel=3)
    assert isinstance(compiled.query, Query)
    return compiled.query


def _statement(columns: Sequence[str], table: str, figures: str) -> str:
    listed = ", ".join(columns)
    return f"SELECT WITH DIFFERENTIAL_PRIVACY {listed}, {figures} FROM {table} GROUP BY {listed}"


def _windowed(time_column: str, window: Any) -> str:
    """The log, in windows of its time."""
    if window is None:
        return f"log, DESCRIPTOR({_quoted(time_column)})"
    return _around("log", time_column, window)


def _around(table: str, time_column: str, window: Any) -> str:
    window = window if isinstance(window, Tumble) else Tumble(window)
    kind, lengths = "TUMBLE", [window.size]
    if isinstance(window, Hop):
        kind, lengths = "HOP", [window.slide, window.size]
    elif isinstance(window, Cumulate):
        kind, lengths = "CUMULATE", [window.step, window.size]
    sizes = ", ".join(str(_interval(length, "window")) for length in lengths)
    return f"{kind}({table}, DESCRIPTOR({_quoted(time_column)}), {sizes})"


def _window_columns(window: Any) -> list[str]:
    return [] if window is None else ["window_start"]


def _interval(value: Any, name: str) -> str | None:
    """INTERVAL '15' SECOND of a length of time; None stays None."""
    if value is None:
        return None
    length = duration(value, name, calendar=name in ("window", "period", "every"))
    if months := months_in(length):
        return f"INTERVAL '{months}' MONTH"
    if length % SECOND:
        raise InvalidParameter(f"{name} must be whole seconds; got {length} microseconds")
    days, rest = divmod(length, DAY)
    return f"INTERVAL '{length // SECOND}' SECOND" if rest else f"INTERVAL '{days}' DAY"


def _by(by: Expressions) -> list[str]:
    """The argument `by`, if there is one."""
    if isinstance(by, str):
        raise InvalidParameter(f"by must be a list of columns; got {by!r}; write [{by!r}]")
    listed = [
        f"{by[name] if isinstance(by, Mapping) else _quoted(name)} AS {_quoted(name)}"
        for name in by
    ]
    return [f"by => ({', '.join(listed)})"] if listed else []


def _names_of(by: Expressions) -> list[str]:
    return [_quoted(name) for name in by]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
