"""SELECT over a private query sees what it publishes, and computes what another database does."""

import tomllib

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql
from tests.sql_compiler.test_over import RELEASE
from tests.sql_compiler.test_refused import PRIVATE
from tests.support.fixed import RUN, SECRET

INSIDE = f"SELECT {PRIVATE} page, lang, COUNT(*) AS n FROM log GROUP BY page, lang"


def finished(text, release=RELEASE):
    """What is published of a release."""
    return compile_sql(text, report_bias=False).query.finish(release)


def same(mine, theirs):
    return mine == (pytest.approx(theirs) if isinstance(theirs, float) else theirs)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT page, n * 2 AS x FROM p WHERE n > 5 AND lang = 'de' ORDER BY x DESC, page LIMIT 4",
        (
            "SELECT lang AS l, SUM(n) AS s, AVG(n) AS a, MIN(n) AS lo, MAX(page) AS hi, "
            "COUNT(n) AS k FROM p GROUP BY lang ORDER BY l NULLS FIRST"
        ),
        "SELECT SUM(n) / COUNT(*) AS x, COUNTIF(n > 3) AS y FROM p",
        (
            "SELECT CASE WHEN n > 9 THEN 'big' ELSE 'small' END AS size, COUNT(*) AS k FROM p "
            "GROUP BY 1 HAVING k > 3 ORDER BY 2 DESC"
        ),
        (
            "SELECT lang, s - 1 AS t FROM (SELECT lang, SUM(n) AS s FROM p GROUP BY lang) "
            "WHERE lang IS NOT NULL ORDER BY t"
        ),
        (
            "SELECT lang, SUM(n) AS s, RANK() OVER (ORDER BY SUM(n) DESC) AS r FROM p GROUP BY "
            "lang QUALIFY r <= 2 ORDER BY r"
        ),
        (
            "SELECT * FROM (SELECT page, lang, n FROM p) PIVOT(SUM(n) FOR lang IN ('de', 'en')) "
            "WHERE de > 3 OR en IS NOT NULL ORDER BY page LIMIT 9 OFFSET 2"
        ),
        (
            "SELECT lang, n > 5 AS b, SUM(n) AS s, COUNT(*) AS k FROM p GROUP BY CUBE (lang, b) "
            "ORDER BY k, s NULLS FIRST, lang NULLS FIRST, b NULLS FIRST"
        ),
        (
            "SELECT lang, page, MAX(n) AS m FROM p GROUP BY lang, GROUPING SETS ((page), ()) "
            "ORDER BY m NULLS FIRST, lang NULLS FIRST, page NULLS FIRST LIMIT 20"
        ),
        "SELECT q.page AS page FROM p AS q ORDER BY q.n DESC NULLS LAST, q.page LIMIT 5",
    ],
)
def test_it_computes_what_another_database_does(text):
    """With NULLs, groups, conditions, pivots and selects around selects."""
    database = duckdb.connect(config={"threads": 1})
    database.register("p", RELEASE)
    theirs = database.sql(text.replace("COUNTIF", "COUNT_IF")).to_arrow_table()
    both = [finished(f"WITH p AS ({INSIDE}) {text}")]
    if "p AS q" not in text:
        both.append(finished(text.replace("FROM p", f"FROM ({INSIDE})")))

    for ours in both:
        assert ours["trigger_time"].null_count == 0
        for name in theirs.column_names:
            pairs = zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=True)
            assert all(same(mine, other) for mine, other in pairs), name


