"""Pipelines with several sources, budgets, histories, and time-series mechanisms."""

import json

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.files.source import Files
from dpstream.data.clicks import clicks
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.session.pipeline import load_pipeline

DAY = "start = '2024-05-01', end = '2024-05-02'"
COUNT = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {epsilon}, delta = 1e-9,
    privacy_unit_column = user, max_groups_contributed = 4) page, COUNT(*) AS n
    FROM {table} GROUP BY page"""
SERIES = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {{epsilon}},
    privacy_unit = 'w_event', w = 6, mechanism = '{{mechanism}}', privacy_unit_column = user,
    time_unit = 's', public_groups = ('home', 'news'), {DAY})
    page, window_start, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
    GROUP BY page, window_start"""
REST = '[state]\npath = "state/"\n[sink]\nto = "csv:out/"\n'


@pytest.fixture(autouse=True)
def logs(folder):
    """Two logs of different people."""
    pcsv.write_csv(clicks(4_000, 900), folder / "clicks.csv")
    pcsv.write_csv(clicks(3_000, 700), folder / "orders.csv")


def queries(**texts):
    return "".join(
        f'[[query]]\nname = "{name}"\nsql = """{text}"""\n' for name, text in texts.items()
    )


def counted(monkeypatch):
    """How often each file is read in chunks."""
    found, read = {}, Files.read

    def counting(self, partition, position, *, columns=None, until=None):
        key = (partition, json.dumps(position), tuple(columns or ()))
        found[key] = found.get(key, 0) + 1
        return read(self, partition, position, columns=columns, until=until)

    monkeypatch.setattr(Files, "read", counting)
    return found


def test_queries_of_one_source_share_one_read(run, folder, monkeypatch):
    """Each source is named by FROM, and read once for all queries over it."""
    (folder / "p.toml").write_text(
        '[source.clicks]\npath = "clicks.csv"\n[source.orders]\npath = "orders.csv"\n'
        '[budget]\ndataset = "people"\nepsilon = 9\ndelta = 1e-8\n' + REST
        + queries(a=COUNT.format(epsilon=2, table="clicks"),
                  b=COUNT.format(epsilon=1, table="clicks"),
                  c=COUNT.format(epsilon=1, table="orders"))
    )  # fmt: skip
    reads = counted(monkeypatch)
    done = run("run", "p.toml")

    assert done.code == 0, done.err
    whole = {key: count for key, count in reads.items() if key[2] == ("user", "page")}
    assert {partition for partition, *_ in whole} == {"clicks.csv", "orders.csv"}
    assert set(whole.values()) == {1}
    names = {path.name.split("-")[0] for path in (folder / "out").glob("*.csv")}
    assert names == {"a", "b", "c"}


def test_each_source_may_have_its_own_book(run, folder):
    """With other units, periods or budgets; one refusal stops all before a row is read."""
    text = (
        '[source.clicks]\npath = "clicks.csv"\n[source.orders]\npath = "orders.csv"\n'
        "[budget.clicks]\nepsilon = 1\n"
        '[budget.orders]\ndataset = "sales"\nepsilon = {}\ndelta = 1e-8\nledger = "sales.ledger"\n'
        + REST
        + queries(
            hours=SERIES.format(epsilon=1, mechanism="pacer"),
            c=COUNT.format(epsilon=2, table="orders"),
        )
    )
    (folder / "small.toml").write_text(text.format(1).replace("sales", "small"))
    refused = run("run", "small.toml")
    assert refused.code == 3
    assert "'c' does not fit into the book" in refused.err
    assert not list((folder / "out").glob("*.csv"))

    (folder / "p.toml").write_text(text.format(3).replace('"state/"', '"state2/"'))
    done = run("run", "p.toml", "--json")
    assert done.code == 0, done.err
    last = json.loads(done.out.splitlines()[-1])
    assert (last["dataset"], last["new_charges"]) == (["clicks", "sales"], 2)
    assert Ledger(folder / "state2" / "ledger").terms("clicks").unit == "w_event"
    assert Ledger(folder / "sales.ledger").terms("sales").unit == "user"


