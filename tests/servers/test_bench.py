"""The bench of connectors: what it measures, and how it says what it could not."""

import pytest

from benchmarks import connectors
from benchmarks.connector_kills import Aftermath, Storm
from benchmarks.connectors import (
    SYSTEMS,
    DeltaLake,
    FilesOnDisk,
    Iceberg,
    Kafka,
    Nats,
    ObjectStore,
    Postgres,
    storm_row,
    storm_target,
)

pytestmark = pytest.mark.servers

SMALL = connectors.Plan(
    rows=3000,
    releases=2,
    release_rows=50,
    charges=8,
    times=1,
    storm=Storm(kills=1, restarts=0, rows=50),
)


def test_every_source_and_sink_has_a_row(monkeypatch):
    """Those of a server that is absent have one that says so; nothing is left running."""
    monkeypatch.setattr(connectors, "QUICK", SMALL)
    monkeypatch.setattr(Kafka, "absent", lambda _: "no broker here")
    seen = []
    found = connectors.measure(quick=True, progress=lambda *told: seen.append(told))

    assert [*SYSTEMS] == [FilesOnDisk, DeltaLake, Iceberg, ObjectStore, Postgres, Nats, Kafka]
    absent = [row for row in found.rows if "role" not in row]
    note = "left out: no broker here"
    assert absent == [{"system": name, "note": note} for name in ("Kafka", "Kafka to PostgreSQL")]
    assert [(one["reached"], one["reason"]) for one in found.targets] == [(None, note)]
    measured = {(row["system"], row["role"]) for row in found.rows if "role" in row}
    assert measured == {
        ("files", "source"), ("files", "sink"), ("Delta Lake", "source"), ("Delta Lake", "sink"),
        ("Iceberg", "source"), ("Iceberg", "sink"), ("object store", "source"),
        ("object store", "sink"), ("PostgreSQL", "source"),
        ("PostgreSQL", "sink"), ("NATS", "source"), ("NATS", "sink"),
        ("files", "ledger"), ("object store", "ledger"), ("PostgreSQL", "ledger"),
    }  # fmt: skip
    assert {"a table", "its changes"} <= {row["how"] for row in found.rows if "how" in row}
    for row in (row for row in found.rows if "role" in row):
        assert row["records_per_second"] > 0
        assert (row["releases_per_second"] is None) == (row["role"] != "sink")
    base = {row["role"]: row for row in found.rows if row.get("times_files") == 1}
    assert {role: row["how"] for role, row in base.items()} == {
        "source": "JSON lines", "sink": "Parquet", "ledger": "one writer",
    }  # fmt: skip
    assert seen[-1] == (7, 7, "done")


def test_a_source_that_gives_too_few_rows_is_no_figure(tmp_path, monkeypatch):
    """The bench would otherwise measure how fast nothing is read."""
    monkeypatch.setattr(connectors, "_DEADLINE", 0.2)
    (tmp_path / "rows.csv").write_text("user,page,at\na,b,1\n")

    with pytest.raises(TimeoutError, match=r"gave .* of 5 rows"):
        connectors._read(tmp_path / "rows.csv", 5)


def test_a_run_that_differs_misses_the_target():
    """One row that is missing, other or double is enough; so is an empty table."""
    calm = [(0, 1, "/1"), (0, 1, "/2")]
    cases = [(calm, True), (calm[:1], False), (calm[:1] * 2, False), ([*calm, calm[0]], False)]
    for killed, reached in cases:
        found = Aftermath(
            seconds=1.0,
            kills=1,
            tables={"calm": calm, "killed": killed},
            columns=["window", "release", "page"],
            letters={"calm": ["1"], "killed": ["1"]},
        )
        row = storm_row(found, SMALL.storm)

        assert row["identical"] == storm_target(row)["reached"] == reached
    found.tables, found.letters["killed"] = {"calm": [], "killed": []}, ["1"]
    assert not found.identical
    found.tables, found.letters["killed"] = {"calm": calm, "killed": calm}, []
    assert not found.identical
