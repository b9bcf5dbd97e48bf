"""Queries of every kind, as the audit runs them: strategies, windows, lateness, values, totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpstream.audit.neighbours import Pair
from dpstream.audit.query_samplers import (
    SPELLINGS,
    STEPS,
    QueryRuns,
    Scenario,
    key_bytes,
    spelled_json,
)
from dpstream.audit.targets import Target
from dpstream.stages.aggregates import Avg, Count, CountUnits, Sum
from dpstream.stages.query import Query
from dpstream.stages.windows import Cumulate, Hop, Tumble

EPSILON, DELTA = 2, 0.02
OFFERED = 8


def query_of(**facts: Any) -> Query:
    """A day in three steps; one unit is in at most two groups."""
    common: dict[str, Any] = {
        "unit": "user",
        "keys": ("key",),
        "time": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "every": "8 hours",
        "epsilon": EPSILON,
        "delta": DELTA,
        "max_groups_contributed": 2,
        "pre_threshold": 0,
        "buffers": 2,
    }
    return Query(**common | facts)


def debiased(**facts: Any) -> Callable[[int], Query]:
    """From the number of runs: one hour after the other, each a run.

    A unit may offer eight rows, of which one is kept; totals have as much budget as counts.
    """
    common: dict[str, Any] = {
        "window": Tumble("1 hour"),
        "every": None,
        "period": "1 hour",
        "max_groups_contributed": 1,
        "debias": "global",
        "debias_rows": OFFERED,
        "weights": (("debias", 1),),
    }

    def query(runs: int) -> Query:
        days, hours = divmod(runs, 24)
        end = f"1970-01-{1 + days:02d}T{hours:02d}:00:00"
        return query_of(**common | {"end": end} | facts)

    return query


def offering(rows: int, *, others: int = 2, again: int = 20) -> Pair:
    """A unit with `rows` rows of which one is kept, in a small group beside a large one.

    Hard because the share of rows kept is published: totals are just large enough for that
    (ten times their noise), of the others' rows few are dropped, so that the unit's move the share
    by nearly all that they may, and its own group shows the row that is kept.
    """
    base = ((0, 0, 200), (1, 0, others))
    return Pair(
        name=f"a unit that offers {rows} rows, {others} others in its group",
        one=Scenario(others=base, unit=((1, 0),) * rows, again=again),
        two=Scenario(others=base, again=again),
    )


def unit_pairs(groups: int, *, again: bool = False) -> tuple[Pair, ...]:
    """All rows of a unit come or go: in busy groups, in groups near the threshold, alone.

    `again`: with a row in every step of each group.
    """
    found = []
    for name, others in (("near the threshold", 9), ("busy", 60), ("few", 2), ("nobody else", 0)):
        for first in (0, STEPS - 1):
            steps = range(first, STEPS) if again else (first,)
            base = tuple((group, 0, others) for group in range(groups) if others)
            unit = tuple((group, step) for group in range(groups) for step in steps)
            found.append(
                Pair(
                    name=f"{name}, a unit from step {first} on",
                    one=Scenario(others=base, unit=unit),
                    two=Scenario(others=base),
                )
            )
    return tuple(found)


def four_spellings() -> Pair:
    """A unit with as many rows as its number has spellings, all in one group."""
    others = ((0, 0, 5),)
    return Pair(
        name="a unit with a row in each spelling",
        one=Scenario(others=others, unit=((0, 0),) * len(SPELLINGS)),
        two=Scenario(others=others),
    )


def _target(name: str, about: str, *, groups: int = 2, again: bool = False, **facts: Any) -> Any:
    """`public_keys`: from the number of runs to the keys."""
    keys = facts.pop("public_keys", None)
    how = {piece: facts.pop(piece) for piece in ("looks", "source") if piece in facts}
    pairs = facts.pop("pairs", None) or unit_pairs(groups, again=again)

    def query(runs: int) -> Query:
        return query_of(**facts, **({"public_keys": list(keys(runs))} if keys else {}))

    def make() -> Target:
        return Target(
            name=name,
            about=about,
            sample=QueryRuns(query=query, groups=groups, **how),
            pairs=pairs,
            epsilon=float(EPSILON),
            delta=DELTA,
            runs=(6_000, 40_000),
        )

    return make


_VALUES = (
    Count("n"),
    Sum("s", column="x", lo=0, hi=4, quantum=1),
    Avg("m", column="x", lo=0, hi=4),
)


def query_targets() -> dict[str, Callable[[], Target]]:
    """By name."""
    latched = "A continual GROUP BY, strategy latched"
    sqlp = "A continual GROUP BY, strategy sqlp"
    made = {
        "latched": _target(
            "latched",
            f"{latched}, one row per group.",
        ),
        "latched_rows": _target(
            "latched_rows",
            f"{latched}: counts, sums and means of several rows.",
            again=True,
            aggregates=_VALUES,
            max_rows_per_group=2,
            max_rows_contributed=3,
        ),
        "latched_public_keys": _target(
            "latched_public_keys",
            f"{latched}, public keys.",
            again=True,
            groups=1,
            max_groups_contributed=1,
            max_rows_per_group=2,
            public_keys=range,
        ),
        "latched_hop": _target(
            "latched_hop",
            f"{latched}, overlapping windows: a row is in two of them.",
            groups=1,
            window=Hop("16 hours", slide="8 hours"),
        ),
        "latched_cumulate": _target(
            "latched_cumulate",
            f"{latched}, cumulating windows, units of periods.",
            groups=1,
            window=Cumulate("24 hours", step="8 hours"),
            every=None,
            period="24 hours",
            max_groups_contributed=3,
        ),
        "latched_late": _target(
            "latched_late",
            f"{latched}, rows that arrive late.",
            window=Tumble("8 hours"),
            arrival="seen",
            allowed_lateness="8 hours",
        ),
        "latched_spelled_keys": _target(
            "latched_spelled_keys",
            f"{latched}: keys that the unit writes in its own way, to the last bit.",
            keys=("key", "zero", "day"),
            looks=key_bytes,
        ),
        "latched_spelled_units": _target(
            "latched_spelled_units",
            f"{latched}, from JSON: a unit that writes its number in four ways.",
            groups=1,
            source=spelled_json,
            public_keys=range,
            max_groups_contributed=1,
            pairs=(four_spellings(),),
        ),
        "sqlp": _target("sqlp", f"{sqlp}, one row per group.", strategy="sqlp"),
        "sqlp_rows": _target(
            "sqlp_rows",
            f"{sqlp}: counts of rows and of units, several rows.",
            again=True,
            strategy="sqlp",
            aggregates=(Count("n"), CountUnits("u")),
            max_rows_per_group=3,
        ),
    }
    for name, others, facts in (
        ("latched_debias", 9, {}),
        ("latched_debias_public_keys", 2, {"public_keys": [0, 1]}),
    ):
        made[name] = _debias(name, f"{latched}, dropped rows made up for", others, facts)
    return made


def _debias(name: str, about: str, others: int, facts: dict[str, Any]) -> Callable[[], Target]:
    return lambda: Target(
        name=name,
        about=f"{about} from noisy totals" + (", public keys." if facts else "."),
        sample=QueryRuns(query=debiased(**facts), groups=2, apart="windows"),
        pairs=(offering(OFFERED, others=others),),
        epsilon=float(EPSILON),
        delta=DELTA,
        runs=(1_000, 12_000),
    )
