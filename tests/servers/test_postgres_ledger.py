"""A ledger in PostgreSQL: the same book as in a file, for several hosts, whatever is lost between.

Every test has a schema of its own on a real server.
"""

import itertools
import json
import os
import shutil
import signal
import time
from contextlib import closing
from datetime import timedelta
from fractions import Fraction

import numpy as np
import psycopg
import pyarrow.parquet as pq
import pytest
from hypothesis import given

import dpstream as dps
from dpstream.connectors.postgres import ledger_store
from dpstream.connectors.postgres.ledger_store import PostgresLedger
from dpstream.errors import (
    BudgetExceeded,
    InvalidParameter,
    LedgerError,
    ServerUnreachable,
    StateError,
)
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.ledger.store import LedgerAddress, as_ledger_place
from dpstream.privacy.state.journal import Journal
from dpstream.privacy.state.run_directory import read_about
from tests.golden.corpus import Golden, outcome, rows_text, run_options
from tests.golden.queries import SINK_QUERY, in_utc, write_parquet
from tests.laws import test_one_book as laws
from tests.servers.conftest import PASSWORD
from tests.servers.ledger_suite import (
    BOTH,
    USER,
    ServerLedgerSuite,
    charge,
    charged,
    decides_as_a_file,
    opened,
)
from tests.support.fixed import RUN, SECRET
from tests.support.long import some_examples
from tests.support.processes import exit_status, start_fork

pytestmark = pytest.mark.servers
NUMBERS = itertools.count()


@pytest.fixture
def uri(postgres):
    """The address of a ledger that is not there yet."""
    return new_uri(postgres)


def new_uri(server, **options):
    given = {"schema": f"ledger_{os.getpid()}_{next(NUMBERS)}", **options}
    words = "&".join(f"{name}={value}" for name, value in given.items())
    return f"{server.address.replace('postgres:', 'postgresql:')}?{words}"


def test_the_default_schema_takes_no_tables_of_the_role(postgres):
    """A schema with the role's own name would come first in its search path."""
    place = postgres.address.replace("postgres:", "postgresql:")
    Ledger(place).close()
    [[role, schema]] = ask(postgres, "SELECT current_user, current_schema()")
    assert (role, schema) == ("dpstream", "public")
    with pytest.raises(InvalidParameter, match="must not have a '%'"):
        Ledger(f"{place}?schema=50%25")


def schema_of(uri):
    return uri.partition("schema=")[2].partition("&")[0]


def ask(server, statement, *given):
    with psycopg.connect(server.address) as connection:
        done = connection.execute(statement, given or None)
        return done.fetchall() if done.description else None


# The same book


def test_the_lines_are_those_of_a_file(tmp_path, postgres, uri, monkeypatch):
    """Byte for byte, so that one can become the other, and their heads say the same."""
    monkeypatch.setattr(ledgers, "_now", lambda: "2024-05-01T00:00:00.000+00:00")
    books = [Ledger(tmp_path / "book"), Ledger(uri)]
    for ledger in books:
        ledger.open("flu", USER)
        ledger.register("flu", "ab" * 16, "plan")
        for step in range(5):
            ledger.charge("flu", charge(step))
    lines = ask(postgres, f"SELECT line FROM {schema_of(uri)}.ledger_lines ORDER BY start")

    assert "".join(f"{line}\n" for (line,) in lines) == (tmp_path / "book").read_text()
    assert books[0].head() == books[1].head()


