"""The noise of a continual GROUP BY: sensitivities, calibration with float error, late joiners."""

import itertools
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.counting.noise_process import advance_noise
from dpstream.counting.noise_scale import (
    calibrate_query,
    float_error,
    path_error,
    query_error,
    sigma_for,
)
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.privacy.accounting.accountant import delta_of
from dpstream.privacy.accounting.calibration import mu_squared_for
from dpstream.privacy.accounting.promises import delta_of_terms, own_terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.sensitivity import group_by_change, units_change
from dpstream.privacy.state import MemoryWindowKeys
from tests.counting.matrices import dense, noise_paths

HALVES = [Fraction(1, 2)] * 2
COLUMNS = [
    units_change(rows=32, groups=32),
    group_by_change(rows=32, per_group=1, groups=32, largest=Fraction(10)),
]


def noise_for(steps, epsilon=1, delta=1e-6, *, delta_slack=None, **more):
    amounts = {"epsilon": Fraction(epsilon), "delta": Fraction(delta)}
    slack = amounts["delta"] / 2 if delta_slack is None else delta_slack
    columns = {"sensitivities": COLUMNS, "shares": HALVES, "influence": [32, 32]}
    return calibrate_query(
        BufferedLinearToeplitz(steps=steps), **amounts, delta_slack=slack, **columns | more
    )


@pytest.mark.parametrize("rows", range(1, 7))
@pytest.mark.parametrize("per_group", range(1, 5))
@pytest.mark.parametrize("groups", range(1, 5))
def test_the_sensitivity_is_that_of_the_worst_unit(rows, per_group, groups):
    """Against every way to spread a unit's rows over its groups."""
    worst = most_units = 0
    for spread in itertools.product(range(per_group + 1), repeat=groups):
        if sum(spread) <= rows:
            worst = max(worst, sum(n * n for n in spread))
            most_units = max(most_units, sum(n > 0 for n in spread))
    largest = Fraction(7, 2)
    change = group_by_change(rows=rows, per_group=per_group, groups=groups, largest=largest)
    units = units_change(rows=rows, groups=groups)

    assert 0 <= float(change**2 - worst * largest**2) < 1e-9
    assert 0 <= float(units**2 - most_units) < 1e-9


def test_bounds_below_one_are_refused():
    """A unit that contributes nothing needs no noise, and no query."""
    for bad in ({"rows": 0}, {"per_group": 0}, {"groups": 0}, {"largest": Fraction(-1)}):
        with pytest.raises(InvalidParameter):
            group_by_change(
                **{"rows": 1, "per_group": 1, "groups": 1, "largest": Fraction(1)} | bad
            )
    with pytest.raises(InvalidParameter):
        units_change(rows=1, groups=0)


@pytest.mark.parametrize("steps", [1, 2, 24, 100, 1000])
@pytest.mark.parametrize(("epsilon", "delta"), [(6, 1e-9), (1, 1e-6), (Fraction(5, 2), 1e-8)])
def test_all_of_it_together_keeps_the_promise(steps, epsilon, delta):
    """Noise, selection and float error within (epsilon, delta); floats cost mu^2 less than 1%."""
    found = noise_for(steps, epsilon, delta)
    tail = Fraction(delta) / 2
    spent = delta_of(
        epsilon=epsilon, mu_squared=found.mu_squared, delta_slack=tail, error=found.error
    )
    ideal = mu_squared_for(epsilon=epsilon, delta=Fraction(delta) - tail)

    assert spent <= delta
    assert found.mu_squared > ideal * Fraction(99, 100)
    assert found.mu_squared <= ideal
    assert found.error.xi > 0
    assert found.error.tau > 0


@pytest.mark.parametrize("steps", [1, 24, 1000])
def test_sigma_pays_for_the_shift_of_its_column(steps):
    """Sum over columns of (sensitivity * column norm / sigma)^2 is mu^2, and not above."""
    process, found = BufferedLinearToeplitz(steps=steps), noise_for(steps)
    _, encoder = dense(process)
    norm = np.linalg.norm(encoder, axis=0).max()
    spent = sum(
        (float(s) * norm / float(q)) ** 2 for s, q in zip(COLUMNS, found.sigmas, strict=True)
    )

    assert spent <= float(found.mu_squared) * (1 + 1e-13)
    assert spent == pytest.approx(float(found.mu_squared), rel=1e-8)


def test_float_error_adds_over_groups_and_columns():
    """Thirty-two processes in each of two columns; shorter windows count as the worst one."""
    long, short = (BufferedLinearToeplitz(steps=steps) for steps in (100, 10))
    mu_squares = [Fraction(1, 10)] * 2
    found = query_error(long, sensitivities=COLUMNS, mu_squares=mu_squares, influence=[32, 32])
    each = [
        float_error(long, sigma=float(sigma_for(long, sensitivity=size, mu_squared=mu_squares[0])))
        for size in COLUMNS
    ]

    assert float(found.xi) == pytest.approx(32 * float(sum(e.xi for e in each)))
    assert found.xi >= 32 * sum(e.xi for e in each)
    assert found.tau >= 64 * each[0].tau
    both = query_error(
        short, long, sensitivities=COLUMNS, mu_squares=mu_squares, influence=[32, 32]
    )
    assert both == found


