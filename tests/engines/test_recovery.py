"""Kill -9 anywhere, start again: the same bytes, one charge, no keys left."""

import itertools
from dataclasses import replace

import pytest

import dpstream as dps
from benchmarks.recovery_case import CheckingSink, left_behind
from dpstream.engines.embedded import snapshots
from dpstream.engines.query_run import EngineOptions
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import InputLog
from dpstream.query.noise_plan import plan_query
from tests.support.fixed import RUN
from tests.support.kill_and_replay import (
    AtCall,
    BeforeDiskOperation,
    WhenSeen,
    kill_and_replay,
    kill_everywhere,
)
from tests.support.long import is_long
from tests.support.runs import (
    CHOOSING,
    CHOOSING_ALL,
    LOOKING_BACK,
    SHARING,
    SHARING_CHOSEN,
    SHORT,
    break_off,
    charges,
    group_by,
    published,
    query,
    start,
    table,
    whole,
    write,
)

STRIDE = 1 if is_long() else 6
"""`make long` kills before every operation on the disk, `make test` before each sixth one."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an unbroken run publishes; it also warms the kernels that forks inherit."""
    return whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def killed_everywhere(tmp_path_factory):
    """A run for each of these operations on the disk, killed before it and started again."""
    kind, folder = group_by(SHORT), tmp_path_factory.mktemp("killed")
    unbroken = kind.unbroken(folder / "whole")
    return {
        nth: (is_unharmed(after, unbroken), left_behind(after.place / "state"))
        for nth, after in kill_everywhere(kind, folder, itertools.count(1, STRIDE))
    }


def is_unharmed(after, expected):
    """Did the run end as if nothing had happened?"""
    return after.published == expected and after.charges == 1


def test_killed_before_every_operation_on_the_disk(killed_everywhere):
    """There is no moment between two changes of the disk at which a kill does harm."""
    assert len(killed_everywhere) > 100 // STRIDE
    assert [nth for nth, (same, _) in killed_everywhere.items() if not same] == []


def test_no_kill_leaves_keys_or_noise(killed_everywhere):
    """When a run is over its keys and segments are gone, whatever happened to it on the way."""
    assert {nth: left for nth, (_, left) in killed_everywhere.items() if left} == {}


def test_every_file_torn_once(tmp_path, expected):
    """A file that was not synced may be half there after a power failure."""
    points = itertools.count(1, 2 * STRIDE)
    for nth, after in kill_everywhere(group_by(), tmp_path, points, where="fsync", torn=True):
        assert is_unharmed(after, expected), f"sync {nth}"

    assert nth > 20


def test_killed_at_every_start(tmp_path, expected):
    """Kills upon kills: each start gets a little further than the one before."""
    kills = (BeforeDiskOperation(nth) for nth in itertools.count(9))
    after = kill_and_replay(group_by(), tmp_path, kills)

    assert len(after.statuses) > 6
    assert is_unharmed(after, expected)


def test_keys_that_nobody_derives(tmp_path, expected):
    """With random run id and keys, as in real life, a replayed release has the bytes it had."""
    kind = replace(
        group_by(),
        start=lambda place: start(place, fixed=False, sink=CheckingSink(place, lambda: None)),
    )
    kills = (BeforeDiskOperation(nth) for nth in itertools.count(11, 2))
    after = kill_and_replay(kind, tmp_path, kills)

    assert len(after.statuses) > 6
    assert after.published.keys() == expected.keys()
    assert after.charges == 1


@pytest.mark.parametrize(
    "asked",
    [
        query(min_change=1, public_groups=["/1", "/2", "/none"], nonnegative=True),
        query(window=None, every="30 minutes", privacy_unit_period="forever", allowed_lateness="0"),
        query(every=None, time_zone="Asia/Kathmandu", aggregates=query().aggregates[:1]),
        LOOKING_BACK,
        CHOOSING,
        CHOOSING_ALL,
        SHARING,
        SHARING_CHOSEN,
    ],
    ids=[
        *("thinned", "one window", "once per window", "looking back", "chosen bounds"),
        *("clamps too", "shared noise", "shared, chosen"),
    ],
)
def test_other_shapes_of_query(tmp_path, asked):
    """Thinned tables, public keys, earlier windows, one window: all of it is in the state."""
    unbroken = whole(tmp_path / "whole", asked)
    for nth in range(20, 120, 23):
        after = kill_and_replay(group_by(asked), tmp_path / str(nth), BeforeDiskOperation(nth))

        assert after.published == unbroken


