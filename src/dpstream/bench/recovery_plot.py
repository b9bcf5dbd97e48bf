"""Seconds that a restart takes, one line of dots per kind of kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def draw(figure: Any, seconds: Mapping[str, Sequence[float]]) -> None:
    """A strip plot; overlapping dots darken."""
    panel = figure.subplots()
    kinds = list(seconds)[::-1]
    for line, kind in enumerate(kinds):
        panel.plot(seconds[kind], [line] * len(seconds[kind]), "o", color="#0b6e99", alpha=0.35)
    panel.set(
        yticks=range(len(kinds)), yticklabels=kinds, xlabel="seconds from restart to a new release"
    )
    panel.set_xlim(left=0)
    panel.grid(alpha=0.25, axis="x")
    panel.spines[["top", "right"]].set_visible(False)
