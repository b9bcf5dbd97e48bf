"""The bench of questions about users finds what was published near what is true."""

import numpy as np

from benchmarks import users


def test_errors_are_those_that_are_said():
    """Of each question, by other code than what publishes; at six deviations of their mean."""
    found = users.measure(quick=True, progress=lambda *_: None)
    rows = {row["query"]: row for row in found.rows}

    assert set(rows) == set(users.QUERIES)
    for row in rows.values():
        runs = 2 * row["cells"]
        assert row["said"] > 1
        assert abs(row["error"] / row["said"] - 1) < 6 / np.sqrt(2 * runs)
        assert row["covered"] > 0.95 - 6 * np.sqrt(0.95 * 0.05 / runs)
    assert rows["retention"]["cells"] == sum(min(day, users.LAGS) + 1 for day in range(users.DAYS))


def test_a_way_may_begin_again():
    """The last beginning counts, within the time that is left; a strict one is interrupted."""
    late = [0, users.WITHIN + 1, users.WITHIN + 2]
    assert users.reached(late, ["home", "home", "cart"], strict=False) == 2
    assert users.reached(late, ["home", "product", "cart"], strict=False) == 1
    assert users.reached([0, 1, 2], ["home", "product", "cart"], strict=False) == 2
    assert users.reached([0, 1, 2], ["home", "product", "cart"], strict=True) == 1
