"""The streams of counts that w-event mechanisms are measured on.

Real ones come from the folder that DPSTREAM_DATA names; one of them is bundled. Synthetic 1 to 3
follow section 5.1 of "SPAS: Continuous Release of Data Streams under w-Event Differential Privacy".
Streams keep their own length: repeated segments would show a mechanism its own past.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.records import Integers, Reals

VARIABLE: Final = "DPSTREAM_DATA"
SYNTHETIC_STEPS: Final = 10_000
ROME: Final = (1_442, 25_936)  # ten days of ten-minute steps, one bin per road
STEPS_PER_DAY: Final = 144

# Stream -> its file, and the column that is published (None: all of them).
_FILES: Final[dict[str, tuple[str, str | None]]] = {
    "unemployment": ("unemployment_lnu03000018.csv", "level_thousands"),
    "flu outpatients": ("ilinet_weekly_1997_2022.csv", "ili_total"),
    "flu deaths": ("nchs_pic_deaths_weekly_2014_2022.csv", "influenza"),
    "state flu": ("state_flu_55.csv", None),
    "t-drive": ("tdrive_64.csv", None),
    "world cup": ("worldcup98_10_spas.csv", None),
}
_BUNDLED: Final = "unemployment"


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Steps x bins of counts and where they come from; without them, why they are absent."""

    name: str
    source: str
    block: Integers | None = None
    absence: str = ""


def streams(*, steps: int | None = None) -> list[Stream]:
    """All nine, cut to their first `steps` (the synthetic ones are generated shorter instead)."""
    found = [_real(name, steps) for name in _FILES]
    for name, generate in SYNTHETIC.items():
        block = generate(min(steps or SYNTHETIC_STEPS, SYNTHETIC_STEPS))
        found.append(Stream(name=name, source="generated", block=block))
    return found


def _real(name: str, steps: int | None) -> Stream:
    file, column = _FILES[name]
    folder = os.environ.get(VARIABLE)
    if folder and (path := Path(folder) / file).is_file():
        return Stream(name=name, source=VARIABLE, block=read_counts(path, column)[:steps])
    if name == _BUNDLED:
        with as_file(files("dpstream") / "data" / file) as path:
            return Stream(name=name, source="bundled", block=read_counts(path, column)[:steps])
    why = f"the folder {VARIABLE} names has no {file}" if folder else f"{VARIABLE} is not set"
    return Stream(name=name, source="absent", absence=why)


def read_counts(path: Path, column: str | None) -> Integers:
    """The column, or all of them, as whole counts."""
    with path.open(encoding="utf-8") as file:
        header = file.readline().strip().split(",")
        if column is not None and column not in header:
            raise InvalidInput(
                f"{path.name} must have a column {column!r}; got {', '.join(header)}"
            )
        wanted = range(len(header)) if column is None else [header.index(column)]
        counts = np.loadtxt(file, delimiter=",", usecols=wanted, ndmin=2)
    if (counts < 0).any() or (counts != np.rint(counts)).any():
        raise InvalidInput(f"{path.name} must hold whole counts from 0 on")
    return counts.astype(np.int64)


def synthetic_1(steps: int) -> Integers:
    """Uniform on 0 to 200.

    >>> synthetic_1(500).shape, int(synthetic_1(5_000).max())
    ((500, 1), 200)
    """
    return np.random.default_rng(1).integers(0, 201, (steps, 1))


def synthetic_2(steps: int) -> Integers:
    """Uniform on 0 to 1,000, then normal around 1,000 with variance 10."""
    return _changing(2, steps, top=1_000, bins=1)


def synthetic_3(steps: int) -> Integers:
    """Ten bins: uniform on 0 to 10,000, then normal around 10,000 with variance 10."""
    return _changing(3, steps, top=10_000, bins=10)


def _changing(seed: int, steps: int, *, top: int, bins: int) -> Integers:
    rng, half = np.random.default_rng(seed), steps // 2
    early = rng.integers(0, top + 1, (half, bins))
    late = np.rint(rng.normal(top, np.sqrt(10), (steps - half, bins))).astype(np.int64)
    return np.concatenate([early, late])


SYNTHETIC: Final[dict[str, Callable[[int], Integers]]] = {
    "synthetic 1": synthetic_1,
    "synthetic 2": synthetic_2,
    "synthetic 3": synthetic_3,
}


def rome(*, bins: int, level: float, swing: float, steps: int = ROME[0]) -> Integers:
    """Roads of log-normal size around `level` whose traffic swings daily by `swing` x its level.

    The shape of the traffic stream in Kellaris et al. 2014, whose counts were never published.

    >>> rome(bins=3, level=148, swing=0.9, steps=10).shape
    (10, 3)
    """
    rng = np.random.default_rng(4)
    levels = level * np.exp(rng.normal(0, 1, bins))
    phases = rng.normal(0, 0.3, bins)
    block = np.empty((steps, bins), dtype=np.int64)
    for step in range(steps):  # a row at a time: the whole in floats would be another 300 MB
        daily = np.sin(2 * np.pi * step / STEPS_PER_DAY + phases)
        block[step] = rng.poisson(levels * (1 + swing * daily))
    return block


BURSTS: Final = (0.01, 100)
"""The share of steps that are bursts, and how many times the base a burst is."""

Shape = Callable[[np.random.Generator, int], Integers]
"""Called with a generator and a number of steps."""


