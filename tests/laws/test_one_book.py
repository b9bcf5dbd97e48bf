"""Laws of a book: it is one, wherever it is kept and whoever charges it, and forgets nothing."""

import os
import threading
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.errors import BudgetExceeded, DpstreamError, LedgerError, NoiseReuse
from dpstream.mechanisms import ContinGroup, Sample, Uniform
from dpstream.mechanisms.release import release
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.laws.cases import worst_loss
from tests.support.long import part_of, some_examples
from tests.support.processes import run_python

RUN = "ab" * 16


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Nothing loses its power here, so nothing has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


# --- persisting loses nothing


@st.composite
def asked(draw):
    """Charges as several runs make them: mostly in order, some late, some far behind their step."""
    made, step, opened = [], 0, {}
    for number in range(draw(st.integers(1, 14))):
        step += draw(st.integers(0, 9))
        kind = draw(
            st.sampled_from(["plain", "plain", "repeat", "late", "delayed", "open", "close"])
        )
        purpose, amount = draw(st.sampled_from("ab")), Fraction(draw(st.integers(1, 4)), 7)
        more = {}
        if kind == "repeat":
            more = {"repeat": draw(st.integers(2, 5))}
        elif kind == "open":
            purpose, more = f"interval {number}", {"kind": "open"}
            opened[purpose] = step
        elif kind == "close" and opened:
            purpose = draw(st.sampled_from(sorted(opened)))
            amount, cells = Fraction(0), Cells(first=opened.pop(purpose), last=step)
            more = {"kind": "close", "cells": cells}
        at = draw(st.integers(0, step)) if kind == "late" else step
        first = draw(st.integers(0, at)) if kind == "delayed" else at
        facts = {"run": RUN, "query": "", "purpose": purpose, "step": at, "amount": amount}
        made.append(Charge(**facts | {"cells": Cells(first=first, last=at)} | more))
        step += more.get("repeat", 1) - 1
    return made


def decision(ledger, one):
    try:
        return ledger.charge("s", one)
    except (BudgetExceeded, LedgerError, NoiseReuse) as refusal:
        return type(refusal)


def standing(ledger, charges):
    """All that can be asked of a book."""
    keys = {(c.purpose, c.cells.first) for c in charges}
    still_open = {key for key in keys if ledger.interval_end("s", RUN, "", *key) is None}
    left = [ledger.left("s", step) for step in range(0, 140, 7)]
    return ledger.report(), ledger.peak("s"), ledger.known(RUN), still_open, left


