"""A stand-in for noise that forces a mechanism's decisions, to read its budgets off."""

from fractions import Fraction

import numpy as np

from dpstream.privacy.ledger.charges import Interval, Paid


class Steering:
    """Answers comparisons with "much" at the chosen steps and "nothing" elsewhere.

    Values pass without noise; `charges` records (step, purpose, amount).
    """

    def __init__(self, publish_at, looks=("dissimilarity",)):
        self.step, self.publish_at, self.looks = -1, set(publish_at), looks
        self.charges = []

    def laplace(self, value, *, epsilon, purpose, interval=None, **_):
        value = np.asarray(value)
        if interval is None:
            self.charges.append((self.step, purpose, Fraction(epsilon)))
        if purpose in self.looks:
            return np.full(value.shape, 10**12 if self.step in self.publish_at else -(10**12))
        return value

    def pay(self, value, *, epsilon, purpose, **_):
        self.charges.append((self.step, purpose, Fraction(epsilon)))
        return Paid(purpose=purpose)

    def open_interval(self, epsilon, *, purpose="interval"):
        self.charges.append((self.step, "open " + purpose, Fraction(epsilon)))
        return Interval(purpose=purpose, start=self.step)

    def close_interval(self, interval):
        self.charges.append((self.step, "close " + interval.purpose, Fraction(0)))

    def paid(self, steps, purpose="publish"):
        """The amount paid for `purpose` at each step, 0 where nothing was."""
        paid = {step: amount for step, what, amount in self.charges if what == purpose}
        return [paid.get(step, Fraction(0)) for step in range(steps)]


def drive(mechanism, block, steering):
    """Run a mechanism over a block with a steering spender."""
    state, releases = mechanism.start(), []
    for step, row in enumerate(np.asarray(block)):
        steering.step = step
        state, new = mechanism.step(state, row, steering)
        releases += new
    return releases
