"""OVER compares published rows, as another database does, and never those of the source."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql
from dpstream.sql_compiler.over_clause import rank_interval
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


NUMBERS = st.floats(-50, 50) | st.just(float("nan"))


@given(st.lists(st.tuples(NUMBERS, st.floats(0, 5), st.integers(0, 2)), max_size=12))
def test_an_interval_of_a_rank_says_no_more_than_pairs_do(rows):
    """Who is certainly above or below, pair by pair, within each part; an unknown one never."""
    values, stddevs, parts = (np.array([row[n] for row in rows]) for n in range(3))
    parts = parts.astype(np.int64)
    best, worst = rank_interval(values, stddevs, parts, 0.9)
    pairs = [
        [j for j in range(len(rows)) if parts[j] == parts[i] and j != i] for i in range(len(rows))
    ]
    z = -ndtri(0.2 / max(sum(map(len, pairs)), 1))
    for i, others in enumerate(pairs):
        apart = {j: z * np.hypot(stddevs[i], stddevs[j]) for j in others}
        above = sum(bool(values[j] - values[i] > apart[j]) for j in others)
        below = sum(bool(values[i] - values[j] > apart[j]) for j in others)
        assert 1 <= best[i] <= 1 + above
        assert 1 + len(others) >= worst[i] >= 1 + len(others) - below
        if len(set(stddevs)) == 1:
            assert (best[i], worst[i]) == (1 + above, 1 + len(others) - below)


def test_intervals_of_ranks_hold_all_true_ranks_together():
    """In 2,000 releases of 30 keys, 95%, false alarm 1e-6; one rank in three is not the true one,
    and half the width holds too few."""
    rng = np.random.default_rng(3)
    true = np.sort(rng.uniform(0, 300, 30))[::-1]
    ranks, held, narrow, right = np.arange(1, 31), 0, 0, 0.0
    for _ in range(2000):
        noisy = true + rng.normal(0, 6, 30)
        parts = np.zeros(30, np.int64)
        best, worst = rank_interval(noisy, np.full(30, 6.0), parts, 0.95)
        held += bool(((best <= ranks) & (ranks <= worst)).all())
        best, worst = rank_interval(noisy, np.full(30, 3.0), parts, 0.95)
        narrow += bool(((best <= ranks) & (ranks <= worst)).all())
        right += (np.argsort(np.argsort(-noisy)) + 1 == ranks).mean() / 2000
    assert binom.cdf(held, 2000, 0.95) > 1e-6
    assert binom.cdf(narrow, 2000, 0.95) < 1e-6
    assert right < 0.67


def test_ranks_by_normal_figures_have_an_interval():
    """With `confidence`, by one aggregate and parts by keys; and none where it would be wrong."""
    release = RELEASE.append_column("n_low", RELEASE["n"]).append_column("n_high", RELEASE["n"])

    def made(columns, end="", more="confidence = 0.95"):
        text = f"SELECT {PRIVATE[:-1]}, {more}) page, lang, COUNT(*) AS n, {columns} FROM log"
        return compile_sql(f"{text} GROUP BY page, lang {end}").query.finish(release)

    whole = made("RANK() OVER (ORDER BY n DESC NULLS LAST) AS r, ENTROPY(n) OVER () AS e")
    values = np.nan_to_num(whole["n"].to_numpy(zero_copy_only=False))
    shares = values[values > 0] / values.sum()
    assert whole["e"].to_pylist() == pytest.approx([-(shares * np.log2(shares)).sum()] * SIZE)
    low, rank, high = (whole[f"r{end}"].to_numpy() for end in ("_low", "", "_high"))
    known = whole["n"].is_valid().to_numpy()
    assert (low <= rank)[known].all()
    assert (rank <= high)[known].all()
    assert set(low[~known]) == {1}
    assert set(high[~known]) == {SIZE}
    parts = made("RANK() OVER (PARTITION BY lang ORDER BY n) AS r")
    assert max(parts["r_high"].to_pylist()) < SIZE
    for columns, end, more in [
        ("ROW_NUMBER() OVER (ORDER BY n DESC) AS r", "", "confidence = 0.95"),
        ("RANK() OVER (ORDER BY n DESC, page) AS r", "", "confidence = 0.95"),
        ("RANK() OVER (PARTITION BY n ORDER BY n DESC) AS r", "", "confidence = 0.95"),
        ("RANK() OVER (ORDER BY n DESC) AS r", "HAVING n > 2", "confidence = 0.95"),
        ("RANK() OVER (ORDER BY n DESC) AS r", "", "nonnegative = TRUE, confidence = 0.95"),
    ]:
        assert "r_low" not in made(columns, end, more).column_names
    assert "r_low" not in finished(", RANK() OVER (ORDER BY n DESC) AS r").column_names
    with pytest.raises(InvalidParameter, match="ENTROPY is of all rows of a part"):
        finished(", ENTROPY(n) OVER (ORDER BY page) AS e")


def test_entropy_of_published_groups():
    """Of noisy figures: what is negative has no share; NULL where nothing has one."""
    inner = f"SELECT {PRIVATE} page, lang, COUNT(*) AS n FROM log GROUP BY page, lang"
    finish = compile_sql(f"SELECT lang, ENTROPY(n) AS e FROM ({inner}) GROUP BY lang").query.finish
    release = RELEASE.slice(0, 5).set_column(1, "lang", pa.array(["a", "a", "a", "b", "a"]))
    release = release.set_column(2, "n", pa.array([2.0, 1.0, 1.0, -4.0, -1.0]))
    release = release.append_column("kept_share", pa.nulls(5, pa.float64()))
    found = [(row["lang"], row["e"]) for row in finish(release).to_pylist()]
    assert found == [("a", 1.5), ("b", None)]