def test_error_bars_of_groups_are_there_where_they_are_honest():
    """A sum of independent noises has one; rows chosen by noise, or one noise twice, have none."""
    full = RELEASE.set_column(2, "n", pa.array(np.full(len(RELEASE), 50.0)))
    made = finished(f"SELECT lang, SUM(n) AS s, AVG(3 * n) AS a, COUNT(*) AS k FROM ({INSIDE}) "
                    "GROUP BY lang", full)  # fmt: skip
    for row in made.to_pylist():
        assert row["s_stddev"] == pytest.approx(1.5 * row["k"] ** 0.5)
        assert row["a_stddev"] == pytest.approx(4.5 / row["k"] ** 0.5)
    ratio = finished(f"SELECT SUM(n) / 2 AS h FROM ({INSIDE})", full)
    assert ratio["h_stddev"][0].as_py() == pytest.approx(1.5 * len(RELEASE) ** 0.5 / 2)
    for text in [
        f"SELECT SUM(n) AS s FROM ({INSIDE}) WHERE n > 5",
        f"SELECT SUM(n) AS s FROM ({INSIDE} HAVING n > 5)",
        f"SELECT SUM(n) AS s FROM (SELECT * FROM ({INSIDE}) ORDER BY n LIMIT 3)",
        f"SELECT n > 3 AS b, SUM(n) AS s FROM ({INSIDE}) GROUP BY b",
        f"SELECT SUM(IF(n > 3, n, 0)) AS s FROM ({INSIDE})",
        f"SELECT SUM(n) - AVG(n) AS s FROM ({INSIDE})",
        f"SELECT n - x AS s FROM (SELECT n, 2 * n AS x FROM ({INSIDE}))",
        f"SELECT MAX(n) AS s FROM ({INSIDE})",
        f"SELECT SUM(t) AS s FROM (SELECT SUM(n) OVER () AS t FROM ({INSIDE}))",
        "SELECT SUM(n) AS s FROM (" + INSIDE.replace("OPTIONS (", "OPTIONS (debias = 'global', ")
        + ")",
    ]:  # fmt: skip
        options = {} if "debias" in text else {"report_bias": False}
        finish = compile_sql(text, **options).query.finish
        release = RELEASE.append_column("kept_share", pa.array([1.0] * len(RELEASE)))
        assert "s_stddev" not in finish(release if "debias" in text else RELEASE).column_names
    whole = finished(f"SELECT page, n FROM ({INSIDE}) WHERE page < 'p2'")
    assert whole["n_stddev"].to_pylist() == [1.5] * len(whole)


def test_a_sum_is_off_by_its_error_bar():
    """Over 400 releases standardised errors have a variance of 1, but for a chance of 1e-6."""
    rng, errors = np.random.default_rng(9), []
    finish = compile_sql(f"SELECT SUM(n) AS s FROM ({INSIDE})", report_bias=False).query.finish
    for _ in range(400):
        noisy = RELEASE.set_column(2, "n", pa.array(rng.normal(0, 1.5, len(RELEASE))))
        row = finish(noisy).to_pylist()[0]
        errors.append(row["s"] / row["s_stddev"])

    assert np.var(errors) == pytest.approx(1, abs=4.9 * (2 / 400) ** 0.5)
    assert np.var(np.array(errors) * 1.5) > 1 + 4.9 * (2 / 400) ** 0.5


def test_pivots_have_names_and_error_bars():
    """By value or alias, with the aggregate's name before it if it has one."""
    text = (
        f"SELECT * FROM ({INSIDE}) PIVOT(SUM(n) AS s, COUNT(*) AS k FOR lang IN ('de', 'en' AS e))"
    )
    made = finished(text)

    assert made.column_names[:7] == ["page", "s_de", "s_de_stddev", "s_e", "s_e_stddev", "k_de",
                                     "k_e"]  # fmt: skip
    assert len(made) == len(RELEASE)


def test_all_that_is_done_is_part_of_the_identity():
    """Two SELECTs that publish different figures never pass for one query."""
    texts = [
        f"SELECT {columns} FROM ({INSIDE}) {end}"
        for columns, end in [
            ("*", "PIVOT(SUM(n) FOR lang IN ('de'))"),
            ("*", "PIVOT(MAX(n) FOR lang IN ('de'))"),
            ("*", "PIVOT(MAX(n) FOR lang IN ('en' AS de))"),
            ("*", "PIVOT(MAX(n) FOR lang IN ('en' AS de)) LIMIT 3"),
            ("lang, SUM(n) AS s", "GROUP BY lang"),
            ("lang, AVG(n) AS s", "GROUP BY lang"),
            ("lang, AVG(n) AS s", "GROUP BY ROLLUP (lang)"),
            ("lang, AVG(n) AS s", "WHERE n > 3 GROUP BY lang"),
            ("lang, AVG(n) AS s", "GROUP BY lang HAVING s > 3"),
        ]
    ]
    assert len({compile_sql(text).query.finish.text for text in texts}) == len(texts)


