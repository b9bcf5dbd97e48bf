"""The bench of a directory of many files measures triggers; it can fail."""

from dataclasses import replace

from benchmarks import live_files


def test_slow_triggers_miss_the_target():
    """Both kinds of triggers without news are judged."""
    seen = live_files.Seen(
        first=1.0,
        first_cpu=0.1,
        listed=[0.04],
        idle=[0.01, 0.02, 0.03],
        cpu=0.01,
        restart=1.0,
        grown=5.0,
        state=1.0,
    )
    found = live_files.findings({10: seen, 20: replace(seen, listed=[0.06])})

    assert [row["idle_median_ms"] for row in found.rows] == [20, 20]
    assert [one["reached"] for one in found.targets] == [True, True, True, False]


def test_a_small_directory():
    """The real thing, with few files."""
    seen = live_files._seen(40, settle=0.0)

    assert len(seen.idle) == len(seen.listed) == 40
    assert seen.first > 0 < seen.restart
    assert seen.state > 0