@some_examples(12, of=1)
@given(laws.asked(), BOTH)
def test_it_decides_as_a_file_does(postgres_server, tmp_path_factory, charges, width):
    """The law of one book: every charge, refusal and balance, also of a second reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGPASSFILE", str(postgres_server.passfile))
        patch.setattr(ledgers, "_KEEP", 4)
        uri = new_uri(postgres_server)
        decides_as_a_file(uri, tmp_path_factory.mktemp("book"), charges, width)


def test_a_fixed_run_has_the_golden_digests(tmp_path, uri):
    """What is published and what is charged is that of a run with a file, also when resumed."""
    query, found = dps.sql(SINK_QUERY, name="sent"), []
    source = write_parquet(tmp_path)
    for name, leave_after in (("whole", None), ("resumed", 12)):
        folder, ledger = tmp_path / name, f"{uri}_{name}"
        fixed = {"secret": SECRET, "ledger": ledger, "options": run_options()}
        places = {"sink": folder / "out", "state": folder / "state"}
        if leave_after:
            releases = iter(dps.run(query, source=source, **places, **fixed))
            list(itertools.islice(releases, leave_after))
            releases.close()
        run = dps.run(query, source=source, **places, **fixed).finish()
        tables = [
            in_utc(pq.read_table(path)) for path in sorted((folder / "out").glob("*.parquet"))
        ]
        rows = [
            {name: row[name] for name in run.schema.names}
            for table in tables
            for row in table.to_pylist()
        ]
        found.append(outcome(rows_text(rows), ledger))

    Golden().check("rows/sent", *found)


# Several hosts


def test_processes_share_the_last_of_a_budget(uri):
    """Sixteen sixteenths are charged, whoever is first; every other one is refused."""
    opened(uri).close()

    def spend(worker):
        with closing(Ledger(uri)) as ledger:
            taken = 0
            for step in range(12):
                try:
                    taken += ledger.charge("flu", charge(step, run=f"{worker:032x}"))
                except BudgetExceeded:
                    break
        os._exit(taken)

    workers = [start_fork(lambda worker=worker: spend(worker)) for worker in range(4)]
    taken = [exit_status(pid) for pid in workers]

    assert sum(taken) == 16 == len(charged(uri))
    with closing(Ledger(uri)) as ledger:
        assert ledger.left("flu") == 0


@pytest.mark.parametrize("how", ["pg_terminate_backend", "pg_cancel_backend", "serialisation"])
def test_writers_that_are_cut_off_all_the_time_charge_what_they_say(postgres, uri, tmp_path, how):
    """Two of them, until the book is full: what each was told is in it once, and nothing else.

    Sessions are ended or statements cancelled at any moment; or somebody writes beside the lock, so
    that a commit fails as 40001, and what is there is looked at again.
    """
    opened(uri).close()
    amount = Fraction(1, 64)

    def spend(worker):
        said = []
        with closing(Ledger(f"{uri}&patience=60")) as ledger:
            for step in range(65):
                try:
                    said.append(ledger.charge("flu", charge(step, amount, run=f"{worker:032x}")))
                except BudgetExceeded:
                    break
        (tmp_path / str(worker)).write_text(json.dumps(said))

    pids = [start_fork(lambda worker=worker: spend(worker)) for worker in range(2)]
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    strike = (
        f"SELECT count({how}(pid)) FROM pg_stat_activity "
        f"WHERE pid <> pg_backend_pid() AND query LIKE '%{schema_of(uri)}%'"
    )
    if how == "serialisation":
        strike = f"WITH it AS (UPDATE {schema_of(uri)}.ledger_head SET base = base RETURNING 1) "
        strike += "SELECT count(*) FROM it"
    struck, left = 0, set(pids)
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        while left:
            struck += connection.execute(strike).fetchone()[0]
            time.sleep(0.01)  # a charge takes longer
            left = {pid for pid in left if not os.waitid(os.P_PID, pid, over)}
    assert [exit_status(pid) for pid in pids] == [0, 0]
    said = [json.loads((tmp_path / str(worker)).read_text()) for worker in range(2)]

    assert struck
    assert sum(map(len, said)) == 64
    assert all(map(all, said))
    with closing(Ledger(uri)) as ledger:
        assert ledger.left("flu") == 0
        found = [(r["run"], r["step"]) for r in ledger.history() if "amount" in r]
    assert sorted(found) == sorted(
        (f"{worker:032x}", step) for worker, one in enumerate(said) for step in range(len(one))
    )


def test_a_paused_writer_is_fenced_out(uri, monkeypatch):
    """A writer that stops in the middle of a charge loses its place, and is checked again."""
    monkeypatch.setattr(ledger_store, "_PAUSED", "300ms")
    opened(uri).close()
    slow, quick = Ledger(uri), Ledger(uri)
    append, met = PostgresLedger.append, []

    def paused(store, records):
        append(store, records)
        if store is slow._journal and not met:
            met.append(quick.charge("flu", charge(0, "7/8", run="cd" * 16)))

    monkeypatch.setattr(PostgresLedger, "append", paused)
    with pytest.raises(BudgetExceeded):
        slow.charge("flu", charge(0, "1/4"))

    assert met == [True]
    assert slow.left("flu") == quick.left("flu") == Fraction(1, 8)
    assert slow.charge("flu", charge(0, "1/8"))


def test_a_stale_place_cannot_be_written(uri, monkeypatch):
    """Even a writer that has the lock writes at the head that it has read, or not at all."""
    first, second = opened(uri), Ledger(uri)
    offset, tag = second.head()
    first.charge("flu", charge(0))
    begin = PostgresLedger._begin

    def stale(store):
        return begin(store)._replace(offset=offset, tag=tag)

    with monkeypatch.context() as patch:
        patch.setattr(PostgresLedger, "_begin", stale)
        with (
            pytest.raises(ServerUnreachable, match="others have written"),
            second._journal.locked(),
        ):
            second._journal.append([{"amount": "1"}])

    assert charged(uri) == [0]


# Lost connections, kills


def lost(when, meanwhile=lambda: None):
    """A commit whose answer never comes, once; `when`: before or after the server has done it."""
    finish, times = PostgresLedger._finish, itertools.count()

    def failing(store, *given):
        if next(times):
            return finish(store, *given)
        if when == "after":
            finish(store, *given)
        store._drop()
        meanwhile()
        raise psycopg.OperationalError("the connection is lost")

    return failing


@pytest.fixture
def lose(monkeypatch):
    return lambda *how: monkeypatch.setattr(PostgresLedger, "_finish", lost(*how))


class TestEveryLedger(ServerLedgerSuite):
    """In PostgreSQL."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_the_commit_leaves_all_or_nothing(uri, when):
    """SIGKILL before the commit: nothing was charged. After it: charged, once for its run."""
    opened(uri).close()
    finish = PostgresLedger._finish

    def killed(store, *given):
        if when == "after":
            finish(store, *given)
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        with closing(Ledger(uri)) as ledger:
            PostgresLedger._finish = killed
            ledger.charge("flu", charge(0))

    assert exit_status(start_fork(work)) == -signal.SIGKILL
    with closing(Ledger(uri)) as ledger:
        assert ledger.charge("flu", charge(0), lambda step: "d") is (when == "before")
        assert ledger.left("flu") == Fraction(15, 16)


