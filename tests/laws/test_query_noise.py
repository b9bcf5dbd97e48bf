"""The noise that a query publishes: its size, and what it shares with other noise."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chi2

from dpstream.connectors.testing import ListSink
from dpstream.query.aggregates import Avg, Count, CountUnits, Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Tumble
from tests.counting.matrices import dense
from tests.laws.queries import ALARM, HOUR, Z, query_of, run_of

GROUPS = 3000
MEASURED = query_of(
    keys=("key",),
    public_groups=[f"k{n}" for n in range(GROUPS)],
    every="4 hours",
    window=Tumble("12 hours"),
    epsilon=1,
    delta=1e-6,
    max_groups_contributed=2,
    max_rows_per_group=2,
    max_rows_contributed=3,
    aggregates=(
        Count("n"),
        CountUnits("users"),
        Sum("s", column="x", contribution_bounds_per_row=(-1, 3), quantum="0.5"),
        Avg("m", column="x", contribution_bounds_per_row=(-1, 3), quantum="0.5"),
    ),
)


@pytest.fixture(scope="module")
def measured():
    """By column: noise of windows x releases x groups, and the declared deviations likewise."""
    rng = np.random.default_rng(7)
    each, size = 4, GROUPS * 4
    values = rng.integers(-2, 8, size) / 2
    table = pa.table(
        {
            "user": [f"u{n}" for n in range(size)],
            "key": [f"k{n % GROUPS}" for n in range(size)],
            "ts": np.repeat([HOUR, 13 * HOUR], size // 2),
            "x": values,
        }
    )
    clamped = np.clip(values, -1, 3).reshape(2, each // 2, GROUPS).sum(axis=1)
    exact = {"n": each // 2, "users": each // 2, "s": clamped}
    listed = [row[0] for row in MEASURED.public_groups]
    place = {key: number for number, key in enumerate(listed)}
    noise = {name: np.zeros((2, 3, GROUPS)) for name in exact}
    declared = {name: np.zeros((2, 3)) for name in exact}
    for (_, window, release), found in _all(table).items():
        order = np.argsort([place[key] for key in found["key"].to_pylist()])
        for name, true in exact.items():
            values = found[name].to_numpy()[order]
            truth = true[window] if name == "s" else true
            noise[name][window, release - 1] = values - truth
            deviation = found[f"{name}_stddev"].to_numpy()
            assert (deviation == deviation[0]).all()
            declared[name][window, release - 1] = deviation[0]
    return noise, declared


def _all(table):
    sink = ListSink()
    list(run_of(MEASURED, table, sink=sink))
    return sink.tables


def right_scale(noise, deviation):
    """Is the variance that of `deviation`? False alarm 2e-8; the mean is known to be 0."""
    size, ratio = len(noise), (noise**2).sum() / deviation**2
    return chi2.ppf(ALARM / 2, size) < ratio < chi2.isf(ALARM / 2, size)


@pytest.mark.parametrize("name", ["n", "users", "s"])
def test_noise_has_the_declared_deviation(measured, name):
    """At every release of every window; 20% more or less is seen."""
    noise, declared = measured
    for window in range(2):
        for release in range(3):
            here, deviation = noise[name][window, release], declared[name][window, release]
            assert right_scale(here, deviation)
            assert not right_scale(here, deviation * 1.2)
            assert not right_scale(here, deviation / 1.2)
            assert abs(here.mean()) < Z * deviation / np.sqrt(GROUPS)


def test_declared_deviations_are_what_the_bounds_ask_for():
    """sensitivity x column norm x row norm x sqrt(columns) / mu, with rounding: by hand."""
    plan = plan_query(MEASURED)
    window = plan.window(3)
    decoder, encoder = dense(window.process)
    norm = np.linalg.norm(encoder, axis=0).max()
    mu = float(plan.calibrated.mu_squared) ** 0.5
    # 3 rows, 2 in a group: 2^2 + 1^2; units in 2 groups; values in half steps, up to 6 (or 4
    # about the middle)
    sizes = {"rows": 5**0.5, "units": 2**0.5}
    for measure, found in zip(MEASURED.measures, window.stddevs, strict=True):
        far = 6 if measure.middle == 0 else 4
        size = sizes.get(measure.kind, far * 5**0.5)
        sigma = size * norm * 2 / (mu * 0.98**0.5)  # four columns share what totals leave
        expected = np.hypot(sigma * np.linalg.norm(decoder, axis=1), 12**-0.5)
        assert found == pytest.approx(expected, rel=1e-6)


def covariance_fits(noise, expected):
    """Each entry of the sample covariance against a normal's, at Z deviations."""
    size = noise.shape[1]
    found = noise @ noise.T / size
    variance = (np.outer(np.diag(expected), np.diag(expected)) + expected**2) / size
    return (np.abs(found - expected) < Z * np.sqrt(variance)).all()


