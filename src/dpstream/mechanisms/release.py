"""Release a whole series in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.html_table import SHOWN, html_table
from dpstream.mechanisms.base import Mechanism, as_block, whole
from dpstream.mechanisms.runner import Runner
from dpstream.optional import optional
from dpstream.privacy.ledger.ledger import warn_of_own_book
from dpstream.privacy.state import Secret
from dpstream.privacy.state.run_directory import GivenLedger
from dpstream.records import Frame, Integers, Reals, Release

RESERVED = frozenset({"step", "time", "paid", "held"})
"""Columns that a released table adds to the bins and their `<bin>_stddev`."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Series:
    """Published values by step: `values` and `stddev` are steps x bins.

    `stddev` is NaN where it is not known. `paid[t]`: budget was spent on publishing step t.
    `held[t]`: the values repeat an earlier step.

    >>> import dpstream as dps
    >>> series = dps.release(dps.mechanisms.Uniform(epsilon=1, window=2), [[5, 7], [6, 9]])
    >>> series.values.shape, series.names, list(series.columns())[:3]
    ((2, 2), ['b0', 'b1'], ['step', 'b0', 'b0_stddev'])
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
        """step, time (where given), each bin with its `<bin>_stddev`, paid, held.

        >>> from dpstream.mechanisms import Uniform
        >>> [*release(Uniform(epsilon=1, window=2), [[5], [6]]).columns()]
        ['step', 'value', 'value_stddev', 'paid', 'held']
        """
        table: dict[str, Any] = {"step": np.arange(len(self.paid))}
        if self.times is not None:
            table["time"] = _times(self.times, len(self.paid))
        for j, name in enumerate(self.names):
            table[name] = self.values[:, j]
            table[f"{name}_stddev"] = self.stddev[:, j]
        return table | {"paid": self.paid, "held": self.held}

    def to_pandas(self) -> Any:
        """A pandas DataFrame of `columns()`.

        >>> from dpstream.mechanisms import Uniform
        >>> release(Uniform(epsilon=1, window=2), [[5], [6]]).to_pandas().shape
        (2, 5)
        """
        return optional("pandas", extra="frames").DataFrame(self.columns())

    def to_polars(self) -> Any:
        """A Polars DataFrame of `columns()`.

        >>> from dpstream.mechanisms import Uniform
        >>> release(Uniform(epsilon=1, window=2), [[5], [6]]).to_polars().height
        2
        """
        return optional("polars", extra="frames").DataFrame(self.columns())

    @property
    def table(self) -> pa.Table:
        """An Arrow table of `columns()`."""
        return pa.table(self.columns())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """`table` for whatever reads Arrow's PyCapsule interface: Polars, DuckDB, pyarrow."""
        return self.table.__arrow_c_stream__(requested_schema)

    def plot(self, path: str | Path | None = None, *, column: str | int = 0) -> Any:
        """A chart of one column, ± two standard deviations; saved if `path` is given.

        >>> from tempfile import mkdtemp
        >>> from dpstream.mechanisms import Uniform
        >>> place = mkdtemp() + "/visits.png"
        >>> _ = release(Uniform(epsilon=1, window=2), [[5], [6]]).plot(place)
        """
        if isinstance(column, str) and column not in self.names:
            known = ", ".join(self.names)
            raise InvalidParameter(f"there is no column {column!r} to draw; there are {known}")
        column = [*self.names].index(column) if isinstance(column, str) else column
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
        if path is not None or "inline" in pyplot.get_backend():  # a notebook shows it itself
            pyplot.close(figure)
        return figure

    def __repr__(self) -> str:
        return f"<Series: {len(self)} steps, {sum(self.paid)} paid for, of {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        """The first steps, as notebooks show them."""
        paid = sum(self.paid)
        words = f"{len(self)} steps, {paid} paid for, ± 2 stddev of noise"
        return html_table(self.table.slice(0, SHOWN).to_pylist(), words, total=len(self))

    def __len__(self) -> int:
        return len(self.paid)


def _times(times: Sequence[Any], count: int) -> Any:
    """Times of a kind that every kind of table takes."""
    array = np.asarray(list(times)[:count])
    if array.dtype.kind != "M":
        return list(times)[:count]
    known = np.datetime_data(array.dtype)[0] in ("D", "ms", "us", "ns")
    return array if known else array.astype("datetime64[us]")


def release(
    mechanism: Mechanism,
    data: npt.ArrayLike | Frame | pa.Table,
    *,
    time_column: str | None = None,
    secret: Secret | bytes | str | Path | None = None,
    run_id: bytes | None = None,
    ledger: GivenLedger = None,
    state: str | Path | None = None,
    dataset: str = "stream",
    name: str = "",
    final: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Series:
    """Publish `data` (steps x bins) through a mechanism.

    `data` is an array, nested lists, a pandas or Polars frame, a list of dicts, or what offers
    itself as an Arrow stream, such as a DuckDB relation or the table that `dps.read` makes of a
    file; of a table the numeric columns are the bins, and `time_column` orders the steps (checked,
    and published as it is). Without `secret` a fresh one is drawn and forgotten: nothing can be
    replayed. `state` names a directory (see `Runner`, `replay`): the same data again publish the
    same values and cost nothing, appended steps are new, changed data raise NoiseReuse.
    `final`: the series has ended, so what a delay holds back is published too; with a `state`
    only if you say so, since nothing can be appended afterwards.
    `ledger` makes the release share its dataset's budget with every other release; without one, a
    NewBook warning says once that nothing adds them up. `run_id` is for tests. `progress` is called
    with the steps done and their total.

    >>> from dpstream.mechanisms import Sample
    >>> release(Sample(epsilon=1, window=2), [5, 7, 9]).paid
    [True, False, True]
    """
    if not isinstance(mechanism, Mechanism):
        raise InvalidParameter(
            f"release takes a mechanism first, such as mechanisms.Sample(epsilon=1, window=12); "
            f"got {mechanism!r}"
        )
    block, names, times = as_steps(data, time_column=time_column)
    mechanism.check(block)  # before a state directory or a book is made for it
    if ledger is None:
        warn_of_own_book("release", state, stacklevel=2)
    runner = Runner(
        mechanism,
        state=state,
        secret=secret,
        ledger=ledger,
        dataset=dataset,
        name=name,
        replay=state is not None,
        run_id=run_id,
    )
    releases = []
    try:
        for done, batch in enumerate(runner.feed(block), start=1):
            releases += batch
            progress(done, len(block))
        if runner.ended or (state is None if final is None else final):
            releases += runner.finish()
            if state is not None:
                runner.save()
    finally:
        if state is not None:
            runner.close()  # also where an error is kept: the directory must not stay locked
    return Series.of(releases, run=runner.run_id.hex(), names=names, times=times)


def as_steps(
    data: Any, *, time_column: str | None = None, gaps: bool = False
) -> tuple[Reals, list[str] | None, list[Any] | None]:
    """Rows of numbers, column names and times (where there are any), in checked time order."""
    columns = _columns(data)
    if columns is None:
        if time_column is not None:
            raise InvalidInput("time_column= names a column; pass a frame or an Arrow table")
        return as_block(data), None, None
    time = time_column
    if time is None:
        time = next((name for name, column in columns.items() if _is_time(column)), None)
    if time is not None and time not in columns:
        raise InvalidInput(f"there is no column {time!r}; the columns are {', '.join(columns)}")
    bins = {name: column for name, column in columns.items() if name != time}
    for name, column in bins.items():
        if column.dtype.kind not in "biuf":
            raise InvalidInput(
                f"column {name!r} is not numeric ({column.dtype}); "
                "leave it out, or name it as time_column="
            )
    if not bins:
        raise InvalidInput("the table has no numeric column to publish")
    for name in bins:
        if name in RESERVED or name.removesuffix("_stddev") in bins.keys() - {name}:
            raise InvalidInput(
                f"column {name!r} would collide with a column of the release; rename it"
            )
    if time is not None:
        check_times(_as_a_clock_shows(columns[time]), time, gaps=gaps)
    times = None if time is None else list(columns[time])
    return as_block(np.column_stack(list(bins.values()))), list(bins), times


def _is_time(column: np.ndarray[Any, Any]) -> bool:
    """Is it a column of times? Those with a time zone are objects."""
    known = next((value for value in column if value is not None), None)
    zoned = column.dtype == object and isinstance(known, datetime) and known.tzinfo is not None
    return column.dtype.kind == "M" or zoned


def _as_a_clock_shows(column: np.ndarray[Any, Any]) -> Iterable[Any]:
    """Times of a zone as its clock shows them where all are of one time of day, else in UTC.

    So days have one length, although one of 23 hours is among them, and hours have, too.
    """
    if column.dtype != object or not _is_time(column):
        return column
    known = [value for value in column if value is not None and value == value]
    if len({value.timetz().replace(tzinfo=None) for value in known}) == 1:
        return [value if value is None else value.replace(tzinfo=None) for value in column]
    in_utc = [value if value is None else value.astimezone(UTC) for value in column]
    return [value if value is None else value.replace(tzinfo=None) for value in in_utc]


def check_times(values: Iterable[Any], name: str, *, gaps: bool = False) -> Integers:
    """Steps must come in order and evenly: a missing step would shift the protected window.

    Even means the same number of seconds, or of calendar months, between any two steps. With
    `gaps` steps may be missing. Returns the number of each row's step.
    """
    try:
        stamps = np.asarray(list(values), dtype="datetime64[s]")
    except ValueError as problem:
        raise InvalidInput(f"column {name!r} is not a time: {problem}") from None
    if np.isnat(stamps).any():
        raise InvalidInput(f"column {name!r} has no time in row {int(np.isnat(stamps).argmax())}")
    lengths = np.diff(stamps).astype(np.int64)
    if (lengths <= 0).any():
        row = int((lengths <= 0).argmax()) + 1
        raise InvalidInput(
            f"time must increase from row to row; row {row} has {stamps[row]} after "
            f"{stamps[row - 1]}; sort the rows and merge those of the same step"
        )
    months = stamps.astype("datetime64[M]")
    within_month = (stamps - months.astype("datetime64[s]")).astype(np.int64)
    if len(set(within_month)) == 1 and len(set(lengths)) > 1:
        lengths = np.diff(months).astype(np.int64)
    step = int(lengths.min(initial=1 << 62))
    if len(set(lengths)) > 1 and (not gaps or (lengths % step).any()):
        known, often = np.unique(lengths, return_counts=True)
        usual = known[often.argmax()]
        row = int((lengths % step if gaps else lengths != usual).argmax()) + 1
        by = "a multiple of the shortest step" if gaps else "the usual step"
        advice = (
            "add the missing steps with a public constant (for counts: 0; `dpstream release "
            "--fill 0` does)"
        )
        advice = "no step can be put between them; correct that time" if gaps else advice
        raise InvalidInput(
            f"steps must be evenly spaced; row {row} ({stamps[row]}) does not follow "
            f"{stamps[row - 1]} by {by}; {advice}"
        )
    return np.concatenate([[0], np.cumsum(lengths // step)]).astype(np.int64)


def _array(column: Any) -> np.ndarray[Any, Any]:
    """A column of Arrow, pandas or Polars; times with a zone keep it."""
    kind = getattr(column, "type", None) or getattr(column, "dtype", None)
    if getattr(kind, "tz", None) or getattr(kind, "time_zone", None):
        values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        zoned = np.empty(len(values), object)
        zoned[:] = values
        return zoned
    found: np.ndarray[Any, Any] = column.to_numpy()
    return found


def _columns(data: Any) -> dict[str, np.ndarray[Any, Any]] | None:
    """A table's columns as arrays; None if `data` is not a table."""
    if isinstance(data, str | Path):
        raise InvalidInput(
            "a release takes numbers, and this is a path; read the file first: "
            "dps.release(mechanism, dps.read(path))"
        )
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        data = {name: [row.get(name) for row in data] for name in names}
    if type(data).__module__.startswith("pandas") and hasattr(data, "to_frame"):
        data = data.to_frame("value" if data.name is None else data.name)  # one column, and times
    if isinstance(data, Mapping):
        return {str(name): np.asarray(values) for name, values in data.items()}
    if type(data).__module__.startswith("polars.lazyframe"):
        data = data.collect()
    frame = type(data).__module__.partition(".")[0] in ("pandas", "polars")
    if hasattr(data, "__arrow_c_stream__") and not frame:
        data = pa.table(data)
    if hasattr(data, "column_names") and hasattr(data, "column"):  # Arrow
        return {name: _array(data.column(name)) for name in data.column_names}
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):  # pandas, Polars
        table = {str(name): _array(data[name]) for name in data.columns}
        index: Any = getattr(data, "index", None)  # pandas: a time index orders the steps
        if getattr(getattr(index, "dtype", None), "kind", "") == "M":
            table = {"time": _array(index), **table}
        return table
    return None


