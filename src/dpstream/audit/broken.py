"""Every control: forms that are known to be broken, with what they claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpstream.audit.books import broken_books
from dpstream.audit.broken_queries import broken_queries
from dpstream.audit.controls.column_groups import trajectory_loss
from dpstream.audit.controls.dpi_published import path_loss
from dpstream.audit.controls.forgetful import Forgetful
from dpstream.audit.controls.groups_published import THETA, grouping_loss
from dpstream.audit.controls.noise_again import RedrawnOnReplay, SameNoise
from dpstream.audit.controls.shared_noise import SharedNoise
from dpstream.audit.controls.spas_published import svt_loss
from dpstream.audit.controls.svt import SparseVector
from dpstream.audit.controls.wrong_norm import WrongNorm
from dpstream.audit.neighbours import Pair, block
from dpstream.audit.samplers import OneByOne, SideBySide
from dpstream.audit.series_queries import broken_series
from dpstream.audit.shipped import RHO
from dpstream.audit.targets import Audited, Exact, Target
from dpstream.audit.user_level import broken_user_targets
from dpstream.mechanisms.w_event.uniform import Uniform
from dpstream.privacy.curves import zcdp_epsilon

_ONE_MORE = (Pair(name="one event", one=block([5]), two=block([6])),)
_UNIFORM = Uniform(epsilon=1, window=1)
_COUNTS = (8_000, 40_000)


def _spas_loss() -> float:
    """One test near the threshold in each of 400 earlier windows, then a changed window."""
    window, share, at = 120, 0.25, 400.0
    before = [True, False] * 200
    return svt_loss(
        [at] * (len(before) + window),
        [*[at] * len(before), *[at + 1] * window],
        [*before, *[False] * window],
        threshold=at,
        rho_scale=2 / share,
        nu_scale=4 / share,
    )


def _contin_group_loss() -> float:
    """The tests' loss, and the noise on the sum, which is drawn apart: eps_p = 4 eps_g."""
    rest, share = [0.0] * 73 + [1.0] * 26, 0.01
    tests = grouping_loss([0.0, *rest], [1.0, *rest], epsilon=share, theta=THETA)
    return 4 * share + abs(tests)


def _svt(
    version: int,
    *,
    one: list[int],
    two: list[int],
    count: int = 1,
    runs: tuple[int, int] = (20_000, 100_000),
) -> Callable[[], Target]:
    sound = version in (1, 2)
    return lambda: Target(
        name=f"svt_{version}",
        about=f"Sparse vector technique, version {version} of Lyu, Su, Li (2017)"
        + (", sound." if sound else ", broken."),
        sample=SparseVector(version=version, count=count),
        pairs=(Pair(name="queries part", one=block(*one), two=block(*two)),),
        epsilon=1.0,
        control=not sound,
        runs=runs,
    )


def _stream(name: str, about: str, sample: Any, **facts: Any) -> Callable[[], Target]:
    usual: dict[str, Any] = {"pairs": _ONE_MORE, "epsilon": 1.0, "runs": _COUNTS}
    return lambda: Target(name=name, about=about, sample=sample, control=True, **usual | facts)


def _jumping(window: int) -> tuple[Pair, ...]:
    base = np.where(np.arange(window)[:, None] % 2 == 0, 0, 10_000)
    return (Pair(name="an event in every step of jumping counts", one=base, two=base + 1),)


def broken() -> dict[str, Callable[[], Audited]]:
    """By name, and made when asked for."""
    impulse = (Pair(name="one event at step 0", one=block(*[3] * 80), two=block(4, *[3] * 79)),)
    gaussian = {"epsilon": zcdp_epsilon(rho=float(RHO), delta=0.1), "delta": 0.1}
    found: dict[str, Callable[[], Audited]] = {
        "spas_published": lambda: Exact(
            name="spas_published",
            about="SPAS as printed: one threshold noise for ever (w > 4 C d).",
            loss=_spas_loss,
            epsilon=1.0,
            witness="400 tests at the threshold, yes and no in turn; then 120 changed ones, no",
        ),
        "shared_noise": _stream(
            "shared_noise",
            "One draw for all bins of a step.",
            OneByOne(mechanism=SharedNoise(epsilon=1, window=1)),
            pairs=(Pair(name="one event", one=block([5, 9]), two=block([5, 10])),),
            runs=(2_000, 10_000),
        ),
        "noise_redrawn_on_replay": _stream(
            "noise_redrawn_on_replay",
            "Every restart publishes another noisy copy: 24 of them.",
            RedrawnOnReplay(mechanism=_UNIFORM, starts=24),
        ),
        "same_noise_other_data": _stream(
            "same_noise_other_data",
            "One noise over two datasets, of which one is known.",
            SameNoise(mechanism=_UNIFORM),
        ),
        "budget_forgotten": _stream(
            "budget_forgotten",
            "Budget distribution that forgets a charge inside its window.",
            OneByOne(mechanism=Forgetful(epsilon=2, window=20)),
            pairs=_jumping(20),
            epsilon=2.0,
            runs=(1_600, 10_000),
        ),
        "column_groups_apart": lambda: Exact(
            name="column_groups_apart",
            about="Groups of columns with a budget each: 12 of them, w = 12.",
            loss=lambda: trajectory_loss(12, 12),
            epsilon=1.0,
            witness="each column publishes in its turn, and the events are always there",
        ),
        "blt_wrong_norm": _stream(
            "blt_wrong_norm",
            "A BLT counter with noise for a column norm of 1.",
            SideBySide(mechanism=WrongNorm(rho=RHO, steps=80)),
            pairs=impulse,
            runs=(10_000, 40_000),
            **gaussian,
        ),
        "contin_group_printed": lambda: Exact(
            name="contin_group_printed",
            about="ContinGroup at the printed scale: a fifth of epsilon for its tests.",
            loss=_contin_group_loss,
            epsilon=0.05,
            witness="the first of 100 values 0 or 1, then 73 zeros, 26 ones: all but the last join",
        ),
        "dpi_summed_score": lambda: Exact(
            name="dpi_summed_score",
            about="DPI as printed: scores summed over all slots, charged as one.",
            loss=lambda: path_loss([1 / (t * (t + 1)) for t in range(1, 201)], printed=True),
            epsilon=1.0,
            witness="the synopsis that a user in each of 200 slots fits is drawn in every slot",
        ),
        "svt_1": _svt(1, one=[0] * 4 + [1], two=[1] * 4 + [0]),
        "svt_2": _svt(2, one=[0] * 4 + [1], two=[1] * 4 + [0]),
        "svt_3": _svt(3, one=[-1] * 8 + [2], two=[0] * 8 + [3], runs=(160_000, 400_000)),
        "svt_4": _svt(4, one=[1, 0] * 10, two=[0, 1] * 10, count=20),
        "svt_5": _svt(5, one=[0, 1], two=[1, 0]),
        "svt_6": _svt(6, one=[0] * 10 + [1] * 10, two=[1] * 10 + [0] * 10),
    }
    return found | broken_user_targets() | broken_queries() | broken_series() | broken_books()
