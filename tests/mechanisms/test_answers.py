"""Post-processing of released distributions, against plain counting."""

import numpy as np
import pytest

from dpstream.errors import InvalidInput
from dpstream.mechanisms import answers
from dpstream.mechanisms.infinite.dpi import compress_sensitivity
from dpstream.mechanisms.infinite.synopsis_pool import GRID

RNG = np.random.default_rng(0)
COUNTS = RNG.integers(0, 50, (20, 12))
PDFS = COUNTS / COUNTS.sum(axis=1, keepdims=True)


def test_counts_come_back_from_distributions():
    """With and without dummy rows; from what compression made of them, to its grid."""
    totals = COUNTS.sum(axis=1)
    grid = np.array([compress_sensitivity(row, dummy_rows=40) for row in COUNTS]) / GRID

    assert answers.counts(PDFS, totals) == pytest.approx(COUNTS)
    assert answers.counts(grid, totals, dummy_rows=40) == pytest.approx(COUNTS, abs=1e-5)
    assert (answers.counts(np.full((1, 4), 0.25), 0, dummy_rows=3) == 0).all()


def test_ranges_and_top_k_are_those_of_the_counts():
    """Exactly, for exact distributions."""
    ranges = [(0, 12), (3, 3), (2, 9), (11, 12)]
    shares = answers.range_shares(PDFS, ranges)
    for step, row in enumerate(COUNTS):
        right = [row[a:b].sum() / row.sum() for a, b in ranges]
        assert shares[step] == pytest.approx(right)
        chosen = answers.top_k(PDFS, 3)[step]
        assert sorted(row[chosen]) == sorted(np.sort(row)[-3:])


def test_outliers_are_the_rare_bins():
    """The score grows as the share falls; those marked are the rarest."""
    scores = answers.outlier_scores(PDFS)
    order = np.argsort(PDFS[0], kind="stable")

    assert (np.diff(scores[0][order]) <= 0).all()
    assert set(np.flatnonzero(answers.outliers(PDFS, share=0.25)[0])) == set(
        np.argsort(-scores[0], kind="stable")[:3]
    )
    perfect = answers.agreement(answers.outliers(PDFS), answers.outliers(PDFS))
    assert perfect == (1.0, 1.0)


def test_averages_are_of_the_past_only():
    """What comes later changes nothing."""
    changed = PDFS.copy()
    changed[10:] = 1 / 12

    assert (answers.running_mean(PDFS)[:10] == answers.running_mean(changed)[:10]).all()
    assert answers.running_mean(PDFS)[-1] == pytest.approx(PDFS.mean(axis=0))


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (lambda: answers.top_k(PDFS, 13), "k must be in"),
        (lambda: answers.range_shares(PDFS, [(3, 13)]), "a range"),
        (lambda: answers.counts(PDFS, -1), "totals must be 0 or more"),
        (lambda: answers.outliers(PDFS, share=0), "share must be in"),
        (lambda: answers.running_mean([[0.5, -0.5]]), "0 or more"),
    ],
)
def test_questions_that_make_no_sense_are_refused(ask, problem):
    """With what was found."""
    with pytest.raises(InvalidInput, match=problem):
        ask()
