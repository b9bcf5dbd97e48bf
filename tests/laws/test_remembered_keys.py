"""What a window remembers follows from the tables of earlier steps alone, and moves no draw."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from dpstream.audit.controls.broken_engine import (
    ForgottenByExactCounts,
    RememberedOnceTouched,
    RemembersActiveKeys,
)
from dpstream.audit.query_samplers import HiddenKeysShown, run_plan
from dpstream.engines.embedded import snapshots
from dpstream.errors import InvalidParameter, NoiseReuse
from dpstream.group_by.flow import Flow
from dpstream.group_by.remembered_keys import FORGOTTEN_AFTER, RememberedKeys
from dpstream.query.aggregates import Count
from dpstream.query.noise_plan import plan_query
from dpstream.query.query import MOST_REMEMBERED
from dpstream.query.windows import Cumulate, Hop, Tumble
from tests.laws.queries import HOUR, busy, query_of
from tests.support.query_replay import Recording, _RecordingFlow, _RecordingSpend
from tests.support.runs import break_off, published, query, start, table, whole, write


def asked(**facts):
    """Windows of six hours, one of them still open when the next one begins."""
    usual = {
        "window": Tumble("6 hours"),
        "every": "2 hours",
        "arrival_column": "seen",
        "allowed_lateness": "2 hours",
        "epsilon": 8,
        "delta": 0.1,
        "aggregates": (Count("n"),),
        "report_bias": False,
    }
    return query_of(**usual | facts)


def by_hand(plan, publications, begins):
    """By window: the keys that it remembers, read off the tables of steps before `begins`."""
    kept, known = {}, {}
    for step in range(plan.query.schedule.steps):
        for window in (w for w, first in begins.items() if first == step):
            kept[window] = set(known)
        for at, one in publications:
            if at != step:
                continue
            shown = set(one.table["key"].to_pylist())
            window, release, releases = one.due
            known |= dict.fromkeys(shown, 0)
            if release == releases:
                known |= {key: known[key] + 1 for key in kept[window] - shown if key in known}
                known = {key: missed for key, missed in known.items() if missed < FORGOTTEN_AFTER}
    return kept


def remembered(query, rows, flow=Flow, plan=plan_query):
    """What each window remembers, and what the tables say that it does."""
    seen = {}

    class Watched(flow):
        def begin_window(self, window, ids, keys):
            seen[window] = set() if keys is None else set(keys["key"].to_pylist())
            super().begin_window(window, ids, keys)

    planned = plan(query)
    publications = list(run_plan(planned, rows, flow=Watched, buckets=2))
    schedule = query.schedule
    begins = {window: schedule.first_step(window) for window in range(schedule.windows)}
    return seen, by_hand(planned, publications, begins)


WINDOWS = {
    "tumble": {},
    "hop": {"window": Hop("6 hours", slide="2 hours"), "max_groups_contributed": 6},
    "cumulate": {"window": Cumulate("6 hours", step="2 hours"), "max_groups_contributed": 6},
    "sqlp": {"strategy": "sqlp", "epsilon": 16},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_remembered_is_read_off_the_tables(name):
    """Made anew of nothing but published tables, it is the same for every window."""
    told, known = remembered(asked(**WINDOWS[name]), busy())

    assert told == known
    assert all(told[window] for window in range(2, len(told)))  # and it is not nothing


@pytest.mark.parametrize("flow", [ForgottenByExactCounts, RemembersActiveKeys])
def test_what_exact_counts_decide_is_found_out(flow):
    """The control: a memory that looks at exact counts cannot be made of the tables."""
    rows = busy()
    gone = np.array(rows["key"].to_pylist()) == "k1"
    rows = rows.filter(pa.array(~gone | (rows["ts"].to_numpy() < 6 * HOUR)))
    told, known = remembered(asked(), rows, flow=flow)

    assert told != known


def draws(rows, flow):
    """Every draw of a run in which small remembered keys are shown, too."""
    recording = Recording()
    plan = HiddenKeysShown(plan_query(asked()).query)

    class Recorded(_RecordingFlow, flow):
        pass

    recorded = partial(Recorded, recording=recording, frozen=None)
    spend = partial(_RecordingSpend, recording=recording)
    list(run_plan(plan, rows, flow=recorded, wrap_spend=spend))
    return recording


@pytest.mark.parametrize(("flow", "alike"), [(Flow, True), (RememberedOnceTouched, False)])
def test_a_unit_in_a_remembered_key_moves_no_draw(flow, alike):
    """With m0 + 1 units or m0: the same keys are shown and drawn for; gated by the count not."""
    many = {"user": [f"u{n}" for n in range(80)], "key": ["k"] * 80, "ts": [60] * 80}
    less = pa.table(many | {"seen": [60] * 80})
    at = [7 * HOUR]
    more = pa.concat_tables([less, pa.table({"user": ["u"], "key": ["k"], "ts": at, "seen": at})])
    one, two = draws(more, flow), draws(less, flow)

    assert (one.draws == two.draws) is alike
    shown = [{place: set(r.published[place]) for place in r.published} for r in (one, two)]
    assert (shown[0] == shown[1]) is alike
    assert any(window == 1 for window, *_ in one.draws)


def taken(memory, window, keys, sizes, *, final=True):
    ids = np.array([[key, key] for key in keys], np.uint64).reshape(-1, 2)
    table = pa.table({"key": [f"k{key}" for key in keys]})
    memory.take_in(window, ids, table, np.array(sizes, np.int64), final=final)


def test_forgetting_and_the_cap():
    """A key goes after eight windows without it, unless a table shows it; the largest stay."""
    memory = RememberedKeys(most=3)
    memory.begin([0])
    taken(memory, 0, [1, 2, 3, 4], [50, 10, 40, 30])
    assert memory.keys["key"].to_pylist() == ["k1", "k3", "k4"]
    for window in range(1, FORGOTTEN_AFTER):
        memory.begin([window])
        taken(memory, window, [1], [50])
    assert memory.keys["key"].to_pylist() == ["k1", "k3", "k4"]
    memory.begin([99])
    taken(memory, 99, [4], [5], final=False)  # what a window shows before its end counts
    taken(memory, 99, [1], [5])

    assert memory.keys["key"].to_pylist() == ["k1", "k4"]
    again = RememberedKeys(most=3)
    again.restore(memory.save())
    assert again.keys.equals(memory.keys)
    assert (again.ids == memory.ids).all()
    assert again.version == memory.version


def test_bounding_takes_remembered_keys_first():
    """A unit with more rows than count keeps those of keys that the window remembers."""
    first = {"user": [f"u{n}" for n in range(60)], "key": ["k"] * 60, "ts": [60] * 60}
    often = [f"v{n}" for n in range(40)]
    second = [("k", often), *((f"r{n}", often) for n in range(6))]
    rows = {name: list(column) for name, column in first.items()}
    for key, users in second:
        rows["user"] += users
        rows["key"] += [key] * len(users)
        rows["ts"] += [7 * HOUR] * len(users)
    rows["seen"] = rows["ts"]
    counts = {}
    for remember in (True, False):
        one = asked(max_groups_contributed=1, remember_keys=remember)
        kept = Recording()
        flow = partial(_RecordingFlow, recording=kept, frozen=None)
        list(run_plan(plan_query(one), pa.table(rows), flow=flow))
        group = {bytes_ for (window, bytes_), keys in kept.keys.items() if "'k'" in str(keys)}
        counts[remember] = sum(g in group for _, _, window, g, *_ in kept.kept if window == 1)

    assert counts[True] == 40
    assert counts[False] < 20


def test_where_keys_are_remembered():
    """Windows that repeat, keys that are found; everything else is the query that it was."""
    assert asked().remembered_keys == MOST_REMEMBERED
    assert asked(remember_keys=7).remembered_keys == 7
    for none in (
        asked(remember_keys=False),
        asked(public_groups=["a"]),
        asked(keys=()),
        asked(window=Tumble("1 day"), every="1 hour"),
        asked(window=None, every="1 hour"),
        asked(strategy="sqlp", aggregates=()),
    ):
        assert none.remembered_keys == 0
        assert "remember_keys" not in none.facts()
    assert "remember_keys" in asked().facts()
    with pytest.raises(InvalidParameter, match="remember_keys must be"):
        asked(remember_keys=0)


def test_a_state_that_remembers_other_keys_is_refused(tmp_path, monkeypatch):
    """What a window begins with is in the digest that was logged before it drew."""
    write(tmp_path, table())
    break_off(tmp_path, 5, query(), every=4)  # the second window begins with the fifth step
    real = snapshots.restore

    def forgets(flow, owner, part):
        return {"all": True} if owner[0] == "remembered" else real(flow, owner, part)

    monkeypatch.setattr(snapshots, "restore", forgets)
    with pytest.raises(NoiseReuse):
        start(tmp_path, query(), every=4).finish()
    monkeypatch.undo()
    start(tmp_path, query(), every=4).finish()

    assert published(tmp_path) == whole(tmp_path / "whole", query())
