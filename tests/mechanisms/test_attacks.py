"""Ways to make one noise meet two inputs, or one budget pay twice; each must be refused."""

import shutil
import threading
from contextlib import suppress

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import BudgetExceeded, InvalidInput, LedgerError, NoiseReuse, StateError
from dpstream.mechanisms import Naive, Sample, Spas, Uniform, find
from dpstream.privacy.ledger.charges import Cells, Charge
from dpstream.privacy.ledger.store import LedgerStore
from tests.support.fixed import RUN, SECRET

A = np.arange(20)[:, None]
B = A + 1000
FIXED = {"secret": SECRET, "run_id": RUN}


def test_a_shorter_replay_of_other_data(tmp_path):
    """A batch is recorded with its last digest; a replay that stops before it proves nothing."""
    ledger = dps.Ledger(tmp_path / "ledger")
    uniform = Uniform(epsilon=1, window=3)
    dps.release(uniform, A, ledger=ledger, **FIXED)
    for data in (B[:19], A[:19]):
        with pytest.raises(NoiseReuse):
            dps.release(uniform, data, ledger=ledger, **FIXED)


def test_the_same_run_under_another_secret(tmp_path):
    """It would be a second, independent noisy copy for nothing."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(Sample(epsilon=1, window=3), A, ledger=ledger, **FIXED)
    with pytest.raises(NoiseReuse):
        dps.release(Sample(epsilon=1, window=3), A, ledger=ledger, secret=SECRET[::-1], run_id=RUN)


def test_a_feed_given_up_and_begun_with_other_data():
    """What was paid ahead for A does not serve B."""
    runner = dps.Runner(Uniform(epsilon=1, window=3), **FIXED)
    feed = runner.feed(A)
    next(feed)
    other = runner.feed(B[1:])
    with pytest.raises(NoiseReuse):
        next(other)
    assert len(list(runner.feed(A[1:]))) == 19


def test_two_feeds_at_once():
    """A feed whose run has moved on stops."""
    runner = dps.Runner(Sample(epsilon=1, window=3), **FIXED)
    one, two = runner.feed(A), runner.feed(A)
    next(one)
    next(two)
    with pytest.raises(InvalidInput, match="moved on"):
        next(one)


def test_one_run_id_for_two_datasets(tmp_path):
    """Noise is tied to the dataset too."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(Sample(epsilon=1, window=3), A, ledger=ledger, dataset="a", **FIXED)
    with pytest.raises(NoiseReuse):
        dps.release(Sample(epsilon=1, window=3), B, ledger=ledger, dataset="b", **FIXED)
    elsewhere = dps.release(Sample(epsilon=0.01, window=3), A, dataset="c", **FIXED)
    here = dps.release(Sample(epsilon=0.01, window=3), A, dataset="d", **FIXED)
    assert (elsewhere.values != here.values).any()


def spas(state, **more):
    """A Spas run in a state directory."""
    return dps.Runner(Spas(epsilon=1, window=5), state=state, **FIXED, **more)


def saved_with_tests(folder, ledger):
    """A Spas run saved while a run of tests is open."""
    runner = spas(folder, ledger=ledger)
    data = np.full((60, 1), 50)
    for _ in runner.feed(data):
        if runner.steps_done > 20 and runner._progress.state.run is not None:
            break
    runner.save()
    return runner, data


def test_copies_do_not_test_for_free(tmp_path):
    """A copy is refused; as a new run it pays again for the run of tests that it holds."""
    ledger = dps.Ledger(tmp_path / "ledger")
    runner, data = saved_with_tests(tmp_path / "state", ledger)
    runner.close()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with spas(tmp_path / "state", ledger=ledger) as later:
        list(later.feed(data[:1]))
    with pytest.raises(StateError, match="another copy of it has gone on since"):
        spas(tmp_path / "copy", ledger=ledger)

    def open_runs():
        history = [r for r in ledger.history() if r.get("kind") == "open"]
        return len(history)

    before, refused = open_runs(), 0
    try:
        spas(tmp_path / "copy", ledger=ledger, new_run=True)
    except BudgetExceeded:
        refused = 1
    assert open_runs() - before + refused == 1


@pytest.mark.parametrize("damage", ["rolled back", "deleted", "another", "swapped"])
def test_a_ledger_that_forgot_is_refused(tmp_path, damage):
    """Rolled back, deleted, mistyped or swapped: the run does not go on under a fresh book."""
    path, head = tmp_path / "ledger", tmp_path / "ledger.head"
    sample, place = Sample(epsilon=1, window=3), {"state": tmp_path / "state", **FIXED}
    runner = dps.Runner(sample, ledger=path, **place)
    list(runner.feed(A[:3]))
    early = path.read_bytes(), head.read_bytes()
    list(runner.feed(A[3:6]))
    runner.save()
    runner.close()
    if damage == "rolled back":
        path.write_bytes(early[0])
        head.write_bytes(early[1])
    elif damage == "deleted":
        path.unlink()
        head.unlink()
    elif damage == "swapped":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)
    asked = tmp_path / "mistyped" if damage == "another" else path
    with pytest.raises(StateError, match=r"rolled back|is not the file|there is no ledger"):
        dps.Runner(sample, ledger=asked, **place)


