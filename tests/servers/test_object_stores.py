"""Azure's blobs, by Azurite: what S3 does, they do. Google's storage, by fake-gcs-server: a source.

The same suites as on the S3 gateway; every test has a bucket of its own. fake-gcs-server takes no
writes by the interface (XML) in which Google's conditional writes are made: what rests on them
cannot be tried, and is refused.
"""

import itertools
import json
import signal
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from threading import Barrier, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.objects import client, state_mirror
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.server_base import ServerOptions
from dpstream.connectors.testing import ServerSinkSuite, ServerSourceSuite
from dpstream.connectors.testing.suites import drain, rows_seen
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, StateError
from dpstream.privacy.ledger.ledger import Ledger
from tests.golden.corpus import SECRET, run_options
from tests.golden.queries import SINK_QUERY, write_parquet
from tests.servers.ledger_suite import ServerLedgerSuite, charge, opened
from tests.servers.test_object_files import break_off
from tests.servers.test_object_ledger import charge_and_die, lost, race
from tests.support.processes import kill_this_process, run_in_new_process

pytestmark = pytest.mark.servers
numbers = itertools.count()


class Store:
    """A bucket of a server, as its own client sees it."""

    def __init__(self, server, scheme):
        self.server, self.scheme, self.name = server, scheme, f"bucket-{next(numbers)}"
        server.make_bucket(self.name)
        self.client = client.Bucket(ServerOptions(self.uri("")))

    def uri(self, path):
        return f"{self.scheme}://{self.name}/{path}"

    def put(self, key, data):
        if self.scheme == "gs":
            self.server.put(self.name, key, data)
        else:
            self.client._store.put(key, data, use_multipart=False)

    def content(self, prefix):
        """What lies under a prefix, by name."""
        found = self.client.find(prefix)
        return {one.key.removeprefix(prefix): self.client.get(one.key).data for one in found}


def store_of(server, scheme, monkeypatch, tmp_path):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not server.answers():
        server.start()
    return Store(server, scheme)


@pytest.fixture
def azure(azure_server, monkeypatch, tmp_path):
    return store_of(azure_server, "az", monkeypatch, tmp_path)


@pytest.fixture
def google(google_server, monkeypatch, tmp_path):
    return store_of(google_server, "gs", monkeypatch, tmp_path)


@pytest.fixture
def store(azure):
    """One that has conditional writes."""
    return azure


def test_creation_is_raced(store):
    """Of six writers one makes the object, each time, and it is the winner's."""
    for number in range(8):
        won = []

        def write(writer, key=f"raced/{number}", won=won):
            if client.Bucket(ServerOptions(store.uri(""))).create(key, b"%d" % writer) is not None:
                won.append(writer)

        race(6, write)
        assert len(won) == 1
        assert store.client.get(f"raced/{number}").data == b"%d" % won[0]


def test_compare_and_swap(store):
    """Four writers count to forty together; none of them overwrites another."""
    store.client.create("count", b"0")

    def add(_):
        bucket, done = client.Bucket(ServerOptions(store.uri(""))), 0
        while done < 10:
            now = bucket.get("count")
            done += bucket.replace("count", b"%d" % (int(now.data) + 1), now.version) is not None

    race(4, add)
    now = store.client.get("count")
    assert now.data == b"40"
    assert store.client.get("count", known=now.version) == client.Content(b"", now.version)
    assert store.client.replace("not there", b"", now.version) is None
    store.client.refuse_read_only("probe")
    store.client.remove(["count", "not there"])
    assert store.client.find("") == []


