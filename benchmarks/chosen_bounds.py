"""Bounds that choose themselves beside the best fixed ones, which were found by looking.

Five logs, three made and two real ones, whose windows are periods of units, and one whose users
change their habits halfway. Each is published with `max_groups_contributed = AUTO` and with each
fixed bound; the error is the l_2 of all keys in the tables of all periods but the first, of which
nothing was known; a key that is not shown counts as published with 0. On seven days of the laws of
the DP-SQLP paper, 100 triggers a day, the defaults stand beside tuned forms.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from benchmarks.generated_logs import forum_posts, web_sessions
from benchmarks.harness import Findings, Progress, Row, target
from benchmarks.logs import HIGGS, RETAIL
from benchmarks.memory_of_keys import days_query, write_days
from benchmarks.streams import VARIABLE
from dpstream.engines.query_run import EngineOptions
from dpstream.evaluate.trials import fixed_noise
from dpstream.privacy.state import Secret
from dpstream.query.aggregates import Count
from dpstream.query.period_bounds import HALF_OCTAVES
from dpstream.query.query import Query
from dpstream.query.windows import Tumble
from dpstream.records import Integers
from dpstream.session import run

NEAR: Final = 1.15
_DAY: Final = 86_400
_DAYS: Final = {False: 16, True: 8}
_RUNS: Final = {False: 2, True: 1}
_FIXED: Final = {False: HALF_OCTAVES[:12], True: (1, 8, 64)}
_CHANGED: Final = "changed habits"


def measure(*, quick: bool, progress: Progress) -> Findings:
    """A row for each log and each bound."""
    rows: list[Row] = []
    logs, notes = _logs(quick)
    notes.append("the truth is exact, and the best bound is known by it alone: not private")
    for number, (name, (query, table)) in enumerate(logs.items()):
        truth = _truth_of(query, table)
        bounds_tried: tuple[int | Literal["auto"], ...] = ("auto", *_FIXED[quick])
        for groups in bounds_tried:
            progress(number, len(logs), f"{name}, {groups}")
            asked = _bounded(query, groups)
            errors, bounds = zip(
                *(_error(asked, table, truth, seed) for seed in range(_RUNS[quick])), strict=True
            )
            rows.append(
                {
                    "log": name,
                    "groups": groups,
                    "l_2": math.sqrt(float(np.mean(np.square(errors)))),
                    "bounds": bounds[0] if groups == "auto" else str(groups),
                }
            )
    targets = _targets(rows)
    if not quick:
        progress(len(logs), len(logs), "what nobody has tuned")
        rows += _untuned()
    return Findings(rows=rows, targets=targets, notes=notes)


_FORMS: Final[dict[str, dict[str, Any]]] = {
    "C = 32": {},
    "C = 16, debiased": {"max_groups_contributed": 16, "debias": "global"},
    "C = 16, debiased, last_budget = 0.4": {
        "max_groups_contributed": 16,
        "debias": "global",
        "last_budget": "0.4",
    },
    "AUTO": {"max_groups_contributed": "auto"},
    "AUTO, debiased": {"max_groups_contributed": "auto", "debias": "global"},
    "AUTO, debiased, last_budget = 0.4": {
        "max_groups_contributed": "auto",
        "debias": "global",
        "last_budget": "0.4",
    },
}
_USERS: Final = 400_000, 40_000  # of a day, and keys


def _untuned() -> Iterator[Row]:
    """The paper's laws at 100 triggers a day: the defaults of bounds beside tuned ones."""
    with tempfile.TemporaryDirectory() as folder:
        truth = write_days(Path(folder), users=_USERS[0], keys=_USERS[1])
        for form, options in _FORMS.items():
            for release in run(days_query(**options), source=str(Path(folder) / "*.parquet")):
                about = json.loads(release.schema.metadata[b"dpstream"])
                if about["release_index"] < about["releases"]:
                    continue
                pairs = (release[name].to_pylist() for name in ("key", "clicks"))
                shown = dict(zip(*pairs, strict=True))
                exact = truth[about["window"]]
                off = np.array([shown.get(key, 0) - count for key, count in exact.items()])
                yield {
                    "log": "one law",
                    "form": form,
                    "day": about["window"] + 1,
                    "bounds": about.get("bounds", {}).get("max_groups_contributed"),
                    "keys": len(shown),
                    "l_1": float(np.abs(off).sum()),
                    "l_2": float(np.sqrt(np.sum(off**2))),
                    "l_inf": float(np.abs(off).max()),
                }


def _bounded(query: Query, groups: int | Literal["auto"]) -> Query:
    given: dict[str, Any] = {"max_groups_contributed": groups}
    return replace(query, choose_groups=False, max_rows_contributed=None, **given)


def _targets(rows: list[Row]) -> list[Row]:
    """AUTO over the best fixed bound, log by log."""
    found = []
    for log in dict.fromkeys(row["log"] for row in rows):
        mine = {row["groups"]: row["l_2"] for row in rows if row["log"] == log}
        best = min(error for groups, error in mine.items() if groups != "auto")
        found.append(
            target(f"{log}: l_2 over the best fixed bound", mine["auto"] / best, "<=", NEAR)
        )
    return found


