"""BlockSmoother: blocks, what is learnt from them, and how good it is."""

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.replay import record
from dpstream.mechanisms import BlockSmoother, ContinGroup
from dpstream.mechanisms.parts import block_filter
from dpstream.mechanisms.parts.block_filter import (
    MODELS,
    SPREAD,
    Beliefs,
    block_lengths,
    expected_errors,
)
from dpstream.privacy.state import pack

SECRET, RUN = bytes(range(32)), bytes(16)
RANGE = {"lo": 0, "hi": 1000}


def error(mechanism, data):
    """Mean absolute error of one release, in units of the range."""
    values = dps.release(mechanism, data, secret=SECRET, run_id=RUN).values[:, 0]
    return float(np.abs(values - data).mean()) / 1000


def test_every_value_is_in_exactly_one_block():
    """Each charge is epsilon, for cells that follow each other without a gap or an overlap."""
    mechanism = BlockSmoother(epsilon=5, delay=12, **RANGE)
    data = np.random.default_rng(0).integers(0, 1001, (200, 1))
    calls, releases = record(mechanism, data, secret=SECRET, run=RUN)
    edges = [(c.cells.first, c.cells.last) for c in calls]

    assert {c.amount for c in calls} == {5}
    assert {c.sensitivity for c in calls} == {1000}
    assert [first for first, _ in edges] == [0, *(last + 1 for _, last in edges[:-1])]
    assert edges[-1][1] == 199
    assert len(releases) == 200
    assert len({last - first for first, last in edges[:-1]}) > 1  # their length is learnt


def test_a_block_holds_the_sum_of_its_values():
    """What is asked for is the exact sum, whatever the length."""
    mechanism = BlockSmoother(epsilon=1, delay=7, **RANGE)
    data = np.arange(60)[:, None]
    calls, _ = record(mechanism, data, secret=SECRET, run=RUN)

    assert [int(c.value[0]) for c in calls] == [
        int(data[c.cells.first : c.cells.last + 1].sum()) for c in calls
    ]


