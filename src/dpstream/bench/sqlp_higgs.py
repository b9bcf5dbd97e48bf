"""A real day of events: Higgs, published 100 times, by every form.

C is the 99th percentile of events per user (11), as the paper chooses it; the day is taken as
public for that choice. Log: De Domenico, Lima, Mougel, Musolesi, "The Anatomy of a Scientific
Rumor", 2013.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from dpstream.bench import sqlp_runs as runs
from dpstream.bench.harness import Row
from dpstream.bench.logs import HIGGS
from dpstream.bench.sqlp_published import Events
from dpstream.bench.streams import VARIABLE
from dpstream.session import run

TRIGGERS: Final = 100
_SECONDS: Final = 86_400


def day() -> tuple[list[Row], list[str]]:
    """Rows of the table; without the data none, and a note that says so."""
    named = os.environ.get(VARIABLE)
    path = Path(named) / HIGGS.file if named else None
    if path is None or not path.exists():
        return [], [f"{HIGGS.file} is not there: set {VARIABLE} to the folder that has it"]
    table = pa_csv.read_csv(path)
    given, names = _events(table)
    truth = np.bincount(given.keys, minlength=len(names))
    bound = int(np.quantile(np.bincount(given.users), 0.99))
    rows = []
    for form in runs.SIMULATED:
        found = runs.simulated(form, given, keys=len(names), triggers=TRIGGERS, rows=bound)
        rows.append(_row(form, bound, found.row(truth)))
    for form, options in forms(bound).items():
        asked = replace(
            HIGGS.query,
            every=timedelta(seconds=_SECONDS) / TRIGGERS,
            **{"max_groups_contributed": bound} | options,
        )
        began, values = time.perf_counter(), np.full(len(names), np.nan)
        for release in run(asked, source=table):  # a key that is shown once keeps its last value
            places = pc.index_in(release["target"], names).to_numpy()
            values[places] = release["events"].to_numpy()
        found = runs.Found(values=values, seconds=time.perf_counter() - began)
        rows.append(_row(form, bound, found.row(truth)))
    return rows, []


def forms(bound: int) -> dict[str, dict[str, Any]]:
    """The engine's forms: many users have several events for one target, so K matters here."""
    return {
        "sqlp": {"strategy": "sqlp", "max_rows_per_group": bound, "max_rows_contributed": bound},
        "latched, K = 1": {},
        "latched, K = 1, debiased": {"debias": "global"},
        "latched, K = 3": {"max_rows_per_group": 3, "max_rows_contributed": bound},
        "latched, K = C": {"max_rows_per_group": bound, "max_rows_contributed": bound},
        "latched, 8 groups, K = 3, debiased, last_budget = 0.4": {
            "max_groups_contributed": 8,
            "max_rows_per_group": 3,
            "debias": "global",
            "last_budget": "0.4",
        },
    }


def _events(table: pa.Table) -> tuple[Events, pa.Array]:
    """The day as numbers; keys by the place of their names."""
    users = pc.dictionary_encode(table["user"]).combine_chunks()
    keys = pc.dictionary_encode(table["target"]).combine_chunks()
    at = table["sec"].to_numpy() * TRIGGERS // _SECONDS
    order = np.argsort(at, kind="stable")
    return Events(
        users=users.indices.to_numpy()[order],
        keys=keys.indices.to_numpy()[order],
        triggers=at[order].astype(np.int16),
    ), keys.dictionary


def _row(form: str, bound: int, row: Row) -> Row:
    return {"part": "higgs day", "triggers": TRIGGERS, "form": form, "bound": bound} | row
