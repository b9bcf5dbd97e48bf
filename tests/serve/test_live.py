"""A server that is killed anywhere and started again: the same events, none lost, none twice."""

import json
import os
import signal
import time

import pytest

from tests.serve.operators import PUSHED
from tests.serve.pipelines import write
from tests.serve.processes import Follower, served, until


@pytest.fixture
def pipeline(tmp_path):
    return write(tmp_path / "p", [], PUSHED)


def rows(first, count=300, page="home"):
    now = time.time()
    return [{"user": f"u{first + n}", "page": page, "at": now} for n in range(count)]


def test_events_go_on_after_kills_of_either_process(pipeline):
    """The run's process is killed, then the server; clients go on by their last id.

    What was acknowledged is published; what was published has the same number and bytes for ever.
    """
    events = []
    with served(pipeline) as server:
        follower = Follower(server, last=0)
        assert server.post(rows(0))[0] == 202
        until(lambda: len(follower.events) >= 3)
        os.kill(_worker(server), signal.SIGKILL)
        assert server.post(rows(1000, page="news"))[0] == 202  # taken in while nobody runs
        until(lambda: server.health()["restarts"] == 1)
        seen = len(follower.events)
        until(lambda: len(follower.events) >= seen + 2)
        before = _history(server)
        server.kill()
        follower.join(timeout=30)
        events += follower.events
    last = events[-1][0]
    with served(pipeline) as server:
        follower = Follower(server, last=last)
        from_start = Follower(server, last=0)
        beyond = Follower(server, last=10**9)
        until(lambda: len(follower.events) >= 2)
        until(lambda: len(from_start.events) >= last + 2)
        events += list(follower.events)
        latest = until(lambda: _latest(server, "news"))
        after = _history(server)
        assert beyond.resets == 1
        code, said = server.stop()

    numbers = [number for number, _ in events]
    assert numbers == list(range(1, len(numbers) + 1))
    again = [event for event in from_start.events if event[0] <= numbers[-1]]
    assert again[: len(events)] == events[: len(again)]
    triggers = [(data["window"], data["release_index"]) for _, data in events]
    assert triggers == sorted(set(triggers))
    times = [data["time"] for _, data in events]
    assert times == sorted(set(times))  # no trigger was left out or came twice
    assert after[: len(before)] == before
    assert latest["values"]["clicks"] > 200
    assert (code, said) == (0, "")


def test_a_pipeline_over_files_is_served_after_it_has_ended(tmp_path):
    """From its store, without running it; Ctrl-C leaves in good order."""
    public_range = "start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 00:20:00'"
    text = PUSHED.replace('"http:"', '"clicks.csv"')
    text = text.replace("time_unit = 's'", f"time_unit = 's', {public_range}")
    text = text.replace("EVERY INTERVAL '1' SECOND", "EVERY INTERVAL '5' MINUTE")
    lines = [f"u{n},home,{n % 1200},1" for n in range(3000)]
    path = write(tmp_path / "p", lines, text)
    with served(path) as server:
        until(lambda: server.health()["pipeline"] == "finished")
        until(lambda: server.health()["newest_release"] == 4)
        _, first = server.ask("/api/queries/pages/latest")
        code, said = server.stop()
    with served(path, "--no-run") as server:
        until(lambda: server.health()["newest_release"] == 4)
        health = server.health()
        _, second = server.ask("/api/queries/pages/latest")

    assert (code, said) == (0, "")
    assert health["pipeline"] == "not run"
    assert first == second
    assert json.loads(first)["rows"][0]["key"] == ["home"]


def test_a_pipeline_that_cannot_run_is_the_operators_affair(tmp_path):
    """The page stays; the reason is with the operator, and not on the public side."""
    path = write(
        tmp_path / "p", [], PUSHED.replace("epsilon = 4\ndelta = 1e-6", "epsilon = 1\ndelta = 1e-6")
    )
    with served(path) as server:
        health = until(lambda: (found := server.health())["problem"] and found)
        status, answer = server.ask("/api/queries/pages/latest")
        page, _ = server.ask("/")

    assert not health["healthy"]
    assert health["problem"]["error"] == "BudgetExceeded"
    assert (status, json.loads(answer)) == (404, {"error": "nothing was published yet"})
    assert page == 200


def _worker(server):
    """The process that runs the pipeline."""
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children) as file:
        return int(file.read().split()[0])


def _history(server):
    return server.ask("/api/queries/pages/releases?limit=10000&format=jsonl")[1].splitlines()


def _latest(server, page):
    status, answer = server.ask(f"/api/queries/pages/latest?q={page}")
    found = json.loads(answer)["rows"] if status == 200 else []
    return found[0] if found else None
