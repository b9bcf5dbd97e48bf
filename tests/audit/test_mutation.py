"""Take a fifth of the noise away, in each mechanism in turn: some law must go red."""

import math
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from dpstream.audit.mechanism_samplers import PooledSpend
from dpstream.audit.query_samplers import QueryRuns, Scenario
from dpstream.audit.query_targets import day_query
from dpstream.audit.replay import Changed, Recorder, drive, replay
from dpstream.counting.noise_process import advance_noise
from dpstream.mechanisms import REGISTRY
from dpstream.mechanisms.counters import unbounded
from dpstream.privacy import sensitivity
from dpstream.privacy.amounts import on_grid
from dpstream.query.aggregates import Count, Sum
from dpstream.query.noise_plan import plan_query
from tests.laws.cases import CHOOSING, bins_of, example, neighbours, stream
from tests.laws.test_laws import Z, moments
from tests.support.fixed import SECRET

LESS = Fraction(4, 5)
SENSITIVITIES = [name for name in vars(sensitivity) if name.endswith("_change")]

FORGET = {"BltCounter": {"decays": ()}}  # they belong to a number of steps

every_mechanism = pytest.mark.parametrize("name", sorted(REGISTRY))


class Weak(PooledSpend):
    """Draws with four fifths of the scale that was paid for."""

    def laplace(self, value, *, sensitivity, **asked):
        return super().laplace(value, sensitivity=Fraction(sensitivity) * LESS, **asked)

    def gaussian(self, value, *, sensitivity, **asked):
        return super().gaussian(value, sensitivity=Fraction(sensitivity) * LESS, **asked)

    def choose(self, scores, *, sensitivity, **asked):
        return super().choose(scores, sensitivity=Fraction(sensitivity) * LESS, **asked)

    def respond(self, bucket, *, epsilon, **asked):
        return super().respond(bucket, epsilon=epsilon / LESS, **asked)


def scale_error(mechanism, spend, draws=1200):
    """How far mean |noise| is from what the calls declared, in standard deviations."""
    total = expected = variance = found = 0
    block = stream(mechanism, 30)
    while found < draws:
        recorder = Recorder(spend)
        drive(mechanism, block, recorder)
        noisy = [call for call in recorder.calls if call.kind in ("laplace", "gaussian")]
        for call in noisy:
            scale, mean, second = moments(call, 1.0)
            total += float(np.abs(call.answer - call.value).sum()) / scale
            expected += call.value.size * mean / scale
            variance += call.value.size * (second - mean**2) / scale**2
            found += call.value.size
    return abs(total - expected) / math.sqrt(variance)


def choice_error(mechanism, spend, runs=300):
    """How far the scores of what was chosen are from their mean, in standard deviations."""
    total = variance = 0.0
    for number in range(runs):
        recorder = Recorder(spend)
        drive(mechanism, stream(mechanism, 6, seed=number), recorder)
        for call in recorder.calls:
            if call.kind == "choose":
                slope = float(on_grid(call.amount) / (2 * call.sensitivity))
                exponent = slope * (call.value - call.value.max())
                weights = np.exp(exponent) / np.exp(exponent).sum()
                mean = weights @ exponent
                total += exponent[call.answer] - mean
                variance += weights @ exponent**2 - mean**2
    return abs(total) / math.sqrt(variance)


@every_mechanism
def test_a_fifth_less_than_was_paid_for_turns_the_law_of_scales_red(name):
    """Whole noise passes at a 1e-6 level; four fifths of it do not."""
    mechanism = example(name)
    error = choice_error if name in CHOOSING else scale_error
    if name in CHOOSING:
        mechanism = replace(mechanism, **CHOOSING[name])
    whole = error(mechanism, PooledSpend(SECRET))

    assert whole < Z
    assert error(mechanism, Weak(SECRET)) > Z


