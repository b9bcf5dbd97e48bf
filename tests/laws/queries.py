"""Queries, runs and rows for the laws of whole queries."""

import numpy as np
import pyarrow as pa

from dpstream.connectors.registry import open_source
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.query_run import EngineOptions
from dpstream.query.aggregates import Avg, Count, CountDistinct, CountUnits, Stddev, Sum
from dpstream.query.quantiles import Histogram, Quantile
from dpstream.query.query import Query
from dpstream.query.windows import Cumulate, Hop, Tumble
from tests.support.fixed import RUN, SECRET

HOUR = 3600
ALARM = 2e-8  # per comparison; a test makes at most forty of them
Z = 5.65  # two-sided false-alarm rate below 2e-8


def query_of(**facts):
    common = {
        "privacy_unit_column": "user",
        "keys": ("key",),
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "epsilon": 4,
        "delta": 1e-3,
        "max_groups_contributed": 2,
    }
    return Query(**common | facts)


def run_of(query, table, *, buckets=2, threads=1, every=10, run_id=RUN, secret=SECRET, **more):
    options = EngineOptions(buckets=buckets, threads=threads, snapshot_every=every, run_id=run_id)
    source = open_source(table)
    return LocalRun(query=query, source=source, options=options, secret=secret, **more)


def busy(seed=0, size=3000, users=400):
    """Keys of all sizes, rows in no order, some of them late."""
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 24 * HOUR, size)
    return pa.table(
        {
            "user": [f"u{n}" for n in rng.integers(0, users, size)],
            "key": [f"k{n}" for n in np.minimum(rng.zipf(1.5, size), 40)],
            "ts": times,
            "seen": times + rng.integers(0, 3 * HOUR, size),
            "x": rng.integers(-2, 12, size),
        }
    )


LATE = query_of(
    window=Tumble("8 hours"),
    every="2 hours",
    arrival_column="seen",
    allowed_lateness="2 hours",
    privacy_unit_period="12 hours",
    max_rows_per_group=2,
    epsilon=8,
    delta=0.1,
    aggregates=(
        Count("n"),
        Sum("s", column="x", contribution_bounds_per_row=(0, 10)),
        Avg("m", column="x", contribution_bounds_per_row=(0, 10)),
    ),
)

_SHOWN = {"epsilon": 8, "delta": 0.1, "arrival_column": "seen", "allowed_lateness": "2 hours"}
OTHERS = {
    "hop": query_of(
        **_SHOWN,
        window=Hop("8 hours", slide="4 hours"),
        every="4 hours",
        max_groups_contributed=4,
        max_rows_per_group=2,
        confidence=0.9,
    ),
    "cumulate": query_of(
        **_SHOWN,
        window=Cumulate("12 hours", step="3 hours"),
        privacy_unit_period="12 hours",
        max_groups_contributed=6,
        aggregates=(Count("n"), Stddev("d", column="x", contribution_bounds_per_row=(0, 10))),
        weights={"n": 3},
    ),
    "sqlp": query_of(
        **_SHOWN | {"epsilon": 16},
        strategy="sqlp",
        window=Tumble("12 hours"),
        every="2 hours",
        max_rows_per_group=3,
        aggregates=(
            Count("n"),
            CountUnits("u"),
            Sum("s", column="x", contribution_bounds_per_row=(0, 10)),
        ),
    ),
    "debias": query_of(
        **_SHOWN,
        window=Tumble("12 hours"),
        every="3 hours",
        privacy_unit_period="6 hours",
        debias="global",
    ),
    "units": query_of(**_SHOWN, window=Tumble("6 hours"), aggregates=(CountUnits("u"),)),
    "sums": query_of(
        **_SHOWN | {"epsilon": 24},
        every="3 hours",
        window=Tumble("12 hours"),
        confidence=0.9,
        max_groups_contributed=2,
        aggregates=(
            Count("n"),
            Sum("s", column="x", contribution_bounds_per_row=(0, 10)),
            Sum("d", column="x", contribution_bounds_per_row=(-5, 5)),
        ),
    ),
    "histogram": query_of(
        **_SHOWN | {"epsilon": 24},
        every="3 hours",
        window=Tumble("12 hours"),
        aggregates=(Count("n"), Histogram("h", column="x", edges=[0, 2, 4, 6, 8, 10])),
    ),
    "per unit": query_of(
        **_SHOWN | {"epsilon": 24},
        every="3 hours",
        window=Tumble("12 hours"),
        aggregates=(
            Count("n", contribution_bounds_per_group=(1, 4)),
            Sum("s", column="x", contribution_bounds_per_group=(-5, 20)),
            CountDistinct("d", column="x", max_values_per_group=2),
        ),
    ),
    "per unit, once": query_of(
        **_SHOWN | {"epsilon": 24},
        window=Tumble("12 hours"),
        max_rows_per_group=2,
        aggregates=(
            Count("n"),
            Sum("s", column="x", contribution_bounds_per_group=(-5, 20)),
            Avg("m", column="x", contribution_bounds_per_group=(0, 10)),
        ),
    ),
    "keys alone": query_of(**_SHOWN, every="3 hours", window=Tumble("12 hours"), aggregates=()),
    "weighted keys": query_of(
        **_SHOWN, every="3 hours", window=Tumble("12 hours"), aggregates=(), weighted_keys=True
    ),
    "sets of keys": query_of(
        **_SHOWN | {"epsilon": 40},
        every="3 hours",
        window=Tumble("12 hours"),
        keys=("key", "x"),
        column_types={"x": "INT64"},
        grouping_sets=(("key", "x"), ("key",), ()),
        max_groups_contributed=3,
        max_rows_per_group=2,
        aggregates=(Count("n"), CountUnits("u")),
    ),
    "all sets of public keys": query_of(
        **_SHOWN,
        every="4 hours",
        window=Tumble("12 hours"),
        confidence=0.9,
        keys=("key", "x"),
        public_groups=[(f"k{k}", x) for k in range(1, 4) for x in (-1, 0, 3)],
        grouping_sets=(("key", "x"), ("x",), ("key",), ()),
        grouping_set_weights=(3, 1, 1, 2),
        aggregates=(
            Count("n"),
            CountUnits("u"),
            Avg("m", column="x", contribution_bounds_per_row=(0, 10)),
        ),
    ),
    "quantiles": query_of(
        **_SHOWN,
        window=Hop("8 hours", slide="4 hours"),
        every="2 hours",
        max_groups_contributed=4,
        max_rows_per_group=2,
        confidence=0.9,
        aggregates=(
            Quantile("q", column="x", q=[0, 0.5, 1], contribution_bounds_per_row=(0, 10)),
            Quantile("p", column="x", q=0.9, contribution_bounds_per_row=(0, 10)),
            Histogram("h", column="x", edges=[0, 4, 10]),
        ),
    ),
    "quantiles by choice": query_of(
        **_SHOWN,
        window=Tumble("8 hours"),
        every="4 hours",
        max_rows_per_group=2,
        aggregates=(
            Quantile(
                "q",
                column="x",
                q=[0.5, 0.9],
                contribution_bounds_per_row=(0, 10),
                mechanism="exponential",
            ),
        ),
    ),
    "without delta": query_of(
        **{**_SHOWN, "delta": 0, "public_groups": ["k0", "k1", "k2"]},
        window=Tumble("2 hours"),
        aggregates=(
            Count("n"),
            Quantile("q", column="x", q=0.5, contribution_bounds_per_row=(0, 10)),
        ),
    ),
}
"""Other windows, the other strategy, totals of windows, lists, and several sets of keys."""
