"""A ledger in an object store: the same book as in a file, for several hosts, without any lock.

Every test has a bucket of its own on a real gateway.
"""

import json
import signal
from contextlib import closing
from fractions import Fraction
from functools import partial
from itertools import count
from threading import Barrier, Lock, Thread

import pytest
from hypothesis import given
from obstore.store import S3Store

from dpstream.connectors.objects import client, ledger_store
from dpstream.connectors.server_base import ServerAway
from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, ServerUnreachable
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import as_ledger_place
from tests.laws import test_one_book as laws
from tests.servers.conftest import PASSWORD
from tests.servers.ledger_suite import (
    BOTH,
    USER,
    ServerLedgerSuite,
    charge,
    charged,
    decides_as_a_file,
    opened,
)
from tests.support.long import some_examples
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers
names = (f"books-{number}" for number in count())


@pytest.fixture
def bucket(objects):
    return objects.bucket(next(names))


@pytest.fixture
def uri(bucket):
    """The address of a ledger that is not there yet."""
    return f"s3://{bucket.name}/books/clicks"


def test_the_lines_are_those_of_a_file(tmp_path, bucket, uri, monkeypatch):
    """Byte for byte, also where older ones went into objects of their own."""
    monkeypatch.setattr(ledgers, "_now", lambda: "2024-05-01T00:00:00.000+00:00")
    monkeypatch.setattr(ledger_store, "_SEAL", 1000)
    books = [Ledger(tmp_path / "book"), Ledger(uri)]
    for ledger in books:
        ledger.open("flu", USER)
        ledger.register("flu", "ab" * 16, "plan")
        for step in range(12):
            ledger.charge("flu", charge(step))
    late = Ledger(uri)
    assert late.report() == books[1].report() == books[0].report()
    lines = "".join(f"{line}\n" for _, line in late._journal.read_lines())

    assert lines == (tmp_path / "book").read_text()
    assert books[0].head() == books[1].head() == late.head()
    assert len([*(bucket / "books" / "clicks").glob("lines-*")]) >= 2


