"""Objects of a bucket: rows come from them, and releases go into them."""

import json
import logging
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Barrier, Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

import dpstream as dps
from dpstream.connectors.objects import client
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.server_base import ServerAway
from dpstream.connectors.testing import ServerSinkSuite, ServerSourceSuite
from dpstream.connectors.testing.suites import drain, release, rows_seen
from dpstream.errors import InvalidInput, InvalidParameter, RowsLost, ServerUnreachable, StateError
from dpstream.privacy.ledger.ledger import Ledger
from tests.servers.conftest import PASSWORD
from tests.support.processes import kill_this_process, run_in_new_process, until

pytestmark = pytest.mark.servers

names = (f"bucket-{number}" for number in count())
QUERY = """
    SELECT WITH DIFFERENTIAL_PRIVACY
           OPTIONS (epsilon = 4, delta = 1e-7, privacy_unit_column = user,
                    max_groups_contributed = 1)
           page, COUNT(DISTINCT user) AS visitors
    FROM clicks GROUP BY page
"""


@pytest.fixture
def bucket(objects):
    """A bucket of its own, as a folder."""
    return objects.bucket(next(names))


def put(place, rows):
    """Put rows into an object, as others do."""
    folder = next(each for each in place.parents if each.parent.name == "buckets")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    S3Store(folder.name, client_options={"allow_http": True}).put(
        str(place.relative_to(folder)), text.encode()
    )


def clicks(first, number, page="home"):
    return [{"user": f"u{n}", "page": page} for n in range(first, first + number)]


class TestLiveObjects(ServerSourceSuite):
    @pytest.fixture(autouse=True)
    def _place(self, objects, bucket):
        self.server, self.bucket, self.numbers = objects, bucket, count()

    def open(self, more=""):
        uri = f"s3://{self.bucket.name}/logs/?poll=0.05{more}"
        return open_source(uri, growing=True)

    def impatient(self):
        return self.open("&patience=0.5")

    def put(self, rows):
        put(self.bucket / "logs" / f"{next(self.numbers):03}.jsonl", rows)

    def spoil(self):
        (self.bucket / "logs" / f"{next(self.numbers):03}.jsonl").write_text("{poison\n")

    def lose(self):
        for path in (self.bucket / "logs").iterdir():
            path.unlink()

    def away(self):
        return self.server.away()

    def foreign_positions(self):
        return [10**6]


class TestObjectSink(ServerSinkSuite):
    @pytest.fixture(autouse=True)
    def _place(self, objects, bucket):
        self.server, self.bucket = objects, bucket

    def open(self, more=""):
        return open_sink(f"s3://{self.bucket.name}/out/?format=parquet{more}")

    def impatient(self):
        return self.open("&patience=0.5")

    def away(self):
        return self.server.away()

    def break_off(self, query, window, trigger, table):
        place = f"s3://{self.bucket.name}/out/"
        assert run_in_new_process(break_off, place, query, window, trigger, table) == -9

    def visible_rows(self, name):
        found = sorted((self.bucket / "out").glob(f"{name}-w*.parquet"))
        return rows_seen(*(pq.ParquetFile(path).read() for path in found))


def break_off(place, query, window, trigger, table):
    """Killed when a store has answered, before the answer is known."""
    client._version = kill_this_process
    open_sink(place).write(query, window, trigger, table)


def uri(bucket, path, more=""):
    return f"s3://{bucket.name}/{path}{more}"


def read_all(source):
    reads = {}
    drain(source, reads, rows=0)
    return {name: sum(len(batch.table) for batch in read.batches) for name, read in reads.items()}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("logs/", {"logs/a.csv": 1, "logs/b.csv": 1, "logs/day 1/c#?.csv": 1}),
        ("logs", {"logs/a.csv": 1, "logs/b.csv": 1, "logs/day 1/c#?.csv": 1}),
        ("logs/*.csv", {"logs/a.csv": 1, "logs/b.csv": 1}),
        ("logs/**/[bc]*.csv", {"logs/b.csv": 1, "logs/day 1/c#?.csv": 1}),
        ("logs/a.csv", {"logs/a.csv": 1}),
        ("logs/day%201/c%23%3F.csv", {"logs/day 1/c#?.csv": 1}),
        ("table.csv/", {"table.csv/part.csv": 1}),  # as Spark names a folder that it writes
    ],
)
def test_which_objects_a_name_means(bucket, path, found):
    """A prefix with all below it, a glob, or one object; names that are set apart are left out."""
    for name in ("a.csv", "b.csv", "_c.csv", ".d.csv", "e.txt", "day 1/c#?.csv", "_old/f.csv"):
        place = bucket / "logs" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("user,page\nann,home\n")
    (bucket / "table.csv").mkdir()
    for name in ("logs2.csv", "table.csv/part.csv"):
        (bucket / name).write_text("user,page\nann,home\n")

    assert read_all(open_source(uri(bucket, path))) == found


