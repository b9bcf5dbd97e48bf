"""Queries through time-series mechanisms: what they count, and that nothing is drawn twice."""

import shutil
import signal
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.registry import open_source
from dpstream.engines.chunks import ChunkReader
from dpstream.engines.embedded.step_rows import FileInput
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    LedgerError,
    NoiseReuse,
    StateError,
)
from dpstream.group_by.series_counts import StepCounts
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import Secret
from dpstream.session import OperatorCounts
from tests.support.kill_and_replay import AfterReleases, WhenSeen, kill_and_replay
from tests.support.live_runs import ScriptedClock
from tests.support.runs import series

HOURS = 24
FIXED = {
    "secret": bytes(32),
    "options": EngineOptions(run_id=bytes(16)),
}  # which rows count, and noise
RANGE = "start = '2024-05-01', end = '2024-05-02'"
SHAPE = "page, window_start, COUNT(*) AS n FROM TUMBLE(log, DESCRIPTOR(ts), INTERVAL '1' HOUR)"


def text(more="", *, epsilon=1, w=6, mechanism="spas", where="", span=RANGE):
    return f"""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = {epsilon}, privacy_unit = 'w_event',
               w = {w}, mechanism = '{mechanism}', privacy_unit_column = user_id,
               public_groups = ('a', 'b') {"," if span else ""} {span} {more})
        {SHAPE} {where} GROUP BY page, window_start"""


def log(size=3_000, users=150, seed=4):
    rng = np.random.default_rng(seed)
    seconds = rng.integers(0, 86_400, size)
    return pa.table(
        {
            "user_id": rng.integers(0, users, size).astype(str),
            "page": np.array(["a", "b", "other"])[rng.integers(0, 3, size)],
            "ts": np.datetime64("2024-05-01") + seconds.astype("m8[s]"),
        }
    )


def values(tables, column="n"):
    return [table[column].to_pylist() for table in tables]


def histograms(query, source):
    """The exact counts of every window, by the engine's own reader."""
    counts = StepCounts(query, Secret(bytes(32)), bytes(16))
    chunks = ChunkReader(open_source(source), counts.reader, OperatorCounts())
    files = FileInput(chunks, memory=1 << 30)
    for step in range(query.schedule.steps):
        counts.take(files.take(step))
    files.close()
    return [counts.counts(step).tolist() for step in range(query.schedule.steps)]


def test_one_row_of_a_unit_enters_a_window():
    """A window's total is its number of units with a public page; rows of other pages are gone."""
    table = log()
    query = dps.sql(text())
    hours = [t.astype("M8[h]") for t in table["ts"].to_numpy()]
    rows = zip(hours, table["user_id"].to_pylist(), table["page"].to_pylist(), strict=True)
    public = {(hour, user) for hour, user, page in rows if page != "other"}
    start = np.datetime64("2024-05-01T00", "h")

    totals = [sum(counts) for counts in histograms(query, table)]

    assert totals == [sum(hour == start + h for hour, _ in public) for h in range(HOURS)]
    assert max(totals) < table.num_rows / HOURS  # some units had several rows


def test_published_values_are_those_counts_and_noise():
    """With much budget the noise is small, and the released figures are the exact ones."""
    query = dps.sql(text(mechanism="uniform", epsilon=2_000, w=1))

    tables = dps.run(query, source=log(), **FIXED).collect()

    assert values(tables) == [[float(c) for c in counts] for counts in histograms(query, log())]
    assert tables[0].column_names == [
        "page", "window_start", "n", "n_stddev", "window_end", "held", "trigger_time",
        "release_index",
    ]  # fmt: skip


def test_all_rows_of_a_unit_in_a_window_change_one_count_by_one():
    """The neighbour relation of the promise, for every unit of some windows, in any row order."""
    table, query = log(size=600, users=25), dps.sql(text())
    whole = histograms(query, table)
    rng = np.random.default_rng(0)
    users, hours = table["user_id"].to_numpy(), table["ts"].to_numpy().astype("M8[h]")
    for user in np.unique(users)[:12]:
        for hour in np.unique(hours)[:4]:
            left = table.filter(pa.array(~((users == user) & (hours == hour))))
            mixed = left.take(pa.array(rng.permutation(left.num_rows)))
            change = np.abs(np.array(whole) - np.array(histograms(query, mixed)))
            assert change.sum() <= 1
            step = int((hour - np.datetime64("2024-05-01T00", "h")).astype(int))
            assert change.sum() == change[step].sum()


@pytest.mark.parametrize("stop", [1, 5, 9, 10, 11, 23])
def test_a_run_that_was_killed_goes_on_with_the_same_releases(stop, tmp_path):
    """Whatever it had published before; nothing is charged twice."""
    kind = series(dps.sql(text(mechanism="pacer")), log())
    whole = kind.unbroken(tmp_path / "whole")
    after = kill_and_replay(kind, tmp_path / "killed", AfterReleases(stop))

    assert len([name for name in whole if str(name).endswith(".parquet")]) == HOURS
    assert after.statuses == [-signal.SIGKILL]
    assert after.published == whole
    assert after.charges == kind.charges(tmp_path / "whole")


