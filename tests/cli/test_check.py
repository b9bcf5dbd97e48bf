"""`dpstream check`, and what `run` and `sql` refuse before they charge."""

import json
import sqlite3

import pyarrow.csv as pcsv
import pytest

from dpstream.data.clicks import clicks

OPTIONS = "epsilon = 2, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 1"
SQL = f"""SELECT WITH DIFFERENTIAL_PRIVACY
OPTIONS ({OPTIONS}, time_column = at, time_unit = 's', start = '2024-05-01', end = '2024-05-02')
page, COUNT(*) AS visitors FROM clicks GROUP BY page"""
SOURCE = ("--source", "clicks=clicks.csv")
PIPELINE = """
[source]
path = "clicks.csv"
[budget]
dataset = "clicks"
epsilon = {epsilon}
delta = 1e-8
[state]
path = "state"
[sink]
to = "out.sqlite"
[[query]]
name = "pages"
anyway = {anyway}
sql = '''{sql}'''
"""


@pytest.fixture(autouse=True)
def log(folder):
    """A day of clicks."""
    pcsv.write_csv(clicks(2_000, 500), folder / "clicks.csv")
    return folder / "clicks.csv"


def write_pipeline(folder, *, sql=SQL, epsilon=4, anyway="false"):
    path = folder / "pipeline.toml"
    path.write_text(PIPELINE.format(sql=sql, epsilon=epsilon, anyway=anyway))
    return str(path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_figures_are_exact_and_nothing_is_written(run, folder):
    """Every row of 500 users is counted, against a bound of one row each."""
    path = write_pipeline(folder)
    before = names(folder)
    done = run("check", path, "--json")
    report = done.json["pages"]
    facts = report["operator_only"]["source"]

    assert done.code == 0
    assert names(folder) == before
    assert not report["problems"]
    assert (facts["rows"], facts["usable"], facts["complete"]) == (2000, 1.0, True)
    assert facts["columns"] == {"user": "text", "page": "text", "at": "text"}
    assert facts["times"]["likely_unit"] == "s"
    units = facts["units"]
    assert units["rows_left_out"] == pytest.approx(1 - units["units"] / 2000)
    assert 0 < units["units_cut"] <= 1
    assert report["budget"]["fits"]
    assert not report["budget"]["charged_before"]
    assert "operator only" in done.err


def test_bad_rows_are_counted_by_their_reason(run, log):
    with log.open("a") as file:
        file.write('u1,home,yesterday,3\n,home,1714521700,3\nu2,home,"1614521700",3\n')
    facts = run("check", SQL, *SOURCE, "--json").json["query"]["operator_only"]["source"]

    assert facts["unusable"] == {"unparsable time": 1, "missing unit": 1}
    assert facts["outside"] == 1
    assert facts["usable"] == pytest.approx(2000 / 2003)
    assert facts["usable_parts"]["time"] == pytest.approx(2002 / 2003)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("time_unit = 's'", "time_unit = 'ms'", "say time_unit = 's'"),
        ("'2024-05-", "'2023-05-", "set start and end"),
        ("GROUP BY page", "GROUP BY paeg", "did you mean 'page'"),
        ("delta", "public_groups = ('nowhere'), delta", "no row has one of the public groups"),
    ],
)
def test_problems_have_a_code_of_their_own(run, old, new, words):
    sql = SQL.replace(old, new)
    if "paeg" in new:
        sql = sql.replace("page,", "paeg,")
    done = run("check", sql, *SOURCE)

    assert done.code == 7
    assert "PROBLEM" in done.out
    assert words in done.out


def test_a_charge_that_does_not_fit_is_a_problem(run, folder):
    done = run("check", write_pipeline(folder, epsilon=1))

    assert done.code == 7
    assert "does not fit into" in done.out
    assert "; it does not fit (see the problem below)" in done.out


def test_what_the_book_counts_is_told_and_that_it_fits(run, folder):
    """Also where the book gives analysts shares: who asks is known to the pipeline file."""
    path = write_pipeline(folder)
    done = run("check", path)
    assert "% of it; it fits" in done.out
    budget = run("check", path, "--json").json["pages"]["budget"]
    assert budget["charge"] == pytest.approx(budget["mu_squared"])


def test_a_query_that_was_charged_is_not_charged_again(run, folder):
    path = write_pipeline(folder)
    assert run("run", path).code == 0
    (folder / "clicks.csv").write_text("user,page,at\nu1,home,never\n")
    done = run("check", path, "--json")

    assert done.json["pages"]["budget"]["charged_before"]
    assert done.json["pages"]["budget"]["fits"]


def test_what_is_read_from_a_pipe_is_gone(run):
    done = run("check", SQL, "--source", "clicks=-")

    assert done.code == 0
    assert "standard input is not looked at" in done.out


def test_run_and_sql_stop_before_the_charge(run, folder):
    """No book, no state, no release; `anyway` in the file or on the command line goes on."""
    wrong = SQL.replace("time_unit = 's'", "time_unit = 'ms'")
    path = write_pipeline(folder, sql=wrong)
    refused = run("run", path, "--json")
    assert refused.code == 2
    assert "say time_unit = 's'" in refused.error["message"]
    assert not list(folder.glob("state/*/run.dps"))
    assert "clicks" not in run("ledger", "state/ledger").out

    same = run("sql", wrong, *SOURCE, "--name", "pages", "--json")
    assert same.error["message"] == refused.error["message"]
    done = run("sql", wrong, *SOURCE, "--anyway", "--json")
    assert (done.code, json.loads(done.out)["rows"]) == (0, [])
    assert run("run", write_pipeline(folder, sql=wrong, anyway="true")).code == 0


def test_a_sink_is_tried_before_the_charge(run, folder):
    """A table that somebody else has made is found before anything is paid for."""
    with sqlite3.connect(folder / "out.sqlite") as database:
        database.execute("CREATE TABLE pages (x)")
    database.close()
    done = run("run", write_pipeline(folder), "--json")

    assert done.code == 4
    assert 'table "pages" already exists' in done.error["message"]
    assert not list(folder.glob("state/*/run.dps"))


def test_older_rows_of_a_live_directory_are_only_told(run, folder):
    """A run over them would begin, and count what comes."""
    (folder / "incoming").mkdir()
    (folder / "clicks.csv").rename(folder / "incoming" / "clicks.csv")
    live = f"""SELECT WITH DIFFERENTIAL_PRIVACY
    OPTIONS ({OPTIONS}, privacy_unit_period = INTERVAL '1' DAY, time_unit = 's')
    page, window_start, COUNT(*) AS visitors
    FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR) GROUP BY page, window_start
    EMIT EVERY INTERVAL '1' MINUTE"""
    done = run("check", live, "--source", "clicks=incoming", "--live", "--json")
    report = done.json["query"]

    assert (done.code, report["problems"]) == (0, [])
    assert report["operator_only"]["source"]["outside"] == 2000
    assert "100.0% of the rows cannot be used" in report["remarks"][0]
