"""What people type in Python: SQL as it is, records, frames, notebooks, event loops."""

import asyncio
import inspect
import re
import warnings

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.mechanisms import Uniform

COUNT = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-9,
    privacy_unit_column = user, max_groups_contributed = 1, max_rows_per_group = 1)
    page, COUNT(*) AS visitors, SUM(seconds, contribution_bounds_per_row => (0, 9)) AS seconds
    FROM clicks GROUP BY page"""
RECORDS = [{"user": f"u{n}", "page": "/home", "seconds": n % 9} for n in range(400)]


def run(query=COUNT, source=RECORDS):
    return dps.run(query, source=source, secret=b"s" * 32, options=fixed())


def fixed():
    return dps.EngineOptions(run_id=b"r" * 16)


def test_sql_and_records_are_enough():
    """As the same rows in an Arrow table."""
    found = run().collect()
    (row,) = found.table.to_pylist()

    assert row["page"] == "/home"
    assert abs(row["visitors"] - 400) < 60
    assert abs(row["seconds"] - sum(n % 9 for n in range(400))) < 900
    as_table = run(dps.sql(COUNT), pa.Table.from_pylist(RECORDS)).collect()
    assert as_table.table.equals(found.table)


def test_records_lose_no_row_in_silence():
    """What a row lacks is null; a value that is no value of a column is rejected with its row."""
    rows = [*RECORDS, {"user": "v", "seconds": 3}, {"user": "w", "page": ["x"], "seconds": 1}]
    running = run(source=rows)
    running.finish()

    assert running.operator.counts()["rejected"] == 1
    with pytest.raises(dps.errors.InvalidInput, match="of the type list, which are no") as refused:
        run(source=[{"user": ["secret"], "page": "/"}])
    assert "secret" not in str(refused.value)


def test_releases_are_read_by_anything_that_reads_arrow():
    """Polars, DuckDB, pyarrow; of queries and of series; and they are sources again."""
    found = run().collect()
    series = dps.release(Uniform(epsilon=1, window=4), [[1, 3]] * 4)

    assert pl.DataFrame(series).columns == [*series.columns()]
    for each, columns in ((found, found.table.column_names), (series, [*series.columns()])):
        assert pa.table(each).equals(each.table)
        assert duckdb.sql("SELECT * FROM each").columns == columns


def test_a_ledger_is_good_in_a_notebook():
    """Its books, with what is spent of them."""
    query, book = dps.sql(COUNT), dps.Ledger()
    book.open("stream", query.promise(epsilon=16, delta=1e-8))
    assert "<td>0</td>" in book._repr_html_()
    dps.run(query, source=RECORDS, ledger=book).finish()
    assert "<td>stream</td>" in book._repr_html_()
    runs, spent = re.findall(r"<td>([\d.]+)</td>", book._repr_html_())
    assert (runs, 0 < float(spent) < 1) == ("1", True)


def test_a_series_is_good_in_a_notebook(tmp_path):
    """HTML with error bars, and a chart by one word."""
    series = dps.release(Uniform(epsilon=1, window=4), [[5, 7]] * 30)

    assert "30 steps, 30 paid for" in series._repr_html_()
    assert "±" in series._repr_html_()
    assert "and 10 more rows" in series._repr_html_()
    series.plot(tmp_path / "x.png", column="b1")
    assert (tmp_path / "x.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no column 'b2' to draw; there are b0, b1"):
        series.plot(column="b2")


def test_windows_stand_at_their_start():
    """A window of 1 January is drawn at 1 January, not at its end."""
    query = dps.Query(
        privacy_unit_column="user", epsilon=8, delta=1e-6, time_column="at", start="2026-01-01",
        end="2026-01-03", window=dps.Tumble("1 day"), keys=("page",), public_groups=["/home"],
        max_groups_contributed=1,
    )  # fmt: skip
    rows = [{"user": "u", "page": "/home", "at": f"2026-01-0{d} 12:00:00"} for d in (1, 2)]
    figure = run(query, rows).collect().plot()
    (line,) = figure.axes[0].lines

    assert [str(x)[:10] for x in line.get_xdata()] == ["2026-01-01", "2026-01-02"]


def test_releases_in_an_event_loop():
    """Other tasks go on meanwhile; leaving early leaves a run that is closed."""

    async def collect():
        return [table async for table in run()]

    async def leave():
        running = run()
        async for _ in running:
            break
        return running

    assert asyncio.run(collect())[0].equals(run().collect()[0])
    asyncio.run(leave()).close()


def test_python_warns_as_the_command_line_does():
    """A count of one row per unit and group is said where the query is written."""
    text = COUNT.replace(", max_rows_per_group = 1", "")
    for written in (lambda: dps.sql(text), lambda: run(text)):
        with pytest.warns(dps.errors.DpstreamWarning, match="one row of each 'user'") as told:
            written()
        assert told[0].filename == __file__


class Capsule:
    """What offers itself as an Arrow stream, and nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def forms(table):
    """The same rows in every form that people have them in."""
    con = duckdb.connect()
    con.register("rows", table)
    return {
        "arrow": table,
        "batch": table.combine_chunks().to_batches()[0],
        "reader": table.to_reader(),
        "capsule": Capsule(table),
        "pandas": table.to_pandas(),
        "polars": pl.from_arrow(table),
        "lazy": pl.from_arrow(table).lazy(),
        "duckdb": con.sql("SELECT * FROM rows"),
        "dicts": table.to_pylist(),
        "dict": table.to_pydict(),
    }