def test_a_finished_run_publishes_nothing_again(tmp_path):
    """And neither reads nor charges."""
    query = dps.sql(text())
    assert len(list(dps.run(query, source=log(), state=tmp_path / "s"))) == HOURS

    assert list(dps.run(query, source=log(), state=tmp_path / "s")) == []


def test_other_data_under_the_same_noise_are_refused(tmp_path):
    """A replay with a changed row publishes nothing."""
    query = dps.sql(text(mechanism="uniform"))
    run = dps.run(query, source=log(), state=tmp_path / "s")
    next(iter(run))
    run.close()
    changed = log().set_column(1, "page", pa.array(["a"] * 3_000))

    with pytest.raises(NoiseReuse):
        list(dps.run(query, source=changed, state=tmp_path / "s"))


def test_strangers_are_refused(tmp_path):
    """Another query, secret or dataset, a copy, a lost mechanism: nothing is published."""
    query = dps.sql(text())
    place = tmp_path / "s"
    run = dps.run(query, source=log(), state=place)
    next(iter(run))
    run.close()
    with pytest.raises(StateError, match="belongs to another query"):
        list(dps.run(dps.sql(text(epsilon=2)), source=log(), state=place))
    with pytest.raises(StateError, match="belongs to another query"):
        list(dps.run(dps.sql(text(where="WHERE page <> 'x'")), source=log(),
                     state=place))  # fmt: skip
    with pytest.raises(StateError, match="another secret"):
        list(dps.run(query, source=log(), state=place, secret=bytes(32)))
    with pytest.raises(StateError, match="belongs to another query"):
        list(dps.run(query, source=log(), state=place, dataset="other"))
    shutil.copytree(place, tmp_path / "copy")
    shutil.copy(tmp_path / "s.secret", tmp_path / "copy.secret")
    with pytest.raises(StateError, match="is a copy"):
        list(dps.run(query, source=log(), state=tmp_path / "copy"))
    (place / "snapshot.dps").unlink()
    with pytest.raises(StateError, match="there is no snapshot"):
        list(dps.run(query, source=log(), state=place))


def test_a_query_over_users_does_not_take_its_directory(tmp_path):
    """Nor the other way round."""
    list(dps.run(dps.sql(text()), source=log(), state=tmp_path / "s"))
    users = dps.Query(
        privacy_unit_column="user_id", epsilon=1, delta=1e-9, max_groups_contributed=1
    )

    with pytest.raises(StateError):
        list(dps.run(users, source=log(), state=tmp_path / "s"))
    with pytest.raises(LedgerError, match="protects"):
        list(dps.run(users, source=log(), ledger=tmp_path / "s" / "ledger"))


def test_two_queries_add_up_in_one_book(tmp_path, monkeypatch):
    """The second one that does not fit is refused before it reads a row; other steps too."""
    book = Ledger(tmp_path / "book")
    first = dps.sql(text(epsilon=1), name="first")
    book.open("stream", dps.Terms(unit="w_event", total=1.5, window=6, clock=first.clock))
    assert len(list(dps.run(first, source=log(), ledger=book))) == HOURS
    reads = []
    source = open_source(log())
    monkeypatch.setattr(type(source), "read", lambda *args, **more: reads.append(args))

    with pytest.raises(BudgetExceeded, match=r"'second' does not fit.*nothing was read"):
        dps.run(dps.sql(text(epsilon=1), name="second"), source=log(), ledger=book)
    with pytest.raises(BudgetExceeded, match="within 6 steps"):
        dps.run(dps.sql(text(epsilon="0.4", w=3), name="second"), source=log(), ledger=book)
    daily = text(epsilon="0.1").replace("INTERVAL '1' HOUR", "INTERVAL '2' HOUR")
    with pytest.raises(LedgerError, match="counts steps that are windows of 1 hour"):
        dps.run(dps.sql(daily), source=log(), ledger=book)
    assert not reads
    monkeypatch.undo()
    small = dps.sql(text(epsilon="0.25"), name="small")
    assert len(list(dps.run(small, source=log(), ledger=book))) == HOURS


