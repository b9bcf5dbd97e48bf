"""Quantiles and histograms, from rows to what is published."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chisquare

import dpstream as dps
from dpstream.audit.query_samplers import run_plan
from dpstream.group_by.cell_sums import CellSums, node_ids
from dpstream.group_by.flow import Flow
from dpstream.privacy.accounting.curves import choice_epsilon
from dpstream.query.noise_plan import plan_query
from dpstream.query.quantiles import Histogram, Quantile

ALL = {"epsilon": 30, "delta": 0.1}  # next to no noise
Z = 5.65  # two-sided false-alarm rate below 2e-8


def query(*aggregates, **facts):
    common = {"privacy_unit_column": "user", "keys": ("key",), "max_groups_contributed": 1}
    common |= {"epsilon": 4, "delta": 1e-3, "report_bias": False}
    return dps.Query(**common | facts, aggregates=aggregates)


def rows(values, keys=0, **more):
    size = len(values)
    keys = np.broadcast_to(np.asarray(keys), size)
    return pa.table({"user": np.arange(size), "key": keys, "x": values} | more)


def published(asked, table, **options):
    return [p.table for _, p in run_plan(plan_query(asked), table, **options)]


SHARES = [0, 0.05, 0.25, 0.5, 0.9, 1]
ABOUT = {"column": "x", "contribution_bounds_per_row": (0, 100)}


@pytest.mark.parametrize("edges", [None, [0, 1, 5, 20, 60, 80, 100], "geometric"])
def test_without_noise_quantiles_are_those_of_the_values(edges):
    """To within a leaf, of any kind; NULL and clamped values are where they belong."""
    rng = np.random.default_rng(1)
    values = np.append(rng.gamma(2, 20, 4000), [-5.0, 300.0])
    about = {"column": "x"} if isinstance(edges, list) else ABOUT
    if edges == "geometric":
        about = about | {"contribution_bounds_per_row": (1, 100)}
    made = Quantile("q", q=SHARES, edges=edges, **about)
    asked = query(made, Histogram("h", column="x", edges=[0, 10, 50, 100]), **ALL)
    table = rows(pa.array([*values.tolist(), None, None]))
    (release,) = published(asked, table)
    (row,) = release.to_pylist()
    truth = np.clip(np.sort(values), float(made.lo), float(made.hi))
    exact = truth[np.minimum((np.array(SHARES) * len(truth)).astype(int), len(truth) - 1)]
    grid = made.cells.edges
    for got, wanted in zip(row["q"], exact, strict=True):
        leaf = made.cells.on_grid(np.array([wanted]))[0]
        assert grid[max(leaf - 1, 0)] <= got <= grid[min(leaf + 2, len(grid) - 1)]
    np.testing.assert_allclose(row["h"], np.histogram(truth, [0, 10, 50, 101])[0], atol=12)


def test_no_two_nodes_of_a_group_have_one_id():
    """Nor two groups, as far as 128 random bits go."""
    ids = np.random.default_rng(2).integers(0, 2**64, (50, 2), np.uint64)
    made = node_ids(np.repeat(ids, 4096, axis=0), np.tile(np.arange(4096), 50))

    assert len(np.unique(made, axis=0)) == len(made)


def test_sums_of_nodes_are_left_less_right():
    cells = Quantile("q", q=0.5, leaves=8, **ABOUT).cells
    sums, group = CellSums(cells), np.array([[7, 9]], np.uint64)
    leaves = np.array([0, 0, 1, 5, 7, -1])
    sums.add(np.repeat(group, 6, axis=0), leaves, np.arange(6))
    counts = np.bincount(leaves[:-1], minlength=8)
    for node in range(1, 8):
        level = node.bit_length() - 1
        first = (node - (1 << level)) * (8 >> level)
        left, right = np.split(counts[first : first + (8 >> level)], 2)
        row = sums.table.rows(node_ids(group, np.array([node])))
        assert sums.table.numbers[row[0], 0] == left.sum() - right.sum()


class Normals:
    """A stream of noise for tests."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def normals(self, ids, *, release, purpose, each=1):
        return self.rng.normal(size=(len(ids), each))


