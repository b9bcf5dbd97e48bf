"""The bench of bounds that choose themselves: it measures releases, and tells bounds apart."""

from benchmarks import chosen_bounds


def test_chosen_bounds_are_far_from_the_worst_ones():
    """Noise is fixed, so the figures are the same every time; a bound of 1 and of 64 lose."""
    found = chosen_bounds.measure(quick=True, progress=lambda *_: None)
    errors = {(row["log"], row["groups"]): row["l_2"] for row in found.rows}

    assert len(found.rows) == 2 * 4
    for log in ("power law", "changed habits"):
        assert errors[log, "auto"] < 0.7 * errors[log, 1]
        assert errors[log, "auto"] < errors[log, 64]
        assert min(errors[log, groups] for groups in (1, 8, 64)) == errors[log, 8]
    (bounds,) = (
        r["bounds"] for r in found.rows if (r["log"], r["groups"]) == ("power law", "auto")
    )
    assert bounds.split()[0] == "8"
    assert len(bounds.split()) == 8
    assert len(found.targets) == 2
