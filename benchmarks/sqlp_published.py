"""DP-SQLP as printed, simulated: Algorithms 1 to 4 with the bound per trigger.

What is wrong: the proof of its key selection needs P[some trigger fails] <= beta for a key, but
the threshold is the 1 - beta quantile of *each* trigger's noise (Appendix B), so T triggers fail
with up to T times the probability that delta was charged for. `for_all_triggers` takes the quantile
that the proof needs.

A simulation, not an engine: rows are arrays in time order, noise comes from NumPy's generator, and
only what the last table holds is computed. It serves to reproduce the paper's figures, and as a
control. Paper: Zhang et al., "Differentially Private Stream Processing at Scale", 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from dpstream.compiled import compiled
from dpstream.counting.binary_tree import Honaker
from dpstream.counting.noise_process import late_normals, late_start
from dpstream.privacy.accounting.calibration import rho_for
from dpstream.records import Reals

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Events:
    """Rows in time order: user and key as numbers from 0, and the trigger that takes them in."""

    users: Numbers
    keys: Numbers
    triggers: Numbers

    _kept: dict[int, tuple[Numbers, Numbers]] = field(default_factory=dict, repr=False)

    def begins(self, triggers: int) -> Numbers:
        """Where each trigger's rows begin, and the end of the last."""
        return np.searchsorted(self.triggers, np.arange(triggers + 1))

    def bounded(self, rows: int) -> tuple[Numbers, Numbers]:
        """(is each row among its user's first `rows`?, the trigger of the kept row before it).

        That is the user's last kept row of the same key, -1 if there is none. Kept for the last
        bound asked for: several forms ask for one.
        """
        if rows not in self._kept:
            self._kept.clear()
            users = int(self.users.max(initial=-1)) + 1
            self._kept[rows] = _bounded(self.users, self.keys, self.triggers, users, rows)
        return self._kept[rows]


@dataclass(frozen=True, kw_only=True)
class SqlpPublished:
    """The paper's parameters: half of epsilon each for selection and sums, delta in thirds.

    A user has at most `rows` rows (C). Selection composes over C rounds, each with rho / C; sums
    have sensitivity C. `pre_threshold` is the paper's mu.
    """

    triggers: int
    rows: int = 32
    epsilon: float = 6.0
    delta: float = 1e-9
    pre_threshold: int = 0
    for_all_triggers: bool = False

    @property
    def rho(self) -> float:
        """The zCDP budget of each half."""
        return float(rho_for(epsilon=Fraction(self.epsilon) / 2, delta=Fraction(self.delta) / 3))

    @cached_property
    def tree(self) -> Honaker:
        """Both trees: ceil(log2 T) levels by the paper's count, which is one short at 2^k."""
        return Honaker(steps=self.triggers)

    @property
    def levels(self) -> int:
        """By the paper's count."""
        return max(math.ceil(math.log2(self.triggers)), 1)

    @property
    def selection_sigma(self) -> float:
        """Of a node that counts users; each of C rounds has an equal share of rho."""
        return math.sqrt(self.levels * self.rows / (2 * self.rho))

    @property
    def sum_sigma(self) -> float:
        """Of a node that sums rows, C of which may be one user's.

        >>> round(SqlpPublished(triggers=100).sum_sigma, 3)
        177.17
        """
        return self.rows * math.sqrt(self.levels / (2 * self.rho))

    @cached_property
    def thresholds(self) -> Reals:
        """By trigger, the paper's tau: the noise of a key's count stays below it, but for beta."""
        beta = self.delta / 3 / self.rows
        quantile = float(norm.isf(beta / self.triggers if self.for_all_triggers else beta))
        found: Reals = quantile * self.selection_sigma * self.tree.error()
        return found

    def publish(self, events: Events, *, keys: int, rng: np.random.Generator) -> Reals:
        """The last value published of each key; NaN for keys that were never published."""
        kept, before = events.bounded(self.rows)
        begins = events.begins(self.triggers)
        final = np.bincount(events.keys[kept], minlength=keys)
        looked = np.flatnonzero(final > self._hopeless(keys))
        place = np.full(keys, -1, np.int32)
        place[looked] = np.arange(len(looked), dtype=np.int32)
        units, buffer, sums = (np.zeros(len(looked), np.int64) for _ in range(3))
        since, last = np.zeros(len(looked), np.int64), np.full(len(looked), -1)
        state = np.zeros((len(looked), self.tree.width))
        for trigger in range(self.triggers):
            rows = slice(begins[trigger], begins[trigger + 1])
            _take_in(place, events.keys[rows], kept[rows], before[rows], since, units, buffer)
            noise = self.tree.advance(state, trigger + 1, rng.standard_normal(len(looked)))
            noisy = units + self.selection_sigma * noise
            shown = np.flatnonzero(
                (units > self.pre_threshold)
                & (noisy > self.pre_threshold + self.thresholds[trigger])
            )
            # A new round: a new tree that has been fed zeros up to now, and an empty buffer.
            fresh = rng.standard_normal((len(shown), late_normals(self.tree, trigger + 1)))
            state[shown] = late_start(self.tree, trigger + 1, fresh)[0]
            sums[shown] += buffer[shown]
            units[shown] = buffer[shown] = 0
            since[shown], last[shown] = trigger + 1, trigger
        values = np.full(keys, np.nan)
        out = last >= 0
        # The sums' tree is independent of when a key is published: its noise there suffices.
        spread = self.sum_sigma * self.tree.error()[last[out]]
        values[looked[out]] = sums[out] + spread * rng.standard_normal(len(spread))
        return values

    def _hopeless(self, keys: int) -> int:
        """Rows with which no key is published, but for a probability of 10^-4 over all keys."""
        spreads = self.selection_sigma * self.tree.error()
        room = self.pre_threshold + self.thresholds
        rows = 0
        while keys * float(norm.sf((room - rows - 1) / spreads).sum()) < 1e-4:
            rows += 1
        return rows


@compiled
def _bounded(
    users: Numbers, keys: Numbers, triggers: Numbers, most: int, rows: int
) -> tuple[Numbers, Numbers]:
    ends = np.zeros(most + 1, np.int64)  # of each user's kept rows, in one list of them all
    for user in users:
        if ends[user + 1] < rows:
            ends[user + 1] += 1
    for user in range(most):
        ends[user + 1] += ends[user]
    next_at, of_user = ends[:-1].copy(), np.empty(ends[-1], np.int64)
    kept, before = np.zeros(len(users), np.bool_), np.full(len(users), -1, np.int16)
    for row in range(len(users)):
        user = users[row]
        at = next_at[user]
        if at == ends[user + 1]:
            continue
        kept[row] = True
        for earlier in range(at - 1, ends[user] - 1, -1):
            if keys[of_user[earlier]] == keys[row]:
                before[row] = triggers[of_user[earlier]]
                break
        of_user[at] = row
        next_at[user] += 1
    return kept, before


@compiled
def _take_in(
    place: Numbers,
    keys: Numbers,
    kept: Numbers,
    before: Numbers,
    since: Numbers,
    units: Numbers,
    buffer: Numbers,
) -> None:
    """Add rows to their keys' buffers, and users that are new in the round to its count."""
    for row in range(len(keys)):
        at = place[keys[row]]
        if at >= 0 and kept[row]:
            buffer[at] += 1
            if before[row] < since[at]:
                units[at] += 1
