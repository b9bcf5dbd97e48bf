"""Erase one unit from a run that has stopped."""

import json

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.engines.embedded.snapshots import DamagedSnapshot
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, InvalidParameter, StateError
from dpstream.rows.row_reader import RowReader

HOUR = 3600
HEAVY = "heavy user"


def query_of(**more):
    facts = {
        "privacy_unit_column": "user",
        "keys": ["key"],
        "epsilon": 8,
        "delta": 1e-3,
        "time_column": "ts",
        "time_unit": "s",
        "start": "1970-01-01",
        "end": "1970-01-02",
        "every": "6 hours",
        "max_groups_contributed": 6,
        "max_rows_per_group": 2,
    }
    return dps.Query(**facts | more)


def clicks(*, late_rows):
    """Many users, and one who visits every key early and, if asked for, again later."""
    rng = np.random.default_rng(2)
    user = [f"u{n}" for n in rng.integers(0, 300, 2000)]
    key = [f"k{n}" for n in rng.integers(0, 5, 2000)]
    times = rng.integers(0, 24 * HOUR, 2000).tolist()
    mine = [HOUR + n for n in range(5)] + [13 * HOUR + n for n in range(5)] * late_rows
    keys = [f"k{n}" for n in range(5)] * (1 + late_rows)
    return pa.table({"user": user + [HEAVY] * len(mine), "key": key + keys, "ts": times + mine})


def started(folder, query, table, *, steps=2):
    run = dps.run(query, source=table, sink=str(folder / "out"), state=folder / "state")
    for number, _ in enumerate(run, start=1):
        if number == steps:
            run.stop()
    return folder / "state"


KINDS = {
    "latched": {},
    "sqlp": {"strategy": "sqlp"},
    "debias": {"debias": "global"},
    "periods": {
        "privacy_unit_period": "12 hours",
        "window": dps.Hop("12 hours", slide="6 hours"),
        "allowed_lateness": "6 hours",
        "max_groups_contributed": 12,
    },
    "chosen bounds": {
        "privacy_unit_period": "12 hours",
        "window": dps.Tumble("12 hours"),
        "allowed_lateness": "6 hours",
        "max_groups_contributed": "auto",
    },
    "chosen rows and clamps": {
        "privacy_unit_period": "12 hours",
        "window": dps.Tumble("12 hours"),
        "allowed_lateness": "6 hours",
        "max_groups_contributed": "auto",
        "max_rows_per_group": "auto",
        "aggregates": [dps.Sum("s", column="ts", contribution_bounds_per_row="auto")],
    },
    "per unit": {
        "aggregates": [
            dps.Count("n", contribution_bounds_per_group=(0, 3)),
            dps.CountDistinct("d", column="ts", max_values_per_group=2),
        ],
    },
}


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_nothing_but_a_full_counter_is_left(tmp_path, more):
    """No file of the state holds a place of the unit any more, and the run goes on."""
    query, table = query_of(**more), clicks(late_rows=True)
    state = started(tmp_path, query, table)
    run = dps.run(query, source=table, sink=str(tmp_path / "out"), state=state)
    places = _places(run, state)
    before = sum(any(place in blob for blob in _blobs(state)) for place in places)

    assert before == (len(places) if query.unit_measures else 5)
    assert run.erase_unit(HEAVY) >= 5
    assert not any(place in blob for place in places for blob in _blobs(state))
    again = dps.run(query, source=table, sink=str(tmp_path / "out"), state=state)
    assert again.erase_unit(HEAVY) == 0
    last = dps.run(query, source=table, sink=str(tmp_path / "out"), state=state)
    assert last.finish().steps_done == query.schedule.steps


