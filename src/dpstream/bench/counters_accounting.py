"""Conversions against known values and against dp-accounting, and how long they take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from fractions import Fraction

from dpstream.bench.harness import Row, target
from dpstream.privacy.calibration import gaussian_sigma, mu_squared_for, rho_for
from dpstream.privacy.curves import gdp_delta, gdp_epsilon, zcdp_delta, zcdp_epsilon

# Noise of a hierarchical sum: T, levels, and the known sigma at epsilon 3, delta 1e-9/3, bound 32.
SIGMAS = ((100, 7, 177.170), (1000, 10, 211.758))
GDP_CASES = [(mu, epsilon) for mu in (0.1, 0.5, 1.0, 2.0, 5.0) for epsilon in (0.0, 0.5, 1, 3, 6)]
REPEATS, MILLISECONDS = 15, 10.0


def rows() -> list[Row]:
    """Sigmas, the largest distance from dp-accounting's delta, and milliseconds per call."""
    found = [
        {
            "part": "sigma",
            "steps": steps,
            "value": 32 * math.sqrt(levels / (2 * float(rho_for(epsilon=3, delta=1e-9 / 3)))),
            "reference": known,
        }
        for steps, levels, known in SIGMAS
    ]
    found.append({"part": "delta_GDP, worst distance", "value": _gdp_distance(), "reference": 0.0})
    for name, call in _CALLS.items():
        found.append({"part": "conversion", "counter": name, "milliseconds": _milliseconds(call)})
    return found


_CALLS: dict[str, Callable[[], object]] = {
    "rho_for": lambda: rho_for(epsilon=3, delta=1e-9),
    "mu_squared_for": lambda: mu_squared_for(epsilon=3, delta=1e-9),
    "gaussian_sigma": lambda: gaussian_sigma(epsilon=3, delta=1e-9, sensitivity=Fraction(1)),
    "zcdp_epsilon": lambda: zcdp_epsilon(rho=0.1, delta=1e-9),
    "zcdp_delta": lambda: zcdp_delta(rho=0.1, epsilon=3),
    "gdp_epsilon": lambda: gdp_epsilon(mu=0.5, delta=1e-9),
    "gdp_delta": lambda: gdp_delta(mu=0.5, epsilon=3),
}


def _gdp_distance() -> float:
    from dp_accounting.pld import privacy_loss_mechanism

    worst = 0.0
    for mu, epsilon in GDP_CASES:
        theirs = privacy_loss_mechanism.GaussianPrivacyLoss(1 / mu).get_delta_for_epsilon(epsilon)
        worst = max(worst, abs(gdp_delta(mu=mu, epsilon=epsilon) - theirs))
    return worst


def _milliseconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def targets(found: list[Row]) -> list[Row]:
    """The known sigmas, delta to 1e-9, conversions in milliseconds."""
    judged = [
        target(f"sigma, T = {row['steps']}, off {row['reference']}", off, "<=", 0.0005)
        for row in found
        if row["part"] == "sigma" and (off := abs(row["value"] - row["reference"])) is not None
    ]
    distance = next(row["value"] for row in found if row["part"].startswith("delta_GDP"))
    judged.append(target("delta_GDP off dp-accounting", distance, "<=", 1e-9))
    slowest = max(row["milliseconds"] for row in found if row["part"] == "conversion")
    judged.append(target("slowest conversion, ms", slowest, "<=", MILLISECONDS))
    return judged
