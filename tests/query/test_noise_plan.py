"""How much noise a query needs: sensitivities, shares, thresholds."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import delta_of
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum
from dpstream.query.noise_plan import NoisePlan, plan_query
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from tests.counting.matrices import dense

ALL = (
    Count("n"),
    CountUnits("u"),
    Sum("s", column="x", contribution_bounds_per_row=(-2, 5), quantum=1),
    Avg("m", column="x", contribution_bounds_per_row=(0, 4), quantum=1),
)


def query_of(**facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "epsilon": 2,
        "delta": 1e-6,
        "max_groups_contributed": 3,
        "time_column": "ts",
        "start": "2024-01-01",
        "end": "2024-01-03",
    }
    return Query(**common | facts)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, None])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("per_group", [1, 2, 3])
def test_sensitivities_are_those_of_the_worst_unit(rows, groups, per_group):
    """Over every way to spread a unit's rows over its groups, each with its worst values."""
    query = query_of(
        aggregates=ALL,
        max_rows_contributed=rows,
        max_groups_contributed=groups,
        max_rows_per_group=per_group,
    )
    most = groups * per_group if rows is None else rows
    spreads = [
        spread
        for spread in itertools.product(range(per_group + 1), repeat=groups)
        if sum(spread) <= most
    ]
    squares = {
        "rows": max(sum(n**2 for n in spread) for spread in spreads),
        "units": max(sum(n > 0 for n in spread) for spread in spreads),
    }
    found = dict(zip(query.measures, plan_query(query).sensitivities, strict=False))
    kinds = {measure.kind for measure in found}
    assert kinds == {"units", "value"} | ({"rows"} if not query.one_row else set())
    for measure, sensitivity in found.items():
        if measure.kind == "value":
            values = range(int(measure.lo), int(measure.hi) + 1)
            far = max(abs(value - measure.middle) for value in values)
            square = squares["rows"] * far**2
        else:
            square = squares[measure.kind]
        assert 0 <= float(sensitivity**2 - square) < 1e-6


def test_the_shares_add_up_and_the_whole_keeps_the_promise():
    """mu^2 over columns, plus the tail and float error, within (epsilon, delta)."""
    plan = plan_query(query_of(aggregates=ALL, max_rows_per_group=2, every="6 hours"))
    calibrated = plan.calibrated
    mu_squared, slack = calibrated.mu_squared, plan.delta_slack
    spent = delta_of(epsilon=2, mu_squared=mu_squared, delta_slack=slack, error=calibrated.error)

    assert len(plan.query.measures) == 4
    assert len(plan.shares) == 4 + len(plan.query.totals)
    assert sum(plan.shares) <= calibrated.mu_squared
    assert float(sum(plan.shares)) == pytest.approx(float(calibrated.mu_squared), rel=1e-9)
    assert spent <= plan.query.delta
    more = mu_squared * Fraction(102, 100)
    assert delta_of(epsilon=2, mu_squared=more, delta_slack=slack) > plan.query.delta
    for releases in plan.query.schedule.lengths:
        window = plan.window(releases)
        _, encoder = dense(window.process)
        norm_ = np.linalg.norm(encoder, axis=0).max()
        used = sum(
            (float(s) * norm_ / sigma) ** 2
            for s, sigma in zip(
                plan.sensitivities, window.sigmas + plan.totals(releases).sigmas, strict=True
            )
        )
        assert used <= float(calibrated.mu_squared) * (1 + 1e-12)
        assert used == pytest.approx(float(calibrated.mu_squared), rel=1e-6)