@pytest.mark.parametrize(("epsilon", "shortest", "longest"), [(0.1, 10, 20), (10**4, 1, 1)])
def test_blocks_are_as_long_as_the_noise_asks(epsilon, shortest, longest):
    """Long where noise rules, single steps where there is none."""
    data = 500 + 200 * np.sin(np.arange(600) / 15)
    mechanism = BlockSmoother(epsilon=epsilon, delay=20, **RANGE)
    calls, _ = record(mechanism, mechanism.check(data[:, None]), secret=SECRET, run=RUN)
    late = [c.cells.last - c.cells.first + 1 for c in calls[len(calls) // 2 : -1]]

    assert shortest <= np.median(late) <= longest


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1, 5, 100])
@pytest.mark.parametrize("kind", ["still", "wave", "jumps", "white"])
def test_it_is_never_far_behind_the_batch_means(kind, epsilon):
    """Against means of batches with the same delay, on streams of several kinds."""
    rng, t = np.random.default_rng(5), np.arange(1500)
    data = {
        "still": np.full(1500, 300.0),
        "wave": 500 + 300 * np.sin(t / 60),
        "jumps": np.where((t + 15) // 150 % 2, 800.0, 200.0),
        "white": rng.uniform(0, 1000, 1500),
    }[kind]
    ours = error(BlockSmoother(epsilon=epsilon, delay=30, **RANGE), data)
    means = error(ContinGroup(epsilon=epsilon, delay=30, **RANGE), data)

    worse = 1.5 if kind == "jumps" else 1.25  # jumps fall on the edges of the batches
    assert ours <= worse * means + 0.02


def test_the_deviation_tells_how_far_off_it_is():
    """On a stream that the models know, nearly all values are within three deviations."""
    rng = np.random.default_rng(1)
    level = np.clip(500 + np.cumsum(rng.normal(0, 8, 3000)), 50, 950)
    series = dps.release(
        BlockSmoother(epsilon=1, delay=40, **RANGE), level, secret=SECRET, run_id=RUN
    )
    off = np.abs(series.values[200:, 0] - level[200:]) / series.stddev[200:, 0]

    assert (off < 3).mean() > 0.95
    assert np.median(off) > 0.1


@pytest.mark.parametrize("delay", [8, 50])
def test_scatter_that_blocks_hide_is_in_the_deviation(delay, monkeypatch):
    """Uniform numbers: a block's mean hardly shows them, and a bar of the mixture alone is short.

    1,500 values: nine in ten with four deviations of room, for a fixed secret.
    """
    values = np.random.default_rng(4).uniform(0, 1_000, 1_500)

    def held():
        smoother = BlockSmoother(epsilon=1, delay=delay, **RANGE)
        series = dps.release(smoother, values, secret=SECRET, run_id=RUN)
        return (np.abs(series.values[:, 0] - values) <= 2 * series.stddev[:, 0]).mean()

    doubted = held()
    monkeypatch.setattr(block_filter, "_DOUBT", 1.0)

    assert 0.9 < doubted < 0.995
    assert held() < 0.9


def test_doubt_ends_when_blocks_speak_against_it():
    """Nothing is known at first: nearly all of a uniform number's variance. Quiet blocks end it."""
    at_first = Beliefs.none(1, 8)
    quiet = at_first
    for k in range(400):
        quiet = quiet.learn(np.array([0.5]), first=k, steps=1, scale=0.01)

    assert SPREAD / 2 < at_first.doubt()[0] < SPREAD
    assert quiet.doubt()[0] < SPREAD / 100


def test_blocks_without_noise_are_met_and_joined():
    """The mean of what is published in a block is what was seen; in between it moves steadily."""
    beliefs, scale, seen = Beliefs.none(1, 12), 1e-4, np.array([0.2, 0.5, 0.4, 0.9, 0.6])
    for k, y in enumerate(seen):
        beliefs = beliefs.learn(np.array([y]), first=4 * k, steps=4, scale=scale)
    level, deviation = beliefs.look_back(0, 19, 1 / (4 * scale))

    assert np.abs(level.reshape(5, 4).mean(axis=1) - seen).max() < 0.06
    assert (np.diff(level[1:6, 0]) >= 0).all()
    assert (deviation > 0).all()


def test_a_later_block_corrects_an_earlier_one():
    """One wild block between quiet ones is pulled back once the next ones are seen."""
    beliefs = Beliefs.none(1, 12)
    for k in range(8):
        beliefs = beliefs.learn(np.array([0.3]), first=k, steps=1, scale=0.1)
    wild = beliefs.learn(np.array([0.9]), first=8, steps=1, scale=0.1)
    at_once = wild.look_back(8, 8, 10.0)[0][0, 0]
    for k in range(3):
        wild = wild.learn(np.array([0.3]), first=9 + k, steps=1, scale=0.1)
    later = wild.look_back(8, 8, 10.0)[0][0, 0]

    assert 0.3 < later < at_once < 0.9


def test_expected_errors_fall_with_epsilon_and_rise_with_drift():
    """The public table that block lengths are chosen by."""
    drift, white, weight = MODELS
    low, high = expected_errors(20, 0.1), expected_errors(20, 10.0)
    still = white == 0

    assert low.shape == (len(block_lengths(20)), len(drift))
    assert (high <= low + 1e-12).all()
    assert (np.diff(low[0][still]) >= -1e-12).all()
    assert low.max() <= np.sqrt(2 * SPREAD + white.max()) + 1e-9
    assert weight.sum() == pytest.approx(1)
    assert block_lengths(20)[0] == 20
    assert block_lengths(20)[-1] == 1


def test_beliefs_do_not_change_when_others_learn_from_them():
    """Rows are written once: two futures of one past have each their own, and the past stays."""
    rng, past = np.random.default_rng(8), Beliefs.none(2, 5)
    for step in range(9):  # more than there is room for
        past = past.learn(rng.random(2), first=step, steps=1, scale=0.1)
        before = pack(past, kind="beliefs")
        one = past.learn(np.array([0.1, 0.9]), first=step + 1, steps=1, scale=0.1)
        seen = pack(one, kind="beliefs")
        other = past.learn(np.array([0.7, 0.2]), first=step + 1, steps=1, scale=0.1)

        assert pack(past, kind="beliefs") == before
        assert pack(one, kind="beliefs") == seen != pack(other, kind="beliefs")