def test_a_ledger_rolled_back_after_the_snapshot_is_refused(tmp_path):
    """The log remembers how far the ledger had come."""
    path = tmp_path / "ledger"
    sample, place = Sample(epsilon=1, window=3), {"state": tmp_path / "state", **FIXED}
    runner = dps.Runner(sample, ledger=path, **place)
    head = tmp_path / "ledger.head"
    early = path.read_bytes(), head.read_bytes()
    list(runner.feed(A[:6]))
    list(runner.feed(A[6:9]))
    runner.close()
    path.write_bytes(early[0])
    with pytest.raises(LedgerError, match="shorter than it was"):
        dps.Runner(sample, ledger=path, **place)
    head.write_bytes(early[1])
    with pytest.raises(StateError, match="rolled back"):
        dps.Runner(sample, ledger=path, **place)


def test_a_ledger_replaced_while_open_is_noticed(tmp_path):
    """An open ledger whose file was renamed over does not charge a file that nobody sees."""
    path = tmp_path / "ledger"
    ledger = dps.Ledger(path)
    dps.release(Sample(epsilon=1, window=3), A, ledger=ledger)
    (tmp_path / "new").write_bytes(b"")
    (tmp_path / "new").rename(path)
    with pytest.raises(LedgerError, match="replaced or removed"):
        dps.release(Sample(epsilon=1, window=3), A, ledger=ledger, dataset="more")


def test_an_interrupt_while_reading_loses_no_charge(tmp_path, monkeypatch):
    """After Ctrl-C in the middle of catching up, the ledger reads everything again."""
    path = tmp_path / "ledger"
    dps.release(Sample(epsilon=1, window=3), A, ledger=dps.Ledger(path))
    whole = dps.Ledger(path).report()
    late, calls, real = dps.Ledger(path), [], LedgerStore.apply

    def interrupted(self, record):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self, record)

    monkeypatch.setattr(LedgerStore, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        late.report()

    assert late.report() == whole


def test_threads_do_not_overspend_a_book_in_memory():
    """Charges from several threads are admitted one after another."""
    ledger = dps.Ledger()
    ledger.open("s", dps.Terms(unit="event", total=1))
    admitted, start = [], threading.Barrier(4)

    def charge(number):
        start.wait()
        for index in range(20):
            one = Charge(
                run=f"{number}",
                query="",
                purpose=f"p{index}",
                step=0,
                amount=1,
                cells=Cells(first=0, last=0),
            )
            with suppress(BudgetExceeded):
                admitted.append(ledger.charge("s", one))

    threads = [threading.Thread(target=charge, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == 1


def test_a_book_fixes_what_one_event_may_change(tmp_path):
    """Counts and values of a public range do not share a book: their events differ."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(Naive(epsilon="1/2", lo=0, hi=1000), A, ledger=ledger)
    with pytest.raises(LedgerError, match="one value within"):
        dps.release(Sample(epsilon="1/2", window=1), A, ledger=ledger)


def test_forgotten_steps_still_fill_their_window(monkeypatch):
    """A late charge just after the forgotten part meets all of its window."""
    monkeypatch.setattr("dpstream.privacy.ledger.store._KEEP", 20)
    ledger = dps.Ledger()
    ledger.open("s", dps.Terms(unit="w_event", window=10, total=1))

    def charge(run, step):
        cells = Cells(first=step, last=step)
        one = Charge(run=run, query="", purpose="p", step=step, amount=1, cells=cells)
        ledger.charge("s", one)

    for step in range(0, 400, 10):
        charge("a", step)
    since = ledger._shelf.books["s"].account.since
    assert since > 0
    for step in range(since, since + 20):
        with pytest.raises(BudgetExceeded):
            charge("b", step)


def test_every_mechanism_can_be_found():
    """The names used here are those of the registry."""
    assert {find("sample"), find("spas")} == {Sample, Spas}


KEYED = {"epsilon": 1, "delta": 1e-9, "steps": 9, "keys": True}


def test_a_keyed_counter_shares_no_book_of_other_events(tmp_path):
    """A sum of up to 1,000 per event is not paid from a book of counts."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.Counter(ledger=ledger, **KEYED).add({"a": 1})
    with pytest.raises(LedgerError, match="open another book"):
        dps.Counter(ledger=ledger, sensitivity=1000, **KEYED)


def test_a_keyed_run_is_tied_to_its_secret_and_its_data(tmp_path):
    """Another secret would be a second noisy copy, other counts the same noise over other data."""
    ledger = dps.Ledger(tmp_path / "ledger")
    first = dps.Counter(ledger=ledger, **FIXED, **KEYED).add({"a": 5})
    again = dps.Counter(ledger=ledger, **FIXED, **KEYED).add({"a": 5})
    assert first.values == again.values
    with pytest.raises(NoiseReuse):
        dps.Counter(ledger=ledger, secret=SECRET[::-1], run_id=RUN, **KEYED)
    other = dps.Counter(ledger=ledger, **FIXED, **KEYED)
    with pytest.raises(NoiseReuse):
        other.add({"a": 6})


def test_a_keyed_sum_never_wraps():
    """Sums near the end of the integers are refused, not turned negative."""
    counter = dps.Counter(**{**KEYED, "steps": 2000})
    counter.add({"a": 1})
    counter._counting._sums[:] = 2**62 - 2**52
    with pytest.raises(InvalidInput, match="62 bits"):
        counter.add({"a": 2**53 - 1})