def test_the_unit_adds_nothing_more(tmp_path):
    """Later tables are those of a stream without its later rows."""
    query, outputs = query_of(public_groups=[f"k{n}" for n in range(5)]), []
    for number, table in enumerate((clicks(late_rows=True), clicks(late_rows=False))):
        folder = tmp_path / str(number)
        state = started(folder, query, table)
        facts = {"source": table, "sink": str(folder / "out"), "state": state}
        if number == 0:
            dps.run(query, **facts).erase_unit(HEAVY)
        outputs.append(list(dps.run(query, **facts))[-1])
    with_, without = (
        dict(zip(*(t[c].to_pylist() for c in ("key", "count")), strict=True)) for t in outputs
    )
    spread = outputs[0]["count_stddev"][0].as_py()

    # two runs have independent noise: their difference is that of two normals, at 6 deviations
    assert all(abs(with_[key] - without[key]) < 6 * 2**0.5 * spread for key in with_)
    assert spread < 8


def test_a_run_that_was_killed_is_refused(tmp_path):
    """Its last steps will be taken again, and must meet the same rows."""
    query, table = query_of(), clicks(late_rows=True)
    run = dps.run(query, source=table, sink=str(tmp_path / "out"), state=tmp_path / "s")
    releases = iter(run)
    next(releases)
    run.close()
    with pytest.raises(StateError, match="no snapshot yet"):
        dps.run(query, source=table, state=tmp_path / "s").erase_unit(HEAVY)


