"""DPI, noisy totals and SQL through mechanisms: what their samplers run, and what they catch.

A row that is shipped is rejected by chance once in 1,000 audits at worst (its confidence); here
secrets are fixed, and the tests below ask for an error of 1e-6 instead.
"""

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.lower_bounds import lower_bound
from dpstream.audit.mechanism_targets import RunsFromRows, UserRows
from dpstream.audit.query_samplers import QueryRuns, Scenario, scenario_table, series_query
from dpstream.audit.query_targets import series_controls, series_targets
from dpstream.audit.report import catalogue, controls, shipped
from dpstream.audit.targets import secret_of
from dpstream.engines.query_run import EngineOptions
from dpstream.mechanisms.release import bounded_counts
from dpstream.query.noise_plan import plan_query
from tests.support.fixed import SECRET

ERROR = 1e-6
CAUGHT = {
    "dpi_charged_once": 400,
    "dpi_gaps_of_data": 150,
    "dpi_rows_unbounded": 1_200,
    "noise_below_reach": 16_000,
    "months_counted_at_the_start": 8_000,
    "months_all_as_the_shortest": 40_000,
    "bounded_before_join": 1_000,
    "registry_not_bounded": 1_000,
    "subquery_over_stream": 1_000,
    "inner_rows_of_others": 1_000,
    "inner_rows_charged_once": 20_000,
    "sessions_over_midnight": 4_000,
    "cohorts_charged_once": 20_000,
    "net_results_published_twice": 20_000,
    "debias_units_not_capped": 500,
    "debias_noise_for_one_row": 1_000,
    "sql_unit_enters_again": 16_000,
    "sql_w_forgotten": 4_000,
    "bounds_sum_not_cut": 200,
}
"""Runs that show it, of each control."""
SOUND = {
    "dpi": 1_200,
    "dpi_adaptive": 1_200,
    "dpi_rows": 1_200,
    "latched_months": 8_000,
    "latched_chosen": 300,
    "latched_chosen_clamps": 300,
    "latched_chosen_rows": 300,
    "latched_join": 1_000,
    "latched_registry": 1_000,
    "latched_subquery": 1_000,
    "latched_inner_rows": 1_000,
    "latched_sessions": 4_000,
    "latched_cohorts": 20_000,
    "latched_funnel": 20_000,
    "latched_debias_public_keys": 1_000,
    "sql_w_event": 16_000,
    "bounds": 100,
}
"""As many runs of the forms that the controls stand on."""


@pytest.mark.audit
@pytest.mark.parametrize("name", CAUGHT)
def test_a_control_is_caught(name):
    """Few runs will do, at an error of 1e-6."""
    assert found(name, CAUGHT[name]) > controls()[name]().epsilon


@pytest.mark.audit
@pytest.mark.parametrize("name", SOUND)
def test_its_sound_form_is_not(name):
    """The same attack on the form that a control changes stays below its claim."""
    assert found(name, SOUND[name]) < shipped()[name]().epsilon


def found(name, runs):
    """The bound that so many runs of each world show, at an error of 1e-6."""
    target = catalogue()[name]()
    pair = target.pairs[0]
    one, two = (
        target.sample(data, runs, secret_of(f"paths {name} {world}"))
        for world, data in enumerate((pair.one, pair.two))
    )
    claim = {"epsilon": target.epsilon, "delta": target.delta}
    return lower_bound(one, two, error=ERROR, learners=target.learners, **claim).epsilon


@pytest.mark.parametrize("name", series_targets())
def test_sql_can_be_sampled(name):
    """One row per run: the counts of six windows, and which of them repeat an earlier one."""
    target = series_targets()[name]()
    rows = target.sample(target.pairs[0].one, 5, SECRET)

    assert rows.shape == (5, 12)
    assert len(np.unique(rows[:, 0])) > 1
    assert set(np.unique(rows[:, 6:])) <= {0.0, 1.0}


def test_a_sampled_query_is_what_a_session_publishes():
    """The sampler leaves out nothing of the path that users run."""
    target = series_targets()["sql_w_event"]()
    data, options = target.pairs[0].one, target.sample.options
    (sampled,) = target.sample(data, 1, SECRET)
    secret = bytes(4) + SECRET[4:]
    tables = dps.run(
        series_query(options, 1),
        source=scenario_table(data, 1, 1, windows=False),
        secret=secret,
        options=EngineOptions(run_id=secret[:16]),
    )

    assert [table["n"][0].as_py() for table in tables] == sampled[:6].tolist()


def test_the_control_counts_a_late_row_again():
    """Four rows in time and one late: once in the sound path, twice in the control."""
    sound, again = series_targets()["sql_w_event"](), series_controls()["sql_unit_enters_again"]()
    pair = sound.pairs[0]
    moved = [
        (t.sample(pair.one, 1, SECRET) - t.sample(pair.two, 1, SECRET))[0, :6]
        for t in (sound, again)
    ]  # the same addresses have the same noise, so the counts' difference is exact

    assert moved[0].tolist() == [0, 1, 1, 1, 0, 0]
    assert moved[1].tolist() == [0, 2, 2, 2, 0, 0]


def test_the_share_of_rows_kept_is_part_of_what_is_seen():
    """Published beside the counts, so an attacker has it; the second query has other noise.

    So are the noisy number of dropped rows, and that of units that lost more than count. The median
    is 0.004 off on average: more than 0.03 has a probability far below 1e-6; so has a mean of these
    numbers that is 6 of its standard deviations off.
    """
    target = shipped()["latched_debias_public_keys"]()
    assert isinstance(target.sample, QueryRuns)
    data = target.pairs[0].two
    rows = target.sample(data, 300, SECRET)  # more than one query
    offered, kept = 202 + data.again, 202

    totals = plan_query(target.sample.query(300)).totals(1).stddevs[[0, 2], 0]

    assert rows.shape == (300, 3 + 2)
    assert abs(np.median(rows[:, 0]) - kept / offered) < 0.03
    off = (rows[:, 1:3].mean(axis=0) - (data.again, 0)) / (totals / np.sqrt(300))
    assert np.abs(off).max() < 6
    assert (rows[:50] == rows[250:]).all(axis=1).mean() < 0.5


def test_rows_beyond_the_bound_are_in_the_table():
    """Others with a second row, and rows of the target that are later than the rest."""
    data = Scenario(others=((0, 0, 3),), unit=((0, 1), (0, 1, 2)), again=2)
    table = scenario_table(data, 2, 1, windows=False).to_pydict()
    units = [
        sorted(user % 1_000_000 for user in table["user"] if user // 1_000_000 == run)
        for run in (0, 1)
    ]

    assert units == [[0, 0, 1, 1, 2, 2, 3]] * 2
    late = sorted(s - t for s, t in zip(table["seen"], table["ts"], strict=True))
    assert late == [0] * 12 + [2 * 8 * 3600] * 2


def test_rows_of_a_user_are_bounded_before_dpi_sees_them():
    """2,000 rows a slot count as one; unbounded, as all."""
    sample = catalogue()["dpi_rows"]().sample
    assert isinstance(sample, RunsFromRows)
    columns = UserRows(unit=2_000, others=3).columns()
    counts = bounded_counts(**columns, slots=4, domain=2, rows_per_user=1)

    assert counts.tolist() == [[1, 3]] * 4