def test_a_server_that_restarts_in_a_charge(postgres, uri, monkeypatch):
    """The charge waits for the server, and is written once."""
    ledger = opened(uri)
    monkeypatch.setattr(PostgresLedger, "_finish", lost("before", postgres.restart))

    assert ledger.charge("flu", charge(0))
    postgres.restart()
    assert ledger.charge("flu", charge(1))
    assert charged(uri) == [0, 1]


def values(runner, counts):
    return [one.values.tolist() for one in itertools.chain(*runner.feed(counts))]


def test_nothing_is_drawn_while_the_server_is_away(postgres, tmp_path):
    """A run stops with an error, and goes on with the same noise when the server is back."""
    uri = new_uri(postgres, patience=0.3)
    counts = np.arange(8).reshape(8, 1)
    mechanism = dps.mechanisms.Uniform(epsilon=1, window=4)

    def runner(ledger, state):
        return dps.Runner(mechanism, secret=SECRET, run_id=RUN, ledger=ledger, state=state)

    with runner(tmp_path / "book", tmp_path / "whole") as whole:
        expected = values(whole, counts)
    with runner(uri, tmp_path / "state") as running:
        published = values(running, counts[:3])
        with postgres.away(), pytest.raises(ServerUnreachable, match=r"for \d+ s now"):
            running.step(counts[3])
    with (
        postgres.away(),
        pytest.raises(ServerUnreachable, match="does not answer"),
        runner(uri, tmp_path / "state"),
    ):
        pass
    with dps.Runner(mechanism, secret=SECRET, ledger=uri, state=tmp_path / "state") as again:
        published = published[: again.steps_done]
        published += values(again, counts[again.steps_done :])

    assert published == expected


