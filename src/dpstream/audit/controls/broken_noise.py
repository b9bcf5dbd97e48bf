"""Noise that is shared, drawn again, used twice or too small; and the sparse vector technique."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpstream.audit.mechanism_samplers import PooledSpend, unlimited_spend
from dpstream.mechanisms.base import HistogramMechanism, Spender
from dpstream.mechanisms.counters.blt import BltCounter
from dpstream.mechanisms.counters.factorised_counter import BufferedCoder
from dpstream.mechanisms.pan_private import PanPrivateRunner
from dpstream.mechanisms.parts.publish_or_hold import BudgetWindow
from dpstream.mechanisms.w_event.budget_distribution import (
    BudgetDistribution,
    BudgetDistributionState,
)
from dpstream.mechanisms.w_event.uniform import Uniform
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.spend import Spend
from dpstream.privacy.state import Secret
from dpstream.privacy.state.secret import derive
from dpstream.records import Integers, Reals, Release

ABOVE, BELOW, STOPPED = 1.0, 0.0, np.nan


@dataclass(frozen=True, kw_only=True)
class SharedNoise(HistogramMechanism, identity="control/shared_noise"):
    """Uniform's budget and scale, but one draw for all bins, as in public code of this field.

    What is wrong: the difference of two bins is released exactly, so no epsilon holds. The ledger
    cannot see it, for the charge is that of a sound step.
    """

    def start(self) -> None:
        """No memory is needed."""

    def step(self, state: None, x: Integers, spend: Spender) -> tuple[None, list[Release]]:
        """Add one number to every count."""
        noise = spend.laplace(
            np.zeros(1, np.int64),
            sensitivity=histogram_change(),
            epsilon=self.budget / self.window,
            purpose="publish",
        )
        values = (x + noise[0]).astype(np.float64)
        return None, [Release(step=spend.step, values=values, paid=True)]


@dataclass(frozen=True, kw_only=True)
class RedrawnNoise:
    """The same step, published by `starts` runs that do not know of one another.

    What is wrong: a run that is killed and started again k times publishes k noisy copies, and who
    averages them has k times the budget.
    """

    mechanism: Uniform
    starts: int

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x copies of the first step."""
        spend, copies = unlimited_spend(secret), []
        for start in range(self.starts):
            spend.begin(start, lambda _: "")
            _, releases = self.mechanism.step(None, np.repeat(data[0], runs), spend)
            copies.append(releases[0].values)
        return np.stack(copies, axis=1)


class _Ratchet(PanPrivateRunner):
    """Each key follows from the one before, which is in memory until then."""

    key = b""

    def _new_key(self) -> bytes:
        self.key = derive(self.key, b"next") if self.key else Secret.of(self.first).key("ratchet")
        return self.key

    def __init__(self, first: bytes, **asked: Any) -> None:
        self.first = first
        super().__init__(**asked)


@dataclass(frozen=True, kw_only=True)
class RatchetedNoise:
    """One step, counted under noise, whose keys are k' = PRF(k): past ones are forgotten.

    What is wrong: who sees k in the middle of the step knows the noise that is drawn at its end,
    takes it off the release, and has the events that came after the look, exactly.
    """

    mechanism: Uniform

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x events after the look, as the intruder computes them; row 0 came before it."""
        return np.array([self._look(data, derive(secret, b"%d" % run)) for run in range(runs)])

    def _look(self, data: Integers, first: bytes) -> Reals:
        asked = {"mechanism": self.mechanism, "bins": data.shape[1], "intrusion": 1}
        runner = _Ratchet(first, **asked)
        runner.count(np.repeat(np.arange(data.shape[1]), data[0]))
        seen, key = runner._counts.copy(), runner.key
        runner.count(np.repeat(np.arange(data.shape[1]), data[1]))
        release = runner.end_step()
        return release.values - self._noise(runner, derive(key, b"next"), len(seen)) - seen

    def _noise(self, runner: _Ratchet, key: bytes, bins: int) -> Reals:
        """What the mechanism draws under a key, from a book of the intruder's own."""
        book = Ledger()
        book.open("own", self.mechanism.terms())
        spend = Spend(run=runner.run_id, key=key, ledger=book, dataset="own")
        spend.begin(0, lambda _: "")
        return self.mechanism.step(None, np.zeros(bins, np.int64), spend)[1][0].values


