"""Copies that race, kills at bad moments, and refusals that must leave things as they were."""

import dataclasses
import itertools
import shutil

import numpy as np
import pytest

import dpstream as dps
from dpstream.engines.embedded.snapshots import DamagedSnapshot
from dpstream.engines.embedded.step_rows import RunInput
from dpstream.errors import StateError
from dpstream.mechanisms import BltCounter, BucOrder, Sample
from dpstream.mechanisms.runner import SavedRun
from dpstream.privacy.ledger.ledger import Ledger
from tests.support.fixed import SECRET
from tests.support.lost_files import Grouped, Series, rows, some

RUN = Grouped()
OVERTAKEN = "was started again by another process"


@pytest.fixture
def copies(tmp_path):
    """A state with its ledger outside, broken off after a release, and a copy of it."""
    book = tmp_path / "book"
    some(RUN, tmp_path / "one", book, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    return tmp_path / "one", tmp_path / "two", book


def test_of_two_copies_that_were_opened_at_once_one_draws(tmp_path):
    """Both agree with the ledger when they are opened; the epoch is compared and set."""
    book = tmp_path / "book"
    counter, facts = BltCounter(epsilon=1, delta=1e-9, steps=8), {"secret": SECRET, "ledger": book}
    dps.Runner(counter, state=tmp_path / "one", **facts).close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (dps.Runner(counter, state=tmp_path / name, **facts) for name in ("one", "two"))
    one.step([5])
    with pytest.raises(StateError, match=OVERTAKEN):
        two.step([6])
    one.close()
    two.close()


def test_a_process_that_is_overtaken_mints_no_key(copies):
    """It has logged its next step already, which opens a window; its key would be another one."""
    one, two, book = copies
    ahead = RUN.start(one, book, 0)
    before = dict(RUN.shown(table) for table in itertools.islice(ahead, 2))
    shutil.rmtree(two)
    shutil.copytree(one, two)
    after = some(RUN, two, book, 6)
    rest, shown = (RUN.shown(table) for table in ahead), before
    with pytest.raises(StateError, match=OVERTAKEN):
        shown.update(rest)
    ahead.close()

    assert all(after[key] == shown[key] for key in after.keys() & shown.keys())
    assert some(RUN, two, book, 6) is not None  # it can still go on


def test_the_key_of_another_window_does_not_open(copies):
    """Each is wrapped for its window."""
    one, _, book = copies
    some(RUN, one, book, 5)
    keys = sorted((one / "windows").glob("*.key"))
    assert len(keys) > 1
    keys[0].write_bytes(keys[1].read_bytes())
    shutil.rmtree(one / "segments")
    with pytest.warns(DamagedSnapshot), pytest.raises(StateError, match="does not open"):
        some(RUN, one, book, 2)


def test_new_runs_from_copies_do_not_fork_a_book(tmp_path):
    """A copy of the ledger is no other ledger; nor is one that was rolled back."""

    def run(name, **more):
        state = tmp_path / name
        return dps.Runner(Sample(epsilon=1, window=2), state=state, secret=SECRET, **more)

    runner = run("one")
    early = {path: path.read_bytes() for path in (tmp_path / "one").glob("ledger*")}
    list(runner.feed(np.array([[3], [4], [5]])))
    runner.save()
    with pytest.raises(StateError, match="in use"):
        run("one", new_run=True)
    runner.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(StateError, match="two copies of a book"):
        run("two", new_run=True)
    for path, content in early.items():
        path.write_bytes(content)
    with pytest.raises(StateError, match="rolled back"):
        run("one", new_run=True)


def test_a_second_erasure_does_not_undo_the_first(tmp_path):
    """Nor does a kill before the ledger was told of it keep a run from going on."""
    state, book, query = tmp_path / "state", tmp_path / "book", Grouped.query
    facts = {"source": rows(0), "state": state, "secret": SECRET, "ledger": book}
    run = dps.run(query, **facts, options=Grouped.options)
    for number, _ in enumerate(run):
        if number == 3:
            run.stop()
    segments = {p: p.read_bytes() for p in state.rglob("*.dps") if "run" not in p.name}
    dps.run(query, **facts).erase_unit(5)
    for path in [*state.glob("manifest-*"), *state.glob("segments/*")]:
        path.unlink()
    for path, content in segments.items():
        path.write_bytes(content)
    with pytest.raises(StateError, match="a unit was erased"):
        dps.run(query, **facts).erase_unit(6)
    with pytest.raises(StateError, match="a unit was erased"):
        dps.run(query, **facts).finish()


def test_a_kill_before_a_second_erasure_is_noted_harms_nothing(tmp_path, monkeypatch):
    """The snapshot says what it was before; the ledger knows that one."""
    state, book, query = tmp_path / "state", tmp_path / "book", Grouped.query
    facts = {"source": rows(0), "state": state, "secret": SECRET, "ledger": book}
    run = dps.run(query, **facts, options=Grouped.options)
    for number, _ in enumerate(run):
        if number == 3:
            run.stop()
    dps.run(query, **facts).erase_unit(5)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "note_erasure", stop)
        with pytest.raises(KeyboardInterrupt):
            dps.run(query, **facts).erase_unit(6)

    assert len(list(dps.run(query, **facts))) == 2


