"""Releases on standard output: tables for people, JSON lines for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self
from zoneinfo import ZoneInfo

import pyarrow as pa

from dpstream.cli.output import new_table, people, print_whole, wants_json
from dpstream.connectors.encode import jsonl

_OF_RELEASE = ("window_start", "window_end", "trigger_time", "release_index")
_TOGETHER = 1000  # rows or windows that wait for one table
_MOST = 100  # rows that are shown of a release, unless all are asked for


def about(release: pa.Table) -> dict[str, Any]:
    """Query, window and trigger of a release."""
    facts: dict[str, Any] = json.loads(release.schema.metadata[b"dpstream"])
    return facts


def as_json(release: pa.Table, *, rows: bool = True) -> str:
    """One line: query, window, trigger and the rows, or only how many there are."""
    facts = about(release)
    told = {name: facts[name] for name in ("query", *_OF_RELEASE)}
    told |= {name: facts[name] for name in ("kept_share", "bias") if name in facts}
    head = json.dumps(told)[:-1]
    if not rows:
        return f'{head}, "groups": {release.num_rows}}}'
    lines = b", ".join(jsonl(_without_place(release)).splitlines())
    return f'{head}, "rows": [{lines.decode()}]}}'


def in_words(release: pa.Table, zone: str = "UTC") -> str:
    """One line for people: which window, which trigger, how many rows; times are the zone's."""
    facts = about(release)
    rows = f"{release.num_rows:,} row{'s' * (release.num_rows != 1)}"
    if facts["trigger_time"] is None:
        return f"{facts['query']}: {rows}"
    begin, end, at = (_clock(facts[name], zone) for name in _OF_RELEASE[:3])
    return (
        f"{facts['query']}, {begin} to {end}, "
        f"release {facts['release_index']} of {facts['releases']} at {at}: {rows}"
    )


def in_full(release: pa.Table, *, zone: str = "UTC", everything: bool = False) -> str:
    """The line and a table; a figure with twice the standard deviation of its noise."""
    noisy = _noisy_columns(_without_place(release))
    table = new_table(*_headings(noisy))
    for row in (release if everything else release.slice(0, _MOST)).to_pylist():
        table.add_row(*_cells(row, noisy, zone))
    console = people()
    with console.capture() as captured:
        print_whole(console, table)
    lines = [in_words(release, zone), captured.get().rstrip("\n") if release.num_rows else ""]
    hidden = 0 if everything else max(0, release.num_rows - _MOST)
    if hidden:
        lines.append(f"... and {hidden:,} more rows; --all, --json or a sink has them")
    lines.append(not_counted(about(release)))
    return "\n".join(line for line in lines if line) + "\n"


class ReleasePrinter:
    """Prints releases; windows that are published once each come in one table, if `together`.

    Use it as a context: what waits is printed at the end.
    """

    def __init__(self, *, zone: str = "UTC", everything: bool = False, together: bool = True):
        self._zone, self._everything, self._together = zone, everything, together
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def show(self, release: pa.Table) -> None:
        """Print a release, or keep it for a table of several windows."""
        facts = about(release)
        once = facts["releases"] == 1 and facts["window_start"] is not None
        if not (once and self._together) or self._everything or wants_json():
            self.flush()
            show(release, zone=self._zone, everything=self._everything)
            return
        self._waiting.append(release)
        self._rows += release.num_rows
        if self._rows >= _TOGETHER or len(self._waiting) >= _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Print what waits."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        if len(waiting) == 1:
            show(waiting[0], zone=self._zone, everything=self._everything)
        elif waiting:
            print(windows_in_full(waiting, zone=self._zone), flush=True)


def windows_in_full(releases: Sequence[pa.Table], *, zone: str = "UTC") -> str:
    """One table of several windows, each published once: their starts stand before the keys."""
    told = [about(release) for release in releases]
    rows = sum(release.num_rows for release in releases)
    begin, end = _clock(told[0]["window_start"], zone), _clock(told[-1]["window_end"], zone)
    head = (
        f"{told[0]['query']}: {len(told)} windows, {begin} to {end}, {rows:,} "
        f"row{'s' * (rows != 1)}"
    )
    noisy = _noisy_columns(_without_place(releases[0]))
    table = new_table("window_start", *_headings(noisy))
    for facts, release in zip(told, releases, strict=True):
        start = _clock(facts["window_start"], zone)
        for row in release.slice(0, _MOST).to_pylist():
            table.add_row(start, *_cells(row, noisy, zone))
        if release.num_rows > _MOST:
            rest = (
                f"... and {release.num_rows - _MOST:,} more rows; --all, --json or a sink has them"
            )
            table.add_row(start, rest)
    console = people()
    with console.capture() as captured:
        print_whole(console, table)
    words = dict.fromkeys(filter(None, map(not_counted, told)))
    lines = [head, captured.get().rstrip("\n") if rows else "", *words]
    if len(words) > 1:
        lines[2:] = [_not_counted_in_several(told)]
    return "\n".join(line for line in lines if line) + "\n"


def _not_counted_in_several(told: Sequence[dict[str, Any]]) -> str:
    """The same of several windows that differ."""
    shares = [(facts.get("bias") or {}).get("share") for facts in told]
    known = [1 - share for share in shares if share is not None]
    if not known:
        return ""
    unknown = len(told) - len(known)
    between = " to ".join(dict.fromkeys(map(_percent, (min(known), max(known)))))
    words = f"about {between} of the rows of a window are not counted: the bounds left them out"
    of = f"{unknown} window{'s' * (unknown > 1)}"
    return words + (f"; too few rows to say so of {of}" if unknown else "")


