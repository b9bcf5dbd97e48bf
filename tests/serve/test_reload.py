"""A server takes a changed pipeline file up without a new charge for what goes on."""

import json
import signal
from contextlib import suppress

import pytest

from dpstream.cli import main
from tests.support.processes import until
from tests.support.served import served

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
    with served(path) as server:

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
        book = json.loads(server.ask("/ledger", side="operator")[1])["datasets"][0]
        assert sorted(line["query"] for line in book["spent_on"]) == [
            "one",
            "one_2",
            "three",
            "two",
        ]
        code, _ = server.stop()
        assert code == 0


def test_a_file_whose_start_is_refused_leaves_the_server_as_it_was(tmp_path):
    """What ran goes on, `/health` says why, and a file that can be started is taken up."""
    path = tmp_path / "pipeline.toml"
    write(path, one=1)
    (tmp_path / "file").touch()
    with served(path, "--who", "ana") as server:

        def shown():
            with suppress(OSError):
                return {each["name"] for each in json.loads(server.ask("/api/queries")[1])["queries"]}

        def reload():
            assert server.ask("/reload", method="POST", side="operator")[0] == 202

        def health():
            with suppress(OSError):
                return server.health()
            return {}

        write(path, one=1, two=2)
        good = path.read_text()
        path.write_text(good.replace("[state]", '[sink]\nto = "file/out"\n[state]'))
        reload()
        until(lambda: health().get("not_reloaded"))
        assert (shown(), health()["pipeline"]) == ({"one"}, "running")
        path.write_text(good)
        reload()
        until(lambda: shown() == {"one", "two"})
        until(lambda: health().get("pipeline") == "running")
        assert health()["not_reloaded"] is None
        lines = json.loads(server.ask("/ledger", side="operator")[1])["datasets"][0]["spent_on"]
        assert {line["analyst"] for line in lines} == {"ana"}
