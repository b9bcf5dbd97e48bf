"""`dpstream sql` and `dpstream explain`: one query from the command line."""

import io
import json
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from dpstream.cli.print_releases import as_json
from dpstream.connectors.files.source import Files
from dpstream.data.clicks import clicks

OPTIONS = "epsilon = 2, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 4"
DAY = "time_column = at, time_unit = 's', start = '2024-05-01', end = '2024-05-02'"
PLAIN = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS})
page, COUNT(*) AS visitors FROM clicks GROUP BY page ORDER BY visitors DESC"""
TIMED = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS}, {DAY})
page, COUNT(*) AS visitors FROM clicks GROUP BY page ORDER BY visitors DESC
EMIT EVERY INTERVAL '6' HOUR"""
SOURCE = ("--source", "clicks=clicks.csv")


@pytest.fixture(autouse=True)
def log(folder):
    """A day of clicks."""
    pcsv.write_csv(clicks(8_000, 2_000), folder / "clicks.csv")
    return folder / "clicks.csv"


def notes(done):
    return [json.loads(line)["note"] for line in done.err.splitlines()]


def test_parameters_and_functions_come_from_the_command_line(run, folder):
    """Text unless it is a number; a module of the current directory is found."""
    (folder / "upper_for_this_test.py").write_text(
        "import pyarrow.compute as pc\n\ndef upper(page):\n    return pc.utf8_upper(page)\n"
    )
    asked = PLAIN.replace("page,", "shout(page) AS p,").replace("GROUP BY page", "GROUP BY p")
    asked = asked.replace("FROM clicks", "FROM clicks WHERE page <> @no AND user <> ?")
    given = ("--function", "shout=upper_for_this_test:upper", "--param", "no=x")
    given = (*given, "--param", "1=nobody")

    done = run("explain", asked, *given)
    assert "WHERE page <> 'x' AND user <> 'nobody'" in done.out
    done = run("sql", asked, *SOURCE, *given, "--json")
    assert '"HOME"' in done.out
    assert "--param 1=VALUE" in run("sql", asked, *SOURCE, *given[:4]).err
    assert "--param needs" in run("explain", asked, "--param", "x").err


def test_a_union_of_private_queries_is_one_table_and_two_charges(run, folder):
    """The same command again shows the same, at no cost."""
    (folder / "both.sql").write_text(
        f"{PLAIN.partition('ORDER')[0]} UNION ALL "
        + PLAIN.partition("ORDER")[0]
        .replace("page,", "'all' AS page,")
        .replace("GROUP BY page", "")
    )
    done = run("sql", "both.sql", *SOURCE, "--state", "state")
    rows = [line.split() for line in done.out.splitlines()[2:] if line]
    again = run("sql", "both.sql", *SOURCE, "--state", "state")

    assert rows[-1][0] == "all"
    assert len(rows) > 3
    assert "for 'both_1', epsilon = 2, delta = 1e-09 for 'both_2'" in done.err
    assert "nothing new was charged" in again.err
    assert all(row[:2] in [line.split()[:2] for line in again.out.splitlines()] for row in rows)


def test_windows_that_are_published_once_are_one_table(run, folder):
    """With their starts before the keys; JSON has a line for each, and a state the same again."""
    hours = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({OPTIONS.replace("4", "24")},
        time_unit = 's', start = '2024-05-01', end = '2024-05-02', public_groups = ('home', 'x'))
        page, window_start, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
        GROUP BY page, window_start ORDER BY page"""
    lines = run("sql", hours, *SOURCE, "--state", "state").out.splitlines()
    again = run("sql", hours, *SOURCE, "--state", "state").out.splitlines()

    assert lines[0] == "query: 24 windows, 2024-05-01 00:00 to 2024-05-02 00:00, 48 rows"
    assert lines[1].split()[:3] == ["window_start", "page", "n"]
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["2024-05-01", "00:00", "home"],
        ["2024-05-01", "00:00", "x"],
        ["2024-05-01", "01:00", "home"],
    ]
    assert sum("2024-05-01" in line for line in lines[2:]) == 48
    assert again == lines
    assert len(run("sql", hours, *SOURCE, "--json").out.splitlines()) == 24


def test_releases_are_printed_for_people(run):
    """Earlier releases in a line each, a window's last one in full, figures with their error."""
    done = run("sql", TIMED, *SOURCE)
    lines = done.out.splitlines()

    assert done.code == 0
    assert lines[0].startswith(
        "query, 2024-05-01 00:00 to 2024-05-02 00:00, release 1 of 4 at 2024-05-01 06:00: "
    )
    assert [line.split(",")[0] for line in lines[:4]] == ["query"] * 4
    assert lines[4].split() == ["page", "visitors", "(±", "2", "stddev)"]
    assert lines[5].split()[0] == "home"
    assert lines[5].split()[2] == "±"
    assert "charged to the book 'stream': epsilon = 2, delta = 1e-09 for 'query'" in done.err
    assert "operator only, not private: 8,000 rows read" in done.err
    assert "forgotten afterwards, not shared with others" in done.err
    assert run("sql", TIMED, *SOURCE, "--all").out.count("page ") == 4


