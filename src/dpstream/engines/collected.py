"""Releases that were collected: one table, frames, a chart, and a view in a notebook."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.errors import InvalidParameter
from dpstream.html_table import SHOWN, html_table
from dpstream.optional import optional

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

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """`table` for whatever reads Arrow's PyCapsule interface: Polars, DuckDB, pyarrow."""
        return self.table.__arrow_c_stream__(requested_schema)

    def to_pandas(self) -> Any:
        """A pandas DataFrame of `table`."""
        optional("pandas", extra="frames")
        return self.table.to_pandas()

    def to_polars(self) -> Any:
        """A Polars DataFrame of `table`."""
        return optional("polars", extra="frames").from_arrow(self.table)

    def plot(
        self, path: str | Path | None = None, *, column: str | None = None, most: int = 8
    ) -> Any:
        """A chart of one aggregate, ± two standard deviations; saved if `path` is given.

        Over time a line for each group, of the `most` largest ones; without times a bar for each.
        A window that is published once stands at its start, running releases at their triggers.
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
        if path is not None or "inline" in pyplot.get_backend():  # a notebook shows it itself
            pyplot.close(figure)
        return figure

    def _aggregate(self, column: str | None) -> str:
        names: list[str] = self.table.column_names
        known = [name for name in names if f"{name}_stddev" in names]
        known = [name for name in known if not pa.types.is_list(self.table.schema.field(name).type)]
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
        windows = {release_facts(each).get("window") for each in self.tables}
        once = len(windows) == len(self.tables) and "window_start" in names
        time = "window_start" if once else "trigger_time"
        for row in table.to_pylist():
            x, y, spread = lines.setdefault(tuple(row[n] for n in keys), ([], [], []))
            if row[column] is None:
                continue
            x.append(row.get(time))
            y.append(row[column])
            value = row.get(f"{column}_stddev")
            spread.append(0.0 if value is None or value != value else value)
        return {key: line for key, line in lines.items() if line[0]}

    def __repr__(self) -> str:
        names = self.tables[-1].column_names if self.tables else []
        return f"<Releases: {len(self)}, of {', '.join(names)}>"

    def _repr_html_(self) -> str:
        """The newest release of every window, as notebooks show it."""
        words = f"{len(self)} releases; the newest of every window, ± 2 stddev of noise"
        last = self.last
        names = [n for n in last.column_names if n not in _OF_RELEASE[2:]]
        shown = last.select(names).slice(0, SHOWN).to_pylist()
        return html_table(shown, words, total=last.num_rows)
