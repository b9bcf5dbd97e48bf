"""What is predicted of other settings is what runs with these settings publish."""

from dataclasses import replace
from fractions import Fraction

import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.explanation.alternatives import alternatives, why_in_words, with_changes
from dpstream.query.noise_plan import plan_query
from tests.support.fixed import SECRET
from tests.support.runs import CHOOSING_ALL, query, table

ASKED = query(aggregates=(dps.Count("clicks"),), max_groups_contributed=4)
SETTINGS = {
    "as it is": {},
    "max_groups_contributed = 2": {"max_groups_contributed": 2},
    "max_rows_per_group = 4": {"max_rows_per_group": 4},
    "last_budget = 0.4": {"last_budget": Fraction(2, 5)},
    "report_bias = FALSE": {"report_bias": False},
    "epsilon = 16": {"epsilon": 16},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_predicted_is_published(setting):
    """The error bars of the last release of a run, and its threshold."""
    (told,) = (one for one in alternatives(ASKED) if one.setting == setting)
    changed = with_changes(ASKED, SETTINGS[setting])
    longest = max(changed.schedule.lengths)
    assert told.threshold == plan_query(changed).window(longest).thresholds[-1]
    last = [t for t in dps.run(changed, source=table(3000), secret=SECRET) if len(t)][-1]

    assert told.noise == pytest.approx(last["clicks_stddev"][0].as_py(), rel=1e-6)


def test_what_counts_of_a_large_unit():
    """Of one with twice the groups and twice the rows in each."""
    kept = {one.setting: one.kept for one in alternatives(ASKED)}

    assert kept["as it is"] == 0.25
    assert kept["max_groups_contributed = 8"] == kept["max_rows_per_group = 4"] == 0.5
    assert kept["max_groups_contributed = 2"] == 0.125
    assert "as it is" in why_in_words(alternatives(ASKED))


def test_all_counts_where_there_is_one_group():
    """No unit can have two."""
    one = dps.Query(privacy_unit_column="user", epsilon=1, max_groups_contributed=1)

    assert {told.kept for told in alternatives(one)} == {1.0}


def test_bounds_that_are_chosen_are_those_of_the_first_periods():
    """With their own clamps; a query through a mechanism is refused."""
    first = replace(CHOOSING_ALL, epsilon=8)
    plan = plan_query(first.starting(0))
    (told, *_) = alternatives(first)
    bounded = plan.query.with_bounds(plan.query.first_bounds)

    assert told.noise == pytest.approx(alternatives(bounded)[0].noise)
    series = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY
             OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 6, mechanism = 'spas',
                      privacy_unit_column = user, public_groups = ('a', 'b'),
                      start = '2024-05-01', end = '2024-05-02', time_column = ts)
             page, COUNT(*) AS n, window_start
           FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' HOUR) GROUP BY page, window_start"""
    )
    with pytest.raises(InvalidParameter, match="dpstream compare"):
        alternatives(series)