def loses_more_than_declared(mechanism):
    """Does the replay of neighbours object?"""
    if hasattr(mechanism, "steps"):  # an impulse at its first step then moves all it can
        mechanism = replace(mechanism, steps=32, **FORGET.get(type(mechanism).__name__, {}))
    block = stream(mechanism, 32)
    recorder = Recorder(PooledSpend(SECRET))
    drive(mechanism, block, recorder)
    for other in neighbours(mechanism, block, 30):
        try:
            found = replay(mechanism, other, recorder.calls, original=block)
        except Changed:
            return True
        if found.violations or found.loss > mechanism.terms().total:
            return True
    return False


@every_mechanism
def test_a_fifth_less_than_the_sensitivity_turns_the_replay_red(name, monkeypatch):
    """The other way to draw too little: to understate how far one unit moves what is measured."""
    assert not loses_more_than_declared(example(name))
    for module in [m for n, m in sys.modules.items() if n.startswith("dpstream.mechanisms")]:
        for change in SENSITIVITIES:
            real = getattr(module, change, None)
            if real is not None:
                monkeypatch.setattr(
                    module, change, lambda *a, real=real, **k: Fraction(real(*a, **k)) * LESS
                )

    unbounded._epoch.cache_clear()
    found = loses_more_than_declared(example(name))
    unbounded._epoch.cache_clear()
    assert found


QUERIES = {
    "latched": {
        "aggregates": (
            Count("n"),
            Sum("s", column="x", contribution_bounds_per_row=(0, 4), quantum=1),
        )
    },
    "sqlp": {"strategy": "sqlp", "aggregates": (Count("n"),)},
}


def spends_more_than_it_pays(query):
    """Add up (sensitivity x column norm / sigma)^2 over the columns, against the charge."""
    plan = plan_query(query)
    for releases in query.schedule.lengths:
        window = plan.window(releases)
        norm = window.process.column_norm()
        parts = zip(plan.sensitivities, window.sigmas, strict=True)
        spent = sum((float(change) * norm / sigma) ** 2 for change, sigma in parts)
        if spent > float(plan.calibrated.mu_squared) * (1 + 1e-9):
            return True
    return False


@pytest.mark.parametrize("name", QUERIES)
def test_a_fifth_less_in_a_plan_is_more_than_the_query_pays_for(name, monkeypatch):
    """The noise of a query's plan costs no more than mu^2; with a fifth less it does."""
    query = day_query(**QUERIES[name])
    assert not spends_more_than_it_pays(query)
    from dpstream.query import noise_plan as plan

    real = plan.sigma_for
    monkeypatch.setattr(plan, "sigma_for", lambda *a, **k: Fraction(real(*a, **k)) * LESS)

    assert spends_more_than_it_pays(query)


def published_error(monkeypatch=None):
    """Variance of what public groups without rows publish, against the plan, in its own errors."""
    if monkeypatch is not None:
        monkeypatch.setattr(
            "dpstream.group_by.perturb.advance_noise",
            lambda p, n, j, s, sigma, d, **k: advance_noise(p, n, j, s, 0.8 * sigma, d, **k),
        )
    runs = 4000
    query = day_query(public_groups=list(range(runs)))  # noise is for as many as can be reached
    values = QueryRuns(query=lambda _: query)(Scenario(), runs, SECRET)
    stddevs = plan_query(query).window(3).stddevs[0]
    ratio = values.var(axis=0) / stddevs**2 - 1
    return np.abs(ratio / math.sqrt(2 / runs)).max()


def test_a_fifth_less_in_what_a_query_draws_turns_the_law_of_scales_red(monkeypatch):
    """What is published has the variance that the plan states; three comparisons at 1e-6."""
    assert published_error() < 5.2
    assert published_error(monkeypatch) > 5.2


def test_every_mechanism_is_tried():
    """The examples of the laws are those of the registry."""
    assert all(bins_of(example(name)) for name in REGISTRY)