def not_counted(facts: dict[str, Any]) -> str:
    """What the bounds have left out of a release, in a sentence; empty where nobody has measured.

    >>> bias = {"share": 0.92, "low": 0.9, "high": 0.94, "at_least": False}
    >>> not_counted({"bias": bias})
    'about 8% of the rows are not counted (6% to 10%): the bounds left them out'
    >>> not_counted({"bias": bias | {"share": None}})
    'too few rows to say how many the bounds left out'
    """
    bias = facts.get("bias")
    if bias is None:
        return ""
    if bias["share"] is None:
        words = "too few rows to say how many the bounds left out"
    else:
        lost, least, most = (1 - bias[name] for name in ("share", "high", "low"))
        words = (
            f"{'at least ' * bias['at_least']}about {_percent(lost)} of the rows are not counted "
            f"({' to '.join(dict.fromkeys(map(_percent, (least, most))))}): the bounds left them "
            "out"
        )
    if "debiased" in bias:
        words += "; made up for in " + (", ".join(bias["debiased"]) or "no column: too few rows")
    return words


def _percent(part: float) -> str:
    return f"{part:.1%}" if 0 < part < 0.02 else f"{part:.0%}"


def show(release: pa.Table, *, zone: str = "UTC", everything: bool = False) -> None:
    """Print a release: for people the last one of a window in full, earlier ones in a line."""
    facts = about(release)
    if wants_json():
        text = as_json(release)
    elif everything or facts["release_index"] == facts["releases"]:
        text = in_full(release, zone=zone, everything=everything)
    else:
        text = in_words(release, zone)
    print(text, flush=True)


def _without_place(release: pa.Table) -> pa.Table:
    """Without the columns that have one value for all rows."""
    names = {*_OF_RELEASE, "kept_share"}
    return release.drop_columns([name for name in release.column_names if name in names])


def _noisy_columns(release: pa.Table) -> dict[str, bool]:
    """The columns that are shown, and whether each has an error bar beside it."""
    names = release.column_names
    spreads = {f"{name}_stddev" for name in names} & set(names)
    return {name: f"{name}_stddev" in spreads for name in names if name not in spreads}


def _headings(noisy: Mapping[str, bool]) -> list[str]:
    return [f"{name} (± 2 stddev)" if noisy[name] else name for name in noisy]


def _cells(row: Mapping[str, Any], noisy: Mapping[str, bool], zone: str) -> list[str]:
    return [
        _figure(row[name], row[f"{name}_stddev"]) if noisy[name] else _key(row[name], name, zone)
        for name in noisy
    ]


def _figure(value: Any, spread: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_figure(*pair) for pair in zip(value, spread, strict=True))
    if value is None or value != value:
        return ""
    if spread is None or spread != spread:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return with_margin(value, 2 * spread)


def with_margin(value: float, margin: float) -> str:
    """A value and the half width of its error bar, rounded to what that lets one know.

    Two digits of the margin, which is rounded up, and the value to the same place; files and feeds
    have all digits.

    >>> with_margin(1296, 16.4), with_margin(5.46353, 0.1391), with_margin(19915, 945)
    ('1,296 ± 17', '5.46 ± 0.14', '19,920 ± 950')
    """
    if not 0 < margin < math.inf:
        return f"{value:,.6g} ± {margin:,.3g}"
    digits = 1 - math.floor(math.log10(margin))
    wide = math.ceil(round(margin * 10.0**digits, 6))
    if wide >= 100:  # 99.6 is 100, of which two digits are tens
        digits, wide = digits - 1, 10
    places = max(digits, 0)
    near = math.floor(value * 10.0**digits + 0.5) / 10.0**digits
    return f"{near:,.{places}f} ± {wide / 10.0**digits:,.{places}f}"


_COMPUTED = ("_share", "_low", "_high", "_high_all")


def _key(value: Any, name: str, zone: str) -> str:
    """A key, or a figure without an error bar of its own; instants in the zone, as windows are.

    >>> from datetime import UTC
    >>> _key(datetime(2024, 1, 31, 23, tzinfo=UTC), "cohort", "Europe/Rome")
    '2024-02-01 00:00+01:00'
    >>> _key(0.7645429362880887, "n_share", "UTC"), _key(0.25, "ratio", "UTC")
    ('0.764543', '0.25')
    """
    if isinstance(value, datetime) and value.tzinfo is not None:
        return _clock(value.isoformat(), zone)
    if isinstance(value, float) and name.endswith(_COMPUTED):
        return f"{value:,.6g}"
    return "NULL" if value is None else str(value)


def _clock(at: str | None, zone: str) -> str:
    """An instant in a zone, with its offset unless that is UTC; seconds that are 0 are left out."""
    if at is None:
        return "..."
    then = datetime.fromisoformat(at).astimezone(ZoneInfo(zone))
    offset = "" if zone == "UTC" else then.isoformat()[-6:]
    shown = then.replace(tzinfo=None).isoformat(sep=" ")
    return (shown.removesuffix(":00") if len(shown) == 19 else shown) + offset
