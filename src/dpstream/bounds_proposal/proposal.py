"""What is proposed, and how to write it down: SQL, Python, JSON, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpstream.optional import optional


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One bound of the trade-off: `groups` a unit, one row each.

    `left_out`: share of rows beyond the bound. `noise`: standard deviation in the last table.
    `threshold`: noisy units that show a group there. `error`: of a group of the proposal's size.
    """

    groups: int
    left_out: float
    noise: float
    threshold: int
    error: float


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Bounds, and what speaks for them.

    `epsilon`, `delta`: paid for this proposal; None if the data were declared public.
    """

    privacy_unit_column: str
    keys: tuple[str, ...]
    value: str | None
    epsilon: float | None
    delta: float | None
    group_size: float
    query_epsilon: float
    query_delta: float
    triggers: int
    max_groups_contributed: int
    max_rows_per_group: int
    max_rows_contributed: int
    lo: float | None
    hi: float | None
    pre_threshold: int
    left_out: float
    noise: float
    error: float
    units: float
    stddev: float
    quantiles: Mapping[str, Mapping[str, float]]
    trade_off: Sequence[Choice]

    @property
    def private(self) -> bool:
        """May it be shown to anyone?"""
        return self.epsilon is not None

    def to_json(self) -> dict[str, Any]:
        """All of it, and the snippets."""
        found = asdict(self)
        return found | {"private": self.private, "sql": self.sql(), "python": self.python()}

    def sql(self) -> str:
        """The OPTIONS clause, and the SUM that goes with it."""
        options = {
            "epsilon": _number(self.query_epsilon),
            "delta": _number(self.query_delta),
            "privacy_unit_column": self.privacy_unit_column,
            "max_groups_contributed": str(self.max_groups_contributed),
            "max_rows_per_group": str(self.max_rows_per_group),
            "pre_threshold": str(self.pre_threshold),
        }
        inside = ", ".join(f"{name} = {text}" for name, text in options.items())
        lines = [f"OPTIONS ({inside})"]
        if self.value is not None:
            bounds = f"contribution_bounds_per_row => ({_number(self.lo)}, {_number(self.hi)})"
            lines.append(f"SUM({self.value}, {bounds})")
        return "\n".join(lines)

    def python(self) -> str:
        """The arguments of a Query."""
        lines = [
            f"max_groups_contributed={self.max_groups_contributed}",
            f"max_rows_per_group={self.max_rows_per_group}",
            f"pre_threshold={self.pre_threshold}",
        ]
        if self.value is not None:
            clamps = f"contribution_bounds_per_row=({_number(self.lo)}, {_number(self.hi)})"
            lines.append(f"aggregates=[dps.Sum({self.value!r}, column={self.value!r}, {clamps})]")
        return ", ".join(lines)

    def plot(self, path: str | Path) -> None:
        """Bias, noise and error over the bound."""
        drawing = optional("matplotlib.figure", extra="plot", who="a plot")
        figure = drawing.Figure(figsize=(7, 4), dpi=144, layout="constrained")
        panel = figure.subplots()
        groups = [choice.groups for choice in self.trade_off]
        noise = [choice.noise / self.group_size for choice in self.trade_off]
        for label, line, values in (
            ("rows left out (bias)", "--", [choice.left_out for choice in self.trade_off]),
            (f"noise, group of {self.group_size:,.0f}", ":", noise),
            ("both", "-", [choice.error for choice in self.trade_off]),
        ):
            panel.plot(groups, values, line, marker="o", markersize=3, label=label)
        panel.axvline(self.max_groups_contributed, color="#8a8f98", linewidth=1)
        panel.set(xscale="log", xlabel="groups kept of a unit", ylabel="share of a group's count")
        panel.set_title("bias against noise")
        panel.legend(frameon=False)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def _number(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.12g}"
