"""Table 1, Figures 9 and 10 of the DP-SQLP paper, and a real day of events, with both strategies.

The data follow the paper's laws, counted from 0 and with one row added for each user: so counted,
10 million users have 59.05 million rows and 15% of them more than 10, as the paper says; counted
from 1 they have 61.1 million. The paper's table reports the last histogram of the day.
Paper: Zhang et al., "Differentially Private Stream Processing at Scale", 2023.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dpstream.bench import sqlp_runs as runs
from dpstream.bench.click_log import ClickLog, records_of
from dpstream.bench.harness import Findings, Progress, Row
from dpstream.bench.sqlp_debias import logs
from dpstream.bench.sqlp_higgs import day
from dpstream.bench.sqlp_plot import draw
from dpstream.bench.sqlp_targets import DEBIASED, LATCHED, PAPER, SHIPPED, TUNED, targets

_DEBIASED: Final = {"max_groups_contributed": 16, "debias": "global"}
_BY_ENGINE: Final[dict[str, dict[str, Any]]] = {
    SHIPPED: {
        "strategy": "sqlp",
        "max_rows_per_group": runs.ROWS,
        "max_rows_contributed": runs.ROWS,
    },
    LATCHED: {},
    DEBIASED: _DEBIASED,
    TUNED: _DEBIASED | {"last_budget": "0.4"},
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured: the log, its seeds, the trade-off's C, the sizes of micro-batches."""

    forms: Sequence[str]
    users: int
    keys: int
    seeds: Sequence[int]
    triggers: Sequence[int]
    bounds: Sequence[int]
    batch_users: int
    batches: Sequence[int]

    def log(self, seed: int) -> ClickLog:
        """One of the logs."""
        return ClickLog(records=records_of(self.users, first=0), keys=self.keys, seed=seed, first=0)


FULL: Final = Size(
    forms=tuple(_BY_ENGINE),
    users=10_000_000,
    keys=1_000_000,
    seeds=(1, 2, 3),
    triggers=(100, 1000),
    bounds=(1, 2, 5, 10, 16, 25, 32, 50),
    batch_users=1_000_000,
    batches=(1000, 500, 200, 100, 50, 20),
)
QUICK: Final = Size(
    forms=(SHIPPED, LATCHED, TUNED),
    users=1_000_000,
    keys=100_000,
    seeds=(1,),
    triggers=(100,),
    bounds=(8,),
    batch_users=100_000,
    batches=(50, 10),
)


@dataclass(kw_only=True)
class _Work:
    """Counts what is done for the progress bar."""

    progress: Progress
    total: int
    done: int = 0
    rows: list[Row] = field(default_factory=list)

    def next(self, what: str) -> None:
        self.progress(min(self.done, self.total), self.total, what)
        self.done += 1


def measure(*, quick: bool, progress: Progress) -> Findings:
    """The table by seeds, then both figures on the first seed's log, then the real day."""
    size = QUICK if quick else FULL
    forms = len(runs.SIMULATED) + len(size.forms)
    total = len(size.seeds) * len(size.triggers) * forms + len(size.batches) + 2 - quick
    work = _Work(progress=progress, total=total + 2 * len(size.bounds))
    rows = _table(size, work)
    rows += _trade_off(size, work)
    rows += _latency(size, work)
    work.next("the Higgs day")
    real, notes = day()
    rows += real
    if not quick:
        work.next("debias on real logs")
        rows += logs()
    return Findings(
        rows=rows,
        targets=targets(rows, quick=quick),
        notes=[
            "the truth is exact: not private, for this comparison only",
            "simulated: the published form and the baselines; the others ran in the engine",
            *notes,
        ],
        draw=lambda figure: draw(figure, rows),
    )


def _table(size: Size, work: _Work) -> list[Row]:
    """Table 1: every form at every number of triggers, the mean over the seeds."""
    seen: dict[tuple[int, str], list[Row]] = {}
    for seed in size.seeds:
        log = size.log(seed)
        truth = runs.truth_of(log)
        for triggers in size.triggers:
            given = runs.events(log, triggers)
            for form in runs.SIMULATED:
                work.next(f"{form}, {triggers} triggers, seed {seed}")
                found = runs.simulated(form, given, keys=size.keys, triggers=triggers)
                seen.setdefault((triggers, form), []).append(found.row(truth))
            del given
            for form in size.forms:
                work.next(f"{form}, {triggers} triggers, seed {seed}")
                found = runs.engine(log, runs.query(triggers, **_BY_ENGINE[form]))
                seen.setdefault((triggers, form), []).append(found.row(truth))
    rows = []
    for triggers in size.triggers:
        if size is FULL:
            rows.append({"part": "table 1", "triggers": triggers} | PAPER[triggers])
        rows += [
            {"part": "table 1", "triggers": at, "form": form} | _mean(each)
            for (at, form), each in seen.items()
            if at == triggers
        ]
    return rows


def _mean(each: Sequence[Row]) -> Row:
    """The mean over seeds, and how far the seeds' keys are apart."""
    mean: Row = {name: statistics.fmean(row[name] for row in each) for name in each[0]}
    keys = [row["keys"] for row in each]
    return mean | {"keys_spread": max(keys) - min(keys), "seeds": len(each)}


def _trade_off(size: Size, work: _Work) -> list[Row]:
    """Figure 10: both forms over the bound C, on a log of a million users, or a short run's."""
    log, triggers = QUICK.log(size.seeds[0]), size.triggers[0]
    truth, given = runs.truth_of(log), runs.events(log, triggers)
    rows = []
    for bound in size.bounds:
        work.next(f"figure 10, C = {bound}")
        found = runs.simulated(runs.PUBLISHED, given, keys=log.keys, triggers=triggers, rows=bound)
        rows.append(_at_bound(runs.PUBLISHED, triggers, bound, found.row(truth)))
    del given
    for bound in size.bounds:
        work.next(f"figure 10, latched, C = {bound}")
        found = runs.engine(log, runs.query(triggers, max_groups_contributed=bound))
        rows.append(_at_bound(LATCHED, triggers, bound, found.row(truth)))
    return rows


def _at_bound(form: str, triggers: int, bound: int, row: Row) -> Row:
    return {"part": "figure 10", "triggers": triggers, "form": form, "bound": bound} | row


def _latency(size: Size, work: _Work) -> list[Row]:
    """Figure 9: seconds per trigger over the rows that it brings; the same log, cut differently."""
    log = ClickLog(records=records_of(size.batch_users, first=0), seed=size.seeds[0], first=0)
    rows = []
    for triggers in size.batches:
        work.next(f"figure 9, {triggers} triggers")
        found = runs.engine(log, runs.query(triggers))
        # The first trigger reads ahead and may compile; later ones are what a stream lives with.
        each = statistics.median(found.latencies[1:])
        rows.append(
            {
                "part": "figure 9",
                "form": LATCHED,
                "triggers": triggers,
                "rows_per_trigger": log.records // triggers,
                "latency_ms": each * 1e3,
                "seconds": found.seconds,
            }
        )
    return rows
