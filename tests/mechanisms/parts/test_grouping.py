"""Groups in time: exact deviations, closing rules, and what a run of tests can give away."""

import math
from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest

from dpstream.audit.replay import Recorder, record, replay
from dpstream.mechanisms import AdaPub, PegasusW
from dpstream.mechanisms.parts.grouping import GRID, Grouping, deviations
from dpstream.privacy.sensitivity import deviation_change
from tests.mechanisms.steering import Steering
from tests.support.fixed import RUN, SECRET


def brute_dev(values, grid=GRID):
    """floor(grid * sum |c - mean|), in rationals."""
    mean = F(sum(values), len(values))
    return math.floor(grid * sum(abs(v - mean) for v in values))


def kernel_dev(values, largest=1 << 40):
    block = np.array([values[:-1]])
    length, x = np.array([len(values) - 1]), np.array([values[-1]])
    return int(deviations(block, len(values) - 1, length, x, largest)[0])


def test_deviations_are_exact():
    """The compiled kernel agrees with rationals, for short and long groups, small and large."""
    rng = np.random.default_rng(1)
    for _ in range(400):
        n, high = int(rng.integers(2, 30)), int(rng.choice((3, 1000, 1 << 34)))
        base = int(rng.choice((0, 1 << 52)))
        values = [base + int(v) for v in rng.integers(0, high, n)]

        assert kernel_dev(values) == brute_dev(values)


def test_deviations_of_a_hand_computed_group():
    """(1, 2, 6): mean 3, dev = 2 + 1 + 3 = 6; (0, 0, 1): mean 1/3, dev = 4/3, rounded down."""
    assert kernel_dev([1, 2, 6]) == 6 * 1024
    assert kernel_dev([0, 0, 1]) == 1365
    assert brute_dev([0, 0, 1]) == 1365


def test_closed_groups_are_left_out_and_others_read_their_own_length():
    """Three bins: an open group of 2, none, one of 1; only the newest values count."""
    block = np.array([[9, 1, 2], [9, 9, 9], [9, 9, 5]])
    found = deviations(block, 3, np.array([2, 0, 1]), np.array([6, 0, 7]), 1 << 40)

    assert found.tolist() == [6 * 1024, 2 * 1024]


