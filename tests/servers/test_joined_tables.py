"""A public table in PostgreSQL and a union of Kafka topics, against the real servers."""

import psycopg
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput
from tests.engines.test_refreshed_tables import LAST, counts, start
from tests.servers import kafka_tools as tools
from tests.support.fixed import RUN, SECRET
from tests.support.live_runs import HOUR

pytestmark = pytest.mark.servers

CLAUSE = """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 8, delta = 1e-5,
    privacy_unit_column = user, max_groups_contributed = 2)"""


@pytest.fixture
def pages(postgres):
    """A table of pages, by its address, and a connection."""
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS pages, pages_away")
        connection.execute("CREATE TABLE pages (page text, kind text, weight int)")
        connection.execute("INSERT INTO pages VALUES ('/1', 'v0', 1), ('/2', 'v0', 2)")
        yield f"{postgres.address}?table=pages", connection


def test_a_table_of_postgresql_is_joined(pages):
    """As a frame with the same rows is, byte for byte; one that is not there is named."""
    address, _ = pages
    text = f"{CLAUSE} kind, weight, COUNT(*) AS n FROM log JOIN pages USING (page) GROUP BY ALL"
    rows = pa.table({"user": list(range(300)), "page": ["/1", "/2"] * 150})
    frame = pa.table({"page": ["/1", "/2"], "kind": ["v0"] * 2, "weight": [1, 2]})
    fixed = {"source": rows, "secret": SECRET, "options": EngineOptions(run_id=RUN)}
    (found,), (expected,) = (
        dps.run(dps.sql(text), public={"pages": table}, **fixed) for table in (address, frame)
    )

    assert found.num_rows == 2
    assert found.to_pydict() == expected.to_pydict()
    with pytest.raises(InvalidInput, match="pages_2"):
        dps.run(dps.sql(text), public={"pages": f"{address}_2"}, **fixed)


def test_a_table_of_postgresql_is_read_anew(pages, tmp_path):
    """At its interval; while it is away, its last version is joined and the operator is told."""
    address, connection = pages
    events = [
        (2 * HOUR - 1, lambda: connection.execute("UPDATE pages SET kind = 'v2'")),
        (4 * HOUR - 1, lambda: connection.execute("ALTER TABLE pages RENAME TO pages_away")),
        (6 * HOUR - 1, lambda: connection.execute("ALTER TABLE pages_away RENAME TO pages")),
    ]
    public = {"pages": dps.Refreshed(address, every="2 hours")}
    running = start(tmp_path, events=lambda place: events, public=public)
    told = [dict(running.operator.stale_tables) for _ in running]

    assert any("pages" in each for each in told)
    assert told[-1] == {}
    assert min(counts(tmp_path, LAST[0])["v0"], counts(tmp_path, LAST[1])["v2"]) > 5
    assert abs(counts(tmp_path, LAST[1])["v0"]) < 5


def test_topics_are_united(kafka):
    """Two topics with other names of their columns have the rows of two frames, byte for byte."""
    first, second = (tools.make_topic(kafka, 1) for _ in range(2))
    rows = [{"user": n, "page": f"/{n % 3}"} for n in range(200)]
    others = [{"who": n, "place": f"/{n % 2}"} for n in range(100, 300)]
    tools.send(kafka, first, rows)
    tools.send(kafka, second, others)
    text = f"""{CLAUSE} page, COUNT(*) AS n FROM (SELECT user, page FROM a UNION ALL
        SELECT who AS user, place AS page FROM b WHERE place <> '/9') GROUP BY page"""
    declared = {"a.user": "INT64", "b.who": "INT64"}
    topics = {
        name: f"kafka://{kafka.address}/{topic}?until=200"
        for name, topic in (("a", first), ("b", second))
    }
    frames = {"a": pa.Table.from_pylist(rows), "b": pa.Table.from_pylist(others)}
    (found,), (expected,) = (
        dps.run(
            dps.sql(text, column_types=declared),
            source=source,
            secret=SECRET,
            options=EngineOptions(run_id=RUN),
        )
        for source in (topics, frames)
    )

    assert found.num_rows == 3
    assert found.to_pydict() == expected.to_pydict()
