"""How many rows the proposed bounds leave out: one sum, paid for with a part of the budget.

Histograms choose the bounds well and say badly what these leave out: few units with many rows
decide it, each bin of which drowns in noise. So when the bounds are chosen, the rows that they
leave out are added up unit by unit, each unit's cut to a bound of its own, which the histograms
choose too. That sum is a second question, charged like the first; both together cost what was
asked. Proof: `docs/soundness/bounds.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dpstream.bounds_proposal.histograms import (
    Histograms,
    UnitFacts,
    ask,
    fact_rows,
    histogram_query,
    histograms_of,
    kept_release,
    noisy_histograms,
    open_provisional,
    unit_columns,
)
from dpstream.privacy.accounting.curves import gdp_epsilon
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.durable_files import replace
from dpstream.query.aggregates import Sum
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import Query
from dpstream.records import Reals

PART: Final = Fraction(3, 5)
"""Of the budget, for the sum; the histograms have the rest."""

LOST: Final = "dpstream left out"
_ROUND: Final = 10**9
_LESS: Final = Fraction(999_999, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The bounds that the sum is about, and the most rows of a unit that count in it."""

    groups: int
    rows: int
    cut: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was asked, the noisy sum, and the standard deviation of its noise."""

    asked: Asked
    rows: float
    stddev: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Two questions, about histograms and about a sum, that a book of `terms` can pay."""

    names: Sequence[str]
    terms: Terms
    epsilon: Fraction
    delta: Fraction
    asked: Query
    epsilon_of_sum: Fraction

    @classmethod
    def of(
        cls, reading: Query, names: Sequence[str], *, epsilon: Any, delta: Any, about: str
    ) -> Measurement:
        """Both for this budget. Noise counts in mu^2, so it is mu^2 that is split.

        What no noise can keep is refused here, before a row is read.
        """

        def asked(part: Any) -> Query:
            return histogram_query(reading, facts=names, epsilon=part, delta=delta, about=about)

        whole = asked(epsilon)
        plan_query(whole)
        terms = whole.promise(epsilon=whole.epsilon, delta=whole.delta)

        def epsilon_for(part: Fraction) -> Fraction:
            mu = math.sqrt(terms.total * part)
            found = Fraction(int(gdp_epsilon(mu=mu, delta=float(whole.delta)) * _ROUND), _ROUND)
            while plan_query(asked(found)).total > terms.total * part:
                found *= _LESS
            return found

        return cls(
            names=tuple(names),
            terms=terms,
            epsilon=whole.epsilon,
            delta=whole.delta,
            asked=asked(epsilon_for(1 - PART)),
            epsilon_of_sum=epsilon_for(PART),
        )

    @cached_property
    def noise_of_one(self) -> float:
        """Standard deviation of the sum where one row of a unit counts."""
        return 1 / math.sqrt(plan_query(self.sum_query(Asked(groups=1, rows=1, cut=1))).total)

    def sum_query(self, about: Asked) -> Query:
        """The question about the sum, for the units, periods and times of the other one."""
        times = ("time_column", "time_unit", "time_origin", "start", "end", "time_zone")
        return Query(
            name=f"{self.asked.name} left out",
            privacy_unit_column=self.asked.privacy_unit_column,
            privacy_unit_period=self.asked.privacy_unit_period,
            **({n: getattr(self.asked, n) for n in times} if self.asked.time_column else {}),
            aggregates=(
                Sum(
                    LOST,
                    column=LOST,
                    contribution_bounds_per_row=(0, about.cut),
                    quantum=Fraction(1, 8),
                ),
            ),
            epsilon=self.epsilon_of_sum,
            delta=self.asked.delta,
            max_groups_contributed=1,
            report_bias=False,
        )

    def lost_table(self, facts: UnitFacts, about: Asked) -> pa.Table:
        """What the sum is of: one row per unit, and none beyond the cut."""
        lost = lost_rows(facts, about.groups, about.rows)
        return pa.table(unit_columns(facts, self.asked) | {LOST: lost.clip(0, about.cut)})

    def check_room(self, facts: UnitFacts, *, ledger: Any, **payer: Any) -> None:
        """Refuse what the book cannot pay in full, before a part of it is paid."""
        open_provisional(self.terms, ledger=ledger, dataset=payer["dataset"])
        if ledger is None:
            return
        with ExitStack() as stack:
            shared = isinstance(ledger, Ledger)
            book = ledger if shared else stack.enter_context(closing(Ledger(ledger)))
            trial = stack.enter_context(closing(book.rehearsal()))
            nobody = fact_rows(facts, self.asked, self.names)[:0]
            ask(self.asked, nobody, state=None, ledger=trial, **payer)
            about = Asked(groups=1, rows=1, cut=1)
            nothing = self.lost_table(facts, about)[:0]
            ask(self.sum_query(about), nothing, state=None, ledger=trial, **payer)

    def note(self, folder: Path) -> None:
        """Write down what is agreed, before any of it is charged or drawn."""
        if read_plan(folder) is None:
            paid = {"epsilon": str(self.epsilon), "delta": str(self.delta)}
            replace(_plan(folder), json.dumps(paid).encode())

    def histograms(self, facts: UnitFacts, *, state: Path | None, **payer: Any) -> Histograms:
        """The first question; what is kept is not asked again."""
        kept = None if state is None else kept_release(state)
        if kept is not None:
            return histograms_of(kept, self.names)
        return noisy_histograms(facts, self.asked, self.names, state=state, **payer)

    def lost(self, facts: UnitFacts, about: Asked, *, state: Path | None, **payer: Any) -> Measured:
        """The second question; one that was begun is about the bounds that it was begun with."""
        place = None
        if state is not None:
            place, plan = _state_of_sum(state), read_plan(state) or {}
            about = Asked(**plan["asked"]) if "asked" in plan else about
            replace(_plan(state), json.dumps(plan | {"asked": asdict(about)}).encode())
        table = self.lost_table(facts, about)
        return measured_sum(ask(self.sum_query(about), table, state=place, **payer), about)


def lost_rows(facts: UnitFacts, groups: int, rows: int) -> Reals:
    """The rows of each unit beyond these bounds, in the mean over the order of its groups.

    A unit keeps `groups` of its groups and `rows` rows in each. A function of its own rows alone.
    """
    kept = facts.kept_rows(rows) * (groups / facts.groups.clip(min=groups))
    lost: Reals = facts.kept_rows(math.inf) - kept
    return lost


def kept_sum(folder: Path, plan: Mapping[str, Any]) -> Measured | None:
    """The sum that was paid for beside the histograms in `folder`; None: it is not there (yet)."""
    table = kept_release(_state_of_sum(folder))
    return None if table is None else measured_sum(table, Asked(**plan["asked"]))


def measured_sum(table: pa.Table, about: Asked) -> Measured:
    """What was published of the sum."""
    rows, stddev = (float(table[name][0].as_py()) for name in (LOST, f"{LOST}_stddev"))
    return Measured(asked=about, rows=max(rows, 0.0), stddev=stddev)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """What was agreed of a measurement; None: it is one of histograms alone."""
    path = _plan(folder)
    return json.loads(path.read_bytes()) if path.is_file() else None


def _plan(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _state_of_sum(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.left_out")
