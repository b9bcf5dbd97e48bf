"""Table 1 as bars, the bias/noise trade-off over C, and latency over micro-batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dpstream.bench.harness import Row
from dpstream.bench.sqlp_runs import METRICS

_TITLES: Final = {"keys": "keys shown", "l_inf": "l_inf", "l_1": "l_1", "l_2": "l_2"}
_COLOURS: Final = ("#8a8f98", "#d1495b", "#c77d1e", "#8f6bb3", "#3a7d44", "#0b6e99", "#444444")


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Three rows of panels: the table, Figure 10, Figure 9."""
    figure.set_size_inches(13, 11)
    table, trade_off, latency = figure.subfigures(3, 1, height_ratios=(1.2, 1, 0.9))
    _table(table, [row for row in rows if row["part"] == "table 1"])
    _trade_off(trade_off, [row for row in rows if row["part"] == "figure 10"])
    _latency(latency, [row for row in rows if row["part"] == "figure 9"])


def _table(figure: Any, rows: Sequence[Row]) -> None:
    forms = list(dict.fromkeys(row["form"] for row in rows))
    counts = list(dict.fromkeys(row["triggers"] for row in rows))
    panels = figure.subplots(1, len(METRICS))
    for panel, metric in zip(panels, METRICS, strict=True):
        for number, form in enumerate(forms):
            cells = {row["triggers"]: row[metric] for row in rows if row["form"] == form}
            places = [at + 0.8 * number / len(forms) for at in range(len(counts))]
            panel.bar(
                places,
                [cells.get(count, 0) for count in counts],
                width=0.8 / len(forms),
                color=_COLOURS[number % len(_COLOURS)],
                label=form,
            )
        panel.set_xticks([at + 0.4 for at in range(len(counts))], [f"{c} triggers" for c in counts])
        panel.set_title(_TITLES[metric])
        panel.set_yscale("symlog" if metric == "keys" else "log")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _trade_off(figure: Any, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, len(METRICS))
    forms = list(dict.fromkeys(row["form"] for row in rows))
    for panel, metric in zip(panels, METRICS, strict=True):
        for form, colour in zip(forms, ("#d1495b", "#0b6e99"), strict=False):
            points = [(row["bound"], row[metric]) for row in rows if row["form"] == form]
            panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=form)
        panel.set(xlabel="C", title=_TITLES[metric])
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    if rows:
        panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle("bias and noise over the bound C")


def _latency(figure: Any, rows: Sequence[Row]) -> None:
    panel = figure.subplots()
    points = [(row["rows_per_trigger"], row["latency_ms"]) for row in rows]
    if points:
        panel.plot(*zip(*sorted(points), strict=True), marker="o", color="#0b6e99")
    panel.set(xscale="log", yscale="log", xlabel="rows in a micro-batch", ylabel="ms a trigger")
    panel.set_title("latency over micro-batch size")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
