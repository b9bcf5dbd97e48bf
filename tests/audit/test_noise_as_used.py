"""Noise as it is published: nothing is shared between queries, runs, secrets, steps and bins.

Laws elsewhere: groups, columns and windows of a query, and the correlation of its releases
(`tests/laws/test_query_noise.py`); addresses (`tests/privacy/noise/test_streams.py`); equal
replays and other data (`tests/laws/test_laws.py`, `tests/engines`).
"""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.query_samplers import Scenario, run_plan, scenario_table
from dpstream.audit.query_targets import day_query
from dpstream.query.noise_plan import plan_query
from tests.support.fixed import RUN, SECRET

KEYS = 3000
PUBLIC = day_query(public_groups=list(range(KEYS)), max_groups_contributed=1)
Z = 5.2  # three releases each: a false-alarm rate below 1e-6 per test


def published(*, secret=SECRET, run=RUN, **changes):
    """Releases x keys of a query over no rows: its noise."""
    plan, rows = (
        plan_query(replace(PUBLIC, **changes)),
        scenario_table(Scenario(), KEYS, 1, windows=False),
    )
    found = []
    for _, made in run_plan(plan, rows, secret=secret, run=run):
        order = np.argsort(made.table["key"].to_numpy())
        found.append(made.table["count"].to_numpy()[order])
    return np.array(found)


@pytest.fixture(scope="module")
def noise():
    return published()


def shared(one, two):
    """The largest correlation of any release with the other's, in standard errors."""
    pairs = [np.corrcoef(a, b)[0, 1] for a, b in zip(one, two, strict=True)]
    return max(abs(r) for r in pairs) * math.sqrt(one.shape[1])


def test_a_replay_publishes_the_same_noise(noise):
    """The same secret, run and query: control of the comparisons below."""
    assert (published() == noise).all()
    assert shared(noise, noise) > Z


@pytest.mark.parametrize(
    "other",
    [{"name": "another"}, {"run": RUN[::-1]}, {"secret": SECRET[::-1]}],
    ids=["query", "run", "secret"],
)
def test_another_query_run_or_secret_has_noise_of_its_own(noise, other):
    """Two queries on one book, over the same keys and windows, under one secret and run id."""
    assert shared(noise, published(**other)) < Z


def test_steps_and_bins_of_a_series_share_nothing():
    """Every pair of steps, and neighbouring bins, of noise drawn at each step; 28 comparisons."""
    series = dps.release(
        dps.mechanisms.Uniform(epsilon=1, window=4), np.zeros((8, 4000)), secret=SECRET, run_id=RUN
    )
    pairs = [*combinations(series.values, 2), (series.values[:, :-1], series.values[:, 1:])]
    found = [np.corrcoef(np.ravel(a), np.ravel(b))[0, 1] for a, b in pairs]

    assert max(abs(r) for r in found) * math.sqrt(4000) < 5.7
    held = dps.release(
        dps.mechanisms.Sample(epsilon=1, window=4), np.zeros((2, 4000)), secret=SECRET, run_id=RUN
    ).values
    assert np.corrcoef(*held)[0, 1] * math.sqrt(4000) > 5.7  # control: a held step is the same
