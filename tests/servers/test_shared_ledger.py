"""Commands, pipelines, the server and Spark with a ledger in PostgreSQL, as users have them."""

import itertools
import json
from contextlib import closing

import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.cli import main
from dpstream.engines.clock import SystemClock
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.run_directory import read_about
from dpstream.session.pipeline import load_pipeline
from tests.cli import test_apply
from tests.cli.test_apply import DAY, FIRST, HOUR
from tests.servers.conftest import PASSWORD
from tests.servers.test_postgres_ledger import ask, new_uri, schema_of
from tests.support import runs
from tests.support.pipelines import OPTIONS, operator_side, public_side, publish, rows, write
from tests.support.processes import until
from tests.support.served import served

pytestmark = pytest.mark.servers
TWO_BOOKS = """
[budget.clicks]
epsilon = 9
delta = 1e-5
[budget.visits]
epsilon = 3
"""
SQL = """
SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-6, privacy_unit_column = user)
       COUNT(*) AS clicks FROM clicks
"""


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """`command("ledger", "show", ...)` as the shell would: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPSTREAM_LEDGER", raising=False)

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main([*words])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return call


def with_ledger(uri):
    """The pipeline of four queries, with both of its books in one ledger."""
    lines = TWO_BOOKS.replace("epsilon", f'ledger = "{uri}"\nepsilon')
    return lines.join(write.__defaults__[0].split(TWO_BOOKS))


def files(folder):
    read = {path.name: pq.read_table(path) for path in (folder / "out").glob("*.parquet")}
    return {name: (table.schema.names, table.to_pydict()) for name, table in read.items()}


def test_commands(postgres, command, monkeypatch):
    """open, show, history, repair: with the address in place of a path, or in the environment."""
    uri = new_uri(postgres)
    code, _, said = command("ledger", "show", uri)
    assert (code, "there is no ledger at postgresql://" in said) == (4, True)
    terms = ("--dataset", "flu", "--privacy-unit", "user", "--epsilon", "2")
    code, out, _ = command("ledger", "open", *terms, "--ledger", uri)
    assert (code, uri in out) == (0, True)
    for words in ((uri,), ("show", uri), ("show", "--ledger", uri), ("--ledger", uri)):
        code, out, said = command("ledger", *words, "--json")
        assert code == 0, said
        assert [book["dataset"] for book in json.loads(out)] == ["flu"]
    monkeypatch.setenv("DPSTREAM_LEDGER", uri)
    assert len(json.loads(command("ledger", "history", "--json")[1])) == 1
    ask(postgres, f"DELETE FROM {schema_of(uri)}.ledger_head")
    code, _, said = command("ledger", "show")
    assert (code, f"dpstream ledger repair '{uri}'" in said) == (4, True)
    code, out, _ = command("ledger", "repair", uri, "--because", "a test")
    assert (code, "with 2 records" in out) == (0, True)


def test_sql_command(postgres, command, tmp_path):
    """Once from one book, and another time that it refuses; a restart is not charged."""
    uri = new_uri(postgres)
    (tmp_path / "clicks.csv").write_text("user\n" + "".join(f"u{n}\n" for n in range(400)))
    terms = ("--dataset", "clicks", "--privacy-unit", "user", "--epsilon", "1", "--delta", "1e-5")
    column = ("--privacy-unit-column", "user")
    assert command("ledger", "open", *terms, *column, "--ledger", uri)[0] == 0
    words = ("sql", SQL, "--source", "clicks=clicks.csv", "--ledger", uri, "--dataset", "clicks")
    done = [command(*words, "--state", f"state{number}") for number in range(2)]
    again = command(*words, "--state", "state0")

    assert [code for code, _, _ in done] == [0, 3], done
    assert "left" in done[0][2]
    assert str(uri) in done[1][2]
    assert (again[0], again[1]) == (0, done[0][1])


def test_errors_of_addresses(postgres, command, tmp_path):
    """A password is refused and not repeated; a server that is not there is named."""
    uri = new_uri(postgres)
    secret = uri.replace("dpstream@", f"dpstream:{PASSWORD}@")
    for words in (
        ("ledger", "show", secret),
        ("ledger", "show", "--ledger", f"{uri}&password={PASSWORD}"),
        ("sql", SQL, "--source", "clicks=clicks.csv", "--ledger", secret),
        ("run", str(write(tmp_path / "pipeline", rows(users=5), with_ledger(secret)))),
        ("ledger", "show", secret.replace("postgresql", "mysql")),
        ("ledger", "show", f"postgresql://dpstream:{PASSWORD}@[::1/books"),
    ):
        code, out, said = command(*words)
        assert code, words
        assert PASSWORD not in out + said, words
    code, _, said = command("ledger", "show", "postgresql://dpstream@127.0.0.1:1/books")
    assert (code, "postgresql://127.0.0.1:1/books does not answer" in said) == (6, True), said


def test_pipelines_and_their_server(postgres, command, tmp_path):
    """Four queries, two books in one ledger: the releases of a ledger in a file; both sides."""
    uri, lines = new_uri(postgres), rows(users=300)
    plain = load_pipeline(write(tmp_path / "file", lines))
    publish(plain, options=OPTIONS)
    pipeline = load_pipeline(write(tmp_path / "server", lines, with_ledger(uri)))
    publish(pipeline, options=OPTIONS)
    publish(pipeline, options=OPTIONS)  # it goes on, and there is nothing left to do

    assert files(tmp_path / "server") == files(tmp_path / "file") != {}
    with closing(Ledger(uri)) as ledger:
        spent = ledger.report()
    with closing(Ledger(plain.state / "ledger")) as ledger:
        assert spent == ledger.report()
    assert public_side(pipeline).ledger == public_side(plain).ledger
    (endpoint,) = [e for e in operator_side(pipeline).endpoints() if e.path == "/ledger"]
    assert endpoint.handler({}) == {"datasets": spent}
    code, out, _ = command("ledger", str(pipeline.path), "--json")
    assert (code, len(json.loads(out))) == (0, 2)


def test_serve(postgres, tmp_path):
    """The server's own processes charge the ledger, and show it to the operator."""
    uri = new_uri(postgres)
    with served(write(tmp_path / "server", rows(users=300), with_ledger(uri))) as server:

        def books():
            status, body = server.ask("/ledger", side="operator")
            return status == 200 and json.loads(body)["datasets"]

        def all_charged():
            return [len(book["spent_on"]) > 0 for book in books() or []] == [True, True]

        until(all_charged)
        code, said = server.stop()

    assert code == 0, said
    assert PASSWORD not in said


