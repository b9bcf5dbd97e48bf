"""A released series, as people want to use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpstream.errors import InvalidInput
from dpstream.optional import optional
from dpstream.records import Reals, Release

RESERVED = frozenset({"step", "time", "paid", "held"})
"""Columns that a released table adds to the bins and their `<bin>_stddev`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """Published values by step: `values` and `stddev` are steps x bins.

    `stddev` is NaN where it is not known. `paid[t]`: budget was spent on publishing step t.
    `held[t]`: the values repeat an earlier step.
    """

    values: Reals
    stddev: Reals
    paid: list[bool]
    held: list[bool]
    run: str = ""
    names: Sequence[str] = field(default_factory=list)
    times: Sequence[Any] | None = None

    @classmethod
    def of(
        cls,
        releases: Sequence[Release],
        *,
        run: str = "",
        names: Sequence[str] | None = None,
        times: Sequence[Any] | None = None,
    ) -> Series:
        """Order releases by step; every step must be there once."""
        ordered = sorted(releases, key=lambda release: release.step)
        if [release.step for release in ordered] != list(range(len(ordered))):
            raise InvalidInput("a series needs exactly one release per step, from step 0 on")
        bins = len(ordered[0].values) if ordered else 0
        unknown = np.full(bins, np.nan)
        known = [unknown if r.stddev is None else r.stddev for r in ordered]
        return cls(
            values=np.array([r.values for r in ordered]).reshape(len(ordered), bins),
            stddev=np.array(known).reshape(len(ordered), bins),
            paid=[r.paid for r in ordered],
            held=[r.held for r in ordered],
            run=run,
            names=list(names or (["value"] if bins == 1 else [f"b{j}" for j in range(bins)])),
            times=times,
        )

    def columns(self) -> dict[str, Any]:
        """step, time (where given), each bin with its `<bin>_stddev`, paid, held."""
        table: dict[str, Any] = {"step": np.arange(len(self.paid))}
        if self.times is not None:
            table["time"] = _times(self.times, len(self.paid))
        for j, name in enumerate(self.names):
            table[name] = self.values[:, j]
            table[f"{name}_stddev"] = self.stddev[:, j]
        return table | {"paid": self.paid, "held": self.held}

    def to_pandas(self) -> Any:
        """A pandas DataFrame of `columns()`."""
        return optional("pandas", extra="frames").DataFrame(self.columns())

    def to_polars(self) -> Any:
        """A Polars DataFrame of `columns()`."""
        return optional("polars", extra="frames").DataFrame(self.columns())

    def plot(self, column: int = 0, path: str | None = None) -> Any:
        """A chart of one column, ± two standard deviations; saved if `path` is given."""
        pyplot = optional("matplotlib.pyplot", extra="plot")
        figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
        x = np.arange(len(self.paid)) if self.times is None else list(self.times)
        value, spread = self.values[:, column], 2 * np.nan_to_num(self.stddev[:, column])
        axes.fill_between(
            x, value - spread, value + spread, alpha=0.25, label="± 2 stddev of noise"
        )
        axes.plot(x, value, linewidth=1.2, label=self.names[column])
        axes.set_xlabel("step" if self.times is None else "time")
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=150)
            pyplot.close(figure)
        return figure

    def __len__(self) -> int:
        return len(self.paid)


def _times(times: Sequence[Any], count: int) -> Any:
    """Times of a kind that every kind of table takes."""
    array = np.asarray(list(times)[:count])
    if array.dtype.kind != "M":
        return list(times)[:count]
    known = np.datetime_data(array.dtype)[0] in ("D", "ms", "us", "ns")
    return array if known else array.astype("datetime64[us]")
