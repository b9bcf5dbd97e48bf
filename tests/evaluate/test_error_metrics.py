"""Errors of released streams, by hand."""

import math

import numpy as np
import pytest

from dpstream.evaluate import trials as metrics


def test_errors_of_a_small_stream():
    """|o - x| / max(x, 1): an empty bin divides by one, a full one by its count."""
    truth = np.array([[0, 10], [4, 100]])
    released = np.array([[3, 5], [6, 100]])

    assert metrics.absolute_errors(released, truth).tolist() == [4, 1]
    assert metrics.relative_errors(released, truth).tolist() == [1.75, 0.25]


def test_mean_and_standard_error():
    """Of 1, 2, 3: deviation 1, error 1 / sqrt(3); one value has none, no value no mean."""
    assert metrics.mean_and_error([1, 2, 3]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert math.isnan(metrics.mean_and_error([5])[1])
    assert math.isnan(metrics.mean_and_error([])[0])


def test_range_queries_count_the_steps_with_a_value_in_the_range():
    """None of the steps moved out of every range, or half of them, or all."""
    truth = np.array([[0], [0], [0], [0]])

    assert metrics.range_error(truth, truth) == 0
    assert metrics.range_error(np.array([[0], [0], [-9], [99]]), truth) == 0.5
    assert metrics.range_error(truth + 50, truth) == 1.0


def test_range_queries_agree_with_a_slow_count():
    """The same ranges, counted one by one."""
    rng = np.random.default_rng(0)
    truth, released = rng.integers(0, 9, (40, 1)), rng.integers(-3, 12, (40, 1))
    ends = np.random.default_rng(metrics._QUERY_SEED).integers(0, 9, (metrics._QUERIES, 2))
    errors = []
    for a, b in ends:
        inside = [(min(a, b) <= x) & (x <= max(a, b)) for x in (truth, released)]
        right, given = (int(one.sum()) for one in inside)
        errors.append(abs(given - right) / max(right, 1))

    assert truth.max() == 8
    assert metrics.range_error(released, truth) == pytest.approx(np.mean(errors))