def test_two_books_cannot_promise_the_same_rows(run, folder):
    """Each would say that its own epsilon is all that is spent."""
    (folder / "p.toml").write_text(
        '[source.clicks]\npath = "clicks.csv"\n[source.again]\npath = ["./clicks.csv"]\n'
        '[budget.clicks]\ndataset = "a"\nepsilon = 2\ndelta = 1e-8\n'
        '[budget.again]\ndataset = "b"\nepsilon = 2\ndelta = 1e-8\n' + REST
        + queries(a=COUNT.format(epsilon=1, table="clicks"),
                  b=COUNT.format(epsilon=1, table="again"))
    )  # fmt: skip
    refused = run("run", "p.toml")

    assert refused.code == 2
    assert "[source.clicks] and [source.again] read the same rows" in refused.err


def test_a_series_pipeline_goes_on_and_adds_up(run, folder):
    """Two mechanisms in one book of windows; stopped and started, and refused when it is full."""
    text = (
        '[source]\npath = "clicks.csv"\n[budget]\ndataset = "clicks"\nepsilon = 1\n' + REST
        + queries(one=SERIES.format(epsilon="0.5", mechanism="spas"),
                  two=SERIES.format(epsilon="0.5", mechanism="pacer"))
    )  # fmt: skip
    (folder / "p.toml").write_text(text)
    first = run("run", "p.toml", "--once")
    assert "not finished; go on with" in first.err
    again = run("run", "p.toml")
    assert again.code == 0, again.err
    assert "nothing new was charged" in again.err
    assert len(list((folder / "out").glob("one-*.csv"))) == 24
    assert len(list((folder / "out").glob("two-*.csv"))) == 24

    (folder / "p.toml").write_text(text + queries(three=SERIES.format(epsilon=1, mechanism="spas")))
    third = run("run", "p.toml")
    assert third.code == 3
    assert "'three' does not fit into the book" in third.err


def test_a_book_of_windows_needs_what_its_queries_need(folder):
    """Windows that differ, users beside windows, a start that is not said: refused by name."""
    head = '[source]\npath = "clicks.csv"\n[budget]\ndataset = "c"\nepsilon = 1\n' + REST
    one = SERIES.format(epsilon=1, mechanism="spas")
    for other, message in (
        (one.replace("'1' HOUR", "'2' HOUR"), "must protect the same unit"),
        (COUNT.format(epsilon=1, table="clicks"), "has no delta, which 'b' needs"),
        (one.replace(DAY, "time_zone = 'UTC'"), "'b' has no start"),
        (one.replace("w = 6", "w = 7"), "must protect the same unit"),
    ):
        (folder / "p.toml").write_text(head + queries(a=one, b=other))
        with pytest.raises(ValueError, match=message):
            _ = [book.terms() for book in load_pipeline("p.toml").books]


@pytest.mark.parametrize("period", ["", 'privacy_unit_period = "1 day"\n'])
def test_a_book_without_delta(run, folder, period):
    """It counts epsilon, for queries that have no delta either; another one is named."""
    head = f'[source]\npath = "clicks.csv"\n[budget]\ndataset = "c"\nepsilon = 3\n{period}' + REST
    pure = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, privacy_unit_column = user,
        {"privacy_unit_period = INTERVAL '1' DAY," * bool(period)} time_unit = 's', {DAY},
        max_groups_contributed = 2, public_groups = ('home', 'news')) page, COUNT(*) AS n
        FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start"""
    (folder / "p.toml").write_text(head + queries(a=pure))
    assert "the book counts epsilon = 2, 66.7% of it; it fits" in run("check", "p.toml").out
    done = run("run", "p.toml")
    assert done.code == 0, done.err
    assert "epsilon: 2 of 3 spent, 1 left" in done.err
    (book,) = run("ledger", "show", "--ledger", "state/ledger", "--json").json
    assert (book["terms"]["measure"], book["spent_on"][0]["amount"]) == ("epsilon", "2")

    other = pure.replace("epsilon = 2", "epsilon = 1, delta = 1e-9")
    weekly = pure.replace("'1' DAY,", "'7' DAY,")
    wrong = [(other, "has no delta, which 'b' needs"), (weekly, "have the book's period")]
    for text, message in wrong if period else wrong[:1]:
        (folder / "p.toml").write_text(head + queries(a=pure, b=text))
        with pytest.raises(InvalidParameter, match=message):
            _ = [book.terms() for book in load_pipeline("p.toml").books]


def test_history_goes_with_several_queries(run, folder):
    """Files that came before a live source are read for each of them."""
    table = clicks(2_000, 500)
    pq.write_table(table, folder / "old.parquet")
    (folder / "new").mkdir()
    live = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
        privacy_unit_column = user, max_groups_contributed = 2, time_unit = 's', {DAY})
        {{}} COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY) {{}}"""
    (folder / "p.toml").write_text(
        '[source]\npath = "new/"\nlive = true\nhistory = "old.parquet"\n'
        '[budget]\ndataset = "c"\nepsilon = 4\ndelta = 1e-8\n' + REST
        + queries(all=live.format("window_start,", "GROUP BY window_start"),
                  pages=live.format("page, window_start,", "GROUP BY page, window_start"))
    )  # fmt: skip
    done = run("run", "p.toml")

    assert done.code == 0, done.err
    published = pcsv.read_csv(next((folder / "out").glob("all-*.csv")))
    assert abs(published["n"][0].as_py() - 500) < 60