def test_explain_tells_computed_columns_and_their_error_bars():
    """Through several SELECTs; what is passed on as it is has the noise of its aggregate."""
    inner = f"SELECT lang, page AS p, n, n / 2 AS h FROM ({INSIDE})"
    text = f"SELECT lang, SUM(n) AS s, MAX(h) AS m, SUM(h) AS t FROM ({inner}) GROUP BY lang"
    assert compile_sql(inner).query.finish.computed == {"h": True}
    assert compile_sql(text).query.finish.computed == {"s": True, "m": False, "t": True}
    assert compile_sql(f"SELECT s, t AS u FROM ({text})").query.finish.computed == {
        "s": True,
        "u": True,
    }


OPTIONS = (
    "WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 3, delta = 1e-6, privacy_unit_column = user_id, "
    "max_groups_contributed = 4, report_bias = FALSE, start = '2024-05-01', "
    "end = '2024-05-01 08:00'"
)
WINDOWS = "FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' HOUR) GROUP BY window_start, page"


def rows(size=4000, seed=4):
    """Pages that are there in some hours only."""
    rng = np.random.default_rng(seed)
    ts = rng.integers(0, 8 * 3600, size)
    page = rng.integers(0, 4, size) + 4 * (ts // 7200 % 2) * rng.integers(0, 2, size)
    return pa.table(
        {
            "user_id": rng.integers(0, 1500, size),
            "page": [f"/{each}" for each in page],
            "ts": np.datetime64("2024-05-01") + ts.astype("m8[s]"),
        }
    )


def run(text, **options):
    """All releases of a query as one table, and the query."""
    settings = dps.EngineOptions(run_id=RUN, buckets=2)
    query = dps.sql(text, **{"max_rows_per_group": 1} | options)
    return pa.concat_tables(dps.run(query, source=rows(), secret=SECRET, options=settings))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("LAG(n)", ("SUM(n) OVER (PARTITION BY page ORDER BY window_start RANGE BETWEEN INTERVAL 1 "
         "HOUR PRECEDING AND INTERVAL 1 HOUR PRECEDING)")),
        ("LAG(n, 3)", ("SUM(n) OVER (PARTITION BY page ORDER BY window_start RANGE BETWEEN "
         "INTERVAL 3 HOUR PRECEDING AND INTERVAL 3 HOUR PRECEDING)")),
        ("SUM(n)", "SUM(n) OVER (PARTITION BY page ORDER BY window_start)"),
        ("MAX(n)", "MAX(n) OVER (PARTITION BY page ORDER BY window_start)"),
        ("AVG(n) ROWS 2", ("AVG(n) OVER (PARTITION BY page ORDER BY window_start RANGE BETWEEN "
         "INTERVAL 2 HOUR PRECEDING AND CURRENT ROW)")),
        ("MIN(n) ROWS 1", ("MIN(n) OVER (PARTITION BY page ORDER BY window_start RANGE BETWEEN "
         "INTERVAL 1 HOUR PRECEDING AND CURRENT ROW)")),
    ],
)  # fmt: skip
def test_functions_of_windows_are_what_a_database_makes_of_all_releases(ours, theirs):
    """A key that a window does not show is NULL there, not its row of long ago."""
    call, rows_back, frame = ours.partition(" ROWS")
    end = f"{rows_back}{frame} PRECEDING" if frame else ""
    over = f"{call} OVER (PARTITION BY page ORDER BY window_start{end})"
    made = run(f"SELECT {OPTIONS}) window_start, page, COUNT(*) AS n, {over} AS x {WINDOWS}")
    database = duckdb.connect(config={"threads": 1})
    database.register("made", made)
    found = database.execute(f"SELECT x, {theirs} AS y, n FROM made").fetchall()

    assert len(found) > 30
    assert any(y is not None and y != n for _, y, n in found)
    assert all(same(x, y if y is None else float(y)) or x == y for x, y, _ in found)
    # a remembered key is shown or hidden by noise, which is another query's here
    asked = f"SELECT {OPTIONS}, remember_keys = FALSE) window_start, page, COUNT(*) AS n"
    made, plain = run(f"{asked}, {over} AS x {WINDOWS}"), run(f"{asked} {WINDOWS}")
    assert made["page"].to_pylist() == plain["page"].to_pylist()


