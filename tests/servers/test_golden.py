"""Every server's sink holds the rows of the golden corpus, also of a run that was broken off."""

import json

import psycopg
import pytest
from deltalake import DeltaTable

import dpstream as dps
from tests.golden.corpus import SECRET, Golden, outcome, rows_text, run_options
from tests.golden.queries import SINK_QUERY, in_utc, write_parquet
from tests.servers import kafka_tools
from tests.servers.nats_tools import fresh
from tests.servers.test_nats_sink import whole

pytestmark = pytest.mark.servers
QUERY = dps.sql(SINK_QUERY, name="sent")


def to_postgres(request, place):
    server = request.getfixturevalue("postgres")
    schema = f"golden_{place.name}"

    def read():
        with psycopg.connect(server.address, row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(f"SELECT * FROM {schema}.sent").fetchall()

    return f"{server.address}?schema={schema}", read


def to_nats(request, place):
    stream = fresh(request.getfixturevalue("nats"))
    return stream.uri(), lambda: whole(stream, "sent")


def to_kafka(request, place):
    server = request.getfixturevalue("kafka")
    topic = kafka_tools.make_topic(server, 2)
    uri = f"kafka://{server.address}/{topic}"
    return uri, lambda: [json.loads(one[1]) for one in kafka_tools.committed(server, topic)]


def to_delta(request, place):
    def read():
        return in_utc(DeltaTable(str(place / "out" / "sent")).to_pyarrow_table()).to_pylist()

    return f"delta:{place / 'out'}", read


def publish(request, place, to, *, leave_after=None):
    """What the sink holds after a run, and what was charged for it."""
    place.mkdir()
    uri, read = to(request, place)
    source = write_parquet(place)

    def start():
        return dps.run(
            QUERY, source=source, sink=uri, state=place / "state", secret=SECRET,
            ledger=place / "book", options=run_options(),
        )  # fmt: skip

    if leave_after is not None:
        releases = iter(start())
        for _ in range(leave_after):
            next(releases)
        releases.close()
    run = start().finish()
    rows = [{name: row[name] for name in run.schema.names} for row in read()]
    return outcome(rows_text(rows), place / "book")


@pytest.mark.parametrize("to", [to_postgres, to_nats, to_kafka, to_delta])
def test_sink(request, tmp_path, to):
    """Read back, the rows have the digest of those that the engine publishes."""
    whole_run = publish(request, tmp_path / "whole", to)
    resumed = publish(request, tmp_path / "resumed", to, leave_after=12)

    Golden().check("rows/sent", whole_run, resumed)