def test_a_kill_anywhere_leaves_the_same_releases(postgres, tmp_path):
    """Killed at the commit of each record in turn, then run to its end: the same, charged once."""
    counts = np.arange(6).reshape(6, 1)
    mechanism = dps.mechanisms.Uniform(epsilon=1, window=3)
    finish = PostgresLedger._finish

    def run(uri, folder, kill_at=None):
        times = itertools.count()

        def counted(store, *given):
            if next(times) == kill_at:
                if kill_at % 2:
                    finish(store, *given)
                os.kill(os.getpid(), signal.SIGKILL)
            return finish(store, *given)

        PostgresLedger._finish = counted
        fixed = {} if (folder / "state").exists() else {"run_id": RUN}
        with dps.Runner(
            mechanism, secret=SECRET, ledger=uri, state=folder / "state", **fixed
        ) as runner:
            for one in itertools.chain(*map(runner.step, counts[runner.steps_done :])):
                (folder / f"{one.step}").write_text(str(one.values.tolist()))

    def published(folder):
        return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}

    expected, book = None, None
    for kill_at in (None, 0, 1, 3, 4, 8, 11):
        uri, folder = new_uri(postgres), tmp_path / f"{kill_at}"
        folder.mkdir()
        for moment in (kill_at, None):
            pid = start_fork(lambda p=uri, f=folder, m=moment: run(p, f, m))
            assert exit_status(pid) == (0 if moment is None else -signal.SIGKILL)
            if kill_at is None:
                break
        with closing(Ledger(uri)) as ledger:
            spent = [one["step"] for one in ledger.history() if "amount" in one]
        if kill_at is None:
            expected, book = published(folder), spent
        assert {name: text for name, text in published(folder).items() if name.isdigit()} == {
            name: text for name, text in expected.items() if name.isdigit()
        }
        assert spent == book, kill_at


# Rolled back, copied, damaged


def saved(postgres, uri):
    """A dump of the ledger's tables, and a function that puts it back."""
    schema = schema_of(uri)
    tables = ("ledger", "ledger_head", "ledger_lines")
    kept = {table: ask(postgres, f"SELECT * FROM {schema}.{table}") for table in tables}

    def restore():
        with psycopg.connect(postgres.address) as connection:
            for table, rows in kept.items():
                connection.execute(f"DELETE FROM {schema}.{table}")
                marks = ", ".join(["%s"] * len(rows[0]))
                connection.cursor().executemany(
                    f"INSERT INTO {schema}.{table} VALUES ({marks})", rows
                )

    return restore


def test_a_rolled_back_database_is_refused(postgres, uri, tmp_path):
    """By a state that has seen more, and by a process that has it open."""
    mechanism = dps.mechanisms.Uniform(epsilon=1, window=4)

    def runner():
        return dps.Runner(mechanism, secret=SECRET, ledger=uri, state=tmp_path / "state")

    with runner() as running:
        list(running.feed(np.ones((3, 1))))
        running.save()
    restore = saved(postgres, uri)
    with runner() as running:
        running.step(np.ones(1))
        running.save()
    in_use = Ledger(uri)
    in_use.report()
    newer = saved(postgres, uri)
    restore()

    with pytest.raises(StateError, match="rolled back"):
        runner()
    with pytest.raises(LedgerError, match="went back while it was in use"):
        in_use.report()
    newer()
    with runner() as running:
        assert running.steps_done == 4


