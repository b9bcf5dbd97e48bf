"""Releases are kept once, numbered once, and found again, whatever is cut short."""

import asyncio
import json
import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.errors import StateError
from dpstream.serve import release_store
from dpstream.serve.event_stream import Hub
from dpstream.serve.release_segments import (
    HIGH,
    LOW,
    Segment,
    build,
    decode,
    digests,
    encode,
    id_of,
    key_id,
    key_values,
)
from dpstream.serve.release_store import Released, ReleaseReader, ReleaseStore, collect_served
from tests.support.processes import kill_this_process, run_in_fork


def release(values, *, window=0, index=1, run="r", query="q"):
    """A table of keys and counts, as an engine hands it to a sink."""
    about = {"query": query, "run": run, "window": window, "window_start": None}
    about |= {"window_end": None, "trigger_time": f"t{window:03}{index:03}"}
    about |= {"release_index": index, "releases": 9}
    table = pa.table(
        {
            "page": pa.array(list(values), pa.string()),
            "n": pa.array(list(values.values()), pa.float64()),
            "n_stddev": pa.array([1.0] * len(values), pa.float64()),
            "release_index": pa.array([index] * len(values), pa.int64()),
        }
    )
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def opened(folder, **settings):
    return ReleaseStore(folder, keys={"q": ["page"], "other": ["page"]}, **settings)


def put(store, values, *, window=0, index=1, announce=True, query="q"):
    store.write(query, window, index, release(values, window=window, index=index, query=query))
    if announce:
        store.announce(query, window, index)


def seen(folder):
    """Every release that can be seen: number, query, window, index and rows."""
    reader = ReleaseReader(folder)
    reader.look()
    found = [
        (
            one.id,
            one.query,
            one.window,
            one.release,
            reader.segment(one).published["page"].to_pylist(),
        )
        for one in reader.after(0, 1000)
    ]
    reader.close()
    return found


def test_a_release_is_kept_and_numbered_once(tmp_path):
    """A replay after a kill writes and announces it again; nothing changes."""
    store = opened(tmp_path)
    put(store, {"a": 5})
    before = seen(tmp_path)
    store.write("q", 0, 1, release({"b": 7}))
    store.announce("q", 0, 1)
    store.shut()
    again = opened(tmp_path)
    put(again, {"a": 5})

    assert seen(tmp_path) == before == [(1, "q", 0, 1, ["a"])]


def test_a_segment_says_which_bounds_its_window_has(tmp_path):
    """As the release does; also where rows are carried over; nothing where bounds are given."""
    told = {"max_groups_contributed": 8, "since": "2024-05-01T00:00:00+00:00"}
    store = opened(tmp_path)
    for index in (1, 2):
        table = release({"a": index}, index=index)
        about = json.loads(table.schema.metadata[b"dpstream"]) | {"bounds": told}
        table = table.replace_schema_metadata({"dpstream": json.dumps(about)})
        store.write("q", 0, index, table)
        store.announce("q", 0, index)
    put(store, {"a": 1}, query="other")
    reader = ReleaseReader(tmp_path)
    reader.look()

    found = {(one.query, one.release): reader.segment(one).bounds for one in reader.after(0, 9)}
    assert found == {("q", 1): told, ("q", 2): told, ("other", 1): None}
    reader.close()


def test_what_was_not_announced_is_not_seen_until_it_is(tmp_path):
    """A kill in between leaves it for the next start, in the order of the schedule."""
    store = opened(tmp_path)
    put(store, {"a": 1})
    put(store, {"a": 1}, index=2, announce=False, query="other")
    put(store, {"a": 2}, index=2, announce=False)
    put(store, {"a": 3}, index=3, announce=False)
    assert len(seen(tmp_path)) == 1
    store.shut()

    again = opened(tmp_path)
    assert again.announce_rest(["q", "other"]) == 3
    assert again.announce_rest(["q", "other"]) == 0

    places = [(number, query, index) for number, query, _, index, _ in seen(tmp_path)]
    assert places == [(1, "q", 1), (2, "q", 2), (3, "other", 2), (4, "q", 3)]


def test_releases_of_another_run_are_refused(tmp_path):
    """They would be taken for old ones, and lost."""
    store = opened(tmp_path)
    put(store, {"a": 5})

    with pytest.raises(StateError, match="another run"):
        store.write("q", 0, 2, release({"a": 6}, index=2, run="s"))
    with pytest.raises(StateError, match="another run"):
        store.fence("q", "s")


def test_a_run_that_has_written_nothing_claims_nothing(tmp_path):
    """A run that was refused before its first release leaves room for the next one."""
    store = opened(tmp_path)
    store.fence("q", "refused")
    put(store, {"a": 5})

    assert len(seen(tmp_path)) == 1


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_large_and_small_releases_read_the_same(tmp_path, monkeypatch, inline):
    """A large one is a file of its own, which is private; a small one is in the book."""
    monkeypatch.setattr(release_store, "INLINE", inline)
    store = opened(tmp_path)
    put(store, {"a": 5, "b": 6})
    put(store, {"a": 7, "b": 8, "c": 9}, index=2)
    kept = list((tmp_path / release_store.SEGMENTS).iterdir())

    assert [rows for *_, rows in seen(tmp_path)] == [["a", "b"], ["a", "b", "c"]]
    assert len(kept) == (2 if inline == 0 else 0)
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)