def test_a_node_that_is_looked_at_late_has_the_noise_of_one_begun_at_once():
    """Its first look is decided by another node's noise, in 20,000 groups: from then on variances
    and covariances between releases are those of the whole process, within 5.65 standard errors.
    Control: a process begun at the first look is far away."""
    made = Quantile("q", q=0.5, leaves=4, **ABOUT)
    asked = query(made, public_groups=[0], every="3 hours", **DAY)
    plan = plan_query(asked).window(8)
    column, size = len(asked.measures), 20_000
    sums, groups = CellSums(made.cells), np.arange(2 * size, dtype=np.uint64).reshape(-1, 2)
    begun, streams = np.full(size, 99), [Normals(1), Normals(2)]
    paths = np.full((8, size), np.nan)
    for release in range(1, 9):
        place = (release, plan, column)
        root = sums.noisy(0, groups, np.ones(size, int), *place, streams[0])
        begun = np.where(root > 0, np.minimum(begun, release), begun)
        looked = begun <= release
        nodes = np.full(looked.sum(), 2)
        paths[release - 1, looked] = sums.noisy(1, groups[looked], nodes, *place, streams[1])
    basis, state = np.zeros((8, 8)), np.zeros((8, plan.process.width))
    for step in range(8):
        basis[step] = plan.process.advance(state, step + 1, np.eye(8)[step])
    expected = basis @ basis.T * plan.sigmas[column + 1] ** 2 + np.eye(8) / 12
    worst = 0.0
    for one in range(8):
        for two in range(one, 8):
            both = paths[one] * paths[two]
            both = both[~np.isnan(both)]
            error = Z * both.std() / np.sqrt(len(both))
            assert abs(both.mean() - expected[one, two]) < error
            worst = max(worst, abs(expected[0, 0] - expected[one, one]) / error)
    assert worst > 2


DAY = {"time_column": "ts", "time_unit": "s", "start": "1970-01-01", "end": "1970-01-02"}


def test_intervals_hold_the_truth_and_rank_errors_are_as_told():
    """2,000 groups of 400 values, 95%: between 95% and 100% hold it, in every release; the
    standard deviation of rank errors is within 15% of what `explain` says."""
    rng = np.random.default_rng(4)
    groups, size = 500, 400
    values = rng.uniform(0, 100, groups * size)
    asked = query(
        Quantile("q", q=[0.25, 0.5, 0.9], **ABOUT),
        public_groups=list(range(groups)),
        confidence=0.95,
        epsilon=1,
        delta=1e-6,
    )
    table = rows(values, np.repeat(np.arange(groups), size))
    (release,) = published(asked, table)
    release = release.sort_by("key")
    by_group = np.sort(values.reshape(groups, size), axis=1)
    truth = by_group[:, [99, 199, 359]]
    got, low, high = (np.stack(release[c].to_pylist()) for c in ("q", "q_low", "q_high"))
    held = ((low <= truth) & (truth <= high)).mean(axis=0)
    ranks = (by_group[:, :, None] < got[:, None, :]).sum(axis=1) - np.array([0.25, 0.5, 0.9]) * size
    told = dps.explain(asked).columns[0]["ranks"]
    assert (held >= 0.95 - Z * np.sqrt(0.05 * 0.95 / groups)).all()
    assert (low <= got).all()
    assert (got <= high).all()
    assert 0.7 * told < ranks.std() < 1.3 * told