SERIES = ["arrow", "capsule", "pandas", "polars", "lazy", "duckdb", "dicts", "dict"]
KINDS = [*SERIES, "batch", "reader"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_every_form(kind):
    """With the same releases; a name before the form is that of its table."""
    table = pa.Table.from_pylist(RECORDS)
    expected = run(source=table).collect().table

    assert run(source=forms(table)[kind]).collect().table.equals(expected)
    assert run(source={"clicks": forms(table)[kind]}).collect().table.equals(expected)


@pytest.mark.parametrize("kind", SERIES)
def test_series_come_in_every_form(kind):
    """With their columns' names."""
    table = pa.table({"a": [1, 2, 3], "b": [5, 6, 7]})
    found = dps.release(Uniform(epsilon=1, window=2), forms(table)[kind], secret=b"s" * 32)

    assert (found.names, len(found)) == (["a", "b"], 3)


SECRET = "Erika Mustermann"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"user": SECRET, "page": "x"}, "a list of values for each column"),
        ({"user": [SECRET], "page": []}, "user: 1, page: 0"),
        ({"user": [SECRET], "seconds": [[SECRET]]}, "of the type list"),
        (iter([{"user": SECRET}]), "an object of the type list_iterator"),
        ([[SECRET, 3]], "an object of the type list"),
        (pl.Series([SECRET]), "one column alone"),
        (pa.table({"user": [SECRET], "page": [[SECRET]], "seconds": [1]}), "list"),
        (pl.DataFrame({"user": [SECRET], "page": [{"a": SECRET}], "seconds": [1]}), "struct"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_errors_print_no_rows(source, words):
    """They say kinds, names and lengths: an error goes into logs and tickets."""
    with pytest.raises(dps.DpstreamError, match=words) as refused:
        run(source=source).collect()
    assert SECRET not in str(refused.value)


def test_errors_of_series_print_no_rows():
    """A row of another length is told by its place."""
    with pytest.raises(dps.errors.InvalidInput, match="row 1 has 1") as refused:
        dps.release(Uniform(epsilon=1, window=2), [[1, 2], [987_654]])
    assert "987" not in str(refused.value)
    with pytest.raises(dps.errors.InvalidInput, match=r"dps\.read\(path\)"):
        dps.release(Uniform(epsilon=1, window=2), "visits.csv")


def test_files_are_read_to_be_looked_at(tmp_path):
    """Texts that are all numbers, dates or times are those; lines that are no rows are counted."""
    lines = ["id,day,at,n,x,note", "007,2026-01-02,2026-01-02 03:04:05,5,1.5,a", "008,,,,,"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    table = dps.read(tmp_path / "a.csv")

    assert [str(field.type) for field in table.schema] == [
        "string", "date32[day]", "timestamp[us]", "int64", "double", "string",
    ]  # fmt: skip
    assert dps.read(tmp_path / "a.csv", columns=["n"], rows=1).to_pylist() == [{"n": 5}]
    assert dps.read(table).equals(table)
    series = dps.read(tmp_path / "a.csv", rows=1, columns=["n"])
    assert dps.release(Uniform(epsilon=1, window=2), series).names == ["n"]
    (tmp_path / "b.csv").write_text(f"user,n\na,1\nb,2,{SECRET}\n")
    with pytest.warns(dps.errors.UnexpectedResult, match="1 rows could not .*line 3") as told:
        assert dps.read(tmp_path / "b.csv").to_pylist() == [{"user": "a", "n": 1}]
    assert SECRET not in str(told[0].message)
    with pytest.raises(dps.errors.InvalidParameter, match="goes on for ever"):
        dps.read("-")
    with pytest.raises(dps.errors.InvalidParameter, match="rows must be"):
        dps.read(table, rows=0)
    for columns in ("n", []):
        with pytest.raises(dps.errors.InvalidParameter, match="columns must be a list"):
            dps.read(table, columns=columns)


@pytest.mark.parametrize(
    "ids", [["12345678901234567890123", "12345678901234567890124"], ["007", "1.5"]]
)
def test_ids_in_digits_that_no_number_holds_stay_text(tmp_path, ids):
    """As floats two of them would be one, or lose their zeros."""
    (tmp_path / "ids.csv").write_text("\n".join(["id,n", *(f"{each},1.5" for each in ids)]))

    assert dps.read(tmp_path / "ids.csv").to_pydict() == {"id": ids, "n": [1.5, 1.5]}


def test_every_public_name_has_an_example():
    """`help` shows how a name is used; the examples are run as tests."""
    names = [getattr(dps, name) for name in dps.__all__ if name[0] != "_"]
    asked = [one for one in names if not inspect.ismodule(one)]
    asked += [dps.mechanisms.find(name) for name in dps.mechanisms.REGISTRY]
    missing = [one.__name__ for one in asked if ">>>" not in (inspect.getdoc(one) or "")]

    assert missing == []
    assert len(asked) > 60


def test_a_run_at_its_end_says_so(tmp_path):
    """A notebook that is run once more gets no empty table without a word."""
    how = {"source": RECORDS, "state": tmp_path / "state", "sink": str(tmp_path / "out")}
    first = dps.run(COUNT, **how).collect()
    with pytest.warns(dps.errors.UnexpectedResult, match="none comes twice; its sink has them"):
        assert len(dps.run(COUNT, **how).collect()) == 0
    assert dps.read(tmp_path / "out")["page"].to_pylist() == first.table["page"].to_pylist()


def test_a_query_comes_first():
    """Data in its place are told by their kind; the source may follow without its name."""
    with pytest.raises(dps.errors.InvalidParameter, match=r"takes the query first.*DataFrame"):
        dps.run(pl.DataFrame(RECORDS))
    with pytest.raises(dps.errors.InvalidParameter, match=r"SELECT.*got an object of type list"):
        dps.run_all([RECORDS], source=RECORDS)
    asked = dps.run(COUNT, RECORDS, secret=b"s" * 32, options=fixed())
    assert asked.collect().table.equals(run().collect().table)


def test_several_texts_run_together():
    """Named by their places; they pay from one book that has room for all, or from the given."""
    settings = {"source": RECORDS, "secret": b"s" * 32}
    found = dps.run_all([COUNT, COUNT.replace("= 8", "= 2")], **settings).collect()

    assert [*found] == ["query_1", "query_2"]
    first, second = (found[name].table["visitors"][0].as_py() for name in found)
    assert abs(first - 400) < 60
    assert abs(second - 400) < 240
    small = dps.Ledger()
    small.open("clicks", dps.sql(COUNT).promise(epsilon=8, delta=1e-8))
    with pytest.raises(dps.errors.BudgetExceeded, match="query_2"):
        dps.run_all([COUNT, COUNT], ledger=small, dataset="clicks", **settings)


REJECTED = [*RECORDS, {"user": "w", "page": ["secret"], "seconds": 1}]


def test_what_the_command_line_warns_of_is_a_warning_here(tmp_path, monkeypatch):
    """Of rows that are lost no value is told. Files that are quarantined, too."""
    monkeypatch.setattr("dpstream.privacy.ledger.ledger._warned", False)
    once = COUNT.replace(", max_rows_per_group = 1", "")
    with pytest.warns(dps.errors.DpstreamWarning) as told:
        dps.run(once.replace("= 8", "= 24"), source=REJECTED, secret=b"s" * 32).finish()
    words = [str(each.message) for each in told]
    for expected in (
        "one row of each 'user' and group",  # remarks of a query
        "epsilon = 24 protects nobody",
        "the budget of this query is forgotten afterwards",  # tell_storage
        "1 of 401 rows read since this start could not be used",  # tell_operator
    ):
        assert sum(expected in each for each in words) == 1, words
    assert not any("secret" in each for each in words)

    facts = {"privacy_unit_column": "user", "keys": ["page"], "max_groups_contributed": 1}
    byhand = dps.Query(name="byhand", epsilon=24, delta=1e-9, **facts)
    with pytest.warns(dps.errors.DpstreamWarning) as told:
        dps.run(byhand, source=RECORDS, ledger=tmp_path / "book").finish()
    words = [str(each.message) for each in told]
    for expected in (
        "byhand: epsilon = 24 protects nobody",
        "without a state directory this query",
    ):
        assert sum(expected in each for each in words) == 1, words
    with warnings.catch_warnings():
        warnings.simplefilter("error", dps.errors.UnexpectedResult)
        dps.run(dps.sql(COUNT), source=RECORDS, ledger=dps.Ledger()).finish()

    (tmp_path / "a.csv").write_text("user,page,seconds\n" + "u,/home,1\n" * 50)
    (tmp_path / "b.csv").write_text("other\n1\n")
    with pytest.warns(dps.errors.DpstreamWarning, match=r"b\.csv is quarantined"):
        dps.run(COUNT, source=str(tmp_path / "*.csv")).finish()


def test_a_run_that_takes_over_or_begins_later_says_so(tmp_path):
    """As the command line does, at its first start."""
    daily = COUNT.replace("max_groups", "privacy_unit_period = INTERVAL '1' DAY, max_groups")
    daily = daily.replace(
        "= 1)", "= 1, time_column = at, start = '2024-05-01', end = '2024-05-02')"
    )
    rows = [row | {"at": "2024-05-01T10:00"} for row in RECORDS]
    how = {"source": rows, "ledger": tmp_path / "book", "secret": b"s" * 32}
    dps.run(daily, **how, state=tmp_path / "one").finish()
    (tmp_path / "one").rename(tmp_path / "lost")
    later = (
        daily.replace("05-02", "05-04").replace(
            "FROM clicks", "FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY)"
        )
        + ", window_start"
    )
    with pytest.warns(dps.errors.UnexpectedResult, match="takes over from run"):
        dps.run(later, **how, state=tmp_path / "two", take_over=True, anyway=True)
    (tmp_path / "new").mkdir()
    ahead = dps.sql(later.replace("2024", "2094"), name="ahead")
    ahead = how | {"source": str(tmp_path / "new"), "live": True, "query": ahead}
    with pytest.warns(dps.errors.UnexpectedResult, match="first trigger of 'ahead'.*is held from"):
        dps.run(**ahead, state=tmp_path / "three")
    with pytest.warns(dps.errors.UnexpectedResult, match="first trigger of 'ahead'.*is not held"):
        dps.run(**ahead)


@pytest.mark.parametrize("every", ["D", "h"])
@pytest.mark.parametrize("kind", ["series", "polars", "arrow", "records"])
def test_times_of_a_zone_are_steps_through_a_change_of_the_clock(kind, every):
    """Days as the clock shows them, hours as they pass; the times come back with their zone."""
    import pandas as pd

    times = pd.date_range("2026-03-27", periods=80, freq=every, tz="Europe/Madrid")
    visits = pd.Series(range(80), index=times, name="visits")
    frame = visits.rename_axis("at").reset_index()
    data = {
        "series": visits,
        "polars": pl.from_pandas(frame),
        "arrow": pa.Table.from_pandas(frame, preserve_index=False),
        "records": frame.to_dict("records"),
    }[kind]
    found = dps.release(Uniform(epsilon=1, window=2), data)

    assert len(found) == 80
    assert list(pd.to_datetime(found.to_pandas()["time"])) == list(times)
    with pytest.raises(dps.errors.InvalidInput, match="evenly spaced"):
        dps.release(Uniform(epsilon=1, window=2), visits.drop(visits.index[40]))


def test_a_series_of_pandas_keeps_its_name_and_times():
    """As a frame with that column does; what is printed of the result is a line."""
    import pandas as pd

    hours = pd.date_range("2026-01-01", periods=4, freq="h")
    visits = pd.Series([5, 7, 6, 9], index=hours, name="visits")
    found = dps.release(Uniform(epsilon=1, window=2), visits)

    assert list(found.columns()) == ["step", "time", "visits", "visits_stddev", "paid", "held"]
    assert repr(found) == "<Series: 4 steps, 4 paid for, of visits>"
    assert dps.release(Uniform(epsilon=1, window=2), pd.Series([1, 2])).names == ["value"]
