"""Functions of JSON, addresses, dates and lists: what a row gives, or NULL."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput
from dpstream.sql_compiler import compile_sql
from dpstream.sql_compiler.expressions import FUNCTIONS, known_functions
from tests.sql_compiler.test_expressions import ours
from tests.sql_compiler.test_refused import PRIVATE

DOCUMENT = '{"a": {"b": [1, "x", null, 2.50, true]}, "odd name": "y"}'
DAY, LATE = dt.date(2024, 1, 31), dt.datetime(2024, 3, 31, 1, 59, 59, 999_999)


def one(text, value=None, zone="UTC"):
    """The value of an expression of x."""
    (found,) = ours(text, pa.table({"x": pa.array([value])}), zone)
    return found


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("JSON_VALUE(x, '$.a.b[0]')", DOCUMENT, "1"),
        ("JSON_VALUE(x, '$.a.b[1]')", DOCUMENT, "x"),
        ("JSON_VALUE(x, '$.a.b[2]')", DOCUMENT, None),
        ("JSON_VALUE(x, '$.a.b[3]')", DOCUMENT, "2.5"),
        ("JSON_VALUE(x, '$.a.b[4]')", DOCUMENT, "true"),
        ("JSON_VALUE(x, '$.a.b[9]')", DOCUMENT, None),
        ("JSON_VALUE(x, '$.a')", DOCUMENT, None),
        ("JSON_VALUE(x, '$[''odd name'']')", DOCUMENT, "y"),
        ("JSON_QUERY(x, '$.a')", DOCUMENT, '{"b":[1,"x",null,2.5,true]}'),
        ("JSON_QUERY(x, '$.a.b[1]')", DOCUMENT, '"x"'),
        ("JSON_VALUE(x)", "12", "12"),
        ("JSON_VALUE(x)", "NaN", None),
        ("JSON_VALUE(x)", "{", None),
        ("JSON_VALUE(x)", '"\\ud800"', None),
        ("JSON_VALUE(x)", "1" * 5000, None),
        ("JSON_QUERY(x)", "[" * 90 + "]" * 90, "[" * 90 + "]" * 90),
        ("JSON_QUERY(x)", "[" * 101 + "]" * 101, None),
        ("JSON_QUERY(x)", "[" * 10**5, None),
        ("JSON_VALUE(x)", f'"{"[" * 300}"', "[" * 300),
        ("JSON_VALUE_ARRAY(x, '$.a.b')[OFFSET(1)]", DOCUMENT, "x"),
        ("JSON_QUERY_ARRAY(x, '$.a.b')[ORDINAL(2)]", DOCUMENT, '"x"'),
        ("ARRAY_LENGTH(x)", "[1, 2]", 2),
        ("ARRAY_LENGTH(SPLIT(x, ','))", "a,b,c", 3),
        ("ARRAY_LENGTH(x)", ["a", None], 2),
        ("x[SAFE_OFFSET(7)]", ["a"], None),
        ("NET.HOST(x)", "https://me@www.Ex.com:80/a?b#c", "www.Ex.com"),
        ("NET.HOST(x)", "www.ex.com/a", "www.ex.com"),
        ("NET.HOST(x)", "http://[::1]:80/", "[::1]"),
        ("NET.HOST(x)", "two words", None),
        ("PARSE_URL(x, 'QUERY', 'b')", "http://h/?a=1&b=2", "2"),
        ("PARSE_URL(x, 'PATH')", "http://h", None),
        ("REGEXP_LIKE(x, '^a')", "ab", True),
        ("x ~ '^a'", "ab", True),
        ("x !~ '^a'", "ab", False),
        ("NOT x ~ 'b$'", "ab", False),
        ("x ~* '^A' AND x RLIKE 'b'", "ab", True),
        ("x ~ '^a'", None, None),
        ("SPLIT_PART(x, '/', 2)", "a/b", "b"),
        ("SPLIT_PART(x, '/', 3)", "a/b", None),
        ("RANGE_BUCKET(x, [0, 10, 20])", 10, 2),
        ("RANGE_BUCKET(x, [0, 10, 20])", -0.5, 0),
        ("WIDTH_BUCKET(x, 0, 100, 10)", 99.5, 10),
        ("WIDTH_BUCKET(x, 0, 100, 10)", 100, 11),
        ("WIDTH_BUCKET(x, 0, 100, 10)", -1, 0),
        ("LPAD(x, 4, '0')", "12", "0012"),
        ("RPAD(x, 1)", "12", "1"),
    ],
)  # fmt: skip
def test_text(text, value, wanted):
    """JSON, addresses, lists and buckets."""
    assert one(text, value) == wanted


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("DATE_DIFF(x, DATE '2024-01-01', WEEK)", DAY, 4),
        ("DATE_DIFF(x, DATE '2024-01-01', ISOWEEK)", DAY, 4),
        ("DATE_DIFF(x, DATE '2023-12-31', YEAR)", DAY, 1),
        ("DATE_DIFF(x, '2024-02-01', MONTH)", DAY, -1),
        ("DATE_DIFF(x, DATE '1960-05-05', QUARTER)", DAY, 255),
        ("TIMESTAMP_DIFF(x, TIMESTAMP '2024-03-31 00:00:00.5', SECOND)", LATE, 7199),
        ("TIMESTAMP_DIFF(TIMESTAMP '2024-03-31', x, HOUR)", LATE, -1),
        ("DATEDIFF(HOUR, TIMESTAMP '2024-03-31 00:30:00', x)", LATE, 1),
        ("DATEDIFF('day', TIMESTAMP '2024-03-30 23:00:00', x)", LATE, 1),
        ("DATE_ADD(x, INTERVAL 1 MONTH)", DAY, dt.date(2024, 2, 29)),
        ("DATE_SUB(x, INTERVAL 1 YEAR)", DAY, dt.date(2023, 1, 31)),
        ("DATE_ADD(x, INTERVAL 9000 YEAR)", DAY, None),
        ("DATE_ADD(x, INTERVAL 9223372036854775807 DAY)", DAY, None),
        ("DATEADD(WEEK, -1, x)", DAY, dt.date(2024, 1, 24)),
        ("x + INTERVAL '1' DAY", DAY, dt.date(2024, 2, 1)),
        ("FORMAT_DATE('%F %j %a %b %e %%', x)", DAY, "2024-01-31 031 Wed Jan 31 %"),
        ("FORMAT_TIMESTAMP('%T', x)", LATE, "01:59:59"),
        ("FORMAT_TIMESTAMP('%F %R', x, 'Europe/Rome')", LATE, "2024-03-31 03:59"),
        ("DATE_FORMAT(x, 'yyyy/MM/dd HH:mm:ss')", LATE, "2024/03/31 01:59:59"),
        ("TO_CHAR(x, 'DD.MM.YYYY HH24:MI')", LATE, "31.03.2024 01:59"),
        ("PARSE_DATE('%d.%m.%y', x)", "29.02.24", dt.date(2024, 2, 29)),
        ("PARSE_DATE('%d.%m.%y', x)", "30.02.24", None),
        ("PARSE_DATE('%F', x)", "2024-02-29 ", dt.date(2024, 2, 29)),
        ("PARSE_DATE('%F', x)", "2024-02-29x", None),
        ("SAFE.PARSE_DATE('%B %d, %Y', x)", "AUGUST 1, 2024", dt.date(2024, 8, 1)),
        ("FORMAT_TIMESTAMP('%F %T', PARSE_TIMESTAMP('%d/%b/%Y:%T %z', x))",
         "01/Feb/2024:10:11:12 -0130", "2024-02-01 11:41:12"),
        ("FORMAT_TIMESTAMP('%F %T', PARSE_TIMESTAMP('%F %I:%M %p', x))",
         "2024-02-01 12:30 am", "2024-02-01 00:30:00"),
        ("UNIX_MICROS(PARSE_TIMESTAMP('%s', x))", "1", None),
        ("UNIX_SECONDS(x)", dt.datetime(1969, 12, 31, 23, 59, 59, 1), -1),
        ("YEAR(x) * 100 + MONTH(x)", LATE, 202403),
    ],
)  # fmt: skip
def test_times(text, value, wanted):
    """Differences, shifts and formats of days and instants."""
    if "'%s'" in text:
        with pytest.raises(ValueError, match="%s is not among"):
            one(text, value)
        return
    assert one(text, value) == wanted


def test_times_are_those_of_the_zone():
    """A day of the query's zone, not of UTC."""
    late = dt.datetime(2024, 1, 31, 23, 30, tzinfo=dt.UTC)

    assert one("FORMAT_DATE('%F', x)", late, "Europe/Rome") == "2024-02-01"
    assert one("DATEDIFF(DAY, DATE '2024-01-31', x)", late, "Europe/Rome") == 1
    assert one("UNIX_SECONDS(PARSE_TIMESTAMP('%F', x))", "2024-02-01", "Europe/Rome") == 1706742000


