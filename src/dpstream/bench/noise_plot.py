"""Samples per second over the scale, one panel per law."""

from __future__ import annotations

from typing import Any

from dpstream.bench.harness import Row

# Told apart by colour-blind readers and in print: hue and marker.
_LOOKS = {
    "dpstream": ("#0b6e99", "o"),
    "opendp": ("#d1495b", "s"),
    "diffprivlib": ("#8f6bb3", "^"),
    "numpy (unsafe)": ("#8a8f98", "x"),
}


def draw(figure: Any, rows: list[Row], aim: float) -> None:
    """Log-log lines, and the target as a dashed line."""
    laws = list(dict.fromkeys(row["law"] for row in rows))
    panels = figure.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    for panel, law in zip(panels, laws, strict=True):
        for library, (colour, marker) in _LOOKS.items():
            points = [
                (row["scale"], row["samples_per_second"])
                for row in rows
                if row["law"] == law and row["library"] == library and row["samples_per_second"]
            ]
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=library)
        panel.axhline(aim, color="#444444", linestyle="--", linewidth=1, label="target")
        panel.set(xscale="log", yscale="log", title=law.replace("_", " "), xlabel="scale")
        panel.grid(alpha=0.25, which="major")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("samples per second, one core")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