def stop(*_, **__):
    raise KeyboardInterrupt


def test_a_series_that_waits_for_its_first_charge_goes_on(tmp_path, monkeypatch):
    """A delayed mechanism has rows before it is charged."""
    query = dps.sql("""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit = 'event',
        mechanism = 'buc_order', mechanism_options = (lo = 0, hi = 100, delay = 4),
        privacy_unit_column = user, time_unit = 's', start = '1970-01-01',
        end = '1970-01-01 06:00') window_start, COUNT(*) AS "count"
        FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR) GROUP BY window_start""")
    state = {"state": tmp_path / "state", "ledger": tmp_path / "book"}
    facts = {"source": rows(0), "secret": SECRET, "options": Grouped.options, **state}
    read = RunInput.read
    with monkeypatch.context() as patch:
        patch.setattr(RunInput, "read", lambda run, n, log: None if n > 1 else read(run, n, log))
        assert list(dps.run(query, **facts)) == []  # stopped after two steps
    assert list((tmp_path / "state").glob("rows-*.dps"))

    assert len(list(dps.run(query, **facts))) == 6


@pytest.mark.parametrize("inside", [True, False])
def test_a_kill_before_the_first_snapshot_begins_again(tmp_path, monkeypatch, inside):
    """The directory never was a run: neither a Runner nor a series is refused for ever."""
    mechanism, data = Sample(epsilon=1, window=2), [[3], [4]]
    facts = {"secret": SECRET, "ledger": None if inside else tmp_path / "book"}
    with monkeypatch.context() as patch:
        patch.setattr("dpstream.mechanisms.runner.write_snapshot", stop)
        with pytest.raises(KeyboardInterrupt):
            dps.release(mechanism, data, state=tmp_path / "a", **facts)
        with pytest.raises(KeyboardInterrupt):
            some(Series(), tmp_path / "b", facts["ledger"] and tmp_path / "other", 1)

    assert len(dps.release(mechanism, data, state=tmp_path / "a", **facts)) == 2
    assert some(Series(), tmp_path / "b", facts["ledger"] and tmp_path / "other", 1)


class Longer(Grouped):
    """Windows of five hours: one is final, and its key erased, in the middle of the next."""

    query = dataclasses.replace(
        Grouped.query,
        end="1970-01-01T15:00",
        window=dps.Tumble("5 hours"),
        privacy_unit_period="5 hours",
    )


def test_a_refused_start_removes_nothing(tmp_path):
    """With its segments away a run is refused; with them back it goes on."""
    state, book = tmp_path / "state", tmp_path / "book"
    shown = some(Longer(), state, book, 9)
    assert (state / "windows" / "final").exists()
    (state / "segments").rename(tmp_path / "aside")
    with pytest.warns(DamagedSnapshot), pytest.raises(StateError, match="restore them"):
        some(Longer(), state, book, 9)
    shutil.rmtree(state / "segments")
    (tmp_path / "aside").rename(state / "segments")

    again = some(Longer(), state, book, 9)
    assert again.keys() & shown.keys()
    assert all(again[key] == shown[key] for key in again.keys() & shown.keys())


def test_a_lost_ledger_is_not_made_by_who_misses_it(copies):
    """Whoever finds it can put it back."""
    one, _, book = copies
    aside = book.with_name("aside")
    book.rename(aside)
    with pytest.raises(StateError, match="there is no ledger at"):
        some(RUN, one, book, 1)
    assert not book.exists()
    aside.rename(book)

    assert some(RUN, one, book, 1)


def test_a_damaged_newest_snapshot_does_not_stop_the_next_save(tmp_path):
    """The older generation was used; the damaged one is replaced."""
    state = tmp_path / "state"
    facts = {"mechanism": Sample(epsilon=1, window=2), "state": state, "secret": SECRET}
    runner = dps.Runner(**facts)
    for number in range(3):
        runner.step([number])
        runner.save()
    runner.close()
    (state / "snapshot.dps").write_bytes(b"")
    again = dps.Runner(**facts)
    again.step([again.steps_done])
    again.save()
    again.close()

    assert SavedRun.find(state).snapshot["steps"] == 3


def test_a_finished_series_is_not_fed_on(tmp_path):
    """What a delay held back is published; a kill before it is saved changes nothing."""
    facts = {"state": tmp_path / "state", "secret": SECRET, "ledger": tmp_path / "book"}
    mechanism = BucOrder(epsilon=1, lo=0, hi=10, delay=4)
    runner = dps.Runner(mechanism, **facts)
    list(runner.feed(np.array([[3], [4]])))
    shown = [release.values.tolist() for release in runner.finish()]
    runner.close()
    again = dps.Runner(mechanism, **facts)
    with pytest.raises(StateError, match="was finished after 2 steps"):
        list(again.feed(np.array([[3], [4], [5]])))
    list(again.feed(np.array([[3], [4]])))

    assert [release.values.tolist() for release in again.finish()] == shown
    again.close()
