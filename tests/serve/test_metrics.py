"""Numbers for Prometheus, from `dpstream run` and `dpstream serve`, for the operator alone."""

import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.serve import metrics, worker
from dpstream.serve.access import Token
from dpstream.serve.metrics import (
    METRICS,
    book_samples,
    exposition,
    machine_samples,
    memory_limit,
    metrics_address,
    query_samples,
    serve_metrics,
)
from dpstream.serve.worker import Supervisor, died
from tests.support.pipelines import HEADERS, TOKEN, operator_side
from tests.support.processes import Command

SAMPLE = re.compile(r'(\w+)(?:\{(\w+="(?:[^"\\\n]|\\.)*",?)+\})? (\S+)')


def values(text):
    """Values by name and labels; every line is a comment or a sample."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def ask(address, path="/metrics", token=TOKEN, method="GET"):
    """Status and body."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_metrics_of_a_run_are_for_the_token_alone(caplog):
    """Whoever lacks it sees nothing, not even which paths there are."""
    collected = []

    def collect():
        collected.append(1)
        return [("up", {}, 1)]

    token = Token(TOKEN, source="a test")
    with serve_metrics(("127.0.0.1", 0), token, collect, plain_http=False) as address:
        assert ask(address, token="x" * 20)[0] == ask(address, "/no", token="x" * 20)[0] == 401
        assert collected == []
        assert ask(address) == (200, exposition([("up", {}, 1)]))
        assert ask(address, "/no")[0] == 404
        assert ask(address, method="POST")[0] == 501
    with serve_metrics(("127.0.0.1", 0), token, lambda: 1 // 0, plain_http=False) as address:
        assert ask(address) == (500, "")
    assert "metrics cannot be collected" in caplog.text
    with pytest.raises(OSError, match="refused"):
        ask(address)


def test_an_address_that_others_can_reach_must_be_meant():
    """Exact counts are not private, and nothing encrypts them."""
    token = Token(TOKEN, source="a test")
    with (
        pytest.raises(InvalidParameter, match=r"would listen on 0\.0\.0\.0.*--allow-plain-http"),
        serve_metrics(("0.0.0.0", 0), token, list, plain_http=False),
    ):
        pass
    with serve_metrics(("0.0.0.0", 0), token, list, plain_http=True) as address:
        assert ask(address.replace("0.0.0.0", "127.0.0.1"))[0] == 200


@pytest.mark.parametrize("text", ["", "x", "127.0.0.1", "127.0.0.1:", "70000", "localhost:-1"])
def test_an_address_must_have_a_port(text):
    """And a number of one."""
    with pytest.raises(InvalidParameter, match="--metrics must be PORT or HOST:PORT"):
        metrics_address(text)


def test_the_budget_is_that_of_the_ledger(pipeline, monkeypatch):
    """Promised, spent and left, for each book of the pipeline."""
    found = values(exposition(book_samples(pipeline)))

    for book in pipeline.books:
        [told] = [one for one in Ledger(book.ledger).report() if one["dataset"] == book.dataset]
        labels = f'{{dataset="{book.dataset}",measure="{told["terms"]["measure"]}"'
        spent, total = (
            next(found[name] for name in found if name.startswith(f"dpstream_budget{what}{labels}"))
            for what in ("_spent", "")
        )
        assert 0 < spent <= total
    assert {v for name, v in found.items() if name.startswith("dpstream_ledger_readable")} == {1}

    def damaged(path):
        raise LedgerError(f"{path} is damaged")

    monkeypatch.setattr(metrics, "Ledger", damaged)
    assert book_samples(pipeline) == [("ledger_readable", {}, 0)]


def test_a_query_that_never_published_counts_from_its_start():
    """So that no release at all is noticed, too."""
    told = dict.fromkeys((*metrics.COUNTS, "triggers_done"), 0)
    told |= {"triggers": None, "next_trigger": None}
    now = time.time()
    early = query_samples({"q": told}, now - 500)
    late = query_samples({"q": told | {"last_release": now - 5}}, now - 500)

    name = "seconds_since_release"
    since = [next(v for known, _, v in each if known == name) for each in (early, late)]
    assert 500 <= since[0] < 600
    assert 5 <= since[1] < 100


def test_memory_and_disk_are_told(tmp_path, monkeypatch):
    """Memory within the smallest limit; the state directory's files to the byte."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(1000))
    monkeypatch.setattr(metrics, "_CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("12345\n")

    found = values(exposition(machine_samples(tmp_path, {"run": os.getpid(), "gone": None})))
    assert found["dpstream_state_bytes"] == 1000 + 6
    assert found['dpstream_memory_bytes{process="run"}'] > 1 << 20
    assert found["dpstream_disk_free_bytes"] <= found["dpstream_disk_size_bytes"]
    assert memory_limit() == found["dpstream_memory_limit_bytes"] == 12345


def test_the_operator_side_has_the_same_ones(pipeline):
    """Every name of a query, a book and the machine that `run --metrics` has."""
    side = operator_side(pipeline)
    told = dict.fromkeys((*metrics.COUNTS, "triggers_done", "rejected", "outside"), 0)
    told |= {"triggers": 3, "next_trigger": 5, "releases": 2, "consumer_lag": {"clicks/0": 4}}
    side.supervisor._hear(json.dumps({"queries": {"pages": told}}).encode())
    with TestClient(side.app(), headers=HEADERS) as client:
        found = values(client.get("/metrics").text)

    names = {name.partition("{")[0] for name in found}
    assert {f"dpstream_{name}" for name in METRICS} - names <= {
        f"dpstream_{name}"
        for name in (
            "rows_waiting", "release_delay_seconds", "worst_release_delay_seconds",
            "posted_accepted_total", "posted_rejected_total", "posted_requests_total",
            "posted_bytes",
        )
    }  # fmt: skip
    assert found['dpstream_releases_total{query="pages"}'] == 2
    assert found['dpstream_consumer_lag{query="pages",partition="clicks/0"}'] == 4


LIVE = '''
[source]
path = "in/"
live = true
[budget]
dataset = "clicks"
epsilon = 8
delta = 1e-5
[state]
path = "state"
[sink]
to = ["out/"]
[[query]]
name = "pages"
sql = """
SELECT WITH DIFFERENTIAL_PRIVACY
       OPTIONS (epsilon = 8, delta = 1e-6, privacy_unit_column = user, max_groups_contributed = 1,
                privacy_unit_period = INTERVAL '10' SECOND)
       page, window_start, COUNT(*) AS n
FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '10' SECOND)
GROUP BY page, window_start
EMIT EVERY INTERVAL '1' SECOND
"""
'''


@pytest.mark.timeout(300)
def test_a_live_run_answers_while_it_publishes(tmp_path):
    """The command, from outside: rows read, releases, budget, lag; then an orderly stop."""
    (tmp_path / "in").mkdir()
    (tmp_path / "live.toml").write_text(LIVE)
    words = ("run", "live.toml", "--metrics", 0, "--log-format", "json")
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    run = Command(*words, cwd=tmp_path, **pipes)
    try:
        address = ""
        while not address:
            line = json.loads(run.stderr.readline())["message"]
            address = "".join(re.findall(r"^metrics: (\S+),", line))
        token = (tmp_path / "state" / "operator.token").read_text().strip()
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = [f"u{n},home,{at}" for n in range(300)]
        (tmp_path / "in" / ".new").write_text("\n".join(["user,page,at", *lines, ""]))
        (tmp_path / "in" / ".new").rename(tmp_path / "in" / "a.csv")
        found = {}
        while not found.get('dpstream_rows_read_total{query="pages"}'):
            status, text = ask(address, token=token)
            assert status == 200
            found = values(text)
        assert found['dpstream_rows_read_total{query="pages"}'] == 300
        while not found['dpstream_releases_total{query="pages"}']:
            found = values(ask(address, token=token)[1])
        assert found["dpstream_up"] == 1
        assert found['dpstream_lag_seconds{query="pages"}'] >= 0
        assert sum(name.startswith("dpstream_budget_left{") for name in found) == 1
    finally:
        run.terminate()
        _, rest = run.communicate()
    assert run.returncode == 130
    messages = [json.loads(line)["message"] for line in rest.splitlines()]
    assert any(words.startswith("stopping at the next occasion") for words in messages)


def test_a_process_that_was_killed_is_told_by_what_and_what_to_do(tmp_path, caplog, monkeypatch):
    """In the log and in /health, while it is started again."""
    counts = iter([0, 0, 0, 1])
    monkeypatch.setattr(worker, "oom_kills", lambda: next(counts))
    command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")

    async def see():
        one = Supervisor(path=tmp_path, command=command)
        async with one.running():
            while one.state != "restarting":
                await asyncio.sleep(0.01)
            return one.problem, one.restarts

    for words in ("look for 'oom' in `journalctl -k`", "give it more"):
        problem, restarts = asyncio.run(see())
        assert restarts == 1
        assert problem["error"] == "Died"
        assert "SIGKILL" in problem["message"]
        assert words in problem["message"]
        assert words in caplog.text
    assert "-9" not in caplog.text


@pytest.mark.parametrize(
    ("code", "out_of_memory", "words"),
    [
        (-9, True, "for want of memory meanwhile: give it more"),
        (-15, False, "SIGTERM: somebody has sent it"),
        (-11, False, "SIGSEGV, a fault in native code"),
        (-64 - 1, False, "signal 65"),
        (3, False, "exit code 3"),
    ],
)
def test_an_exit_code_is_read(code, out_of_memory, words):
    """Signals by name, and what follows from it."""
    assert words in died(code, out_of_memory)
