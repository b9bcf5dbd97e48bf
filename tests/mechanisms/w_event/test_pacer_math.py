"""The functions that run in SIMD lanes, against those of SciPy and the system."""

import numpy as np
import pytest
from numba import njit
from scipy import special

from dpstream.mechanisms.w_event.pacer_math import erfcx, exp, log, sum_of


def over(function):
    """`function` in a loop over an array."""

    @njit(error_model="numpy")
    def run(x):
        out = np.empty_like(x)
        for i in range(len(x)):
            out[i] = function(x[i])
        return out

    return run


RNG = np.random.default_rng(3)
WIDE = np.exp(RNG.uniform(-700, 700, 50_000))
CASES = {
    "exp": (exp, np.exp, RNG.uniform(-707.9, 709, 50_000), 2),
    "exp near 0": (exp, np.exp, RNG.uniform(-1, 1, 50_000), 2),
    "log": (log, np.log, WIDE, 2),
    "log near 1": (log, np.log, RNG.uniform(0.5, 2, 50_000), 4),
    "erfcx": (erfcx, special.erfcx, RNG.uniform(0, 30, 50_000), 16),
    "erfcx, wide": (erfcx, special.erfcx, WIDE[WIDE < 1e300], 16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_to_the_last_digits(name):
    """Within so many units in the last place."""
    function, reference, x, units = CASES[name]
    right = reference(x)
    off = np.abs(over(function)(x) - right) / np.spacing(np.abs(right))

    assert off.max() <= units


def test_exp_beyond_its_range():
    """Nothing is left below, and nothing overflows above."""
    ends = over(exp)(np.array([-np.inf, -1e9, -708.0, 709.0, 1e9]))

    assert ends.tolist() == [0.0, 0.0, 0.0, ends[3], ends[3]]
    assert ends[3] == pytest.approx(np.exp(709.0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 54, 135])
def test_a_sum_takes_every_value_once(size):
    """Powers of two would show a value that is left out or taken twice."""
    values = np.ldexp(1.0, np.arange(size + 4) % 40)

    assert sum_of(values, 2, size) == values[2 : size + 2].sum()
