"""Which keys a query shows, and when: every active key is tested at every trigger."""

import numpy as np
import pyarrow as pa

from dpstream.connectors.testing import ListSink
from dpstream.counting.noise_process import late_normals, late_start
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Tumble
from dpstream.rows.row_reader import RowReader
from tests.laws.queries import query_of, run_of
from tests.support.fixed import RUN, SECRET


def slow_appearances(query, counts, pays):
    """By (window, release): what a full scan shows, key by key, on a path of its own.

    `counts[window][key]` are the units at each release. Every key has a door to itself.
    """
    plan = plan_query(query)
    ledger = Ledger()
    ledger.admit("reference", plan.terms(), "reference")
    spend = QuerySpend(
        run=RUN,
        query=query.name,
        ledger=ledger,
        dataset="reference",
        keys=MemoryWindowKeys(derived_for_tests=Secret(SECRET)),
    )
    spend.pay(**pays)
    spend.begin(0)
    reader = RowReader(query, Secret(SECRET), RUN)
    found = {}
    for window, keys in counts.items():
        names = list(keys)
        ids = reader.ids.groups(pa.table({"key": names}), len(names))
        settings = plan.window(query.schedule.releases(window))
        process, first = settings.process, settings.sigmas[0]
        for number, name in enumerate(names):
            door = spend.noise_stream(window=window, column="units", part=number)
            state, shown = None, False
            for release, units in enumerate(keys[name], start=1):
                asked = {"ids": ids[number : number + 1], "release": release}
                if units <= settings.pre_threshold:
                    continue
                if state is None:
                    each = late_normals(process, release)
                    z = door.normals(**asked, purpose="join", each=each)
                    state, path = late_start(process, release, z)
                else:
                    path = process.advance(state, release, door.normals(**asked, purpose="step")[0])
                noisy = units + int(np.rint(path[0] * first))
                shown |= noisy >= settings.thresholds[release - 1]
                if shown:
                    found.setdefault((window, release), {})[name] = noisy
    return found


def growing(rng, query, keys):
    """Units per key at each release of two windows: some grow, most stay as they began."""
    counts = {}
    for window in range(2):
        releases = query.schedule.releases(window)
        paths = {}
        for number in range(keys):
            steps = np.zeros(releases, np.int64)
            steps[rng.integers(0, releases // 2)] = rng.integers(1, 30)
            if number % 3 == 0:
                steps += rng.integers(0, 4, releases)
            paths[f"k{number}"] = np.cumsum(steps)
        counts[window] = paths
    return counts


def rows_of(query, counts):
    """One row for each unit, just before the release that first counts it."""
    found = []
    for window, paths in counts.items():
        for key, path in paths.items():
            for release, new in enumerate(np.diff(path, prepend=0)):
                step = query.schedule.first_step(window) + release
                time = query.schedule.time_of(step) // 1_000_000 - 1
                found += [(f"u{len(found) + n}", key, time) for n in range(new)]
    user, key, time = zip(*found, strict=True)
    return pa.table({"user": user, "key": key, "ts": np.array(time)})


def test_every_active_key_is_tested_at_every_trigger(monkeypatch):
    """Key by key, trigger by trigger, as a full scan of every key's noise path has it."""
    facts = {"every": "1 hour", "epsilon": 1, "delta": 0.1, "remember_keys": False}
    query = query_of(window=Tumble("12 hours"), **facts)
    counts = growing(np.random.default_rng(4), query, 250)
    pays, pay = [], QuerySpend.pay
    monkeypatch.setattr(QuerySpend, "pay", lambda self, **k: (pays.append(k), pay(self, **k))[1])
    sink = ListSink()
    list(run_of(query, rows_of(query, counts), sink=sink, buckets=3))
    engine = {
        (window, release): dict(zip(*(table[c].to_pylist() for c in ("key", "count")), strict=True))
        for (_, window, release), table in sink.tables.items()
        if len(table)
    }
    expected = slow_appearances(query, counts, pays[0])

    assert engine == expected
    quiet = 0  # keys that appear at a trigger that brings them nothing new
    for (window, release), shown in engine.items():
        for key in shown.keys() - engine.get((window, release - 1), {}).keys():
            path = counts[window][key]
            quiet += release > 1 and path[release - 1] == path[release - 2]
    assert quiet > 20


def test_a_key_with_few_units_never_appears():
    """At or below the pre-threshold a key is not looked at; far above it appears at once."""
    query = query_of(
        every="6 hours", pre_threshold=3, delta=0.9, epsilon=1, max_groups_contributed=1
    )
    rare = [(f"r{k}.{n}", f"rare{k}", n) for k in range(1500) for n in range(3)]
    common = [(f"c{k}.{n}", f"common{k}", n) for k in range(5) for n in range(200)]
    near = [(f"n{k}.{n}", f"near{k}", n) for k in range(1500) for n in range(4)]
    user, key, time = zip(*rare, *near, *common, strict=True)
    releases = list(run_of(query, pa.table({"user": user, "key": key, "ts": np.array(time)})))

    for release in releases:
        shown = release["key"].to_pylist()
        assert not any(name.startswith("rare") for name in shown)
        assert {f"common{k}" for k in range(5)} <= set(shown)
    appeared = sum(name.startswith("near") for name in releases[-1]["key"].to_pylist())
    assert appeared > 50  # one unit more is looked at: without the pre-threshold rare ones appear
