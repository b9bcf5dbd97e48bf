"""Noise drawn anew when a step is replayed, and noise used for two datasets.

Both claim epsilon-DP for what they publish. Drawn anew: a run that is killed and started again k
times publishes k noisy copies, and who averages them has k times the budget. Used twice: whoever
knows one of the datasets subtracts its release from the other's and has the other exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpstream.audit.dealer import real_spend
from dpstream.mechanisms.w_event.uniform import Uniform
from dpstream.records import Integers, Reals


@dataclass(frozen=True, kw_only=True)
class RedrawnOnReplay:
    """The same step, published by `starts` runs that do not know of one another."""

    mechanism: Uniform
    starts: int

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x copies of the first step."""
        spend, copies = real_spend(secret), []
        for start in range(self.starts):
            spend.begin(start, lambda _: "")
            _, releases = self.mechanism.step(None, np.repeat(data[0], runs), spend)
            copies.append(releases[0].values)
        return np.stack(copies, axis=1)


@dataclass(frozen=True, kw_only=True)
class SameNoise:
    """The data, and a dataset that everybody knows, under one run id and on two books.

    Nothing but the ledger's digest of the input stands in its way: the draws' addresses agree.
    """

    mechanism: Uniform
    known: int = 100

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x (data, known data)."""
        columns = []
        for values in (np.repeat(data[0], runs), np.full(runs, self.known)):
            spend = real_spend(secret)
            spend.begin(0, lambda _: "")
            _, releases = self.mechanism.step(None, values, spend)
            columns.append(releases[0].values)
        return np.stack(columns, axis=1)