def test_dates_are_formatted_and_read_as_python_does():
    """On days of all months, with every part that both write."""
    rng = np.random.default_rng(1)
    days = [dt.date(1900, 1, 1) + dt.timedelta(int(n)) for n in rng.integers(0, 80_000, 200)]
    table = pa.table({"x": days})
    for form in ("%Y-%m-%d", "%j", "%a %A", "%b %B", "%u%w", "%V %G", "%U", "%y"):
        assert ours(f"FORMAT_DATE('{form}', x)", table) == [day.strftime(form) for day in days]
    for form in ("%Y%m%d", "%d %b %Y", "%B %d, %Y"):
        written = pa.table({"x": [day.strftime(form) for day in days]})
        assert ours(f"PARSE_DATE('{form}', x)", written) == days


def test_every_function_takes_null():
    """NULL in, NULL out, and no error; functions of constants alone are not among them."""
    constants = {int: "1", float: "1", str: "'x'", list: "[1]"}
    special = {"DATE_FORMAT": "'yyyy'", "TO_CHAR": "'YYYY'", "PARSE_URL": "'HOST'"}
    special |= {"JSON_VALUE": "'$'", "JSON_QUERY": "'$'"}
    for name, function in FUNCTIONS.items():
        words = [
            special.get(name, constants[function.constants[at]])
            if at in function.constants
            else "x"
            for at in range(function.least)
        ]
        if name == "WIDTH_BUCKET":
            words = ["x", "0", "1", "2"]
        found = ours(f"{name}({', '.join(words)})", pa.table({"x": pa.array([None], pa.string())}))
        assert found == ["x" if name == "never" else None], name
    assert set(FUNCTIONS) < set(known_functions())