def test_more_objects_than_copies(bucket, monkeypatch):
    """Copies go and are fetched again; Parquet and what is compressed are read like files."""
    from dpstream.connectors.objects import source

    monkeypatch.setattr(source, "_MOST_COPIES", 2)
    (bucket / "logs").mkdir()
    for number in range(5):
        rows = pa.Table.from_pylist(clicks(10 * number, number + 1))
        pq.write_table(rows, bucket / "logs" / f"{number}.parquet", row_group_size=2)
    opened = open_source(uri(bucket, "logs/"), on_damage="quarantine")
    names = opened.partitions()

    assert [opened.check(name, ["user"]) for name in names] == [None] * 5
    assert opened.columns(names[4]) == {"user": pa.string(), "page": pa.string()}
    assert [*read_all(opened).values()] == [1, 2, 3, 4, 5]
    assert len([*Path(opened._place.name).iterdir()]) <= 2
    opened.close()
    assert not Path(opened._place.name).exists()


def test_what_is_wrong_is_said(objects, bucket, monkeypatch):
    """A bucket that is not there, a wrong key, nobody who answers, a key in the address."""
    put(bucket / "a.jsonl", clicks(0, 1))
    put(bucket / "b.csv", [{}])
    for work in (open_source, open_sink):
        with pytest.raises(InvalidInput, match="there is no bucket 'nowhere'; make it"):
            work("s3://nowhere/logs/")
        with pytest.raises(ServerUnreachable, match="does not answer: it cannot be reached"):
            work(uri(bucket, "logs/", "?endpoint=http://127.0.0.1:1"))
        with pytest.raises(InvalidParameter, match="must not stand here"):
            work(uri(bucket, "logs/", "?secret_key=abc"))
        with pytest.raises(InvalidParameter, match="access_key goes with"):
            work(uri(bucket, "logs/", "?access_key=abc"))
        with pytest.raises(InvalidParameter, match="has no option 'endpiont'; did you mean"):
            work(uri(bucket, "a.jsonl" if work is open_source else "out/", "?endpiont=x"))
    with pytest.raises(InvalidInput, match=r"several formats \(.csv, .jsonl\)"):
        open_source(uri(bucket, ""))
    with pytest.raises(InvalidInput, match="names no object that ends"):
        open_source(uri(bucket, "logs/"))
    with pytest.raises(InvalidInput, match="live reads whole objects"):
        open_source(uri(bucket, "a.jsonl"), growing=True)
    with pytest.raises(InvalidParameter, match=r"sink makes one for each release.*format=csv"):
        open_sink(uri(bucket, "out.csv"))
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for work in (open_source, open_sink):
        with pytest.raises(InvalidParameter, match=r"cannot be opened: .*AWS_SECRET_ACCESS_KEY"):
            work(uri(bucket, "logs/"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"not {PASSWORD}")
    for work in (open_source, open_sink):
        with pytest.raises(InvalidInput, match=r"refuses the key \(SignatureDoesNotMatch\)") as no:
            work(uri(bucket, "logs/"))
        assert PASSWORD not in str(no.value)
    key = f"?access_key=dpstream&secret_key_file={objects.secret_key}"
    assert read_all(open_source(uri(bucket, "a.jsonl", key))) == {"a.jsonl": 1}


def test_a_key_that_may_only_read(objects, bucket, tmp_path, monkeypatch):
    """It reads; what is to be written is refused, a sink before the query is charged."""
    put(bucket / "logs" / "a.jsonl", clicks(0, 400))
    objects.let_read(bucket)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    assert read_all(open_source(uri(bucket, "logs/"))) == {"logs/a.jsonl": 400}
    book = Ledger(tmp_path / "book")
    given = {"source": uri(bucket, "logs/"), "ledger": book}
    with pytest.raises(InvalidInput, match=r"refuses the key \(AccessDenied\)"):
        dps.run(dps.sql(QUERY), **given, sink=uri(bucket, "out/")).finish()
    for more in ({"ledger": uri(bucket, "book")}, {"state": uri(bucket, "state")}):
        given = {"source": uri(bucket, "logs/"), "secret": bytes(32)} | more
        with pytest.raises(InvalidInput, match=r"refuses the key \(AccessDenied\)"):
            dps.run(dps.sql(QUERY), **given).finish()
    assert [record for record in book.history() if "amount" in record] == []
    assert [path.name for path in bucket.rglob("*") if path.is_file()] == ["a.jsonl"]


def test_a_store_without_conditions(bucket, monkeypatch):
    """It is told before a new query is charged, by a write whose condition cannot be true."""
    sink, schema = open_sink(uri(bucket, "out/")), release("a", 0, 1).schema
    sink.check("a", schema)
    assert [path for path in bucket.rglob("*") if path.is_file()] == []
    store = sink._bucket._store

    class Ignoring:
        """The same store, if it did not heed conditions."""

        put = staticmethod(lambda key, data, *, mode, **more: store.put(key, data, **more))
        delete = staticmethod(store.delete)

    monkeypatch.setattr(sink._bucket, "_store", Ignoring)
    with pytest.raises(InvalidInput, match=r"takes the condition .* and ignores it"):
        sink.check("a", schema)
    assert [path for path in bucket.rglob("*") if path.is_file()] == []


def test_a_single_object_that_is_not_there(bucket):
    """It is not taken for a prefix that is empty."""
    with pytest.raises(InvalidInput, match=r"there is no object s3://\S+/a.csv; mend its name"):
        open_source(uri(bucket, "logs/a.csv"))


def test_objects_that_change(bucket, caplog):
    """Overwritten before it is read: an error where all is listed once; after: said once."""
    put(bucket / "logs" / "a.jsonl", clicks(0, 2))
    bounded = open_source(uri(bucket, "logs/"))
    live = open_source(uri(bucket, "logs/", "?poll=0.05"), growing=True)
    assert read_all(live) == {"logs/a.jsonl": 2}
    put(bucket / "logs" / "a.jsonl", clicks(0, 3))
    with pytest.raises(RowsLost, match="was overwritten since it was listed"):
        bounded.read("logs/a.jsonl", None)
    with caplog.at_level(logging.WARNING, "dpstream.sources"):
        until(lambda: live.partitions() and caplog.messages)
        put(bucket / "logs" / "b.jsonl", clicks(0, 1))
        until(lambda: len(live.partitions()) == 2)

    assert [text.partition(": ")[0] for text in caplog.messages] == [
        f"s3://{bucket.name}/logs/a.jsonl was overwritten after it was read"
    ]
    assert read_all(live) == {"logs/a.jsonl": 3, "logs/b.jsonl": 1}


def test_damage_is_told_by_the_objects_name(bucket):
    """Wherever its copy is: the reason is part of the log, and a replay finds the same one."""
    (bucket / "logs").mkdir()
    (bucket / "logs" / "a.parquet").write_bytes(b"PAR1 no footer PAR1")
    marks = []
    for _ in range(2):
        opened = open_source(uri(bucket, "logs/"), on_damage="quarantine")
        marks.append(opened.check("logs/a.parquet", ["user"]))
        opened.close()

    assert marks[0] == marks[1]
    assert f"s3://{bucket.name}/logs/a.parquet cannot be read" in marks[0]["reason"]


def publish(place, *, killed=False, state):
    """Releases of what a bucket holds, into the bucket; killed when one was made there."""
    if killed:
        client._version = kill_this_process
    sink = f"s3://{place}/out/?format=jsonl"
    list(dps.run(dps.sql(QUERY), source=f"s3://{place}/logs/", sink=sink, state=state))


def killed(place, state):
    publish(place, killed=True, state=state)


def test_from_bucket_to_bucket_through_a_kill(bucket, tmp_path):
    """Killed when the store has a release and nobody knows: it is there once, the same bytes."""
    put(bucket / "logs" / "a.jsonl", clicks(0, 400))
    put(bucket / "logs" / "b.jsonl", clicks(400, 300, page="news"))
    state = str(tmp_path / "state")
    assert run_in_new_process(killed, bucket.name, state) == -signal.SIGKILL
    publish(bucket.name, state=state)
    before = {path.name: path.read_bytes() for path in (bucket / "out").iterdir()}
    publish(bucket.name, state=state)

    assert {path.name: path.read_bytes() for path in (bucket / "out").iterdir()} == before
    (only,) = (bucket / "out").glob("*.jsonl")
    rows = [json.loads(line) for line in only.read_text().splitlines()]
    assert sorted(row["page"] for row in rows) == ["home", "news"]
    found = {row["page"]: row["visitors"] for row in rows}
    assert abs(found["home"] - 400) < 60  # 8 deviations and more


def test_an_answer_that_is_lost(bucket, monkeypatch):
    """The store has made the object; the next try finds it, and that is all right."""
    created, failed = client.Bucket.create, []

    def lost(self, key, data):
        version = created(self, key, data)
        if key not in failed:
            failed.append(key)
            raise ServerAway("the answer was lost")
        return version

    monkeypatch.setattr(client.Bucket, "create", lost)
    sink = open_sink(uri(bucket, "out/"))
    sink.write("a", 0, 1, release("a", 0, 1))
    sink.write("a", 0, 2, release("a", 0, 2))

    assert len(failed) == 3  # the run's mark, and each release
    found = sorted((bucket / "out").glob("a-w*.parquet"))
    assert [pq.ParquetFile(path).read() for path in found] == [
        release("a", 0, 1),
        release("a", 0, 2),
    ]


def test_runs_that_begin_at_once(bucket):
    """Of eight writers one makes the mark; the others are refused, and leave nothing."""
    began, winners = Barrier(8), []

    def race(run):
        sink = open_sink(uri(bucket, "out/"))
        began.wait()
        with suppress(StateError):
            sink.write("a", 0, 1, release("a", 0, 1, run=run))
            winners.append(run)

    racing = [Thread(target=race, args=(f"run {n}",)) for n in range(8)]
    for one in racing:
        one.start()
    for one in racing:
        one.join()

    (winner,) = winners
    (only,) = (bucket / "out").glob("*.parquet")
    assert pq.ParquetFile(only).read() == release("a", 0, 1, run=winner)
