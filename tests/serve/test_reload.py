"""A server takes a changed pipeline file up without a new charge for what goes on."""

import json
import signal
from contextlib import closing, suppress
from functools import partial

import pytest

from dpstream.cli import main
from dpstream.engines.clock import SystemClock
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.serial import write_packed
from dpstream.session.change_plan import drop_unbegun, plan_changes, withdraw
from dpstream.session.changes import Changes, end_due
from dpstream.session.pipeline import load_pipeline
from tests.support import processes
from tests.support.served import served

until = partial(processes.until, seconds=300)  # a server and its worker start several times
FILE = """
[source]
path = "http:"
[budget]
dataset = "clicks"
epsilon = 8
delta = 1e-6
ledger = "book"
[state]
path = "state"
"""
QUERY = """
[[query]]
name = "{name}"
sql = '''SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {epsilon}, delta = 1e-9,
    privacy_unit_column = user, privacy_unit_period = INTERVAL '1' DAY, time_unit = 's',
    max_groups_contributed = 1, public_groups = ('a', 'b'))
    page, window_start, COUNT(*) AS visits
    FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY)
    GROUP BY page, window_start EMIT EVERY INTERVAL '1' SECOND'''
"""


def write(path, **queries):
    """A pipeline file; each query's epsilon by its name."""
    tables = [QUERY.format(name=name, epsilon=epsilon) for name, epsilon in queries.items()]
    path.write_text(FILE + "".join(tables))


def test_a_server_takes_the_file_up_by_signal_and_by_request(tmp_path):
    """At the same addresses; what was not accepted is refused, and what ended can still be read."""
    path = tmp_path / "pipeline.toml"
    write(path, one=1, two=2)
    with served(path, "--who", "ana") as server:

        def shown():
            status, body = server.ask("/api/queries")
            assert status == 200
            return {each["name"]: each["finished"] for each in json.loads(body)["queries"]}

        def count(name):
            return len(json.loads(server.ask(f"/api/queries/{name}/releases")[1])["rows"])

        until(lambda: count("one") and count("two"))
        write(path, one=3, two=2)
        status, body = server.ask("/reload", method="POST", side="operator")
        assert status == 409
        assert b"dpstream apply" in body
        assert "has changed" in server.health()["not_reloaded"]["message"]
        assert server.ask("/reload", method="POST")[0] in (404, 405)

        with pytest.raises(SystemExit) as left:
            main(["apply", str(path), "--now", "--yes"])
        assert left.value.code == 0
        assert server.ask("/reload", method="POST", side="operator")[0] == 202

        def after(names):
            try:
                return {*shown()} == names
            except OSError:
                return False  # between the two

        until(lambda: after({"one", "two", "one_2"}))
        until(lambda: count("one_2"))
        assert shown() == {"one": True, "two": False, "one_2": False}
        assert count("one") > 0

        write(path, one=3, two=2, three="0.5")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: after({"one", "two", "one_2", "three"}))
        until(lambda: count("three"))

        # a start that is refused after the check leaves what ran, and says why
        write(path, one=3, two=2, three="0.5", four="0.5")
        path.write_text(path.read_text().replace("[state]", '[sink]\nto = "book/out"\n[state]'))
        assert server.ask("/reload", method="POST", side="operator")[0] == 202

        def not_reloaded():
            with suppress(OSError):
                return server.health()["not_reloaded"]

        until(not_reloaded)
        assert server.health()["pipeline"] == "running"
        assert {*shown()} == {"one", "two", "one_2", "three"}
        book = json.loads(server.ask("/ledger", side="operator")[1])["datasets"][0]
        assert {line["query"]: line.get("analyst") for line in book["spent_on"]} == dict.fromkeys(
            ("one", "one_2", "three", "two"), "ana"
        )
        code, said = server.stop()
        assert code == 0
        assert "what ran goes on" in said


def test_an_analysts_token_asks_within_its_share_and_opens_nothing_else(tmp_path):
    """A query is charged to whose token asked, and the share refuses the next."""
    path = tmp_path / "pipeline.toml"
    write(path, one=1)
    (book,) = load_pipeline(path).books
    with closing(Ledger(tmp_path / "book")) as ledger:
        ledger.open("clicks", book.terms())
        for name, share in (("ops", 1), ("ana", "0.3")):
            ledger.allow("clicks", name, share=share, because="agreed", who="ops")
    with served(path, "--who", "ops", "--analyst", "ana", "--analyst", "eve") as server:
        places = (tmp_path / "state" / "analysts").glob("*.token")
        tokens = {place.stem: place.read_text().strip() for place in places}

        def ask(who, place, body=None, method="POST"):
            bearer = {"authorization": f"Bearer {tokens[who]}"}
            return server.ask(place, method=method, body=body, side="analyst", **bearer)

        def sql(epsilon):
            return QUERY.format(name="x", epsilon=epsilon).split("'''")[1]

        for place in ("/health", "/ledger", "/dead-letters", "/metrics", "/openapi.json", "/lag"):
            assert ask("ana", place, method="GET")[0] == 403
        assert ask("ana", "/reload")[0] == 403
        assert b"no share for 'eve'" in ask("eve", "/ask/mine", sql(1))[1]
        assert server.ask("/ask/mine", method="POST", body=sql(1), side="operator")[0] == 403
        assert ask("ana", "/ask/one", sql("0.5"))[0] == 422
        assert ask("ana", "/ask/mine", "SELECT 1")[0] == 422
        code, said = ask("ana", "/ask/mine", sql(4))
        assert code == 202, said

        def lines():
            with suppress(OSError):
                (book,) = json.loads(server.ask("/ledger", side="operator")[1])["datasets"]
                return {line["query"]: line.get("analyst") for line in book["spent_on"]}
            return {}

        until(lambda: "mine" in lines())
        assert lines() == {"one": "ops", "mine": "ana"}
        status, words = ask("ana", "/ask/more", sql(4))
        assert (status, b"share of 'ana'" in words) == (409, True)
        (mine,) = json.loads(ask("ana", "/asked", method="GET")[1])["queries"]
        assert mine["query"] == "mine"
        assert ask("eve", "/withdraw/mine")[0] == 404
        assert json.loads(ask("eve", "/asked", method="GET")[1])["queries"] == []
        server.stop()
    assert [change.kind for change in planned(path)] == ["unchanged", "unchanged"]
    withdraw(path, "mine", who="ana")
    assert end_due(tmp_path / "state")
    with closing(Ledger(tmp_path / "book")) as ledger:
        ended = {line["query"]: line["ended"] for line in ledger.report()[0]["spent_on"]}
    assert ended == {"one": False, "mine": True}
    assert [query.name for query in load_pipeline(path).queries] == ["one"]


def planned(path):
    """What `dpstream apply` would do."""
    return plan_changes(path, at_once=False, now=SystemClock().now(), who="ops").changes


def test_a_query_that_cannot_begin_is_taken_away_again(tmp_path):
    """Those that have begun stay."""
    kept = {name: {"name": name, "sql": "", "analyst": "ana"} for name in ("one", "two")}
    Changes(asked=kept).write(tmp_path)
    (tmp_path / "one").mkdir()
    write_packed(tmp_path / "one" / "run.dps", {"format": 3}, kind="run")
    assert drop_unbegun(tmp_path) == ["two"]
    assert [*Changes.read(tmp_path).asked] == ["one"]
