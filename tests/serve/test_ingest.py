"""Rows that are posted are durable when they are acknowledged, and counted once."""

import gzip
import json
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from starlette.testclient import TestClient

from dpstream.connectors import write_ahead
from dpstream.connectors.write_ahead import Inbox, PushedSource
from dpstream.errors import RowsLost, StateError
from dpstream.records import Batch
from dpstream.serve import operator_side as operator_side_module
from dpstream.serve.operator_side import ARROW, JSONL
from dpstream.session.pipeline import load_pipeline
from tests.support.pipelines import HEADERS, PUSHED, operator_side, write

LINES = b'{"user": "a", "page": "home", "at": 5}\n{"user": "b", "page": null, "at": 6.5, "x": 1}\n'


@pytest.fixture
def pipeline(tmp_path):
    return load_pipeline(write(tmp_path / "p", [], PUSHED))


@pytest.fixture
def client(pipeline):
    with TestClient(operator_side(pipeline).app(), headers=HEADERS) as client:
        yield client


def kept(pipeline, columns=("user", "page", "at")):
    """What a run would read: rows, and rejected lines."""
    source, rows, bad, position = PushedSource(pipeline.pushed["clicks"].folder), [], [], None
    while True:
        batch = source.read("pushed", position, columns=list(columns))
        if batch.position == position:
            return rows, bad
        rows += [tuple(row[name] for name in columns) for row in batch.table.to_pylist()]
        bad += batch.rejected
        position = batch.position


def post(client, body, kind=JSONL[0], **headers):
    return client.post("/ingest/clicks", content=body, headers={"content-type": kind} | headers)


def test_json_lines_are_kept_as_a_file_would_be_read(client, pipeline):
    """Only the columns that some query wants; broken lines with their place and reason."""
    answer = post(client, LINES + b"not json\n" + b'{"user": "c", "page": [1]}')

    assert answer.status_code == 202
    assert answer.json() == {"accepted": 2, "rejected": 2, "segment": 0, "repeated": False}
    rows, bad = kept(pipeline)
    assert rows == [("a", "home", "5"), ("b", None, "6.5")]
    assert [one.where for one in bad] == ["posted to clicks, line 3", "posted to clicks, line 4"]


def test_arrow_becomes_the_same_text(client, pipeline):
    """A run must not meet 5 and "5" as two users, whichever way they came."""
    table = pa.table(
        {"at": [5, 7], "user": [1, 2], "page": pa.array(["x", None]).dictionary_encode()}
    )
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    answer = post(client, file.getvalue().to_pybytes(), ARROW)

    assert answer.status_code == 202, answer.text
    assert kept(pipeline)[0] == [("1", "x", "5"), ("2", None, "7")]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"\x00\x01", ARROW, 422),
        (b"", ARROW, 422),
        (LINES, "text/html", 415),
        (LINES, "", 415),
        (b"", JSONL[0], 202),
        (b"\xff\xfe\n", JSONL[0], 202),
    ],
)
def test_other_bodies_are_refused_or_set_aside(client, pipeline, body, kind, status):
    """And leave nothing behind that could stop the run."""
    assert post(client, body, kind).status_code == status
    assert kept(pipeline)[0] == []


def test_a_request_that_comes_again_is_taken_once(client, pipeline):
    """Its answer was lost; the key says that it is the same, also after a restart."""
    key = {"idempotency-key": "request 1"}
    first, again = post(client, LINES, **key).json(), post(client, LINES, **key).json()
    other = post(client, LINES, **{"idempotency-key": "request 2"}).json()
    with TestClient(operator_side(pipeline).app(), headers=HEADERS) as restarted:
        later = post(restarted, LINES, **key).json()

    assert [one["repeated"] for one in (first, again, other, later)] == [False, True, False, True]
    assert [one["segment"] for one in (first, again, other, later)] == [0, 0, 1, 0]
    assert len(kept(pipeline)[0]) == 4