def test_rows_that_have_not_changed_are_carried_over(tmp_path):
    """The newest segment of a window has the newest value of every key, and says which are new."""
    store = opened(tmp_path, partial=["q"])
    put(store, {"a": 1, "b": 2})
    put(store, {"b": 3}, index=2)
    put(store, {"c": 4}, index=3)
    reader = ReleaseReader(tmp_path)
    reader.look()
    segment = reader.segment(reader.newest("q"))

    rows = dict(zip(segment.table["page"].to_pylist(), segment.array("n").tolist(), strict=True))
    assert rows == {"a": 1, "b": 3, "c": 4}
    assert segment.published["page"].to_pylist() == ["c"]
    first = {page: segment.array("dpstream.first")[segment.find(key_id([page]))] for page in rows}
    assert first == {"a": 1, "b": 1, "c": 3}
    assert segment.find_fresh(key_id(["a"])) is None


def test_a_reader_without_a_store_sees_nothing(tmp_path):
    """The server may be there before the run."""
    reader = ReleaseReader(tmp_path / "none")

    assert reader.look() == 0
    assert reader.after(0, 10) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("number", [0, release_store.FORMAT + 1])
def test_a_book_of_another_format_is_refused(tmp_path, number):
    """By who writes and by who reads; it is left as it is."""
    ReleaseStore(tmp_path, keys={}).shut()
    connection = release_store.connect(tmp_path)
    connection.execute(f"PRAGMA user_version = {number}")
    connection.close()

    said = f"has format {number}; this version of dpstream reads format {release_store.FORMAT}; use"
    with pytest.raises(StateError, match=said):
        ReleaseStore(tmp_path, keys={})
    with pytest.raises(StateError, match=said):
        ReleaseReader(tmp_path).look()


def test_keys_with_the_same_first_word_are_told_apart():
    """The digests are searched by their first word; the second one decides."""
    table = build(
        release({"a": 1, "b": 2, "c": 3}), keys=["page"], release=1, before=None, carry=False
    ).table
    same = pa.array(np.full(3, 7, np.uint64))
    lows = pa.array(np.array([5, 3, 4], np.uint64))
    table = table.set_column(table.column_names.index(HIGH), HIGH, same)
    table = table.set_column(table.column_names.index(LOW), LOW, lows)
    order = pa.array(np.array([1, 2, 0], np.int64))
    table = table.set_column(table.column_names.index("dpstream.order"), "dpstream.order", order)
    segment = Segment(table=table)

    assert [segment.find(id_of(7, low)) for low in (5, 3, 4, 6)] == [0, 1, 2, None]


def test_the_digest_of_a_key_is_that_of_its_json():
    """Clients may work it out; values of other types have other digests."""
    keys = [["a"], ["5"], [5], [None], ["null"], [], ["a", "b"], ["a,b"]]
    found = [id_of(*words) for words in digests(keys).tolist()]

    assert found == [key_id(key) for key in keys]
    assert len(set(found)) == len(keys)


texts = st.text(max_size=3)
steps = st.lists(
    st.tuples(st.dictionaries(texts, st.integers(0, 9), max_size=5), st.booleans()), max_size=6
)


@settings(max_examples=40)
@given(steps=steps, partial=st.booleans())
def test_the_newest_segment_is_what_all_releases_add_up_to(tmp_path_factory, steps, partial):
    """Against a plain dictionary, with restarts in between."""
    folder = tmp_path_factory.mktemp("store")
    settings = {"partial": ["q"] if partial else []}
    store, model, first = opened(folder, **settings), {}, {}
    for index, (values, restart) in enumerate(steps, 1):
        if restart:
            store.shut()
            store = opened(folder, **settings)
        put(store, values, index=index)
        model = model | values if partial else values
        first = {key: first.get(key, index) for key in model}
    store.shut()
    reader = ReleaseReader(folder)
    assert reader.look() == len(steps)
    if not steps:
        return
    segment = decode(encode(reader.segment(reader.newest("q"))))
    keys = [key for (key,) in key_values(segment.table, ["page"])]

    assert dict(zip(keys, segment.array("n").tolist(), strict=True)) == model
    assert dict(zip(keys, segment.array("dpstream.first").tolist(), strict=True)) == first
    assert all(segment.find(key_id([key])) == place for place, key in enumerate(keys))
    assert segment.find(key_id(["not there"])) is None