def test_a_query_fits_the_book_it_opens():
    """The very amounts that a query is charged are those of its own book, whose delta holds."""
    for delta in (1e-5, 1e-9, 1e-14):
        found = noise_for(100, Fraction(1, 3), delta)
        parts = {
            "mu_squared": found.mu_squared,
            "delta_slack": Fraction(delta) / 2,
            "error": found.error,
        }
        terms = own_terms(
            epsilon=Fraction(1, 3), period="1 day", time_zone="UTC", change="all its rows", **parts
        )
        ledger = Ledger()
        ledger.admit("clicks", terms, "a query")
        spend = QuerySpend(
            run=bytes(16), query="q", ledger=ledger, dataset="clicks", keys=MemoryWindowKeys()
        )
        amount = parts.pop("mu_squared")
        spend.pay(digest="aa", amount=amount, measure="mu_squared", **parts)

        assert delta_of_terms(terms) <= delta
        assert ledger.report()[0]["left"] == ledger.report()[0]["tail"]["left"] == "0"


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (1000, {"epsilon": Fraction(1, 10)}),  # xi of 64 processes
        (100_000, {}),
        (100, {"sensitivities": [COLUMNS[0], Fraction(10**12)]}),  # more noise than floats hold
        (100, {"epsilon": 40}),  # lost mass times e^40
        (100, {"delta_slack": Fraction(1e-6)}),
        (100, {"delta_slack": Fraction(2e-6)}),
        (100, {"delta": Fraction(0), "delta_slack": Fraction(0)}),
        (100, {"shares": [Fraction(1, 2), Fraction(2, 3)]}),
        (100, {"shares": [Fraction(1), Fraction(0)]}),
        (100, {"influence": [0, 32]}),
    ],
)
def test_what_cannot_be_kept_is_refused(steps, more):
    """Floats that take more than a hundredth, a tail that takes all, shares beyond the whole."""
    with pytest.raises(InvalidParameter):
        noise_for(steps, **more)


def test_whoever_joins_late_has_the_noise_of_one_begun_at_step_one():
    """Joint covariance of the path from the joining step on (each bound fails once in 10^7)."""
    steps, keys, sigma = 6, 40_000, 50.0
    process = BufferedLinearToeplitz(steps=steps)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 2**63, (keys, 2)).astype(np.uint64)

    def draw(rows, purpose, each):
        return rng.standard_normal((len(rows), each))

    noise, paths = None, []
    for step in range(1, steps + 1):
        joining = ids if step == 3 else ids[:0]
        noise, path = advance_noise(process, noise, joining, step, sigma, draw)
        paths.append(path)
    decoder, _ = dense(process)
    expected = (decoder @ decoder.T)[2:, 2:] * sigma**2
    found = np.cov(np.stack(paths[2:]))
    largest = 5.4 * expected.max() * np.sqrt(2 / keys)

    assert [len(path) for path in paths[:2]] == [0, 0]
    assert np.abs(found - expected).max() < largest
    assert np.abs(1.1 * found - expected).max() > largest  # control


def test_no_step_is_left_out_and_nobody_joins_twice():
    """A step without its noise, or a second process on the same normals, would leak."""
    process = BufferedLinearToeplitz(steps=9)
    ids = np.arange(8, dtype=np.uint64).reshape(4, 2)

    def draw(rows, purpose, each):
        return np.ones((len(rows), each))

    noise, _ = advance_noise(process, None, ids, 2, 1.0, draw)
    for step in (1, 2, 4):
        with pytest.raises(StateError, match="left out"):
            advance_noise(process, noise, ids[:0], step, 1.0, draw)
    with pytest.raises(InvalidInput, match="joins once"):
        advance_noise(process, noise, ids[:1], 3, 1.0, draw)


def test_the_error_of_a_streamed_tree_stays_within_its_bound():
    """Against the same recursion with fifty digits; normals of nine digits would leave it."""
    tree = Honaker(steps=255)
    z = np.random.default_rng(3).normal(size=(255, 3))

    def worst(streamed):
        with localcontext(prec=50):
            return max(
                abs(float(Decimal(streamed[t, key]) - exact))
                for key in range(3)
                for t, exact in enumerate(_exact_path(tree, [Decimal(x) for x in z[:, key]]))
            )

    assert 0 < worst(noise_paths(tree, z)) <= path_error(tree)
    assert worst(noise_paths(tree, z.round(9))) > path_error(tree)


def _exact_path(tree, normals):
    """Prefix noise of a bottom-up tree, node by node."""
    one, two = Decimal(1), Decimal(2)
    variance = [one / (two * (one - two ** -(k + 1))) for k in range(tree.width)]
    nodes, paths = {}, []
    for step, z in enumerate(normals, start=1):
        level = (step & -step).bit_length() - 1
        carried, left, factor = Decimal(0), variance[level], one
        for low in range(level - 1, -1, -1):
            factor *= one - variance[low + 1]
            carried += factor * nodes.pop(low)
            left -= factor**2 * variance[low]
        nodes[level] = carried + left.sqrt() * z
        paths.append(sum(nodes.values()))
    return paths


def test_a_tree_costs_a_query_little_float_error():
    """A thousand releases of 32 groups: well below a hundredth of epsilon."""
    columns = {"sensitivities": COLUMNS, "shares": HALVES, "influence": [32, 32]}
    found = calibrate_query(
        Honaker(steps=1000),
        epsilon=Fraction(1),
        delta=Fraction(1e-6),
        delta_slack=Fraction(5e-7),
        **columns,
    )
    assert 0 < found.error.xi < Fraction(1, 200)
