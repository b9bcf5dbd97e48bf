"""SMOOTH and SHRINK: less error than what was measured, and deviations that say how much."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binom

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.sql_compiler import compile_sql, model_estimates
from dpstream.sql_compiler.model_estimates import shrink, smooth
from tests.sql_compiler.test_refused import PRIVATE

NOISE, KEYS, WINDOWS = 6.0, 4_000, 30
FALSE_ALARM = 1e-6


def walks(step):
    """Levels that change by a normal step from window to window, and what was measured of them."""
    rng = np.random.default_rng(3)
    levels = 100 + np.cumsum(rng.normal(0, step, (WINDOWS, KEYS)), axis=0)
    return levels, levels + rng.normal(0, NOISE, levels.shape)


def covered(made, spread, truth):
    """The share of intervals of two sides of 1.96 deviations that hold the truth."""
    return float((np.abs(made - truth) <= 1.96 * spread).mean())


@pytest.mark.parametrize(("step", "least"), [(0.0, 0.35), (2.0, 0.6), (6.0, 0.9), (60.0, 1.01)])
def test_a_level_is_known_better_than_the_newest_window_says(step, least):
    """By more the less it changes; intervals hold about as often as they say, whatever it does."""
    levels, measured = walks(step)
    made, spread = smooth(measured, np.full(measured.shape, NOISE))

    assert np.sqrt(((made - levels[-1]) ** 2).mean()) < least * NOISE
    inside = covered(made, spread, levels[-1])
    assert 0.9 - binom.ppf(1 - FALSE_ALARM, KEYS, 0.1) / KEYS + 0.1 < inside


def test_a_model_without_change_is_seen_to_be_too_sure(monkeypatch):
    """Control: if levels may not change, intervals of levels that do miss most of them."""
    monkeypatch.setattr(model_estimates, "_DRIFTS", np.array([0.0]))
    levels, measured = walks(6.0)

    assert covered(*smooth(measured, np.full(measured.shape, NOISE)), levels[-1]) < 0.6


def test_windows_that_do_not_show_a_key_are_passed_over():
    """NaN is no value; a key that the newest window lacks has no level."""
    values = np.array([[5.0, 5.0, np.nan], [np.nan, 7.0, np.nan], [7.0, np.nan, 3.0]])
    made, spread = smooth(values, np.full((3, 3), 2.0))

    assert 5 < made[0] < 7
    assert np.isnan([made[1], spread[1]]).all()
    assert (made[2], spread[2]) == (3, pytest.approx(2))


SHAPES = {
    "small counts": lambda rng: (rng.poisson(5, 500), 0.45),
    "two kinds": lambda rng: (rng.choice([0, 30], 500), 0.5),
    "a long tail": lambda rng: (np.round(5000 / np.arange(1, 501)), 0.95),
    "far apart": lambda rng: (rng.exponential(1000, 20), 1.05),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_are_alike_are_drawn_together_and_others_stay(shape):
    """Error far below what was measured where rows are alike, never much above it elsewhere."""
    rng = np.random.default_rng(5)
    truth, least = SHAPES[shape](rng)
    off, plain, inside = 0.0, 0.0, []
    for _ in range(20):
        noise = rng.normal(0, NOISE, len(truth))
        made, spread = shrink(truth + noise, np.full(len(truth), NOISE))
        off, plain = off + ((made - truth) ** 2).sum(), plain + (noise**2).sum()
        inside.append(covered(made, spread, truth))

    assert off < least**2 * plain
    assert np.mean(inside) > 0.9


def test_one_row_and_rows_without_a_bar():
    """Alone a value stays as it is; without a value or a bar there is nothing to say."""
    made, spread = shrink(np.array([3.0, np.nan, 4.0]), np.array([2.0, 2.0, np.nan]))
    assert (made[0], spread[0]) == (3, 2)
    assert np.isnan([*made[1:], *spread[1:]]).all()
    assert np.isnan(shrink(np.full(2, np.nan), np.ones(2))[0]).all()


def test_equal_values_are_not_known_exactly():
    """Published counts are whole numbers, so that many are equal; none is without an error."""
    made, spread = shrink(np.array([2.0] * 25 + [9.0]), np.full(26, 1.0))

    assert made[:25] == pytest.approx(2, abs=0.01)
    assert 0.15 < spread[:25].min() <= spread[:25].max() < 1


RNG = np.random.default_rng(6)
CLICKS = pa.table(
    {
        "user": RNG.integers(0, 300, 6_000),
        "page": [f"p{n}" for n in RNG.integers(0, 9, 6_000)],
        "ts": pa.array(
            np.sort(RNG.integers(0, 8 * 3600, 6_000)) * 10**6, pa.timestamp("us", "UTC")
        ),
    }
)
ASKED = """
SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (
    epsilon = 4, delta = 1e-9, privacy_unit_column = user, max_groups_contributed = 30,
    max_rows_per_group = 1, start = '1970-01-01', end = '1970-01-01 08:00:00',
    public_groups = ['p0', 'p1', 'p2', 'p3', 'p4', 'p5', 'p6', 'p7', 'p8'])
    page, COUNT(*) AS n, {columns}