@some_examples(12, of=1)
@given(laws.asked(), BOTH)
def test_it_decides_as_a_file_does(object_server, tmp_path_factory, charges, width):
    """The law of one book: every charge, refusal and balance, also of a second reader."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in object_server.environment.items():
            patch.setenv(name, value)
        patch.setattr(ledgers, "_KEEP", 4)
        patch.setattr(ledger_store, "_SEAL", 2000)
        uri = f"s3://{object_server.bucket(next(names)).name}/book"
        decides_as_a_file(uri, tmp_path_factory.mktemp("book"), charges, width)


def race(workers, work):
    """Let several writers begin at once, each with a client of its own."""
    began = Barrier(workers)

    def one(number):
        began.wait()
        work(number)

    threads = [Thread(target=one, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_writers_share_the_last_of_a_budget(uri):
    """They make the ledger, too. Sixteen sixteenths are charged; every other one is refused."""
    taken, lock = [], Lock()

    def spend(worker):
        with closing(opened(uri)) as ledger:
            for step in range(12):
                try:
                    ledger.charge("flu", charge(step, run=f"{worker:032x}"))
                except BudgetExceeded:
                    break
                with lock:
                    taken.append((f"{worker:032x}", step))

    race(4, spend)
    with closing(Ledger(uri)) as ledger:
        found = [(r["run"], r["step"]) for r in ledger.history() if "amount" in r]
        assert ledger.left("flu") == 0

    assert len(found) == 16
    assert sorted(found) == sorted(taken)


def lost(when, meanwhile=lambda: None, every=10**9):
    """A write whose answer never comes, once or again and again; before or after it was made."""
    replace, times = client.Bucket.replace, count()

    def failing(bucket, key, data, known):
        if next(times) % every:
            return replace(bucket, key, data, known)
        if when == "after":
            replace(bucket, key, data, known)
        meanwhile()
        raise ServerAway("the answer is lost")

    return failing


@pytest.fixture
def lose(monkeypatch):
    return lambda *how: monkeypatch.setattr(client.Bucket, "replace", lost(*how))


class TestEveryLedger(ServerLedgerSuite):
    """In a bucket."""

    def test_compaction_changes_no_answer(self, uri, bucket, monkeypatch):
        """Where lines went into objects of their own, too; those that no head names are gone."""
        monkeypatch.setattr(ledger_store, "_SEAL", 1000)
        super().test_compaction_changes_no_answer(uri, monkeypatch)
        folder = bucket / "books" / "clicks"
        head = json.loads((folder / "head").read_bytes())
        kept = {f"books/clicks/{path.name}" for path in folder.glob("lines-*")}
        assert kept == {key for _, key in head["sealed"]}


def test_writers_whose_answers_are_lost_charge_what_they_say(uri, monkeypatch):
    """Two of them, until the book is full: what each was told is in it once, and nothing else."""
    opened(uri).close()
    said = {0: [], 1: []}
    monkeypatch.setattr(client.Bucket, "replace", lost("after", every=2))

    def spend(worker):
        with closing(Ledger(uri)) as ledger:
            for step in range(33):
                try:
                    told = ledger.charge("flu", charge(step, "1/32", run=f"{worker:032x}"))
                except BudgetExceeded:
                    break
                said[worker].append(told)

    race(2, spend)
    assert sum(map(len, said.values())) == 32
    assert all(map(all, said.values()))
    with closing(Ledger(uri)) as ledger:
        found = [(r["run"], r["step"]) for r in ledger.history() if "amount" in r]
    assert sorted(found) == sorted(
        (f"{worker:032x}", step) for worker, one in said.items() for step in range(len(one))
    )


def test_the_same_record_of_two_writers_is_two_records(uri, monkeypatch):
    """A writer that lost the race does not take the winner's line, which is its own byte by byte,
    for its own."""
    monkeypatch.setattr(ledgers, "_now", lambda: "2024-05-01T00:00:00.000+00:00")
    first, second = opened(uri), Ledger(uri)
    with second._journal.locked():
        second._journal.read_new()
        with first._journal.locked():
            first._journal.read_new()
            first._journal.append([{"note": 1}])
        second._journal.append([{"note": 1}])
        with pytest.raises(ServerUnreachable, match="others have written"):
            second._journal._commit()
        second._journal.rewind()
    assert [r for r in Ledger(uri).history() if "note" in r] == [{"note": 1}]


def charge_and_die(uri, when):
    """Killed at the write, before or after it is made."""
    replace = client.Bucket.replace

    def killed(*given):
        if when == "after":
            replace(*given)
        kill_this_process()

    client.Bucket.replace = killed
    Ledger(uri).charge("flu", charge(0))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_the_write_leaves_all_or_nothing(uri, when):
    """SIGKILL before it: nothing was charged. After it: charged, once for its run."""
    opened(uri).close()
    assert run_in_new_process(charge_and_die, uri, when) == -signal.SIGKILL

    with closing(Ledger(uri)) as ledger:
        assert ledger.charge("flu", charge(0), lambda step: "d") is (when == "before")
        assert ledger.left("flu") == Fraction(15, 16)


def test_a_server_that_restarts_in_a_charge(objects, uri, monkeypatch):
    """The charge waits for the server, and is written once; without patience it is refused."""
    ledger = opened(uri)
    monkeypatch.setattr(client.Bucket, "replace", lost("before", objects.restart))
    assert ledger.charge("flu", charge(0))
    impatient = Ledger(f"{uri}?patience=0.2")
    with objects.away(), pytest.raises(ServerUnreachable, match="patience"):
        impatient.charge("flu", charge(1))

    assert impatient.charge("flu", charge(1))
    assert charged(uri) == [0, 1]


def test_damage_and_loss_are_refused(bucket, uri, monkeypatch):
    """A line that was altered, lines that are gone, an older head, another ledger in its place."""
    monkeypatch.setattr(ledger_store, "_SEAL", 1000)
    folder = bucket / "books" / "clicks"
    store = S3Store(bucket.name, client_options={"allow_http": True})
    exchange = partial(store.put, "books/clicks/head")
    ledger = opened(uri)
    for step in range(6):
        ledger.charge("flu", charge(step))
    older = (folder / "head").read_bytes()
    for step in range(6, 9):
        ledger.charge("flu", charge(step))
    whole = (folder / "head").read_bytes()
    exchange(older)
    with pytest.raises(LedgerError, match="went back while it was in use"):
        ledger.charge("flu", charge(9))
    exchange(whole.replace(b"amount", b"AMOUNT"))
    with pytest.raises(LedgerError, match="is damaged after byte"):
        Ledger(uri).report()
    exchange(whole)
    sealed = next(folder.glob("lines-*"))
    content = sealed.read_bytes()
    sealed.unlink()
    with pytest.raises(LedgerError, match="is missing; restore it"):
        Ledger(uri).report()
    sealed.write_bytes(content)
    assert len(charged(uri)) == 9
    (folder / "head").unlink()
    with pytest.raises(LedgerError, match="its object `head`, which says"):
        ledger.report()
    opened(uri)
    with pytest.raises(LedgerError, match="is not the ledger that was there"):
        ledger.report()


def test_a_file_moves_here_and_back(tmp_path, uri):
    """With its lines as they are; the old one is fenced each time."""
    file = opened(tmp_path / "book")
    file.charge("flu", charge(0))
    file.move_to(as_ledger_place(uri), because="two hosts", who="ana")
    with pytest.raises(LedgerError, match="was moved to s3://"):
        file.charge("flu", charge(1))
    there = Ledger(uri)
    assert there.charge("flu", charge(1))
    there.move_to(tmp_path / "back", because="one host", who="ana")
    with pytest.raises(LedgerError, match="was moved to "):
        Ledger(uri).charge("flu", charge(2))

    back = Ledger(tmp_path / "back")
    assert back.charge("flu", charge(2))
    assert [r["step"] for r in back.history() if "amount" in r] == [0, 1, 2]
    assert back.replaces(file.identity())


def test_addresses_that_cannot_be(uri, bucket):
    """Each is refused with what it should be; asking makes none, and no secret is shown."""
    place = as_ledger_place(uri)
    assert not place.exists()
    assert [*bucket.iterdir()] == []
    opened(uri)
    assert place.exists()
    with pytest.raises(InvalidParameter, match="must name a ledger in the bucket"):
        Ledger(f"s3://{bucket.name}/")
    with pytest.raises(InvalidParameter, match="must not stand here"):
        Ledger(f"{uri}?secret_key={PASSWORD}")
    assert PASSWORD not in str(as_ledger_place(f"{uri}?secret_key={PASSWORD}"))
    (bucket / "strange").mkdir()
    (bucket / "strange" / "head").write_text("[]")
    with pytest.raises(LedgerError, match="is no head of a ledger"):
        Ledger(f"s3://{bucket.name}/strange")
