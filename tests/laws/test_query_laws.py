"""Laws of a whole query, from a table to releases: restarts, noise, and which keys appear when."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chi2

from dpstream.connectors.sources import open_source
from dpstream.connectors.testing import ListSink
from dpstream.engines.local import LocalRun, Options
from dpstream.errors import NoiseReuse
from dpstream.mechanisms.parts.counting.strategy import late_normals, late_start
from dpstream.privacy.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret
from dpstream.stages.aggregates import Avg, Count, CountUnits, Sum
from dpstream.stages.flow import Flow
from dpstream.stages.plan import planned
from dpstream.stages.query import Query, Tumble
from dpstream.stages.rows import RowReader

SECRET, RUN = bytes(range(32)), bytes(range(16))
HOUR = 3600
ALARM = 1e-7  # per comparison; a test makes at most ten of them
Z = 5.4  # two-sided false-alarm rate below 1e-7


class Unseen:
    """Nobody looks at the rows that are set aside."""

    def rejected(self, chunk, rows):
        """Drop them."""

    def count(self, **counts):
        """Drop them."""


def query_of(**facts):
    common = {
        "unit": "user",
        "keys": ("key",),
        "time": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "epsilon": 4,
        "delta": 1e-3,
        "max_groups_contributed": 2,
    }
    return Query(**common | facts)


def run_of(query, table, *, buckets=2, threads=1, every=10, run_id=RUN, secret=SECRET, **more):
    options = Options(buckets=buckets, threads=threads, snapshot_every=every, run_id=run_id)
    source = open_source(table)
    return LocalRun(
        query=query, source=source, aside=Unseen(), options=options, secret=secret, **more
    )


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
    arrival="seen",
    allowed_lateness="2 hours",
    period="12 hours",
    max_rows_per_group=2,
    epsilon=8,
    delta=0.1,
    aggregates=(Count("n"), Sum("s", column="x", lo=0, hi=10), Avg("m", column="x", lo=0, hi=10)),
)


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

    def write(self, query, window, trigger, table):
        if self.calls == self.at:
            raise Killed
        super().write(query, window, trigger, table)


def test_a_restart_at_any_step_gives_the_same_tables(whole, tmp_path):
    """Killed before any table is out, a run goes on from its state and publishes the same."""
    for cut in range(len(whole)):
        first, second = CrashingSink(cut), ListSink()
        with pytest.raises(Killed):
            list(run_of(LATE, busy(), sink=first, folder=tmp_path / str(cut), every=3))
        list(run_of(LATE, busy(), sink=second, folder=tmp_path / str(cut), every=3))

        assert same(first.tables | second.tables, whole)
        both = first.tables.keys() & second.tables.keys()
        assert all(first.tables[place].equals(second.tables[place]) for place in both)


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


@pytest.mark.parametrize(("buckets", "threads"), [(1, 1), (3, 2), (16, 1)])
def test_buckets_and_threads_do_not_change_what_is_published(whole, buckets, threads):
    """Byte by byte."""
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
        aggregates=(Sum("s", column="x", lo=0, hi=10),),
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
    listed = [row[0] for row in query.public_keys]
    found = []
    for release in run_of(query, table, **more):
        values = dict(zip(release["key"].to_pylist(), release[column].to_pylist(), strict=True))
        found.append([values[key] - exact.get(key, 0) for key in listed])
    return np.array(found)


def test_another_run_secret_or_plan_has_other_noise():
    """Equal groups of two runs share no noise, drawn under whatever differs."""
    keys = [f"k{n}" for n in range(300)]
    empty = busy().slice(0, 0)
    base = query_of(public_keys=keys, every="6 hours")
    noise = public_noise(base, empty, {})
    others = {
        "run": public_noise(base, empty, {}, run_id=RUN[::-1]),
        "secret": public_noise(base, empty, {}, secret=SECRET[::-1]),
        "minted": public_noise(base, empty, {}, run_id=None),
        "epsilon": public_noise(
            query_of(public_keys=keys, every="6 hours", epsilon=3.99), empty, {}
        ),
        "name": public_noise(query_of(public_keys=keys, every="6 hours", name="two"), empty, {}),
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


def slow_appearances(query, counts, pays):
    """By (window, release): what a full scan shows, key by key, on a path of its own.

    `counts[window][key]` are the units at each release. Every key has a door to itself.
    """
    plan = planned(query)
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
        ids = reader._group_ids(pa.table({"key": names}), len(names))
        settings = plan.window(query.schedule.releases(window))
        process, first = settings.process, settings.sigmas[0]
        for number, name in enumerate(names):
            door = spend.door(window=window, column="units", part=number)
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
    query = query_of(window=Tumble("12 hours"), every="1 hour", epsilon=1, delta=0.1)
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


GROUPS = 3000
MEASURED = query_of(
    keys=("key",),
    public_keys=[f"k{n}" for n in range(GROUPS)],
    every="4 hours",
    window=Tumble("12 hours"),
    epsilon=1,
    delta=1e-6,
    max_groups_contributed=2,
    max_rows_per_group=2,
    max_rows_contributed=3,
    aggregates=(
        Count("n"),
        CountUnits("users"),
        Sum("s", column="x", lo=-1, hi=3, quantum="0.5"),
        Avg("m", column="x", lo=-1, hi=3, quantum="0.5"),
    ),
)


@pytest.fixture(scope="module")
def measured():
    """By column: noise of windows x releases x groups, and the declared deviations likewise."""
    rng = np.random.default_rng(7)
    each, size = 4, GROUPS * 4
    values = rng.integers(-2, 8, size) / 2
    table = pa.table(
        {
            "user": [f"u{n}" for n in range(size)],
            "key": [f"k{n % GROUPS}" for n in range(size)],
            "ts": np.repeat([HOUR, 13 * HOUR], size // 2),
            "x": values,
        }
    )
    clamped = np.clip(values, -1, 3).reshape(2, each // 2, GROUPS).sum(axis=1)
    exact = {"n": each // 2, "users": each // 2, "s": clamped}
    listed = [row[0] for row in MEASURED.public_keys]
    place = {key: number for number, key in enumerate(listed)}
    noise = {name: np.zeros((2, 3, GROUPS)) for name in exact}
    declared = {name: np.zeros((2, 3)) for name in exact}
    for (_, window, release), found in _all(table).items():
        order = np.argsort([place[key] for key in found["key"].to_pylist()])
        for name, true in exact.items():
            values = found[name].to_numpy()[order]
            truth = true[window] if name == "s" else true
            noise[name][window, release - 1] = values - truth
            deviation = found[f"{name}_stddev"].to_numpy()
            assert (deviation == deviation[0]).all()
            declared[name][window, release - 1] = deviation[0]
    return noise, declared


def _all(table):
    sink = ListSink()
    list(run_of(MEASURED, table, sink=sink))
    return sink.tables


def right_scale(noise, deviation):
    """Is the variance that of `deviation`? False alarm 1e-7; the mean is known to be 0."""
    size, ratio = len(noise), (noise**2).sum() / deviation**2
    return chi2.ppf(ALARM / 2, size) < ratio < chi2.isf(ALARM / 2, size)


@pytest.mark.parametrize("name", ["n", "users", "s"])
def test_noise_has_the_declared_deviation(measured, name):
    """At every release of every window; 20% more or less is seen."""
    noise, declared = measured
    for window in range(2):
        for release in range(3):
            here, deviation = noise[name][window, release], declared[name][window, release]
            assert right_scale(here, deviation)
            assert not right_scale(here, deviation * 1.2)
            assert not right_scale(here, deviation / 1.2)
            assert abs(here.mean()) < Z * deviation / np.sqrt(GROUPS)


def test_declared_deviations_are_what_the_bounds_ask_for():
    """sensitivity x column norm x row norm x sqrt(columns) / mu, with rounding: by hand."""
    plan = planned(MEASURED)
    window = plan.window(3)
    decoder, encoder = window.process.dense()
    norm = np.linalg.norm(encoder, axis=0).max()
    mu = float(plan.calibrated.mu_squared) ** 0.5
    # 3 rows, 2 in a group: 2^2 + 1^2; units in 2 groups; values in half steps, up to 6 (or 4
    # about the middle)
    sizes = {"rows": 5**0.5, "units": 2**0.5}
    for measure, found in zip(MEASURED.measures, window.stddevs, strict=True):
        far = 6 if measure.middle == 0 else 4
        size = sizes.get(measure.kind, far * 5**0.5)
        sigma = size * norm * 2 / mu  # four columns share mu^2
        expected = np.hypot(sigma * np.linalg.norm(decoder, axis=1), 12**-0.5)
        assert found == pytest.approx(expected, rel=1e-6)


def covariance_fits(noise, expected):
    """Each entry of the sample covariance against a normal's, at Z deviations."""
    size = noise.shape[1]
    found = noise @ noise.T / size
    variance = (np.outer(np.diag(expected), np.diag(expected)) + expected**2) / size
    return (np.abs(found - expected) < Z * np.sqrt(variance)).all()


