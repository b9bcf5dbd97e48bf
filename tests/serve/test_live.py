"""A server that is killed anywhere and started again: the same events, none lost, none twice."""

import ipaddress
import json
import os
import signal
import ssl
import time
import urllib.error
import urllib.request
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpstream.cli import main
from dpstream.serve.release_store import ReleaseReader
from tests.support.pipelines import PUSHED, write
from tests.support.processes import until
from tests.support.served import Follower, served

STOPPED = '{"note": "stopped; the same command again goes on from here"}\n'


@pytest.fixture
def pipeline(tmp_path):
    return write(tmp_path / "p", [], PUSHED)


def rows(first, count=300, page="home"):
    now = time.time()
    return [{"user": f"u{first + n}", "page": page, "at": now} for n in range(count)]


@pytest.mark.timeout(300)
def test_events_go_on_after_kills_of_either_process(pipeline):
    """The run's process is killed, then the server; clients go on by their last id.

    What was acknowledged is published; what was published has the same number and bytes for ever.
    """
    events = []
    with served(pipeline) as server:
        follower = Follower(server, last=0)
        until(lambda: follower.events)  # from now on rows belong to a window of the run
        assert server.post(rows(0))[0] == 202
        seen = len(follower.events)
        until(lambda: len(follower.events) >= seen + 2)
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
        until(lambda: _most(server, "home") > 200 and _most(server, "news") > 200)
        after = _history(server)
        assert beyond.resets == 1
        code, said = server.stop()

    numbers = [number for number, _ in events]
    assert numbers == list(range(1, len(numbers) + 1))
    again = [event for event in from_start.events if event[0] <= numbers[-1]]
    assert again[: len(events)] == events[: len(again)]
    windows = {data["window"]: [] for _, data in events}
    for _, data in events:
        windows[data["window"]].append(data["release_index"])
    assert all(found == list(range(1, len(found) + 1)) for found in windows.values())
    times = [datetime.fromisoformat(data["time"]) for _, data in events]
    assert {b - a for a, b in pairwise(times)} <= {timedelta(0), timedelta(seconds=1)}
    assert after[: len(before)] == before
    assert (code, said) == (0, STOPPED)


RETENTION = """
[sink]
to = "out/"
[retention]
served = "3 seconds"
releases = "1 second"
inputs = "1 second"
"""


def collect_garbage(path):
    """As `dpstream state gc --yes` does."""
    with pytest.raises(SystemExit) as left:
        main(["state", "gc", str(path), "--yes"])
    assert left.value.code == 0


@pytest.mark.timeout(300)
def test_a_server_lets_go_of_what_is_old_and_a_restart_does_not_bring_it_back(tmp_path, capsys):
    """Served releases as it goes, files when it starts, inputs by gc; the numbers go on."""
    path = write(tmp_path / "p", [], PUSHED + RETENTION)
    out, state = tmp_path / "p" / "out", tmp_path / "p" / "state"

    def numbers():
        reader = ReleaseReader(state / "served")
        reader.look()
        with closing(reader):
            return [one.id for one in reader.after(0, 10_000)]

    with served(path) as server:
        until(lambda: server.health()["newest_release"] >= 1)
        for first in (0, 1000):  # the newest segment stays
            assert server.post(rows(first))[0] == 202
        until(lambda: server.health()["newest_release"] >= 8)
        until(lambda: 1 not in numbers() and 2 not in numbers())
        first = min(out.glob("*.parquet"))
        seen = server.health()["newest_release"]
        assert server.stop()[0] == 0
    kept = numbers()
    assert first.exists()  # it was not old when the pipeline looked, and an hour is not over
    with served(path) as server:
        until(lambda: server.health()["newest_release"] >= seen + 2)
        until(lambda: not first.exists())
        until(lambda: [*state.rglob("kept/*.segment")])  # no recovery needs them
        until(lambda: [*out.glob("*.parquet")])  # those before were old when the pipeline started
        there = {*out.glob("*.parquet")}
        collect_garbage(path)
        busy = capsys.readouterr().out
        assert [*state.rglob("kept/*.segment")]
        assert there <= {*out.glob("*.parquet")}
        again = numbers()
        status, answer = server.ask("/api/queries/pages/releases?limit=10000")
        server.stop()
    until(lambda: collect_garbage(path) or not [*state.rglob("kept/*")])

    assert f"left: {path.parent / 'state' / 'pages'}: it is running" in busy
    assert 4 <= len(kept) <= 9
    assert status == 200
    assert max(again) >= max(kept) + 1
    assert not set(again) & set(range(1, min(kept)))
    assert json.loads(answer)["rows"]


