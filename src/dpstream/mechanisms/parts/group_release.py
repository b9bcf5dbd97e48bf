"""Publish the values of a batch, group by group.

Guarantee: epsilon for every value that changes by at most `sensitivity`, given the labels, which
are public: a value enters the sum of one group, or is published alone, and nothing else reads it.
What the smoother makes of the noisy numbers is post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from dpstream.mechanisms.base import Spender
from dpstream.privacy.charges import Cells
from dpstream.privacy.tokens import Paid
from dpstream.records import Integers, Reals

Publish = Literal["reduce", "pp"]
Smoother = Literal["mean", "median", "james_stein"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Payment:
    """What a batch is published with: `epsilon` for every value of `cells`.

    `keep`: 0 for values that are not read (another question has had their budget); they get their
    group's number. Every group must keep one. `paid` has paid for all of it already.
    """

    epsilon: Fraction
    cells: Cells
    keep: Integers | None = None
    paid: Paid | None = None


def publish_groups(
    block: Integers,
    labels: Integers,
    spend: Spender,
    *,
    publish: Publish,
    smoother: Smoother,
    sensitivity: Fraction,
    payment: Payment,
) -> tuple[Reals, Reals]:
    """A number for every value (steps x bins), and the scale of the noise in it."""
    steps, bins = block.shape
    groups = labels + (labels.max(initial=0) + 1) * np.arange(bins)
    _, group = np.unique(groups.ravel(), return_inverse=True)
    kept = np.ones(steps * bins, bool) if payment.keep is None else payment.keep.ravel() != 0
    size = np.bincount(group[kept], minlength=int(group.max()) + 1)
    asked = block.ravel()[kept]
    if publish == "reduce":
        sums = np.zeros(len(size), np.int64)
        np.add.at(sums, group[kept], asked)
        asked = sums
    noisy = spend.laplace(
        asked,
        sensitivity=sensitivity,
        epsilon=payment.epsilon,
        purpose="publish",
        cells=None if payment.paid else payment.cells,
        interval=payment.paid,
    ).astype(np.float64)
    scale = float(sensitivity / payment.epsilon)
    if publish == "reduce":
        return (noisy / size)[group].reshape(block.shape), (scale / size)[group].reshape(
            block.shape
        )
    centre = _centres(noisy, group[kept], size, smoother)
    values = centre[group]
    if smoother == "james_stein":
        values[kept] += (noisy - values[kept]) / size[group[kept]]
    return values.reshape(block.shape), (scale / np.sqrt(size))[group].reshape(block.shape)


def _centres(noisy: Reals, group: Integers, size: Integers, smoother: Smoother) -> Reals:
    """The mean or median of each group."""
    if smoother != "median":
        mean: Reals = np.bincount(group, weights=noisy, minlength=len(size)) / size
        return mean
    ordered = noisy[np.lexsort((noisy, group))]
    first = np.concatenate(([0], np.cumsum(size)[:-1]))
    median: Reals = (ordered[first + (size - 1) // 2] + ordered[first + size // 2]) / 2
    return median