@pytest.mark.parametrize("name", ["n", "users", "s"])
def test_noise_of_successive_releases_is_correlated_as_designed(measured, name):
    """B B^T, for the counter's decoder B; fresh noise at every release would be averaged away."""
    noise, declared = measured
    decoder, _ = planned(MEASURED).window(3).process.dense()
    for window in range(2):
        quantum = 0.5 if name == "s" else 1
        rounding = quantum**2 / 12
        sigma = np.sqrt(declared[name][window, 0] ** 2 - rounding) / decoder[0, 0]
        expected = sigma**2 * decoder @ decoder.T + rounding * np.eye(3)
        assert covariance_fits(noise[name][window], expected)
        assert not covariance_fits(noise[name][window], np.diag(np.diag(expected)))


def test_a_key_that_comes_late_has_the_noise_of_one_that_was_there():
    """Its processes began at step 1: declared deviations, and the covariance of later releases."""
    keys, each = 1500, 40
    query = query_of(
        every="6 hours",
        epsilon=8,
        max_groups_contributed=1,
        aggregates=(Count("n"), Sum("s", column="x", lo=0, hi=4, quantum=1)),
    )
    table = pa.table(
        {
            "user": np.arange(keys * each).astype(str),
            "key": [f"k{n % keys}" for n in range(keys * each)],
            "ts": np.full(keys * each, 13 * HOUR),  # seen at the third of four releases
            "x": np.full(keys * each, 3),
        }
    )
    empty, also_empty, *late = run_of(query, table)
    window = planned(query).window(4)
    decoder, _ = window.process.dense()

    assert len(empty) == len(also_empty) == 0
    assert [len(release) for release in late] == [keys, keys]  # far above the threshold: at once
    assert late[0]["key"].equals(late[1]["key"])
    for number, (name, exact) in enumerate((("n", each), ("s", 3 * each))):
        noise = np.stack([release[name].to_numpy() - exact for release in late])
        cover = window.sigmas[number] ** 2 * decoder @ decoder.T + np.eye(4) / 12
        for row, release, expected in zip(noise, late, np.diag(cover)[2:], strict=True):
            declared = release[f"{name}_stddev"][0].as_py()
            assert declared == pytest.approx(np.sqrt(expected))
            assert right_scale(row, declared)
            assert not right_scale(row, declared * 1.2)
        assert covariance_fits(noise, cover[2:, 2:])
        assert not covariance_fits(noise, cover[:2, :2])  # as if begun when it came