def test_json_lines_have_the_window_the_trigger_and_the_rows(run):
    """One line per release; what holds for the whole release is said once."""
    done = run("sql", TIMED, *SOURCE, "--json", "--name", "pages")
    releases = [json.loads(line) for line in done.out.splitlines()]

    assert [release["release_index"] for release in releases] == [1, 2, 3, 4]
    last = releases[-1]
    assert list(last) == [
        "query", "window_start", "window_end", "trigger_time", "release_index", "kept_share",
        "bias", "rows"
    ]  # fmt: skip
    assert (last["query"], last["window_end"]) == ("pages", "2024-05-02T00:00:00+00:00")
    assert list(last["rows"][0]) == ["page", "visitors", "visitors_stddev"]
    assert last["rows"][0]["page"] == "home"
    assert len(notes(done)) == 4


def test_counting_one_row_of_a_user_is_said_unless_it_is_meant(run):
    """COUNT(*) and SUM surprise who expects all rows; the note is not among the data."""
    said = "'visitors' counts one row of each 'user' and group; for up to 3 add max_rows_per_group"
    done = run("sql", PLAIN, *SOURCE, "--json")

    assert any(said in each for each in notes(done))
    assert "max_rows_per_group" not in done.out
    for other in (
        (PLAIN, "--set", "max_rows_per_group=1"),
        (PLAIN.replace("COUNT(*)", "COUNT(DISTINCT user)"),),
    ):
        assert not any(
            "one row of each" in each for each in notes(run("sql", *other, *SOURCE, "--json"))
        )


def test_without_times_there_is_one_release(run):
    """No window, no trigger."""
    (line,) = run("sql", PLAIN, *SOURCE, "--json").out.splitlines()
    release = json.loads(line)

    assert (release["window_start"], release["trigger_time"], release["release_index"]) == (
        None, None, 1
    )  # fmt: skip
    assert run("sql", PLAIN, *SOURCE).out.startswith("query: ")


def test_sql_comes_from_a_file_or_standard_input(run, folder, monkeypatch):
    """A file gives its name to the query; options beside it go before its own."""
    (folder / "pages.sql").write_text(PLAIN)
    from_file = run("sql", "pages.sql", *SOURCE, "--json", "--set", "epsilon=1/2")
    monkeypatch.setattr("sys.stdin", io.StringIO(PLAIN))
    from_input = run("sql", "-", *SOURCE, "--json", "--set", "public_groups=home")

    assert json.loads(from_file.out)["query"] == "pages"
    assert "epsilon = 0.5, delta" in from_file.err
    assert [row["page"] for row in json.loads(from_input.out)["rows"]] == ["home"]


def test_a_sink_takes_the_releases(run, folder):
    """Nothing is printed but, for programs, a summary."""
    done = run("sql", TIMED, *SOURCE, "--sink", "out/", "--sink", "out.sqlite", "--json")
    summary = done.json

    assert (summary["releases"], summary["new_charges"], summary["finished"]) == (4, 1, True)
    assert summary["operator_only"]["read"] == 8_000
    files = sorted(path.name for path in (folder / "out").glob("*.parquet"))
    assert files[-1] == "query-w000000-t000004.parquet"
    assert pq.read_table(folder / "out" / files[-1]).num_rows > 3
    with sqlite3.connect(folder / "out.sqlite") as database:
        (found,) = database.execute("SELECT COUNT(DISTINCT release_index) FROM query").fetchone()
    assert found == 4
    assert run("sql", PLAIN, *SOURCE, "--sink", "o/").out == ""


def test_a_state_directory_keeps_secret_and_budget(run, folder):
    """Run again, nothing is charged, and what was published is shown again."""
    first = run("sql", TIMED, *SOURCE, "--state", "state")
    again = run("sql", TIMED, *SOURCE, "--state", "state")

    assert "created the secret state.secret; back it up" in first.err
    assert "kept in state/ledger and not shared" in first.err
    assert (again.code, again.out) == (0, first.out)
    assert "nothing new was charged" in again.err
    assert "this was published before; here it is again, the same numbers, at no cost" in again.err
    as_json = run("sql", TIMED, *SOURCE, "--state", "state", "--json")
    assert [json.loads(line)["release_index"] for line in as_json.out.splitlines()] == [1, 2, 3, 4]
    elsewhere = run("sql", TIMED, *SOURCE, "--state", "state", "--sink", "out/")
    assert "this was published before; out/ has it if that run wrote there" in elsewhere.err


