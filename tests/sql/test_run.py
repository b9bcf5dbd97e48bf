"""SQL runs end to end, and publishes what the same query from Python publishes."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv, parquet

import dpstream as dps
from dpstream.engines.local import Options
from tests.sql.test_refused import PRIVATE

DAY = "start = '2024-05-01', end = '2024-05-02'"


def log(size=20_000, users=2_000):
    rng = np.random.default_rng(5)
    start = dt.datetime(2024, 5, 1, tzinfo=dt.UTC).timestamp()
    seconds = rng.integers(0, 86_400, size) + int(start)
    return pa.table(
        {
            "user_id": rng.integers(0, users, size),
            "page": np.array(["/A/x", "/b/y", "/A/z", "/b", "/c/rare"])[rng.integers(0, 5, size)],
            "ts": pa.array(seconds * 1_000_000).cast(pa.timestamp("us")),
            "seconds": rng.integers(0, 900, size),
            "status": rng.choice([200, 404], size),
        }
    )


def released(query, source):
    """Every table of a run with fixed noise."""
    return list(dps.run(query, source=source, secret=bytes(32), options=Options(run_id=bytes(16))))


def private(more):
    return PRIVATE[:-1] + f", {more})"


def test_sql_and_python_publish_the_same_tables():
    """With the same secret and run, table by table, bytes by bytes."""
    text = f"""
        SELECT {private(DAY)} page, window_start, COUNT(*) AS clicks,
               AVG(seconds, contribution_bounds_per_row => (0, 600)) AS seconds
        FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '12' HOUR)
        GROUP BY page, window_start
        EMIT EVERY INTERVAL '3' HOUR"""
    python = dps.Query(
        unit="user_id",
        keys=["page"],
        aggregates=[dps.Count("clicks"), dps.Avg("seconds", column="seconds", lo=0, hi=600)],
        epsilon=1,
        delta=1e-9,
        max_groups_contributed=4,
        time="ts",
        window=dps.Tumble("12 hours"),
        every="3 hours",
        start="2024-05-01",
        end="2024-05-02",
    )

    one, two = released(dps.sql(text), log()), released(python, log())

    assert len(one) == 8
    assert all(a.equals(b, check_metadata=True) for a, b in zip(one, two, strict=True))


def test_expressions_publish_what_the_same_columns_would():
    """Keys, filters and values computed in SQL are what they are by hand, but for the noise."""
    text = f"""
        WITH ok AS (
            SELECT user_id, LOWER(SPLIT(page, '/')[OFFSET(1)]) AS part, seconds / 60 AS minutes
            FROM log WHERE status = 200)
        SELECT {PRIVATE} part, COUNT(*) AS n,
               SUM(minutes, contribution_bounds_per_row => (0, 10)) AS minutes
        FROM ok GROUP BY part"""
    table = log()
    kept = table.filter(pc.equal(table["status"], 200))
    part = [page.split("/")[1].lower() for page in kept["page"].to_pylist()]
    minutes = pc.divide(pc.cast(kept["seconds"], pa.float64()), 60)
    total = pc.sum(pc.min_element_wise(minutes, 10.0)).as_py()
    bounds = {"max_groups_contributed": 3, "max_rows_per_group": 20}

    (one,) = released(dps.sql(text, epsilon=20, **bounds), table)

    assert set(one["part"].to_pylist()) == {"a", "b", "c"}
    for row in one.to_pylist():
        assert abs(row["n"] - part.count(row["part"])) <= 1 + 8 * row["n_stddev"]
        assert row["n_stddev"] < 50
    assert abs(pc.sum(one["minutes"]).as_py() - total) < 0.02 * total


def test_having_order_and_limit_choose_among_noisy_rows():
    """They see what would have been published, and nothing else."""
    plain = f"SELECT {PRIVATE} page, COUNT(*) AS n FROM log GROUP BY page"
    (whole,) = released(dps.sql(plain), log())
    noisy = sorted(whole["n"].to_pylist(), reverse=True)
    query = dps.sql(f"{plain} HAVING n > {noisy[-1]} ORDER BY n DESC LIMIT 2 OFFSET 1")

    assert query.finish(whole)["n"].to_pylist() == noisy[1:3]
    (chosen,) = released(query, log())
    assert len(chosen) == 2
    assert chosen["n"].to_pylist() == sorted(chosen["n"].to_pylist(), reverse=True)
    assert chosen.schema.names == whole.schema.names


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_text_files_and_typed_files_agree(kind, tmp_path):
    """Columns of text meet numbers and times as if they had been typed."""
    text = f"""
        SELECT {private(DAY)} EXTRACT(HOUR FROM ts) >= 12 AS afternoon, window_start, COUNT(*) AS n
        FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' DAY)
        WHERE seconds > 300 AND status IN (200, 201) AND ts >= TIMESTAMP '2024-05-01 06:00:00'
        GROUP BY afternoon, window_start"""
    table = log().set_column(0, "user_id", pc.cast(log()["user_id"], pa.string()))
    path = tmp_path / f"log.{kind}"
    (csv.write_csv if kind == "csv" else parquet.write_table)(table, path)

    (one,) = released(dps.sql(text), str(path))
    (two,) = released(dps.sql(text), table)

    assert one.equals(two)
    assert one["afternoon"].to_pylist() == two["afternoon"].to_pylist()
    assert set(one["afternoon"].to_pylist()) == {True, False}
