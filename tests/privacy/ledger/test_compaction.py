"""A ledger that was compacted answers as before: to its runs, to new charges, and to replays.

The law is tried for a compaction after every record; compactions that drop too much break it.
"""

import json
import os
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.recovery_child import killer, watched
from dpstream.errors import DpstreamError, InvalidParameter, LedgerError, NoiseReuse
from dpstream.privacy.ledger import compaction
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import journal
from tests.support.processes import exit_status, run_in_fork, start_fork

BOOKS = {
    "users": Terms(unit="user", total=40, measure="mu_squared", delta_slack="0.5", period="day"),
    "windows": Terms(unit="w_event", window=4, total=8),
    "events": Terms(unit="event", total=20, measure="rho"),
}
STEPS = 40


class Ticks:
    """A minute passes whenever anybody looks."""

    def __init__(self, monkeypatch):
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        monkeypatch.setattr(ledgers, "_now", self)

    def __call__(self):
        self.time += timedelta(minutes=1)
        return self.time.isoformat(timespec="milliseconds")


@pytest.fixture
def ticks(monkeypatch):
    """Compactions are worth it at once, and leave the records of ten minutes alone."""
    monkeypatch.setattr(journal, "LARGE", 0)
    monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(minutes=10))
    return Ticks(monkeypatch)


def opened(path):
    """A ledger that is closed at the end."""
    return closing(Ledger(path))


def digest(run, step, data="data"):
    return f"{run}-{data}-{step}".replace(" ", "-")


def charge(run, step, amount=1, *, purpose="count", **more):
    named = {"digest": digest(run, step), "cells": Cells(first=step, last=step)} | more
    return Charge(run=run, query="q", purpose=purpose, step=step, amount=Fraction(amount), **named)


