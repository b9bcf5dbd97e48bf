"""Sensitivity compression: how far one user moves a distribution and a score."""

from fractions import Fraction as F

import numpy as np
import pytest

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms.infinite.dpi import SCORE, Scoring, compress_sensitivity
from dpstream.mechanisms.infinite.synopsis_pool import GRID, pool
from dpstream.mechanisms.release import bounded_counts
from dpstream.privacy.sensitivity import distribution_change, score_change


def exact_pdf(counts, dummy_rows):
    total = int(sum(counts)) + dummy_rows
    if total == 0:
        return [F(1, len(counts))] * len(counts)
    return [F(int(c)) / total + F(dummy_rows, len(counts)) / total for c in counts]


def pairs(rows, seed=0, number=400):
    """Histograms with and without one user; small ones, where a user weighs most."""
    rng = np.random.default_rng(seed)
    for trial in range(number):
        bins = int(rng.integers(2, 6))
        counts = rng.integers(0, (1, 2, 30)[trial % 3], bins)
        most = 1000 if rows is None else rows
        user = np.zeros(bins, dtype=np.int64)
        for _ in range(int(rng.integers(0, 3))):
            user[rng.integers(0, bins)] += int(rng.integers(0, most + 1))
        if rows is not None and user.sum() > rows:
            user = np.eye(bins, dtype=np.int64)[rng.integers(0, bins)] * rows
        yield counts, counts + user


@pytest.mark.parametrize(("rows", "dummy_rows"), [(None, 0), (1, 0), (1, 9), (3, 7), (5, 100)])
def test_a_user_moves_the_distribution_by_no_more_than_is_claimed(rows, dummy_rows):
    """In exact arithmetic; and some user does move it by nearly that much."""
    claimed = distribution_change(rows=rows, dummy_rows=dummy_rows)
    moved = [
        sum(
            abs(a - b)
            for a, b in zip(exact_pdf(x, dummy_rows), exact_pdf(y, dummy_rows), strict=True)
        )
        for x, y in pairs(rows)
    ]

    assert max(moved) <= claimed
    assert max(moved) >= claimed * F(3, 4)


@pytest.mark.parametrize(("rows", "dummy_rows"), [(None, 0), (1, 9), (3, 7), (1, 2000)])
@pytest.mark.parametrize(
    ("error_bound", "overfitting_bound"), [(0, 2), (F(1, 10), F(1, 2)), (0, F(1, 100))]
)
def test_a_user_moves_no_score_by_more_than_its_sensitivity(
    rows, dummy_rows, error_bound, overfitting_bound
):
    """Rounded, in whole numbers, for every synopsis of a pool."""
    scoring = Scoring(error_bound=F(error_bound), overfitting_bound=F(overfitting_bound))
    change = distribution_change(rows=rows, dummy_rows=dummy_rows)
    largest = 0.0
    for counts, with_user in pairs(rows, number=150):
        synopses = pool("mixed", bins=len(counts), size=40, seed=0)
        one, other = (
            scoring.of(synopses.distances(compress_sensitivity(x, dummy_rows=dummy_rows)))
            for x in (counts, with_user)
        )
        assert max(one.max(), other.max()) <= SCORE
        assert min(one.min(), other.min()) >= -SCORE
        moved = int(np.abs(one - other).max())
        assert moved <= scoring.change(change, len(counts))
        largest = max(largest, moved / float(scoring.change(change, len(counts))))

    assert largest > 0.3  # the bound is not far off


def test_the_score_is_algorithm_1s():
    """1 below lambda, -1 from lambda + mu on, straight in between."""
    scoring = Scoring(error_bound=F(1, 4), overfitting_bound=F(1, 2))
    errors = np.array([0, GRID // 4, GRID // 2, 3 * GRID // 4, 2 * GRID])

    assert (scoring.of(errors) / SCORE).tolist() == [1, 1, 0, -1, -1]


def test_the_score_sensitivity_is_the_papers():
    """min(2, 2 Delta_Q / mu), but for rounding."""
    for change, mu, right in (
        (F(2), 2, 2),
        (F(2), 0.5, 2),
        (F(1, 50), 1, 0.04),
        (F(1, 50), 2, 0.02),
    ):
        found = score_change(change, bins=100, grid=GRID, span=int(mu * GRID), steps=SCORE)
        assert float(found) / SCORE == pytest.approx(right, rel=1e-3)
        assert float(found) / SCORE >= right


def test_an_empty_step_is_even():
    """No rows say nothing; dummy rows are even by themselves."""
    assert (compress_sensitivity(np.zeros(4, np.int64), dummy_rows=0) == GRID // 4).all()
    assert (compress_sensitivity(np.zeros(4, np.int64), dummy_rows=7) == GRID // 4).all()


def test_each_user_has_at_most_so_many_rows_in_a_slot():
    """The first ones of each slot; nobody's rows depend on another's."""
    rng = np.random.default_rng(0)
    rows = {
        "steps": rng.integers(-1, 6, 3000),
        "users": rng.integers(0, 40, 3000).astype(str),
        "bins": rng.integers(0, 9, 3000),
    }
    public = {"slots": 5, "domain": 8}
    kept = bounded_counts(**rows, **public, rows_per_user=3)

    assert kept.shape == (5, 8)
    assert kept.sum() < 40 * 5 * 3 + 1
    for user in ("0", "17"):
        without = {key: column[rows["users"] != user] for key, column in rows.items()}
        alone = {key: column[rows["users"] == user] for key, column in rows.items()}
        own = bounded_counts(**alone, **public, rows_per_user=3)
        assert (own.sum(axis=1) <= 3).all()
        assert (kept - bounded_counts(**without, **public, rows_per_user=3) == own).all()


def test_bounds_that_make_no_sense_are_refused():
    """Before anything is counted."""
    with pytest.raises(InvalidParameter, match="dummy_rows must be 0 or more"):
        distribution_change(rows=1, dummy_rows=-1)
    with pytest.raises(InvalidParameter, match="rows must be at least 1"):
        distribution_change(rows=0)
    with pytest.raises(InvalidParameter, match="at most 2"):
        Scoring(error_bound=F(0), overfitting_bound=F(3))
    with pytest.raises(InvalidInput, match="below 2"):
        compress_sensitivity(np.array([1 << 52, 1 << 52]), dummy_rows=0)
