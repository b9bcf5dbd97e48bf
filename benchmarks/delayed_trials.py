"""The parts of the delay bench: four series, runs of a mechanism over one, and the mechanisms.

The series are those of "Delay-allowed Differentially Private Data Stream Release" (2025), from the
folder that DPSTREAM_DATA names; one is bundled, for the others a series of the same length, range
and kind is generated. The ranges are the paper's. It read them off the data, which a release may
not do: every figure below is for somebody who happens to know the range that well.

The runs are bins of one release: the same series in every bin, noise of its own for each. A
mechanism that looks at its bins together is run once for each instead (`apart`). Every release has
a book that holds exactly the epsilon asked for; a mechanism that would spend more is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.delayed_published import (
    BucOrderPublished,
    CompOrderPublished,
    ContinGroupPublished,
    DiscontinGroupPublished,
    PegasusPublished,
)
from benchmarks.streams import VARIABLE, read_counts
from dpstream.errors import BudgetExceeded, InvalidInput
from dpstream.evaluate.trials import fixed_noise, mean_and_error
from dpstream.mechanisms import find
from dpstream.mechanisms.base import Mechanism, SeriesMechanism
from dpstream.mechanisms.runner import Runner
from dpstream.mechanisms.w_event.adapub import AdaPub
from dpstream.privacy.amounts import exact
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.records import Integers, Reals, Release

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


_NO_LIMIT: Final = 1_000
_DATASET: Final = "series"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Mean absolute error of every run: as released, and moved into the public range."""

    plain: list[float] = field(default_factory=list)
    clamped: list[float] = field(default_factory=list)
    seconds: float = 0.0
    refusal: str = ""

    def mae(self) -> tuple[float, float]:
        """Mean over the runs and its standard error."""
        return mean_and_error(self.plain)

    def mae_clamped(self) -> float:
        """The same, for a user who clamps to the range, which costs nothing."""
        return mean_and_error(self.clamped)[0]


def trials(
    mechanism: Mechanism,
    series: Series,
    *,
    runs: int,
    fixed: str,
    limited: bool = True,
    apart: bool = False,
) -> Errors:
    """Score `runs` runs; `fixed` names their noise. Without a limit, an overspend is let through.

    >>> from dpstream.mechanisms import Naive
    >>> ten = Series(name="s", source="", values=np.full(50, 5), lo=0, hi=10, bucket=5)
    >>> found = trials(Naive(epsilon=1, lo=0, hi=10), ten, runs=4, fixed="an example")
    >>> len(found.plain), found.mae()[0] > found.mae_clamped()
    (4, True)
    """
    plain, clamped, began = [], [], time.perf_counter()
    column, width = series.values[:, None], 1 if apart else runs
    for run in range(runs if apart else 1):
        try:
            values = released(
                mechanism, np.repeat(column, width, axis=1), f"{fixed}, {run}", limited=limited
            )
        except BudgetExceeded as refusal:
            return Errors(refusal=str(refusal))
        plain += np.abs(values - column).mean(axis=0).tolist()
        inside = np.clip(values, series.lo, series.hi)
        clamped += np.abs(inside - column).mean(axis=0).tolist()
    return Errors(plain=plain, clamped=clamped, seconds=time.perf_counter() - began)


def midpoint(series: Series) -> Errors:
    """The middle of the public range, scored like a run."""
    error = float(np.abs(series.values - series.midpoint).mean())
    return Errors(plain=[error], clamped=[error])


def released(mechanism: Mechanism, block: Integers, fixed: str, *, limited: bool = True) -> Reals:
    """All values released, steps x bins, in the order of their steps."""
    # The epsilon that was asked for, whatever the mechanism promises.
    total = Fraction(mechanism.budget) * (1 if limited else _NO_LIMIT)  # type: ignore[attr-defined]
    ledger = Ledger()
    ledger.open(_DATASET, replace(mechanism.terms(), total=total))
    runner = Runner(mechanism, ledger=ledger, dataset=_DATASET, **fixed_noise(fixed, 0))
    values = np.full(block.shape, np.nan)
    _fill(values, (release for batch in runner.feed(block) for release in batch))
    _fill(values, runner.finish())
    if np.isnan(values).any():
        missing = int(np.isnan(values).any(axis=1).argmax())
        raise InvalidInput(f"{type(mechanism).__name__} has never released step {missing}")
    return values


