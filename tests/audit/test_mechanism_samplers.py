"""Many runs at once have the law of as many single ones."""

import math

import numpy as np
import pytest

from dpstream.audit.mechanism_samplers import PooledSpend, RunsAsBins, SequentialRuns
from dpstream.audit.mechanism_targets import BINS_APART, example
from dpstream.audit.query_samplers import QueryRuns, Scenario
from dpstream.audit.query_targets import day_query, query_targets
from dpstream.audit.replay import Recorder, drive
from dpstream.audit.report import controls
from dpstream.audit.targets import Target
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.counters.factorised_counter import CountingParameters
from tests.laws.test_laws import Z, moments
from tests.support.fixed import SECRET

APART = [n for n in REGISTRY if n in BINS_APART or issubclass(find(n), CountingParameters)]


@pytest.mark.parametrize("name", APART)
def test_bins_side_by_side_do_not_see_each_other(name):
    """Without noise, one bin's data change its own outputs and no other's."""
    assert moved_bins(example(name)) == {2}


@pytest.mark.parametrize("name", ["budget_distribution", "pacer", "adapub"])
def test_a_mechanism_that_mixes_bins_is_seen(name):
    """Control: the same comparison finds bins that are tied to one another."""
    assert moved_bins(example(name)) > {2}


class Silent(PooledSpend):
    """Answers without noise."""

    def laplace(self, value, **asked):
        return np.asarray(value)

    gaussian = laplace

    def respond(self, bucket, **asked):
        return np.asarray(bucket)


def moved_bins(mechanism, cases=20):
    """Which of four bins ever publish something else when the third holds other values."""
    rng, moved = np.random.default_rng(0), set()
    for _ in range(cases):
        one = rng.integers(0, 9, (8, 4))
        two, at = one.copy(), int(rng.integers(0, 8))
        two[at:, 2] = 8 - two[at:, 2]
        values = [
            np.array([r.values for r in sorted(releases, key=lambda r: r.step)])
            for releases in (drive(mechanism, block, Silent(SECRET)) for block in (one, two))
        ]
        moved |= set(np.flatnonzero((values[0] != values[1]).any(axis=0)).tolist())
    return moved


def test_runs_side_by_side_are_in_order():
    """Row r, output (step, bin): what the run's own bins published at that step."""
    block = np.array([[1000, 2000], [3000, 4000], [5000, 6000]])
    found = RunsAsBins(mechanism=example("uniform"))(block, 50, SECRET)

    assert found.shape == (50, 6)
    assert np.abs(found.mean(axis=0) - block.ravel()).max() < 10


@pytest.mark.parametrize("name", ["spas", "tree", "pegasus_w"])
def test_pooled_noise_has_the_scale_that_was_asked_for(name):
    """Mean |noise| against what each call declared, at a 1e-6 level."""
    mechanism, spend = example(name), PooledSpend(SECRET)
    total = expected = variance = 0.0
    for _ in range(400):
        recorder = Recorder(spend)
        drive(mechanism, np.full((8, 2), 5), recorder)
        for call in recorder.calls:
            if call.kind in ("laplace", "gaussian"):
                scale, mean, second = moments(call, 1.0)
                total += float(np.abs(call.answer - call.value).sum()) / scale
                expected += call.value.size * mean / scale
                variance += call.value.size * (second - mean**2) / scale**2

    assert abs(total - expected) / math.sqrt(variance) < Z


def test_no_number_is_given_away_twice():
    """Two runs, and two coordinates of a run, never share a draw."""
    rows = SequentialRuns(mechanism=example("uniform"))(np.zeros((6, 2), int), 300, SECRET)
    wide = PooledSpend(SECRET)
    numbers = np.concatenate(
        [
            wide.laplace(np.zeros(5, int), sensitivity=10**9, epsilon=example("uniform").budget)
            for _ in range(2000)
        ]
    )

    assert len({row.tobytes() for row in rows}) == 300
    assert len(np.unique(numbers)) == len(numbers)


def test_groups_of_a_query_are_runs():
    """Every run's groups are found in its own row, hidden ones as NaN."""
    sampler = QueryRuns(query=lambda runs: day_query(), groups=2)
    shown = sampler(Scenario(others=((0, 0, 200),)), 40, SECRET)

    assert shown.shape == (40, 3 * 2)  # releases x groups
    assert np.abs(shown[:, ::2] - 200).max() < 60
    assert np.isnan(shown[:, 1::2]).all()


@pytest.mark.parametrize("name", query_targets())
def test_every_query_can_be_sampled(name):
    """All kinds of windows, strategies and aggregates give one row per run, and show groups."""
    target = query_targets()[name]()
    runs = 6 if name.startswith("latched_debias") else 30
    found = target.sample(target.pairs[0].one, runs, SECRET)

    assert len(found) == runs
    assert np.isfinite(found).any()


@pytest.mark.parametrize(
    "name", [n for n, make in controls().items() if isinstance(make(), Target)]
)
def test_every_control_can_be_sampled(name):
    """Controls change a line of the code that they stand on; here it is seen if that moves."""
    target = controls()[name]()
    runs = 3 if name == "watermark_from_data" else 20
    worlds = [
        target.sample(data, runs, SECRET) for data in (target.pairs[0].one, target.pairs[0].two)
    ]

    assert [len(world) for world in worlds] == [runs, runs]
    assert worlds[0].shape == worlds[1].shape
