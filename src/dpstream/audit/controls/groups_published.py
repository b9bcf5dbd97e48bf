"""Groups of similar values as published: the tests of ContinGroup have half the noise they need.

What is wrong: dev(G) = sum |c_i - mean| is taken to move by Delta when one value does. It moves by
2 Delta (1 - 1/n): the value's own term by Delta (1 - 1/n), the n - 1 others by Delta / n each.
With rho ~ Lap(2 Delta / eps_g) and nu ~ Lap(4 Delta / eps_g) the tests of groups of at most n
values therefore cost up to 2 (1 - 1/n) eps_g, not eps_g.

What is lost in truth lies between. A deviation never falls when a value joins: the mean moves by
|x - mean| / (n + 1), which lowers the others' terms by no more than the new term adds. So the tests
that push rho up are mostly the last ones, the failing test moves along with them, and the two
costs hardly add up. They do a little where early tests move up and the last one does not: 74 zeros,
one of which is 1 in the neighbour, then 25 ones, then a failure, at eps_g = 0.01, lose 1.07 eps_g
exactly (`grouping_loss`). Nothing larger was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from dpstream.audit.controls.published_series import Batch, Noise, PublishedBatch, group_means
from dpstream.audit.controls.spas_published import svt_loss
from dpstream.compiled import njit
from dpstream.mechanisms.base import Spender
from dpstream.privacy.amounts import on_grid
from dpstream.records import Integers, Reals

THETA = 3.0
"""The threshold of the paper's figures, in the unit of the data."""


@dataclass(frozen=True, kw_only=True)
class ContinGroupPublished(PublishedBatch, identity="control/contin_group", keys="theta noise"):
    """Algorithm 6: successive values of a batch, grouped; the mean of each group with noise.

    Claim: event-level epsilon-DP, eps_g = epsilon / 5 for the tests.
    True: at most eps_p + 2 (1 - 1/delay) eps_g, just below 1.2 epsilon, which is what it is
        charged; at least eps_p + 1.07 eps_g (see above), with batches of 100.
    """

    theta: float = THETA
    noise: Noise = "reduce"
    structure_share: ClassVar[Fraction] = Fraction(1, 5)

    def values(self, batch: Batch, spend: Spender) -> Reals:
        """Test, group, publish."""
        raw, size = batch.raw, batch.raw.size
        true_cost = on_grid(2 * self.for_structure * Fraction(self.delay - 1, self.delay))
        paid = spend.pay(
            raw, sensitivity=self.change, epsilon=true_cost, purpose="group", cells=batch.cells
        )
        rho, nu = (
            spend.laplace(
                np.zeros(size, np.int64),
                sensitivity=batch.change,
                epsilon=on_grid(self.for_structure / part),
                purpose=purpose,
                interval=paid,
            ).reshape(raw.shape)
            for part, purpose in ((2, "threshold"), (4, "test"))
        )
        labels = _successive(raw, rho, nu, self.theta / float(self.range[2]))
        return group_means(batch, labels, spend, self.noise)


@dataclass(frozen=True, kw_only=True)
class DiscontinGroupPublished(
    PublishedBatch, identity="control/discontin_group", keys="theta noise"
):
    """Algorithm 2: a value may join any group of its batch, the first whose test it passes.

    Claim: event-level epsilon-DP, with rho ~ Lap(2 (2w - 1) Delta / eps_g) for every group and
        nu ~ Lap(4 (2w - 1) Delta / eps_g) for every test.
    True: sound, with about four times the noise that is needed. The i-th value has at most i - 1
        tests of its own and is read by one test of every later value: w - 1 tests in all, each
        moved by 2 Delta at most. nu alone then costs (w - 1) / (2 (2w - 1)) eps_g, less than
        eps_g / 4, and rho protects nothing. It is charged what it claims.
    """

    theta: float = THETA
    noise: Noise = "reduce"
    structure_share: ClassVar[Fraction] = Fraction(1, 5)

    def values(self, batch: Batch, spend: Spender) -> Reals:
        """Test, group, publish."""
        raw, (steps, bins) = batch.raw, batch.raw.shape
        paid = spend.pay(
            raw,
            sensitivity=self.change,
            epsilon=self.for_structure,
            purpose="group",
            cells=batch.cells,
        )
        tests = (steps * (steps - 1) // 2, bins)
        rho, nu = (
            spend.laplace(
                np.zeros(shape, np.int64),
                sensitivity=batch.change,
                epsilon=on_grid(self.for_structure / (part * (2 * self.delay - 1))),
                purpose=purpose,
                interval=paid,
            )
            for shape, part, purpose in (((steps, bins), 2, "threshold"), (tests, 4, "test"))
        )
        labels = _anywhere(raw, rho, nu, self.theta / float(self.range[2]))
        return group_means(batch, labels, spend, self.noise)


def grouping_loss(
    stream: Sequence[float], neighbour: Sequence[float], *, epsilon: float, theta: float
) -> float:
    """Log ratio of the chances that all values but the last join one group, and the last fails.

    The noise is that of `ContinGroupPublished` for eps_g = `epsilon`, in a range of length 1.
    """
    grid = max(1, round(64 * epsilon))  # svt_loss sums rho over whole numbers
    outcomes = [False] * (len(stream) - 1) + [True]
    return svt_loss(
        [grid * _deviation(stream[: n + 1]) for n in range(len(stream))],
        [grid * _deviation(neighbour[: n + 1]) for n in range(len(neighbour))],
        outcomes,
        threshold=grid * theta,
        rho_scale=grid * 2 / epsilon,
        nu_scale=grid * 4 / epsilon,
    )


def _deviation(values: Sequence[float]) -> float:
    return float(np.abs(np.asarray(values) - np.mean(values)).sum())


@njit(cache=True, nogil=True)
def _times_n(
    block: Integers, labels: Integers, label: int, row: int, column: int
) -> tuple[int, int]:
    """Size n and n dev of a group with the value at `row`, in whole numbers."""
    n, total = 1, block[row, column]
    for i in range(row):
        if labels[i, column] == label:
            n += 1
            total += block[i, column]
    dev = abs(n * block[row, column] - total)
    for i in range(row):
        if labels[i, column] == label:
            dev += abs(n * block[i, column] - total)
    return n, dev


@njit(cache=True, nogil=True)
def _successive(block: Integers, rho: Integers, nu: Integers, theta: float) -> Integers:
    """Number of each value's group; a value that fails is a group of its own."""
    labels = np.empty_like(block)
    for column in range(block.shape[1]):
        label, opened = 0, 0
        for row in range(len(block)):
            n, dev = _times_n(block, labels[:row], label, row, column)
            if dev + n * (nu[row, column] - rho[opened, column]) < n * theta:
                labels[row, column] = label
            else:
                labels[row, column] = label + 1
                label, opened = label + 2, row + 1
    return labels


@njit(cache=True, nogil=True)
def _anywhere(block: Integers, rho: Integers, nu: Integers, theta: float) -> Integers:
    """Number of each value's group: the first whose test it passes, or a new one."""
    labels = np.empty_like(block)
    for column in range(block.shape[1]):
        groups = test = 0
        for row in range(len(block)):
            joined = groups
            for label in range(groups):
                n, dev = _times_n(block, labels, label, row, column)
                noisy = dev + n * (nu[test, column] - rho[label, column])
                test += 1
                if noisy < n * theta:
                    joined = label
                    break
            labels[row, column] = joined
            groups = max(groups, joined + 1)
    return labels