def test_a_replay_that_would_undo_an_erasure_is_refused(tmp_path):
    """With its snapshot damaged, a run is taken from the start: the unit's rows would come back."""
    query, table = query_of(every="1 hour"), clicks(late_rows=True)
    state = started(tmp_path, query, table, steps=6)
    facts = {"source": table, "sink": str(tmp_path / "out"), "state": state}
    assert dps.run(query, **facts).erase_unit(HEAVY) > 0
    run = dps.run(query, **facts, options=EngineOptions(snapshot_every=100))
    for number, _ in enumerate(run, start=1):
        if number == 9:
            run.close()
            break
    for manifest in state.glob("manifest-*.dps"):
        damaged = bytearray(manifest.read_bytes())
        damaged[len(damaged) // 2] ^= 255
        manifest.write_bytes(damaged)
    refused = pytest.raises(StateError, match=r"a unit was erased from .* before step [78],")
    with pytest.warns(DamagedSnapshot), refused:
        dps.run(query, **facts).finish()


def test_what_cannot_be_forgotten_is_said(tmp_path):
    """No state directory; a unit of another type."""
    query, table = query_of(), clicks(late_rows=True)
    with pytest.raises(InvalidParameter, match="state directory"):
        dps.run(query, source=table).erase_unit(HEAVY)
    numbers = table.set_column(0, "user", pa.array(range(len(table))))
    state = started(tmp_path, query, numbers)
    with pytest.raises(InvalidInput, match="must fit the type"):
        dps.run(query, source=numbers, state=state).erase_unit("ann")
    assert dps.run(query, source=numbers, state=state).erase_unit("2000") == 1


@pytest.mark.parametrize("spelled", [5, "5", "5.0", " 5e0", 5.0])
@pytest.mark.parametrize("kind", ["int64", "string"])
def test_a_unit_is_forgotten_however_it_is_written(tmp_path, kind, spelled):
    """As its rows were found to be one unit."""
    table = clicks(late_rows=False)
    users = pa.array([5 if user == HEAVY else 10 + n for n, user in
                      enumerate(table["user"].to_pylist())]).cast(kind)  # fmt: skip
    rows = table.set_column(0, "user", users)
    state = started(tmp_path, query_of(), rows)

    assert dps.run(query_of(), source=rows, state=state).erase_unit(spelled) == 5


def _blobs(state):
    return [path.read_bytes() for path in state.rglob("*") if path.is_file()]


def _places(run, state):
    """What bounding calls the unit in each group, as bytes."""
    run._open_storage()
    reader = RowReader(run.query, run._storage.secret, run._storage.run)
    run._storage.close()
    groups = reader.ids.groups(pa.table({"key": [f"k{n}" for n in range(5)]}), 5)
    ticks = run.query.periods
    periods = [0] if ticks is None else ticks.before(np.array([HOUR, 13 * HOUR]) * 1_000_000)
    places = [
        np.ascontiguousarray(reader.ids.units(pa.array([HEAVY]), np.array([period])) ^ one[::-1])
        for period in periods
        for one in groups
    ]
    if run.query.unit_measures:  # and with the value that it has brought there
        values = reader.ids.values(pa.array([HOUR + n for n in range(5)]))
        places += [place ^ value for place, value in zip(places, values, strict=True)]
    return [place.tobytes() for place in places]


LETTERS = [
    ("a row of the unit", {"user": HEAVY, "key": "k1", "ts": "no time"}, True),
    ("another unit's, which names it", {"user": "u1", "key": HEAVY, "ts": "no time"}, False),
    ("no unit at all", {"user": None, "key": HEAVY, "ts": 1}, False),
    ("a row that was cut", f'{{"user": "{HEAVY}", "key": "aaaa', True),
    ("a line that is no row", f"1,{HEAVY},k,,,", True),
    ("said twice", f'{{"user": "{HEAVY}", "user": "u1"}}', True),
    ("another text that begins alike", f"1,{HEAVY}s,k,,,", None),
    ("nothing to read", "\u0000,,,", None),
]


def test_the_units_dead_letters_go_too(tmp_path):
    """Those that tell their unit by value, others by its text; what tells nothing is counted."""
    query, table = query_of(), clicks(late_rows=True)
    state = started(tmp_path, query, table)
    rows = [row if isinstance(row, str) else json.dumps(row) for _, row, _ in LETTERS]
    lines = [json.dumps({"where": "w", "reason": "r", "row": row}) + "\n" for row in rows]
    folder = state / "dead-letters"
    folder.mkdir(exist_ok=True)
    (folder / "mixed.jsonl").write_text("".join(lines))
    (folder / "all.jsonl").write_text(lines[0])
    (folder / "none.jsonl").write_text(lines[1])
    before = (folder / "none.jsonl").stat()
    with (folder / "mixed.jsonl").open("rb") as old:
        run = dps.run(query, source=table, sink=str(tmp_path / "out"), state=state)
        assert run.erase_unit(HEAVY) >= 5
        assert not old.read().strip(b"\0"), "the old file is overwritten"

    left = (folder / "mixed.jsonl").read_text()
    assert left == "".join(
        line for line, (*_, theirs) in zip(lines, LETTERS, strict=True) if not theirs
    )
    assert not (folder / "all.jsonl").exists()
    assert (folder / "none.jsonl").stat().st_ino == before.st_ino
    assert (run.operator.letters_erased, run.operator.letters_unclear) == (5, 2)
    assert dps.run(query, source=table, sink=str(tmp_path / "out"), state=state).finish()


@pytest.mark.parametrize("spelled", [5, "5", " 5.0"])
def test_dead_letters_of_a_number_however_it_is_written(tmp_path, spelled):
    """By value, as the rows that are used: a query through a mechanism has letters, too."""
    table = clicks(late_rows=False)
    table = table.set_column(0, "user", pa.array(range(len(table))))
    query = dps.SeriesQuery(
        mechanism=dps.mechanisms.Sample(epsilon=1, window=3),
        privacy_unit_column="user",
        time_column="ts",
        time_unit="s",
        start="1970-01-01",
        end="1970-01-02",
        window=dps.Tumble("6 hours"),
    )
    facts = {"source": table, "sink": str(tmp_path / "out"), "state": tmp_path / "state"}
    dps.run(query, **facts).finish()
    cells = [5, 5.0, "5", "5e0", 50, "a5"]
    letters = tmp_path / "state" / "dead-letters" / "x.jsonl"
    letters.parent.mkdir()
    rows = [json.dumps({"row": json.dumps({"user": cell})}) + "\n" for cell in cells]
    letters.write_text("".join(rows))
    run = dps.run(query, **facts)

    assert run.erase_unit(spelled) == 0
    assert letters.read_text() == "".join(rows[4:])
    assert (run.operator.letters_erased, run.operator.letters_unclear) == (4, 0)