@pytest.mark.parametrize(
    ("size", "leaves", "confidence"), [(1, 256, 0.95), (20, 256, 0.95), (20, 4096, 0.95)]
)
def test_intervals_hold_the_truth_in_small_groups(size, leaves, confidence):
    """2,000 groups of few small values, where every level may err on the same side: at least
    `confidence` hold them, false alarm 2e-8; as wide as for one normal number they would not."""
    groups, rng = 2000, np.random.default_rng(14)
    values = rng.uniform(0, 100 / leaves, groups * size)
    tree = Quantile("q", q=0.5, leaves=leaves, mechanism="tree", **ABOUT)
    facts = {"public_groups": list(range(groups)), "epsilon": 1 / size, "delta": 1e-6}
    table = rows(values, np.repeat(np.arange(groups), size))
    truth = np.sort(values.reshape(groups, size), axis=1)[:, (size - 1) // 2]
    held = []
    depth = tree.cells.depth
    for asked in (confidence, 1 - depth * (1 - confidence) / 2):
        (release,) = published(query(tree, confidence=asked, **facts), table)
        release = release.sort_by("key")
        low, high = (release[f"q_{end}"].to_numpy() for end in ("low", "high"))
        held.append(((low <= truth) & (truth <= high)).mean())
    least = confidence - Z * np.sqrt(confidence * (1 - confidence) / groups)
    assert held[0] >= least, held
    assert held[1] < least, held


@pytest.mark.parametrize("delta", [0, 1e-3])
def test_leaves_are_chosen_with_the_odds_that_are_told(delta):
    """20,000 groups of five values: chi-square of the leaves of a 0.75 quantile against
    exp(-epsilon d / (2 K max(p, 1 - p))) for each leaf's distance d in ranks, false alarm 1e-6; a
    slope that is 20% off is seen. Without delta epsilon is the query's own."""
    size, values = 20_000, [5.0, 15.0, 15.0, 25.0, 95.0]
    made = Quantile("q", column="x", q=0.75, edges=range(0, 101, 10), mechanism="exponential")
    asked = query(made, public_groups=list(range(size)), epsilon=2, delta=delta)
    plan = plan_query(asked)
    (release,) = published(asked, rows(np.tile(values, size), np.repeat(np.arange(size), 5)))
    leaves = np.searchsorted(made.cells.edges[1:10], release["q"].to_numpy())
    ranks = np.concatenate([[0], np.cumsum(np.bincount([0, 1, 1, 2, 9], minlength=10))])
    away = np.maximum(np.maximum(ranks[:-1] - 3.75, 3.75 - ranks[1:]), 0)
    epsilon = 2 if delta == 0 else float(choice_epsilon(plan.calibrated.mu_squared**0.5))
    for slope in (1.0, 0.8, 1.25):
        odds = np.exp(-away * epsilon / 1.5 * slope)
        fits = chisquare(np.bincount(leaves, minlength=10), odds / odds.sum() * size).pvalue > 1e-6
        assert fits == (slope == 1)
    assert release["q_stddev"].null_count == size


def test_buckets_and_other_groups_change_nothing():
    """The same bytes with any number of hash buckets."""
    rng = np.random.default_rng(5)
    values, keys = rng.uniform(0, 100, 3000), rng.integers(0, 20, 3000)
    ts = rng.integers(0, 86_400, 3000)
    asked = query(
        Quantile("q", q=[0, 0.5], leaves=64, **ABOUT),
        Quantile("c", q=[0.5, 0.9], mechanism="exponential", **ABOUT),
        Histogram("h", column="x", edges=[0, 20, 100]),
        every="6 hours",
        window=dps.Tumble("12 hours"),
        epsilon=12,
        **DAY,
    )
    table = rows(values, keys, ts=ts)
    one, three = (published(asked, table, buckets=n) for n in (1, 3))

    assert one == three
    assert sum(map(len, one)) > 20


def test_memory_of_a_key_is_what_is_told():
    """A group with one value has the nodes of its walks; one with many at most all nodes."""
    tree = Quantile("q", q=0.5, leaves=64, mechanism="tree", **ABOUT)
    asked = query(tree, public_groups=list(range(500)))
    told = dps.explain(asked).memory
    least, most = told["bytes_per_shown_group"], told["most_bytes_of_cells_per_group"]
    rng, held = np.random.default_rng(6), {}

    class Weighed(Flow):
        def evict(self, window):
            held[size] = sum(b.bytes for b in self.groups(window)) / 500
            super().evict(window)

    for size in (1, 300):
        values = rng.uniform(0, 100, 500 * size)
        published(asked, rows(values, np.repeat(np.arange(500), size)), flow=Weighed)

    assert 0.8 * least < held[1] < 1.3 * least
    assert held[1] < held[300] < 1.2 * (least + most)


def test_which_row_of_a_unit_falls_into_a_cell_is_its_own_matter():
    """1,024 units, each with one row in either bin, of which one is kept: without a unit the bins
    change by its row alone, and neither order nor buckets matter. Rows in the order they came,
    wherever they are few, moved both bins by 25."""
    histogram = Histogram("h", column="x", edges=[0, 10, 20])
    asked = plan_query(query(histogram, max_groups_contributed=3))
    users = np.repeat(np.arange(1024), 2)

    def bins(chosen, **how):
        exact = {}

        class Watched(Flow):
            def perturb(self, due, spend):
                for bucket in self.groups(due.window):
                    (cells,) = bucket.cells
                    table = cells.table
                    for place in range(table.used):
                        at = tuple(table.ids[place].tolist())
                        exact[at] = int(table.numbers[place, 0])
                return super().perturb(due, spend)

        table = pa.table(
            {
                "user": [f"u{n}" for n in users[chosen]],
                "key": np.zeros(len(chosen), np.int64),
                "x": np.where(np.asarray(chosen) % 2, 15.0, 5.0),
            }
        )
        for _ in run_plan(asked, table, flow=Watched, **how):
            pass
        return exact

    everybody = np.arange(len(users))
    whole = bins(everybody)
    assert sum(whole.values()) == 1024
    assert bins(everybody[::-1]) == bins(everybody, buckets=4) == whole
    for unit in range(0, 1024, 200):
        without = bins(everybody[users != unit])
        moved = [whole[at] - without.get(at, 0) for at in whole]
        assert sorted(moved) == [0, 1]