def write_history(path, steps=STEPS, seed=1):
    """Three books, two runs on each: steps, equal and other charges, intervals, covers, keys."""
    rng, made = np.random.default_rng(seed), []
    with opened(path) as ledger:
        for dataset, terms in BOOKS.items():
            ledger.open(dataset, terms)
        runs = [(dataset, f"{dataset} {n}") for dataset in BOOKS for n in range(2)]
        for dataset, run in runs:
            ledger.register(dataset, run, f"print of {run}")

        def pay(dataset, one):
            ledger.charge(dataset, one, lambda step: digest(one.run, step))
            made.append((dataset, one))

        for step in range(steps):
            for dataset, run in runs:
                known = ledger.known(run)
                if step % 9 == 0:
                    ledger.begin(dataset, run, f"{run} epoch {step}", after=known.epoch)
                epoch = ledger.known(run).epoch
                ledger.reach(dataset, run, step, [digest(run, step)], epoch=epoch, types="t")
                if step % 7 == 3:
                    ledger.note_windows(dataset, run, minted=step, final=step // 2, epoch=epoch)
                if step % 7 == 4:
                    ledger.note_windows(dataset, run, minted=0, final=step // 2 + 1, epoch=None)
                if dataset == "users" and step % 5 == 2:
                    ledger.note_begun(dataset, run, 20_000 + step // 5)
                if dataset == "users" and not step:
                    pay(dataset, charge(run, 0, 3, delta_slack=Fraction(1, 8)))
                elif dataset == "windows":
                    amount = Fraction(1, 4) if rng.integers(4) else Fraction(1, 8)
                    pay(dataset, charge(run, step, amount))
                    if step % 11 == 5:
                        pay(dataset, charge(run, step, Fraction(1, 2), purpose="t", kind="open"))
                    if step % 11 == 8:
                        cells = Cells(first=step - 3, last=step)
                        pay(dataset, charge(run, step, 0, purpose="t", kind="close", cells=cells))
                elif dataset == "events":
                    pay(
                        dataset,
                        charge(run, step, 2, cells=Cells(first=max(0, step - 1), last=step)),
                    )
                    if step % 8 == 0:
                        cells = Cells(first=step, last=step + 7)
                        pay(dataset, charge(run, step, 1, purpose="c", kind="cover", cells=cells))
        ledger.note_adoption("users", "users 0", because="moved", who="me")
        ledger.note_erasure("users", "users 1", 3, "chain")
        ledger.note_finish("events", "events 0", steps, epoch=ledger.known("events 0").epoch)
        for run in ("users 1", "windows 1"):
            ledger.end(run[:-2], run, because="its state is lost", who="me")
        ledger.register("users", "unbegun", "print", analyst="ana", kept=True)
        ledger.charge("users", charge("unbegun", 0, 3), lambda step: digest("unbegun", step))
        ledger.allow("users", "ana", share="1/2", because="agreed", who="me")
        ledger.void("users", "unbegun", because="the wrong query", who="me")
        more = replace(BOOKS["events"], total=Fraction(21))
        ledger.grow("events", more, because="agreed", who="me")
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "book"
    with pytest.MonkeyPatch.context() as patch:
        Ticks(patch)
        made = write_history(path)
    with opened(path) as ledger:
        return list(ledger.history()), made, path


def answers(ledger, made):
    """All that a ledger is ever asked, and what it says to charges that are made again."""
    told = [ledger.report(), {one.run: ledger.known(one.run) for _, one in made}]
    for dataset, one in made:
        told += [_charge(ledger, dataset, one, data) for data in ("data", "other")]
        wanted = charge("new", one.step, 1)
        told.append(ledger._book(dataset, oldest=one.step).account.loss_with(wanted))
    return told


def _charge(ledger, dataset, one, data):
    try:
        return ledger.charge(dataset, one, lambda step: digest(one.run, step, data))
    except DpstreamError as problem:
        return type(problem)


def read(records):
    """A ledger that has read these records."""
    ledger = Ledger()
    for record in records:
        ledger._apply(record)
    return ledger


CUTS = [*range(1, 60, 7), *range(60, 10_000, 97)]


def folded_at(records, cut, fold=compaction.fold, since=""):
    return read([*fold(records[:cut], digests_since=since, books={}), *records[cut:]])


@pytest.mark.parametrize("since", ["", "9"])
def test_a_compaction_at_any_time_changes_no_answer(written, since):
    """Balance, refusals, what is known of runs, replays, and replays with other data."""
    records, made, _ = written
    expected = answers(read(records), made)
    cuts = [cut for cut in CUTS if cut <= len(records)]

    assert {NoiseReuse, False} <= {one for one in expected if isinstance(one, type | bool)}
    assert [
        cut for cut in cuts if answers(folded_at(records, cut, since=since), made) != expected
    ] == []
    assert len(compaction.fold(records, digests_since="9", books={})) < len(records) / 3


def without(name):
    """A compaction that forgets records with such a field."""

    def fold(records, **named):
        return [record for record in compaction.fold(records, **named) if name not in record]

    return fold


def joins(changed):
    """A compaction that joins charges although they differ."""

    def fold(records, **named):
        return compaction.fold([record | changed(record) for record in records], **named)

    return fold


def newest_keys(records, **named):
    """A compaction that takes the last word of window keys for the highest."""
    last = {r["run"]: r for r in records if "minted" in r}
    others = [record for record in records if "minted" not in record]
    return [*compaction.fold(others, **named), *last.values()]


BROKEN = {
    "charges": without("amount"),
    "old charges": lambda records, **named: [
        record
        for record in compaction.fold(records, **named)
        if "amount" not in record or record["step"] > 20 or record["dataset"] == "users"
    ],
    "intervals": without("kind"),
    "epochs": without("epoch"),
    "steps": without("reached"),
    "erased units": without("erasure"),
    "fingerprints": without("fingerprint"),
    "the end of a series": without("finished"),
    "the ends of runs": without("ended"),
    "begun periods": without("begun"),
    "budgets": without("grown"),
    "shares": without("allowed"),
    "what was given back": without("voided"),
    "window keys": newest_keys,
    "digests of charges": joins(lambda r: {"digest": ""} if "amount" in r else {}),
    "amounts": joins(lambda r: {"amount": "1/8"} if r.get("purpose") == "count" else {}),
}


@pytest.mark.parametrize("lost", BROKEN)
def test_a_compaction_that_loses_something_is_caught(written, lost):
    """The controls of the law above."""
    records, made, _ = written

    assert answers(folded_at(records, len(records), BROKEN[lost]), made) != answers(
        read(records), made
    )


def test_digests_stay_as_long_as_a_backup_needs_them(written):
    """The newest of each run for ever, others up to the day that is asked for."""
    records, *_ = written
    long_run = [
        {"dataset": "users", "run": "users 0", "reached": step, "digests": [f"d{step}"],
         "types": "t", "at": f"2027-01-{1 + step // 100:02d}"}
        for step in range(STEPS, 2000)
    ]  # fmt: skip

    def kept(since):
        folded = compaction.fold([*records, *long_run], digests_since=since, books={})
        mine = [r for r in folded if "reached" in r and r["run"] == "users 0"]
        return [digest for record in mine for digest in compaction._digests(record)]

    assert kept("")[-1960:] == [f"d{step}" for step in range(STEPS, 2000)]
    assert len(kept("")) == 2000
    assert 1000 <= len(kept("2027-01-11")) < 1000 + 256
    assert kept("2027-01-11")[-1000:] == kept("")[-1000:]
    assert 256 <= len(kept("9")) < 512


@pytest.fixture
def book(tmp_path, ticks, written):
    """A long ledger in a file, just written."""
    records, _, path = written
    for suffix in ("", ".head"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"book{suffix}")
    ticks.time = datetime.fromisoformat(records[-1]["at"])
    return tmp_path / "book"


def test_a_compacted_file_is_shorter_and_says_the_same(book):
    """For who compacts it, for who has it open, and for who opens it; and it goes on."""
    with opened(book) as first, opened(book) as second:
        expected, size, head = first.report(), book.stat().st_size, first.head()
        assert second.report() == expected
        first.compact()
        ledger_line, *rest = book.read_text().splitlines()
        folded = json.loads(ledger_line[17:])
        assert (folded["format"], len(rest) < 15) == (2, True)
        assert book.stat().st_size < size / 2
        assert (first.report(), first.head()) == (expected, head)
        assert first.has(head)
        first.charge("users", charge("new", 0, 5))
        assert second.report() == first.report()  # it had read up to the end
        second.charge("users", charge("newer", 0, 5))
        for _ in range(20):
            first.begin("users", "users 0", "e", after=first.known("users 0").epoch)
        first.compact()
        first.charge("users", charge("newest", 0, 5))
        with opened(book) as third:
            assert third.report() == first.report() == second.report()
    assert sorted(path.name for path in book.parent.iterdir()) == ["book", "book.head"]


def test_who_has_read_less_than_was_folded_starts_over(book, ticks):
    """A process that slept while the file went on, and what it had read was folded."""
    with opened(book) as sleeper, opened(book) as other:
        assert sleeper.report() == other.report()
        for number in range(30):
            other.charge("users", charge(f"run {number}", 0, Fraction(1, 10)))
        other.compact()
        assert other._journal._base.offset > sleeper._journal.head()[0]
        assert sleeper.report() == other.report()
        sleeper.charge("users", charge("last", 0, 1))
        assert other.report() == sleeper.report()


def test_old_steps_are_read_back_from_a_compacted_file(book, monkeypatch):
    """A new run that begins at step 0 meets what was charged there, and covers are found."""
    monkeypatch.setattr(ledgers, "_KEEP", 4)
    asked = charge("new", 3, 7)
    with opened(book) as ledger:
        ledger.report()
        expected = ledger._book("windows").account.loss_with(asked)
        end = ledger.interval_end("events", "events 0", "q", "c", 8)
        ledger.compact()
    with opened(book) as ledger:
        ledger.report()
        assert ledger._book("windows").account.since > 20
        assert ledger._book("windows", oldest=3).account.loss_with(asked) == expected
        assert ledger.interval_end("events", "events 0", "q", "c", 8) == end == 15
        assert ledger.interval_end("events", "events 0", "q", "c", 9) == -1


def test_a_copy_of_a_compacted_ledger_is_another_file(book, tmp_path):
    """It replaces nothing, compacted again or not; nor is it taken when it is put in its place."""
    with opened(book) as ledger:
        before = ledger.identity()
        ledger.compact()
        after = ledger.identity()
        assert after != before
        assert (ledger.replaces(before), ledger.replaces(after)) == (True, True)
        assert not ledger.replaces("another")
        for suffix in ("", ".head"):
            shutil.copy(f"{book}{suffix}", tmp_path / f"copy{suffix}")
        with opened(tmp_path / "copy") as copy:
            assert not copy.replaces(before)
            for _ in range(20):
                copy.begin("users", "users 0", "e", after=copy.known("users 0").epoch)
            copy.compact()
            assert (copy.replaces(before), copy.replaces(after)) == (False, False)
        os.replace(tmp_path / "copy", book)
        with pytest.raises(LedgerError, match="replaced or removed while in use"):
            ledger.report()


def test_a_damaged_or_cut_compacted_ledger_is_refused(book):
    """Its first line has a tag; its end has a head; an older file is not what the head says."""
    older = book.read_bytes()
    with opened(book) as ledger:
        ledger.compact()
        ledger.charge("users", charge("new", 0, 5))
    whole = book.read_bytes()
    for content in (
        whole.replace(b'"fingerprint":"print of users 0"', b'"fingerprint":"print of users 1"', 1),
        whole[: whole.rindex(b"\n", 0, -1) + 1],
        older,
    ):
        assert content != whole
        book.write_bytes(content)
        with pytest.raises(LedgerError), opened(book) as ledger:
            ledger.report()
    book.write_bytes(whole)
    with opened(book) as ledger:
        assert ledger.left("users") == 40 - 3 * 2 - 5


def test_a_repair_takes_a_compacted_ledger_as_it_is(book):
    """Without its head, and with what it has."""
    with opened(book) as ledger:
        ledger.compact()
        expected = ledger.report()
    (book.parent / "book.head").unlink()
    with opened(book) as ledger:
        ledger.repair(because="lost")
        assert ledger.report() == expected
        ledger.charge("users", charge("new", 0, 5))
    with opened(book) as ledger:
        assert [r["repaired"] for r in ledger.history() if "repaired" in r] == ["lost"]


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_operation_of_a_compaction_loses_nothing(book, torn):
    """Before every operation on the disk, and with files that are torn as the power fails."""
    with opened(book) as ledger:
        expected = ledger.report()
    kept = {path: path.read_bytes() for path in book.parent.iterdir()}
    statuses = []
    for nth in range(1, 100):
        for path, content in kept.items():
            path.write_bytes(content)

        def work(nth=nth):
            with opened(book) as ledger:
                ledger.report()
                where = {"where": "any", "nth": nth, "torn": torn}
                with watched(killer({"kill": where}, Counter())):
                    ledger.compact()

        statuses.append(run_in_fork(work))
        with opened(book) as ledger:
            assert ledger.report() == expected
            ledger.charge("users", charge("new", 0, 5))
            ledger.compact()
        with opened(book) as ledger:
            assert ledger.left("users") == 40 - 3 * 2 - 5
        assert len(list(book.parent.iterdir())) == 2  # nothing is left lying about
        if statuses[-1] == 0:
            break
    assert len(statuses) > (2 if torn else 4)
    assert set(statuses[:-1]) == {-9}


def test_several_processes_share_a_ledger_while_they_compact_it(book, monkeypatch):
    """Every charge of every process is there once, whoever compacts in between."""
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(minutes=3))
    each, processes = 25, 4

    def work(mine):
        with opened(book) as ledger:
            for number in range(each):
                one = charge(f"process {mine} {number}", 0, Fraction(1, 8), digest="d")
                assert ledger.charge("users", one, lambda step: "d")
                if number % 5 == mine:
                    ledger._look_again = ""
                    ledger.compact()

    pids = [start_fork(lambda n=n: work(n)) for n in range(processes)]
    assert [exit_status(pid) for pid in pids] == [0] * processes
    with opened(book) as ledger:
        assert ledger.left("users") == 40 - 3 * 2 - Fraction(each * processes, 8)
        (users,) = [one for one in ledger.report() if one["dataset"] == "users"]
        assert users["runs"] == 2 + each * processes
        assert any("compacted" in record for record in ledger.history())


def test_threads_that_share_a_ledger_may_all_compact_it(book, monkeypatch):
    """None of them meets the descriptor of the file that another one has replaced."""
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta(0))

    def work(ledger, mine):
        for number in range(30):
            ledger.charge("users", charge(f"thread {mine} {number}", 0, Fraction(1, 8)))
            ledger.compact()
            assert ledger.replaces(ledger.identity())
        return True

    with opened(book) as ledger, ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, [ledger] * 3, range(3)))
        assert ledger.left("users") == 40 - 3 * 2 - Fraction(90, 8)