def test_killed_from_outside(tmp_path, expected):
    """Another process sends the signal when a certain release is there."""
    for count in range(1, len(expected), 3):
        kill = WhenSeen(lambda place: len(list((place / "out").glob("*.parquet"))) >= count)  # noqa: B023

        assert is_unharmed(kill_and_replay(group_by(), tmp_path / str(count), kill), expected)


def test_killed_before_the_charge(tmp_path, expected):
    """The run exists, nothing was charged and nothing drawn: the next start pays, once."""
    seen = []

    def look(place):
        seen.append((place / "state" / "run.dps").exists())
        seen.append(charges(place / "state" / "ledger"))

    after = kill_and_replay(group_by(), tmp_path, AtCall(QuerySpend, "pay"), damage=look)

    assert seen == [True, 0]
    assert is_unharmed(after, expected)


def test_killed_while_the_directory_is_made(tmp_path):
    """Random run ids: a log without a run is no reason to refuse the directory for ever."""
    kind = group_by(SHORT, fixed=False)
    for nth in range(1, 24, 2):
        after = kill_and_replay(kind, tmp_path / str(nth), BeforeDiskOperation(nth))

        assert after.charges == 1


def test_buckets_and_threads_do_not_matter(tmp_path, expected):
    """How the work is divided changes nothing, nor does it between two starts."""
    write(tmp_path, table())
    for releases, how in ((3, {"buckets": 3, "threads": 2}), (4, {"threads": 1}), (5, {})):
        how = EngineOptions(snapshot_every=2, run_id=RUN, **how)
        break_off(tmp_path, releases, options=how)

    start(tmp_path).finish()

    assert published(tmp_path) == expected
    assert charges(tmp_path / "state" / "ledger") == 1


def test_a_step_that_is_bounded_ahead_meets_the_same_state(tmp_path):
    """Windows and periods end at every other step, while the next step's rows are bounded."""
    short = {
        "window": dps.Tumble("30 minutes"),
        "every": "15 minutes",
        "privacy_unit_period": "30 minutes",
    }
    asked = query(**short, allowed_lateness="15 minutes")
    found = []
    for threads in (1, 2, 4):
        place = tmp_path / str(threads)
        how = EngineOptions(buckets=3, threads=threads, snapshot_every=100, run_id=RUN)
        found.append(whole(place, asked, rows=table(4000), options=how))

    assert len(found[0]) > 30
    assert found[1:] == found[:1] * 2


def test_steps_that_are_logged_together(tmp_path, monkeypatch):
    """Digests of several steps are durable at once; a kill that tears them, or comes before some
    of these steps are drawn, changes nothing."""
    asked, logged = query(every="10 minutes", aggregates=query().aggregates[:1]), []
    real = InputLog.record

    def record(log, step, digests, **named):
        logged.append(len(digests))
        real(log, step, digests, **named)

    with monkeypatch.context() as patch:
        patch.setattr(InputLog, "record", record)
        expected = whole(tmp_path / "whole", asked)
    assert sum(logged) == asked.schedule.steps
    assert max(logged) == asked.schedule.steps // 16 > 2
    kills = [BeforeDiskOperation(nth) for nth in range(40, 140, 17)]
    kills += [BeforeDiskOperation(nth, where="fsync", torn=True) for nth in (25, 40)]
    for number, kill in enumerate(kills):
        after = kill_and_replay(group_by(asked), tmp_path / str(number), kill)

        assert not after.survived
        assert is_unharmed(after, expected)


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
        assert BeforeDiskOperation(nth).strike(group_by(SHORT, **shared), tmp_path / "one")
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
    assert published(tmp_path) == expected
    assert charges(tmp_path / "state" / "ledger") == 1


def test_a_state_that_forgets_is_found_out(tmp_path, expected, monkeypatch):
    """The control: with the bounds of every period lost at a restart, the bytes differ."""
    real = snapshots.restore

    def forgets(flow, owner, part):
        if owner[0] != "period":
            return real(flow, owner, part)
        return {name: [0] * len(tables) for name, tables in part.items()}

    def forget(place):
        monkeypatch.setattr(snapshots, "restore", forgets)

    after = kill_and_replay(group_by(), tmp_path, BeforeDiskOperation(150), damage=forget)

    assert not is_unharmed(after, expected)