def test_a_copy_is_another_ledger(postgres, uri, tmp_path):
    """Two copies of a book cannot keep one budget; a copy is taken by adoption only."""
    mechanism = dps.mechanisms.Uniform(epsilon=1, window=4)
    with dps.Runner(mechanism, secret=SECRET, ledger=uri, state=tmp_path / "state") as running:
        running.step(np.ones(1))
    old, copy = schema_of(uri), f"{schema_of(uri)}_copy"
    ask(postgres, f"CREATE SCHEMA {copy}")
    for table in ("ledger", "ledger_head", "ledger_lines"):
        ask(postgres, f"CREATE TABLE {copy}.{table} AS SELECT * FROM {old}.{table}")
    elsewhere = uri.replace(old, copy)

    with pytest.raises(StateError, match=f"is not the file that .* is charged to, .*{old}"):
        dps.Runner(mechanism, secret=SECRET, ledger=elsewhere, state=tmp_path / "state")
    with pytest.raises(StateError, match=f"another ledger, postgresql://.*{old}; name that one"):
        dps.Runner(mechanism, secret=SECRET, state=tmp_path / "state")


DAMAGE = {
    "checksum": "UPDATE {0}.ledger_lines SET line = replace(line, '1/16', '1/64')",
    "damaged after byte": "DELETE FROM {0}.ledger_lines WHERE line LIKE '%\"step\":1}}%'",
    "records are lost": "DELETE FROM {0}.ledger_lines WHERE line LIKE '%\"step\":3}}%'",
    "not what its head says": "UPDATE {0}.ledger_head SET tag = '0000000000000000'",
    "is missing": "DELETE FROM {0}.ledger_head",
    "is not the ledger that was there": "DELETE FROM {0}.ledger",
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_is_refused(postgres, uri, words):
    """What is altered or lost is never counted as if nothing were."""
    ledger = opened(uri)
    for step in range(4):
        ledger.charge("flu", charge(step))
    ledger.close()
    ask(postgres, DAMAGE[words].format(schema_of(uri)))

    with pytest.raises(LedgerError, match=words):
        Ledger(uri).report()


@pytest.mark.parametrize("lose", ["the end", "the head"])
def test_repair_takes_it_as_it_is(postgres, uri, lose):
    """And writes down why."""
    ledger, schema = opened(uri), schema_of(uri)
    for step in range(4):
        ledger.charge("flu", charge(step))
    if lose == "the end":
        last = f"(SELECT max(start) FROM {schema}.ledger_lines)"
        ask(postgres, f"DELETE FROM {schema}.ledger_lines WHERE start = {last}")
    else:
        ask(postgres, f"DELETE FROM {schema}.ledger_head")
    again = Ledger(uri)
    with pytest.raises(LedgerError, match="dpstream ledger repair"):
        again.report()
    again.repair(because="the disk was lost")

    assert again.left("flu") == Fraction(13 if lose == "the end" else 12, 16)
    assert list(again.history())[-1]["repaired"] == "the disk was lost"
    assert again.charge("flu", charge(9))


# Addresses


def test_a_password_in_the_address_is_shown_nowhere(postgres, tmp_path, uri, caplog):
    """It is refused without its words; the address that is kept and told has none."""
    told = []
    for spelling in (
        uri.replace("dpstream@", f"dpstream:{PASSWORD}@"),
        f"{uri}&password={PASSWORD}",
        f"{uri}&sslpassword={PASSWORD}",
    ):
        address = as_ledger_place(spelling)
        told += [str(address), repr(address)]
        for use in (Ledger, lambda one: as_ledger_place(one).exists() and Ledger(one)):
            with pytest.raises(InvalidParameter) as refused:
                use(spelling)
            told.append(str(refused.value))
    with dps.Runner(
        dps.mechanisms.Uniform(epsilon=1, window=4), ledger=uri, state=tmp_path / "state"
    ) as running:
        running.step(np.ones(1))
        told.append(json.dumps(running.ledger.report()))
    told += [path.read_bytes().decode("latin1") for path in tmp_path.rglob("*.dps")]
    told.append(caplog.text)

    assert not any(PASSWORD in words for words in told)
    assert any(schema_of(uri) in words for words in told)


def test_looking_makes_no_ledger(postgres, uri):
    """As with files: only who opens a book makes its tables."""
    address = LedgerAddress(uri)

    assert not address.exists()
    assert ask(postgres, "SELECT to_regnamespace(%s)", schema_of(uri)) == [(None,)]
    opened(uri).close()
    assert address.exists()


def test_other_servers_hold_no_ledger():
    """A file named mysql: would be a surprise."""
    with pytest.raises(LedgerError, match="a ledger is a file, in PostgreSQL"):
        Ledger("mysql://ana:secret@db/books")


def test_a_user_without_rights_is_told_so(postgres, uri):
    """Who may not make the tables, or read them."""
    ask(postgres, "DROP ROLE IF EXISTS guest")
    ask(postgres, f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    postgres.passfile.write_text(f"127.0.0.1:*:*:*:{PASSWORD}\n")
    guest = uri.replace("dpstream@", "guest@")
    with pytest.raises(LedgerError, match=r"permission denied.*own the ledger's schema"):
        Ledger(guest)
    opened(uri).close()
    with pytest.raises(LedgerError, match="permission denied"):
        Ledger(guest)


def test_a_commit_waits_for_the_disk(uri, monkeypatch):
    """Whatever the role or the server have by default."""
    monkeypatch.setenv("PGOPTIONS", "-c synchronous_commit=off")
    ledger = opened(uri)
    setting = ledger._journal._connection.execute("SHOW synchronous_commit").fetchone()

    assert setting == ("on",)


def test_a_server_that_does_not_wait_for_the_disk_is_told_of_once(caplog):
    """A command opens the ledger many times; each server is named."""
    for place in ("postgresql://one/db", "postgresql://two/db") * 3:
        ledger_store._warn_of_lost_charges(place, "off")

    assert [record.args for record in caplog.records] == [
        ("postgresql://one/db", "off"),
        ("postgresql://two/db", "off"),
    ]


# Moved here from a file

MOVED = {"because": "several hosts", "who": "ana"}


def uniform(ledger, state, **more):
    """A run that is charged at every step."""
    mechanism = dps.mechanisms.Uniform(epsilon=1, window=4)
    return dps.Runner(mechanism, secret=SECRET, ledger=ledger, state=state, **more)


def test_a_file_moves_here_and_its_runs_go_on(tmp_path, uri):
    """The same noise, no new charge; the file, and whoever still has it open, is refused."""
    counts, book = np.arange(9).reshape(9, 1), tmp_path / "book"
    with uniform(tmp_path / "other", tmp_path / "whole", run_id=RUN) as whole:
        expected = values(whole, counts)
    with uniform(book, tmp_path / "state", run_id=RUN) as running:
        published = values(running, counts[:3])
        with closing(Ledger(book)) as ledger:
            ledger.move_to(as_ledger_place(uri), **MOVED)
        with pytest.raises(LedgerError, match=r"was moved to postgresql:.*several hosts.*name"):
            running.step(counts[3])
    with pytest.raises(LedgerError, match="was moved to"):
        Ledger(book).report()
    for end in (6, 9):
        with uniform(uri, tmp_path / "state") as again:
            published = published[: again.steps_done]
            published += values(again, counts[again.steps_done : end])

    assert read_about(tmp_path / "state")["ledger place"] == str(as_ledger_place(uri))
    assert published == expected
    assert sum(step >= 3 for step in charged(uri)) >= 2
    with closing(Ledger(tmp_path / "other")) as other, closing(Ledger(uri)) as moved:
        assert moved.report()[0]["spent"] == other.report()[0]["spent"]
    with closing(Ledger(book)) as ledger:
        ledger.move_to(as_ledger_place(uri), **MOVED)  # done before: nothing is left to do
        with pytest.raises(LedgerError, match=r"was moved to .* before"):
            ledger.move_to(as_ledger_place(uri + "_2"), **MOVED)


def test_a_ledger_with_records_takes_no_other(tmp_path, uri):
    """Two budgets are not one; the file is not fenced for nothing."""
    opened(uri).close()
    file = opened(tmp_path / "book")
    with pytest.raises(LedgerError, match="records of its own"):
        file.move_to(as_ledger_place(uri), **MOVED)
    assert file.charge("flu", charge(0))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_move_that_is_killed_goes_on(tmp_path, uri, when, monkeypatch):
    """Between the two nothing can be charged; a compacted file moves with what it has folded."""
    monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta())
    file = opened(tmp_path / "book")
    for step in range(6):
        file.charge("flu", charge(step))
    identity = file.identity()
    monkeypatch.setattr(type(file._journal), "is_long", True)
    file.compact()
    file.charge("flu", charge(6))
    head, spent = file.head(), file.report()
    fill = PostgresLedger.fill

    def killed(store, *given):
        if when == "after":
            fill(store, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(PostgresLedger, "fill", killed)
    with pytest.raises(KeyboardInterrupt):
        file.move_to(as_ledger_place(uri), **MOVED)
    with pytest.raises(LedgerError, match="was moved to"):
        file.charge("flu", charge(7))
    monkeypatch.setattr(PostgresLedger, "fill", fill)
    file.move_to(as_ledger_place(uri), **MOVED)
    with closing(Ledger(uri)) as moved:
        assert moved.report() == spent
        assert moved.has(head)
        assert moved.replaces(identity)
        assert moved.charge("flu", charge(7))


# And back


def test_a_ledger_moves_back_to_a_file_and_its_runs_go_on(tmp_path, uri):
    """From file to server to file: the same noise, no new charge; the server is refused."""
    counts, book, back = np.arange(9).reshape(9, 1), tmp_path / "book", tmp_path / "back"
    with uniform(tmp_path / "other", tmp_path / "whole", run_id=RUN) as whole:
        expected = values(whole, counts)
    with uniform(book, tmp_path / "state", run_id=RUN) as running:
        published = values(running, counts[:3])
    with closing(Ledger(book)) as ledger:
        ledger.move_to(as_ledger_place(uri), **MOVED)
    first, second = tmp_path / "state", tmp_path / "kept"
    shutil.copytree(first, second)
    with closing(Ledger(uri)) as ledger:
        with pytest.raises(LedgerError, match="records of its own"):
            ledger.move_to(book, **MOVED)  # the old file is there, and is fenced
        ledger.move_to(back, **MOVED)
        with pytest.raises(LedgerError, match=r"was moved to .*back"):
            ledger.report()
        ledger.move_to(back, **MOVED)  # done before: nothing is left to do
        with pytest.raises(LedgerError, match=r"was moved to .* before"):
            ledger.move_to(tmp_path / "elsewhere", **MOVED)
    for end in (6, 9):
        with uniform(back, first) as again:  # it knew of the first file alone
            published = published[: again.steps_done]
            published += values(again, counts[again.steps_done : end])

    assert published == expected
    with closing(Ledger(tmp_path / "other")) as other, closing(Ledger(back)) as moved:
        assert moved.report()[0]["spent"] == other.report()[0]["spent"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_move_back_that_is_killed_goes_on(tmp_path, uri, when, monkeypatch):
    """The fence is durable before the file is made; what is folded comes along."""
    monkeypatch.setattr(ledgers, "_WORTHWHILE", 1)
    monkeypatch.setattr(ledgers, "_VERBATIM", timedelta())
    there = opened(uri)
    for step in range(6):
        there.charge("flu", charge(step))
    monkeypatch.setattr(PostgresLedger, "is_long", True)
    there.compact()
    there.charge("flu", charge(6))
    head, spent, identity = there.head(), there.report(), there.identity()
    whole, file = Journal.write_copy, tmp_path / "book"

    def killed(*given, **named):
        if when == "after":
            whole(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write_copy", killed)
    with pytest.raises(KeyboardInterrupt):
        there.move_to(file, **MOVED)
    with pytest.raises(LedgerError, match="was moved to"):
        there.charge("flu", charge(7))
    monkeypatch.setattr(Journal, "write_copy", whole)
    there.move_to(file, **MOVED)
    with closing(Ledger(file)) as moved:
        assert moved.report() == spent
        assert moved.has(head)
        assert moved.replaces(identity)
        assert moved.charge("flu", charge(7))
    with closing(Ledger(file)) as again:  # its head fits
        assert again.charge("flu", charge(8))