def test_a_ledger_that_cannot_be_written_anew_goes_on(book, monkeypatch):
    """A full disk, or a folder that is not ours: said, and nothing is lost."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with opened(book) as ledger:
        expected = ledger.report()
        monkeypatch.setattr(journal.os, "replace", full)
        with pytest.warns(RuntimeWarning, match="cannot be compacted: No space left"):
            ledger.compact()
        monkeypatch.undo()
        assert ledger.report() == expected
        ledger.charge("users", charge("new", 0, 5))
        monkeypatch.setattr(journal.os, "geteuid", lambda: -1)
        ledger._look_again = ""
        ledger.compact()  # somebody else's file is theirs to compact
        assert b'"format":1' in book.read_bytes()[:100]


def test_a_short_ledger_stays_as_it_is(tmp_path):
    """Nor does an older version have to know that there are compactions."""
    write_history(tmp_path / "book", steps=5)
    content = (tmp_path / "book").read_bytes()
    with opened(tmp_path / "book") as ledger:
        ledger.compact()

    assert (tmp_path / "book").read_bytes() == content
    with pytest.raises(InvalidParameter, match="backups must be a length of time"):
        Ledger(tmp_path / "book", backups=timedelta(days=-1))


def test_positions_stay_as_long_as_digests(tmp_path, ticks):
    """A backup of a live run reads again to where each step had read."""
    path, run = tmp_path / "book", "users 0"
    with opened(path) as ledger:
        ledger.open("users", BOOKS["users"])
        ledger.begin("users", run, "epoch", after="")
        for step in range(40):
            facts = {
                "epoch": "epoch",
                "types": "t",
                "positions": {"file": step} if step % 2 else {},
            }
            ledger.reach("users", run, step, [digest(run, step)], **facts)
        before = ledger.steps_of(run)
        ledger.compact()
        assert "positions" in path.read_text().splitlines()[0]  # folded
        assert ledger.steps_of(run) == before
    with opened(path) as ledger:
        digests, positions = ledger.steps_of(run)

    assert [*digests] == sorted(positions) == [*range(40)]
    assert positions[39] == {"file": 39}
    assert positions[2] == {}
