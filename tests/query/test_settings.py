"""Settings that nobody gives follow from public facts, are told, and give way to what is given."""

from fractions import Fraction

import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.counting.buffered import BufferedLinearToeplitz, LastTwice
from dpstream.errors import StateError
from dpstream.explanation.explain_query import explain
from dpstream.query.aggregates import Count, CountUnits
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.query.settings import USUAL_GROUPS, part_of_last
from dpstream.query.windows import Tumble
from tests.support.fixed import SECRET

DAY = {
    "time_column": "ts", "start": "2024-05-01", "end": "2024-05-02",
    "window": Tumble("1 day"), "every": "15 minutes",
}  # fmt: skip
SQL = """SELECT WITH DIFFERENTIAL_PRIVACY
         OPTIONS (epsilon = 6, delta = 1e-9, privacy_unit_column = user {}) page, {}
         FROM clicks GROUP BY page"""


def asked(**facts):
    return Query(
        **{"privacy_unit_column": "user", "keys": ["page"], "epsilon": 6, "delta": 1e-9} | facts
    )


def test_nothing_but_epsilon_and_delta():
    """A unit for ever counts in the usual number of groups; the rest follows from the schedule."""
    query = asked(**DAY)

    assert query.bounds.groups == USUAL_GROUPS
    assert set(query.planned) == {"max_groups_contributed", "last_budget", "debias"}
    assert (query.last_budget, query.debias) == (Fraction(2, 5), "groups")
    assert not query.candidates
    given = asked(**DAY, max_groups_contributed=16, last_budget="2/5", debias="groups")
    assert given == query
    assert given.facts() == query.facts()
    assert given.planned == ()


def test_a_query_that_gives_its_bound_is_as_it_was():
    """Nothing else is chosen beside a number."""
    query = asked(**DAY, max_groups_contributed=16)

    assert (query.last_budget, query.debias, query.planned) == (Fraction(1, 4), None, ())


def test_what_is_given_beside_no_bound_stays():
    """One by one."""
    query = asked(**DAY, last_budget=None, debias=None)

    assert (query.last_budget, query.debias) == (None, None)
    assert query.planned == ("max_groups_contributed",)
    assert asked(**DAY, debias="global").debias == "global"
    assert asked(**DAY, report_bias=False).debias is None
    assert (
        asked(aggregates=[dps.Avg("m", column="x", contribution_bounds_per_row=(0, 1))]).debias
        is None
    )


def test_periods_choose_their_bounds_and_have_the_rest_chosen():
    """Of each period's bounds the plan has the same settings."""
    query = asked(**DAY, privacy_unit_period="1 day")
    bounded = query.with_bounds(query.first_bounds)

    assert query.choose_groups
    assert (query.last_budget, query.debias) == (Fraction(2, 5), "groups")
    assert (bounded.last_budget, bounded.debias) == (Fraction(2, 5), "groups")
    assert "each period has a bound of its own" in explain(query).text()


@pytest.mark.parametrize("releases", [3, 4, 8, 24, 100])
def test_the_part_of_the_last_release_is_the_best_of_all(releases):
    """Of the product of the variances of the last release and of those before, within a twentieth:
    by the counter that runs."""
    process = BufferedLinearToeplitz(steps=releases)

    def product(part):
        twice = process if part is None else LastTwice(process=process, share=part)
        norm = twice.column_norm()
        return (norm * twice.row_norm(releases)) ** 2 * norm**2

    parts = [None, *(Fraction(n, 20) for n in range(1, 20))]
    best = min(range(20), key=lambda n: product(parts[n]))
    chosen = parts.index(part_of_last(releases))

    assert abs(chosen - best) <= 1


def test_sql_chooses_as_python_does():
    """And gives no column an error bar that it does not have: computed ones keep theirs."""
    query = dps.sql(SQL.format("", "COUNT(*) AS n"))
    ratio = dps.sql(SQL.format("", "COUNT(*) AS n, COUNT(DISTINCT user) / 2 AS half"))
    none = dps.sql(SQL.format(", debias = 'none'", "COUNT(*) AS n"))

    assert (query.bounds.groups, query.debias, query.last_budget) == (USUAL_GROUPS, "groups", None)
    assert ratio.debias is none.debias is None
    assert plan_query(query).query == query


def test_explain_says_what_was_chosen():
    """By name, and by what."""
    told = explain(asked(**DAY)).text()

    for words in ("nobody gave max_groups_contributed", "last_budget = 0.4", "debias = 'groups'"):
        assert words in told
    assert "nobody gave" not in explain(asked(**DAY, max_groups_contributed=4)).text()


def test_a_run_that_has_begun_goes_on_as_it_is(tmp_path):
    """With the settings that it began with, which a version before chose; a query that gives
    others is refused with words."""
    days = {**DAY, "end": "2024-05-03", "privacy_unit_period": "1 day", "every": "6 hours"}
    rows = pa.table(
        {
            "user": [n // 4 for n in range(4000)],
            "page": [f"/{n % 7}" for n in range(4000)],
            "ts": [f"2024-05-0{1 + n // 2000}T{n % 24:02d}:30:00" for n in range(4000)],
        }
    )
    before = asked(**days, last_budget="1/4", debias=None)
    facts = {"source": rows, "secret": SECRET}
    whole = list(dps.run(before, state=tmp_path / "whole", **facts))
    broken = iter(dps.run(before, state=tmp_path / "broken", **facts))
    first = [next(broken) for _ in range(3)]
    broken.close()
    with pytest.raises(StateError, match=r"last_budget was 0\.25 and is now 0\.1"):
        list(dps.run(asked(**days, last_budget="1/10"), state=tmp_path / "broken", **facts))
    rest = list(dps.run(asked(**days), state=tmp_path / "broken", **facts))

    assert asked(**days).debias == "groups"
    assert [len(each) for each in first] == [len(each) for each in whole[:3]]
    assert {each["count_stddev"][0]
            for each in rest if len(each)} == {
        each["count_stddev"][0] for each in whole[-len(rest):] if len(each)
    }  # fmt: skip


def test_a_run_whose_plan_left_out_what_is_made_up_for_goes_on(tmp_path):
    """The share of rows was left out with it, since floats had no room for its totals."""
    days = {**DAY, "end": "2024-05-05", "epsilon": 0.5, "delta": 1e-6}
    del days["every"]
    aggregates = [Count("n"), dps.Sum("s", column="value", contribution_bounds_per_row=(0, 10))]
    rows = pa.table({"user": ["ann"], "page": ["/"], "value": [3.0], "ts": ["2024-05-01T05:00:00"]})
    facts = {"source": rows, "state": tmp_path / "state", "secret": SECRET}
    query = asked(**days, aggregates=aggregates)
    begun = iter(dps.run(query, **facts))
    next(begun)
    begun.close()

    assert query.debias == "groups"
    assert plan_query(query.starting(0)).query.debias is None
    assert list(dps.run(query, **facts))


def test_only_counts_and_sums_are_made_up_for():
    """COUNT(DISTINCT user) says how many were counted."""
    assert asked(**DAY, aggregates=[CountUnits("n")]).debias is None
    assert asked(**DAY, aggregates=[CountUnits("n"), Count("m")]).counts_elsewhere