def test_noise_is_independent_between_groups_columns_and_windows(measured):
    """No pair of groups, columns or windows shares any."""
    noise, declared = measured
    unit = {name: noise[name] / declared[name][:, :, None] for name in noise}
    limit = Z / np.sqrt(GROUPS)
    for one in unit.values():
        for path in (one[0, 0], one[1, 2]):
            for shift in (1, 2, GROUPS // 2):
                assert abs((path * np.roll(path, shift)).mean()) < limit
        assert abs((one[0, 0] * one[1, 0]).mean()) < limit
    pairs = [("n", "users"), ("n", "s"), ("users", "s")]
    for first, second in pairs:
        for release in range(3):
            assert abs((unit[first][0, release] * unit[second][0, release]).mean()) < limit
    shared = unit["n"][0, 0] + 0.2 * unit["users"][0, 0]
    assert abs((shared * unit["users"][0, 0]).mean()) > limit  # control: a fifth of it shared


def test_averages_have_about_the_declared_deviation():
    """To first order, where a group has many rows: within 10% of the declared deviation."""
    size, each = 1500, 60
    query = query_of(
        public_keys=[f"k{n}" for n in range(size)],
        epsilon=20,
        max_groups_contributed=1,
        aggregates=(Avg("m", column="x", lo=0, hi=10),),
    )
    values = np.random.default_rng(3).integers(0, 11, size * each)
    table = pa.table(
        {
            "user": np.arange(size * each).astype(str),
            "key": [f"k{n % size}" for n in range(size * each)],
            "ts": np.zeros(size * each, np.int64),
            "x": values,
        }
    )
    exact = {f"k{n}": values[n::size].mean() for n in range(size)}
    (release,) = run_of(query, table)
    found = [exact[key] for key in release["key"].to_pylist()]
    errors = (release["m"].to_numpy() - found) / release["m_stddev"].to_numpy()
    spread = np.sqrt((errors**2).mean())

    assert 0.9 < spread < 1.1  # 5.4 deviations of the estimate
    assert not 0.9 < spread * 1.2 < 1.1
    assert not 0.9 < spread / 1.2 < 1.1


def test_the_state_of_final_windows_and_periods_is_gone(monkeypatch):
    """Memory follows what is open, not the length of the stream; keys are erased."""
    query = query_of(
        end="1970-01-05", window=Tumble("2 hours"), every="1 hour", period="4 hours",
        allowed_lateness="1 hour",
    )  # fmt: skip
    seen, erased = [], []
    forget, erase = Flow.forget_periods, QuerySpend.erase

    def watched(self, step):
        gone = forget(self, step)
        state = self.state
        periods = {n for bucket in state.units for n in bucket.periods}
        pairs = {n for bucket in state.units for n in bucket.windows}
        owners = {owner for bucket in state.units for owner in bucket.changed}
        seen.append((set(state.windows), periods, pairs, owners, state.bytes, len(self._doors)))
        return gone

    def erasing(self, window):
        erased.append(window)
        erase(self, window)

    monkeypatch.setattr(Flow, "forget_periods", watched)
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
    for step, (windows, periods, pairs, owners, _, doors) in enumerate(seen, start=1):
        open_windows = {w for w in range(48) if query.schedule.last_step(w) >= step}
        assert windows <= open_windows
        assert pairs <= open_windows
        assert len(windows) <= 2
        assert len(periods) <= 2
        assert doors <= 2
        assert {n for kind, n in owners if kind == "window"} <= open_windows
    assert not seen[-1][0]
    assert not seen[-1][1]
    assert max(size for *_, size, _ in seen[48:]) <= 2 * max(size for *_, size, _ in seen[:48])
