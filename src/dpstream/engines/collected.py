"""Releases that were collected: one table, frames, a chart, and a view in a notebook."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.optional import optional

_ROWS = 20  # that a notebook shows
_OF_RELEASE = ("window_start", "window_end", "trigger_time", "release_index", "kept_share")


def release_facts(table: pa.Table) -> dict[str, Any]:
    """What a release's metadata say of it."""
    facts: dict[str, Any] = json.loads((table.schema.metadata or {}).get(b"dpstream", b"{}"))
    return facts


class Releases(Sequence[pa.Table]):
    """The releases of one query, in the order in which they were published.

    >>> one = pa.table({"page": ["a", "b"], "n": [5.0, 7.0], "n_stddev": [1.0, 1.0]})
    >>> Releases([one, one]).table.num_rows
    4
    """

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        self.tables = list(tables)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.tables[index]
        return Releases(chosen) if isinstance(index, slice) else chosen

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def table(self) -> pa.Table:
        """All of them in one table."""
        if not self.tables:
            return pa.table({})
        return pa.concat_tables([table.replace_schema_metadata(None) for table in self.tables])

    @property
    def last(self) -> pa.Table:
        """The newest release of every window, in one table."""
        newest = {}
        for number, table in enumerate(self.tables):
            newest[release_facts(table).get("window", f"table {number}")] = table
        return Releases([*newest.values()]).table

    def to_pandas(self) -> Any:
        """A pandas DataFrame of `table`."""
        optional("pandas", extra="frames")
        return self.table.to_pandas()

    def to_polars(self) -> Any:
        """A Polars DataFrame of `table`."""
        return optional("polars", extra="frames").from_arrow(self.table)

    def plot(self, column: str | None = None, path: str | None = None, *, most: int = 8) -> Any:
        """A chart of one aggregate, ± two standard deviations; saved if `path` is given.

        Over time a line for each group, of the `most` largest ones; without times a bar for each.
        """
        pyplot = optional("matplotlib.pyplot", extra="plot")
        column = self._aggregate(column)
        figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
        lines = self._lines(column)
        largest = sorted(lines, key=lambda key: -lines[key][1][-1])[:most]
        for key in largest:
            x, y, spread = lines[key]
            label = ", ".join(map(str, key)) or column
            if x[0] is None or len(self.tables) == 1:
                axes.bar([label], [y[-1]], yerr=[2 * spread[-1]], capsize=3, color="C0")
                continue
            middle, width = np.array(y), 2 * np.array(spread)
            axes.fill_between(x, middle - width, middle + width, alpha=0.2, step="post")
            axes.step(x, y, where="post", linewidth=1.2, label=label)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        axes.set_ylabel(f"{column} (± 2 stddev of noise)")
        if path is not None:
            figure.savefig(path, dpi=150)
            pyplot.close(figure)
        return figure

    def _aggregate(self, column: str | None) -> str:
        names: list[str] = self.table.column_names
        known = [name for name in names if f"{name}_stddev" in names]
        if column is None and known:
            return known[0]
        kind = self.table.schema.field(column).type if column in names else pa.null()
        if column is None or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise InvalidParameter(
                f"there is no published number {column!r} to draw; there are {', '.join(known)}"
            )
        return column

    def _lines(self, column: str) -> dict[tuple[Any, ...], tuple[list[Any], list[Any], list[Any]]]:
        """By group: times, values and their standard deviations."""
        table, names = self.table, self.table.column_names
        figures = [n for n in names if f"{n}_stddev" in names]
        others = {*_OF_RELEASE, *figures, *(f"{n}_stddev" for n in figures), "held"}
        plain = [f.name for f in table.schema if not pa.types.is_floating(f.type)]
        keys = [name for name in plain if name not in others]
        lines: dict[tuple[Any, ...], tuple[list[Any], list[Any], list[Any]]] = {}
        for row in table.to_pylist():
            x, y, spread = lines.setdefault(tuple(row[n] for n in keys), ([], [], []))
            if row[column] is None:
                continue
            x.append(row.get("trigger_time"))
            y.append(row[column])
            value = row.get(f"{column}_stddev")
            spread.append(0.0 if value is None or value != value else value)
        return {key: line for key, line in lines.items() if line[0]}

    def __repr__(self) -> str:
        names = self.tables[-1].column_names if self.tables else []
        return f"<Releases: {len(self)}, of {', '.join(names)}>"

    def _repr_html_(self) -> str:
        """The newest release of every window, as notebooks show it."""
        shown = self.last
        names = [n for n in shown.column_names if not n.endswith("_stddev")]
        names = [n for n in names if n not in _OF_RELEASE[2:]]
        head = "".join(f"<th>{html.escape(n)}</th>" for n in names)
        body = []
        for row in shown.slice(0, _ROWS).to_pylist():
            cells = (_cell(row[n], row.get(f"{n}_stddev")) for n in names)
            body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        more = shown.num_rows - _ROWS
        note = f"<p>... and {more:,} more rows</p>" if more > 0 else ""
        count = f"<p>{len(self)} releases; the newest of every window, ± 2 stddev of noise</p>"
        return f"{count}<table><tr>{head}</tr>{''.join(body)}</table>{note}"


def _cell(value: Any, spread: Any) -> str:
    if isinstance(value, float | int) and spread is not None and spread == spread:
        return f"{value:,.6g} ± {2 * spread:,.3g}"
    return "NULL" if value is None else html.escape(str(value))