def test_large_deviations_saturate_without_overflow():
    """Beyond the largest deviation the answer is that deviation, also at the ends of the range."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        values = [int(v) for v in rng.integers(0, 60, int(rng.integers(2, 9)))]
        assert kernel_dev(values, largest=50) == min(brute_dev(values), 50 * GRID)
    grouping = Grouping(epsilon=F(1), change=F(1), longest=3000)
    edge = grouping.largest - 1
    values = [0, edge] * 1500

    assert kernel_dev(values, grouping.largest) == GRID * grouping.largest
    assert kernel_dev([0, (1 << 53) - 1], grouping.largest) == GRID * grouping.largest
    assert grouping.longest**2 * grouping.largest <= 1 << 62


def test_one_changed_value_moves_a_deviation_by_nearly_two():
    """By at most 2, the declared sensitivity, and in a long group by hardly less."""
    lone = [[c] + [0] * 39 for c in (5, 6)]
    rng, most = np.random.default_rng(3), abs(brute_dev(lone[0]) - brute_dev(lone[1]))
    assert most > 1.9 * GRID
    for _ in range(500):
        values = rng.integers(0, 4, int(rng.integers(2, 40))).tolist()
        other = list(values)
        other[int(rng.integers(len(values)))] += int(rng.choice((-1, 1)))
        most = max(most, abs(brute_dev(values) - brute_dev(other)))

    assert most <= deviation_change(F(1), grid=GRID)


def grown(grouping, stream, fails_at):
    """Group sizes and lengths per step, with tests that fail at the given steps."""
    steering = Steering(publish_at=fails_at, looks=("test",))
    groups, sizes, lengths = grouping.start(1), [], []
    for step, x in enumerate(stream):
        steering.step = step
        groups, size = grouping.grow(groups, np.array([x]), np.array([0]), steering)
        sizes.append(int(size[0]))
        lengths.append(int(groups.length[0]))
    return sizes, lengths, steering


def test_a_failing_value_is_a_group_of_its_own():
    """1, 2, 3 grow; the value that fails is alone, and the next one starts a new group."""
    sizes, lengths, _ = grown(Grouping(epsilon=F(1), change=F(1), longest=9), [5] * 7, {3, 6})

    assert sizes == [1, 2, 3, 1, 1, 2, 1]
    assert lengths == [1, 2, 3, 0, 1, 2, 0]


def test_a_group_is_closed_at_its_longest_without_a_test():
    """Memory is bounded: a full group ends, the next value starts another."""
    sizes, lengths, _ = grown(Grouping(epsilon=F(1), change=F(1), longest=3), [5] * 7, set())
    alone, _, _ = grown(Grouping(epsilon=F(1), change=F(1), longest=1), [5] * 3, set())

    assert sizes == [1, 2, 3, 1, 2, 3, 1]
    assert lengths == [1, 2, 0, 1, 2, 0, 1]
    assert alone == [1, 1, 1]


def test_every_step_is_paid_once_whatever_the_tests_say():
    """`epsilon` per value; thresholds and tests draw under it."""
    _, _, steering = grown(Grouping(epsilon=F(1, 7), change=F(1), longest=4), [5] * 9, {2, 5})

    assert steering.charges == [(step, "group", F(1, 7)) for step in range(9)]


def test_another_run_does_not_read_what_it_has_not_paid_for():
    """A state that goes on as a new run starts new groups, in every bin."""
    grouping, steering = (
        Grouping(epsilon=F(1), change=F(1), longest=9),
        Steering((), looks=("test",)),
    )
    groups, theta = grouping.start(2), np.array([0])
    for _ in range(3):
        groups, size = grouping.grow(groups, np.array([5, 6]), theta, steering)
    assert size.tolist() == [3, 3]
    _, again = grouping.grow(groups, np.array([5, 6]), theta, steering)
    _, other = grouping.grow(replace(groups, run="other"), np.array([5, 6]), theta, steering)

    assert again.tolist() == [4, 4]
    assert other.tolist() == [1, 1]


def test_a_value_joins_strictly_below_the_threshold():
    """Without noise (5, 6) has dev 1: it joins below theta = 1 + 1/1024, not at 1."""
    for theta, size in ((GRID + 1, 2), (GRID, 1)):
        grouping, steering = Grouping(epsilon=F(1), change=F(1), longest=4), Steering((), looks=())
        groups, _ = grouping.grow(grouping.start(1), np.array([5]), np.array([theta]), steering)
        _, found = grouping.grow(groups, np.array([6]), np.array([theta]), steering)

        assert found.tolist() == [size]


@pytest.mark.parametrize("mechanism", [PegasusW, AdaPub])
def test_a_changed_value_is_read_by_one_run_only(mechanism):
    """With the answers frozen, one changed count moves the tests of one run, and none after it.

    Runs are read off the threshold draws: a bin starts one where it is not tested.
    """
    mechanism = mechanism(epsilon=40, window=6)
    block = np.random.default_rng(4).poisson(9, size=(60, 1))
    calls, _ = record(mechanism, block, secret=SECRET, run=RUN)
    starts = [c.step for c in calls if c.purpose == "threshold"]
    tests = {c.step: int(c.value[0]) for c in calls if c.purpose == "test"}
    assert len(starts) > 12
    assert sorted(starts + list(tests)) == list(range(60))
    longest = 0
    for step in range(60):
        other = block.copy()
        other[step] += 1
        assert replay(mechanism, other, calls).violations == []
        twin = answered(mechanism, other, calls)
        moved = [at for at, value in tests.items() if twin[at] != value]
        runs = {max(s for s in starts if s < at) for at in moved}
        longest = max(longest, len(moved))

        assert len(runs) <= 1
        assert all(at >= step for at in moved)
    assert longest > 1


def answered(mechanism, block, calls):
    """The tested deviations of another stream under the same answers."""
    recorder, state = Recorder(script=calls), mechanism.start()
    for step, row in enumerate(block):
        recorder.begin(step)
        state, _ = mechanism.step(state, row, recorder)
    return {c.step: int(c.value[0]) for c in recorder.calls if c.purpose == "test"}


# What the answers give away, in exact probabilities: rho is summed over, each test has a closed
# form. A coarser grid keeps the sums short.
COARSE = 8


def at_most(bound, scale):
    """P[discrete Laplace <= bound]."""
    q = math.exp(-1 / scale)
    low, high = np.minimum(bound, -1), np.maximum(bound, 0)
    return np.where(bound < 0, q**-low / (1 + q), 1 - q ** (high + 1.0) / (1 + q))


def probability(stream, joins, theta, rho_scale, nu_scale):
    """Of this sequence of answers; the answer to a value that starts a group is ignored."""
    rho = np.arange(-int(45 * rho_scale), int(45 * rho_scale) + 1)
    start = np.exp(-np.abs(rho) / rho_scale)
    start /= start.sum()
    total, group, weight = 1.0, [], start
    for x, joined in zip(stream, joins, strict=True):
        if not group:
            group, weight = [x], start
            continue
        passes = at_most(theta + rho - brute_dev([*group, x], COARSE) - 1, nu_scale)
        if joined:
            group, weight = [*group, x], weight * passes
        else:
            total, group = total * float((weight * (1 - passes)).sum()), []
    return total * (float(weight.sum()) if group else 1.0)


def worst_ratio(changed, noise, trials=250):
    """The largest |log ratio| found between streams that differ in `changed` values, at e = 1.

    `noise` times that of `Grouping`, on the coarse grid.
    """
    rng, worst = np.random.default_rng(5), 0.0
    grouping = Grouping(epsilon=F(1), change=F(1), longest=9)
    rho_scale, nu_scale = (
        noise * COARSE * float(grouping.sensitivity / epsilon / GRID)
        for epsilon in (grouping.for_threshold, grouping.for_test)
    )
    for number in range(trials):
        one = rng.integers(0, 4, 8)
        other = one.copy()
        if number == 0 and changed == 1:
            one, other = np.array([2, 0, 0, 0, 0, 2, 3, 3]), np.array([1, 0, 0, 0, 0, 2, 3, 3])
        else:
            other[rng.choice(8, changed, replace=False)] += rng.choice((-1, 1))
        theta = int(rng.integers(-200, 200)) if number else -106
        joins = [True] * 7 + [False] if number % 3 == 0 else (rng.random(8) < 0.7).tolist()
        odds = [
            probability(stream.tolist(), joins, theta, rho_scale, nu_scale)
            for stream in (one, other)
        ]
        worst = max(worst, abs(math.log(odds[0] / odds[1])))
    return worst


def test_the_answers_give_away_at_most_e_per_changed_value():
    """Exact likelihood ratios of whole answer sequences stay within e for each changed value."""
    assert 0.2 < worst_ratio(1, noise=1) <= 1
    assert worst_ratio(3, noise=1) <= 3


def test_too_little_noise_would_be_seen():
    """Control: with a quarter of the noise the same search finds more than e."""
    assert worst_ratio(1, noise=0.25, trials=5) > 1
