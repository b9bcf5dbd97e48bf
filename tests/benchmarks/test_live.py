"""The bench of live queries counts what every query has read; it can fail."""

from dataclasses import replace

from benchmarks import live


def seen(*read, fed=100):
    return live.Seen(fed=fed, seconds=2.0, read=list(read), delays=[0.1, 0.3, 0.2], cpu=0.5)


def test_rows_that_a_query_has_not_read_are_missed():
    """Each query must have read all that was fed."""
    found = live.findings({1: seen(100), 2: seen(100, 0)})

    assert [row["rows_missed"] for row in found.rows] == [0, 100]
    missed = [one["reached"] for one in found.targets if "missed" in one["name"]]
    assert missed == [True, False]
    assert (found.rows[0]["rows_per_second"], found.rows[0]["cpu_us_per_row"]) == (50, 5000)
    assert (found.rows[0]["delay_median_ms"], found.rows[0]["delay_worst_ms"]) == (200, 300)


def test_late_releases_are_a_missed_target():
    """The median and the worst, each by its own bound."""
    found = [
        [one["reached"] for one in live.findings({1: replace(seen(100), delays=delays)}).targets]
        for delays in ([0.1, 0.1, 0.9], [0.1, 0.1, 1.1], [0.1, 0.2, 0.2], [])
    ]

    assert [each[1:] for each in found] == [[True, True], [True, False], [False, True], [None] * 2]


def test_two_queries_over_a_directory_miss_nothing():
    """The real thing, for two seconds."""
    found = live._watched(live.Plan(rows=1000, seconds=2), 2)

    assert found.fed >= 50
    assert found.read == [found.fed] * 2
    assert len(found.delays) == 4
