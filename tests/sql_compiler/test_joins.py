"""JOIN to tables that are read whole: which rows meet, which names mean what, what is refused."""

import pyarrow as pa
import pytest
from pyarrow import csv

import dpstream as dps
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy.state import Secret
from dpstream.rows.row_reader import RowReader
from tests.sql_compiler.test_refused import PRIVATE
from tests.sql_compiler.test_run import DAY, log, private, released

CLICKS = pa.table(
    {
        "user_id": [1, 2, 3, 4],
        "page": ["a", "c", "zz", None],
        "country": ["de", "FR", "FR", "XX"],
        "name": ["n1", "n2", "n3", "n4"],
    }
)
PAGES = pa.table({"page": ["a", "b", "c", "c", None], "category": ["x", "y", "z", "w", "no"]})
CODES = pa.table({"iso": ["DE", "FR"], "name": ["Germany", "France"], "page": ["p", "q"]})


def joined(text, source=CLICKS, **tables):
    """The rows that a query reads, after its joins: tuples without the unit."""
    query = dps.sql(f"SELECT {PRIVATE} {text}")
    query = dps.with_tables(query, public={"pages": PAGES, "codes": CODES} | tables)
    rows = query.prepare(source.select(query.source_columns))
    return [tuple(row[key] for key in query.keys) for row in rows.to_pylist()]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "category, COUNT(*) AS n FROM clicks JOIN pages USING (page) GROUP BY category",
            [("x",), ("z",), ("w",)],
        ),
        (
            (
                "category, COUNT(*) AS n FROM clicks LEFT JOIN pages ON clicks.page = pages.page "
                "GROUP BY category"
            ),
            [("x",), ("z",), ("w",), (None,), (None,)],
        ),
        (
            (
                "c.name, category, COUNT(*) AS n FROM clicks JOIN pages USING (page) "
                "JOIN codes AS c ON UPPER(clicks.country) = c.iso GROUP BY c.name, category"
            ),
            [("Germany", "x"), ("France", "z"), ("France", "w")],
        ),
        (
            (
                "name, COUNT(*) AS n FROM (SELECT user_id, LOWER(pages.category) AS name FROM "
                "clicks JOIN pages USING (page) WHERE pages.category <> 'w') GROUP BY name"
            ),
            [("x",), ("z",)],
        ),
        (
            (
                "up, COUNT(*) AS n FROM clicks JOIN (SELECT page, UPPER(category) AS up FROM pages "
                "WHERE category <> 'w') AS p USING (page) GROUP BY up"
            ),
            [("X",), ("Z",)],
        ),
        (
            (
                "clicks.name, COUNT(*) AS n FROM clicks JOIN codes ON clicks.country = codes.iso "
                "GROUP BY clicks.name"
            ),
            [("n2",), ("n3",)],
        ),
        (
            "page, COUNT(*) AS n FROM clicks LEFT JOIN pages USING (page) GROUP BY page",
            [("a",), ("c",), ("c",), ("zz",), (None,)],
        ),
        (
            (
                "iso, COUNT(*) AS n FROM (SELECT user_id, page FROM clicks) AS c "
                "LEFT JOIN codes ON c.page = codes.page GROUP BY iso"
            ),
            [(None,)] * 4,
        ),
    ],
)
def test_rows_meet_the_rows_that_are_equal(text, rows):
    """Inner drops a row without a match, LEFT keeps it; NULL equals nothing."""
    assert joined(text) == rows


def test_a_common_table_may_join():
    """WITH is written into the query, its join too."""
    text = f"""
        WITH j AS (SELECT user_id, ts, category FROM clicks JOIN pages USING (page))
        SELECT {private(DAY)} category, window_start, COUNT(*) AS n
        FROM TUMBLE(j, DESCRIPTOR(ts), INTERVAL '1' DAY) GROUP BY category, window_start"""
    query = dps.with_tables(dps.sql(text), public={"pages": PAGES})

    assert query.source_columns == ["page", "user_id", "ts"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.float64(), pa.decimal128(9, 2)])
