"""The audit's part of the report: what was shown to be lost beside what is claimed."""

from __future__ import annotations

from html import escape
from typing import Any

from dpstream.audit.report import summary, verdict
from dpstream.bench.harness import Result, Row, target

_HEADINGS = ("name", "what it is", "claimed", "delta", "shown", "", "verdict")
_FULL = 2.0  # the bar's right end, in claims


def targets(result: Result) -> list[Row]:
    """Nothing shipped is rejected, and every control is caught."""
    found = summary(result["rows"])
    return [
        target(f"shipped and rejected, of {found['shipped']}", len(found["rejected"]), "==", 0),
        target(f"controls missed, of {found['controls']}", len(found["missed"]), "==", 0),
    ]


def table(rows: list[Row]) -> str:
    """One line each; the mark in the middle of the bar is the claim."""
    head = "".join(f"<th>{title}</th>" for title in _HEADINGS)
    body = "".join(_line(row) for row in rows)
    return (
        '<p>The bar is what an attack has shown to be lost; the mark is the claim.</p><div class="'
        f'wide"><table><tr>{head}</tr>{body}</table></div>'
    )


def _line(row: Row) -> str:
    kind = "control: " if row["control"] else ""
    word = verdict(row)[1]
    share = min(max(row["lower_bound"] / row["claimed"] / _FULL, 0.0), 1.0)
    bar = f'<div class="track"><i style="width:{100 * share:.0f}%"></i><b></b></div>'
    figures = "".join(_number(row[key]) for key in ("claimed", "delta", "lower_bound"))
    texts = f"<td>{escape(row['name'])}</td><td>{escape(kind + row.get('about', ''))}</td>"
    return f'<tr>{texts}{figures}<td>{bar}</td><td class="{word}">{word}</td></tr>'


def _number(value: Any) -> str:
    return f'<td class="number">{value:.3g}</td>'
