"""A run's state in a bucket: it goes on anywhere, with the same noise, and one writer wins.

The machine of a run is its working directory, which the next start never sees.
"""

import itertools
import json
import signal
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

import dpstream as dps
from dpstream.connectors.objects import client, state_mirror
from dpstream.connectors.server_base import ServerAway
from dpstream.errors import InvalidParameter, ServerUnreachable, StateError
from dpstream.privacy.ledger.ledger import Ledger
from tests.golden.corpus import SECRET, run_options
from tests.golden.queries import SINK_QUERY, write_parquet
from tests.support.live_runs import QUERY, TIMES, ScriptedClock, rows, seconds_before
from tests.support.processes import kill_this_process, run_in_new_process
from tests.support.runs import options

pytestmark = pytest.mark.servers
names = (f"states-{number}" for number in itertools.count())
RANDOM = {"run_id": None}  # window keys are drawn: only the state has them


@pytest.fixture
def bucket(objects, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return objects.bucket(next(names))


def start(bucket, home, to="out", **changes):
    return dps.run(
        dps.sql(SINK_QUERY, name="sent"),
        source=home / "log.parquet",
        sink=home / to,
        state=f"s3://{bucket}/states/sent",
        secret=SECRET,
        options=run_options(**changes),
    )


def published(home, to="out"):
    return {path.name: path.read_bytes() for path in (home / to).glob("*.parquet")}


def charges(bucket):
    return [r for r in Ledger(f"s3://{bucket}/states/sent/ledger").history() if "amount" in r]


@pytest.fixture
def home(tmp_path):
    """A log, and what a run with its state on disk publishes of it."""
    write_parquet(tmp_path)
    dps.run(
        dps.sql(SINK_QUERY, name="sent"), source=tmp_path / "log.parquet", sink=tmp_path / "calm",
        state=tmp_path / "state", secret=SECRET, options=run_options(),
    ).finish()  # fmt: skip
    return tmp_path


def remains(bucket):
    """Objects of the state, and those that its head names."""
    head = json.loads((bucket / "states" / "sent" / "head").read_bytes())
    there = {f"states/sent/files/{p.name}" for p in (bucket / "states/sent/files").iterdir()}
    return there, {part[0] for parts in head["files"].values() for part in parts}, head["files"]


def test_the_same_releases_as_on_disk(bucket, home):
    """One charge; no key of a window is left, and no object that nobody names."""
    start(bucket.name, home).finish()

    assert published(home) == published(home, "calm")
    assert len(charges(bucket.name)) == 1
    there, named, files = remains(bucket)
    assert there == named
    assert {"run.dps", "inputs.log", "windows/final"} <= set(files)
    assert [name for name in files if name.endswith(".key")] == []
    assert [name for name in files if "secret" in name or name.startswith("ledger")] == []
    assert start(bucket.name, home).collect().table.num_rows == 0  # it is at its end


class Killed(BaseException):
    """As by kill -9: nothing is written afterwards."""


def broken_off(monkeypatch, work, number, *, done=False):
    """Do some work, whose n-th write to the store is its last; True: there were so many.

    `done`: the store has made it.
    """
    writes = itertools.count(1)

    def limited(method):
        def call(store, *given):
            at = next(writes)
            if at > number or (at == number and not done):
                raise Killed
            made = method(store, *given)
            if at == number:
                raise Killed
            return made

        return call

    with monkeypatch.context() as patch:
        patch.setattr(client.Bucket, "create", limited(client.Bucket.create))
        patch.setattr(client.Bucket, "replace", limited(client.Bucket.replace))
        try:
            work()
        except (Killed, StateError):  # that of another thread comes first
            return next(writes) > number
    return False


@pytest.mark.parametrize(
    ("changes", "points"),
    [({}, (2, 3, 8, 57)), (RANDOM, (1, 4, 7, 44))],
    ids=["derived keys", "drawn keys"],
)
def test_broken_off_at_a_write(bucket, home, monkeypatch, changes, points):
    """The next start, on another machine, publishes the same bytes; one charge."""
    for number in points:
        name, again = f"{bucket.name}-{number}", f"again-{number}"
        (bucket.parent / name).mkdir()
        to = f"out-{number}"
        work = lambda: start(name, home, to, **changes).finish()  # noqa: B023, E731
        assert broken_off(monkeypatch, work, number, done=number % 2 == 0)
        early = published(home, to)
        start(name, home, again, **changes).finish()
        late = published(home, again)
        assert {n: late[n] for n in early.keys() & late.keys()} == {
            n: early[n] for n in early.keys() & late.keys()
        }, number
        if not changes:
            assert early | late == published(home, "calm"), number
        assert (early | late).keys() == published(home, "calm").keys()
        assert len({charge["run"] for charge in charges(name)}) == 1, number


def publish_and_die(bucket, home):
    """Killed when eleven releases are out."""
    releases = iter(start(bucket, home, **RANDOM))
    list(itertools.islice(releases, 11))
    kill_this_process()


def test_a_kill_and_another_machine(bucket, home):
    """SIGKILL: what comes again on the other machine is what was published, byte for byte."""
    died = run_in_new_process(publish_and_die, bucket.name, home)
    assert died == -signal.SIGKILL
    early = published(home)
    start(bucket.name, home, "again", **RANDOM).finish()
    late = published(home, "again")

    both = early.keys() & late.keys()
    assert both
    assert {name: early[name] for name in both} == {name: late[name] for name in both}
    assert (early | late).keys() == published(home, "calm").keys()
    assert len(charges(bucket.name)) == 1
    assert len([*(home / "cache" / "dpstream" / "states").iterdir()]) == 1  # the dead one's is gone


def as_another_process():
    """What is opened from now on has working files of its own, and knows of no others."""
    state_mirror._OPEN.clear()
    state_mirror._TAKEN.clear()


def test_of_two_writers_the_later_one_wins(bucket, home):
    """The first is refused before it draws again; what both have published is the same."""
    first = iter(start(bucket.name, home, "first", **RANDOM))
    early = list(itertools.islice(first, 5))
    as_another_process()
    start(bucket.name, home, "second", **RANDOM).finish()
    with pytest.raises(StateError, match="was opened by another process"):
        list(first)

    ours, theirs = published(home, "first"), published(home, "second")
    assert len(early) == 5
    assert {n: ours[n] for n in ours.keys() & theirs.keys()} == {
        n: theirs[n] for n in ours.keys() & theirs.keys()
    }
    assert (ours | theirs).keys() == published(home, "calm").keys()
    assert len(charges(bucket.name)) == 1


def test_a_start_that_is_refused_disturbs_nobody(bucket, home):
    """Another secret, query, dataset or engine: told by the state's name; the run goes on."""
    first = iter(start(bucket.name, home, "first", **RANDOM))
    early = list(itertools.islice(first, 5))
    before = (bucket / "states" / "sent" / "head").read_bytes()
    uri = f"s3://{bucket.name}/states/sent"
    given = {"source": home / "log.parquet", "sink": home / "no", "state": uri, "secret": SECRET}
    given |= {"query": dps.sql(SINK_QUERY, name="sent"), "options": run_options(**RANDOM)}
    other = dps.sql(SINK_QUERY.replace("COUNT(*)", "COUNT(DISTINCT user)"), name="sent")
    for wrong in ({"secret": bytes(32)}, {"query": other}, {"dataset": "other"}):
        as_another_process()
        with pytest.raises(StateError) as refused:
            dps.run(**given | wrong).finish()
        assert uri in str(refused.value)
        assert str(home / "cache") not in str(refused.value)
    assert (bucket / "states" / "sent" / "head").read_bytes() == before
    assert len(early) + len(list(first)) == len(published(home, "first"))
    assert published(home, "first").keys() == published(home, "calm").keys()
    assert published(home, "no") == {}


def test_who_has_gone_on_meanwhile_goes_on(bucket, home):
    """A start has looked, and the run elsewhere writes before it does: the start is refused."""
    first = iter(start(bucket.name, home, "first", **RANDOM))
    next(first)
    as_another_process()
    late = start(bucket.name, home, "second", **RANDOM)
    list(itertools.islice(first, 20))
    with pytest.raises(StateError, match=r"s3://\S+ is in use.* has changed nothing"):
        late.finish()
    list(first)

    assert published(home, "first").keys() == published(home, "calm").keys()
    assert published(home, "second") == {}
    start(bucket.name, home, "again", **RANDOM).finish()


def test_what_a_later_writer_has_put_there_stays(bucket, home, monkeypatch):
    """A process is held up behind its first head; another one goes on from that, to its end."""
    list(itertools.islice(start(bucket.name, home, "first", **RANDOM), 5))
    as_another_process()
    replace, late = client.Bucket.replace, []

    def held_up(self, key, data, known):
        made = replace(self, key, data, known)
        if key.endswith("sent/head") and not late:
            late.append(self)
            as_another_process()
            monkeypatch.setattr(client.Bucket, "replace", replace)
            list(itertools.islice(start(bucket.name, home, "second", **RANDOM), 5))
        return made

    monkeypatch.setattr(client.Bucket, "replace", held_up)
    with pytest.raises(StateError, match="by another process"):
        start(bucket.name, home, "held up", **RANDOM).finish()
    assert late
    as_another_process()
    start(bucket.name, home, "last", **RANDOM).finish()
    there, named, _ = remains(bucket)
    assert there == named
    assert len(charges(bucket.name)) == 1


def test_working_files_are_held_from_the_first_moment_on(bucket, home, monkeypatch):
    """Where a folder cannot be locked, another start would remove it: that is refused."""
    held = state_mirror._hold
    monkeypatch.setattr(state_mirror, "_hold", lambda folder: None)
    with pytest.raises(StateError, match="cannot be locked; name a folder of a disk of this"):
        start(bucket.name, home)
    monkeypatch.setattr(state_mirror, "_hold", held)
    assert [*(home / "cache" / "dpstream" / "states").iterdir()] == []
    start(bucket.name, home).finish()


def test_two_that_begin_at_once(bucket, home):
    """One comes to its end, or both are told; started again, the rest is published, once paid."""
    ends = []

    def work(number):
        try:
            start(bucket.name, home, f"out-{number}", **RANDOM).finish()
            ends.append("end")
        except StateError as problem:
            ends.append(str(problem))

    threads = [Thread(target=work, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(ends) == 2
    start(bucket.name, home, "last", **RANDOM).finish()

    found = [published(home, to) for to in ("out-0", "out-1", "last")]
    for one, other in itertools.combinations(found, 2):
        for name in one.keys() & other.keys():
            assert one[name] == other[name]
    assert {name for one in found for name in one} == published(home, "calm").keys()
    assert len(charges(bucket.name)) == 1


def test_answers_that_are_lost(bucket, home, monkeypatch):
    """Every sixth write is made and nobody hears of it: the same bytes, one charge."""
    for name in ("create", "replace"):
        times, method = itertools.count(1), getattr(client.Bucket, name)

        def lossy(store, *given, times=times, method=method):
            made = method(store, *given)
            if next(times) % 6 == 0:
                raise ServerAway("the answer is lost")
            return made

        monkeypatch.setattr(client.Bucket, name, lossy)
    start(bucket.name, home).finish()

    assert published(home) == published(home, "calm")
    assert len(charges(bucket.name)) == 1


def test_a_server_that_is_away(objects, bucket, home):
    """A run waits as long as it may, then stops before it draws; it goes on later."""
    uri = f"s3://{bucket.name}/states/sent?patience=0.2"
    run = dps.run(
        dps.sql(SINK_QUERY, name="sent"), source=home / "log.parquet", sink=home / "out",
        state=uri, secret=SECRET, options=run_options(),
    )  # fmt: skip
    releases = iter(run)
    list(itertools.islice(releases, 3))
    with objects.away(), pytest.raises(ServerUnreachable):
        list(releases)
    start(bucket.name, home).finish()

    assert published(home) == published(home, "calm")


def test_several_queries_share_one(bucket, home):
    """`run_all`: a directory each, in one state; broken off and begun again."""
    queries = [dps.sql(SINK_QUERY, name=name) for name in ("a", "b")]
    ledger = f"s3://{bucket.name}/book"
    Ledger(ledger).open("stream", queries[0].promise(epsilon=20, delta=0.01))

    def run(to):
        return dps.run_all(
            queries, source=home / "log.parquet", sink=home / to, secret=SECRET, ledger=ledger,
            state=f"s3://{bucket.name}/states/both", options=run_options(),
        )  # fmt: skip

    runs = iter(run("out"))
    list(itertools.islice(runs, 7))
    runs.close()
    run("out").finish()
    assert len(published(home)) == 2 * len(published(home, "calm"))
    assert len([r for r in Ledger(ledger).history() if "amount" in r]) == 2


class ObjectFeed:
    """Rows through objects, releases into others, state and ledger beside them."""

    def __init__(self, objects):
        self.folder, self.numbers = objects.bucket(next(names)), itertools.count()
        self.store = S3Store(self.folder.name, client_options={"allow_http": True})

    def put(self, table):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=5)
        self.store.put(f"in/{next(self.numbers):03}.parquet", sink.getvalue().to_pybytes())

    def start(self, ticking, every):
        bucket = f"s3://{self.folder.name}"
        return dps.run(
            dps.Query(**QUERY), source=f"{bucket}/in/?poll=0", live=True, sink=f"{bucket}/out/",
            state=f"{bucket}/state", secret=SECRET, clock=ticking, options=options(every),
        )  # fmt: skip

    def clock(self, events=()):
        come = [(time, lambda t=time: self.put(rows(seconds_before(t)))) for time in TIMES]
        return ScriptedClock(0, [*come, *events])

    def published(self):
        return {path.name: path.read_bytes() for path in (self.folder / "out").glob("*.parquet")}


def test_live_from_bucket_to_bucket(objects, bucket):
    """Left three times, and the server killed while it is read and written: the same objects."""
    calm = ObjectFeed(objects)
    calm.start(calm.clock(), 2).finish()
    assert len(calm.published()) >= 4

    feed = ObjectFeed(objects)
    ticking = feed.clock([(time + 1, objects.restart) for time in TIMES[1::2]])
    for releases in (1, 3, 2):
        running = iter(feed.start(ticking, 3))
        for _ in range(releases):
            next(running)
        running.close()
        objects.restart()
    feed.start(ticking, 3).finish()

    assert feed.published() == calm.published()


def test_what_cannot_be(bucket, home):
    """Each is refused, with what to do."""
    query, uri = dps.sql(SINK_QUERY, name="sent"), f"s3://{bucket.name}/states/sent"
    common = {"source": home / "log.parquet", "state": uri}
    with pytest.raises(InvalidParameter, match="needs its secret named"):
        dps.run(query, **common)
    with pytest.raises(InvalidParameter, match="would stay on this machine"):
        dps.run(query, **common, secret=SECRET, ledger=home / "book")
    with pytest.raises(InvalidParameter, match="must name a state in the bucket"):
        dps.run(query, **common | {"state": f"s3://{bucket.name}/"}, secret=SECRET)
    sample = dps.mechanisms.Sample(epsilon=1, window=3)
    with pytest.raises(StateError, match="names a bucket, where only queries"):
        dps.Runner(sample, state=uri, secret=SECRET)
    assert not Path("s3:").exists()
    start(bucket.name, home).finish()
    kept = next((bucket / "states/sent/files").iterdir())
    kept.unlink()
    with pytest.raises(StateError, match=r"is damaged: .*is missing"):
        start(bucket.name, home)
    with pytest.raises(StateError, match=r"is damaged: .*is missing"):
        dps.run(query, **common | {"state": uri}, secret=bytes(32)).finish()