def test_python_users_are_refused_before_a_row_is_read(folder, monkeypatch):
    """All queries together, by run_all; one more, by run; nothing is left behind."""
    two = [dps.sql(COUNT.format(epsilon=1, table="clicks"), name=name) for name in "ab"]
    book = Ledger(folder / "book")
    book.open("clicks", two[0].promise(epsilon="1.2", delta=1e-8))
    settings = {"source": "clicks.csv", "ledger": book, "dataset": "clicks"}
    reads = []

    def refused(call):
        with monkeypatch.context() as patch:
            patch.setattr(Files, "read", lambda *args, **more: reads.append(args))
            with pytest.raises(BudgetExceeded, match=r"'b' does not fit.*nothing was read"):
                call()

    refused(lambda: dps.run_all(two, state="state", **settings))
    assert not (folder / "state").exists()
    dps.run(two[0], **settings).finish()
    refused(lambda: dps.run(two[1], **settings))
    refused(lambda: dps.run(two[1], **settings | {"ledger": folder / "book"}))
    assert reads == []


@pytest.mark.parametrize("text", [COUNT.format(epsilon=2, table="clicks"),
                                  SERIES.format(epsilon=1, mechanism="spas")])  # fmt: skip
def test_the_command_and_python_publish_the_same(run, folder, monkeypatch, text):
    """With one secret and, for this test, one run id: the same bytes."""
    from dpstream.cli import sql_command as command

    Secret.create(folder / "secret", value=bytes(range(32)))
    fixed = EngineOptions(run_id=bytes(16))
    plain = command.run
    monkeypatch.setattr(command, "run", lambda *a, **k: plain(*a, **k | {"options": fixed}))
    done = run("sql", text, "--source", "clicks=clicks.csv", "--secret", "secret",
               "--state", "one", "--sink", "csv:cli/")  # fmt: skip
    assert done.code == 0, done.err
    dps.run(dps.sql(text), source="clicks.csv", secret=folder / "secret", sink="csv:python/",
            state="two", options=fixed).finish()  # fmt: skip

    files = sorted(path.name for path in (folder / "cli").glob("*.csv"))
    assert files
    for name in files:
        assert (folder / "cli" / name).read_bytes() == (folder / "python" / name).read_bytes()