def test_a_key_that_comes_with_another_body_is_refused(client, pipeline):
    """Nothing of it is kept, also after a restart; compressed or not, the body is the same."""
    key = {"idempotency-key": "request 1"}
    post(client, LINES, **key)
    other = post(client, LINES + LINES, **key)
    same = post(client, gzip.compress(LINES, mtime=0), **key, **{"content-encoding": "gzip"})
    with TestClient(operator_side(pipeline).app(), headers=HEADERS) as restarted:
        later = post(restarted, LINES[:-5], **key)
        (pipeline.pushed["clicks"].folder / "requests.jsonl").unlink()
    with TestClient(operator_side(pipeline).app(), headers=HEADERS) as restarted:
        from_segment = post(restarted, b"", **key)

    assert [one.status_code for one in (other, same, later, from_segment)] == [409, 202, 409, 409]
    assert same.json()["repeated"]
    assert len(kept(pipeline)[0]) == 2


def test_a_request_of_an_earlier_version_is_still_known(pipeline):
    """Its note has no digest of its body: whatever comes under its key was taken."""
    folder = pipeline.pushed["clicks"].folder
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    Inbox(folder).put(batch, request="r")
    notes = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]

    assert [len(note) for note in notes] == [2]
    assert Inbox(folder).put(batch, request="r", body="other") == (0, True)


def stream(*columns, rows=None, compression=None):
    """An Arrow stream with the wanted columns."""
    table = pa.table(dict(zip(("user", "page", "at"), columns, strict=False)))
    file = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)
    return file.getvalue().to_pybytes()


def bombs():
    """Small posts that are large when they are decoded, by the way in which they are."""
    zeros = pa.array(np.zeros(1 << 22, np.int64))
    long, huge = pa.array(["x" * 100_000]), pa.array(["x" * (1 << 25)])
    _, view, text = long.cast(pa.string_view()).buffers()
    views = [None, pa.py_buffer(view.to_pybytes()[:16] * 50_000), text]
    many = pa.array(np.zeros(50_000, np.int8))
    return {
        "zstd": stream(zeros, compression="zstd"),
        "lz4": stream(zeros, compression="lz4"),
        "compressed dictionary": stream(
            pa.DictionaryArray.from_arrays(pa.array([0]), huge), compression="zstd"
        ),
        "dictionary": stream(pa.DictionaryArray.from_arrays(many, long)),
        "views": stream(pa.Array.from_buffers(pa.string_view(), 50_000, views)),
        "nulls": stream(pa.Array.from_buffers(pa.null(), (1 << 31) - 1, [None])),
        "runs": stream(pc.run_end_encode(pa.array(["x"])), pa.nulls(1)),
    }


@pytest.mark.parametrize(
    "how", ["zstd", "lz4", "compressed dictionary", "dictionary", "views", "nulls", "runs"]
)
def test_what_would_be_large_when_decoded_is_refused_before_it_is(pipeline, how):
    """By what the messages say of themselves, and by what their cells refer to."""
    side = operator_side(pipeline, most_body=1 << 20, most_decoded=1 << 24)
    body = bombs()[how]
    with TestClient(side.app(), headers=HEADERS) as client:
        before = pa.total_allocated_bytes()
        answer = post(client, body, ARROW)
        grown = pa.total_allocated_bytes() - before

    assert answer.status_code == (422 if how == "runs" else 413), answer.text
    assert len(body) < 1 << 20
    assert grown < 1 << 20
    assert kept(pipeline)[0] == []


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_compressed_stream_of_a_fair_size_is_taken(client, pipeline, compression):
    """Whatever its columns are stored as."""
    pages = pa.array(["home", "news"] * 50)
    for page in (pages, pages.dictionary_encode(), pages.cast(pa.string_view())):
        body = stream(pa.array(range(100)), page, pa.array([5] * 100), compression=compression)
        assert post(client, body, ARROW).json()["accepted"] == 100

    assert kept(pipeline)[0][:100] == kept(pipeline)[0][200:]


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(LINES, mtime=0), "gzip", 202),
        (gzip.compress(LINES[:40], mtime=0) + gzip.compress(LINES[40:], mtime=0), "GZIP", 202),
        (LINES, "identity", 202),
        (gzip.compress(LINES, mtime=0)[:-9], "gzip", 422),
        (gzip.compress(LINES, mtime=0) + b"more", "gzip", 422),
        (LINES, "gzip", 422),
        (LINES, "br", 415),
        (gzip.compress(b" " * (1 << 22), mtime=0), "gzip", 413),
        (gzip.compress(b"{}\n" * 40_000, mtime=0), "gzip", 413),
    ],
)
def test_a_body_may_be_compressed_within_limits(pipeline, body, encoding, status):
    """No more of it is decompressed than may be."""
    side = operator_side(pipeline, most_body=1 << 20, most_decoded=1 << 20)
    with TestClient(side.app(), headers=HEADERS) as client:
        assert post(client, body, **{"content-encoding": encoding}).status_code == status

    assert len(kept(pipeline)[0]) == (2 if status == 202 else 0)