FROM TUMBLE(clicks, DESCRIPTOR(ts), INTERVAL '1' HOUR) GROUP BY page, window_start ORDER BY page
"""
COLUMNS = """
    SMOOTH(n) OVER (PARTITION BY page ORDER BY window_start) AS level,
    SMOOTH(n) OVER (PARTITION BY page ORDER BY window_start ROWS 1 PRECEDING) AS short,
    SHRINK(n) OVER () AS shrunk
"""


@pytest.mark.filterwarnings("ignore::dpstream.errors.NewBook")
def test_queries_publish_both_beside_what_was_measured(tmp_path):
    """Of a query in two sittings: the same figures as of all that was published, with bars."""
    query = dps.sql(ASKED.format(columns=COLUMNS))
    begun = iter(dps.run(query, source=CLICKS, state=tmp_path / "state"))
    first = [next(begun) for _ in range(3)]
    begun.close()
    releases = list(dps.run(query, source=CLICKS, state=tmp_path / "state"))

    assert len(releases) == 8
    assert releases[:3] == first
    counts = np.array([release["n"].to_numpy() for release in releases], np.float64)
    bars = np.array([release["n_stddev"].to_numpy() for release in releases])
    for at, release in enumerate(releases):
        for name, made in {
            "level": smooth(counts[: at + 1], bars[: at + 1]),
            "short": smooth(counts[max(0, at - 1) : at + 1], bars[max(0, at - 1) : at + 1]),
            "shrunk": shrink(counts[at], bars[at]),
        }.items():
            np.testing.assert_allclose(release[name], made[0], rtol=1e-12)
            np.testing.assert_allclose(release[f"{name}_stddev"], made[1], rtol=1e-9)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("SMOOTH(page) OVER (PARTITION BY page ORDER BY window_start) AS s", "has none"),
        (
            "SMOOTH(n) OVER (PARTITION BY page ORDER BY window_end ROWS UNBOUNDED PRECEDING) AS s",
            "SMOOTH of all windows is not kept",
        ),
        ("SHRINK(n) OVER (ORDER BY n) AS s", "SHRINK is of all rows of a part"),
        ("SHRINK(n + 1) OVER () AS s", "SHRINK takes a published column"),
        ("SHRINK(page) OVER () AS s", "page_stddev"),
        ("SMOOTH(n) OVER () AS s", "in which order windows come"),
        ("SMOOTH(n) OVER (PARTITION BY page ORDER BY n) AS s", "in which order windows come"),
    ],
)
def test_what_has_no_error_bar_is_refused(columns, told):
    """With what was meant."""
    with pytest.raises(InvalidParameter, match=told):
        compile_sql(ASKED.format(columns=columns))


@pytest.mark.parametrize("function", ["SMOOTH(n)", "MEDIAN(n)", "STDDEV(n)", "NTILE(4)", "FOO(n)"])
def test_an_outer_select_refuses_what_over_does_not_know(function):
    """None is taken for a rank."""
    inner = f"SELECT {PRIVATE} page, COUNT(*) AS n FROM log GROUP BY page"
    with pytest.raises(InvalidParameter, match=r"is not known|in which order windows come"):
        compile_sql(f"SELECT page, {function} OVER (ORDER BY n) AS made FROM ({inner})")


def test_an_outer_select_shrinks_too():
    """Over the rows of a release, with the error bar that it passes on."""
    inner = f"SELECT {PRIVATE} page, COUNT(*) AS n FROM log GROUP BY page"
    finish = compile_sql(f"SELECT page, n, SHRINK(n) OVER () AS shrunk FROM ({inner})").query.finish
    release = pa.table(
        {
            "page": ["a", "b", "c", "d"],
            "n": [1.0, -2.0, 0.5, 90.0],
            "n_stddev": [2.0] * 4,
            "trigger_time": pa.array([0] * 4, pa.timestamp("us", tz="UTC")),
            "release_index": [1] * 4,
            "kept_share": [1.0] * 4,
        }
    )
    made = finish(release).sort_by("page")
    mean, spread = shrink(release["n"].to_numpy(), release["n_stddev"].to_numpy())
    np.testing.assert_allclose(made["shrunk"], mean)
    np.testing.assert_allclose(made["shrunk_stddev"], spread)
