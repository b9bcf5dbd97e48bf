"""The bench of noise that groups share: what it measures, and that it reaches its targets."""

from benchmarks import shared_noise


def test_groups_have_less_error_by_itself_and_their_sums_more():
    """In windows that are published once, and in the last release of others."""
    found = shared_noise.measure(quick=True, progress=lambda *_: None)
    rows = {(row["groups"], row["reached"], row["releases"]): row for row in found.rows}

    assert len(rows) == 3 * 2 * 2
    assert all(target["reached"] for target in found.targets)
    for releases in (1, 24):
        assert rows[24, 24, releases]["ratio"] < 0.75
        assert rows[24, 24, releases]["by_itself"]
        assert not rows[8, 4, releases]["by_itself"]
    assert sum(row["total_ratio"] > 1 for row in rows.values()) >= 6
