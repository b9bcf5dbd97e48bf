"""Keys found in rounds: against a slow reference, key by key, and the noise that is published."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chi2

from dpstream.connectors.testing import ListSink
from dpstream.counting.noise_process import late_normals, late_start
from dpstream.group_by.flow import Flow
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret
from dpstream.query.aggregates import Count, CountUnits
from dpstream.query.noise_plan import plan_query
from dpstream.rows.row_reader import RowReader
from tests.laws.queries import ALARM, HOUR, Z, query_of, run_of
from tests.support.fixed import RUN, SECRET

QUERY = query_of(
    strategy="sqlp",
    every="1 hour",
    end="1970-01-01T12:00",
    epsilon=12,
    delta=0.1,
    max_groups_contributed=3,
    max_rows_per_group=4,
    aggregates=(Count("n"), CountUnits("units")),
)


def path_of(door, process, sigma, ids):
    """One key's noise, step by step, from the release on at which it is first asked for."""
    state = None

    def noise(release):
        nonlocal state
        asked = {"ids": ids, "release": release}
        if state is None:
            z = door.normals(**asked, purpose="join", each=late_normals(process, release))
            state, path = late_start(process, release, z)
        else:
            path = process.advance(state, release, door.normals(**asked, purpose="step")[0])
        return int(np.rint(path[0] * sigma))

    return noise


def slow_rounds(query, kept, pays):
    """By release: what each key publishes, from its kept rows [(release, unit)] alone."""
    plan, ledger = plan_query(query), Ledger()
    ledger.admit("reference", plan.terms(), "reference")
    keys = MemoryWindowKeys(derived_for_tests=Secret(SECRET))
    spend = QuerySpend(run=RUN, query=query.name, ledger=ledger, dataset="reference", keys=keys)
    spend.pay(**pays)
    spend.begin(0)
    reader = RowReader(query, Secret(SECRET), RUN)
    settings, found = plan.window(query.schedule.releases(0)), {}
    for number, (key, rows) in enumerate(kept.items()):
        ids = reader.ids.groups(pa.table({"key": [key]}), 1)
        doors = [spend.noise_stream(window=0, column=m.name, part=number) for m in query.measures]
        sums, since, selection = None, 0, None
        for release in range(1, query.schedule.releases(0) + 1):
            units = {unit for at, unit in rows if since < at <= release}
            moved = [] if sums is None else [noise(release) for noise in sums]
            if selection is None and len(units) > settings.pre_threshold:
                selection = path_of(doors[0], settings.process, settings.sigmas[0], ids)
            if selection is None:
                continue
            if len(units) + selection(release) < settings.thresholds[release - 1]:
                continue
            if sums is None:
                sums = [
                    path_of(door, settings.process, sigma, ids)
                    for door, sigma in zip(doors[1:], settings.sigmas[1:], strict=True)
                ]
                moved = [noise(release) for noise in sums]
            exact = [
                sum(at <= release for at, _ in rows),
                len({unit for at, unit in rows if at <= release}),
            ]
            found.setdefault(release, {})[key] = [e + m for e, m in zip(exact, moved, strict=True)]
            selection, since = None, release
    return found


def test_rounds_are_what_a_slow_reference_says(monkeypatch):
    """Every key, every trigger, with units that come back in later rounds of the same key."""
    rng = np.random.default_rng(5)
    size, users = 20_000, 6000
    table = pa.table(
        {
            "user": rng.integers(0, users, size).astype(str),
            "key": [f"k{n}" for n in np.minimum(rng.zipf(1.6, size), 60)],
            "ts": rng.integers(0, 12 * HOUR, size),
        }
    )
    pays, pay = [], QuerySpend.pay
    monkeypatch.setattr(QuerySpend, "pay", lambda self, **k: (pays.append(k), pay(self, **k))[1])
    kept, bound = {}, Flow.bound

    def watched(self, window, period, rows):
        keep_mask = bound(self, window, period, rows)
        names = rows.keys["key"].to_pylist()
        for i in np.flatnonzero(keep_mask):
            kept.setdefault(names[i], []).append((int(rows.steps[i]) + 1, rows.units[i].tobytes()))
        return keep_mask

    monkeypatch.setattr(Flow, "bound", watched)
    sink = ListSink()
    list(run_of(QUERY, table, sink=sink, buckets=3))
    engine = {
        release: {
            key: [n, units]
            for key, n, units in zip(
                *(found[c].to_pylist() for c in ("key", "n", "units")), strict=True
            )
        }
        for (_, _, release), found in sink.tables.items()
        if len(found)
    }
    expected = slow_rounds(QUERY, kept, pays[0])

    assert engine == expected
    again = [key for release in engine.values() for key in release]
    assert len(again) > 1.5 * len(set(again)) > 15  # many keys are published more than once
    returning = sum(len(rows) - len({unit for _, unit in rows}) for rows in kept.values())
    assert returning > 1000


def right_scale(noise, deviation):
    """Is the variance that of `deviation`? False alarm 2e-8; the mean is known to be 0."""
    size, ratio = len(noise), (noise**2).sum() / deviation**2
    return chi2.ppf(ALARM / 2, size) < ratio < chi2.isf(ALARM / 2, size)


@pytest.mark.parametrize("public", [True, False])
def test_published_sums_have_the_declared_noise(public):
    """Trees over the window's releases, at every release; 20% more or less is seen."""
    keys, each = 2000, 60
    names = [f"k{n}" for n in range(keys)]
    query = query_of(
        strategy="sqlp",
        every="4 hours",
        epsilon=8,
        delta=1e-3,
        max_groups_contributed=1,
        public_groups=names if public else None,
    )
    table = pa.table(
        {
            "user": np.arange(keys * each).astype(str),
            "key": np.tile(names, each),
            "ts": np.repeat(np.arange(each) % 6 * 4 * HOUR + 1, keys),
        }
    )
    seen = 0
    for release in run_of(query, table):
        if len(release) < keys / 2:
            continue
        seen += 1
        index = release["release_index"][0].as_py()
        noise = release["count"].to_numpy() - index * each // 6
        declared = release["count_stddev"][0].as_py()
        assert right_scale(noise, declared)
        assert not right_scale(noise, declared * 1.2)
        assert not right_scale(noise, declared / 1.2)
        assert abs(noise.mean()) < Z * declared / np.sqrt(len(noise))
    assert seen == 6 if public else seen >= 2
