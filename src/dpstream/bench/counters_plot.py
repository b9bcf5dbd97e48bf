"""Error over time, one line per counter."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpstream.records import Reals

# Told apart by colour-blind readers and in print: hue and dash.
_LOOKS = {
    "naive_counter": ("#8a8f98", ":"),
    "tree": ("#d1495b", "-"),
    "honaker": ("#e08e45", "-"),
    "smooth_binary": ("#8f6bb3", "-"),
    "toeplitz": ("#2e8b57", "--"),
    "blt": ("#0b6e99", "-"),
    "unbounded_counter": ("#222222", "-."),
}


def draw(figure: Any, curves: dict[str, Reals]) -> None:
    """Standard deviation of the running sum by step, at rho = 1."""
    panel = figure.subplots()
    for name, (colour, dash) in _LOOKS.items():
        line = curves[name]
        panel.plot(np.arange(1, len(line) + 1), line, dash, color=colour, linewidth=1.1, label=name)
    panel.set(xlabel="step", ylabel="standard deviation", xscale="log", ylim=(0, 9))
    panel.set_title("Noise of the running sum, rho = 1, T = 1024")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