def test_windows_of_groups_of_published_rows_are_compared():
    """The difference of two sums, each of a release, has the error bar of both."""
    inside = f"SELECT {OPTIONS}) window_start, page, COUNT(*) AS n {WINDOWS}"
    change = "SUM(n) - LAG(SUM(n)) OVER (PARTITION BY SUBSTR(page, 1, 1) ORDER BY window_start)"
    made = run(f"SELECT SUM(n) AS s, {change} AS d, SUBSTR(page, 1, 1) AS k FROM ({inside}) "
               "GROUP BY k")  # fmt: skip
    sums, bars = (np.asarray(made[name], float) for name in ("s", "s_stddev"))

    assert made["d"].to_pylist() == [None, *np.diff(sums)]
    assert made["d_stddev"].to_pylist()[1:] == pytest.approx(np.hypot(bars[1:], bars[:-1]))
    with pytest.raises(InvalidParameter, match="after groups are chosen"):
        run(f"SELECT page, SUM(n) AS s FROM ({inside}) GROUP BY page HAVING LAG(SUM(n)) OVER "
            "(PARTITION BY page ORDER BY window_start) > 3")  # fmt: skip


@pytest.mark.parametrize(
    "window",
    [
        "TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' HOUR)",
        "HOP(log, DESCRIPTOR(ts), INTERVAL '1' HOUR, INTERVAL '3' HOUR)",
    ],
)
def test_a_difference_of_windows_is_off_by_its_error_bar(window):
    """Noises of windows are independent, of those that overlap too; but for a chance of 1e-6."""
    empty = rows().slice(0, 1).set_column(1, "page", pa.array(["/other"]))
    text = f"""SELECT {OPTIONS}) page, COUNT(*) AS n,
        n - LAG(n) OVER (PARTITION BY page ORDER BY window_start) AS d,
        SUM(n) OVER (PARTITION BY page ORDER BY window_start ROWS 2 PRECEDING) AS s
        FROM {window} GROUP BY window_start, page"""
    groups = [f"{n}" for n in range(3000)]
    query = dps.sql(text, public_groups=groups, max_rows_per_group=1)
    third = [*dps.run(query, source=empty, secret=SECRET)][2]
    spread = 4.9 * (2 / 3000) ** 0.5
    for name in ("d", "s"):
        errors = np.asarray(third[name], float) / np.asarray(third[f"{name}_stddev"], float)
        assert np.var(errors) == pytest.approx(1, abs=spread)
        assert np.var(errors * 1.2) > 1 + spread


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([1, None, -(2**62)], pa.int64()),
        pa.array([0.5, None, float("nan")]),
        pa.array([b"", None, b"\xff"]),
        pa.array([True, None, False]),
        pa.array([1, None, 20_000], pa.int32()).cast(pa.date32()),
        pa.array([1, None, 2**45], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        pa.array([1, None, 10**12], pa.int64()).cast(pa.decimal128(30, 2)),
        pa.array(["a", None, "b"]).dictionary_encode(),
    ],
    ids=lambda keys: str(keys.type),
)
def test_keys_of_any_type_are_grouped_and_found_again(keys):
    """As they are: a NULL is a key, and a NaN."""
    texts = [
        (
            f"SELECT {OPTIONS}) page, COUNT(*) AS n, LAG(n) OVER (PARTITION BY page ORDER BY "
            f"window_start) AS x {WINDOWS}"
        ),
        (
            f"SELECT page, SUM(n) AS n FROM (SELECT {OPTIONS}) page, COUNT(*) AS n {WINDOWS}) "
            "GROUP BY page"
        ),
    ]
    times = pa.array([0] * 3, pa.timestamp("us", tz="UTC"))
    columns = dict.fromkeys(("window_start", "window_end", "trigger_time"), times)
    columns |= {"page": keys, "n": pa.array([7, 8, 9]), "n_stddev": pa.array([1.0] * 3)}
    release = pa.table(columns | {"release_index": pa.array([1] * 3)})
    back, group = (compile_sql(text, max_rows_per_group=1).query.finish for text in texts)
    earlier = {}
    back.look_back(release, 3, earlier)
    again = back.look_back(release.take(pa.array([2, 0, 1])), 4, earlier)

    assert again["x"].to_pylist() == [9, 7, 8]
    twice = group(pa.concat_tables([release, release.take(pa.array([2, 1]))]))
    assert twice["n"].to_pylist() == [7, 16, 18]
    assert twice["page"].combine_chunks().cast(keys.type).equals(keys) or keys.type == pa.float64()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"SELECT user_id FROM ({INSIDE})", "not published"),
        (f"SELECT page FROM ({INSIDE}) WHERE seconds > 3", "not published"),
        (f"SELECT page, SUM(n) AS s FROM ({INSIDE})", "neither grouped by nor aggregated"),
        (f"SELECT SUM(SUM(n)) AS s FROM ({INSIDE})", "aggregate of an aggregate"),
        (f"SELECT page FROM ({INSIDE}) WHERE SUM(n) > 3", "single rows"),
        (f"SELECT page FROM ({INSIDE}) HAVING n > 3", "goes with GROUP BY"),
        (f"SELECT page, RAND() AS r FROM ({INSIDE})", "draws at random"),
        (f"SELECT page, CURRENT_TIMESTAMP() AS r FROM ({INSIDE})", "changes with the clock"),
        (f"SELECT page, (SELECT 1) AS r FROM ({INSIDE})", "a subquery in an expression"),
        (f"SELECT DISTINCT lang FROM ({INSIDE})", "DISTINCT"),
        (f"SELECT * FROM ({INSIDE}) UNPIVOT(n FOR lang IN (a, b))", "one list of values"),
        (f"SELECT lang FROM ({INSIDE} EMIT EVERY INTERVAL '1' HOUR) EMIT EVERY INTERVAL '1' HOUR",
         "EMIT stands twice"),
        (f"SELECT lang FROM ({INSIDE}) TABLESAMPLE (10 PERCENT)", "SAMPLE is not known"),
        (f"SELECT lang FROM (({INSIDE}) LIMIT 3)", "LIMIT is not known"),
        (f"SELECT a FROM ({INSIDE}) AS p(a, b, c)", "cannot be renamed"),
        (f"WITH p(a, b, c) AS ({INSIDE}) SELECT a FROM p", "cannot be renamed"),
        (f"SELECT lang FROM ({INSIDE}), other", "not joined"),
        (f"SELECT lang FROM (SELECT p.lang FROM ({INSIDE}) AS p JOIN log USING (lang))",
         "not joined"),
        (f"SELECT a.page FROM ({INSIDE}) AS a JOIN pages USING (page)", "not joined"),
        (f"WITH a AS ({INSIDE}), b AS ({INSIDE}) SELECT page FROM a", "second private query"),
        (f"SELECT n AS trigger_time FROM ({INSIDE})", "has a meaning"),
        (f"SELECT n, 5 AS n_stddev FROM ({INSIDE})", "an error bar"),
        (f"SELECT n AS m, n * 2 AS m_stddev FROM ({INSIDE})", "an error bar"),
        ((f"SELECT lang, SUM(n) AS s FROM ({INSIDE}) GROUP BY lang "
         "HAVING LAG(s) OVER (ORDER BY window_start) > 3"), "window_start is not published"),
        (f"SELECT page, page FROM ({INSIDE})", "two columns are named"),
        (f"SELECT n + 1 FROM ({INSIDE})", "needs a name"),
        (f"SELECT * FROM ({INSIDE}) PIVOT(SUM(n) FOR n IN (1))", "by a key"),
        ((f"SELECT * FROM (SELECT page, lang, n, n AS m FROM ({INSIDE})) "
         "PIVOT(SUM(n) FOR lang IN ('de'))"), "group by m too"),
        (f"SELECT * FROM ({INSIDE}) PIVOT(SUM(n) FOR lang IN (NULL))", "not NULL"),
        (f"SELECT * FROM ({INSIDE}) PIVOT(SUM(n) FOR lang IN ('trigger_time'))", "two columns"),
        (f"SELECT * FROM ({INSIDE}) PIVOT(SUM(n) FOR lang IN ('a_stddev', 'a'))", "an error bar"),
        (f"SELECT SUM(n) OVER (ORDER BY page ROWS 2 PRECEDING) AS s FROM ({INSIDE})", "of windows"),
        (f"{INSIDE} UNION ALL {INSIDE}", "each has a budget"),
        (f"SELECT * FROM ({INSIDE} UNION ALL {INSIDE})", r'name = "part2"'),
    ],
)  # fmt: skip
def test_what_is_refused_around_a_private_query(text, reason):
    """With the reason, the place and a fix."""
    with pytest.raises(InvalidParameter, match=reason) as refused:
        compile_sql(text)
    assert "fix: " in str(refused.value)