def test_a_lost_secret_is_not_replaced(run, folder):
    """A new one would not fit; what to do is said."""
    run("sql", TIMED, *SOURCE, "--state", "state")
    (folder / "state.secret").rename(folder / "away")
    done = run("sql", TIMED, *SOURCE, "--state", "state")

    assert done.code == 4
    assert "made with the secret state.secret, which is not there; restore it" in done.err
    assert "new state directory, which makes a new secret and is charged anew" in done.err
    assert not (folder / "state.secret").exists()


def test_what_does_not_fit_is_refused_before_a_row_is_read(run, folder, monkeypatch):
    """Two queries that together exceed the book: the second one leaves with exit code 3."""
    book = ("--ledger", "book", "--dataset", "clicks")
    unit = ("--privacy-unit", "user", "--privacy-unit-column", "user")
    run("ledger", "open", *book, *unit, "--epsilon", "2.5", "--delta", "1e-8")
    assert run("sql", PLAIN, *SOURCE, *book).code == 0
    reads = []
    monkeypatch.setattr(Files, "read", lambda *args, **kwargs: reads.append(args))
    done = run("sql", TIMED, *SOURCE, *book, "--state", "state", "--json")

    assert (done.code, done.out, reads) == (3, "", [])
    assert done.error["error"] == "BudgetExceeded"
    for part in (
        "the query 'query' does not fit into the book 'clicks' (in book): it asks for epsilon = 2",
        "and of the book's epsilon = 2.5 only 1.",
        "to see its releases again, use the state directory of that run; nothing was read",
    ):
        assert part in done.error["message"]
    assert "tail" not in done.error["message"]
    assert not (folder / "state").exists()
    (shown,) = run("ledger", "show", *book, "--json").json
    assert shown["runs"] == 1


def test_another_unit_is_refused_before_the_amount_is_looked_at(run):
    """Who names another column must hear of that, not that the book is short."""
    book = ("--ledger", "book", "--dataset", "clicks")
    unit = ("--privacy-unit", "user", "--privacy-unit-column", "visitor")
    run("ledger", "open", *book, *unit, "--epsilon", "1", "--delta", "1e-8")
    done = run("sql", PLAIN, *SOURCE, *book)

    assert done.code == 4
    assert "protects users" in done.err
    assert "all rows with one 'visitor'" in done.err
    assert "all rows with one 'user'" in done.err


def test_dead_letters_are_told_to_the_operator(run, folder, log):
    """How many, where they are, and that this is not private."""
    log.write_text(log.read_text() + '"user-1","home","yesterday",3\n')
    done = run("sql", TIMED, *SOURCE, "--state", "state")

    assert "operator only, not private: query set aside 1 dead letters (in state/dead-letters)" in (
        done.err
    )
    assert "lost without --state" in run("sql", TIMED, *SOURCE).err


