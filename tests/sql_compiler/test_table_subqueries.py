"""Subqueries in expressions over public tables: x IN (SELECT ...), and single values."""

import pyarrow as pa
import pytest
from pyarrow import csv

import dpstream as dps
from dpstream.errors import InvalidParameter
from tests.sql_compiler.test_refused import PRIVATE
from tests.sql_compiler.test_run import DAY, private, released

LOG = pa.table(
    {
        "user_id": [1, 2, 3, 4],
        "page": ["home", "news", None, "12"],
        "value": [5, 50, 500, 9],
        "tags": [["a"], ["b", "c"], [], None],
    }
)
PAGES = pa.table({"page": ["home", "home", "x"], "price": [3, 70, 20]})
HOLES = pa.table({"page": ["home", None], "price": [3, 70]})
NUMBERS = pa.table({"page": [12.0, 7.0], "price": ["9", "10"]})
STAFF = pa.table({"who": [2, 9]})

KNOWN = "COUNT(*) AS n FROM log WHERE page IN (SELECT page FROM pages)"


def looked_up(expression, source=LOG, **tables):
    """The values of an expression beside each row."""
    query = dps.sql(f"SELECT {PRIVATE} {expression} AS x, COUNT(*) AS n FROM log GROUP BY x")
    given = {"pages": PAGES, "holes": HOLES, "numbers": NUMBERS, "staff": STAFF} | tables
    query = dps.with_tables(query, public=given)
    return query.prepare(source.select(query.source_columns))["x"].to_pylist()


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("page IN (SELECT page FROM pages)", [True, False, None, False]),
        ("page NOT IN (SELECT page FROM pages)", [False, True, None, True]),
        ("page IN (SELECT DISTINCT page FROM pages WHERE price > 50)", [True, False, None, False]),
        ("page IN (SELECT page FROM pages WHERE price > 500)", [False] * 4),
        ("page IN (SELECT page FROM holes)", [True, None, None, None]),
        ("page NOT IN (SELECT page FROM holes)", [False, None, None, None]),
        ("page IN (SELECT page FROM numbers)", [None, None, None, True]),
        ("user_id IN (SELECT who FROM staff)", [False, True, False, False]),
        ("UPPER(page) IN (SELECT UPPER(page) FROM pages)", [True, False, None, False]),
        ("value > (SELECT MAX(price) FROM pages)", [False, False, True, False]),
        ("value > (SELECT MAX(price) FROM numbers)", [False, True, True, False]),
        ("value - (SELECT MIN(price) FROM pages WHERE page = 'home')", [2, 47, 497, 6]),
        ("(SELECT price FROM pages WHERE page = 'x') + value", [25, 70, 520, 29]),
        ("value > (SELECT price FROM pages WHERE page = 'none')", [None] * 4),
        ("(SELECT COUNT(*) FROM pages) + value", [8, 53, 503, 12]),
        ("(SELECT COUNT(page) FROM holes) + value", [6, 51, 501, 10]),
        ("(SELECT COUNT(DISTINCT page) FROM pages) + value", [7, 52, 502, 11]),
        ("(SELECT AVG(price) FROM pages) + 0 * value", [31.0] * 4),
        (
            "value < 2 * (SELECT SUM(price) FROM pages WHERE page = 'home')",
            [True, True, False, True],
        ),
    ],
)
def test_values_are_looked_up_beside_each_row(expression, wanted):
    """As SQL has it, with its three truths; `value`, a name of ours, stays the stream's."""
    assert looked_up(expression) == wanted


