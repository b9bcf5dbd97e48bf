"""Queries publish and charge what the golden corpus says, broken off in the middle too."""

import pytest

import dpstream as dps
from tests.golden.corpus import SECRET, outcome, rows_text, run_options
from tests.golden.queries import CASES, SINK_QUERY, write_parquet


def start(case, place, *, engine=None, **options):
    """The run of a case, or the runs, with everything that it leaves in `place`."""
    queries = case.ask()
    settings = {
        "source": case.source(place),
        "sink": case.sink[0](place),
        "state": place / "state",
        "secret": SECRET,
        "ledger": place / "book",
        "options": run_options(**options),
        "engine": engine,
    }
    if len(queries) == 1:
        return dps.run(queries[0], **settings)
    book = dps.Ledger(place / "book")
    book.open("stream", queries[0].promise(epsilon=20, delta=1e-2))
    book.close()
    return dps.run_all(queries, **settings)


def publish(case, place, *, leave_after=None, **options):
    """Run to the end, if asked with a break after some releases; how many there were."""
    place.mkdir()
    if leave_after is not None:
        broken = start(case, place, **options)
        releases = iter(broken)
        for _ in range(leave_after):
            next(releases)
        releases.close()
        broken.close()
    releases = sum(1 for _ in start(case, place, **options))
    return outcome(case.sink[1](place), place / "book"), releases


@pytest.mark.parametrize("name", CASES)
def test_query(golden, name, tmp_path):
    """The files of its sink and its ledger; whatever the threads, the buckets, and the place."""
    case = CASES[name]
    whole, releases = publish(case, tmp_path / "whole", threads=1, buckets=3, snapshot_every=10)
    half = max(1, releases // 2)
    resumed, _ = publish(case, tmp_path / "another place", leave_after=half)

    golden.check(f"query/{name}", whole, resumed)
    assert len(whole.releases.splitlines()) > 2 * releases  # rows, and not their heads alone


def test_rows_that_every_sink_has(golden, tmp_path):
    """What a server's sink must hold, whatever the server; see tests/servers/test_golden.py."""
    book = tmp_path / "book"
    run = dps.run(
        dps.sql(SINK_QUERY, name="sent"),
        source=write_parquet(tmp_path),
        state=tmp_path / "state",
        secret=SECRET,
        ledger=book,
        options=run_options(),
    )
    rows = [row for table in run for row in table.to_pylist()]
    sent = outcome(rows_text(rows), book)

    golden.check("rows/sent", sent, sent)
    assert len(rows) > 100
