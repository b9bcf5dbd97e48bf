"""Alerts of a pipeline file reach their address, once a key and window, also after failures."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest

from dpstream.errors import InvalidInput
from dpstream.serve import alerts as alerts_module
from dpstream.serve.alerts import Alerts
from dpstream.serve.event_stream import Hub
from dpstream.serve.public_facts import describe_queries
from dpstream.serve.release_store import ReleaseReader, store_folder
from dpstream.serve.worker import publish
from dpstream.session.pipeline import load_pipeline
from tests.support.pipelines import OPTIONS, PIPELINE, rows, write
from tests.support.processes import until
from tests.support.served import served

FIGURE = 250
ALERTS = """
[[alert]]
query = "pages"
column = "clicks"
above = {figure}
webhook = "{address}/secret-token"
[[alert]]
query = "pages"
column = "clicks"
key = ["news"]
below = {figure}
webhook = "{address}/news"
"""


class Taker(ThreadingHTTPServer):
    """Takes messages; answers 503 to the first `refused` of them, as one that is away would."""

    daemon_threads = True

    def __init__(self, refused=0, code=503):
        super().__init__(("127.0.0.1", 0), Take)
        self.refused, self.code, self.asked, self.messages = refused, code, 0, []
        self.address = f"http://127.0.0.1:{self.server_port}"

    def of(self, path):
        return [message for place, message in self.messages if place == path]


class Take(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        taken = self.server.asked > self.server.refused
        if taken:
            self.server.messages.append((self.path, json.loads(body)))
        self.send_response(200 if taken else self.server.code)
        if not taken:
            self.send_header("location", f"{self.server.address}/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def taking(**how):
    with Taker(**how) as taker:
        thread = threading.Thread(target=taker.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield taker
        finally:
            taker.shutdown()
            thread.join()


def follow(pipeline, over):
    """Run the alerts of a pipeline until `over` holds; their report."""

    async def work():
        reader = ReleaseReader(store_folder(pipeline))
        hub = Hub(reader, grid=0.02)
        alerts = Alerts(
            alerts=pipeline.alerts,
            queries=describe_queries(pipeline),
            hub=hub,
            folder=store_folder(pipeline),
            patience=(0.01,),
        )
        async with hub.running(), alerts.running():
            while not over(alerts):
                await asyncio.sleep(0.01)
        reader.close()
        return alerts.report

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(asyncio.run, work()).result(60)


def kept(pipeline):
    """Up to which release each alert has told."""
    folder = store_folder(pipeline)
    return [json.loads(path.read_text())["after"] for path in folder.glob("alert-*.json")]


def wanted(pipeline):
    """(window, release, key) of what is above the figure by its margin, the first in its window."""
    found, told = [], set()
    for path in sorted((pipeline.path.parent / "out").glob("pages-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            key = (row["window_start"], row["page"])
            if row["clicks"] - 2 * row["clicks_stddev"] > FIGURE and key not in told:
                told.add(key)
                found.append((row["release_index"], row["page"][:200], row["clicks"]))
    return found


@pytest.fixture
def begun(tmp_path):
    """A pipeline with alerts that have seen an empty store."""

    def made(taker):
        path = write(tmp_path / "p", rows(), PIPELINE)
        with path.open("a") as file:
            file.write(ALERTS.format(figure=FIGURE, address=taker.address))
        pipeline = load_pipeline(path)
        store_folder(pipeline).mkdir(parents=True, mode=0o700)
        follow(pipeline, lambda alerts: len(kept(pipeline)) == 2)
        return pipeline

    return made


def test_each_key_is_told_once_in_a_window(begun):
    """When it is above the figure by its whole margin; a restart tells nothing again."""
    with taking() as taker:
        pipeline = begun(taker)
        publish(pipeline, options=OPTIONS)
        expected = wanted(pipeline)
        assert 3 < len(expected) < 40
        last = max(one.id for one in _released(pipeline) if one.query == "pages")
        follow(pipeline, lambda _: kept(pipeline) == [last, last])
        told = taker.of("/secret-token")

        assert [
            (message["release_index"], key["key"][0], key["value"])
            for message in told
            for key in message["keys"]
        ] == expected
        assert all(message["above"] == FIGURE and message["more"] == 0 for message in told)
        assert told[0]["text"].startswith("pages: clicks above 250: ")
        assert {key["key"][0] for one in taker.of("/news") for key in one["keys"]} == {"news"}
        assert all(
            key["value"] + 2 * key["stddev"] < FIGURE
            for one in taker.of("/news")
            for key in one["keys"]
        )

        count = len(taker.messages)
        follow(pipeline, lambda alerts: alerts.hub.newest >= last)
        assert len(taker.messages) == count


@pytest.mark.parametrize("code", [503, 404, 302])
def test_a_message_is_sent_until_it_is_taken(begun, caplog, code):
    """The log names the host, and neither the address, which may be a secret, nor each try."""
    with taking(refused=7, code=code) as taker:
        pipeline = begun(taker)
        publish(pipeline, options=OPTIONS)
        last = max(one.id for one in _released(pipeline) if one.query == "pages")
        report = follow(pipeline, lambda _: kept(pipeline) == [last, last])

        keys = [key["key"][0] for one in taker.of("/secret-token") for key in one["keys"]]
        assert keys == [key for _, key, _ in wanted(pipeline)]
        assert taker.of("/elsewhere") == []
    said = [one.getMessage() for one in caplog.records if "alert" in one.getMessage()]
    assert 1 <= len(said) <= 2
    assert f"it answers {code}" in said[0]
    assert "secret-token" not in caplog.text
    assert [one["failing"] for one in report] == [None, None]


def test_the_server_tells_alerts(tmp_path):
    """`dpstream serve` does, and the operator's side says how many were sent."""
    with taking() as taker:
        path = write(tmp_path / "p", rows(), PIPELINE)
        with path.open("a") as file:
            file.write(ALERTS.format(figure=FIGURE, address=taker.address))
        with served(path) as server:
            until(lambda: taker.of("/secret-token"), seconds=60)
            until(lambda: server.health()["alerts"][0]["sent"])
            assert taker.address not in str(server.health())
            status, public = server.ask("/api/queries")
            assert status == 200
            assert b"webhook" not in public


