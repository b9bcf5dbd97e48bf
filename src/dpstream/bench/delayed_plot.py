"""Absolute error over epsilon, series by series, and the figures about parameters below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dpstream.bench.delayed_figures import BUCKETS, DELAYS, EVERYTHING, THRESHOLDS, TRUNCATION
from dpstream.bench.delayed_methods import AS_PUBLISHED, MIDPOINT, SOUND
from dpstream.bench.harness import Row

_COLOURS = (
    "#8a8f98", "#0b6e99", "#5ab4d6", "#d1495b", "#8f6bb3", "#c9aee5", "#3a7d44", "#c77d1e",
    "#111111",
)  # fmt: skip
_COLOUR = dict(zip(SOUND, _COLOURS, strict=True))


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Figures 2 and 3 above (a row each), truncation and parameters below."""
    cells = [row for row in rows if row["figure"] == EVERYTHING]
    names = list(dict.fromkeys(row["series"] for row in cells))
    delays = sorted({row["delay"] for row in cells})
    if not cells:
        return
    figure.set_size_inches(4.4 * len(names), 4.0 * (len(delays) + 2))
    parts = figure.subfigures(len(delays) + 2, 1)
    for part, delay in zip(parts, delays, strict=False):
        panels = part.subplots(1, len(names), squeeze=False)[0]
        for panel, name in zip(panels, names, strict=True):
            here = [row for row in cells if (row["series"], row["delay"]) == (name, delay)]
            _over(panel, here, "epsilon")
            panel.set_title(f"{name}, w = {delay}", fontsize=9)
        panels[0].set_ylabel("MAE / range")
    handles, labels = parts[0].axes[0].get_legend_handles_labels()
    parts[0].legend(handles, labels, loc="outside upper center", ncols=6, fontsize=7, frameon=False)
    _truncation(parts[-2], [row for row in rows if row["figure"] == TRUNCATION], names)
    _parameters(parts[-1], rows)


def _over(panel: Any, rows: Sequence[Row], key: str) -> None:
    """One line per mechanism: solid if sound, dashed as published; bars are standard errors."""
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        own = sorted((row for row in rows if row["mechanism"] == name), key=lambda row: row[key])
        width = [row["mae"] / row["share"] if row["share"] else 1 for row in own]
        panel.errorbar(
            [row[key] for row in own],
            [row["share"] for row in own],
            yerr=[(row["mae_se"] or 0) / w if row["runs"] > 1 else 0
                  for row, w in zip(own, width, strict=True)],
            linestyle=":" if name == MIDPOINT else "--" if AS_PUBLISHED in name else "-",
            color=_COLOUR.get(re.split(r",| as ", name)[0], "#444444"),
            linewidth=1.2, capsize=2, label=name,
        )  # fmt: skip
    _tidy(panel, key)


def _truncation(part: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Pairs of bars: without and with a truncated range."""
    panels = part.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        here = [row for row in rows if row["series"].startswith(name)]
        kinds = list(dict.fromkeys(row["mechanism"] for row in here))
        for shift, truncated in ((-0.2, False), (0.2, True)):
            share = {
                row["mechanism"]: row["share"]
                for row in here
                if row["option"].endswith("truncated") == truncated
            }
            places = [place + shift for place, kind in enumerate(kinds) if kind in share]
            heights = [share[kind] for kind in kinds if kind in share]
            label = "truncated" if truncated else "whole range"
            panel.bar(places, heights, 0.4, label=label, color=_COLOURS[1 if truncated else 3])
        panel.set_xticks(range(len(kinds)), kinds, fontsize=6, rotation=40, ha="right")
        panel.set_title(f"truncation on {name} (Figure 4)", fontsize=9)
        _tidy(panel, "")
    panels[0].legend(fontsize=7, frameon=False)


def _parameters(part: Any, rows: Sequence[Row]) -> None:
    """Figures 5 to 10 on unemployment."""
    panels = part.subplots(1, 3, squeeze=False)[0]
    shown = ((DELAYS, "delay"), (BUCKETS, "bucket width"), (THRESHOLDS, "threshold"))
    for panel, (figure, what) in zip(panels, shown, strict=True):
        here = [
            {
                **row,
                "parameter": row["delay"] if figure == DELAYS else int(row["option"].split()[-1]),
            }
            for row in rows
            if row["figure"] == figure and row["series"] == "unemployment"
        ]
        first = min((row["epsilon"] for row in here), default=0)
        _over(panel, [row for row in here if row["epsilon"] == first], "parameter")
        panel.set_xlabel(what)
        panel.set_title(f"unemployment (Figure {figure}), epsilon {first}", fontsize=9)
        panel.legend(fontsize=6, frameon=False)


def _tidy(panel: Any, key: str) -> None:
    panel.set_yscale("log")
    panel.set_xlabel(key)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
