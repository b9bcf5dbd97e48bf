"""OVER compares published rows, as another database does, and never those of the source."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql
from tests.sql_compiler.test_refused import PRIVATE

RNG = np.random.default_rng(5)
SIZE = 60
NONE = RNG.random(SIZE) < 0.1
RELEASE = pa.table(
    {
        "page": [f"p{n}" for n in range(SIZE)],
        "lang": pa.array(RNG.choice(["de", "en", None], SIZE)),
        "n": pa.array(RNG.integers(0, 20, SIZE).astype(float), mask=NONE),
        "n_stddev": pa.array(np.full(SIZE, 1.5)),
        "trigger_time": pa.array([0] * SIZE, pa.timestamp("us", tz="UTC")),
        "release_index": pa.array([1] * SIZE, pa.int64()),
    }
)


def finished(columns, end="", release=RELEASE):
    """What is published of a release, by page."""
    text = f"SELECT {PRIVATE} page, lang, COUNT(*) AS n{columns} FROM log GROUP BY page, lang {end}"
    return compile_sql(text).query.finish(release).sort_by("page")


@pytest.mark.parametrize(
    "call",
    [
        "RANK() OVER (ORDER BY n DESC NULLS LAST)",
        "RANK() OVER (PARTITION BY lang ORDER BY n NULLS FIRST)",
        "DENSE_RANK() OVER (ORDER BY n NULLS FIRST)",
        "ROW_NUMBER() OVER (PARTITION BY lang ORDER BY n DESC NULLS LAST, page)",
        "SUM(n) OVER (ORDER BY n NULLS FIRST)",
        "SUM(n) OVER (PARTITION BY lang)",
        "AVG(n) OVER (PARTITION BY lang ORDER BY page)",
        "MAX(n) OVER (PARTITION BY lang ORDER BY page DESC)",
        "MIN(n) OVER ()",
        "LAG(n) OVER (PARTITION BY lang ORDER BY page)",
        "LEAD(page, 2) OVER (ORDER BY page)",
        "n - LAG(n, 3) OVER (ORDER BY page)",
        "100 * n / SUM(n) OVER (PARTITION BY lang)",
    ],
)
def test_functions_over_rows_are_what_another_database_computes(call):
    """With NULLs, ties and parts."""
    database = duckdb.connect(config={"threads": 1})
    database.register("release", RELEASE)
    rows = database.execute(f"SELECT {call} AS x FROM release ORDER BY page").fetchall()

    ours = finished(f", {call} AS x")["x"].to_pylist()
    for mine, (theirs,) in zip(ours, rows, strict=True):
        assert mine == (pytest.approx(theirs) if isinstance(theirs, float) else theirs)


def test_having_comes_before_ranks_and_qualify_after():
    """As in SQL: the rank is among the rows that HAVING leaves."""
    kept = finished(", RANK() OVER (ORDER BY n DESC) AS r", "HAVING n < 10 QUALIFY r <= 2")

    assert set(kept["n"].to_pylist()) <= {9.0, 8.0}
    assert 1 in kept["r"].to_pylist()
    top = finished("", "QUALIFY ROW_NUMBER() OVER (PARTITION BY lang ORDER BY n DESC) = 1")
    assert len(top) == 3


def test_totals_and_shares_have_error_bars_where_rows_are_not_chosen_by_noise():
    """Exact for a sum; to first order for a share, and NULL where the total may be 0."""
    release = RELEASE.set_column(2, "n", pa.array(np.full(SIZE, 100.0)))
    made = finished(", SUM(n) OVER () AS s, RATIO_TO_REPORT(n) OVER () AS r", release=release)
    share = 1 / SIZE
    variance = 1.5**2 * ((1 - 2 * share) + share**2 * SIZE) / (100 * SIZE) ** 2
    assert made["s_stddev"][0].as_py() == pytest.approx(1.5 * SIZE**0.5)
    assert made["r_stddev"][0].as_py() == pytest.approx(variance**0.5)
    small = RELEASE.set_column(2, "n", pa.array(np.full(SIZE, 0.3)))
    shares = finished(", RATIO_TO_REPORT(n) OVER () AS r", release=small)
    assert shares["r_stddev"].null_count == SIZE
    for columns, end in [
        (", SUM(n) OVER (ORDER BY n) AS s", ""),
        (", SUM(n) OVER (PARTITION BY n) AS s", ""),
        (", SUM(n) OVER () AS s", "HAVING n > 5"),
        (", MAX(n) OVER () AS s", ""),
        (", n - LAG(n) OVER (ORDER BY page) AS s", ""),
    ]:
        assert "s_stddev" not in finished(columns, end).column_names


def test_a_share_is_off_by_its_error_bar():
    """Over 400 releases standardised errors have a variance of 1, but for a chance of 1e-6."""
    rng = np.random.default_rng(8)
    text = f"SELECT {PRIVATE} page, COUNT(*) AS n, RATIO_TO_REPORT(n) OVER () AS r FROM log"
    finish = compile_sql(f"{text} GROUP BY page").query.finish
    counts, errors = np.array([400.0, 250.0, 100.0]), []
    for _ in range(400):
        noisy = counts + rng.normal(0, 5, 3)
        release = RELEASE.slice(0, 3).set_column(2, "n", pa.array(noisy))
        release = release.set_column(3, "n_stddev", pa.array([5.0] * 3))
        first = finish(release).slice(0, 1).to_pylist()[0]
        errors.append((first["r"] - counts[0] / counts.sum()) / first["r_stddev"])

    assert np.var(errors) == pytest.approx(1, abs=4.9 * (2 / 400) ** 0.5)
    assert np.var(np.array(errors) * 1.5) > 1 + 4.9 * (2 / 400) ** 0.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("page, COUNT(*) AS n FROM log WHERE RANK() OVER (ORDER BY page) < 5 GROUP BY page",
         "rows of several units"),
        ("page, COUNT(*) AS n FROM log GROUP BY page, RANK() OVER (ORDER BY lang)",
         "rows of several units"),
        ("RANK() OVER (ORDER BY lang) AS r, COUNT(*) AS n FROM log GROUP BY r", "rows of several"),
        ("RANK() OVER (ORDER BY lang) AS r, COUNT(*) AS n FROM log GROUP BY 1", "rows of several"),
        ("RANK() OVER (ORDER BY lang) AS r, COUNT(*) AS n FROM log GROUP BY ALL", "not published"),
        (("page, SUM(RANK() OVER (ORDER BY page), contribution_bounds_per_row => (0, 1)) AS n "
         "FROM log GROUP BY page"), "rows of several units"),
        (("page, COUNT(*) AS n FROM (SELECT user_id, LAG(a) OVER (ORDER BY ts) AS page FROM log) "
         "GROUP BY page"), "is not known in a subquery per unit"),
        ("page, COUNT(*) AS n, SUM(seconds) OVER () AS s FROM log GROUP BY page", "not published"),
        ("page, COUNT(*) AS n FROM log GROUP BY page QUALIFY user_id > 3", "not published"),
        ("page, COUNT(*) AS n, RANK() OVER (ORDER BY 1) AS r FROM log GROUP BY page", "no column"),
        ("page, COUNT(*) AS n, RANK() OVER () AS r FROM log GROUP BY page", "no column"),
        ("page, COUNT(*) AS n, NTILE(4) OVER (ORDER BY n) AS r FROM log GROUP BY page",
         "is not known"),
        (("page, COUNT(*) AS n, SUM(n) OVER (ORDER BY n ROWS 2 PRECEDING) AS r FROM log "
         "GROUP BY page"), "is not known"),
    ],
)  # fmt: skip
def test_rows_of_the_source_are_never_compared(text, reason):
    """Only columns that are published, and only of one release."""
    with pytest.raises(InvalidParameter, match=reason):
        dps.sql(f"SELECT {PRIVATE} {text}", start="2024-05-01", end="2024-05-03", time_column="ts")
