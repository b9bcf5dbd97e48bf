"""Pools: exact distances, distributions that add up, made without data and the same each time."""

import numpy as np
import pytest
from scipy.special import gammaln
from scipy.stats import binom

from dpstream.errors import InvalidParameter
from dpstream.mechanisms.infinite.budget_series import below, gammas, uniforms
from dpstream.mechanisms.infinite.dpi import Workload, workload
from dpstream.mechanisms.infinite.synopsis_pool import (
    GRID,
    POOLS,
    BinGroups,
    Pool,
    check_groups,
    groups_of,
    multinomial,
    pool,
    quantise,
)

Z = 4.9  # two-sided false-alarm rate below 1e-6; the names of the numbers are fixed


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(("bins", "size"), [(2, 9), (7, 64), (100, 203), (1000, 6)])
def test_distances_are_exact(name, bins, size):
    """The compiled sums of minima against plain integers, for sizes that are no multiple of 4."""
    synopses = pool(name, bins=bins, size=size, seed=1)
    wanted = np.floor(gammas(f"wanted {bins}", bins, 0.5) * GRID / (bins * 3)).astype(np.uint32)
    members = np.array([synopses.member(j).astype(np.int64) for j in range(size)])

    assert (synopses.distances(wanted) == np.abs(members - wanted).sum(axis=1)).all()
    for groups in (BinGroups.equal(bins, 2), BinGroups(of=tuple(i % 2 for i in range(bins)))):
        query = Workload(pool=synopses, queries=(groups,))
        by_group = np.array([np.bincount(groups.of, weights=m) for m in members])
        right = np.abs(by_group - np.bincount(groups.of, weights=wanted)).sum(axis=1)
        assert (query.errors(wanted, 0) == right).all()
        assert query.errors_of(size - 1, wanted)[0] == right[-1]


@pytest.mark.parametrize("name", POOLS)
def test_members_are_distributions(name):
    """On the grid they add up to 1, but for less than one step a bin."""
    synopses = pool(name, bins=40, size=120, seed=0)

    assert (synopses.masses <= GRID).all()
    assert (synopses.masses > GRID - 300 * 40).all()
    pdfs = np.array([synopses.pdf(j) for j in range(120)])
    assert pdfs.sum(axis=1) == pytest.approx(np.ones(120))
    assert (pdfs >= 0).all()
    assert len(np.unique(pdfs.round(12), axis=0)) >= 119


def test_bytes_keep_the_shape():
    """A distribution and its 256 levels differ by little; the uniform one not at all."""
    rows = [np.full(50, 0.02), gammas("rough", 50, 1.0), np.r_[0.9, np.full(49, 0.1 / 49)]]
    rows = [row / row.sum() for row in rows]
    synopses = quantise(rows, size=3, bins=50)

    for number, row in enumerate(rows):
        assert np.abs(synopses.pdf(number) - row).sum() < 0.02
    assert np.ptp(synopses.member(0)) == 0


def test_the_mixed_pool_has_what_data_may_look_like():
    """The uniform distribution, a spike at every bin, a bump, a power law, and rough ones."""
    synopses = pool("mixed", bins=32, size=1000, seed=0)
    pdfs = np.array([synopses.pdf(j) for j in range(1000)])
    near = lambda target: np.abs(pdfs - target / target.sum()).sum(axis=1).min()  # noqa: E731

    assert near(np.ones(32)) < 1e-6
    for spike in (0, 13, 31):
        assert near(np.eye(32)[spike] * 0.9 + 0.1 / 32) < 0.02
    assert near(1 / np.arange(1, 33)) < 0.25
    assert near(np.exp(-0.5 * ((np.arange(32) - 11) / 4.0) ** 2)) < 0.35
    assert near(np.r_[np.zeros(24), np.ones(8)]) < 0.25


def test_a_pool_is_the_same_each_time_and_another_for_another_seed():
    """Nothing but public names enters; a digest tells pools apart."""
    make = lambda seed: Pool(**vars_of(pool.__wrapped__("dirichlet", bins=9, size=20, seed=seed)))  # noqa: E731

    assert make(1).digest == make(1).digest != make(2).digest