def three_queries(text):
    """A pipeline of three queries with the same triggers, and one that can fail by itself."""
    head, query = text.split("[[query]]")
    query = query.replace("epsilon = 4, delta = 1e-7", "epsilon = 1, delta = 1e-7")
    names = ("pages", "again", "third")
    return "[[query]]".join([head, *(query.replace('"pages"', f'"{name}"') for name in names)])


@pytest.mark.timeout(300)
def test_three_queries_read_every_posted_row_though_one_fails(tmp_path):
    """Rows are read by all; a query that cannot go on is named, tried again, and has its rows."""
    path = write(tmp_path / "p", [], three_queries(PUSHED))
    broken = tmp_path / "p" / "state" / "third"
    with served(path) as server:
        broken.rename(broken.with_name("kept"))
        broken.write_text("no folder")
        os.kill(_worker(server), signal.SIGKILL)
        until(lambda: server.health()["restarts"] == 1)
        until(lambda: server.health().get("failed_queries"))
        until(lambda: server.health()["newest_release"] >= 2)
        health = server.health()
        assert server.post(rows(0))[0] == 202
        until(lambda: _read(server) == {"pages": 300, "again": 300, "third": 0})
        until(lambda: server.health()["starved_queries"] == ["third"])
        assert 'dpstream_query_failed{query="third"} 1' in _metrics(server)
        assert 'dpstream_query_starved{query="third"} 1' in _metrics(server)
        broken.unlink()
        broken.with_name("kept").rename(broken)
        until(lambda: _read(server)["third"] == 300)
        until(lambda: server.health()["healthy"])
        assert 'dpstream_rows_read_total{query="third"} 300' in _metrics(server)
        assert 'dpstream_lag_seconds{query="again"}' in _metrics(server)
        assert 'dpstream_rows_waiting{query="again"}' in _metrics(server)
        assert 'dpstream_release_delay_seconds{query="again"}' in _metrics(server)
        again = server.health()

    assert list(health["failed_queries"]) == ["third"]
    assert not health["healthy"]
    assert health["pipeline"] == "running"
    assert again["restarts"] == 1
    assert again["failed_queries"] == {}
    assert again["starved_queries"] == []


def _metrics(server):
    return server.ask("/metrics", side="operator")[1].decode()


def _read(server):
    told = json.loads(server.ask("/lag", side="operator")[1])["queries"]
    return {name: one["read"] for name, one in told.items()}


def test_a_pipeline_over_files_is_served_after_it_has_ended(tmp_path):
    """From its store, without running it; Ctrl-C leaves in good order."""
    public_range = "start = TIMESTAMP '1970-01-01', end = TIMESTAMP '1970-01-01 00:04:00'"
    text = PUSHED.replace('"http:"', '"clicks.csv"')
    text = text.replace("time_unit = 's'", f"time_unit = 's', {public_range}")
    text = text.replace("EVERY INTERVAL '1' SECOND", "EVERY INTERVAL '1' MINUTE")
    lines = [f"u{n},home,{n % 240},1" for n in range(3000)]
    path = write(tmp_path / "p", lines, text)
    with served(path) as server:
        until(lambda: server.health()["pipeline"] == "finished")
        until(lambda: server.health()["newest_release"] == 16)
        _, first = server.ask("/api/queries/pages/latest")
        code, said = server.stop()
    with served(path, "--no-run") as server:
        until(lambda: server.health()["newest_release"] == 16)
        health = server.health()
        _, second = server.ask("/api/queries/pages/latest")

    opened, stopped = said.splitlines(keepends=True)
    assert "opened the book 'clicks'" in json.loads(opened)["note"]
    assert (code, stopped) == (0, STOPPED)
    assert health["pipeline"] == "not run"
    assert first == second
    assert json.loads(first)["rows"][0]["key"] == ["home"]