BAD = {
    "no name": (("sql", PLAIN, "--source", "clicks.csv"), "--source needs table=path"),
    "other table": (
        ("sql", PLAIN, "--source", "log=clicks.csv"),
        "the query reads 'clicks', but --source names 'log'; write --source clicks=clicks.csv",
    ),
    "no file": (("sql", PLAIN, "--source", "clicks=no.csv"), "there is no file no.csv"),
    "no sql file": (("sql", "no.sql", *SOURCE), "No such file or directory: no.sql"),
    "no source": (("sql", PLAIN), "Missing option '--source'"),
    "no value": (("sql", PLAIN, *SOURCE, "--set", "epsilon"), "--set needs option=value"),
    "twice": (
        ("sql", PLAIN, *SOURCE, "--set", "epsilon=1", "--set", "epsilon=2"),
        "epsilon is given twice",
    ),
    "no option": (("explain", PLAIN, "--set", "epsillon=1"), "there is no option epsillon"),
    "no privacy": (("explain", "SELECT page FROM clicks"), "fix: "),
    "a raw column": (("sql", PLAIN.replace("page,", "page, seconds,"), *SOURCE), "^^^^^^^"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_run_is_refused(run, folder, words, message):
    """One clear error, and nothing is made."""
    before = set(folder.iterdir())
    done = run(*words)

    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert set(folder.iterdir()) == before


def test_explain_tells_people_and_programs(run, folder):
    """The same facts, without reading any data."""
    Path("clicks.csv").unlink()
    text = run("explain", TIMED).out
    facts = run("explain", TIMED, "--json", "--set", "epsilon=1").json

    for part in ("PLAN", "WHAT IS PROTECTED", "SENSITIVITY", "BUDGET", "WHAT IS NOT PROTECTED"):
        assert part in text
    assert facts["budget"]["epsilon"] == 1
    assert facts["keys"]["first_threshold"] > facts["keys"]["last_threshold"] > 0  # it is favoured


def test_times_are_those_of_the_querys_zone(run):
    """With their offset, so that the hour that comes twice in autumn is told apart."""
    rome = TIMED.replace("time_unit", "time_zone = 'Europe/Rome', time_unit")
    autumn = rome.replace("2024-05-01", "2024-10-27").replace("2024-05-02", "2024-10-28")

    assert (
        run("sql", rome, *SOURCE)
        .out.splitlines()[0]
        .startswith(
            "query, 2024-05-01 00:00+02:00 to 2024-05-02 00:00+02:00, release 1 of 4 at "
            "2024-05-01 06:00+02:00: "
        )
    )
    assert (
        run("sql", autumn, *SOURCE, "--anyway")
        .out.splitlines()[0]
        .startswith("query, 2024-10-27 00:00+02:00 to 2024-10-28 00:00+01:00, release 1 of ")
    )


def test_another_question_on_old_state_is_told_in_plain_numbers(run):
    """What was asked and what is asked, as somebody would write it."""
    run("sql", PLAIN, *SOURCE, "--state", "state")
    done = run("sql", PLAIN.replace("epsilon = 2", "epsilon = 0.5"), *SOURCE, "--state", "state")

    assert done.code == 4
    assert "state belongs to another query: epsilon was 2 and is now 0.5" in done.err


def test_a_pipelines_queries_are_explained(run, folder):
    """All of them, or one by its name; SQL from such a file is refused with what to do."""
    run("init", "shop")

    every = run("explain", "shop/pipeline.toml")
    one = run("explain", "shop/pipeline.toml", "--query", "users")

    assert [line for line in every.out.splitlines() if line.startswith("QUERY")] == [
        "QUERY pages",
        "QUERY users",
    ]
    assert one.out.startswith("QUERY users\n\nPLAN\n")
    assert "QUERY pages" not in one.out
    assert set(run("explain", "shop/pipeline.toml", "--json").json) == {"pages", "users"}
    assert (
        "its queries are pages, users"
        in run("explain", "shop/pipeline.toml", "--query", "usres").err
    )
    assert (
        "--set, --param and --function go with SQL"
        in run("explain", "shop/pipeline.toml", "--set", "epsilon=1").err
    )
    assert "--query chooses" in run("explain", PLAIN, "--query", "users").err
    assert "dpstream run shop/pipeline.toml" in run("sql", "shop/pipeline.toml", *SOURCE).err


def test_a_narrow_screen_cuts_no_figure(run, monkeypatch):
    """Lines wrap; nothing is replaced by dots."""
    monkeypatch.setenv("COLUMNS", "20")
    shown = run("sql", PLAIN, *SOURCE, "--ledger", "book", "--dataset", "clicks").out
    book = run("ledger", "book").out

    assert "page     visitors (± 2 stddev)" in shown
    assert "last charged (UTC)" in book
    assert "…" not in shown + book


def test_a_column_that_is_not_there_is_answered_with_the_nearest(run):
    """Before anything is charged."""
    done = run("sql", PLAIN.replace("page", "pgae"), *SOURCE, "--ledger", "book")

    assert done.code == 2
    assert "has no column 'pgae'; did you mean 'page'? its columns are user, page" in done.err
    assert not Path("book").exists()


def test_a_line_separator_in_a_key_leaves_one_line_of_json():
    """A release is one line of JSON, whatever its keys hold."""
    facts = dict.fromkeys(("query", "window", "window_start", "window_end", "trigger_time"))
    about = json.dumps(facts | {"release_index": 1, "releases": 1})
    keys = ["a\u2028b", "\x85\x1c"]
    table = pa.table({"page": keys}).replace_schema_metadata({"dpstream": about})

    assert [row["page"] for row in json.loads(as_json(table))["rows"]] == keys


def test_files_that_are_done_go_only_from_a_live_directory_with_a_state(run, folder):
    """What cannot be is refused before anything is read."""
    files = run("sql", TIMED, *SOURCE, "--on-done", "move")
    (folder / "in").mkdir()
    live = run("sql", TIMED, "--source", "clicks=in", "--live", "--on-done", "delete")

    assert (files.code, live.code) == (2, 2)
    assert "only a live directory has such files" in files.err
    assert "without a state directory" in live.err