def bursts(rng: np.random.Generator, steps: int, *, base: float, bins: int = 1) -> Integers:
    """Counts around `base`, and single steps of a hundred times as much."""
    share, times = BURSTS
    means = np.full((steps, bins), float(base))
    means[rng.random((steps, bins)) < share] *= times
    return rng.poisson(means)


def on_off(rng: np.random.Generator, steps: int, *, high: float, run: float) -> Integers:
    """Around `high` or 0, each for `run` steps in the mean."""
    return rng.poisson(_pieces(rng, steps, run, lambda piece: high * (piece % 2)))


def level_steps(
    rng: np.random.Generator, steps: int, *, base: float, run: float, bins: int = 1
) -> Integers:
    """Levels that are log-normal around `base`, each for `run` steps in the mean."""
    columns = [_pieces(rng, steps, run, lambda _: base * np.exp(rng.normal())) for _ in range(bins)]
    return rng.poisson(np.concatenate(columns, axis=1))


def ramps(rng: np.random.Generator, steps: int, *, base: float, run: float) -> Integers:
    """Straight lines between levels that are log-normal around `base`."""
    ends = np.cumsum(np.concatenate([[0], 1 + rng.geometric(1 / run, steps)]))
    levels = base * np.exp(rng.normal(size=len(ends)))
    return rng.poisson(np.interp(np.arange(steps), ends, levels))[:, None]


def seasons(rng: np.random.Generator, steps: int, *, base: float, period: int) -> Integers:
    """A sine of four fifths of `base` around it."""
    phase = rng.uniform(0, 2 * np.pi)
    swing = 0.8 * np.sin(2 * np.pi * np.arange(steps)[:, None] / period + phase)
    return rng.poisson(base * (1 + swing))


def near_zero(rng: np.random.Generator, steps: int, *, mean: float, bins: int) -> Integers:
    """Columns with log-normal means around `mean`."""
    return rng.poisson(mean * np.exp(rng.normal(size=bins)), (steps, bins))


def _pieces(
    rng: np.random.Generator, steps: int, run: float, level: Callable[[int], float]
) -> Reals:
    lengths = rng.geometric(1 / run, steps)
    levels = [level(piece) for piece in range(steps)]
    return np.repeat(levels, lengths)[:steps, None]


def _mixture(rng: np.random.Generator, steps: int) -> Integers:
    """Eleven columns, of every shape."""
    return np.concatenate(
        [
            bursts(rng, steps, base=50),
            bursts(rng, steps, base=500),
            on_off(rng, steps, high=2_000, run=20),
            level_steps(rng, steps, base=500, run=100),
            ramps(rng, steps, base=2_000, run=100),
            seasons(rng, steps, base=5_000, period=144),
            near_zero(rng, steps, mean=1, bins=5),
        ],
        axis=1,
    )


def _wide_mixture(rng: np.random.Generator, steps: int) -> Integers:
    """Fifty columns: most of them near 0, some with bursts, some with steps."""
    return np.concatenate(
        [
            level_steps(rng, steps, base=300, run=150, bins=10),
            near_zero(rng, steps, mean=0.5, bins=30),
            bursts(rng, steps, base=30, bins=10),
        ],
        axis=1,
    )


SHAPES: Final[dict[str, Shape]] = {
    "bursts, base 20": lambda rng, steps: bursts(rng, steps, base=20),
    "bursts, base 100": lambda rng, steps: bursts(rng, steps, base=100),
    "bursts, base 1,000": lambda rng, steps: bursts(rng, steps, base=1_000),
    "bursts, 10 columns": lambda rng, steps: bursts(rng, steps, base=100, bins=10),
    "on/off, 500 for 30": lambda rng, steps: on_off(rng, steps, high=500, run=30),
    "on/off, 5,000 for 10": lambda rng, steps: on_off(rng, steps, high=5_000, run=10),
    "on/off, 2,000 for 100": lambda rng, steps: on_off(rng, steps, high=2_000, run=100),
    "steps, 300 for 50": lambda rng, steps: level_steps(rng, steps, base=300, run=50),
    "steps, 5,000 for 150": lambda rng, steps: level_steps(rng, steps, base=5_000, run=150),
    "ramps, 300 for 80": lambda rng, steps: ramps(rng, steps, base=300, run=80),
    "ramps, 5,000 for 200": lambda rng, steps: ramps(rng, steps, base=5_000, run=200),
    "season, 300 in 24": lambda rng, steps: seasons(rng, steps, base=300, period=24),
    "season, 5,000 in 144": lambda rng, steps: seasons(rng, steps, base=5_000, period=144),
    "near 0, 1 column": lambda rng, steps: near_zero(rng, steps, mean=2, bins=1),
    "near 0, 20 columns": lambda rng, steps: near_zero(rng, steps, mean=1, bins=20),
    "mixture, 11 columns": _mixture,
    "mixture, 50 columns": _wide_mixture,
}
"""Generated streams that no constant of a mechanism was chosen on, one of every kind or more."""


def shape(name: str, *, steps: int, run: int) -> Integers:
    """The stream of that name that run number `run` is given.

    >>> shape("bursts, 10 columns", steps=50, run=0).shape
    (50, 10)
    """
    seed = [*name.encode(), run]
    return SHAPES[name](np.random.default_rng(seed), steps)
