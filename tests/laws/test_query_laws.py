"""Laws of a whole query, from a table to releases: restarts, order, other noise, memory."""

import json

import numpy as np
import pyarrow as pa
import pytest

from dpstream.connectors.testing import ListSink
from dpstream.errors import NoiseReuse
from dpstream.group_by import flow
from dpstream.group_by.flow import Flow
from dpstream.privacy.query_spend import QuerySpend
from dpstream.query.aggregates import Sum
from dpstream.query.windows import Tumble
from tests.laws.queries import HOUR, LATE, OTHERS, Z, busy, query_of, run_of
from tests.support.fixed import RUN, SECRET
from tests.support.long import is_long


@pytest.fixture(scope="module")
def whole():
    """What an undisturbed run publishes, by (query, window, trigger)."""
    sink = ListSink()
    assert len(list(run_of(LATE, busy(), sink=sink))) == len(sink.tables) == 15
    assert sum(len(table) for table in sink.tables.values()) > 100
    return sink.tables


def same(one, two):
    return one.keys() == two.keys() and all(
        table.equals(two[place], check_metadata=True) for place, table in one.items()
    )


class Killed(Exception):
    """The end of the process."""


class CrashingSink(ListSink):
    """Fails at its n-th table, before keeping it."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def write(self, name, window, trigger, table):
        if self.calls == self.at:
            raise Killed
        super().write(name, window, trigger, table)


def test_a_restart_at_any_step_gives_the_same_tables(whole, tmp_path):
    """Killed before any table is out, a run goes on from its state and publishes the same.

    `make test` kills before each third table, `make long` before every one.
    """
    for cut in range(0, len(whole), 1 if is_long() else 3):
        first, second = CrashingSink(cut), ListSink()
        with pytest.raises(Killed):
            list(run_of(LATE, busy(), sink=first, folder=tmp_path / str(cut), every=3))
        list(run_of(LATE, busy(), sink=second, folder=tmp_path / str(cut), every=3))

        assert same(first.tables | second.tables, whole)
        both = first.tables.keys() & second.tables.keys()
        assert all(first.tables[place].equals(second.tables[place]) for place in both)


@pytest.mark.parametrize("query", OTHERS.values(), ids=OTHERS)
def test_every_kind_of_query_survives_restarts_and_other_buckets(query, tmp_path):
    """Killed before every third table, over other buckets: the same tables as in one go."""
    whole, again = ListSink(), ListSink()
    list(run_of(query, busy(), sink=whole))
    list(run_of(query, busy(), sink=again, buckets=7, threads=2))
    assert sum(len(table) for table in whole.tables.values()) > 30
    assert same(whole.tables, again.tables)
    for cut in range(1, len(whole.tables), 3):
        first, second = CrashingSink(cut), ListSink()
        with pytest.raises(Killed):
            list(run_of(query, busy(), sink=first, folder=tmp_path / str(cut), every=2))
        list(run_of(query, busy(), sink=second, folder=tmp_path / str(cut), every=2))
        assert same(first.tables | second.tables, whole.tables)


def test_rows_that_are_only_counted_survive_a_restart(tmp_path):
    """A window whose rows were all dropped so far has nothing but its totals."""
    full, new = 600, 1000
    user = [f"f{n}" for n in range(full)] * 2 + [f"n{n}" for n in range(new)]
    times = [10] * full + [2 * HOUR + 10] * full + [2 * HOUR + 100] * new
    seen = [10] * full + [HOUR] * full + [5 * HOUR] * new
    table = pa.table({"user": user, "key": ["a"] * len(user), "ts": times, "seen": seen})
    query = query_of(
        public_groups=["a"],
        window=Tumble("2 hours"),
        arrival_column="seen",
        allowed_lateness="2 hours",
        end="1970-01-01T08:00",
        max_groups_contributed=1,
        debias="global",
        max_dropped_rows=5,
        epsilon=20,
    )
    whole, first, second = ListSink(), CrashingSink(1), ListSink()
    list(run_of(query, table, sink=whole))
    with pytest.raises(Killed):
        list(run_of(query, table, sink=first, folder=tmp_path / "state", every=1))
    list(run_of(query, table, sink=second, folder=tmp_path / "state", every=1))
    shares = [
        json.loads(t.schema.metadata[b"dpstream"])["kept_share"] for t in whole.tables.values()
    ]
    assert (
        0.5 < min(share for share in shares if share is not None) < 0.8
    )  # 1000 of 1600 rows of the second window are kept
    assert same(first.tables | second.tables, whole.tables)


def test_many_restarts_of_one_run_give_the_same_tables(whole, tmp_path):
    """Stopped again and again, in the middle of its releases."""
    sink = ListSink()
    for stop in (1, 2, 5, 1, 1, 4):
        releases = iter(run_of(LATE, busy(), sink=sink, folder=tmp_path / "state", every=2))
        for _ in range(stop):
            next(releases)
        releases.close()
    list(run_of(LATE, busy(), sink=sink, folder=tmp_path / "state", every=2))

    assert same(sink.tables, whole)


@pytest.mark.parametrize(
    ("buckets", "threads"), [(1, 1), (1, 16), (2, 3), (3, 2), (8, 1), (8, 8), (16, 1), (16, 16)]
)
def test_buckets_and_threads_do_not_change_what_is_published(whole, monkeypatch, buckets, threads):
    """Byte by byte, and though every step is small enough for one thread."""
    monkeypatch.setattr(flow, "FEW", 0)
    sink = ListSink()
    list(run_of(LATE, busy(), sink=sink, buckets=buckets, threads=threads))

    assert same(sink.tables, whole)


def test_the_order_of_rows_does_not_change_what_is_published(whole):
    """A file that is sorted has the same releases."""
    sink = ListSink()
    list(run_of(LATE, busy().sort_by([("key", "ascending"), ("ts", "descending")]), sink=sink))

    assert same(sink.tables, whole)


def test_which_of_a_units_rows_is_kept_does_not_follow_the_file():
    """One row per group, of several with other values: far from the other bounds too."""
    query = query_of(
        every="12 hours",
        epsilon=8,
        delta=0.1,
        max_groups_contributed=60,
        aggregates=(Sum("s", column="x", contribution_bounds_per_row=(0, 10)),),
    )
    data = busy(users=300)
    one, two = (list(run_of(query, t)) for t in (data, data.sort_by([("x", "descending")])))

    assert sum(len(table) for table in one) > 5
    assert all(a.equals(b) for a, b in zip(one, two, strict=True))


def test_no_table_uses_rows_that_come_after_it(whole):
    """Whatever is seen later, the tables until then are the same."""
    data, cut = busy(), 9 * HOUR
    early = data.filter(pa.array(data["seen"].to_numpy() < cut))
    later = busy(seed=1)
    later = later.filter(pa.array(later["seen"].to_numpy() >= cut))
    sink = ListSink()
    list(run_of(LATE, pa.concat_tables([early, later]), sink=sink))
    schedule, alike = LATE.schedule, []
    for place, table in whole.items():
        step = schedule.first_step(place[1]) + place[2] - 1
        if schedule.time_of(step) // 1_000_000 <= cut:
            assert table.equals(sink.tables[place], check_metadata=True)
        else:
            alike.append(table.equals(sink.tables[place]))
    assert 0 < len(alike) < len(whole)
    assert not any(alike)


def public_noise(query, table, exact, column="count", **more):
    """Published minus exact: releases x groups, groups in the order of the public list."""
    listed = [row[0] for row in query.public_groups]
    found = []
    for release in run_of(query, table, **more):
        values = dict(zip(release["key"].to_pylist(), release[column].to_pylist(), strict=True))
        found.append([values[key] - exact.get(key, 0) for key in listed])
    return np.array(found)


def test_another_run_secret_or_plan_has_other_noise():
    """Equal groups of two runs share no noise, drawn under whatever differs."""
    keys = [f"k{n}" for n in range(300)]
    empty = busy().slice(0, 0)
    base = query_of(public_groups=keys, every="6 hours")
    noise = public_noise(base, empty, {})
    others = {
        "run": public_noise(base, empty, {}, run_id=RUN[::-1]),
        "secret": public_noise(base, empty, {}, secret=SECRET[::-1]),
        "minted": public_noise(base, empty, {}, run_id=None),
        "epsilon": public_noise(
            query_of(public_groups=keys, every="6 hours", epsilon=3.99), empty, {}
        ),
        "name": public_noise(query_of(public_groups=keys, every="6 hours", name="two"), empty, {}),
    }

    assert (noise == public_noise(base, empty, {})).all()
    for other in others.values():
        for one, two in zip(noise, other, strict=True):
            assert abs(np.corrcoef(one, two)[0, 1]) < Z / np.sqrt(len(keys))


@pytest.mark.parametrize("changed", ["x", "user", "key", "gone"])
def test_other_data_never_meet_the_same_noise(tmp_path, changed):
    """A state directory brought back with other rows in a step that has drawn is refused."""
    data, folder = busy(), tmp_path / "state"
    releases = iter(run_of(LATE, data, folder=folder, every=100))
    for _ in range(5):
        next(releases)
    releases.close()
    earliest = int(np.argmin(data["seen"].to_numpy()))
    rows = data.to_pylist()
    if changed == "gone":
        rows.pop(earliest)
    else:
        rows[earliest][changed] = {"x": 3, "user": "u7x", "key": "new"}[changed]
    other = pa.Table.from_pylist(rows, schema=data.schema)
    sink = ListSink()

    with pytest.raises(NoiseReuse):
        list(run_of(LATE, other, sink=sink, folder=folder, every=100))
    assert sink.calls == 0


def test_the_state_of_final_windows_and_periods_is_gone(monkeypatch):
    """Memory follows what is open, not the length of the stream; keys are erased."""
    query = query_of(
        end="1970-01-05", window=Tumble("2 hours"), every="1 hour", privacy_unit_period="4 hours",
        allowed_lateness="1 hour",
    )  # fmt: skip
    seen, erased = [], []
    forget, erase = Flow.evict_periods, QuerySpend.erase

    def watched(self, step):
        gone = forget(self, step)
        state = self.state
        periods = {n for bucket in state.units for n in bucket.periods}
        pairs = {n for bucket in state.units for n in bucket.windows}
        layouts = set(self._orders)
        seen.append((set(state.windows), periods, pairs, layouts, state.bytes, len(self._streams)))
        return gone

    def erasing(self, window):
        erased.append(window)
        erase(self, window)

    monkeypatch.setattr(Flow, "evict_periods", watched)
    monkeypatch.setattr(QuerySpend, "erase", erasing)
    rng = np.random.default_rng(1)
    size = 20_000
    table = pa.table(
        {
            "user": [f"u{n}" for n in rng.integers(0, 3000, size)],
            "key": [f"k{n}" for n in rng.integers(0, 30, size)],
            "ts": rng.integers(0, 4 * 24 * HOUR, size),
        }
    )
    list(run_of(query, table))

    assert erased == list(range(48))
    for step, (windows, periods, pairs, layouts, _, doors) in enumerate(seen, start=1):
        open_windows = {w for w in range(48) if query.schedule.last_step(w) >= step}
        assert windows <= open_windows
        assert pairs <= open_windows
        assert len(windows) <= 2
        assert len(periods) <= 2
        assert doors <= 2
        assert layouts <= open_windows
    assert not seen[-1][0]
    assert not seen[-1][1]
    assert max(size for *_, size, _ in seen[48:]) <= 2 * max(size for *_, size, _ in seen[:48])