def test_long_bodies_are_read_in_blocks(client, pipeline, monkeypatch):
    """A line is found by its number in the whole body; one that is too long is set aside alone."""
    monkeypatch.setattr(operator_side_module, "_BLOCK", 100)
    good = b'{"user": "u", "page": "home", "at": 1}\n'
    deep = b'{"user": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"
    answer = post(client, good * 5 + deep + good + b"no row\n" + good * 4)

    assert answer.json()["accepted"] == 10
    assert [one.where for one in kept(pipeline)[1]] == [
        "posted to clicks, line 6",
        "posted to clicks, line 8",
    ]


def test_a_body_that_is_all_no_rows_is_refused_as_a_whole(client, pipeline):
    """Each would be a dead letter of many times its size."""
    answer = post(client, b"x\n" * 10_001)

    assert answer.status_code == 422
    assert kept(pipeline) == ([], [])


def test_a_kill_after_the_rows_and_before_the_note_does_not_count_them_twice(pipeline):
    """The segment itself says which request it belongs to."""
    folder = pipeline.pushed["clicks"].folder
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    Inbox(folder).put(batch, request="r")
    (folder / "requests.jsonl").unlink()

    assert Inbox(folder).put(batch, request="r") == (0, True)


def test_rows_that_were_written_by_a_put_that_failed_do_not_stop_the_next(pipeline, monkeypatch):
    """The same request is recognised; another one goes on after it."""
    folder = pipeline.pushed["clicks"].folder
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    inbox, real = Inbox(folder), write_ahead.put_new

    def fails_afterwards(*args, **kwargs):
        real(*args, **kwargs)
        raise StateError("the directory cannot be synced")

    monkeypatch.setattr(write_ahead, "put_new", fails_afterwards)
    with pytest.raises(StateError):
        inbox.put(batch, request="r")
    monkeypatch.undo()

    assert inbox.put(batch, request="r") == (0, True)
    assert inbox.put(batch, request="s") == (1, False)
    Inbox(folder).put(batch)
    assert inbox.put(batch) == (3, False)


def test_segments_go_when_no_recovery_needs_them_and_numbers_go_on(pipeline):
    """The newest stays, so that a number is never given twice."""
    folder = pipeline.pushed["clicks"].folder
    inbox, source = Inbox(folder), PushedSource(folder)
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    for _ in range(4):
        inbox.put(batch)
    source.commit({"pushed": 9})

    assert [path.name for path in sorted(folder.glob("*.segment"))] == ["000000000003.segment"]
    assert Inbox(folder).put(batch) == (4, False)
    assert source.read("pushed", None).position == 4
    with pytest.raises(StateError, match="begins at segment 3"):
        source.read("pushed", 1)


def test_segments_that_are_kept_for_longer_are_out_of_the_way(pipeline):
    """They do not count as waiting, and a run that begins does not begin with them."""
    folder = pipeline.pushed["clicks"].folder
    inbox, source = Inbox(folder), PushedSource(folder, keep=timedelta(days=1))
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    for _ in range(4):
        inbox.put(batch)
    waiting = inbox.waiting
    source.commit({"pushed": 3})

    assert len(list((folder / "kept").iterdir())) == 3
    assert inbox.waiting == waiting // 4
    assert source.read("pushed", None).position == 4
    assert Inbox(folder).put(batch) == (4, False)