def test_keys_are_equal_by_value(kind):
    """Whatever types they come in: a CSV file's "5" meets a 5 of Parquet."""
    table = pa.table({"page": pa.array(["5", "6"]).cast(kind), "category": ["five", "six"]})
    source = pa.table({"user_id": [1, 2, 3], "page": ["5", "7", "no number"]})
    text = "category, COUNT(*) AS n FROM clicks JOIN pages USING (page) GROUP BY category"

    assert joined(text, source, pages=table) == [("five",)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x, COUNT(*) AS n FROM clicks JOIN other USING (page) GROUP BY x", "'other' is joined"),
        (
            "x, COUNT(*) AS n FROM clicks JOIN pages ON clicks.page = pages.x GROUP BY x",
            "the table 'pages' has no column 'x'; it has page, category",
        ),
        (
            "pages.x, COUNT(*) AS n FROM clicks JOIN pages USING (page) GROUP BY pages.x",
            "the table 'pages' has no column 'x'",
        ),
        (
            "name, COUNT(*) AS n FROM clicks JOIN codes ON clicks.name = codes.name GROUP BY name",
            "'name' is in clicks and codes; write it with the name of its table",
        ),
        (
            (
                "name, COUNT(*) AS n FROM clicks JOIN codes ON clicks.country = codes.iso "
                "JOIN codes AS d ON clicks.country = d.iso GROUP BY name"
            ),
            "'name' is in codes and d",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_before_a_row_is_read(text, words):
    """With the tables at hand, and a way out."""
    with pytest.raises(InvalidParameter, match=words):
        joined(text)


def test_types_that_are_never_equal_are_refused():
    """By the types alone, before anything is paid for."""
    times = pa.table({"page": pa.array([0], pa.timestamp("us")), "category": ["x"]})
    query = dps.sql(
        f"SELECT {PRIVATE} category, COUNT(*) AS n FROM clicks JOIN pages USING (page) "
        "GROUP BY category"
    )
    source = pa.table({"user_id": [1], "page": [True]})

    with pytest.raises(InvalidInput, match="they are never equal"):
        dps.run(query, source=source, public={"pages": times}, ledger=dps.Ledger())


def test_a_row_that_would_meet_too_many_is_refused():
    """Rows take memory before they are bounded."""
    many = pa.table({"page": ["a"] * 10_001, "category": ["x"] * 10_001})

    with pytest.raises(InvalidInput, match="a row may meet 10001 rows of pages"):
        joined(
            "category, COUNT(*) AS n FROM clicks JOIN pages USING (page) GROUP BY category",
            pages=many,
        )


def row_digests(query, source):
    """One for each row, over all that the engine keeps of it."""
    reader = RowReader(query, Secret.of(bytes(32)), bytes(16))
    table = source.select(query.source_columns)
    reader.learn({field.name: field.type for field in table.schema})
    return sorted(map(tuple, reader.read(table, "")[0].digests.tolist()))


def test_joined_rows_are_those_of_a_stream_that_was_joined_before():
    """Ids, groups and values; so what is published of them differs in nothing but its noise."""
    clicks = log(4_000, 400)
    pages = pa.table({"page": ["/A/x", "/b/y", "/A/z"], "section": ["A", "b", "A"]})
    sections = dict(zip(*pages.to_pydict().values(), strict=True))
    keep = pa.array([page in sections for page in clicks["page"].to_pylist()])
    beforehand = clicks.filter(keep)
    known = pa.array([sections[page] for page in beforehand["page"].to_pylist()])
    text = "section, COUNT(*) AS n, SUM(seconds, contribution_bounds_per_row => (0, 9)) AS s FROM "
    after = dps.sql(f"SELECT {PRIVATE} {text} log JOIN pages USING (page) GROUP BY section")
    before = dps.sql(f"SELECT {PRIVATE} {text} log GROUP BY section")

    ours = row_digests(dps.with_tables(after, public={"pages": pages}), clicks)
    theirs = row_digests(before, beforehand.append_column("section", known))

    assert len(ours) == len(beforehand)
    assert ours == theirs


def test_a_changed_table_is_another_query(tmp_path):
    """A run that goes on joins the table that it began with, in any order of its rows."""
    text = (
        f"SELECT {private(DAY)} section, window_start, COUNT(*) AS n FROM TUMBLE(log, "
        "DESCRIPTOR(ts), INTERVAL '12' HOUR) JOIN pages USING (page) GROUP BY section, window_start"
    )
    pages = pa.table({"page": ["/A/x", "/b/y"], "section": ["A", "b"]})
    csv.write_csv(pages, tmp_path / "pages.csv")
    query, clicks = dps.sql(text), log(2_000, 400)

    def go_on():
        return dps.run(
            query,
            source=clicks,
            public={"pages": tmp_path / "pages.csv"},
            state=tmp_path / "state",
            ledger=tmp_path / "ledger",
            sink=tmp_path / "out",
        ).finish()

    go_on()
    csv.write_csv(pages.take([1, 0]), tmp_path / "pages.csv")
    go_on()
    changed = pa.table({"page": ["/A/x", "/b/y"], "section": ["A", "c"]})
    csv.write_csv(changed, tmp_path / "pages.csv")
    with pytest.raises(StateError, match="the table 'pages' has changed since the run"):
        go_on()


def test_explain_says_how_many_rows_one_becomes():
    """And what the tables are; of a registry nothing is told that its rows tell."""
    text = f"""SELECT {PRIVATE[:-1]}, privacy_unit_period = INTERVAL '1' DAY, {DAY})
        category, plan, window_start, COUNT(*) AS n
        FROM TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' DAY)
        JOIN pages USING (page) JOIN users USING (user_id) GROUP BY category, plan, window_start"""
    users = pa.table({"user_id": [7, 7, 7], "plan": ["free", "pro", "old"]})
    query = dps.with_tables(dps.sql(text), public={"pages": PAGES}, registry={"users": users})
    told = dps.explain(query).text()

    assert "to the public table pages (5 rows, SHA-256" in told
    assert "a row becomes at most 2 rows of the same unit" in told
    assert "to the registry users on the unit (user_id)" in told
    assert "what the registry users says of a user, over several periods together" in told
    assert "the table pages: it was declared public" in told
    assert query.prepare.tables[1].digest[:16] not in told
    assert "3 rows" not in told


KEYS = {
    "TABLE pages": [("a",), ("b",), ("c",), (None,)],
    "(SELECT LOWER(category) AS c FROM pages WHERE page = 'c')": [("z",), ("w",)],
    "GENERATE_ARRAY(1, 7, 3)": [(1,), (4,), (7,)],
    "PRODUCT(('x', 'y', 'x'))": [("x",), ("y",)],
}


@pytest.mark.parametrize("given", KEYS)
def test_keys_come_from_tables_and_ranges(given):
    """Each once, in their order."""
    query = dps.sql(
        f"SELECT {PRIVATE[:-1]}, public_groups = {given}) page, COUNT(*) AS n FROM clicks "
        "GROUP BY page"
    )

    assert dps.with_tables(query, public={"pages": PAGES}).public_groups[:] == KEYS[given]


def test_products_have_every_pair():
    """A table's columns take the keys of their names, the next list the next key."""
    query = dps.sql(
        f"SELECT {PRIVATE[:-1]}, public_groups = PRODUCT(TABLE codes, "
        "GENERATE_DATE_ARRAY('2024-02-28', DATE '2024-03-06', INTERVAL '7' DAY))) "
        "iso, name, day, COUNT(*) AS n FROM clicks GROUP BY iso, name, day"
    )
    found = dps.with_tables(query, public={"codes": CODES}).public_groups[:]

    assert [(iso, name, str(day)) for iso, name, day in found] == [
        ("DE", "Germany", "2024-02-28"),
        ("DE", "Germany", "2024-03-06"),
        ("FR", "France", "2024-02-28"),
        ("FR", "France", "2024-03-06"),
    ]


def test_keys_are_days_of_a_text_column_too():
    """Days are written as text sources write them; a product takes SELECT DISTINCT."""
    rows = pa.table(
        {"user_id": range(900), "day": ["2024-02-28", "2024-02-29"] * 450, "k": ["a"] * 900}
    )
    query = dps.sql(
        f"SELECT {PRIVATE[:-1]}, public_groups = PRODUCT((SELECT DISTINCT page FROM pages WHERE "
        "page IS NOT NULL), GENERATE_DATE_ARRAY('2024-02-28', '2024-03-01'))) "
        "k, day, COUNT(*) AS n FROM log GROUP BY k, day"
    )
    (table,) = released(dps.with_tables(query, public={"pages": PAGES}), rows)
    found = {(row["k"], row["day"]): row["n"] for row in table.to_pylist()}

    assert len(found) == 9
    assert abs(found["a", "2024-02-29"] - 450) < 100 > abs(found["a", "2024-03-01"])


def test_keys_of_a_table_publish_what_the_same_list_publishes():
    """Every group, also those without a row; the noise differs, as of another query."""
    clicks, pages = log(2_000, 200), pa.table({"page": ["/A/x", "/b", "/none"]})
    query = dps.sql(
        f"SELECT {PRIVATE[:-1]}, public_groups = TABLE pages) page, COUNT(*) AS n FROM log "
        "GROUP BY page"
    )
    (table,) = released(dps.with_tables(query, public={"pages": pages}), clicks)

    assert sorted(table["page"].to_pylist()) == ["/A/x", "/b", "/none"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("TABLE other", "'other' has the keys, and it is not declared"),
        ("TABLE codes", "has no column 'page2'"),
        ("(SELECT * FROM pages)", "named columns"),
        ("(SELECT page, category FROM pages)", "2 columns of keys"),
        ("GENERATE_ARRAY(1, 'x')", "no list of keys"),
        ("PRODUCT(GENERATE_ARRAY(1, 9999), GENERATE_ARRAY(1, 9999))", "more than 20000000 keys"),
    ],
)
def test_keys_that_cannot_be_had_are_refused(given, words):
    """With a way out."""
    with pytest.raises(InvalidParameter, match=words):
        dps.with_tables(
            dps.sql(
                f"SELECT {PRIVATE[:-1]}, public_groups = {given}) page AS page2, COUNT(*) AS n "
                "FROM clicks GROUP BY page"
            ),
            public={"pages": PAGES, "codes": CODES},
        )


def test_tables_are_files_frames_and_databases(tmp_path):
    """What they hold is the same table, whatever holds it."""
    pages = pa.table({"page": ["a", "b"], "category": ["x", "y"]})
    csv.write_csv(pages, tmp_path / "pages.csv")
    (tmp_path / "pages.jsonl").write_text(
        '{"page":"b","category":"y"}\n{"page":"a","category":"x"}'
    )
    places = [pages, *(tmp_path / f"pages.{kind}" for kind in ("csv", "jsonl"))]
    query = dps.sql(
        f"SELECT {PRIVATE} category, COUNT(*) AS n FROM clicks JOIN pages USING (page) "
        "GROUP BY category"
    )
    texts = {dps.with_tables(query, public={"pages": place}).prepare.text for place in places}

    assert len(texts) == 1