def _query(name: str, days: int) -> Query:
    return Query(
        name=name.replace(" ", "_"),
        privacy_unit_column="user",
        keys=["key"],
        aggregates=[Count("n")],
        epsilon=2,
        delta=1e-6,
        time_column="at",
        time_unit="s",
        start="1970-01-01",
        end=f"1970-01-{days + 1:02d}",
        window=Tumble("1 day"),
        privacy_unit_period="1 day",
        debias=None,  # else counts make up for what a bound leaves out, and bounds differ less
    )


def _logs(quick: bool) -> tuple[dict[str, tuple[Query, pa.Table]], list[str]]:
    days, rng = _DAYS[quick], np.random.default_rng(29)
    found: dict[str, tuple[Query, pa.Table]] = {}
    if not quick:
        sessions = web_sessions(sessions=3_000 * days)
        who = np.asarray(sessions["session"])
        found["web sessions"] = _made(
            "web sessions", days, who, np.asarray(sessions["page"]), who % days
        )
        posts = forum_posts(users=8_000 * days)
        who = np.asarray(posts["user"]).astype(np.int64)
        found["forum posts"] = _made(
            "forum posts", days, who, np.asarray(posts["target"]), who % days
        )
    for name, shapes in (("power law", (1.3,)), (_CHANGED, (2.5, 1.1))):
        units = np.arange((5_000 if not quick else 1_000) * days)
        law = np.array(shapes)[units % days * len(shapes) // days]
        sizes = np.minimum(np.floor(rng.pareto(law) + 1), 300).astype(np.int64)
        who = np.repeat(units, sizes)
        keys = np.minimum(rng.zipf(1.6, len(who)), 2_000)
        found[name] = _made(name, days, who, keys, who % days)
    notes = []
    named = os.environ.get(VARIABLE)
    for log, period in ((HIGGS, "1 hour"), (RETAIL, "7 days")):
        path = Path(named) / log.file if named else None
        if quick or path is None or not path.exists():
            notes.append(f"{log.file} is not measured: set {VARIABLE}, without --quick")
            continue
        given: dict[str, Any] = {
            "aggregates": (Count("n"),),
            "epsilon": 2,
            "delta": 1e-6,
            "window": Tumble(period),
            "privacy_unit_period": period,
            "every": None,
            "max_rows_contributed": None,
        }
        if log is RETAIL:  # whole periods
            given |= {"start": "2010-12-02", "end": "2011-06-30"}
        asked = replace(log.query, **given)
        found[f"{log.query.name} by {period}"] = (asked, pa_csv.read_csv(path))
    return found, notes


def _made(
    name: str, days: int, who: Integers, keys: Integers, day: Integers
) -> tuple[Query, pa.Table]:
    """Each unit has one day, at noon."""
    at = day * _DAY + _DAY // 2
    return _query(name, days), pa.table({"user": who, "key": keys.astype(np.int64), "at": at})


def _truth_of(query: Query, table: pa.Table) -> Mapping[int, Mapping[Any, int]]:
    """Units of each key, by window."""
    assert query.time_unit_micros is not None
    times = np.asarray(table[query.time_column]).astype(np.int64) * query.time_unit_micros
    windows = query.schedule.window_of(times + int(query.time_origin))
    pairs = pa.table(
        {
            "window": windows,
            "key": table[query.keys[0]],
            "unit": table[query.privacy_unit_column],
        }
    ).group_by(["window", "key"])
    counted = pairs.aggregate([("unit", "count_distinct")])
    found: dict[int, dict[Any, int]] = defaultdict(dict)
    for window, key, count in zip(
        *(counted[n].to_pylist() for n in counted.column_names), strict=True
    ):
        found[window][key] = count
    return found


def _error(
    query: Query, table: pa.Table, truth: Mapping[int, Mapping[Any, int]], seed: int
) -> tuple[float, str]:
    """The l_2 over all tables but the first, and the bounds that they had."""
    squares, bounds = 0.0, []
    noise = fixed_noise(f"chosen bounds of {query.name}", seed)
    options = EngineOptions(run_id=noise["run_id"])
    for release in run(query, source=table, secret=Secret(noise["secret"]), options=options):
        about = json.loads(release.schema.metadata[b"dpstream"])
        bounds.append(about.get("bounds", {}).get("max_groups_contributed"))
        if about["window"] == 0:
            continue
        exact = truth.get(about["window"], {})
        pairs = zip(release[query.keys[0]].to_pylist(), release["n"].to_pylist(), strict=True)
        shown = dict(pairs)
        squares += sum((shown.get(key, 0) - count) ** 2 for key, count in exact.items())
        squares += sum(value**2 for key, value in shown.items() if key not in exact)
    return math.sqrt(squares), " ".join(map(str, bounds))
