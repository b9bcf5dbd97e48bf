"""The bench of connectors: what it measures, and how it says what it could not."""

import pytest

from dpstream.bench import connectors
from dpstream.bench.connector_systems import SYSTEMS, DeltaLake, FilesOnDisk, Kafka, Nats, Postgres

pytestmark = pytest.mark.servers

SMALL = connectors.Plan(rows=3000, releases=2, release_rows=50, times=1)


def test_every_source_and_sink_has_a_row(monkeypatch):
    """Those of a server that is absent have one that says so; nothing is left running."""
    monkeypatch.setattr(connectors, "QUICK", SMALL)
    monkeypatch.setattr(Kafka, "absent", lambda _: "no broker here")
    seen = []
    found = connectors.measure(quick=True, progress=lambda *told: seen.append(told))

    assert [*SYSTEMS] == [FilesOnDisk, DeltaLake, Postgres, Nats, Kafka]
    absent = [row for row in found.rows if "role" not in row]
    assert absent == [{"system": "Kafka", "note": "left out: no broker here"}]
    measured = {(row["system"], row["role"]) for row in found.rows if "role" in row}
    assert measured == {
        ("files", "source"), ("files", "sink"), ("Delta Lake", "sink"), ("PostgreSQL", "source"),
        ("PostgreSQL", "sink"), ("NATS", "source"), ("NATS", "sink"),
    }  # fmt: skip
    for row in (row for row in found.rows if "role" in row):
        assert row["records_per_second"] > 0
        assert (row["releases_per_second"] is None) == (row["role"] == "source")
    base = {row["role"]: row for row in found.rows if row.get("times_files") == 1}
    assert (base["source"]["how"], base["sink"]["how"]) == ("JSON lines", "Parquet")
    assert seen[-1] == (5, 5, "done")


def test_a_source_that_gives_too_few_rows_is_no_figure(tmp_path, monkeypatch):
    """The bench would otherwise measure how fast nothing is read."""
    monkeypatch.setattr(connectors, "_DEADLINE", 0.2)
    (tmp_path / "rows.csv").write_text("user,page,at\na,b,1\n")

    with pytest.raises(TimeoutError, match=r"gave .* of 5 rows"):
        connectors._read(tmp_path / "rows.csv", 5)