@pytest.mark.parametrize("early", [0, 7])
def test_thresholds_leave_the_tail_to_a_units_own_keys(early):
    """mu + 1 + ceil(z std + 1/2), the union over a unit's keys and releases within the tail."""
    query = query_of(every="6 hours", pre_threshold=early, selection_share=Fraction(1, 4))
    plan = plan_query(query)
    window = plan.window(8)
    ideal = window.sigmas[0] * window.process.error()
    z = norm.isf(2.5e-7 / 3 * np.array([*[1 / 14] * 7, 1 / 2]))  # half of it for the last

    assert plan.delta_slack == query.delta / 4
    assert window.pre_threshold == early
    assert window.thresholds.tolist() == (early + 1 + np.ceil(z * ideal + 0.5)).tolist()
    # a unit alone in a key above `early` others: rounded noise must pass threshold - early - 1
    crossing = norm.sf((window.thresholds - early - 1 - 0.5) / ideal)
    assert 3 * crossing.sum() <= float(plan.delta_slack)
    assert (np.diff(window.thresholds[:-1]) >= 0).all()


def test_the_default_pre_threshold_costs_two_percent():
    """Noise is spared for rare keys; the threshold rises by as much, and no more."""
    plan = plan_query(query_of(epsilon=Fraction(1, 10), every="6 hours"))
    window, bare = (
        plan.window(8),
        NoisePlan(query_of(epsilon=Fraction(1, 10), every="6 hours", pre_threshold=0)).window(8),
    )
    assert window.pre_threshold >= 1
    raised = window.thresholds - bare.thresholds
    assert (raised == window.pre_threshold).all()
    assert window.pre_threshold <= 0.02 * bare.thresholds[-1]


def test_public_keys_need_no_tail():
    """All of delta is for noise, and there is less of it."""
    private, public = (
        plan_query(query_of(public_groups=keys, every="6 hours")) for keys in (None, ["a", "b"])
    )
    assert private.delta_slack == private.query.delta / 2
    assert public.delta_slack == 0
    assert public.window(8).public
    assert public.calibrated.mu_squared > private.calibrated.mu_squared
    assert public.window(8).sigmas[0] < private.window(8).sigmas[0]
    assert plan_query(query_of(keys=())).delta_slack == 0  # one group, and everybody knows it


def test_deviations_include_rounding():
    """sigma times the counter's row norms, and a twelfth of a grid step squared."""
    window = plan_query(query_of(aggregates=ALL, every="6 hours")).window(8)
    assert window.stddevs.shape == (3, 8)
    for sigma, found in zip(window.sigmas, window.stddevs, strict=True):
        assert found == pytest.approx(np.sqrt((sigma * window.process.error()) ** 2 + 1 / 12))


def test_each_window_has_the_noise_of_its_own_releases():
    """A day with one hour more has its own counter, and its own threshold."""
    query = query_of(
        start="2024-10-26",
        end="2024-10-29",
        window=Tumble("1 day"),
        every="1 hour",
        time_zone="Europe/Rome",
    )
    plan = plan_query(query)
    assert query.schedule.lengths == [25, 24]
    long, usual = plan.window(25), plan.window(24)
    assert long.process.steps == 25
    assert len(usual.thresholds) == 24
    assert long.sigmas[0] > usual.sigmas[0]
    assert [releases for releases, _ in plan.matrices] == [25, 24]


def test_the_terms_name_what_is_protected():
    """Users within a period, for the book's reader."""
    plan = plan_query(query_of(privacy_unit_period="1 day"))
    terms = plan.terms()
    assert (terms.unit, terms.measure) == ("user", "mu_squared")
    assert terms.total >= plan.calibrated.mu_squared
    assert "'user'" in terms.describe() or "'user'" in terms.change


def test_a_grid_that_nobody_chose_gives_way_to_floats():
    """Many releases and groups make it coarser; one that was chosen is kept, or refused."""
    many = {"every": "30 minutes", "max_groups_contributed": 300}
    free = Sum("s", column="x", contribution_bounds_per_row=(0, 9_000))
    found = plan_query(query_of(aggregates=(free,), **many)).query.aggregates[0]
    chosen = Sum("s", column="x", contribution_bounds_per_row=(0, 9_000), quantum=free.quantum)

    assert found.quantum > free.quantum
    assert (found.hi / found.quantum).denominator == 1
    with pytest.raises(InvalidParameter, match="coarser"):
        plan_query(query_of(aggregates=(chosen,), **many))
