"""SQL runs end to end, and publishes what the same query from Python publishes."""

import datetime as dt
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv, parquet

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidParameter, UnexpectedResult
from dpstream.sql_compiler import compile_sql
from tests.sql_compiler.test_refused import PRIVATE

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
    return list(
        dps.run(query, source=source, secret=bytes(32), options=EngineOptions(run_id=bytes(16)))
    )


def private(more):
    return PRIVATE[:-1] + f", {more})"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("epsilon = 30, delta = 1e-9", "epsilon = 30 protects nobody"),
        ("epsilon = 1, delta = 0.5", "delta = 0.5 is the chance that the promise fails"),
    ],
)
def test_a_large_epsilon_or_delta_gets_a_plain_word(options, words):
    """As a warning; where there is hardly any noise to add, as a refusal."""
    text = (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS ({}, privacy_unit_column = user_id) COUNT(*) AS n"
    )
    text += " FROM log"
    with pytest.warns(UnexpectedResult, match=words):
        dps.sql(text.format(options), max_rows_per_group=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dps.sql(text.format("epsilon = 5, delta = 1e-6"), max_rows_per_group=1)
    noiseless = text.replace("COUNT(*)", "lang, COUNT(*)") + " GROUP BY lang"
    query = compile_sql(noiseless.format("epsilon = 1e6, delta = 1e-9"), max_groups_contributed=1)
    with pytest.raises(InvalidParameter, match="an epsilon this large protects nobody"):
        dps.explain(query.query)


def test_sql_and_python_publish_the_same_tables():
    """With the same secret and run, table by table, bytes by bytes."""
    text = f"""
        SELECT {private(DAY)} window_start, window_end, page, COUNT(*) AS clicks,
               AVG(seconds, contribution_bounds_per_row => (0, 600)) AS seconds
        FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '12' HOUR)
        GROUP BY page, window_start
        EMIT EVERY INTERVAL '3' HOUR"""
    python = dps.Query(
        privacy_unit_column="user_id",
        keys=["page"],
        aggregates=[
            dps.Count("clicks"),
            dps.Avg("seconds", column="seconds", contribution_bounds_per_row=(0, 600)),
        ],
        epsilon=1,
        delta=1e-9,
        max_groups_contributed=4,
        time_column="ts",
        window=dps.Tumble("12 hours"),
        every="3 hours",
        start="2024-05-01",
        end="2024-05-02",
    )

    one, two = released(dps.sql(text), log()), released(python, log())

    assert len(one) == 8
    for a, b in zip(one, two, strict=True):
        assert a.equals(b, check_metadata=True)


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


COMPUTED = f"""
    SELECT {PRIVATE} SUM(seconds, contribution_bounds_per_row => (0, 600)) / COUNT(*) AS mean,
           UPPER(page) AS p, 2 * COUNT(*) - 5 AS twice, COUNT(*) * COUNT(*) AS square,
           COUNT(*) - COUNT(DISTINCT user_id) AS more, COUNT(*) AS n,
           SUM(seconds, contribution_bounds_per_row => (0, 600)) AS total,
           COUNTIF(status = 404) / COUNT(*) AS missing
    FROM log GROUP BY page HAVING mean > 0 ORDER BY 1 DESC"""


def test_arithmetic_on_noisy_columns_is_post_processing():
    """Each row's figures follow from the noisy aggregates of that row, in SELECT's order."""
    (one,) = released(dps.sql(COMPUTED), log())

    assert one.column_names[:4] == ["mean", "mean_stddev", "p", "twice"]
    assert "page" not in one.column_names
    assert one["mean"].to_pylist() == sorted(one["mean"].to_pylist(), reverse=True)
    for row in one.to_pylist():
        assert row["mean"] == pytest.approx(row["total"] / row["n"])
        assert row["twice"] == 2 * row["n"] - 5
        assert row["square"] == row["n"] ** 2
        assert row["p"] in {"/A/X", "/B/Y", "/A/Z", "/B", "/C/RARE"}


def test_error_bars_are_carried_over_where_that_is_honest():
    """Sums and quotients have one, of a sum about its middle by what it shares with the count;
    products have none, nor has noise that is shared for some bounds only."""
    (one,) = released(dps.sql(COMPUTED), log())

    for row in one.to_pylist():
        assert row["twice_stddev"] == pytest.approx(2 * row["n_stddev"])
        own = np.sqrt(row["total_stddev"] ** 2 - (300 * row["n_stddev"]) ** 2)
        spread = np.hypot(own, (300 - row["mean"]) * row["n_stddev"]) / row["n"]
        assert row["mean_stddev"] == pytest.approx(spread)
        apart = np.hypot(row["total_stddev"], row["mean"] * row["n_stddev"]) / row["n"]
        assert row["mean_stddev"] < 0.8 * apart
        assert row["missing_stddev"] > 0
    assert "square_stddev" not in one.column_names
    assert "more_stddev" not in one.column_names


def test_a_quotient_by_what_may_be_zero_has_no_error_bar():
    """To first order means nothing there: the figure stands, its error bar is NULL."""
    text = f"""SELECT {PRIVATE} COUNT(*) / COUNTIF(status = 999) AS x, COUNTIF(status = 999) AS n
               FROM log GROUP BY page"""
    (one,) = released(dps.sql(text), log())
    near_zero = [abs(row["n"]) <= 2 * row["n_stddev"] for row in one.to_pylist()]

    assert [value is None for value in one["x_stddev"].to_pylist()] == near_zero
    assert any(near_zero)


@pytest.mark.parametrize("what", ["2 * n + m / 4 - 7", "m / (n + 3)"])
def test_error_bars_are_what_repeated_noise_shows(what):
    """Of 4,000 draws with noise of those standard deviations; off by 20% they would not pass."""
    count, size = 4_000, 5_000.0
    rng = np.random.default_rng(3)
    calls = {"n": "COUNT(*)", "m": "SUM(seconds, contribution_bounds_per_row => (0, 600))"}
    for name, call in calls.items():
        what = what.replace(name, call)
    query = dps.sql(f"SELECT {PRIVATE} {what} AS x FROM log")
    n, m = (aggregate.name for aggregate in reversed(query.aggregates))
    if not n.startswith("COUNT"):
        n, m = m, n
    of_rows, own = rng.normal(0, 30, count), rng.normal(0, 4_000, count)
    noisy = {n: size + of_rows, m: 90 * size + own + 300 * of_rows}  # 300: the middle
    sum_stddev = np.hypot(4_000, 300 * 30)
    table = pa.table(
        noisy
        | {f"{n}_stddev": np.full(count, 30.0), f"{m}_stddev": np.full(count, sum_stddev)}
        | {"trigger_time": pa.nulls(count), "release_index": np.ones(count)}
    )
    made = query.finish(table)

    told, seen = np.median(made["x_stddev"].to_numpy()), np.std(made["x"].to_numpy())
    assert seen == pytest.approx(told, rel=0.06)  # 5.4 standard errors of a standard deviation


def noisy_draws(text, sizes, count=20_000):
    """What a query makes of a COUNT(*) and a SUM of these sizes, under noise of 30 and 4,000."""
    query = dps.sql(text.replace("@private", private("confidence = 0.95")))
    n, m = sorted((each.name for each in query.aggregates), key=lambda name: name[0])
    rng = np.random.default_rng(4)
    of_rows, own = rng.normal(0, 30, count), rng.normal(0, 4_000, count)
    table = pa.table({"trigger_time": pa.nulls(count), "release_index": np.ones(count)})
    spreads = {n: 30.0, m: np.hypot(4_000, 300 * 30)}
    noise = {n: of_rows, m: own + 300 * of_rows}  # 300: the middle
    for name, spread in spreads.items():
        value = sizes[name[0]] + noise[name]
        columns = {"": value, "_stddev": np.full(count, spread)}
        columns |= {"_low": value - 1.959964 * spread, "_high": value + 1.959964 * spread}
        for end, column in columns.items():
            table = table.append_column(name + end, pa.array(column))
    return query.finish(table)


SUMMED = "SUM(seconds, contribution_bounds_per_row => (0, 600))"


@pytest.mark.parametrize("size", [45.0, 75.0, 150.0, 5_000.0])
@pytest.mark.parametrize(
    ("what", "truth"),
    [
        (f"{SUMMED} / (COUNT(*) + 3)", lambda n, m: m / (n + 3)),
        (f"COUNT(*) / {SUMMED}", lambda n, m: n / m),
        (f"2 * COUNT(*) - {SUMMED} / 4 - 7", lambda n, m: 2 * n - m / 4 - 7),
        (f"3 - COUNT(*) / 2 + 0 * {SUMMED}", lambda n, m: 3 - n / 2),
    ],
)
def test_intervals_of_quotients_and_sums_hold_what_they_say(what, truth, size):
    """Fieller's, also where the denominator is 1.5 of its deviations: 20,000 draws, within 0.77%,
    five standard errors; where it is infinite, more. Two error bars to first order hold too few of
    small quotients."""
    sizes = {"C": size, "S": 90 * size}
    made = noisy_draws(f"SELECT @private {what} AS x FROM log", sizes)
    low, high, found = (made[f"x{end}"].to_numpy() for end in ("_low", "_high", ""))
    true = truth(sizes["C"], sizes["S"])
    assert made.column_names[:4] == ["x", "x_stddev", "x_low", "x_high"]
    held = ((low <= true) & (true <= high)).mean()
    assert 0.95 - 0.0077 < held < 0.95 + 0.0077 + np.isinf(high).mean()
    if "(COUNT(*) + 3)" in what and size == 45.0:
        told = np.nan_to_num(made["x_stddev"].to_numpy(zero_copy_only=False), nan=np.inf)
        assert np.isinf(high).mean() > 0.1
        clear = np.isfinite(told)
        assert (np.abs(found - true) <= 1.96 * told)[clear].mean() < 0.93
    if size == 5_000.0:
        half = 1.959964 * made["x_stddev"].to_numpy()
        assert np.median((high - low) / 2 / half) == pytest.approx(1.0, rel=0.02)


def test_an_interval_of_one_figure_is_scaled():
    """So that it holds what the figure's own does: that of a quantile, and without delta."""
    half = "MEDIAN(seconds, contribution_bounds_per_row => (0, 600))"
    text = f"""SELECT {private("confidence = 0.9")} 10 - 2 * {half} AS x, {half} AS q,
                      {half} + COUNT(*) AS mixed FROM log"""
    (one,) = released(dps.sql(text), log())
    (row,) = one.to_pylist()
    assert row["x_low"] == pytest.approx(10 - 2 * row["q_high"])
    assert row["x_high"] == pytest.approx(10 - 2 * row["q_low"])
    assert {"mixed", "mixed_stddev"} <= {*one.column_names}
    assert "mixed_low" not in one.column_names
    plain = private("confidence = 0.9, public_groups = ('/A/x'), report_bias = FALSE")
    plain = plain.replace("delta = 1e-9, ", "")
    text = f"""SELECT {plain} page, COUNT(*) / 2 AS half, COUNT(*) AS n,
                      COUNTIF(status = 404) / COUNT(*) AS share FROM log GROUP BY page"""
    (one,) = released(dps.sql(text), log())
    (row,) = one.to_pylist()
    assert (row["half_low"], row["half_high"]) == (row["n_low"] / 2, row["n_high"] / 2)
    assert "share_low" not in one.column_names


@pytest.mark.parametrize(
    "what",
    [
        "IF(status = 404, seconds, NULL)",
        "IF(status <> 404, NULL, seconds)",
        "CASE WHEN status = 404 THEN seconds END",
        "NULLIF(IF(status = 404, seconds, -1), -1)",
    ],
)
def test_an_average_with_a_condition_is_of_the_rows_that_meet_it(what):
    """Others count nowhere: their number is measured too; of the average of all rows the middle."""
    bounds = "contribution_bounds_per_row => (0, 6000)"
    text = f"SELECT {private('max_rows_per_group = 20')} AVG({what}, {bounds}) AS a FROM log"
    rows = log()
    true = pc.mean(rows.filter(pc.equal(rows["status"], 404))["seconds"]).as_py()
    (one,) = released(dps.sql(text, epsilon=9), rows)
    (row,) = one.to_pylist()
    assert abs(row["a"] - true) < 6 * row["a_stddev"] < 900
    assert "a_high_all" not in one.column_names
    plain = dps.sql(text.replace(what, "seconds"))
    assert type(plain.aggregates[0]) is dps.Avg


def test_a_column_with_the_name_of_an_interval_is_refused():
    """It would stand twice."""
    with pytest.raises(InvalidParameter, match="x would be taken for an error bar"):
        dps.sql(f"""SELECT {private("confidence = 0.9")} COUNT(*) / 2 AS x, COUNT(*) AS x_low
                    FROM log""")
    dps.sql(f"SELECT {PRIVATE} COUNT(*) / 2 AS x, COUNT(*) AS x_low FROM log")


ODD = (
    "COUNT(*) + d AS x FROM log GROUP BY d",
    "d, COUNT(*) AS n FROM log GROUP BY d HAVING d > TRUE",
)


@pytest.mark.parametrize("rest", ODD)
def test_post_processing_of_kinds_that_cannot_meet_costs_nothing(rest):
    """It is refused by the types of the keys, before anything is charged."""
    from dpstream.errors import InvalidInput
    from dpstream.privacy.ledger.ledger import Ledger

    book, table = Ledger(), log().append_column("d", pa.array([dt.date(2024, 5, 1)] * 20_000))
    with pytest.raises(InvalidInput):
        list(dps.run(dps.sql(f"SELECT {PRIVATE} {rest}"), source=table, ledger=book))
    assert book.report() == []
