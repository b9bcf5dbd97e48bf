"""`dpstream init` and `dpstream run`: pipeline files, from the first run to the last trigger."""

import csv
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpstream.cli.init_command import EXAMPLE
from dpstream.cli.run_command import _stop_after_trigger
from dpstream.connectors.files.source import Files
from dpstream.privacy.ledger.ledger import Ledger
from tests.support.processes import Command, run_python

PAGES = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
    privacy_unit_column = user, max_groups_contributed = 4, time_column = at, time_unit = 's',
    start = '2024-05-01', end = '2024-05-02') page, COUNT(*) AS visitors
    FROM clicks GROUP BY page EMIT EVERY INTERVAL '6' HOUR"""
LIVE = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
    privacy_unit_column = user, privacy_unit_period = INTERVAL '1' DAY,
    max_groups_contributed = 2, time_unit = 's', public_groups = ('home', 'news'))
    page, window_start, COUNT(*) AS visitors
    FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' MINUTE)
    GROUP BY page, window_start EMIT EVERY INTERVAL '1' SECOND"""


TWO_SIGNALS = """
import os, signal
from dpstream.cli.watch import Stopper
with Stopper().stop_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still there", flush=True)
"""


def child(*words):
    """A command in a process of its own, for signals."""
    return Command(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def the_rest(process):
    """What a child still says; `communicate` would lose what `readline` has buffered."""
    with ThreadPoolExecutor(2) as both:
        found = [both.submit(pipe.read) for pipe in (process.stdout, process.stderr)]
        process.wait(timeout=60)
        return [one.result() for one in found]


def wanted(**changes):
    """A pipeline file of one query, with some of its tables replaced or left out (None)."""
    parts = {
        "source": 'path = "clicks.csv"',
        "budget": 'dataset = "clicks"\nepsilon = 4\ndelta = 1e-8',
        "state": 'path = "state/"',
        "sink": 'to = "out/"',
    } | changes
    query = parts.pop("query", f'name = "pages"\nsql = """{PAGES}"""')
    tables = [f"[{name}]\n{text}\n" for name, text in parts.items() if text is not None]
    return "\n".join([*tables, "" if query is None else f"[[query]]\n{query}\n"])


@pytest.fixture
def example(run, folder):
    """What `dpstream init` writes."""
    assert run("init").code == 0
    return folder / "pipeline.toml"


def releases(folder, table):
    """How often each release is in the database."""
    with sqlite3.connect(folder / "out.sqlite") as database:
        text = f"SELECT release_index, COUNT(DISTINCT window_start) FROM {table} GROUP BY 1"
        return dict(database.execute(text).fetchall())


def test_the_example_runs_as_it_is(run, folder, example):
    """Both queries are published to both sinks, once, and charged to one book."""
    done = run("run", "pipeline.toml")

    assert done.code == 0
    assert "pages, 2024-05-01 00:00 to 2024-05-02 00:00, release 24 of 24 at" in done.out
    assert "created the secret state.secret; back it up" in done.err
    assert "epsilon = 2, delta = 1e-09 for 'pages', epsilon = 1, delta = 1e-09 for 'users'" in (
        done.err
    )
    assert (
        "operator only, not private: 20,000 rows read since this start, 0 outside the range"
        in done.err
    )
    assert (len(releases(folder, "pages")), len(releases(folder, "users"))) == (24, 4)
    assert len(list((folder / "out").glob("*.parquet"))) == 28
    (book,) = run("ledger", "show", "--ledger", "clicks.ledger", "--json").json
    assert sorted(line["query"] for line in book["spent_on"]) == ["pages", "users"]
    assert (book["dataset"], book["runs"]) == ("clicks", 2)


def test_init_overwrites_nothing(run, folder, example):
    """Neither the pipeline nor the data; another directory is made."""
    example.write_text("mine")
    done = run("init")

    assert done.code == 2
    assert "pipeline.toml is there already, and is not overwritten" in done.err
    assert example.read_text() == "mine"
    assert run("init", "new/place").code == 0
    assert (folder / "new/place/pipeline.toml").read_text() == EXAMPLE


def test_a_live_example_shows_something_at_once(run, folder):
    """With its feed beside it pages appear; nothing is noted but the secret."""
    told = run("init", "live", "--live").out
    assert told == (
        "wrote live/pipeline.toml and live/feed.py; start `python live/feed.py`, and beside it: "
        "dpstream serve live/pipeline.toml\n"
    )
    path = folder / "live" / "pipeline.toml"
    path.write_text(path.read_text().replace("INTERVAL '5' SECOND", "INTERVAL '1' SECOND"))
    feed = subprocess.Popen([sys.executable, "live/feed.py"], stdout=subprocess.DEVNULL)
    try:
        process = child("run", "live/pipeline.toml", "--json")
        pages = next(rows for line in process.stdout if len(rows := json.loads(line)["rows"]) >= 3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        feed.kill()
        feed.wait()

    assert "home" in {row["page"] for row in pages}
    told = [json.loads(line)["note"] for line in err.splitlines()[:2]]
    assert told[0].startswith("opened the book 'clicks' (in live/clicks.ledger) with epsilon = 2")
    assert told[1].startswith("created the secret")
    assert process.returncode == 130


def test_paths_are_relative_to_the_file(run, folder):
    """It may be run from anywhere."""
    run("init", "deep/place")
    assert run("run", "deep/place/pipeline.toml", "--once").code == 0

    assert {path.name for path in folder.iterdir()} == {"deep"}
    place = folder / "deep" / "place"
    assert (place / "state.secret").exists()
    assert (place / "out.sqlite").exists()


def test_once_stops_after_the_next_triggers_and_the_next_run_goes_on(run, folder, example):
    """Every release comes once; the budget is charged once."""
    first = run("run", "pipeline.toml", "--once", "--json")
    *lines, summary = [json.loads(line) for line in first.out.splitlines()]
    done = summary["queries"]["users"]["triggers_done"]

    assert done in (1, 2)  # from files, rows are taken in one trigger ahead
    assert [line["release_index"] for line in lines if line["query"] == "users"] == [
        *range(1, done + 1)
    ]
    assert lines[0]["groups"] > 0
    assert (summary["finished"], summary["new_charges"]) == (False, 2)
    assert summary["queries"]["pages"]["triggers"] == 24
    assert summary["queries"]["users"]["operator_only"]["read"] == 20_000
    assert "go on with: dpstream run pipeline.toml" in first.err
    rest = [json.loads(line) for line in run("run", "pipeline.toml", "--json").out.splitlines()]
    found = [line["release_index"] for line in rest[:-1] if line["query"] == "users"]
    assert found == [*range(done + 1, 5)]
    assert (rest[-1]["finished"], rest[-1]["new_charges"]) == (True, 0)
    assert set(releases(folder, "pages")) == {*range(1, 25)}
    assert "everything was published before" in run("run", "pipeline.toml").err


def test_a_unit_is_erased_on_request(run, folder, example):
    """From every query, between two runs; the second one goes on as if nothing had happened."""
    assert run("run", "pipeline.toml", "--once").code == 0
    with (folder / "clicks.csv").open() as file:
        user = next(csv.DictReader(file))["user"]
    told = run("run", "pipeline.toml", "--erase-unit", user, "--json")
    again = run("run", "pipeline.toml", "--erase-unit", user)

    assert told.code == again.code == 0
    assert sum(json.loads(told.out)["groups"].values()) > 0
    assert json.loads(told.out)["dead_letters"]["pages"] == {"erased": 0, "unclear": 0}
    assert "erased from 0 groups and from 0 dead letters" in again.out
    assert "kept: what was published" in again.out
    assert run("run", "pipeline.toml").code == 0


def test_an_interrupt_stops_in_order_and_the_next_run_goes_on(run, folder, example):
    """Exit code 130, a line how to go on; afterwards every trigger was published once."""
    minutes = EXAMPLE.replace("INTERVAL '1' HOUR", "INTERVAL '10' MINUTE")
    example.write_text(minutes.replace('"out/", "out.sqlite"', '"out/"'))
    process = child("run", "pipeline.toml")
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, told = the_rest(process)
    before = [line for line in (first + rest).splitlines() if line.startswith("pages, ")]

    assert process.returncode == 130
    assert "stopping at the next occasion; once more to leave at once" in told
    assert "not finished; go on with: dpstream run pipeline.toml" in told
    assert 0 < len(before) < 144
    again = run("run", "pipeline.toml")
    assert again.code == 0
    assert "for 'pages'" not in again.err
    after = [line for line in again.out.splitlines() if line.startswith("pages, ")]
    assert len(before) + len(after) == 144
    assert len(list((folder / "out").glob("pages-*.parquet"))) == 144


def test_a_second_signal_leaves_at_once():
    """The first one asks for a stop, whichever it is; the second does not wait for it."""
    done = run_python(TWO_SIGNALS)

    assert (done.returncode, done.stdout) == (130, "goes on\n")
    assert done.stderr == "note: stopping at the next occasion; once more to leave at once\n"


def test_a_live_pipeline_runs_until_it_is_told_to_stop(run, folder):
    """It publishes by the clock; a signal while it waits is enough."""
    (folder / "live").mkdir()
    (folder / "live" / "a.csv").write_text("user,page,at\n")
    query = f'name = "now"\nsql = """{LIVE}"""'
    source = 'path = "live"\nlive = true'
    (folder / "p.toml").write_text(wanted(source=source, query=query, sink=None))
    process = child("run", "p.toml", "--json")
    first = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    out, err = the_rest(process)

    assert sorted(row["page"] for row in first["rows"]) == ["home", "news"]
    assert process.returncode == 130
    summary = json.loads(out.splitlines()[-1])
    assert (summary["finished"], summary["queries"]["now"]["triggers"]) == (False, None)
    told = [json.loads(line)["note"] for line in err.splitlines()]
    assert "'visitors' counts one row of each 'user' and group" in told[0]
    assert told[1].startswith("opened the book 'clicks'")
    assert told[2].startswith("created the secret")
    once = run("run", "p.toml", "--once", "--json")
    assert once.code == 0
    assert json.loads(once.out.splitlines()[-1])["new_charges"] == 0


@pytest.mark.parametrize("broken", [False, True])
def test_live_queries_with_equal_triggers_all_read(run, folder, broken):
    """Every query has every row; one that fails stops alone, and the exit code tells.

    The file goes when all of them are done with it: not while one has failed.
    """
    for ahead in (3, 12, 48):  # a busy machine begins later
        live = folder / f"live-{ahead}"
        live.mkdir()
        done = _run_live(run, live, broken, ahead)
        if "its last trigger was" not in done.err:
            break
    told = json.loads(done.out.splitlines()[-1])["queries"]
    read = {name: one["operator_only"]["read"] for name, one in told.items()}

    assert done.code == (4 if broken else 0)
    assert read == {"a": 400, "b": 0 if broken else 400, "c": 400}
    assert [one["triggers_done"] for one in told.values()] == [2, 0 if broken else 2, 2]
    assert all(one["operator_only"]["worst_release_delay_seconds"] > 0 for one in told.values()
               if one["triggers_done"])  # fmt: skip
    assert ("failed" in told["b"], "failed" in told["a"]) == (broken, False)
    assert done.err.count("query 'b' has failed; the others go on") == broken
    assert ("b has read nothing" in done.err) == broken
    assert (live / "a.csv").exists() == broken
    assert (live / "done" / "a.csv").exists() != broken
    text = (folder / "p.toml").read_text()
    (folder / "p.toml").write_text(text.replace('"move"', '"burn"'))
    assert "on_done must be one of keep, move, delete; got 'burn'" in run("run", "p.toml").err


def _run_live(run, live, broken, ahead):
    """Three live queries that begin so many seconds from now, and end two seconds later."""
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=ahead)
    end = start + timedelta(seconds=2)
    rows = "".join(f"u{n},{'home' if n % 2 else 'news'},{start.timestamp()}\n" for n in range(400))
    (live / "a.csv").write_text(f"user,page,at\n{rows}")
    text = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9,
        privacy_unit_column = user, max_groups_contributed = 1, max_rows_per_group = 1,
        time_column = at, time_unit = 's', start = TIMESTAMP '{start:%Y-%m-%d %H:%M:%S}',
        end = TIMESTAMP '{end:%Y-%m-%d %H:%M:%S}') page, COUNT(*) AS n
        FROM clicks GROUP BY page EMIT EVERY INTERVAL '1' SECOND"""
    queries = "".join(f'[[query]]\nname = "{n}"\nsql = """{text}"""\n' for n in ("a", "b", "c"))
    pipeline = wanted(
        source=f'path = "{live.name}"\nlive = true\nbuffer_mib = 1\non_done = "move"', query=None
    )
    (live.parent / "p.toml").write_text(pipeline.replace("epsilon = 4", "epsilon = 9") + queries)
    (live.parent / "state").mkdir(mode=0o700, exist_ok=True)
    if broken:
        (live.parent / "state" / "b").write_text("no folder")
    return run("run", "p.toml", "--json")


def test_queries_share_one_read(run, example, monkeypatch):
    """The file is read in full once, whatever the number of queries."""
    whole, read = [], Files.read

    def counted(self, partition, position, *, columns=None, until=None):
        if columns is not None and {"user", "page", "at", "seconds"} <= set(columns):
            whole.append(position)
        return read(self, partition, position, columns=columns, until=until)

    monkeypatch.setattr(Files, "read", counted)
    assert run("run", "pipeline.toml").code == 0

    assert len(whole) == len(set(map(str, whole))) > 0


def test_queries_that_do_not_fit_together_are_refused_before_a_row_is_read(
    run, folder, example, monkeypatch
):
    """The first alone would fit; nothing is read, charged or published."""
    example.write_text(EXAMPLE.replace("epsilon = 4", "epsilon = 2").replace("1e-8", "2e-9"))
    reads = []
    monkeypatch.setattr(Files, "read", lambda *args, **kwargs: reads.append(args))
    done = run("run", "pipeline.toml", "--json")

    assert (done.code, done.out, reads) == (3, "", [])
    assert "the query 'users' does not fit into the book" in done.error["message"]
    book = Ledger(folder / "clicks.ledger")
    assert book.report() == []
    book.close()
    assert not list(folder.glob("out/*"))


def test_a_new_query_joins_a_book_that_was_begun(run, folder):
    """Runs that were charged are not charged again; the new one is."""
    run("init")
    one, two = EXAMPLE.split("# All users")
    (folder / "pipeline.toml").write_text(one)
    assert run("run", "pipeline.toml").code == 0
    (folder / "pipeline.toml").write_text(f"{one}# All users{two}")
    done = run("run", "pipeline.toml")

    assert done.code == 0
    assert (
        "charged to the book 'clicks': epsilon = 1, delta = 1e-09 for 'users'; epsilon: "
        in done.err
    )
    assert len(releases(folder, "users")) == 4


def test_another_promise_for_the_same_book_is_refused(run, example):
    """Raising epsilon in the file does not raise it in the book."""
    assert run("run", "pipeline.toml", "--once").code == 0
    example.write_text(EXAMPLE.replace("epsilon = 4", "epsilon = 8"))
    done = run("run", "pipeline.toml")

    assert done.code == 4
    assert "pipeline.toml, [budget] says epsilon = 8" in done.err
    assert "dpstream ledger grow clicks.ledger --dataset clicks --epsilon 8" in done.err


def test_a_lost_secret_is_not_replaced(run, folder, example):
    """What to do is said; with the backup it goes on; anew it is charged anew."""
    run("run", "pipeline.toml", "--once")
    kept = (folder / "state.secret").rename(folder / "backup")
    lost = run("run", "pipeline.toml")

    assert lost.code == 4
    assert "made with the secret state.secret, which is not there" in lost.err
    assert not (folder / "state.secret").exists()
    kept.rename(folder / "state.secret")
    assert run("run", "pipeline.toml", "--once").code == 0
    example.write_text(
        EXAMPLE.replace('"state/"', '"new/"').replace('"state.secret"', '"new.secret"')
        .replace('"out/", "out.sqlite"', '"new-out/"')
    )  # fmt: skip
    rotated = run("run", "pipeline.toml", "--once", "--json")
    assert json.loads(rotated.out.splitlines()[-1])["new_charges"] == 2


def test_without_a_sink_the_releases_are_printed(run, folder, example):
    """As `dpstream sql` prints them."""
    (folder / "p.toml").write_text(wanted(sink=None))
    lines = [json.loads(line) for line in run("run", "p.toml", "--json").out.splitlines()]

    assert [line["release_index"] for line in lines[:-1]] == [1, 2, 3, 4]
    assert lines[0]["rows"][0].keys() == {"page", "visitors", "visitors_stddev"}


def test_a_query_may_be_in_a_file(run, folder, example):
    """Its path is relative to the pipeline, too."""
    (folder / "pages.sql").write_text(PAGES)
    (folder / "p.toml").write_text(wanted(query='name = "pages"\nfile = "pages.sql"'))

    assert run("run", "p.toml").code == 0


OTHER = PAGES.replace("privacy_unit_column = user", "privacy_unit_column = page").replace(
    "page, COUNT", "user, COUNT").replace("GROUP BY page", "GROUP BY user")  # fmt: skip
TWO = f'name = "a"\nsql = """{PAGES}"""\n[[query]]\nname = "{{}}"\nsql = """{{}}"""'
BAD = {
    "not toml": ("[source\n", "p.toml is not TOML: "),
    "no table": (wanted(budget=None), "p.toml has no table [budget]; add it, with dataset"),
    "no query": (wanted(query=None), "p.toml has no table [[query]]; add it, with name"),
    "unknown table": (wanted(sinks="to = 1"), "unknown table [sinks]; did you mean 'sink'?"),
    "not a table": ("source = 1\n" + wanted(source=None), "source must be a table; write [source]"),
    "one query": (
        wanted(query=None) + "\n[query]\nname='a'\n",
        "query must be a table; write [[query]] above it",
    ),
    "unknown key": (
        wanted(budget='dataset = "a"\nepsillon = 1'),
        "p.toml, [budget] has an unknown key 'epsillon'; did you mean 'epsilon'?",
    ),
    "far key": (
        wanted(state="zzz = 1"),
        "an unknown key 'zzz'; known are path, secret",
    ),
    "wrong type": (wanted(state="path = 5"), "p.toml, [state]: path must be text; got 5"),
    "a flag": (wanted(source='path = "a"\nlive = "yes"'), "live must be true or false; got 'yes'"),
    "a number": (wanted(budget='dataset="a"\nepsilon=true\ndelta=1'), "epsilon must be a number"),
    "an empty list": (wanted(sink="to = []"), "[sink]: to must be text or a list of texts"),
    "empty": (wanted(state='path = ""'), "[state]: path must be text; got ''"),
    "missing key": (wanted(budget='dataset = "a"\nepsilon = 1'), "p.toml, [budget] has no delta"),
    "epsilon 0": (
        wanted(budget='dataset = "a"\nepsilon = 0\ndelta = 1e-9'),
        "p.toml, [budget]: epsilon must be greater than 0; got 0",
    ),
    "no name": (wanted(query="sql = 'SELECT 1'"), "p.toml, [[query]] number 1 has no name; add it"),
    "no sql": (wanted(query="name = 'a'"), "[[query]] 'a' needs sql or file, and not both"),
    "no file": (wanted(query="name='a'\nfile='no.sql'"), "file no.sql cannot be read: No such"),
    "bad sql": (
        wanted(query="name = 'a'\nsql = 'SELECT page FROM clicks'"),
        "p.toml, [[query]] 'a': ",
    ),
    "one name twice": (wanted(query=TWO.format("a", PAGES)), "two queries have this name"),
    "two tables": (
        wanted(query=TWO.format("b", PAGES.replace("FROM clicks", "FROM log"))),
        "all queries read the one [source]; but 'a' reads 'clicks', 'b' reads 'log'",
    ),
    "two units": (
        wanted(query=TWO.format("b", OTHER)),
        "'a' protects all rows with one 'user' (period forever, time zone UTC), 'b' protects",
    ),
    "no source": (wanted(source='path = "no.csv"'), "there is no file no.csv"),
    "two kinds of source": (
        wanted(source='path="a"\n[source.clicks]\npath="b"'),
        "p.toml, [source] has path beside [source.clicks]; move it into one of the named tables",
    ),
    "a source that is not there": (
        wanted(source=None, **{"source.click": 'path = "clicks.csv"'}),
        "'pages' reads 'clicks', and there is no [source.clicks]; did you mean 'click'?",
    ),
    "a budget that no source has": (
        wanted(budget=None, **{"budget.clicks": "epsilon = 4"}),
        "with [budget.NAME] every source has its own",
    ),
    "a key of a named source": (
        wanted(source=None, **{"source.clicks": 'paht = "clicks.csv"'}),
        "p.toml, [source.clicks] has an unknown key 'paht'; did you mean 'path'?",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_its_table_and_key(run, folder, text, message):
    """Nothing is published and no secret is made."""
    Path("p.toml").write_text(text)
    done = run("run", "p.toml")

    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not list(folder.glob("*.secret"))


def test_a_missing_file_is_named(run):
    """As any other file."""
    assert "No such file or directory: no.toml" in run("run", "no.toml").err


def test_once_ends_after_a_trigger_that_publishes_nothing():
    """As of a window that was given up when a backup was put back; others are left."""

    class Run:
        live, steps_done = True, 3

        def __init__(self, first):
            self.stopped = threading.Event()
            self.query = SimpleNamespace(schedule=SimpleNamespace(time_of=lambda s: first + s))
            self.stop = self.stopped.set

    over, ahead = Run(first=8), Run(first=7)
    with _stop_after_trigger(SimpleNamespace(runs={"over": over, "ahead": ahead}), began=10):
        assert over.stopped.wait(60)
    assert not ahead.stopped.is_set()