@some_examples(80, of=2)
@given(asked(), st.sampled_from([1, 3, 8, None]), st.integers(0, 14))
def test_persisting_at_any_moment_changes_nothing(tmp_path_factory, charges, width, moment):
    """A book that moves to a file decides as one that always was there, and as one in memory."""
    folder = tmp_path_factory.mktemp("books")
    unit = {1: "event", None: "user"}.get(width, "w_event")
    terms = Terms(unit=unit, window=width if unit == "w_event" else None, total=1)
    durable, memory, moved = Ledger(folder / "durable"), Ledger(), Ledger()
    books = (durable, memory, moved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpstream.privacy.ledger.ledger._KEEP", 4)
        for ledger in books:
            ledger.open("s", terms)
            ledger.register("s", RUN, "plan")
            ledger.begin("s", RUN, "epoch", after="")
            ledger.reach("s", RUN, 3, ["digest"], epoch="epoch", types="types")
        for number, one in enumerate(charges):
            if number == moment:
                moved.persist(folder / "moved")
            decisions = [decision(ledger, one) for ledger in books]
            assert decisions[0] == decisions[1] == decisions[2], one
        moved.persist(folder / "moved")
        found = [standing(ledger, charges) for ledger in (*books, Ledger(folder / "moved"))]
    for other in found[1:]:
        assert other == found[0]


def test_settled_charges_take_a_few_bytes():
    """A book in memory stays small on a long stream, and still has all of its past."""
    ledger, many = Ledger(), 40_000
    ledger.open("s", Terms(unit="w_event", window=4, total=1))
    for step in range(many):
        facts = {"run": RUN, "query": "", "purpose": "p", "step": step}
        cells = Cells(first=step, last=step)
        ledger.charge("s", Charge(**facts, amount=Fraction(1, 4), cells=cells, digest=f"{step}"))
    book = ledger._books["s"]

    assert sum(map(len, book._known.values())) < many // 1.5
    assert sum(map(len, book._settled._runs.values())) == 2
    late = Charge(**facts | {"step": 5}, amount=Fraction(1, 9), cells=Cells(first=5, last=5))
    with pytest.raises((LedgerError, NoiseReuse)):  # the same run, and it brings no proof
        ledger.charge("s", late)
    with pytest.raises(BudgetExceeded):
        ledger.charge("s", Charge(**facts | {"run": "cd" * 16, "step": 5}, amount=1, cells=cells))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("delay", [2**14, 2**15 - 1, 2**15 + 1, 2**16, 2**18, 2**20])
def test_a_charge_meets_its_past_after_any_delay(tmp_path, delay, kept):
    """What a mechanism pays up to 2^20 steps later counts at the step that it read."""
    ledger = Ledger(tmp_path / "book" if kept else None)
    ledger.open("s", Terms(unit="w_event", window=2, total=1))

    def charge(step, first, amount, purpose="p"):
        cells = Cells(first=first, last=first)
        facts = {"run": RUN, "query": "", "purpose": purpose, "amount": Fraction(amount)}
        return ledger.charge("s", Charge(**facts, step=step, cells=cells))

    for step in range(0, 2 * delay, 1024):
        charge(step, step, "1/4")
    newest = ledger._books["s"].account.newest
    for step in range(newest + 1, newest + 5):
        assert charge(step, step - delay, "1/4", "late")
    with pytest.raises(BudgetExceeded):
        charge(newest + 5, newest + 4 - delay, "3/4", "too late")
    assert ledger.left("s", newest + 4 - delay) in (Fraction(1, 2), Fraction(1, 4))


@pytest.mark.parametrize("kept", [True, False])
def test_a_mechanism_with_a_long_delay_runs_to_its_end(tmp_path, monkeypatch, kept):
    """A group that waits longer than a book looks back is published, and charged once."""
    monkeypatch.setattr("dpstream.privacy.ledger.ledger._KEEP", 16)
    ledger = Ledger(tmp_path / "book" if kept else None)
    mechanism = ContinGroup(epsilon=1, lo=0, hi=100, delay=400, threshold=50)

    assert len(release(mechanism, np.full(900, 30), ledger=ledger)) == 900
    assert ledger.peak("stream") == 1


# --- one book, many runs


class World:
    """One dataset's book under random use; what was published is known without asking it."""

    def __init__(self, seed, place):
        self.rng, self.place, self.names = np.random.default_rng(seed), place, count()
        self.published = {}  # (run, step) -> charge, for the brute-force ledger
        self.runners, self.saved, self.file = {}, {}, None
        self.ledger = Ledger()
        self.ledger.open("s", self.terms())

    @staticmethod
    def terms():
        return Terms(unit="w_event", window=3, total=1)

    def begin(self):
        epsilon, window = Fraction(int(self.rng.integers(1, 5)), 4), int(self.rng.integers(1, 4))
        kind = (Uniform, Sample)[int(self.rng.integers(2))]
        name = f"r{next(self.names)}"
        mechanism, place = kind(epsilon=epsilon, window=window), None
        if self.rng.integers(2):
            place = self.place / name
            self.saved[name] = mechanism
        self.runners[name] = Runner(mechanism, state=place, ledger=self.any_ledger(), dataset="s")

    def again(self, name, ledger):
        """The run of a state directory."""
        facts = {"state": self.place / name, "ledger": ledger, "dataset": "s"}
        return Runner(self.saved[name], **facts)

    def any_ledger(self):
        """The object, the path, or another object on the same file."""
        self.file = self.ledger.place
        ways = [self.ledger] if self.file is None else [self.ledger, self.file, Ledger(self.file)]
        return ways[int(self.rng.integers(len(ways)))]

    def step(self, name):
        runner = self.runners.get(name)
        if runner is None:
            return
        step, mechanism = runner.steps_done, runner.mechanism
        try:
            (found,) = runner.step([7])
        except (BudgetExceeded, DpstreamError):
            return
        paid = mechanism.epsilon / (mechanism.window if isinstance(mechanism, Uniform) else 1)
        if found.paid:
            self.published[runner.run_id, step] = ("cells", step, step, None, Fraction(paid))

    def some(self, names):
        names = sorted(names)
        return names[int(self.rng.integers(len(names)))] if names else None

    def steps(self):
        for _ in range(int(self.rng.integers(1, 4))):
            self.step(self.some(self.runners))

    def threads(self):
        workers = [threading.Thread(target=self.step, args=[name]) for name in list(self.runners)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def save(self):
        name = self.some(self.runners)
        if name in self.saved:
            self.runners[name].save()

    def load(self):
        """Go on with a saved run, named by any of its ledger's names, or none."""
        name = self.some(self.saved)
        if name is None:
            return
        runner = self.runners.pop(name, None)
        if runner is not None:
            runner.close()
        given = (self.ledger, self.ledger.place, Ledger())[int(self.rng.integers(3))]
        self.runners[name] = self.again(name, given)

    def restart(self):
        """Everything in memory is gone; what was saved, and a book that was, is there again."""
        for runner in self.runners.values():
            runner.close()
        place, self.runners = self.ledger.place, {}
        if place is None:  # a book in memory ends with its process, and so do its releases
            self.published.clear()
            self.ledger = Ledger()
            self.ledger.open("s", self.terms())
            return
        name = self.some(self.saved)
        self.ledger = Ledger()
        if self.rng.integers(2):
            self.ledger.open("s", self.terms())
        self.runners[name] = self.again(name, self.ledger)
        assert self.ledger.place == place

    def process(self):
        """Another process charges the same file."""
        place, known = self.ledger.place, set(self.published)
        if place is None:
            return
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                runner = Runner(Sample(epsilon="1/4", window=1), ledger=place, dataset="s")
                admitted = b""
                for _ in range(4):
                    runner.step([1])
                    admitted += b"."
            except BudgetExceeded:
                pass
            finally:
                os.write(writer, admitted)
                os._exit(0)
        os.close(writer)
        for step in range(len(os.read(reader, 9))):
            charge = ("cells", step, step, None, Fraction(1, 4))
            self.published[f"process {pid} {len(known)}", step] = charge
        os.close(reader)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("seed", range(part_of(20, of=2)))
def test_no_interleaving_admits_more_than_the_book(tmp_path, seed):
    """Runs, threads, processes, saves, loads and restarts, against a brute-force ledger."""
    world, done = World(seed, tmp_path), []
    names = ["begin", "steps", "steps", "steps", "threads", "save", "load", "restart", "process"]
    for _ in range(45):
        done.append(names[int(world.rng.integers(len(names)))])
        getattr(world, done[-1])()
        assert worst_loss(list(world.published.values()), 3) <= 1, done
        assert world.ledger.peak("s") >= worst_loss(list(world.published.values()), 3), done


def test_the_interleavings_do_reach_the_total(tmp_path):
    """The law above is not kept by refusing everything: books are filled to the last."""
    filled = 0
    for seed in range(6):
        (tmp_path / str(seed)).mkdir()
        world = World(seed, tmp_path / str(seed))
        for _ in range(6):
            world.begin()
            world.steps()
            world.save()
        filled += worst_loss(list(world.published.values()), 3) == 1

    assert filled >= 3


# --- where a book moves to


def opened(window=2):
    book = Ledger()
    book.open("stream", Terms(unit="w_event", window=window, total=1))
    return book


def test_runs_that_share_a_book_in_memory_share_its_file(tmp_path):
    """One has a state: the book moves, for all; a second state is charged to that file."""
    book, mechanism = opened(), Sample(epsilon="1/2", window=2)
    a = Runner(mechanism, ledger=book, name="a", state=tmp_path / "a")
    assert book.path == tmp_path / "a" / "ledger"
    b = Runner(mechanism, ledger=book, name="b", state=tmp_path / "b")
    assert not (tmp_path / "b" / "ledger").exists()
    assert [len(list(one.feed([[1]] * 4))) for one in (a, b)] == [4, 4]
    with pytest.raises(BudgetExceeded):
        release(Sample(epsilon="1/4", window=2), [[1]], ledger=book)
    with pytest.raises(BudgetExceeded):
        release(Sample(epsilon="1/4", window=2), [[1]], ledger=book, state=tmp_path / "c")
    a.close()
    b.close()


def test_a_state_names_the_book_that_moved(tmp_path):
    """After a restart the second state finds the book in the first one's directory."""
    book, mechanism = opened(), Sample(epsilon="1/2", window=2)

    def run(name, ledger=None):
        return Runner(mechanism, ledger=ledger, name=name, state=tmp_path / name)

    for name in "ab":
        with run(name, book) as runner:
            runner.step([1])
    with pytest.raises(DpstreamError, match=f"another ledger, {tmp_path}/a/ledger; name that one"):
        run("b")
    fresh = Ledger()
    with run("b", fresh) as again:
        assert fresh.path == tmp_path / "a" / "ledger"
        assert again.ledger is fresh
    charged = Ledger()
    release(Sample(epsilon="1/2", window=2), [[1]], ledger=charged)
    with pytest.raises(LedgerError, match="two cannot become one"):
        run("b", charged)
    other = Ledger()
    other.open("stream", Terms(unit="user", total=5))
    with pytest.raises(LedgerError, match="use the book's terms"):
        run("b", other)
    assert other.path is None
    (tmp_path / "a" / "ledger").unlink()
    with pytest.raises(DpstreamError, match=r"is missing, and its run may be charged"):
        run("b", Ledger())
    with pytest.raises(LedgerError, match="replaced or removed while in use"):
        release(Sample(epsilon="1/2", window=2), [[1]], ledger=fresh)


def test_threads_that_begin_at_once_make_one_file(tmp_path):
    """Whoever comes first decides where the book is; none of the others makes a second one."""
    book = opened(1)
    mechanism, barrier = Sample(epsilon="1/8", window=1), threading.Barrier(8)

    def one(number):
        barrier.wait()
        name = str(number)
        Runner(mechanism, ledger=book, name=name, state=tmp_path / name).step([1])

    workers = [threading.Thread(target=one, args=[number]) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert len(list(tmp_path.glob("*/ledger"))) == 1
    assert book.left("stream", 0) == 0


# --- without a book


ALONE = """
import warnings
import dpstream as dps
from dpstream.mechanisms import Sample
import pyarrow as pa, tempfile
def query(name):
    return dps.Query(name=name, privacy_unit_column="u", keys=["k"], public_groups=["a"],
                     epsilon=5, delta=1e-9, max_groups_contributed=1)
rows, state = pa.table({"u": [1], "k": ["a"]}), tempfile.mkdtemp()
ways = {
    "release": lambda **more: dps.release(Sample(epsilon=1, window=2), [1, 2], **more),
    "state": lambda **more: dps.release(Sample(epsilon=1, window=2), [1], state=state, **more),
    "run": lambda **more: dps.run(query("q"), source=rows, **more).finish(),
    "run_all": lambda **more: dps.run_all([query("q")], source=rows, **more).finish(),
}
import dpstream.privacy.ledger.ledger as ledger
for name, way in ways.items():
    ledger._warned = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if name != "state":
            way(ledger=dps.Ledger())
        assert not found, found
        way()
        way() if name != "state" else None
    (one,) = found
    assert issubclass(one.category, dps.errors.NewBook), one
    assert one.filename == "<string>", one.filename
    print(name, str(one.message).split(";")[0])
"""


def test_what_no_ledger_counts_is_told_once():
    """Python says it as the command line does: once in a process, at the caller's line."""
    told = run_python(ALONE)
    assert told.returncode == 0, told.stderr
    lines = dict(line.split(" ", 1) for line in told.stdout.splitlines())

    assert set(lines) == {"release", "state", "run", "run_all"}
    for name, words in lines.items():
        assert "not shared with others: nothing adds up" in words
        assert ("kept in" in words) == (name == "state")