@pytest.mark.parametrize("name", ["n", "users", "s"])
def test_noise_of_successive_releases_is_correlated_as_designed(measured, name):
    """B B^T, for the counter's decoder B; fresh noise at every release would be averaged away."""
    noise, declared = measured
    decoder, _ = dense(plan_query(MEASURED).window(3).process)
    for window in range(2):
        quantum = 0.5 if name == "s" else 1
        rounding = quantum**2 / 12
        sigma = np.sqrt(declared[name][window, 0] ** 2 - rounding) / decoder[0, 0]
        expected = sigma**2 * decoder @ decoder.T + rounding * np.eye(3)
        assert covariance_fits(noise[name][window], expected)
        assert not covariance_fits(noise[name][window], np.diag(np.diag(expected)))


def test_a_key_that_comes_late_has_the_noise_of_one_that_was_there():
    """Its processes began at step 1: declared deviations, and the covariance of later releases."""
    keys, each = 1500, 40
    query = query_of(
        every="6 hours",
        epsilon=8,
        max_groups_contributed=1,
        aggregates=(
            Count("n"),
            Sum("s", column="x", contribution_bounds_per_row=(0, 4), quantum=1),
        ),
    )
    table = pa.table(
        {
            "user": np.arange(keys * each).astype(str),
            "key": [f"k{n % keys}" for n in range(keys * each)],
            "ts": np.full(keys * each, 13 * HOUR),  # seen at the third of four releases
            "x": np.full(keys * each, 3),
        }
    )
    empty, also_empty, *late = run_of(query, table)
    window = plan_query(query).window(4)
    decoder, _ = dense(window.process)

    assert len(empty) == len(also_empty) == 0
    assert [len(release) for release in late] == [keys, keys]  # far above the threshold: at once
    assert late[0]["key"].equals(late[1]["key"])
    for number, (name, exact) in enumerate((("n", each), ("s", 3 * each))):
        noise = np.stack([release[name].to_numpy() - exact for release in late])
        cover = window.sigmas[number] ** 2 * decoder @ decoder.T + np.eye(4) / 12
        for row, release, expected in zip(noise, late, np.diag(cover)[2:], strict=True):
            declared = release[f"{name}_stddev"][0].as_py()
            assert declared == pytest.approx(np.sqrt(expected))
            assert right_scale(row, declared)
            assert not right_scale(row, declared * 1.2)
        assert covariance_fits(noise, cover[2:, 2:])
        assert not covariance_fits(noise, cover[:2, :2])  # as if begun when it came


def test_noise_is_independent_between_groups_columns_and_windows(measured):
    """No pair of groups, columns or windows shares any."""
    noise, declared = measured
    unit = {name: noise[name] / declared[name][:, :, None] for name in noise}
    limit = Z / np.sqrt(GROUPS)
    for one in unit.values():
        for path in (one[0, 0], one[1, 2]):
            for shift in (1, 2, GROUPS // 2):
                assert abs((path * np.roll(path, shift)).mean()) < limit
        assert abs((one[0, 0] * one[1, 0]).mean()) < limit
    pairs = [("n", "users"), ("n", "s"), ("users", "s")]
    for first, second in pairs:
        for release in range(3):
            assert abs((unit[first][0, release] * unit[second][0, release]).mean()) < limit
    shared = unit["n"][0, 0] + 0.2 * unit["users"][0, 0]
    assert abs((shared * unit["users"][0, 0]).mean()) > limit  # control: a fifth of it shared


def test_averages_have_about_the_declared_deviation():
    """To first order, where a group has many rows: within 10% of the declared deviation."""
    size, each = 1500, 60
    query = query_of(
        public_groups=[f"k{n}" for n in range(size)],
        epsilon=20,
        max_groups_contributed=1,
        aggregates=(Avg("m", column="x", contribution_bounds_per_row=(0, 10)),),
    )
    values = np.random.default_rng(3).integers(0, 11, size * each)
    table = pa.table(
        {
            "user": np.arange(size * each).astype(str),
            "key": [f"k{n % size}" for n in range(size * each)],
            "ts": np.zeros(size * each, np.int64),
            "x": values,
        }
    )
    exact = {f"k{n}": values[n::size].mean() for n in range(size)}
    (release,) = run_of(query, table)
    found = [exact[key] for key in release["key"].to_pylist()]
    errors = (release["m"].to_numpy() - found) / release["m_stddev"].to_numpy()
    spread = np.sqrt((errors**2).mean())

    assert 0.9 < spread < 1.1  # 5.4 deviations of the estimate
    assert not 0.9 < spread * 1.2 < 1.1
    assert not 0.9 < spread / 1.2 < 1.1