def seconds_per_step(mechanism: Mechanism, values: Reals, *, warm: int) -> float:
    """Processor time of one step of one bin, all included; the first `warm` steps are not timed."""
    runner: Any = Runner(mechanism)
    for _ in runner.feed(values[:warm, None]):
        pass
    began = time.process_time()  # a busy machine does not make it longer
    for _ in runner.feed(values[warm:, None]):
        pass
    runner.finish()
    return (time.process_time() - began) / (len(values) - warm)


def _fill(values: Reals, releases: Iterable[Release]) -> None:
    for release in releases:
        values[release.step] = release.values


MIDPOINT: Final = "midpoint"
"""What needs no data and no budget: the middle of the public range, always."""

AS_PUBLISHED: Final = " as published"
EVENT_ADAPUB: Final = "adapub, one event"

# Name -> class and the options that make the form; sound classes are found in the registry.
_PUBLISHED: Final[Mapping[str, tuple[Any, dict[str, Any]]]] = {
    "pegasus": (PegasusPublished, {}),
    "pegasus_delay": (ContinGroupPublished, {"noise": "pp"}),
    "contin_group": (ContinGroupPublished, {}),
    "contin_group pp": (ContinGroupPublished, {"noise": "pp"}),
    "discontin_group": (DiscontinGroupPublished, {}),
    "discontin_group pp": (DiscontinGroupPublished, {"noise": "pp"}),
    "comp_order": (CompOrderPublished, {}),
    "comp_order, both ends": (CompOrderPublished, {"bounds": "ends"}),
    "buc_order": (BucOrderPublished, {}),
}
_WITHOUT_DELAY: Final = ("naive", "pegasus")

SOUND: Final = (
    "naive", "pegasus", "pegasus_delay", "contin_group", "discontin_group", "discontin_group pp",
    "comp_order", "buc_order", "block_smoother",
)  # fmt: skip
PUBLISHED: Final = tuple(name + AS_PUBLISHED for name in _PUBLISHED if name != "contin_group pp")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A mechanism, whether a book may hold it to epsilon, and whether bins are runs."""

    mechanism: Mechanism
    limited: bool = True
    apart: bool = False


def method(name: str, series: Series, *, epsilon: float, delay: int, **options: Any) -> Method:
    """The mechanism `name` for a series; `options` are those of its class."""
    basic: dict[str, Any] = {"epsilon": epsilon, "lo": series.lo, "hi": series.hi}
    if name == EVENT_ADAPUB:
        # One value moves by hi - lo, which is as many events of 1: by group privacy the
        # mechanism for counts promises epsilon with that much less.
        share = exact(epsilon) / (series.hi - series.lo)
        return Method(mechanism=AdaPub(epsilon=share, window=1), apart=True)
    plain = name.removesuffix(AS_PUBLISHED)
    if plain not in _WITHOUT_DELAY:
        basic["delay"] = delay
    if plain != name:
        build, form = _PUBLISHED[plain]
        if build is BucOrderPublished:
            form = {"width": series.bucket, **form}
        apart = bool(options.get("truncate_every"))
        return Method(mechanism=build(**basic, **{**form, **options}), limited=False, apart=apart)
    # It chooses one block length for all bins: as bins of one release, runs would learn together.
    return Method(mechanism=_sound(plain, basic, options), apart=plain == "block_smoother")


def truncated_method(name: str, series: Series, *, epsilon: float, delay: int) -> Method:
    """The same with truncation, renewed every five batches: the sound wrapper, or the paper's."""
    if name.endswith(AS_PUBLISHED):
        return method(name, series, epsilon=epsilon, delay=delay, truncate_every=5)
    inside = method(name, series, epsilon=epsilon, delay=delay).mechanism
    assert isinstance(inside, SeriesMechanism)
    wrapper: Any = find("sensitivity_truncation")
    around = {} if hasattr(inside, "delay") else {"delay": delay}
    return Method(mechanism=wrapper.of(inside, every=5, **around), apart=True)


def _sound(name: str, basic: dict[str, Any], options: Mapping[str, Any]) -> Mechanism:
    registered, _, how = name.partition(" ")
    build: Any = find(registered)
    also = {"publish": how} if how else {}
    mechanism: Mechanism = build(**basic, **also, **options)
    return mechanism