def test_releases_are_good_in_a_notebook(folder):
    """Frames, a chart and HTML of what was collected."""
    text = SERIES.format(epsilon=1, mechanism="pacer")
    found = dps.run(dps.sql(text), source="clicks.csv").collect()

    assert len(found) == 24
    assert found.to_pandas().shape[0] == found.to_polars().height == 48
    assert found.last.num_rows == 48
    assert "<table>" in found._repr_html_()
    assert "± " in found._repr_html_()
    assert found.plot(path=str(folder / "x.png")) is not None
    assert (folder / "x.png").stat().st_size > 1_000
    with pytest.raises(ValueError, match="no published number 'page'"):
        found.plot(column="page")
    once = dps.run(dps.sql(COUNT.format(epsilon=2, table="clicks")), source="clicks.csv").collect()
    assert once.plot(path=str(folder / "y.png")) is not None
    assert once.table.num_rows == pa.concat_tables([*once]).num_rows > 0
    runs = dps.run_all([dps.sql(text, name="a"), dps.sql(text, name="b")], source="clicks.csv",
                       ledger=_book(dps.sql(text), 2))  # fmt: skip
    assert "0 of 24 triggers" in repr(runs)
    assert {name: len(one) for name, one in runs.collect().items()} == {"a": 24, "b": 24}


def _book(query, total):
    from dataclasses import replace

    ledger = Ledger()
    ledger.open("stream", replace(query.terms(), total=total))
    return ledger


def test_queries_that_would_open_a_book_for_the_first_alone_are_refused(folder):
    """Without a promise the book holds one query: the second is refused before a row is read."""
    two = [dps.sql(COUNT.format(epsilon=1, table="clicks"), name=name) for name in "ab"]
    both = [dps.sql(SERIES.format(epsilon=1, mechanism="spas"), name=name) for name in "ab"]

    for queries in (two, both):
        with pytest.raises(BudgetExceeded, match=r"'b' does not fit.*nothing was read"):
            dps.run_all(queries, source="clicks.csv")


def test_a_book_of_windows_can_be_opened_first(run, folder):
    """With the clock that a refusal names, several queries of the command line share it."""
    book = ("--ledger", "book", "--dataset", "clicks")
    query = ("sql", SERIES.format(epsilon="0.5", mechanism="spas"), "--source", "clicks=clicks.csv")
    run("ledger", "open", *book, "--privacy-unit", "w_event", "--window", "6", "--epsilon", "1")
    refused = run(*query, *book)
    assert refused.code == 4
    clock = refused.err.split("this query's are ")[1].split("; use the same")[0]
    opened = run("ledger", "open", "--ledger", "book", "--dataset", "hours",
                 "--privacy-unit", "w_event", "--window", "6", "--epsilon", "1",
                 "--clock", clock)  # fmt: skip
    assert opened.code == 0

    codes = [run(*query, "--ledger", "book", "--dataset", "hours").code for _ in range(3)]
    assert codes == [0, 0, 3]


def test_servers_in_a_pipeline(folder):
    """Their addresses stay as they are; files in their options stand beside the pipeline's file."""
    (folder / "there").mkdir()
    path = folder / "there" / "pipeline.toml"
    options = '{ format = "csv", header = "user,page", patience = 5, password_file = "kept" }'
    path.write_text(
        f'[source.clicks]\npath = "kafka://b1:9092,b2:9092/clicks"\noptions = {options}\n'
        '[source.orders]\npath = "kafka://b1:9092/orders?until=90"\n'
        '[budget]\ndataset = "all"\nepsilon = 4\ndelta = 1e-7\n[state]\npath = "state/"\n'
        '[sink]\nto = ["kafka://b1:9092/out", "out/"]\n'
        + queries(
            a=COUNT.format(epsilon=1, table="clicks"), b=COUNT.format(epsilon=1, table="orders")
        )
    )
    pipeline = load_pipeline(path)

    live, bounded = pipeline.feeds["a"], pipeline.feeds["b"]
    assert (live.source, live.live) == ("kafka://b1:9092,b2:9092/clicks", True)
    assert live.options["password_file"] == str(folder / "there" / "kept")
    assert live.options["patience"] == 5
    assert not bounded.live
    assert pipeline.sinks == ("kafka://b1:9092/out", f"{folder / 'there' / 'out'}/")
    path.write_text(path.read_text().replace("patience = 5", "patience = [5]"))
    with pytest.raises(InvalidInput, match=r"options\.patience must be text, a number"):
        load_pipeline(path)