def vars_of(one):
    return {"units": one.units, "floor": one.floor, "unit": one.unit}


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0, 100.0])
def test_gammas_have_their_moments(shape):
    """Mean and variance of a gamma law are its shape; another shape's are not."""
    size = 40_000
    sample = gammas(f"moments {shape}", size, shape)
    spread = np.sqrt((2 * shape**2 + 6 * shape) / size)  # of the sample variance

    assert abs(sample.mean() - shape) < Z * np.sqrt(shape / size)
    assert abs(sample.var() - shape) < Z * spread
    assert abs(sample.mean() - 1.3 * shape) > Z * np.sqrt(shape / size)


def test_public_numbers_are_even():
    """Strictly between 0 and 1, mean one half; whole ones cover their range."""
    numbers = uniforms("even", 100_000)

    assert 0 < numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < Z * np.sqrt(1 / 12 / 100_000)
    assert set(below("whole", 1000, 7)) == set(range(7))


@pytest.mark.parametrize(
    ("queries", "problem"),
    [
        ((1,), "at least 2"),
        ((9,), "has 9 groups, but there are 4 bins"),
        (((0, 0, 1),), "each of the 4 bins"),
        (((0, 0, 2, 2),), "without gaps"),
        (((0, -1, 1, 1),), "at least 0"),
        ("all", "must be numbers of groups"),
    ],
)
def test_queries_that_make_no_sense_are_refused(queries, problem):
    """With what was found."""
    with pytest.raises(InvalidParameter, match=problem):
        groups_of(check_groups(queries), 4)


def test_queries_are_groupings():
    """Equal runs, or any groups; without any, every bin."""
    assert [one.of for one in groups_of(check_groups([2, (1, 0, 0, 1)]), 4)] == [
        (0, 0, 1, 1),
        (1, 0, 0, 1),
    ]
    assert groups_of((), 4)[0].single
    assert check_groups(4) == (4,)


def test_an_unknown_pool_or_size_is_refused():
    """With the names that there are."""
    with pytest.raises(InvalidParameter, match="one of multinomial, dirichlet, mixed"):
        pool("sobol", bins=3, size=9, seed=0)
    with pytest.raises(InvalidParameter, match="2 to 16384 synopses"):
        workload("mixed", (), bins=3, size=20_000, seed=0)


def exact_entropy(draws, cells):
    """Of a multinomial law with equal cells, in nats: -ln n! + n ln k + k E[ln X!]."""
    x = np.arange(draws + 1)
    inside = binom(draws, 1 / cells).pmf(x) @ gammaln(x + 1)
    return -gammaln(draws + 1) + draws * np.log(cells) + cells * inside


def printed_entropy(draws, cells):
    """Equation 13 of the paper, which Theorem C.2 compares a pool with."""
    return (cells - 1) / 2 * np.log(2 * np.pi * draws * np.e) - cells / 2 * np.log(cells)


@pytest.mark.parametrize("cells", [4, 20, 100])
def test_theorem_c_2_says_the_entropy_of_a_synopsis(cells):
    """Equation 13 nears the entropy of the law that synopses are thrown by as units become many."""
    off = [abs(printed_entropy(n, cells) - exact_entropy(n, cells)) for n in (10**2, 10**3, 10**4)]

    assert off[0] > off[1] > off[2]
    assert off[2] < cells**2 / 10**4
    assert abs(1.1 * printed_entropy(10**4, cells) - exact_entropy(10**4, cells)) > cells**2 / 10**4


def test_synopses_of_the_paper_have_that_entropy():
    """The mean of -ln P over 400 of them, within five standard errors (false alarm 6e-7)."""
    cells, units = 20, 50
    counts = np.array([np.rint(row * cells * units) for row in multinomial(cells, 400, 3, units)])
    draws = cells * units
    logs = gammaln(draws + 1) - gammaln(counts + 1).sum(axis=1) - draws * np.log(cells)
    error = logs.std() / np.sqrt(len(logs))

    assert abs(-logs.mean() - exact_entropy(draws, cells)) < 5 * error
    assert abs(-logs.mean() - exact_entropy(draws // 2, cells)) > 5 * error


def test_a_pool_cannot_be_as_varied_as_the_law_of_its_synopses():
    """What the theorem leaves out: a pool of 1,000 has at most ln 1,000 nats, the law 366."""
    assert exact_entropy(10_000, 100) == pytest.approx(366, abs=2)
    assert np.log(1_000) < 0.02 * exact_entropy(10_000, 100)
