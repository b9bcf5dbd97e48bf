"""Noisy measures become the columns of a release: answers, their error bars, intervals.

All of it is post-processing: nothing here has seen a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpstream.records import Integers
from dpstream.stages.aggregates import Aggregate
from dpstream.stages.measures import Measure


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How noisy columns are read: public facts, and the noisy share of rows that were kept."""

    one_row: bool
    nonnegative: bool
    deviations: float | None = None
    """Half the width of a confidence interval, in standard deviations."""
    kept: tuple[float, float] | None = None
    """The share of rows that bounding kept, and the standard deviation of that; None: not asked."""


def answers(
    aggregates: Sequence[Aggregate],
    noisy: Mapping[Measure, tuple[Integers, float]],
    reading: Reading,
) -> dict[str, Any]:
    """Named columns of a release: each aggregate, `<name>_stddev`, and an interval if asked for."""
    table: dict[str, Any] = {}
    for aggregate in aggregates:
        pairs = []
        for measure in aggregate.measures(reading.one_row):
            steps, stddev = noisy[measure]
            quantum = float(measure.quantum)
            values = steps if measure.kind != "value" else steps * quantum
            pairs.append((values, np.full(len(steps), stddev * quantum)))
        values, spread = aggregate.answer(pairs, reading.nonnegative)
        if aggregate.grows and reading.kept is not None:  # by the query alone: it makes reals
            share, of_share = reading.kept
            values = values / share
            spread = np.hypot(spread, values * of_share) / share
        name = aggregate.name
        table[name], table[f"{name}_stddev"] = values, spread
        if reading.deviations is not None:
            low, high = values - reading.deviations * spread, values + reading.deviations * spread
            table[f"{name}_low"], table[f"{name}_high"] = aggregate.within(
                low, high, reading.nonnegative
            )
    return table


def kept_share(offered: tuple[int, float], kept: tuple[int, float]) -> tuple[float, float]:
    """Share of rows that were kept, and its standard deviation, from two noisy counts.

    Where the counts drown in their noise nothing is known, and nothing is made up for.
    """
    (rows, of_rows), (left, of_left) = offered, kept
    if rows < 10 * of_rows or left < 10 * of_left or left >= rows:
        return 1.0, 0.0
    share = left / rows
    return share, share * math.hypot(of_rows / rows, of_left / left)
