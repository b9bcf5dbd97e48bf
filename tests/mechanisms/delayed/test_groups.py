"""ContinGroup and DiscontinGroup: groups, tests and what they may read."""

from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import Recorder, drive, record, replay
from dpstream.mechanisms import ContinGroup, DiscontinGroup
from dpstream.mechanisms.delayed.discontin_group import deviations, largest_joined_group
from dpstream.privacy.sensitivity import grouping_change

SECRET, RUN = bytes(range(32)), bytes(16)
RANGE = {"lo": 0, "hi": 100}


def exact_deviation(values):
    """n dev / (n - 1) in rationals."""
    mean = Fraction(sum(values), len(values))
    return sum(abs(v - mean) for v in values) * len(values) / (len(values) - 1)


def test_deviations_are_those_of_rationals():
    """Floor of grid n dev / (n - 1), for every group of every bin."""
    rng = np.random.default_rng(1)
    for grid in (1, 7, 1024):
        block = rng.integers(-50, 50, (9, 3))
        labels = np.array([[0, 0, 0], [1, 0, 1], [0, 2, 1], [3, 2, 0], [1, 0, 0],
                           [3, 5, 5], [6, 5, 1], [6, 2, 5], [0, 8, 8]])  # fmt: skip
        x = rng.integers(-50, 50, 3)
        tested, size, which = deviations(block, labels, 0, x, grid)
        at = 0
        for j in range(3):
            for g in sorted(set(labels[:, j])):
                group = [*block[labels[:, j] == g, j].tolist(), int(x[j])]
                assert tested[at] == int(grid * exact_deviation(group))
                assert (size[at], which[at]) == (len(group), j * 9 + g)
                at += 1
        assert at == len(tested)


def test_a_value_joins_the_largest_group_that_takes_it():
    """Or begins a new one, whose name is its place."""
    which, size = np.array([0, 1, 2, 4, 5]), np.array([2, 4, 4, 9, 2])
    joins = np.array([1, 1, 1, 0, 0])

    assert largest_joined_group(joins, size, which, 4, 2).tolist() == [1, 4]


def test_groups_come_back_after_a_jump_where_tests_are_sharp():
    """DiscontinGroup joins what ContinGroup must keep apart."""
    data = [10, 90, 10, 90, 10, 90]
    options = {"epsilon": 10**4, "delay": 6, "threshold": 30, "shrink": False, **RANGE}
    options["quantum"] = "1/1000"
    scattered = dps.release(DiscontinGroup(**options), data, secret=SECRET, run_id=RUN).values
    successive = dps.release(ContinGroup(**options), data, secret=SECRET, run_id=RUN).values

    assert len(set(scattered[:, 0])) == 2
    assert len(set(successive[:, 0])) == 6
    assert np.abs(scattered[:, 0] - data).max() < 1


@pytest.mark.parametrize("kind", [ContinGroup, DiscontinGroup])
def test_without_a_threshold_no_test_is_made(kind):
    """A batch is one group, or with a large epsilon none; all of epsilon publishes it."""
    for epsilon, groups in ((1, 1), (20, 10)):
        mechanism = kind(epsilon=epsilon, delay=10, quantum="1/1000", **RANGE)
        values = dps.release(mechanism, 40 + np.arange(30), secret=SECRET, run_id=RUN).values[:, 0]
        calls, _ = record(mechanism, np.arange(30)[:, None], secret=SECRET, run=RUN)

        assert [len(set(values[a : a + 10])) for a in (0, 10, 20)] == [groups] * 3
        assert {(call.purpose, call.amount) for call in calls} == {("publish", epsilon)}


@pytest.mark.parametrize("delay", [2, 5, 9])
def test_one_value_moves_all_tests_of_its_batch_by_no_more_than_declared(delay):
    """With the answers frozen, over all neighbours of many batches; and nearly that much."""
    mechanism = DiscontinGroup(epsilon=1, delay=delay, threshold=50, **RANGE)
    rng = np.random.default_rng(delay)
    most = Fraction(0)
    for number in range(12):
        block = rng.choice([0, 100], (delay, 1)) if number % 2 else rng.integers(0, 101, (delay, 1))
        run = number.to_bytes(16, "big")
        calls, _ = record(mechanism, block, secret=SECRET, run=run)
        tests = [c for c in calls if c.purpose == "test"]
        for step in range(delay):
            for value in (0, 100):
                other = block.copy()
                other[step] = value
                moved = moved_tests(mechanism, other, calls, tests)
                most = max(most, moved)
    declared = grouping_change(mechanism.change, delay=delay, grid=mechanism.grid)

    assert declared / 3 < most <= declared


def moved_tests(mechanism, other, calls, tests):
    """L1 change of all tests of a recorded batch."""
    twin = Recorder(script=calls)
    drive(mechanism, other, twin)
    new = [c for c in twin.calls if c.purpose == "test"]
    pairs = zip(tests, new, strict=True)
    return sum(Fraction(int(np.abs(a.value - b.value).sum())) for a, b in pairs)


def test_half_of_the_sensitivity_is_seen_by_the_replay():
    """Control: a mechanism that declares too little for its tests is caught."""

    class Careless(DiscontinGroup, identity="test careless"):
        @property
        def sensitivity(self):
            return grouping_change(self.change, delay=self.delay, grid=self.grid) / 8

    mechanism = Careless(epsilon=1, delay=6, threshold=300, **RANGE)
    block = np.zeros((6, 1), np.int64)
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    other = block.copy()
    other[0] = 100

    assert replay(mechanism, other, calls, original=block).violations != []
