"""The bench of quantiles: errors by rank, and what it finds in small."""

import numpy as np

from benchmarks.aggregates import SHARES, covered, made_up, ours, rank_errors


def test_errors_are_rows_between_what_was_found_and_the_rank():
    values = np.arange(100.0)[None, :]
    found = np.array([[25.0, 60.0, 93.5]])

    assert rank_errors(values, found, SHARES).tolist() == [[0.0, 10.0, 1.0]]
    assert covered(values, np.array([[24.0, 50.0, 0]]), np.array([[24.0, 60.0, 93]])).tolist() == [
        [1.0, 0.0, 0.0]
    ]


def test_releases_come_with_the_part_of_the_rows_that_they_know():
    values = made_up("uniform", 3)
    found = ours(values, triggers=4, run=0)

    assert [part for part, *_ in found] == [0.25, 0.5, 0.75, 1.0]
    assert all(each.shape == (3, 3) for _, *columns in found for each in columns)
    assert rank_errors(values, found[-1][1], SHARES).max() < 200
