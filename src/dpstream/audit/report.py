"""The report: run what was asked for, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from dpstream.audit.bounds_targets import bounds_controls, bounds_targets
from dpstream.audit.ledger_targets import ledger_controls, ledger_targets
from dpstream.audit.mechanism_targets import mechanism_controls, mechanism_targets
from dpstream.audit.query_targets import (
    query_controls,
    query_targets,
    series_controls,
    series_targets,
)
from dpstream.audit.targets import Catalogue, Row, Watch
from dpstream.errors import InvalidParameter


def shipped() -> Catalogue:
    """Everything that is shipped: noise itself, mechanisms, queries, ledgers."""
    queries = query_targets() | series_targets() | bounds_targets()
    return mechanism_targets() | queries | ledger_targets()


def controls() -> Catalogue:
    """Forms that are known to be broken: the auditor must catch each of them."""
    queries = query_controls() | series_controls() | bounds_controls()
    return mechanism_controls() | queries | ledger_controls()


def catalogue() -> Catalogue:
    """Everything that can be audited: what is shipped, then the controls."""
    return shipped() | controls()


def audit(
    names: Sequence[str] | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    watch: Callable[[str], Watch] = lambda name: lambda done, total: None,
) -> Iterator[Row]:
    """The rows of a report, as they are found; without `names` all of them.

    `seed` chooses the secrets: the same seed gives the same rows but for `seconds`.
    """
    known = catalogue()
    for name in known if names is None else names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidParameter(
                f"there is nothing called {name!r} to audit; {hint}choose one of {', '.join(known)}"
            )
    for name in known if names is None else names:
        yield known[name]().audit(quick=quick, seed=seed, watch=watch(name))


def repeat_row(row: Row, *, quick: bool = False) -> Row:
    """A row made once more from what it says about itself."""
    target = catalogue()[row["name"]]()
    return target.audit(quick=quick, seed=row["seed"], watch=lambda done, total: None)


def verdict(row: Row) -> tuple[bool, str]:
    """Is a row as it should be, and in a word what it shows."""
    if row["control"]:
        return (True, "caught") if row["rejected"] else (False, "MISSED")
    return (False, "REJECTED") if row["rejected"] else (True, "holds")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows are as they should be."""
    shown = [row for row in rows if not row["control"]]
    controls = [row for row in rows if row["control"]]
    return {
        "shipped": len(shown),
        "rejected": [row["name"] for row in shown if row["rejected"]],
        "controls": len(controls),
        "missed": [row["name"] for row in controls if not row["rejected"]],
    }