def _released(pipeline):
    reader = ReleaseReader(store_folder(pipeline))
    reader.look()
    found = reader.after(0, 1000)
    reader.close()
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("above = 250", "above = 250\nbelow = 3"), "above or below, and not both"),
        (('query = "pages"', 'query = "page"'), "there is no query 'page'; did you mean 'pages'"),
        (("http://127.0.0.1:1", "ftp://127.0.0.1:1"), "webhook must be an address"),
        (("http://127.0.0.1:1", "https://me:word@host"), "without a user's name or password"),
    ],
)
def test_alerts_that_cannot_be_are_refused(tmp_path, change, words):
    """When the file is read, with the place and what to write."""
    text = ALERTS.format(figure=FIGURE, address="http://127.0.0.1:1").replace(*change, 1)
    path = write(tmp_path, rows(users=5), PIPELINE + text)

    with pytest.raises(InvalidInput, match=r"\[\[alert\]\] number 1") as refused:
        load_pipeline(path)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('"clicks"\nabove', '"click"\nabove'),
            "no number with an error bar; those that are: clicks",
        ),
        (('["news"]', '["news", "home"]'), "a key of 2 parts; its keys have 1: page"),
    ],
)
def test_alerts_that_do_not_fit_their_query_are_refused(tmp_path, change, words):
    """Before the server listens."""
    text = ALERTS.format(figure=FIGURE, address="http://127.0.0.1:1").replace(*change, 1)
    pipeline = load_pipeline(write(tmp_path, rows(users=5), PIPELINE + text))

    with pytest.raises(InvalidInput) as refused:
        Alerts(
            alerts=pipeline.alerts,
            queries=describe_queries(pipeline),
            hub=Hub(ReleaseReader(tmp_path)),
            folder=tmp_path,
        )
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"format": 1, "after": 0, "windows": []}'])
def test_a_damaged_memory_is_refused_before_the_server_listens(begun, text):
    """An alert that ended in silence would be missed on the day that it is needed."""
    with taking() as taker:
        pipeline = begun(taker)
        for path in store_folder(pipeline).glob("alert-*.json"):
            path.write_text(text)
        with pytest.raises(InvalidInput, match=r"alert-.*\.json is damaged; remove it"):
            follow(pipeline, lambda _: False)


def test_an_alert_goes_on_when_it_can_be_remembered_again(begun, monkeypatch, caplog):
    """A disk that is full for a while is told, once; nothing is told twice for it, nor left out."""
    with taking() as taker:
        pipeline = begun(taker)
        publish(pipeline, options=OPTIONS)
        write_it, full = alerts_module.replace, []

        def replace(path, content):
            if len(full) < 3:
                full.append(path)
                raise OSError(28, "No space left on device")
            write_it(path, content)

        monkeypatch.setattr(alerts_module, "replace", replace)
        last = max(one.id for one in _released(pipeline) if one.query == "pages")
        report = follow(pipeline, lambda _: kept(pipeline) == [last, last])

        assert len(full) == 3
        assert [one["failing"] for one in report] == [None, None]
        assert [
            (message["release_index"], key["key"][0], key["value"])
            for message in taker.of("/secret-token")
            for key in message["keys"]
        ] == wanted(pipeline)
        assert "cannot go on" in caplog.text