def test_the_refusal_of_a_union_writes_the_pipeline():
    """Its blocks are TOML, and each holds a branch as it was written."""
    with pytest.raises(InvalidParameter) as refused:
        compile_sql(f"{INSIDE} UNION ALL ({INSIDE}\nHAVING n > 5) UNION ALL {INSIDE}")
    blocks = tomllib.loads(str(refused.value).split(" there\n")[1])["query"]

    assert [block["name"] for block in blocks] == ["part1", "part2", "part3"]
    assert [block["sql"] for block in blocks] == [INSIDE, f"{INSIDE}\nHAVING n > 5", INSIDE]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("LEAD(n) OVER (PARTITION BY page ORDER BY window_start)", "still to come"),
        ("LAG(n) OVER (PARTITION BY page ORDER BY window_start DESC)", "the earlier ones before"),
        ("LAG(n) OVER (ORDER BY window_start)", "one row of each window"),
        ("LAG(n) OVER (PARTITION BY n ORDER BY window_start)", "one row of each window"),
        ("LAG(n, 2000) OVER (PARTITION BY page ORDER BY window_start)", "up to 1000"),
        ("LAG(n + 1) OVER (PARTITION BY page ORDER BY window_start)", "takes a published column"),
        ("LAG(seconds) OVER (PARTITION BY page ORDER BY window_start)", "is not published"),
        ("LAG(COUNT(DISTINCT user_id)) OVER (PARTITION BY page ORDER BY window_start)",
         "not among the columns"),
        ("RANK() OVER (PARTITION BY page ORDER BY window_start)", "not known over several windows"),
        (("SUM(n) OVER (PARTITION BY page ORDER BY window_start ROWS BETWEEN 1 PRECEDING AND 1 "
         "FOLLOWING)"), "still to come"),
        ("AVG(n) OVER (PARTITION BY page ORDER BY window_start)", "AVG of all windows"),
    ],
)  # fmt: skip
def test_what_is_refused_over_windows(call, reason):
    with pytest.raises(InvalidParameter, match=reason):
        dps.sql(f"SELECT {OPTIONS}) page, COUNT(*) AS n, {call} AS x {WINDOWS}")