def test_a_source_declares_the_types_of_its_columns(run, folder):
    """For every query that reads them; explain tells the schema, and it is the one that comes."""
    rows = "".join(f"{n}.0,2024-05-0{n % 2 + 1}\n" for n in range(400))
    (folder / "days.csv").write_text(f"user,page\n{rows}9,x\n")
    text = (
        '[source.days]\npath = "days.csv"\ncolumn_types = { user = "INT64", page = "DATE" }\n'
        '[budget]\ndataset = "people"\nepsilon = 9\ndelta = 1e-8\n'
        + REST.replace("csv:out/", "out/")
        + queries(a=COUNT.format(epsilon=2, table="days"))
    )
    (folder / "p.toml").write_text(text)
    told = json.loads(run("explain", "p.toml", "--json").out)["a"]["schema"]
    done = run("run", "p.toml")

    assert done.code == 0, done.err
    assert "1 rejected" in done.err
    (path,) = (folder / "out").glob("a-*.parquet")
    schema = pq.read_schema(path)
    assert [(one["name"], one["type"]) for one in told] == [(f.name, str(f.type)) for f in schema]
    assert schema.field("page").type == pa.date32()

    (folder / "q.toml").write_text(text.replace("page =", "pgae ="))
    assert "column_types names 'pgae', which no query reads" in run("run", "q.toml").err
    (folder / "q.toml").write_text(text.replace('"DATE"', '"DAY"'))
    assert "column_types knows no type 'DAY'" in run("run", "q.toml").err


JOINED = """WITH u AS (SELECT user, page FROM clicks UNION ALL SELECT user, page FROM orders)
    SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, privacy_unit_column = user,
    max_groups_contributed = 4, public_groups = (SELECT kind FROM pages))
    kind, COUNT(*) AS n FROM u LEFT JOIN pages USING (page) JOIN users USING (user) GROUP BY kind"""
TWO = '[source.clicks]\npath = "clicks.csv"\n[source.orders]\npath = "orders.csv"\n'
TABLES = (
    '[[public]]\nname = "pages"\npath = "pages.csv"\n[[registry]]\nname = "users"\npath = "u.csv"\n'
)
BOOK = '[budget]\ndataset = "clicks"\nepsilon = 4\ndelta = 1e-8\n'


@pytest.fixture
def tables(folder):
    """A table of pages, and a registry of users."""
    (folder / "pages.csv").write_text("page,kind\nhome,x\nnews,y\n")
    users = dict.fromkeys(clicks(4_000, 900)["user"].to_pylist())
    (folder / "u.csv").write_text("user,plan\n" + "".join(f"{each},free\n" for each in users))


def test_a_pipeline_joins_and_unites(run, folder, tables):
    """Two queries over the same sources and tables; `explain` says what they are joined to."""
    alone = COUNT.format(epsilon=1, table="orders")
    text = TWO + TABLES + BOOK + REST + queries(one=JOINED, two=JOINED, alone=alone)
    (folder / "p.toml").write_text(text)
    told = run("explain", "p.toml", "--query", "one").out
    assert "to the public table pages (2 rows" in told
    assert "to the registry users on the unit (user)" in told
    assert "'users' IS" not in told  # a registry's digest is for the operator

    run("run", "p.toml")
    (release,) = (folder / "out").glob("two-*.csv")
    assert sorted(pcsv.read_csv(release)["kind"].to_pylist()) == ["x", "y"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (TABLES, "", "the table 'pages' is joined, and it is not declared"),
        ("u.csv", "none.csv", "the table 'users'"),
        ('"users"', '"pages"', "is declared public and a registry"),
        ('"users"', '"users"\nrefresh = "1 day"', "unknown key 'refresh'"),
        ("[source.orders]", "[source.other]", r"there is no \[source.orders\]"),
        ("[budget]", "[budget.clicks]", r"share a book: use one \[budget\]"),
    ],
)
def test_a_pipeline_that_cannot_join_says_why(folder, tables, old, new, words):
    """Before anything is read of the sources, or paid."""
    text = TWO + TABLES + BOOK + REST + queries(one=JOINED)
    if new == "[budget.clicks]":
        text += "[budget.orders]\nepsilon = 1\ndelta = 1e-9\n"
    (folder / "p.toml").write_text(text.replace(old, new))

    with pytest.raises((InvalidInput, InvalidParameter), match=words):
        load_pipeline(folder / "p.toml")