def test_a_replay_ends_where_it_is_told_to(pipeline):
    """A segment that came after the logged position is not a part of the step."""
    folder = pipeline.pushed["clicks"].folder
    batch = Batch(table=pa.table({"user": ["a"]}), position=None, done=True)
    for _ in range(3):
        Inbox(folder).put(batch)
    read = PushedSource(folder).read("pushed", 2, columns=["user"], until=2)

    assert (read.table.num_rows, read.position, read.done) == (0, 2, True)
    assert PushedSource(folder).read("pushed", 1, until=2).done
    with pytest.raises(RowsLost, match="segment 3 was read before"):
        PushedSource(folder).read("pushed", 3, until=5)


def test_too_much_that_waits_is_refused(pipeline):
    """A run that does not read must not fill the disk."""
    side = operator_side(pipeline)
    side.intakes["clicks"].most_waiting = 500
    with TestClient(side.app(), headers=HEADERS) as client:
        found = [post(client, LINES).status_code for _ in range(12)]

    assert found[0] == 202
    assert found[-1] == 503


def test_rows_that_cannot_be_written_are_not_acknowledged(client, pipeline, monkeypatch, caplog):
    """A full disk: try again later; the words are the operator's, in the log."""

    def full(*_, **__):
        raise StateError("there is no space left to write it")

    monkeypatch.setattr(write_ahead, "put_new", full)
    answer = post(client, LINES)
    monkeypatch.undo()

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "no space left" not in answer.text
    assert "no space left" in caplog.text
    assert post(client, LINES).json()["segment"] == 0


def test_what_is_posted_is_private_to_this_user(client, pipeline):
    """Raw rows, in files of mode 0600."""
    post(client, LINES, **{"idempotency-key": "r"})
    folder = pipeline.pushed["clicks"].folder

    assert folder.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


def test_the_operator_sees_dead_letters_books_and_numbers(pipeline):
    """As the process has told them."""
    side = operator_side(pipeline)
    told = {"read": 7, "outside": 1, "late": 2, "other_keys": 0, "rejected": 3}
    told |= {"triggers_done": 5, "triggers": None, "next_trigger": 0}
    side.supervisor.told = {"queries": {"pages": told}}
    side.supervisor.state = "running"
    folder = pipeline.folders["pages"] / "dead-letters"
    folder.mkdir(parents=True)
    letter = {"where": "line 1", "reason": "no unit", "row": "x"}
    (folder / "a.jsonl").write_text(json.dumps(letter) + "\n")
    with TestClient(side.app(), headers=HEADERS) as client:
        post(client, LINES)
        metrics = client.get("/metrics").text.splitlines()
        lag = client.get("/lag").json()["queries"]["pages"]
        letters = client.get("/dead-letters").json()["dead_letters"]
        health = client.get("/health").json()
        ledger = client.get("/ledger").json()

    assert 'dpstream_rows_read_total{query="pages"} 7' in metrics
    assert 'dpstream_posted_accepted_total{source="clicks"} 2' in metrics
    assert (lag["late"], lag["triggers_done"]) == (2, 5)
    assert lag["seconds"] > 1e9
    assert letters == [{"query": "pages"} | letter]
    assert (health["healthy"], health["pipeline"]) == (True, "running")
    assert ledger == {"datasets": []}


def test_rows_that_nobody_would_read_are_refused(pipeline):
    """Of a run that has ended, and of one that is only shown; nothing is made for them."""
    shown = operator_side(pipeline, takes_rows=False)
    assert not pipeline.pushed["clicks"].folder.exists()
    ended = operator_side(pipeline)
    ended.supervisor.state = "finished"
    for side in (shown, ended):
        with TestClient(side.app(), headers=HEADERS) as client:
            assert post(client, LINES).status_code == 409
            assert client.post("/ingest/none", content=LINES).status_code == 404
            assert client.get("/metrics").status_code == 200
    assert kept(pipeline)[0] == []
