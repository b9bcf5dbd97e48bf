"""The bench of several sets of keys: what it measures, and that it reaches its targets."""

from benchmarks import rollup
from dpstream.query.noise_plan import plan_query


def test_every_figure_has_less_error_than_it_was_measured_with():
    """In both shapes of sets, as said and as found; totals far less than parts added up."""
    found = rollup.measure(quick=True, progress=lambda *_: None)
    rows = {(row["sets"], row["set"]): row for row in found.rows}

    assert len(rows) == 4 + 8
    assert all(target["reached"] for target in found.targets)
    assert all(row["said"] < row["before"] for row in rows.values())
    assert rows["CUBE", "(country, page, device)"]["ratio"] < 0.87
    assert rows["ROLLUP", "()"]["parts_added_up"] > 8 * rows["ROLLUP", "()"]["said"]


def test_the_noise_before_is_that_of_a_quarter_of_the_budget():
    """Four sets share it alike: twice the noise of a query by one of them."""
    query = rollup.query_of(grouping_sets=rollup.SETS["ROLLUP"])
    alone = plan_query(rollup.query_of()).window(1).stddevs[0, 0]

    assert abs(plan_query(query).window(1).stddevs[0, 0] / alone - 2) < 0.01
