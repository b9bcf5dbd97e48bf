"""What fails for a while, or is too much, does not stop the feed, the run or the operator."""

import asyncio
import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpstream.errors import BudgetExceeded, StateError
from dpstream.serve import public_facts, worker
from dpstream.serve.event_stream import Hub
from dpstream.serve.release_store import ReleaseReader, hold_folder, store_folder
from dpstream.serve.worker import Supervisor, publish
from tests.support.pipelines import HEADERS, operator_side, public_side


def alone(work):
    """What `work` comes to, on a thread without a loop: a browser's tests may hold this one's."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(asyncio.run, work).result()


class Failing(ReleaseReader):
    """A reader that cannot read when it is told so."""

    problem = None

    def after(self, number, limit):
        """The horizon has moved by now."""
        if self.problem is not None:
            raise self.problem
        return super().after(number, limit)

    def expect(self, released):
        """Always."""
        raise OSError("too many open files")


@pytest.mark.parametrize("problem", [OSError("disk"), sqlite3.OperationalError("disk I/O error")])
def test_the_feed_goes_on_after_it_could_not_be_read(pipeline, caplog, problem):
    """Every event comes, and the operator's log says once what was wrong."""

    async def follow():
        reader = Failing(store_folder(pipeline))
        hub = Hub(reader, grid=0.02)
        reader.problem = problem
        task = asyncio.create_task(hub._tick())
        while not caplog.text:
            await asyncio.sleep(0.01)
        seen = hub.newest
        reader.problem = None
        await hub.wait(0, 10)
        task.cancel()
        return seen, hub.newest, [one.id for one in await hub.events(0)]

    before, newest, numbers = alone(follow())

    assert before == 0
    assert newest > 0
    assert numbers == list(range(1, newest + 1))
    assert caplog.text.count(str(problem)) == 1


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    """The operator sees why."""
    monkeypatch.setattr(worker, "PATIENCE", (0.01,))
    one = Supervisor(path=tmp_path, command=(str(tmp_path / "nothing"),))

    async def keep():
        kept = asyncio.create_task(one._keep())
        while one.restarts < 2:
            await asyncio.sleep(0.01)
        kept.cancel()

    alone(keep())

    assert one.problem["error"] == "FileNotFoundError"


def test_busy_threads_of_the_public_side_hold_up_neither_events_nor_the_operator(pipeline):
    """Both have threads of their own."""
    free = threading.Event()

    async def look():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, free.wait, 30)
        hub = Hub(ReleaseReader(store_folder(pipeline)))
        await asyncio.wait_for(hub._look(), 10)
        sent = []
        scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b""}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        app = operator_side(pipeline).app()
        await asyncio.wait_for(app(scope, _nothing, _into(sent)), 10)
        free.set()
        await busy
        return hub.newest, sent[0]["status"]

    newest, status = alone(look())

    assert newest > 0
    assert status == 200


async def _nothing():
    return {"type": "http.request", "body": b"", "more_body": False}


def _into(sent):
    async def send(message):
        sent.append(message)

    return send


def test_more_questions_than_can_be_worked_out_are_refused(feed):
    """One is at work and one waits; the threads of others are not taken."""
    with public_facts._FEW, public_facts._FEW:
        refused = feed.get("/api/what-if", params={"query": "pages", "epsilon": 2})
        others = feed.get("/api/queries")

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert others.status_code == 200
    assert feed.get("/api/what-if", params={"query": "pages", "epsilon": 2}).status_code == 200


def test_a_store_that_another_process_writes_is_left_alone(pipeline):
    """Nothing of it is touched, or announced, before it is ours."""
    with hold_folder(store_folder(pipeline)), pytest.raises(StateError, match="another process"):
        publish(pipeline)


def test_the_operator_is_told_once_a_minute_of_rows_that_were_not_used(tmp_path, monkeypatch):
    """And of nothing while there are none, or no others."""
    said = []
    one = Supervisor(path=tmp_path, say=said.append)

    def hear(read, rejected, outside):
        told = {"read": read, "rejected": rejected, "outside": outside}
        one._hear(json.dumps({"queries": {"pages": told}}).encode())

    hear(600, 0, 0)
    assert said == []
    hear(600, 300, 300)
    hear(700, 400, 300)
    assert len(said) == 1
    assert said[0].startswith(
        "operator only: pages: 300 of 600 rows rejected since this start, 300"
    )
    monkeypatch.setattr(worker, "_SAYING", 0.0)
    hear(700, 400, 300)
    hear(700, 400, 300)
    assert len(said) == 2
    one._hear(b"5")  # not of the run


def test_readers_are_told_of_a_book_that_has_refused_and_of_no_other_reason(pipeline):
    """All queries, or the one that has failed; why another does not run is the operator's."""
    one = Supervisor(path=pipeline.path)
    side = public_side(pipeline, refused=one.refused)
    told = {"read": 0, "rejected": 0, "outside": 0}

    def shown(error, **more):
        failed = {"failed": {"error": error, "message": "words"}}
        one._hear(json.dumps({"queries": {"pages": told | failed}}).encode())
        for name, value in more.items():
            setattr(one, name, value)
        return one.refused("pages"), one.refused("all")

    assert shown("InvalidInput") == (False, False)
    assert shown("BudgetExceeded") == (True, False)
    assert shown("InvalidInput", state="refused", problem={"error": "BudgetExceeded"}) == (
        True,
        True,
    )
    assert all(each["refused"] for each in side._all({})["queries"])
    side.hub.reader.look()
    assert not any(each["refused"] for each in side._all({})["queries"])  # they had finished


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("BudgetExceeded", BudgetExceeded),
        ("FileNotFoundError", FileNotFoundError),
        ("KeyError", StateError),
        ("SystemExit", StateError),
        ("nothing", StateError),
    ],
)
def test_a_refusal_of_the_process_is_raised_as_run_raises_it(error, kind):
    """By its own kind, which has the exit code; what is nobody's refusal says what it was."""
    raised = worker.refusal({"error": error, "message": "words"})

    assert type(raised) is kind
    assert "words" in str(raised)
