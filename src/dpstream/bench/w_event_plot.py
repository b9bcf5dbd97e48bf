"""Heat maps of delta_MRE, the error over time, range queries, and the curves of other figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpstream.bench import w_event_figures as figures
from dpstream.bench.harness import Row
from dpstream.bench.w_event_targets import SHOWN, cells_of
from dpstream.records import Reals

Curves = dict[str, dict[str, Reals]]
"""Absolute error by step, for each stream and mechanism."""

_DARK = 3.0  # a delta_MRE from here on has the darkest colour
_PANELS = 3
_COLOURS = ("#0b6e99", "#d1495b", "#8f6bb3", "#3a7d44", "#c77d1e", "#8a8f98")
_LINES = [(colour, line) for line in ("-", "--", ":") for colour in _COLOURS]


def draw(figure: Any, rows: Sequence[Row], curves: Curves, more: Sequence[Row] = ()) -> None:
    """One heat map per epsilon above, some streams' errors over time below, then the rest."""
    cells = [row for row in cells_of(rows) if row["window"] == SHOWN[1]]
    epsilons = sorted({row["epsilon"] for row in cells})
    if not epsilons:
        return
    figure.set_size_inches(4.6 * max(len(epsilons), _PANELS), 15)
    above, below, rest = figure.subfigures(3, 1, height_ratios=(1.3, 1, 1))
    panels = above.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for panel, epsilon in zip(panels, epsilons, strict=True):
        _heat(panel, [row for row in cells if row["epsilon"] == epsilon], epsilon)
    above.suptitle(f"delta_MRE: MRE over that of the best mechanism (w = {SHOWN[1]})")
    _over_time(below, curves)
    _others(rest, cells, more)


def _heat(panel: Any, cells: Sequence[Row], epsilon: float) -> None:
    streams = list(dict.fromkeys(row["stream"] for row in cells))
    names = list(dict.fromkeys(row["mechanism"] for row in cells))
    grid = np.full((len(streams), len(names)), np.nan)
    for row in cells:
        grid[streams.index(row["stream"]), names.index(row["mechanism"])] = row["delta_mre"]
    panel.imshow(np.log(grid), cmap="YlGnBu", vmin=0, vmax=math.log(_DARK), aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        text = "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
        light = value > math.sqrt(_DARK) * 1.2
        panel.text(
            j, i, text, ha="center", va="center", fontsize=7, color="white" if light else "black"
        )
    panel.set_xticks(range(len(names)), names, fontsize=7, rotation=50, ha="right")
    panel.set_yticks(range(len(streams)), streams, fontsize=8)
    panel.set_title(f"epsilon = {epsilon}", fontsize=9)


def _over_time(figure: Any, curves: Curves) -> None:
    """Absolute error by step, smoothed over a fifth of the window, for the first few streams."""
    chosen = _spread_out(list(curves))
    panels = figure.subplots(1, max(len(chosen), 1), squeeze=False)[0]
    for panel, stream in zip(panels, chosen, strict=False):
        looks = itertools.cycle(_LINES)
        for (name, errors), (colour, line) in zip(curves[stream].items(), looks, strict=False):
            smooth = min(max(SHOWN[1] // 5, 1), len(errors))
            means = np.convolve(errors, np.ones(smooth) / smooth, mode="valid")
            steps = np.arange(len(means)) + smooth
            panel.plot(steps, means, line, color=colour, linewidth=1, label=name)
        panel.set_yscale("log")
        panel.set_title(stream, fontsize=9)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("absolute error")
    figure.suptitle(f"error over time (epsilon = {SHOWN[0]}, w = {SHOWN[1]})")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=(len(labels) + 1) // 2, frameon=False
        )


def _others(figure: Any, cells: Sequence[Row], more: Sequence[Row]) -> None:
    """Range queries, then curves over w, change and number of groups, as far as they are there."""
    shown = (figures.W_ROADS, figures.W_CUP, figures.CHANGE_ROADS, figures.GROUPS_ROADS)
    axes = ("w", "w", "RMS of the change", "column groups")
    panels = figure.subplots(1, 1 + len(shown), squeeze=False)[0]
    last = max(row["epsilon"] for row in cells)
    ranges = [row for row in cells if row["epsilon"] == last and row["range"] == row["range"]]
    _bars(panels[0], ranges, f"range queries, epsilon = {last}")
    for panel, part, axis in zip(panels[1:], shown, axes, strict=True):
        rows = [row for row in more if row["part"] == part]
        for name, (colour, line) in zip(
            dict.fromkeys(row["mechanism"] for row in rows), _LINES, strict=False
        ):
            points = [(row["at"], row["mae"]) for row in rows if row["mechanism"] == name]
            panel.plot(*zip(*points, strict=True), line, color=colour, marker=".", label=name)
        panel.set_title(f"{part}: MAE", fontsize=9)
        panel.set_xlabel(axis)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if rows:
            panel.set_yscale("log")
            panel.legend(fontsize=6, frameon=False)


def _bars(panel: Any, rows: Sequence[Row], title: str) -> None:
    """Mean relative error of the queries, over the streams of one bin."""
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    means = [np.mean([row["range"] for row in rows if row["mechanism"] == name]) for name in names]
    panel.barh(names, means, color=_COLOURS[0])
    panel.invert_yaxis()
    panel.tick_params(labelsize=7)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("mean relative error")
    panel.spines[["top", "right"]].set_visible(False)


def _spread_out(streams: Sequence[str]) -> list[str]:
    """A few of the streams: the first, the last, and one in the middle."""
    places = sorted({0, len(streams) // 2, len(streams) - 1}) if streams else []
    return [streams[place] for place in places][:_PANELS]
