"""Records per second over the size of the log, ours and the peers'."""

from __future__ import annotations

from typing import Any

from dpstream.bench.harness import Row

# Told apart by colour-blind readers and in print: hue and marker.
_LOOKS = {
    "dpstream": ("#0b6e99", "o"),
    "opendp": ("#d1495b", "s"),
    "pipeline-dp": ("#8f6bb3", "^"),
    "spark": ("#c98a1b", "D"),
    "polars": ("#8a8f98", "x"),
}


def draw(figure: Any, rows: list[Row], aim: float) -> None:
    """Log-log lines, peak memory beside them, and the target as a dashed line."""
    speed, memory = figure.subplots(1, 2)
    for library, (colour, marker) in _LOOKS.items():
        for panel, key in ((speed, "records_per_second"), (memory, "peak_mb")):
            points = [
                (row["records"], row[key]) for row in rows if row["library"] == library and row[key]
            ]
            if points:
                private = "" if library not in ("polars", "spark") else " (no privacy)"
                label = f"{library}{private}"
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    speed.axhline(aim, color="#444444", linestyle="--", linewidth=1, label="target")
    speed.set(title="speed", ylabel="records per second")
    memory.set(title="peak memory", ylabel="MB")
    for panel in (speed, memory):
        panel.set(xscale="log", yscale="log", xlabel="records")
        panel.grid(alpha=0.25, which="major")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
