"""What other settings of a query would do: noise, thresholds, what bounds leave out.

All of it follows from the query: no row is read and nothing is spent, so anybody may try any
number of settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from dpstream.errors import InvalidParameter
from dpstream.explanation.explain_query import explain
from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery

_SPLITS = (Fraction(1, 4), Fraction(3, 4))
_LAST = (None, Fraction(1, 4), Fraction(2, 5))


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way to ask the query, and what is predicted of it."""

    setting: str
    column: str
    noise: float | None
    """Of the first column, at a window's last release: a standard deviation."""
    first_noise: float | None
    """The same at its first release."""
    threshold: float | None
    """Units that a key needs by the end of its window; None: keys are public."""
    kept: float
    """Of a unit that has twice the groups and rows of the query as it is: the share that counts."""


def alternatives(query: Query | SeriesQuery) -> list[Alternative]:
    """The query as it is, then the other settings that can be run, one change each.

    >>> query = Query(privacy_unit_column="user", keys=["page"], epsilon=2, delta=1e-6,
    ...               max_groups_contributed=4)
    >>> [(one.setting, one.kept) for one in alternatives(query)][:2]
    [('as it is', 0.5), ('max_groups_contributed = 2', 0.25)]
    """
    if isinstance(query, SeriesQuery):
        raise InvalidParameter(
            f"the query {query.name!r} goes through a time-series mechanism, whose settings are "
            "compared on data: use `dpstream compare`"
        )
    query = query.starting(0)
    if query.candidates:  # what is predicted is of the first periods
        query = query.with_bounds(query.first_bounds)
    groups, rows = query.bounds.groups, query.bounds.rows_per_group
    most = 2 * groups  # of a large unit, unless there are fewer
    if query.reachable is not None:
        most = min(most, query.reachable)
    offered = most * (2 * rows if rows > 1 else 1)
    found = []
    for setting, changes in [("as it is", {}), *_changes(query)]:
        try:
            changed = with_changes(query, changes)
            told = explain(changed)
        except InvalidParameter:
            continue  # it cannot be run like this
        if changes and changed == query:
            continue
        column = told.columns[0] if told.columns else {}
        kept = min(changed.bounds.groups, most) * min(
            changed.bounds.rows_per_group, 2 * rows if rows > 1 else 1
        )
        found.append(
            Alternative(
                setting=setting,
                column=column.get("column", "keys"),
                noise=column.get("last"),
                first_noise=column.get("first"),
                threshold=told.keys.get("last_threshold"),
                kept=kept / offered,
            )
        )
    return found


def _changes(query: Query) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Settings to compare with, by the words that ask for them."""
    for name in ("max_groups_contributed", "max_rows_per_group"):
        now = getattr(query, name)
        for other in (now // 2, 2 * now):
            if other:
                yield f"{name} = {other}", {name: other}
    if query.public_groups is None and query.aggregates:
        for share in _SPLITS:
            yield f"selection_share = {float(share):g}", {"selection_share": share}
    for part in _LAST:
        yield (
            f"last_budget = {'None' if part is None else f'{float(part):g}'}",
            {"last_budget": part},
        )
    if query.shares_noise:
        yield "correlated_noise = FALSE", {"correlated_noise": False}
    yield "report_bias = FALSE", {"report_bias": False, "debias": None, "max_dropped_rows": None}
    other_strategy = "sqlp" if query.strategy == "latched" else "latched"
    yield f"strategy = '{other_strategy}'", {"strategy": other_strategy}
    for times in (Fraction(1, 2), Fraction(2)):
        epsilon = query.epsilon * times
        yield f"epsilon = {float(epsilon):g}", {"epsilon": epsilon}


def with_changes(query: Query, changes: Mapping[str, Any]) -> Query:
    """The query with other settings; bounds that are chosen give way to numbers."""
    given = dict(changes)
    if "max_groups_contributed" in given:
        given["choose_groups"] = False
    if given:
        given["planned"] = tuple(each for each in query.planned if each not in given)
    if "max_rows_per_group" in given:
        given["choose_rows"] = False
    product = query.max_groups_contributed * query.max_rows_per_group
    if given and query.max_rows_contributed == product:
        given["max_rows_contributed"] = None  # nobody chose it: it follows from the other two
    return replace(query, **given)


def why_in_words(found: list[Alternative]) -> str:
    """A table for people: each setting, beside the query as it is."""
    heads = ("setting", f"noise of {found[0].column}: first", "last", "units to appear", "kept")
    lines: list[tuple[str, ...]] = [heads]
    for one in found:
        noise = [_figure(each) for each in (one.first_noise, one.noise)]
        threshold = "public" if one.threshold is None else _figure(one.threshold)
        lines.append((one.setting, *noise, threshold, f"{one.kept:.0%}"))
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    table = [
        "  ".join(text.ljust(width) if not at else text.rjust(width) for at, (text, width) in pairs)
        for pairs in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
    ]
    return "\n".join(
        [
            "WHY (predicted from the query alone: no data are read, nothing is spent)",
            *(f"  {line.rstrip()}" for line in table),
            "  kept: the share that counts of a unit with twice the groups that the query bounds",
            "  it by (and twice the rows in each, where it bounds them by more than one)",
            "  selection_share, last_budget: in Python alone",
        ]
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def as_plain(found: list[Alternative]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [asdict(one) for one in found]