def bounded_counts(
    *,
    steps: npt.ArrayLike,
    users: npt.ArrayLike,
    bins: npt.ArrayLike,
    slots: int,
    domain: int,
    rows_per_user: int,
) -> Integers:
    """Rows to counts (slots x domain), at most `rows_per_user` of each user in each slot.

    `steps`, `users`, `bins`: one entry a row. Which rows are kept depends on a user's own rows
    alone: the first ones of each slot. Rows outside the public slots and domain are dropped.

    >>> bounded_counts(steps=[0, 0, 0, 1], users=["a", "a", "b", "a"], bins=[2, 0, 2, 1],
    ...                slots=2, domain=3, rows_per_user=1).tolist()
    [[0, 0, 2], [0, 1, 0]]
    """
    most = whole(rows_per_user, "rows_per_user", at_least=1)
    step, bin_ = np.asarray(steps, dtype=np.int64), np.asarray(bins, dtype=np.int64)
    names, user = np.unique(np.asarray(users), return_inverse=True)
    public = np.flatnonzero((step >= 0) & (step < slots) & (bin_ >= 0) & (bin_ < domain))
    group = step[public] * len(names) + user[public]  # a user's rows of a slot
    order = np.argsort(group, kind="stable")  # they stay in their order
    rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
    first = public[order[rank < most]]
    counts = np.zeros((slots, domain), dtype=np.int64)
    np.add.at(counts, (step[first], bin_[first]), 1)
    return counts