def test_rows_are_filtered_by_a_public_table_beside_joins_lists_and_windows():
    """In WHERE, in a subquery of FROM, in an aggregate, beside a join and UNNEST."""
    rows = pa.table(
        {
            "user_id": range(3000),
            "page": ["home", "news", "x"] * 1000,
            "tags": [["a", "b"]] * 3000,
            "ts": ["2024-05-01T10:00:00"] * 3000,
        }
    )
    text = f"""
        SELECT {private(DAY)} kind, tag, COUNT(*) AS n,
               COUNTIF(page IN (SELECT page FROM pages)) AS known
        FROM TUMBLE((SELECT * FROM log WHERE page IN (SELECT page FROM pages)), DESCRIPTOR(ts),
                    INTERVAL '1' DAY)
        JOIN kinds USING (page), UNNEST(tags) AS tag
        WHERE user_id NOT IN (SELECT who FROM staff)
              AND user_id < (SELECT SUM(price) FROM pages) * 20
        GROUP BY kind, tag, window_start"""
    kinds = pa.table({"page": ["home", "news", "x"], "kind": ["k", "l", "m"]})
    tables = {"pages": PAGES, "kinds": kinds, "staff": STAFF}
    (found,) = released(dps.with_tables(dps.sql(text), public=tables), source=rows)

    there = sorted(zip(*(found[name].to_pylist() for name in ("kind", "tag")), strict=True))
    assert there == [("k", "a"), ("k", "b"), ("m", "a"), ("m", "b")]
    assert all(abs(n - 620) < 60 for n in found["n"].to_pylist())  # 1 in 3 of user_id < 1860
    assert all(abs(n - 620) < 60 for n in found["known"].to_pylist())


def test_one_value_of_many_rows_is_refused_before_anything_runs(tmp_path):
    """And a table that is not declared, a registry, and a column that is not there."""
    csv.write_csv(PAGES, tmp_path / "pages.csv")
    query = dps.sql(
        f"SELECT {PRIVATE} COUNT(*) AS n FROM log WHERE value > (SELECT price FROM pages)"
    )
    with pytest.raises(InvalidParameter, match="selects 3 rows, and one value"):
        dps.with_tables(query, public={"pages": tmp_path / "pages.csv"})
    with pytest.raises(InvalidParameter, match="--public pages=FILE"):
        dps.with_tables(query)
    with pytest.raises(InvalidParameter, match="join it on the privacy unit"):
        dps.with_tables(query, registry={"pages": tmp_path / "pages.csv"})
    with pytest.raises(InvalidParameter, match="no column 'price'; it has page"):
        dps.with_tables(query, public={"pages": PAGES.select(["page"])})


def test_explain_says_what_is_looked_up():
    """The table, its digest, and that no row is dropped or repeated by it."""
    query = dps.sql(
        f"SELECT {PRIVATE} COUNT(*) AS n FROM log WHERE page IN (SELECT page FROM pages)"
    )
    text = dps.explain(dps.with_tables(query, public={"pages": PAGES})).text()

    assert "look into the public table pages (3 rows, SHA-256" in text
    assert "no row is dropped or repeated" in text


def test_arms_of_a_test_are_groups_where_they_are_public():
    """Computed of the unit; the unit itself is no group, nor are arms that nobody has named."""
    rows = pa.table({"user_id": range(1000)})
    options = "epsilon = 9, privacy_unit_column = user_id, max_groups_contributed = 1"
    text = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({}) {} AS arm, COUNT(*) AS n FROM log "
    text += "GROUP BY arm"
    arms = f"{options}, public_groups = (0, 1)"
    (found,) = released(dps.sql(text.format(arms, "MOD(user_id, 2)")), source=rows)

    assert sorted(found["arm"].to_pylist()) == [0, 1]
    assert all(abs(n - 500) < 20 for n in found["n"].to_pylist())
    for refused in (
        text.format(arms, "user_id"),
        text.format(f"{options}, delta = 1e-9", "MOD(user_id, 2)"),
    ):
        with pytest.raises(InvalidParameter, match="groups would show units"):
            dps.sql(refused)


def test_another_table_is_another_query():
    """What fixes a run has the digests of tables that are looked into."""
    query = dps.sql(
        f"SELECT {PRIVATE} COUNT(*) AS n FROM log WHERE page IN (SELECT page FROM pages)"
    )
    one, same, other = (
        dps.with_tables(query, public={"pages": table}).prepare.text
        for table in (PAGES, PAGES.take([2, 0, 1]), HOLES)
    )

    assert one == same != other
