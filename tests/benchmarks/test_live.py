"""The bench of live queries counts what every query has read; it can fail."""

from benchmarks import live


def seen(*read, fed=100):
    return live.Seen(fed=fed, seconds=2.0, read=list(read), delays=[0.1, 0.3, 0.2])


def test_rows_that_a_query_has_not_read_are_missed():
    """Each query must have read all that was fed."""
    found = live.findings({1: seen(100), 2: seen(100, 0)})

    assert [row["rows_missed"] for row in found.rows] == [0, 100]
    assert [one["reached"] for one in found.targets] == [True, False]
    assert found.rows[0]["rows_per_second"] == 50
    assert (found.rows[0]["delay_median_ms"], found.rows[0]["delay_worst_ms"]) == (200, 300)


def test_two_queries_over_a_directory_miss_nothing():
    """The real thing, for two seconds."""
    found = live._watched(live.Plan(rows=1000, seconds=2), 2)

    assert found.fed >= 50
    assert found.read == [found.fed] * 2
    assert len(found.delays) == 4
