"""OVER several windows: LAG, running totals and moving figures of what was published before.

What later windows look at is kept by window: of each key the last row that was published. "Before"
is by windows: a key that a window did not show is NULL there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.query.query import Query
from dpstream.query.series_query import SeriesQuery
from dpstream.records import Reals
from dpstream.rows.parse import row_codes, whole_column
from dpstream.sql_compiler.model_estimates import smooth
from dpstream.sql_compiler.sql_values import as_float
from dpstream.sql_compiler.statement import WINDOW_COLUMNS, Draft, Over, canonical, present_args

STDDEV = "_stddev"
FARTHEST = 1000
"""Windows back: what is kept of them is in memory and in every snapshot."""
_FUNCTIONS = ("LAG", "SUM", "AVG", "MIN", "MAX", "SMOOTH")
_SMOOTHED = 29
"""Windows back that SMOOTH looks at, if it is given no frame."""
_OWN = "own row"  # a column of what is kept: was the key shown in this window, or only before?


@dataclass(frozen=True, kw_only=True)
class WindowFunction:
    """A function of a column in the windows from `first` back (None: the first one) to `last`.

    LAG(n, 2) is from 2 to 2 back; a frame ends with the window itself, 0 back.
    """

    name: str
    function: str
    column: str
    first: int | None
    last: int = 0
    has_bar: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """What its columns end with."""
        return ("", STDDEV) if self.has_bar else ("",)


def numbers_of(column: Any) -> Reals:
    """Numbers, NaN where there is none."""
    return np.asarray(as_float(whole_column(column)).fill_null(np.nan), np.float64)


@dataclass(frozen=True, kw_only=True)
class LookBack:
    """Columns that look at earlier windows; `keys` name a row within its window.

    "Before" is by windows: a key that a window did not show is NULL there.
    """

    keys: tuple[str, ...]
    functions: tuple[WindowFunction, ...]

    @cached_property
    def _kept(self) -> list[str]:
        """The columns that later windows need, besides keys and running figures."""
        names = (f"{each.column}{end}" for each in self.functions for end in each.ends)
        return [*dict.fromkeys(names)]

    @cached_property
    def _running(self) -> tuple[WindowFunction, ...]:
        return tuple(each for each in self.functions if each.first is None)

    def __call__(self, table: pa.Table, window: int, earlier: dict[int, pa.Table]) -> pa.Table:
        """The table with these columns; notes in `earlier` what later windows will look at."""
        keys = [whole_column(table[name]) for name in self.keys]
        reach = [each.first for each in self.functions if each.first is not None]
        newest = max((known for known in earlier if known < window), default=window)
        wanted = {window - distance for distance in range(1, max(reach, default=0) + 1)}
        wanted |= {newest} if self._running else set()
        rows = {
            number: past.take(_places(keys, past, self.keys, len(table)))
            for number, past in earlier.items()
            if number in wanted and number != window
        }
        back = {window - number: past for number, past in rows.items()} | {0: table}
        before = rows.get(newest)
        past = earlier[newest] if newest < window else None
        for each in self.functions:
            for name, column in self._columns(each, table, back, before).items():
                table = table.append_column(name, column)
        earlier[window] = self._note(table, earlier.get(window), past)
        return table

    def _columns(
        self,
        each: WindowFunction,
        table: pa.Table,
        back: dict[int, pa.Table],
        before: pa.Table | None,
    ) -> dict[str, pa.Array]:
        if each.function == "LAG":
            assert each.first is not None
            none = table.slice(0, 0).take(pa.nulls(len(table), pa.int64()))
            past = back.get(each.first, none)
            return {
                f"{each.name}{end}": whole_column(past[f"{each.column}{end}"]) for end in each.ends
            }
        if each.first is None:
            parts = [numbers_of(table[each.column])]
            spreads = [numbers_of(table[each.column + STDDEV])] if each.has_bar else []
            if before is not None:
                parts.append(numbers_of(before[each.name]))
                spreads += [numbers_of(before[each.name + STDDEV])] if each.has_bar else []
        else:
            frames = [back[n] for n in range(each.last, each.first + 1) if n in back]
            parts = [numbers_of(frame[each.column]) for frame in frames]
            spreads = [numbers_of(f[each.column + STDDEV]) for f in frames] if each.has_bar else []
        if each.function == "SMOOTH":
            level, stddev = smooth(np.stack(parts[::-1]), np.stack(spreads[::-1]))
            return {each.name: known_numbers(level), each.name + STDDEV: known_numbers(stddev)}
        values = np.stack(parts)
        none = np.isnan(values)
        counts = (~none).sum(axis=0)
        with np.errstate(all="ignore"):
            if each.function in ("MIN", "MAX"):
                reduce = np.fmin if each.function == "MIN" else np.fmax
                made = reduce.reduce(values, axis=0)
            else:
                made = np.where(none, 0, values).sum(axis=0) / (counts > 0)
                made = made / counts if each.function == "AVG" else made
            columns = {each.name: known_numbers(made)}
            if spreads:
                total = np.where(none, 0, np.stack(spreads) ** 2).sum(axis=0)
                total = np.sqrt(total) / (counts if each.function == "AVG" else 1)
                columns[each.name + STDDEV] = known_numbers(np.where(counts > 0, total, np.nan))
        return columns

    def _note(self, table: pa.Table, same: pa.Table | None, before: pa.Table | None) -> pa.Table:
        """Of each key the last row of this window; running figures go on without one."""
        columns = {name: whole_column(table[name]) for name in (*self.keys, *self._kept)}
        running = [f"{each.name}{end}" for each in self._running for end in each.ends]
        columns |= {name: whole_column(table[name]) for name in running}
        columns[_OWN] = pa.array(np.ones(len(table), bool))
        made = pa.table(columns)
        parts = [made]
        if same is not None:
            parts.append(same.filter(same[_OWN]))
        if before is not None and self._running:
            nulls = {
                name: pa.nulls(len(before), made.schema.field(name).type) for name in self._kept
            }
            carried = {name: before[name] for name in (*self.keys, *running)}
            carried |= nulls | {_OWN: pa.array(np.zeros(len(before), bool))}
            parts.append(pa.table(carried).select(made.column_names))
        if len(parts) == 1:
            return made
        rows = pa.concat_tables(parts).combine_chunks()
        codes = row_codes([whole_column(rows[name]) for name in self.keys], len(rows))
        return rows.take(pa.array(np.sort(np.unique(codes, return_index=True)[1])))


def known_numbers(values: Reals) -> pa.Array:
    """A column; NULL where there is no finite number."""
    return pa.array(values, pa.float64(), mask=~np.isfinite(values))


def _places(keys: Sequence[pa.Array], past: pa.Table, names: Sequence[str], size: int) -> pa.Array:
    """For each of `size` rows the row of the past that has its keys; NULL: none."""
    both = [
        pa.concat_arrays([key, whole_column(past[name]).cast(key.type)])
        for key, name in zip(keys, names, strict=True)
    ]
    codes = row_codes(both, size + len(past))
    known, first = np.unique(codes[size:], return_index=True)
    at = np.searchsorted(known, codes[:size]).clip(max=max(len(known) - 1, 0))
    found = (known[at] == codes[:size]) if len(known) else np.zeros(size, bool)
    return pa.array(first[at] if len(known) else np.zeros(size, np.int64), mask=~found)


def looks_at_windows(node: exp.Expr) -> bool:
    """Does OVER compare windows? Then it orders by their times."""
    terms = node.args.get("order") or []
    return any(each.name in WINDOW_COLUMNS for term in terms for each in term.find_all(exp.Column))


def read_window_function(
    node: Over,
    *,
    draft: Draft,
    query: Query | SeriesQuery,
    keys: tuple[str, ...] | None,
    columns: Collection[str],
    barred: Collection[str],
) -> WindowFunction:
    """LAG(n) OVER (PARTITION BY page ORDER BY window_start), and its like.

    `keys`: what names a row within its window, if that is known; `barred`: the columns whose error
    bars may be used.
    """
    name = node.this
    if name == "LEAD":
        raise draft.refusal(
            node,
            "LEAD would wait for a window that is still to come",
            "use LAG, and read the row of the later window",
        )
    if name not in _FUNCTIONS or node.args.get("other"):
        raise draft.refusal(
            node,
            f"{name} is not known over several windows",
            f"use one of {', '.join(_FUNCTIONS)}",
        )
    if isinstance(query, SeriesQuery):
        raise draft.refusal(
            node,
            "the windows of a time-series mechanism are not looked back at",
            "compare them in what is kept of them: dps.run(...).collect().to_pandas()",
        )
    _require_order(draft, query, node)
    _require_parts(draft, keys, node)
    argument = node.expressions[0].unnest() if node.expressions else None
    if not isinstance(argument, exp.Column) or argument.name not in columns:
        raise draft.refusal(
            node, f"{name} takes a published column", "compute it in a subquery before"
        )
    if name == "SMOOTH" and argument.name not in barred:
        raise draft.refusal(
            node,
            f"SMOOTH weighs windows by their error bars, and {argument.name} has none",
            "smooth a column that is published with its error bar",
        )
    first, last = _frame(draft, query, node)
    return WindowFunction(
        name=canonical(node),
        function=name,
        column=argument.name,
        first=first,
        last=last,
        has_bar=name in ("LAG", "SUM", "AVG", "SMOOTH") and argument.name in barred,
    )


def _require_order(draft: Draft, query: Query, node: exp.Expr) -> None:
    """One time of windows, from the past on."""
    order = node.args["order"]
    column = order[0].this.unnest()
    if len(order) > 1 or not isinstance(column, exp.Column) or order[0].args.get("desc"):
        raise draft.refusal(
            node,
            "windows are looked at in one order, the earlier ones before",
            "write ORDER BY window_start alone; DESC would need windows still to come",
        )
    kind = query.schedule.kind if query.window is not None else "tumble"
    if kind == "cumulate" and column.name == "window_start":
        raise draft.refusal(node, "windows of CUMULATE begin together", "write ORDER BY window_end")


def _require_parts(draft: Draft, keys: tuple[str, ...] | None, node: exp.Expr) -> None:
    """PARTITION BY names the rows of a window: all keys, and nothing else."""
    parts = [each.unnest() for each in node.args.get("parts") or []]
    named = {each.name for each in parts if isinstance(each, exp.Column)}
    if keys is None or named != set(keys) or len(named) < len(parts):
        wanted = ", ".join(keys or draft.keys)
        raise draft.refusal(
            node,
            "PARTITION BY must name one row of each window: it lists "
            f"{', '.join(sorted(named)) or 'nothing'}, and the keys are {wanted or 'none'}",
            f"write PARTITION BY {wanted}, and select these columns"
            if wanted
            else "leave PARTITION BY out",
        )


def _frame(draft: Draft, query: Query, node: exp.Expr) -> tuple[int | None, int]:
    """From how many windows back to how many; None: from the first one."""
    spec, arguments = node.args.get("frame"), node.expressions
    if node.this == "LAG":
        places = _number(draft, arguments[1]) if len(arguments) == 2 else 1
        if spec or len(arguments) > 2 or not places:
            raise draft.refusal(node, "LAG takes a column and a number", "write LAG(n, 1)")
        return places, places
    if len(arguments) != 1:
        raise draft.refusal(node, f"{node.this} takes one column", f"write {node.this}(n)")
    start = None if spec is None else spec.args.get("start")
    end = "CURRENT ROW" if spec is None else spec.args.get("end") or "CURRENT ROW"
    rows = spec is None or (
        spec.args.get("kind") == "ROWS"
        and spec.args.get("start_side") == "PRECEDING"
        and end == "CURRENT ROW"
        and not present_args(spec) - {"kind", "start", "start_side", "end"}
    )
    if not rows:
        raise draft.refusal(
            node,
            "this frame is not known: windows still to come are not there",
            "write ROWS BETWEEN 6 PRECEDING AND CURRENT ROW",
        )
    if start is None and node.this == "SMOOTH":
        return _SMOOTHED, 0
    if start is not None and start != "UNBOUNDED":
        return _number(draft, start), 0
    endless = query.end is None and query.public_groups is None
    if endless or node.this in ("AVG", "SMOOTH"):
        raise draft.refusal(
            node,
            "it would keep a figure for every key that was ever shown"
            if endless
            else f"{node.this} of all windows is not kept",
            "write ROWS BETWEEN 29 PRECEDING AND CURRENT ROW"
            + (", or give public_groups or an end" if endless else ""),
        )
    return None, 0


def _number(draft: Draft, node: Any) -> int:
    value = node.name if isinstance(node, exp.Literal) and not node.is_string else ""
    if not value.isdigit() or int(value) > FARTHEST:
        raise draft.refusal(
            node if isinstance(node, exp.Expr) else None,
            f"windows are counted by a whole number up to {FARTHEST}",
            "write a number",
        )
    return int(value)
