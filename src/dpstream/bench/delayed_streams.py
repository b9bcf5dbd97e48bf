"""The four series that mechanisms with a delay are measured on, with their public ranges.

They are those of "Delay-allowed Differentially Private Data Stream Release" (2025), from the folder
that DPSTREAM_DATA names; one is bundled, for the others a series of the same length, range and kind
is generated. The ranges are the paper's. It read them off the data, which a release may not do:
every figure below is for somebody who happens to know the range that well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

import numpy as np

from dpstream.bench.streams import VARIABLE, read_counts
from dpstream.records import Integers, Reals

_WEEKS: Final = 52


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """A series of whole numbers in a public range, and the bucket width that the paper gives it."""

    name: str
    source: str
    values: Integers
    lo: int
    hi: int
    bucket: int

    @property
    def midpoint(self) -> float:
        """The middle of the public range: an answer that needs no data."""
        return (self.lo + self.hi) / 2


@dataclass(frozen=True, kw_only=True)
class _Known:
    file: str
    column: str
    lo: int
    hi: int
    bucket: int
    generate: Callable[[], Reals] | None = None  # None: the file is bundled


def covid_deaths() -> Reals:
    """216 weeks: a slow start, five waves, a long tail.

    >>> deaths = covid_deaths()
    >>> len(deaths), round(float(deaths.max())) > 15_000
    (216, True)
    """
    week = np.arange(216)
    waves = ((16, 4, 16_000), (30, 5, 8_000), (54, 6, 25_000), (87, 6, 14_000), (108, 5, 20_000))
    level = sum(top * np.exp(-0.5 * ((week - at) / width) ** 2) for at, width, top in waves)
    level = level + np.where(week > 10, 2_500 * np.exp(-np.maximum(week - 110, 0) / 60), 0)
    return np.asarray(level * np.exp(np.random.default_rng(1).normal(0, 0.03, len(week))))


def outpatients() -> Reals:
    """1,212 weeks that grow from 50,000 to two million, with a season and single drops."""
    rng, week = np.random.default_rng(2), np.arange(1_212)
    level = 50_000 * 40 ** (week / len(week)) * (1 + 0.2 * np.cos(2 * np.pi * week / _WEEKS))
    drops = np.where(rng.random(len(week)) < 0.03, 0.8, 1.0)
    return np.asarray(level * drops * np.exp(rng.normal(0, 0.04, len(week))))


def item_numbers() -> Reals:
    """18,319 item numbers in no order: each as likely as any other."""
    return np.random.default_rng(3).integers(1, 1_560, 18_319).astype(np.float64)


_SERIES: Final[dict[str, _Known]] = {
    "covid deaths": _Known(
        file="covid19_deaths_weekly_delaypaper.csv", column="deaths",
        lo=0, hi=25_974, bucket=100, generate=covid_deaths,
    ),
    "unemployment": _Known(
        file="unemployment_lnu03000018.csv", column="level_thousands", lo=72, hi=612, bucket=100,
    ),
    "outpatients": _Known(
        file="ilinet_weekly_1997_2022.csv", column="total_patients",
        lo=27_263, hi=2_260_794, bucket=10_000, generate=outpatients,
    ),
    "foodmart": _Known(
        file="foodmart_item_stream.csv", column="item_id",
        lo=1, hi=1_559, bucket=100, generate=item_numbers,
    ),
}  # fmt: skip


def series(*, steps: int | None = None) -> list[Series]:
    """All four, cut to their first `steps`.

    >>> [(one.name, len(one.values)) for one in series(steps=100)][:2]
    [('covid deaths', 100), ('unemployment', 100)]
    """
    return [_one(name, known, steps) for name, known in _SERIES.items()]


def _one(name: str, known: _Known, steps: int | None) -> Series:
    folder = os.environ.get(VARIABLE)
    if folder and (path := Path(folder) / known.file).is_file():
        source, values = VARIABLE, read_counts(path, known.column)[:, 0]
    elif known.generate is None:
        with as_file(files("dpstream") / "data" / known.file) as path:
            source, values = "bundled", read_counts(path, known.column)[:, 0]
    else:
        source, values = "generated", np.rint(known.generate()).astype(np.int64)
    inside = np.clip(values[:steps], known.lo, known.hi)
    return Series(
        name=name, source=source, values=inside, lo=known.lo, hi=known.hi, bucket=known.bucket
    )