def timed(values, minute, *, window=0, index, planned=9):
    """A release at a minute of a day; a planned one is the last of its window."""
    table = release(values, window=window, index=index)
    about = json.loads(table.schema.metadata[b"dpstream"])
    time = datetime(2024, 5, 1, minute // 60, minute % 60, tzinfo=UTC).isoformat()
    about |= {"trigger_time": time, "releases": planned}
    return table.replace_schema_metadata({"dpstream": json.dumps(about)})


def story(folder, *, first=0, served=timedelta(minutes=5), planned=4, large=False):
    """Forty minutes of windows of four releases each, of which each changes one key."""
    store = opened(folder, partial=["q"], served=served)
    store.announce_rest(["q"])
    for minute in range(first, 40):
        window, index = minute // 4, minute % 4 + 1
        pad = "x" * release_store.INLINE * large
        values = {f"{index}{pad}": minute}
        table = timed(values, minute, window=window, index=index, planned=planned)
        store.write("q", window, index, table)
        store.announce("q", window, index)
    store.shut()


def kept(folder):
    """Number, window, index and all keys of what is there."""
    reader = ReleaseReader(folder)
    reader.look()
    found = [
        (one.id, one.window, one.release, reader.segment(one).table["page"].to_pylist())
        for one in reader.after(0, 1000)
    ]
    reader.close()
    return [
        (number, window, index, [key[0] for key in keys]) for number, window, index, keys in found
    ]


def test_old_releases_go_and_a_replay_does_not_bring_them_back(tmp_path):
    """Numbers go on, and what is carried over does not suffer; without `served` all stay."""
    story(tmp_path / "all", served=None)
    story(tmp_path / "some")
    everything, some = kept(tmp_path / "all"), kept(tmp_path / "some")

    assert len(everything) == 40
    assert some == everything[-len(some) :]
    assert 5 <= len(some) <= 8
    story(tmp_path / "some", first=20)
    assert kept(tmp_path / "some") == some
    assert seen(tmp_path / "some")[-1][0] == 40


def test_a_kill_while_old_releases_go_leaves_the_same(tmp_path, monkeypatch):
    """Before and after the lines, and between the files; the next start replays some steps."""
    kills = [
        ("_was_dropped", 30),
        ("announce", 33),
        ("_drop_old", 36),
        ("unlink", 3),
        ("unlink", 8),
    ]
    for number, (name, after) in enumerate(kills):
        folder, whole, large = tmp_path / str(number), tmp_path / f"whole {number}", number > 1
        story(whole, large=large)
        place = Path if name == "unlink" else ReleaseStore
        method, calls = getattr(place, name), count(1)

        def dies(*given, method=method, calls=calls, after=after, **more):
            if next(calls) == after:
                kill_this_process()
            return method(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, dies)
            work = partial(story, folder, large=large)
            status = run_in_fork(work)
        assert status == -signal.SIGKILL
        reached = kept(folder)[-1]
        story(folder, first=max(0, 4 * reached[1] + reached[2] - 6), large=large)
        collect_served(folder, timedelta(minutes=5), remove=True)
        collect_served(whole, timedelta(minutes=5), remove=True)

        assert kept(folder) == kept(whole)
        files = [sorted(p.name for p in (at / "segments").iterdir()) for at in (folder, whole)]
        assert files[0] == files[1]
        assert bool(files[0]) == large


def test_the_newest_release_of_a_window_that_goes_on_stays(tmp_path):
    """The next one builds on it, however long it takes; it is not the newest of its query."""
    store = opened(tmp_path, partial=["q"], served=timedelta(minutes=5))
    for window, index, minute in [(0, 1, 0), (0, 2, 1), *((1, n, 20 * n) for n in range(1, 5))]:
        store.write("q", window, index, timed({f"{index}": 1}, minute, window=window, index=index))
        store.announce("q", window, index)
    store.write("q", 0, 3, timed({"3": 1}, 81, window=0, index=3))
    store.announce("q", 0, 3)
    store.shut()

    assert [one[1:] for one in kept(tmp_path)] == [
        (0, 2, ["2", "1"]),
        (1, 4, ["4", "3", "2", "1"]),
        (0, 3, ["3", "2", "1"]),
    ]


def test_who_reads_meanwhile_is_told_that_a_release_has_gone(tmp_path):
    """Its line was seen before; a series that lacks its beginning is not called complete."""
    story(tmp_path, served=None)
    reader = ReleaseReader(tmp_path)
    reader.look()
    first, last = reader.after(0, 1)[0], reader.newest("q")
    collect_served(tmp_path, timedelta(minutes=2), remove=True)

    with pytest.raises(KeyError):
        reader.segment(first)
    assert reader.segment(last).table["page"].to_pylist() == ["4", "3", "2", "1"]
    assert reader.spread("q", 9, last=4, also=[1], limit=10) == (reader.after(37, 9), False)


def test_events_go_on_where_numbers_have_gaps(tmp_path):
    """Old releases of one query go before newer ones of another."""
    hub = Hub(ReleaseReader(tmp_path))
    line = ("q", 0, 1, None, None, None, 1, 0)
    hub._recent = [Released(number, *line) for number in (5, 9, 10)]

    assert [one.id for one in asyncio.run(hub.events(9))] == [10]
    assert [one.id for one in asyncio.run(hub.events(4))] == [5, 9, 10]
