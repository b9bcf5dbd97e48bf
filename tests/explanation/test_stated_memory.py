"""What `explain` says of memory, beside what a process takes: in a process of its own.

`make long` measures every shape of query, `make test` two.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from tests.support.long import is_long

SEEN_AT = 28  # steps; rows come in the first 24
SHAPES = {
    "keys": {},
    "one row of a unit": {"rows": 1},
    "no keys": {"keys": [], "max_groups_contributed": 1, "max_rows_per_group": 3},
    "several rows in a group": {"max_rows_per_group": 3, "groups": 2},
    "several aggregates": {"aggregates": ["count", "sum", "mean"]},
    "many groups": {"groups": 60_000, "rows": 8, "epsilon": 8, "delta": 1e-2},
    "many groups, several aggregates": {
        "groups": 30_000,
        "rows": 8,
        "epsilon": 8,
        "delta": 1e-2,
        "aggregates": ["count", "sum"],
    },
    "sqlp": {"strategy": "sqlp"},
    "sqlp, several rows": {"strategy": "sqlp", "max_rows_per_group": 2, "groups": 2},
    "debias": {"debias": "global"},
    "overlapping windows": {"window": ["2 days", "12 hours"], "max_groups_contributed": 12},
    "periods": {
        "privacy_unit_period": "12 hours",
        "window": ["12 hours", "12 hours"],
        "allowed_lateness": "2 days",
    },
}
SHORT = ("keys", "one row of a unit")


@pytest.mark.parametrize("shape", SHAPES if is_long() else SHORT)
def test_memory_is_what_explain_says(shape):
    """Within 20%: per query, per unit, per pair of unit and group, and per group."""
    # one arena and no cache: what is measured is what is held, not what an allocator keeps
    plain = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [
        sys.executable,
        "-m",
        "tests.explanation.test_stated_memory",
        json.dumps(SHAPES[shape]),
    ]
    done = subprocess.run(command, env=os.environ | plain, capture_output=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    said = dps.explain(query_of(**SHAPES[shape])).memory
    expected = (
        said["bytes_per_query"]
        + sum(said["bytes_per_unit"]) / 2 * seen["units"]
        + said["bytes_per_unit_and_group"] * seen["pairs"]
        + said["bytes_per_group"] * (seen["groups"] - seen["shown"])
        + said["bytes_per_shown_group"] * seen["shown"]
    )

    assert seen["grown"] == pytest.approx(expected, rel=0.2), seen


def query_of(**shape):
    rows, groups = shape.pop("rows", 3), shape.pop("groups", 1000)
    facts = {
        "privacy_unit_column": "user",
        "keys": ["key"],
        "epsilon": 0.4,
        "delta": 1e-12,
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-05",
        "every": "1 hour",
        "max_groups_contributed": min(rows, groups),
    }
    if "window" in shape:
        size, slide = shape["window"]
        shape["window"] = dps.Tumble(size) if size == slide else dps.Hop(size, slide=slide)
    if "aggregates" in shape:
        of = {"column": "v", "contribution_bounds_per_row": (0, 1)}
        known = {"count": dps.Count(), "sum": dps.Sum("sum", **of), "mean": dps.Avg("mean", **of)}
        shape["aggregates"] = [known[name] for name in shape["aggregates"]]
    return dps.Query(**facts | shape)


def measure(shape, units):
    """Memory that a run holds after all rows have come, and how many of what it has."""
    table, query = clicks(units, shape), query_of(**shape)
    run = dps.run(query, source=table, options=EngineOptions(threads=1, buckets=1))
    before, seen = resident(), {}
    for _ in run:
        if run.steps_done >= SEEN_AT and not seen:
            state = run._flow.state
            buckets = [bucket for window in state.windows.values() for bucket in window]
            seen = {
                "grown": resident() - before,
                "units": sum(t.used for b in state.units for t in b.periods.values()),
                "pairs": sum(t.used for b in state.units for t in b.windows.values()),
                "groups": sum(bucket.table.used for bucket in buckets),
                "shown": sum(len(bucket.shown.active) for bucket in buckets),
            }
    return seen


def clicks(units, shape):
    rng = np.random.default_rng(1)
    user = np.repeat(rng.permutation(units), shape.get("rows", 3))
    key = rng.integers(0, shape.get("groups", 1000), len(user))
    ts = np.sort(rng.integers(0, 24 * 3600, len(user)))
    columns = {"user": user, "key": pa.array(key).cast(pa.string()), "ts": ts}
    return pa.table(columns | {"v": rng.random(len(user))})


def resident():
    """Bytes of memory in use, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = json.loads(sys.argv[1])
    measure(given, 2000)  # compiles
    units = max(200_000, 600_000 // given.get("rows", 3))  # what a query takes by itself is a tenth
    print(json.dumps(measure(given, units)))
