"""Leaves, edges and ranks of quantiles, and what is refused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.group_by.cell_sums import CellSums
from dpstream.privacy.accounting.curves import choice_mu_above
from dpstream.privacy.sensitivity import group_by_change, rank_change
from dpstream.query.noise_plan import plan_query
from dpstream.query.quantiles import FRACTION, Histogram, Quantile

BOUNDS = {"column": "x", "contribution_bounds_per_row": (0, 8)}


def query(*aggregates, **facts):
    common = {"privacy_unit_column": "user", "epsilon": 1, "delta": 1e-6}
    common |= {"max_groups_contributed": 3}
    return dps.Query(**common | facts, aggregates=aggregates)


def test_a_value_lies_in_the_leaf_that_begins_at_or_below_it():
    """Outside values are clamped; NULL (NaN here) is in no leaf."""
    cells = Quantile("q", q=0.5, leaves=4, **BOUNDS).cells
    values = np.array([-1, 0, 1.9, 2, 7.99, 8, 99, np.nan])

    assert cells.edges.tolist() == [0, 2, 4, 6, 8]
    assert cells.on_grid(values).tolist() == [0, 0, 0, 1, 3, 3, 3, -1]
    places = np.array([1 << FRACTION, (1 << FRACTION) * 3 // 2, 4 << FRACTION])
    assert cells.value_at(places).tolist() == [2, 3, 8]


def test_geometric_edges_grow_by_one_factor():
    about = {"column": "x", "contribution_bounds_per_row": (1, 16), "edges": "geometric"}

    np.testing.assert_allclose(
        Quantile("q", q=0.5, leaves=4, **about).cells.edges, [1, 2, 4, 8, 16], rtol=1e-15
    )


def test_edges_that_are_not_a_power_of_two_leave_the_last_leaves_empty():
    made = Quantile("q", column="x", q=0.5, edges=[0, 1, 5, 20])

    assert (made.lo, made.hi, made.leaves, made.cells.depth) == (0, 20, 3, 2)
    assert made.cells.edges.tolist() == [0, 1, 5, 20, 20]
    assert made.cells.on_grid(np.array([99.0])).tolist() == [2]


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_ranks_are_sums_over_the_path(depth, seed):
    """F(edge) = x N + sum of a c over the path, with the weights that error bars are made of."""
    rng = np.random.default_rng(seed)
    leaves = rng.integers(0, 9, 1 << depth)
    cells = Quantile("q", q=0.5, leaves=1 << depth, **BOUNDS).cells
    for node in range(1, 1 << depth):
        level = node.bit_length() - 1
        x = (2 * (node - (1 << level)) + 1) / (2 << level)
        rank, weights = x * leaves.sum(), cells.rank_weights[node]
        for above in range(level + 1):
            at = node >> (level - above)
            size = len(leaves) >> above
            first = (at - (1 << above)) * size
            left, right = np.split(leaves[first : first + size], 2)
            rank += np.sqrt(weights[above]) * (left.sum() - right.sum())
        assert rank == pytest.approx(leaves[: round(x * len(leaves))].sum())
        assert not weights[level + 1 :].any()


def test_haar_ranks_have_the_noise_that_is_told():
    """256 leaves, mu = 1, one release: 2.4 rows on average over the edges of leaves (2.3 between
    them, where squared weights sum up to h/12); at most h/9 + 1/6."""
    cells = Quantile("q", q=0.5, **BOUNDS).cells
    squares = cells.rank_weights[1:].sum(axis=1)

    assert np.sqrt(8 * squares.mean()) == pytest.approx(2.41, abs=0.01)
    assert 8 / 9 < squares.max() < 8 / 9 + 1 / 6


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2**31))
def test_a_unit_moves_each_level_by_no_more_than_a_sum(each, groups, rows, seed):
    """Rows of a unit in any leaves and groups: the squares of a level stay below S^2, and rows in
    one leaf reach it."""
    rng = np.random.default_rng(seed)
    asked = query(
        Quantile("q", q=0.5, leaves=8, mechanism="tree", **BOUNDS),
        max_groups_contributed=groups,
        max_rows_per_group=each,
        max_rows_contributed=rows,
    )
    plan, bounds = plan_query(asked), asked.bounds
    most = min(bounds.rows, bounds.groups * bounds.rows_per_group)
    at = np.arange(most) // bounds.rows_per_group
    for leaves in (rng.integers(0, 8, most), np.full(most, 5)):
        for number, level in enumerate(asked.levels):
            moved = np.zeros((bounds.groups, 1 << level.level))
            sign = 1 - 2 * (leaves >> (2 - level.level) & 1)
            np.add.at(moved, (at, leaves >> (3 - level.level)), sign)
            change = plan.sensitivities[len(asked.measures) + number]
            assert (moved**2).sum() <= change**2 * (1 + 1e-12)
    assert float(change**2) == pytest.approx((moved**2).sum())
    assert change == group_by_change(
        rows=bounds.rows, per_group=bounds.rows_per_group, groups=bounds.groups, largest=1
    )


def test_levels_share_what_one_aggregate_is_given():
    """All columns together are the charge; a quantile of 12 levels costs no more than one of 2."""
    for leaves in (4, 4096):
        tree = Quantile("q", q=[0.1, 0.9], leaves=leaves, mechanism="tree", **BOUNDS)
        plan = plan_query(query(dps.Count("n"), tree))
        asked = plan.query
        first, depth = len(asked.measures), len(asked.levels)
        whole, levels = sum(plan.shares), sum(plan.shares[first : first + depth])
        assert whole <= plan.calibrated.mu_squared < whole * 1.0001
        of_rows = plan.shares[asked.measures.index(asked.aggregates[1].rows)]
        of_count = plan.shares[0]
        assert float(levels + of_rows) == pytest.approx(float(of_count), rel=1e-4)


def test_quantiles_of_one_column_share_their_levels():
    pair = [Quantile(name, q=q, **BOUNDS) for name, q in (("a", 0.5), ("b", 0.9))]

    assert len(query(*pair).levels) == len(query(pair[0]).levels) == 8
    assert len(query(pair[0], Quantile("c", q=0.5, leaves=4, **BOUNDS)).levels) == 10


ONCE = {"public_groups": [1, 2], "keys": ("key",)}


def kind_of(asked):
    return type(plan_query(asked).query.aggregates[0]).__name__


def test_a_lone_quantile_of_few_releases_is_chosen():
    """By predicted error; never where an interval is asked for, or for the smallest value."""
    median = Quantile("q", q=0.5, **BOUNDS)
    day = {"time_column": "t", "start": "1970-01-01", "end": "1970-01-02"}
    choice, tree = "ExponentialQuantile", "Quantile"
    assert kind_of(query(median, **ONCE)) == choice
    assert kind_of(query(median, keys=("key",))) == choice
    assert kind_of(query(median, **ONCE, **day, every="6 hours")) == choice
    assert kind_of(query(median, **ONCE, **day, every="15 minutes")) == tree
    assert kind_of(query(median, **ONCE, confidence=0.9)) == tree
    assert kind_of(query(Quantile("q", q=0, **BOUNDS), **ONCE)) == tree
    assert kind_of(query(median.by("tree"), **ONCE)) == tree
    many = Quantile("q", q=[n / 20 for n in range(1, 20)], **BOUNDS)
    assert kind_of(query(many, **ONCE)) == tree
    assert kind_of(query(many.by("exponential"), **ONCE)) == choice


def test_a_choice_costs_what_it_is_given():
    """Choices in all groups and at all releases come to its part of mu^2, and hardly less."""
    day = {"time_column": "t", "start": "1970-01-01", "end": "1970-01-02", "every": "8 hours"}
    asked = query(
        Quantile("q", q=0.9, **BOUNDS), dps.Count("n"), max_rows_per_group=2, **ONCE, **day
    )
    plan = plan_query(asked)
    (column,) = (n for n, c in enumerate(plan.columns) if getattr(c, "share", None) is not None)
    epsilon = plan.window(3).slopes[column] * 2 * plan.sensitivities[column]
    spent = 3 * 2 * choice_mu_above(epsilon) ** 2  # triggers x groups that can be reached
    assert plan.sensitivities[column] == 2 * 9  # two rows of a unit, in tenths
    assert 0.999 * plan.shares[column] < spent <= plan.shares[column]
    assert sum(plan.shares) <= plan.calibrated.mu_squared


@given(st.data())
def test_a_unit_moves_the_odds_of_leaves_by_no_more_than_a_choice_costs(data):
    """Exact odds of all leaves with and without K rows of a unit: their logarithms differ within an
    interval of epsilon, for any rows of others; without the K they would not."""
    count, each = 5, data.draw(st.integers(1, 3))
    share = data.draw(st.sampled_from([Fraction(1, 2), Fraction(19, 20), Fraction(1, 3)]))
    cells = Quantile("q", q=share, column="x", edges=range(count + 1)).by_choice.cells
    leaves = st.integers(0, count - 1)
    others = data.draw(st.lists(leaves, max_size=12))
    unit = data.draw(st.lists(leaves, min_size=1, max_size=each))
    group, which = np.array([[3, 4]], np.uint64), np.zeros(count, np.int64)
    gaps = []
    for rows in (others, others + unit):
        sums = CellSums(cells)
        known = np.array(rows, np.int64)
        sums.add(np.repeat(group, len(rows), axis=0), known, np.arange(len(rows)))
        gaps.append(sums.occupied(group).gaps(share, which, np.arange(count)))
        ranks = np.concatenate([[0], np.cumsum(np.bincount(known, minlength=count))])
        target = share * len(rows)
        for leaf in range(count):
            exact = max(ranks[leaf] - target, target - ranks[leaf + 1], 0)
            assert gaps[-1][leaf] == exact * share.denominator
    moved = gaps[1] - gaps[0]
    most = rank_change(share, per_group=each)
    assert np.abs(moved).max() <= most
    assert gaps[0].min() == gaps[1].min() == 0


def test_a_unit_may_move_the_odds_by_all_that_a_choice_costs():
    """The bound is attained: one leaf gains what another loses."""
    sums = CellSums(Quantile("q", q=0.5, column="x", edges=range(5)).by_choice.cells)
    group, rows = np.array([[3, 4]], np.uint64), np.array([0] * 5 + [1] + [2] * 5 + [3])
    found = []
    for count in (11, 12):
        sums = CellSums(sums.cells)
        sums.add(np.repeat(group, count, axis=0), rows[:count], np.arange(count))
        found.append(sums.occupied(group).gaps(Fraction(1, 2), np.zeros(4, int), np.arange(4)))
    moved = found[1] - found[0]
    assert moved.max() - moved.min() == 2 * rank_change(Fraction(1, 2), per_group=1)


BAD = {
    "must be one of auto, tree, exponential": {"mechanism": "median"},
    "between 0 and 1, and 'q' asks": {"q": 1, "mechanism": "exponential"},
    "q of 'q' must lie between 0 and 1": {"q": 1.5},
    "q of 'q' must be a finite number": {"q": float("nan")},
    "q of 'q' must be a number": {"q": None},
    "needs 1 to 101 quantiles": {"q": []},
    "must rise; got": {"q": [0.9, 0.5]},
    "needs lo < hi": {"contribution_bounds_per_row": (8, 0)},
    "hi must be a finite number": {"contribution_bounds_per_row": (0, float("inf"))},
    "lo must be a number": {"contribution_bounds_per_row": (None, 2)},
    "needs contribution_bounds_per_row": {"contribution_bounds_per_row": None},
    "power of two from 2 to 4096": {"leaves": 100_000},
    "power of two": {"leaves": 100},
    "need a lower bound above 0": {"edges": "geometric"},
    "must be numbers that rise": {"edges": "cubic"},
    "which say the bounds": {"edges": [0, 1, 2, 3]},
    "edges of 'q' must rise": {"edges": [0, 2, 1], "contribution_bounds_per_row": None},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gets_a_word(words):
    with pytest.raises(InvalidParameter, match=words):
        Quantile("q", **BOUNDS | {"q": 0.5} | BAD[words])


def test_bad_edges_of_a_histogram_get_a_word():
    for edges, words in (
        ([0, 1], "needs 3 to 1025 edges"),
        ([0, 5, 5], "must rise"),
        (7, "must be numbers that rise"),
        ([0, float("inf"), 2], "finite"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            Histogram("h", column="x", edges=edges)


@pytest.mark.parametrize("facts", [{"min_change": 1.0}, {"strategy": "sqlp"}])
def test_what_does_not_go_together_is_refused(facts):
    with pytest.raises(InvalidParameter, match="is not for quantiles and histograms such as 'q'"):
        query(Quantile("q", q=0.5, **BOUNDS), **facts)
