"""Kill -9 anywhere, start again: the same bytes, one charge, no keys left."""

import itertools
import os
import signal
from dataclasses import replace

import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink, left_behind
from dpstream.engines.embedded import snapshots
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.query_spend import QuerySpend
from dpstream.query.noise_plan import plan_query
from tests.engines.runs import (
    RUN,
    SHORT,
    break_off,
    charges,
    forked,
    killed,
    published,
    query,
    start,
    table,
    until,
    whole,
    write,
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes; it also warms the kernels that forks inherit."""
    return whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def killed_everywhere(tmp_path_factory):
    """One run for every operation on the disk, killed before it and started again."""
    unbroken = whole(tmp_path_factory.mktemp("whole"), SHORT)
    outcomes = {}
    status = -signal.SIGKILL
    while status:
        place = tmp_path_factory.mktemp("killed")
        write(place, table())
        status = killed(lambda: start(place, SHORT).finish(), len(outcomes) + 1)  # noqa: B023
        assert status in (0, -signal.SIGKILL)
        outcomes[len(outcomes) + 1] = (
            survives(place, unbroken, SHORT),
            left_behind(place / "state"),
        )
    return outcomes


def survives(place, expected, asked=None):
    """Does the next start end as if nothing had happened?"""
    start(place, asked).finish()
    return published(place) == expected and charges(place / "state" / "ledger") == 1


def test_killed_before_every_operation_on_the_disk(killed_everywhere):
    """There is no moment between two changes of the disk at which a kill does harm."""
    assert len(killed_everywhere) > 100
    assert [nth for nth, (same, _) in killed_everywhere.items() if not same] == []


def test_no_kill_leaves_keys_or_noise(killed_everywhere):
    """When a run is over its keys and segments are gone, whatever happened to it on the way."""
    assert {nth: left for nth, (_, left) in killed_everywhere.items() if left} == {}


def test_every_file_torn_once(tmp_path, expected):
    """A file that was not synced may be half there after a power failure."""
    for nth in itertools.count(1, 4):
        place = tmp_path / str(nth)
        write(place, table())
        status = killed(lambda: start(place).finish(), nth, where="fsync", torn=True)  # noqa: B023
        assert survives(place, expected), f"sync {nth}"
        if status == 0:
            break

    assert nth > 20


def test_killed_at_every_start(tmp_path, expected):
    """Kills upon kills: each start gets a little further than the one before."""
    write(tmp_path, table())
    starts = 0
    while killed(lambda: start(tmp_path).finish(), nth=9 + starts):
        starts += 1

    assert starts > 5
    assert survives(tmp_path, expected)


def test_keys_that_nobody_derives(tmp_path, expected):
    """With random run id and keys, as in real life, a replayed release has the bytes it had."""

    def once():
        start(tmp_path, fixed=False, sink=CheckingSink(tmp_path, lambda: None)).finish()

    write(tmp_path, table())
    starts = 0
    while killed(once, nth=11 + 2 * starts):
        starts += 1

    assert starts > 5
    assert published(tmp_path).keys() == expected.keys()
    assert charges(tmp_path / "state" / "ledger") == 1


@pytest.mark.parametrize(
    "asked",
    [
        query(min_change=1, public_keys=["/1", "/2", "/none"], nonnegative=True),
        query(window=None, every="30 minutes", period="forever", allowed_lateness="0"),
        query(every=None, time_zone="Asia/Kathmandu", aggregates=query().aggregates[:1]),
    ],
    ids=["thinned", "one window", "once per window"],
)
def test_other_shapes_of_query(tmp_path, asked):
    """Thinned tables, public keys, one window, one release a window: all of it is in the state."""
    unbroken = whole(tmp_path / "whole", asked)
    for nth in range(20, 120, 23):
        place = tmp_path / str(nth)
        write(place, table())
        killed(lambda: start(place, asked).finish(), nth)  # noqa: B023
        start(place, asked).finish()

        assert published(place) == unbroken


def test_killed_from_outside(tmp_path, expected):
    """Another process sends the signal when a certain release is there."""
    for seen in range(1, len(expected), 3):
        place = tmp_path / str(seen)
        write(place, table())
        pid = os.fork()
        if not pid:
            try:
                start(place).finish()
            finally:
                os._exit(0)
        until(lambda: len(list((place / "out").glob("*.parquet"))) >= seen)  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

        assert survives(place, expected)


def test_killed_before_the_charge(tmp_path, expected, monkeypatch):
    """The run exists, nothing was charged and nothing drawn: the next start pays, once."""
    write(tmp_path, table())

    def dies(*args, **named):
        os.kill(os.getpid(), signal.SIGKILL)

    def once():
        monkeypatch.setattr(QuerySpend, "pay", dies)
        start(tmp_path).finish()

    assert forked(once) == -signal.SIGKILL
    assert (tmp_path / "state" / "run.dps").exists()
    assert charges(tmp_path / "state" / "ledger") == 0
    assert survives(tmp_path, expected)


def test_killed_while_the_directory_is_made(tmp_path):
    """Random run ids: a log without a run is no reason to refuse the directory for ever."""
    for nth in range(1, 24, 2):
        place = tmp_path / str(nth)
        write(place, table())
        killed(lambda: start(place, SHORT, fixed=False).finish(), nth)  # noqa: B023
        start(place, SHORT, fixed=False).finish()

        assert charges(place / "state" / "ledger") == 1


def test_buckets_and_threads_do_not_matter(tmp_path, expected):
    """How the work is divided changes nothing, nor does it between two starts."""
    write(tmp_path, table())
    for releases, how in ((3, {"buckets": 3, "threads": 2}), (4, {"threads": 1}), (5, {})):
        how = EngineOptions(snapshot_every=2, run_id=RUN, **how)
        break_off(tmp_path, releases, options=how)

    assert survives(tmp_path, expected)


def test_a_step_that_is_bounded_ahead_meets_the_same_state(tmp_path):
    """Windows and periods end at every other step, while the next step's rows are bounded."""
    short = {"window": dps.Tumble("30 minutes"), "every": "15 minutes", "period": "30 minutes"}
    asked = query(**short, allowed_lateness="15 minutes")
    found = []
    for threads in (1, 2, 4):
        place = tmp_path / str(threads)
        how = EngineOptions(buckets=3, threads=threads, snapshot_every=100, run_id=RUN)
        found.append(whole(place, asked, rows=table(4000), options=how))

    assert len(found[0]) > 30
    assert found[1:] == found[:1] * 2


def test_a_kill_leaves_the_shared_book_to_others(tmp_path):
    """Two queries on one book: one is killed and started again, the other never notices."""
    book = dps.Ledger(tmp_path / "book")
    terms = plan_query(SHORT).terms()
    book.open(
        "stream",
        replace(terms, total=2 * terms.total, delta_slack=2 * terms.delta_slack, rounding_slack=1),
    )
    for name in ("one", "two"):
        write(tmp_path / name, table())
    shared = {"ledger": tmp_path / "book", "fixed": False}
    other = iter(start(tmp_path / "two", SHORT, **shared))
    next(other)
    for nth in (30, 45, 60):
        killed(lambda: start(tmp_path / "one", SHORT, **shared).finish(), nth)
        next(other)
    start(tmp_path / "one", SHORT, **shared).finish()
    list(other)

    assert charges(tmp_path / "book") == 2
    assert published(tmp_path / "one").keys() == published(tmp_path / "two").keys()


def test_a_finished_run_is_over(tmp_path, expected):
    """Started once more it publishes nothing and charges nothing."""
    write(tmp_path, table())
    start(tmp_path).finish()

    assert list(start(tmp_path)) == []
    assert survives(tmp_path, expected)


def test_a_state_that_forgets_is_found_out(tmp_path, expected, monkeypatch):
    """The control: with the bounds of every period lost at a restart, the bytes differ."""
    real = snapshots.restore

    def forgets(flow, owner, part):
        return real(flow, owner, part) if owner[0] == "window" else {"tables": [0, 0]}

    write(tmp_path, table())
    killed(lambda: start(tmp_path).finish(), nth=150)
    monkeypatch.setattr(snapshots, "restore", forgets)

    assert not survives(tmp_path, expected)