ROWS = pa.table(
    {
        "user_id": list(range(400)),
        "tags": pa.array([["a", "b"], None, [], ["c", None, "a"]] * 100),
        "text": ["x,y", "y", None, ""] * 100,
        "json": ['{"i": [{"p": 1, "t": ["q"]}, {"p": 2, "t": []}]}', "[", None, "{}"] * 100,
    }
)


def prepared(text):
    return compile_sql(f"SELECT {PRIVATE} {text}").query.prepare(ROWS.slice(1, 5))


def test_each_item_of_a_list_is_a_row_of_the_same_unit():
    """Rows without items go, unless LEFT JOIN keeps them; places count from 0."""
    rows = prepared("tag, COUNT(*) FROM log, UNNEST(tags) AS tag GROUP BY tag")
    assert rows["tag"].to_pylist() == ["c", None, "a", "a", "b"]
    assert rows["user_id"].to_pylist() == [3, 3, 3, 4, 4]
    rows = prepared(
        "tag, n, COUNT(*) FROM log LEFT JOIN UNNEST(tags) AS tag WITH OFFSET AS n GROUP BY ALL"
    )
    assert rows["tag"].to_pylist() == [None, None, "c", None, "a", "a", "b", None]
    assert rows["n"].to_pylist() == [None, None, 0, 1, 2, 0, 1, None]
    rows = prepared("t, COUNT(*) FROM log, UNNEST(SPLIT(text, ',')) AS t WHERE t > 'x' GROUP BY t")
    assert rows["t"].to_pylist() == ["y", "y", "y"]


def test_of_a_long_list_the_first_items_are_read(monkeypatch):
    """However long it is; the lists after it are read as they are."""
    monkeypatch.setattr("dpstream.sql_compiler.unnest.MOST_ITEMS", 2)
    rows = prepared("tag, COUNT(*) FROM log, UNNEST(tags) AS tag GROUP BY tag")

    assert rows["tag"].to_pylist() == ["c", None, "a", "b"]


def test_lists_within_lists():
    """An item may hold a list itself."""
    rows = prepared(
        """JSON_VALUE(i, '$.p') AS p, k, COUNT(*) FROM log, UNNEST(JSON_QUERY_ARRAY(json, '$.i'))
        AS i LEFT JOIN UNNEST(JSON_VALUE_ARRAY(i, '$.t')) AS k GROUP BY p, k"""
    )

    assert rows.select(["p", "k"]).to_pylist() == [{"p": "1", "k": "q"}, {"p": "2", "k": None}]


def test_items_are_bounded_as_rows_are():
    """However long a list is, max_rows_per_group and max_groups_contributed hold for its unit."""
    rows = pa.table({"user_id": list(range(300)), "tags": [["a"] * 50 + list("bcdefgh")] * 300})
    query = dps.sql(
        """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 20, delta = 1e-9,
        privacy_unit_column = user_id, max_groups_contributed = 2, max_rows_per_group = 3)
        tag, COUNT(*) AS n FROM log, UNNEST(tags) AS tag GROUP BY tag"""
    )
    (release,) = dps.run(query, source=rows, ledger=dps.Ledger())

    assert release.num_rows == 8
    assert sum(release["n"].to_pylist()) < 300 * 6 + 100  # 8 groups, noise of a few
    assert "FROM EACH ROW, UNNEST(tags)" in dps.explain(query).text()
    assert "several rows of one" in dps.explain(query).text()


def test_a_list_is_no_value():
    """It is said what to write."""
    with pytest.raises(InvalidInput, match=r"UNNEST\(tags\)"):
        prepared("LOWER(tags) AS t, COUNT(*) FROM log GROUP BY t")


def test_group_by_all_is_every_column_that_is_no_aggregate():
    """The same query as with the columns listed."""
    text = f"SELECT {PRIVATE} LOWER(text) AS t, tags, 1 + COUNT(*) AS n, COUNT(*) AS m FROM log "

    listed, everything = (dps.sql(text + end) for end in ("GROUP BY t, tags", "GROUP BY ALL"))
    assert listed.facts() == everything.facts()


def test_star_except_and_replace():
    """Columns that are left out are not there; others are as they were."""
    text = f"SELECT {PRIVATE} t, COUNT(*) AS n FROM (SELECT {{}} FROM log) GROUP BY t"
    plain = dps.sql(text.format("user_id, UPPER(text) AS t"))

    assert dps.sql(text.format("* EXCEPT (tags), UPPER(text) AS t")).facts() == plain.facts()
    assert dps.sql(text.format("* REPLACE (UPPER(text) AS t)")).facts() == plain.facts()