def test_a_quarantined_file_is_a_warning_to_the_operator_and_nothing_to_readers(tmp_path):
    """The pipeline is healthy; how many files, which and why are not private."""
    text = PUSHED.replace('"http:"', '"in/"\nlive = true')
    path = write(tmp_path / "p", [], text)
    folder = tmp_path / "p" / "in"
    folder.mkdir()
    with served(path) as server:
        until(lambda: server.health()["newest_release"] >= 1)
        before = server.health()
        (folder / os.fsdecode(b"harm\xff.parquet")).write_bytes(b"PAR1 and no more")
        until(lambda: server.health()["quarantined_files"])
        seen = server.health()["newest_release"]
        until(lambda: server.health()["newest_release"] >= seen + 2)
        health, metrics = server.health(), _metrics(server)
        letters = json.loads(server.ask("/dead-letters", side="operator")[1])
        public = b"".join(
            server.ask(place)[1]
            for place in (
                *("/", "/api", "/api/queries", "/api/queries/pages", "/api/queries/pages/latest"),
                *("/api/queries/pages/releases", "/api/ledger", "/api/openapi.json"),
            )
        )
        _, said = server.stop()

    assert before["quarantined_files"] == {}
    assert (health["healthy"], health["pipeline"]) == (True, "running")
    assert health["quarantined_files"] == {"pages": 1}
    assert 'dpstream_files_quarantined{query="pages"} 1' in metrics
    assert "cannot be read as Parquet" in letters["dead_letters"][0]["reason"]
    assert letters["dead_letters"][0]["where"] == "harm\\udcff.parquet"
    assert "operator only: pages: 1 files are quarantined" in said
    assert b"pages" in public
    assert b"quarantine" not in public
    assert b"harm" not in public


def test_a_book_that_refuses_later_is_shown_as_it_is(pipeline):
    """The page stays, and says that the budget is used up; the amounts are the operator's affair.

    A book that is too small stays so until the operator acts: it is not tried again.
    """
    with served(pipeline, "--clients-per-address", "2") as server:
        until(lambda: server.health()["newest_release"] >= 1)  # it is charged
        running = json.loads(server.ask("/api/queries/pages")[1])
        (pipeline.parent / "state" / "pages").rename(pipeline.parent / "gone")
        os.kill(_worker(server), signal.SIGKILL)  # a new run would be charged anew
        until(lambda: server.health()["pipeline"] == "refused")
        health = server.health()
        shown = json.loads(server.ask("/api/queries/pages")[1])
        page, _ = server.ask("/")
        taken, _ = server.post([{"user": 1, "page": "home", "at": 0}])
        followers = [Follower(server), Follower(server)]
        until(lambda: server.health()["clients"] == 2)
        third, _ = server.ask("/api/events")
        server.process.send_signal(signal.SIGINT)
        _, told = server.process.communicate(timeout=60)

    assert (not health["healthy"], health["restarts"], len(followers)) == (True, 1, 2)
    assert health["problem"]["error"] == "BudgetExceeded"
    assert "it is not tried again; what was released is still served" in health["problem"]["next"]
    assert "the pipeline does not run: the query 'pages' does not fit into" in told.decode()
    assert (running["refused"], shown["refused"]) == (False, True)
    assert (taken, third) == (409, 429)
    assert page == 200


def test_both_sides_speak_https_with_a_certificate(pipeline, tmp_path):
    """And nothing but https."""
    certificate, key = _self_signed(tmp_path)
    options = ("--no-run", "--tls-cert", str(certificate), "--tls-key", str(key))
    with served(pipeline, *options) as server:
        context = ssl.create_default_context(cafile=certificate)
        for address, status in ((server.public, 404), (server.operator, 401)):
            assert address.startswith("https://127.0.0.1:")
            with pytest.raises(urllib.error.HTTPError) as answer:
                urllib.request.urlopen(f"{address}/nothing", context=context, timeout=60)
            assert answer.value.code == status
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(server.public.replace("https", "http"), timeout=60)


def _self_signed(folder):
    """A certificate for this machine, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    certificate = made.sign(key, hashes.SHA256())
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def _worker(server):
    """The process that runs the pipeline."""
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children) as file:
        return int(file.read().split()[0])


def _history(server):
    return server.ask("/api/queries/pages/releases?limit=10000&format=jsonl")[1].splitlines()


def _most(server, page):
    """The largest count of a page in any window."""
    key = quote(json.dumps([page]))
    status, answer = server.ask(f"/api/queries/pages/releases?limit=10000&key={key}")
    assert status == 200
    return max((row["values"]["clicks"] for row in json.loads(answer)["rows"]), default=0)
