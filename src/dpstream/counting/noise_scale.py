"""How far float arithmetic can take a streamed noise path from the ideal one, as a privacy event.

A path of integers is published: sums plus the noise rounded to the quantum. If every noise value is
within eta of the ideal one, each rounding box grows or shrinks by eta on every side, and on paths
of probability all but tau the law of the published path is within a factor e^xi of the ideal law:

    xi = T eta (2 + r L / sigma),   L the largest |z|; eta and sigma in quanta

with r = 2 for Toeplitz matrices (somewhat more where the last step is measured twice) and 10 for
trees (`docs/soundness/counters.md` has the proof). T
counts one key's steps: another key's noise has the same law under both neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpstream.counting.binary_tree import Honaker
from dpstream.counting.buffered import UNIT, BufferedLinearToeplitz, LastTwice, gram, spans
from dpstream.errors import InvalidParameter
from dpstream.privacy.accounting.accountant import NO_FLOAT_ERROR, FloatError, delta_of
from dpstream.privacy.accounting.calibration import mu_squared_for, round_up
from dpstream.privacy.amounts import on_grid
from dpstream.privacy.sensitivity import root_above
from dpstream.privacy.spend import NORMAL_LARGEST, NORMAL_LOST, NORMAL_PRECISION

_ROOM = 1.05  # for second-order terms, and for the float error of this very bound
_TOEPLITZ_RATIO, _TREE_RATIO = 2, 10
NEGLIGIBLE = Fraction(1, 100)
HARDLY_PRIVATE = 20  # an epsilon beyond it is told of in plain words
"""The part of epsilon, and of delta, that float error may take at most."""


Process = BufferedLinearToeplitz | LastTwice | Honaker
"""Processes whose float error is known."""


def path_error(process: Process) -> float:
    """Bound on |streamed - ideal| noise at any step, for sigma = 1, outside a mass of tau."""
    if isinstance(process, Honaker):
        return _tree_error(process)
    if isinstance(process, LastTwice):
        return _last_error(process)
    return _modes_error(process)


def _last_error(process: LastTwice) -> float:
    """The last step takes at most the whole of the process, and one product more.

    Its two factors are correct to some units in the last place, of noise within L deviations; so
    are those of what all processes have in common.
    """
    row = process.process.row_norm(process.steps) + process.own + process.alike
    weighing = 64 * UNIT * NORMAL_LARGEST * (row + 1)
    weighing += NORMAL_PRECISION * (1 + process.own + process.alike)
    return _modes_error(process.process) + _ROOM * weighing


def _tree_error(process: Honaker) -> float:
    """A closing node of level h takes in nodes j levels below with factors of at most 2^-j.

    Each node is a sum of at most `width` + 1 products, all of them within 2 L in absolute value,
    of factors that are correct to `width` + 4 units in the last place; that makes e_0. Errors of
    nodes taken in add, so E_h <= e_0 + sum_j 2^-j E_(h - j), hence E_h <= (h + 1) e_0. A prefix
    sum adds at most `width` nodes.
    """
    width = process.width
    each = 32 * (width + 4) * UNIT * NORMAL_LARGEST + NORMAL_PRECISION
    adding = width * width * UNIT * NORMAL_LARGEST
    return float(_ROOM * (width * width * each + adding))


def _modes_error(process: BufferedLinearToeplitz) -> float:
    """Modes that decay.

    Mode j is a Gaussian of variance gram_jj, so it stays within L of its standard deviations; each
    step rounds a product and a sum of that size and adds the normal's own error, and errors decay
    with the mode. A late start errs by some units in the last place of each mode.
    """
    steps, decays = process.steps, process.mode_decays
    spread = NORMAL_LARGEST * np.sqrt(np.diag(gram(decays, steps)))
    streamed = (2 * UNIT * spread + NORMAL_PRECISION) * spans(decays, steps)
    joined = (process.width * (2 + math.log2(steps + 1)) * 64) * UNIT * spread
    joined = joined + NORMAL_PRECISION * process.width * spread
    weighing = (process.width + 2) * UNIT * spread
    return float(_ROOM * (process.weights @ (streamed + joined + weighing)))


def float_error(process: Process, *, sigma: float) -> FloatError:
    """What the accountant adds to the Gaussian noise of `sigma` grid steps, for one process."""
    steps = process.steps
    largest = process.process if isinstance(process, LastTwice) else process
    noise = NORMAL_LARGEST * largest.row_norm(steps)
    if isinstance(process, LastTwice):
        noise += NORMAL_LARGEST * (process.own + process.alike)
    eta = sigma * (path_error(process) + 2 * UNIT * noise)
    if eta > 1 / 1000:
        return FloatError(xi=Fraction(1), tau=Fraction(1))
    xi = _ROOM * steps * eta * (2 + _ratio(process) * NORMAL_LARGEST / sigma)
    # lost normals, and modes or noise beyond L standard deviations, at any step
    tau = (steps + process.width + (process.width + 1) * steps) * NORMAL_LOST
    return FloatError(xi=round_up(xi), tau=round_up(tau))


def path_error_ratio(usual: LastTwice, other: LastTwice) -> float:
    """By how much the float error of one may be above that of the other, whatever sigma is."""
    row = NORMAL_LARGEST * usual.process.row_norm(usual.steps)
    eta, more = (
        path_error(each) + 2 * UNIT * (row + NORMAL_LARGEST * (each.own + each.alike))
        for each in (usual, other)
    )
    return max(1.0, more / eta) * max(1.0, _ratio(other) / _ratio(usual)) * (1 + 1e-9)


def _ratio(process: Process) -> float:
    """How far a normal moves with the path it belongs to, at most."""
    if isinstance(process, Honaker):
        return _TREE_RATIO
    if isinstance(process, LastTwice):
        first, other = process.weights
        return max(_TOEPLITZ_RATIO, (1 + first) / math.hypot(first, other))
    return _TOEPLITZ_RATIO


def weight_error(process: Process) -> Fraction:
    """Relative change of the sensitivity because the weights of B are floats.

    Those of a tree are counted as errors of its path.
    """
    if isinstance(process, Honaker):
        return Fraction(0)
    if isinstance(process, LastTwice):
        return weight_error(process.process)
    total = float(process.weights @ spans(process.mode_decays, process.steps))
    return round_up(_ROOM * 16 * process.buffers * UNIT * total)


def streamed_norm(process: Process, fall: Fraction = Fraction(0)) -> Fraction:
    """The largest norm, rounded up, of what an impulse moves that is streamed.

    With `fall`, of an impulse and of that part of it taken away at any other step.
    """
    room = 1 + Fraction(1, 10**12) + (1 + fall) * weight_error(process)
    if not fall:
        return Fraction(process.column_norm()) * room
    if isinstance(process, Honaker):
        raise InvalidParameter("what may come and go at different steps has no counter of trees")
    return Fraction(process.opposed_norm(float(fall))) * room


def sigma_for(
    process: Process,
    *,
    sensitivity: Fraction,
    mu_squared: Fraction,
    fall: Fraction = Fraction(0),
) -> Fraction:
    """Sigma in grid steps of a column that may cost mu^2, in windows of this many steps.

    A unit shifts what a window measures by `sensitivity` times its column norm at most, so every
    window, long or short, is scaled by its own norm. `fall`: as for `streamed_norm`.
    """
    norm = streamed_norm(process, fall)
    return round_up(root_above((norm * sensitivity) ** 2 / mu_squared))


def calibrate(
    process: BufferedLinearToeplitz, *, change: Fraction, epsilon: Fraction, delta: Fraction
) -> tuple[Fraction, Fraction, FloatError]:
    """mu^2, sigma in grid steps and float error with which streamed noise keeps (epsilon, delta).

    Float error gets the part of epsilon that it needs; where that is more than NEGLIGIBLE the
    stream is too long for floats and is refused.
    """
    spare = Fraction(0)
    while True:
        mu_squared = mu_squared_for(
            epsilon=epsilon - 2 * spare, delta=delta * (1 - NEGLIGIBLE - spare)
        )
        if mu_squared <= 0:
            raise InvalidParameter(
                f"no finite noise keeps epsilon={float(epsilon):g}, delta={float(delta):g}; raise "
                "one of them"
            )
        sigma = sigma_for(process, sensitivity=change, mu_squared=mu_squared)
        error = float_error(process, sigma=float(sigma))
        if delta_of(epsilon=epsilon, mu_squared=mu_squared, error=error) <= delta:
            return mu_squared, sigma, error
        if spare or 2 * error.xi > NEGLIGIBLE * epsilon:
            raise InvalidParameter(
                f"float noise over steps={process.steps} cannot be shown to keep epsilon="
                f"{float(epsilon):g}, delta={float(delta):g}: what numbers are rounded by may tell "
                f"{float(error.xi):.2g} of epsilon{_too_large(epsilon)}; use fewer steps, a "
                "coarser quantum, or the exact counter (without keys)"
            )
        spare = error.xi * Fraction(11, 10)


@dataclass(frozen=True, kw_only=True)
class QueryCalibration:
    """The noise of a query: mu^2 in all, sigma of each column in grid steps, and float error."""

    mu_squared: Fraction
    sigmas: tuple[Fraction, ...]
    error: FloatError


def query_error(
    *processes: Process,
    sensitivities: Sequence[Fraction],
    mu_squares: Sequence[Fraction],
    influence: Sequence[int],
    falls: Sequence[Fraction] = (),
) -> FloatError:
    """Float error of all that one unit influences: so many processes in each column.

    They are independent, so log-ratios and lost masses add. Windows of several lengths each count
    as the worst of them.
    """
    xi = tau = Fraction(0)
    falls = falls or [Fraction(0)] * len(sensitivities)
    columns = zip(sensitivities, mu_squares, influence, falls, strict=True)
    for sensitivity, share, count, fall in columns:
        errors = []
        for process in processes:
            sigma = sigma_for(process, sensitivity=sensitivity, mu_squared=share, fall=fall)
            errors.append(float_error(process, sigma=float(sigma)))
        xi += count * max(error.xi for error in errors)
        tau += count * max(error.tau for error in errors)
    return FloatError(xi=round_up(xi), tau=min(round_up(tau), Fraction(1)))


def calibrate_query(
    process: Process,
    *others: Process,
    sensitivities: Sequence[Fraction],
    shares: Sequence[Fraction],
    influence: Sequence[int],
    epsilon: Fraction,
    delta: Fraction,
    delta_slack: Fraction,
    falls: Sequence[Fraction] = (),
) -> QueryCalibration:
    """The largest mu^2 with which a continual GROUP BY keeps (epsilon, delta).

    One unit reaches at most so many processes of each column (`influence`), over all windows;
    `sensitivities` are upper bounds on what it changes in each column, in grid steps; `shares`, of
    sum 1, say how mu^2 is divided among the columns; `delta_slack` is the part of delta that
    selecting keys takes. `others` are the processes of windows of other lengths; sigmas are those
    of `process`. `falls`: what a unit may take away from a column at another step than it adds to
    it, by the part of what it adds; none where it only adds.
    """
    falls = falls or [Fraction(0)] * len(sensitivities)
    if not 0 < sum(shares) <= 1 or min(shares) <= 0 or min(influence) < 1:
        raise InvalidParameter(
            "shares must be above 0 with a sum of 1, influence at least 1; got "
            f"{shares=}, {influence=}"
        )
    most = math.exp(min(float(epsilon), 700.0)) + 1
    spare = NO_FLOAT_ERROR
    for _ in range(3):
        lost = round_up(most * 1.001) * spare.tau
        room = (delta * (1 - Fraction(1, 10**9)) - lost) * (1 - spare.xi) - delta_slack
        if room <= 0:
            raise InvalidParameter(
                f"selecting keys takes {float(delta_slack):g} of delta={float(delta):g}, and "
                f"floats {float(lost):.2g}: nothing is left for noise; raise delta"
            )
        mu_squared = on_grid(mu_squared_for(epsilon=epsilon - 2 * spare.xi, delta=room))
        if mu_squared <= 0:
            raise InvalidParameter(
                f"no finite noise keeps epsilon={float(epsilon):g}, delta={float(delta):g}; raise "
                "one of them"
            )
        mu_squares = [mu_squared * share for share in shares]
        error = query_error(
            process,
            *others,
            sensitivities=sensitivities,
            mu_squares=mu_squares,
            influence=influence,
            falls=falls,
        )
        spent = delta_of(
            epsilon=epsilon, mu_squared=mu_squared, delta_slack=delta_slack, error=error
        )
        if spent <= delta:
            sigmas = tuple(
                sigma_for(process, sensitivity=sensitivity, mu_squared=share, fall=fall)
                for sensitivity, share, fall in zip(sensitivities, mu_squares, falls, strict=True)
            )
            return QueryCalibration(mu_squared=mu_squared, sigmas=sigmas, error=error)
        if 2 * error.xi > NEGLIGIBLE * epsilon or most * error.tau > NEGLIGIBLE * delta:
            break
        spare = FloatError(xi=error.xi * Fraction(11, 10), tau=error.tau)
    raise InvalidParameter(
        f"float noise over {process.steps} releases of a window cannot be shown to keep epsilon="
        f"{float(epsilon):g}, delta={float(delta):g} for a unit in {max(influence)} groups: what "
        f"numbers are rounded by may tell {float(error.xi):.2g} of epsilon and "
        f"{float(error.tau):.2g} of delta{_too_large(epsilon)}; use fewer releases or groups, or a "
        "coarser quantum"
    )


def _too_large(epsilon: Fraction) -> str:
    """Plain words for a budget with which there is hardly any noise."""
    if epsilon <= HARDLY_PRIVATE:
        return ""
    return "; an epsilon this large protects nobody, with hardly any noise: ask for one of 0.1 to 5"
