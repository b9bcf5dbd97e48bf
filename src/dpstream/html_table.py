"""Rows as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 20
"""Rows that a notebook shows of a table."""


def html_table(rows: Sequence[Mapping[str, Any]], caption: str, *, total: int = 0) -> str:
    """HTML of rows; a `<column>_stddev` stands as ± 2 of it beside its column.

    `total`: how many rows there are in all.
    """
    known = rows[0] if rows else {}
    names = [name for name in known if name.removesuffix("_stddev") not in known.keys() - {name}]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = []
    for row in rows:
        cells = (_cell(row[name], row.get(f"{name}_stddev")) for name in names)
        body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    more = f"<p>... and {total - len(rows):,} more rows</p>" if total > len(rows) else ""
    return f"<p>{html.escape(caption)}</p><table><tr>{head}</tr>{''.join(body)}</table>{more}"


def _cell(value: Any, spread: Any) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        more = "" if spread is None or spread != spread else f" ± {2 * spread:,.3g}"
        return f"{value:,.6g}{more}"
    return "NULL" if value is None else html.escape(str(value))