@dataclass(frozen=True, kw_only=True)
class ReusedNoise:
    """The data, and a dataset that everybody knows, under one run id and on two ledgers.

    What is wrong: who knows one of the datasets subtracts its release from the other's and has the
    other exactly. Only the ledger's digest of the input prevents it: the draws' addresses agree.
    """

    mechanism: Uniform
    known: int = 100

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x (data, known data)."""
        columns = []
        for values in (np.repeat(data[0], runs), np.full(runs, self.known)):
            spend = unlimited_spend(secret)
            spend.begin(0, lambda _: "")
            _, releases = self.mechanism.step(None, values, spend)
            columns.append(releases[0].values)
        return np.stack(columns, axis=1)


@dataclass(frozen=True, kw_only=True)
class ShortBudgetWindow(BudgetDistribution, identity="control/forgetful"):
    """Budget distribution with a record of what was spent that is too short.

    Claim: w-event epsilon-DP. True: the record forgets each charge one step later, inside its
    window, so every step publishes with epsilon / 4: w steps cost w epsilon / 4 and the
    comparisons' epsilon / 2.
    """

    def start(self) -> BudgetDistributionState:
        """A window of one step instead of w."""
        return BudgetDistributionState(spent=BudgetWindow(width=1))


@dataclass(frozen=True, kw_only=True)
class _UnitNormCoder(BufferedCoder):
    def norm(self) -> Fraction:
        """As if C were the identity."""
        return Fraction(1)


@dataclass(frozen=True, kw_only=True)
class UnitColumnNorm(BltCounter, identity="control/wrong_norm"):
    """A buffered linear Toeplitz counter whose noise is scaled to a column norm of 1.

    Claim: event-level rho-zCDP. True: one event moves all later measurements through the buffers;
    the norm of the encoder's first column is above 1 and grows with the number of steps, and rho is
    understated by its square.
    """

    def coder(self, bits: int) -> BufferedCoder:
        """The same recursion with another norm."""
        return _UnitNormCoder(process=self.process, bits=bits)


@dataclass(frozen=True, kw_only=True)
class SparseVector:
    """Six versions of the sparse vector technique, as papers have printed them; four are broken.

    Lyu, Su, Li, "Understanding the Sparse Vector Technique for Differential Privacy", 2017, compare
    them. All claim epsilon-DP for queries that each move by at most 1 between neighbours, and for
    at most c answers above the threshold.

    | version | threshold noise | query noise | what is true |
    |---|---|---|---|
    | 1 (theirs) | Lap(2/e), once | Lap(4c/e) | e-DP |
    | 2 (Dwork, Roth 2014) | Lap(2c/e), anew after each | Lap(4c/e) | e-DP |
    | 3 (Roth 2011) | Lap(2/e), once | Lap(2c/e), and the noisy answer is published | no e at all |
    | 4 (Lee, Clifton 2014) | Lap(4/e), once | Lap(4/(3e)) | (1 + 6c)/4 e |
    | 5 (Stoddard et al. 2014) | Lap(2/e), once | none | no e at all |
    | 6 (Chen et al. 2015) | Lap(2/e), once | Lap(2/e), and no bound on the answers | no e at all |

    Called for many runs at once; the threshold is 0. `grid`: a change of 1 is so many steps of the
    integers on which noise is drawn.
    """

    version: int
    count: int = 1
    """How many answers above the threshold there may be (c)."""
    grid: int = 4

    def __call__(self, data: Integers, runs: int, secret: bytes) -> Reals:
        """Runs x queries: 1 above (version 3: the noisy answer), 0 below, NaN once stopped."""
        spend, size, (threshold_scale, scale) = PooledSpend(secret), len(data), self._scales()
        threshold = self._noise(spend, threshold_scale, runs)
        left = np.full(runs, self.count if self.version != 6 else size + 1)
        answers = np.full((runs, size), STOPPED)
        for number in range(size):
            noisy = int(data[number, 0]) * self.grid + self._noise(spend, scale, runs)
            above, open_ = noisy >= threshold, left > 0
            shown = noisy / self.grid if self.version == 3 else np.full(runs, ABOVE)
            answers[:, number] = np.where(open_, np.where(above, shown, BELOW), STOPPED)
            if self.version == 3:  # "below" must not look like the answer 0
                answers[open_ & ~above, number] = -1e6
            left = left - (above & open_)
            if self.version == 2:
                again = self._noise(spend, threshold_scale, runs)
                threshold = np.where(above, again, threshold)
        return answers

    def _scales(self) -> tuple[Fraction, Fraction | None]:
        """Of the threshold's noise and of the queries': the table above, where e = 1."""
        two, c = Fraction(2), self.count
        return {
            1: (two, two * 2 * c),
            2: (two * c, two * 2 * c),
            3: (two, two * c),
            4: (two * 2, two * 2 / 3),
            5: (two, None),
            6: (two, two),
        }[self.version]

    def _noise(self, spend: PooledSpend, scale: Fraction | None, runs: int) -> Integers:
        if scale is None:
            return np.zeros(runs, np.int64)
        sensitivity = Fraction(self.grid)
        return spend.laplace(np.zeros(runs, np.int64), sensitivity=sensitivity, epsilon=1 / scale)