def test_two_hosts_one_book(postgres, tmp_path):
    """State directories far from each other share a book: what one spends the others lack."""
    uri, asked, hosts = new_uri(postgres), runs.query(epsilon=4), [tmp_path / h for h in "abc"]
    with closing(Ledger(uri)) as ledger:
        ledger.open("clicks", asked.promise(epsilon=5, delta=1e-4))
    shared = {"ledger": uri, "dataset": "clicks", "fixed": False}
    for host in hosts:
        runs.write(host, runs.table())
    runs.start(hosts[0], asked, **shared).finish()
    with pytest.raises(dps.BudgetExceeded, match="postgresql://"):
        runs.start(hosts[1], asked, **shared)
    runs.start(hosts[2], runs.query(epsilon=1), **shared).finish()
    runs.start(hosts[0], asked, **shared).finish()

    assert runs.charges(uri) == 2


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark(postgres, tmp_path):
    """The driver charges the ledger, and goes on with it; releases are those of this process."""
    from dpstream.engines.spark import SparkEngine, local_session

    session = local_session("local[2]", **{"spark.ui.enabled": "false"})
    uris, found = [new_uri(postgres), new_uri(postgres)], []
    try:
        for uri, engine in zip(uris, (None, SparkEngine(session, buckets=2)), strict=True):
            place = tmp_path / uri.rpartition("=")[2]
            runs.write(place, runs.table())
            for leave_after in (2, None):
                run = runs.start(place, runs.SHORT, engine=engine, ledger=uri)
                releases = iter(run)
                list(itertools.islice(releases, leave_after))
                releases.close()
            found.append((files(place), charged_amounts(uri)))
    finally:
        session.stop()

    assert found[0] == found[1]
    assert len(found[0][1]) == 1


def charged_amounts(uri):
    with closing(Ledger(uri)) as ledger:
        return [record["amount"] for record in ledger.history() if "amount" in record]


def test_states_follow_a_ledger_that_was_moved(postgres, command, tmp_path, monkeypatch):
    """A change that is due is carried out; apply, gc, inspect, verify and backup find the book.

    The state of the run that was ended was never opened again: it names the file to the end.
    """
    uri, path = new_uri(postgres), tmp_path / "pipeline.toml"
    test_apply.rows(tmp_path)
    for epsilon in ("3.5", "3.4"):
        test_apply.write(tmp_path, old=test_apply.asked(epsilon), kept=test_apply.asked("0.5"))
        if epsilon == "3.5":
            test_apply.go(path, FIRST, FIRST + 15 * HOUR)
    monkeypatch.setattr(SystemClock, "now", lambda self: FIRST + 15 * HOUR)
    assert command("apply", "pipeline.toml", "--yes")[0] == 0
    test_apply.go(path, FIRST + 15 * HOUR, FIRST + DAY)  # published, and not ended yet
    assert not test_apply.spent(tmp_path)["old"]["ended"]
    assert command("ledger", "move", "book", uri, "--because", "two hosts")[0] == 0
    code, _, said = command("apply", "pipeline.toml", "--yes")
    assert (code, "name that one" in said) == (4, True), said
    path.write_text(path.read_text().replace('"book"', f'"{uri}"'))
    code, out, said = command("apply", "pipeline.toml", "--yes")
    assert (code, "changed   old (in state and sinks: old_2)" in out) == (0, True), said
    test_apply.go(path, FIRST + DAY, FIRST + 2 * DAY)

    assert [test_apply.windows(tmp_path, name) for name in ("old", "old_2", "kept")] == [4, 4, 8]
    assert "nothing is to be changed" in command("apply", "pipeline.toml", "--yes")[2]
    with closing(Ledger(uri)) as ledger:
        (book,) = ledger.report()
    lines = {line["query"]: line for line in book["spent_on"]}
    assert {name: line["ended"] for name, line in lines.items()} == {
        "old": True,
        "old_2": False,
        "kept": False,
    }
    assert str(read_about(tmp_path / "state" / "old")["ledger place"]) == str(tmp_path / "book")
    code, out, said = command("state", "inspect", "state", "--json")
    assert code == 0, said
    assert {run["ledger"]["path"] for run in json.loads(out)["runs"]} == {uri}
    code, out, said = command("state", "verify", "state")
    assert code == 0, out + said
    assert command("state", "backup", "state", "copy")[0] == 0
    code, out, said = command("state", "gc", "state", "--json")
    assert (code, [one["what"] for one in json.loads(out)["waste"]]) == (0, ["ended run"]), said
    (tmp_path / "book").unlink()  # though its words were to keep it
    assert command("apply", "pipeline.toml", "--yes")[0] == 0
    assert command("state", "gc", "pipeline.toml", "--yes")[0] == 0
    assert not (tmp_path / "state" / "old").exists()