def test_a_delay_or_a_running_count_is_published_too():
    """Event-level mechanisms: of values in a range, and of counts so far."""
    more = "privacy_unit_column = user_id, public_groups = ('a', 'b')"
    counter = f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 40, delta = 1e-9,
        privacy_unit = 'event', mechanism = 'blt', {RANGE}, {more}) {SHAPE}
        GROUP BY page, window_start"""
    query = dps.sql(counter)
    tables = dps.run(query, source=log(), **FIXED).collect()

    exact = np.cumsum(histograms(query, log()), axis=0)
    noisy, spread = (np.array(values(tables, name)) for name in ("n", "n_stddev"))
    assert np.all(np.abs(noisy - exact) < 8 * spread + 1)  # 1e-15 for each


def minutes(*times, user="u"):
    start = np.datetime64("2024-05-01", "us")
    return pa.table(
        {
            "user_id": [f"{user}{time}" if user else "same" for time in times],
            "page": ["a"] * len(times),
            "ts": [start + np.timedelta64(time, "m") for time in times],
        }
    )


@pytest.mark.parametrize("stop", [None, 1, 2, 3])
def test_a_live_directory_is_counted_by_windows_and_lateness(stop, tmp_path):
    """A late row counts while its window waits for it; a killed run replays what it had read."""
    folder = tmp_path / "in"
    folder.mkdir()
    zero = int(np.datetime64("2024-05-01", "us").astype(int))
    minute = 60_000_000
    arrivals = [(5, (1, 2)), (50, (48, 49)), (63, (58, 62)), (80, (30,)), (125, (122,))]
    arrivals.append((130, (121, 129)))
    again = [(64, (61,)), (81, (75,)), (82, (76,))]  # one unit, three times in the second window

    def drop(number, times, user):
        return lambda: pq.write_table(minutes(*times, user=user), folder / f"{number}.parquet")

    events = [
        (zero + at * minute, drop(number, times, "u" if number < len(arrivals) else None))
        for number, (at, times) in enumerate([*arrivals, *again])
    ]
    clock = ScriptedClock(zero, events)
    span = "start = '2024-05-01', end = '2024-05-01 03:00', allowed_lateness = INTERVAL '10' MINUTE"
    query = dps.sql(text(mechanism="uniform", epsilon=2_000, w=1, span=span))

    def start():
        settings = {"live": True, "state": tmp_path / "s", "clock": clock}
        return dps.run(query, source=folder, **settings, options=EngineOptions(snapshot_every=2))

    run, found = start(), []
    for table in run:
        found.append(table)
        if stop is not None and len(found) == stop:
            run.close()
            break
    if stop is not None:
        found += list(start())
    windows = {table["window_start"][0].as_py().hour: table["n"].to_pylist() for table in found}

    # the row of minute 30 came at minute 80, after the first window was published at 70
    assert windows == {0: [5.0, 0.0], 1: [2.0, 0.0], 2: [3.0, 0.0]}


def test_what_does_not_fit_a_mechanism_is_refused():
    """The class itself checks, whoever builds the query."""
    good = dps.sql(text())
    for change in (
        {"window": None, "start": None, "end": None, "time_column": None},
        {"every": "10 minutes"},
        {"count": dps.Sum("s", column="x", contribution_bounds_per_row=(0, 1))},
        {"public_groups": None},
        {"privacy_unit_period": "1 day"},
    ):
        with pytest.raises(InvalidParameter):
            replace(good, **change)
    with pytest.raises(InvalidParameter, match="needs its public range"):
        dps.run(dps.sql(text(span="")), source=log())
    with pytest.raises(InvalidInput, match="no column"):
        dps.run(good, source=log().drop_columns(["page"]))


@pytest.mark.parametrize("mechanism", ["uniform", "sample", "budget_distribution", "spas", "pacer",
                                       "budget_absorption", "fast_w", "dsat", "dsft", "pegasus_w",
                                       "adapub", "rescue_dp"])  # fmt: skip
def test_every_mechanism_runs_and_charges_all_bins(mechanism, tmp_path):
    """Bins of two queries over one dataset are not the same bins: none may be charged alone."""
    query = dps.sql(text(mechanism=mechanism))
    book = Ledger(tmp_path / "book")

    assert len(list(dps.run(query, source=log(size=500), ledger=book))) == HOURS
    records = [record for record in book.history() if "purpose" in record]
    assert records
    assert not any("bins" in record for record in records)
    assert book.peak("stream") <= 1


def test_a_process_that_is_killed_publishes_the_same_bytes(tmp_path):
    """SIGKILL after some windows; the sink's files are those of an unbroken run."""
    kind = series(dps.sql(text()), log())
    expected = kind.unbroken(tmp_path / "whole")
    kill = WhenSeen(lambda place: len(list((place / "out").glob("*.parquet"))) >= 6)
    after = kill_and_replay(kind, tmp_path / "killed", kill)

    assert after.statuses == [-signal.SIGKILL]
    assert after.published == expected


def test_a_delayed_window_is_published_later_and_only_once(tmp_path):
    """Every window has one table, with the time of the trigger that published it."""
    query = dps.sql(
        f"""SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 5, privacy_unit = 'event', {RANGE},
        mechanism = 'contin_group', mechanism_options = (lo = 0, hi = 100, delay = 3),
        privacy_unit_column = user_id, public_groups = ('a', 'b')) {SHAPE}
        GROUP BY page, window_start"""
    )
    tables = dps.run(query, source=log(), state=tmp_path / "s").collect()

    windows = [table["window_start"][0].as_py().hour for table in tables]
    late = [table["trigger_time"][0].as_py() - table["window_end"][0].as_py() for table in tables]
    assert sorted(windows) == list(range(HOURS))
    assert max(late).total_seconds() > 0


def test_steps_of_another_length_are_refused_by_the_book(tmp_path):
    """Hours would be added to days, step by step."""
    query = dps.sql(text())
    list(dps.run(query, source=log(), ledger=tmp_path / "book"))

    with pytest.raises(LedgerError, match="counts steps that are"):
        dps.Runner(query.mechanism, ledger=tmp_path / "book")