def test_endless_running_totals_of_private_keys_are_refused():
    """They would keep a figure for every key that was ever shown."""
    call = "SUM(n) OVER (PARTITION BY page ORDER BY window_start) AS x"
    text = f"SELECT {OPTIONS}, privacy_unit_period = INTERVAL '1' DAY) page, COUNT(*) AS n, {call}"
    text = f"{text} {WINDOWS}"
    endless = text.replace(", end = '2024-05-01 08:00'", "")
    with pytest.raises(InvalidParameter, match="every key that was ever shown"):
        dps.sql(endless)
    assert dps.sql(endless, public_groups=["/1"], max_rows_per_group=1).finish.windows_back == 1


def test_only_as_many_windows_are_kept_as_are_looked_at():
    """Memory does not grow with time, and `explain` says that it costs nothing."""
    call = "n - LAG(n, 2) OVER (PARTITION BY page ORDER BY window_start) AS d"
    text = f"SELECT {OPTIONS}) page, COUNT(*) AS n, {call} {WINDOWS}"
    query = dps.sql(text, max_rows_per_group=1)
    started = dps.run(query, source=rows(), secret=SECRET)
    kept = [len(started._flow.tables.earlier[0]) for _ in started]

    assert len(kept) == 8
    assert max(kept) == 2
    assert "costs nothing" in str(dps.explain(query))