def test_what_is_wrong_is_said(store, monkeypatch):
    """A bucket and an object that are not there, an account that is not named."""
    nowhere = store.uri("").replace(store.name, "nowhere")
    for work in (open_source, open_sink, lambda uri: Ledger(f"{uri}book")):
        with pytest.raises(InvalidInput, match="there is no bucket 'nowhere'; make it"):
            work(nowhere)
    with pytest.raises(InvalidInput, match=r"there is no object .*logs/a.csv"):
        open_source(store.uri("logs/a.csv"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IHRoZSBrZXk=")
    with pytest.raises(InvalidInput, match="the store refuses the key"):
        open_source(store.uri("logs/"))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(InvalidParameter, match="set AZURE_STORAGE_ACCOUNT_NAME and"):
        open_source(store.uri("logs/"))


def test_what_google_is_not_for(google):
    """What rests on conditional writes is refused, with the reason; nothing is written."""
    for work in (
        lambda: open_sink(google.uri("out/")),
        lambda: Ledger(google.uri("book")),
        lambda: start(google.uri(""), Path()),
    ):
        with pytest.raises(InvalidParameter, match=r"is for sources alone: .* conditional writes"):
            work()
    assert google.client.find("") == []


def test_objects_of_google_as_a_source(google):
    """A glob over objects that are there; another one that is not there is told."""
    for name in ("a.csv", "b.csv", "c.txt", "day 1/c#?.csv"):
        google.put(f"logs/{name}", b"user,page\nann,home\n")
    source, reads = open_source(google.uri("logs/**/*.csv")), {}
    drain(source, reads, rows=0)
    assert sorted(reads) == ["logs/a.csv", "logs/b.csv", "logs/day 1/c#?.csv"]
    assert all(len(batch.table) == 1 for read in reads.values() for batch in read.batches)
    with pytest.raises(InvalidInput, match="there is no object gs://"):
        open_source(google.uri("logs/none.csv"))


class TestSource(ServerSourceSuite):
    @pytest.fixture(autouse=True, params=["azure", "google"])
    def _place(self, request):
        self.store, self.numbers = request.getfixturevalue(request.param), itertools.count()

    def open(self, more=""):
        return open_source(self.store.uri(f"logs/?poll=0.05{more}"), growing=True)

    def impatient(self):
        return self.open("&patience=0.5")

    def put(self, rows):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.store.put(f"logs/{next(self.numbers):03}.jsonl", text.encode())

    def spoil(self):
        self.store.put(f"logs/{next(self.numbers):03}.jsonl", b"{poison\n")

    def lose(self):
        self.store.client.remove([one.key for one in self.store.client.find("logs/")])

    def away(self):
        return self.store.server.away()

    def foreign_positions(self):
        return [10**6]


class TestSink(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, store):
        self.store = store

    def open(self, more=""):
        return open_sink(self.store.uri(f"out/?format=parquet{more}"))

    def impatient(self):
        return self.open("&patience=0.5")

    def away(self):
        return self.store.server.away()

    def break_off(self, query, window, trigger, table):
        place = self.store.uri("out/")
        assert run_in_new_process(break_off, place, query, window, trigger, table) == -9

    def visible_rows(self, name):
        found = sorted(self.store.content(f"out/{name}-w").items())
        return rows_seen(*(pq.read_table(pa.BufferReader(data)) for _, data in found))


class TestLedger(ServerLedgerSuite):
    @pytest.fixture
    def uri(self, store):
        return store.uri("books/clicks")

    @pytest.fixture
    def lose(self, monkeypatch):
        return lambda *how: monkeypatch.setattr(client.Bucket, "replace", lost(*how))


def test_writers_share_the_last_of_a_budget(store):
    """Three of them make the ledger, and charge it; what each was told is there, once."""
    uri, taken = store.uri("book"), []

    def spend(worker):
        with closing(opened(uri)) as ledger:
            for step in range(8):
                try:
                    ledger.charge("flu", charge(step, run=f"{worker:032x}"))
                except BudgetExceeded:
                    break
                taken.append((f"{worker:032x}", step))

    race(3, spend)
    with closing(Ledger(uri)) as ledger:
        found = [(r["run"], r["step"]) for r in ledger.history() if "amount" in r]
        assert ledger.left("flu") == 0
    assert len(found) == 16
    assert sorted(found) == sorted(taken)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_the_write_of_a_charge(store, when):
    """SIGKILL before it: nothing was charged. After it: charged, once for its run."""
    uri = store.uri("book")
    opened(uri).close()
    assert run_in_new_process(charge_and_die, uri, when) == -signal.SIGKILL
    with closing(Ledger(uri)) as ledger:
        assert ledger.charge("flu", charge(0), lambda step: "d") is (when == "before")
        assert ledger.left("flu") == Fraction(15, 16)


def start(place, home):
    """Rows, releases and state in one bucket."""
    return dps.run(
        dps.sql(SINK_QUERY, name="sent"), source=home / "log.parquet", sink=f"{place}out/",
        state=f"{place}states/sent", secret=SECRET, options=run_options(run_id=None),
    )  # fmt: skip


def publish_and_die(place, home):
    list(itertools.islice(iter(start(place, home)), 7))
    kill_this_process()


def test_a_state_goes_on_after_a_kill(store, tmp_path):
    """SIGKILL; the next start publishes the rest, once paid, and what is there stays as it is."""
    write_parquet(tmp_path)
    place = store.uri("")
    assert run_in_new_process(publish_and_die, place, tmp_path) == -signal.SIGKILL
    early = store.content("out/")
    assert len(early) >= 7
    start(place, tmp_path).finish()
    late = store.content("out/")

    assert early.items() <= late.items()
    assert len(late) == 25
    book = Ledger(store.uri("states/sent/ledger"))
    assert len([r for r in book.history() if "amount" in r]) == 1
    head = json.loads(store.content("states/sent/")["head"])
    named = {part[0] for parts in head["files"].values() for part in parts}
    assert {one.key for one in store.client.find("states/sent/files/")} == named


def test_one_writer_of_a_state(store, tmp_path):
    """Two starts at once, again and again: one at most goes on; then the rest comes, once paid."""
    write_parquet(tmp_path)
    place, ends, began = store.uri(""), [], Barrier(2)

    def work():
        began.wait()
        try:
            start(place, tmp_path).finish()
            ends.append("end")
        except StateError:
            ends.append("refused")

    threads = [Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert "refused" in ends
    state_mirror._OPEN.clear()
    state_mirror._TAKEN.clear()
    start(place, tmp_path).finish()
    assert len(store.content("out/")) == 25
    book = Ledger(store.uri("states/sent/ledger"))
    assert len({r["run"] for r in book.history() if "amount" in r}) == 1
