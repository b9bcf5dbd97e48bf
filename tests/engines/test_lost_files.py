"""Whatever a state directory has lost, it shows the same bytes again or says what is missing.

Every file and folder of it is removed, emptied, cut, put back from an older copy, or replaced by
another run's, before, between and after snapshots, with the ledger inside and outside. Then the run
is started over the same rows and over rows with one more user. A release that was shown must never
come again with other values: that is fresh noise for one charge, or one noise over two inputs.
"""

import itertools
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import DpstreamError
from dpstream.mechanisms import Spas
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state import run_directory

SECRET = bytes(range(32))
STEPS = 6
WAYS_OUT = ("restore", "use a new state directory", "start a new run")
SOME = 10
"""One case in this many is tried, unless DPSTREAM_LONG is set."""


def rows(extra):
    """Clicks of six hours; with `extra`, those of one user more."""
    rng = np.random.default_rng(3)
    user, at = rng.integers(0, 90, 300), np.sort(rng.integers(0, 3600 * STEPS, 300))
    page = np.array(["/a", "/b", "/c"])[rng.integers(0, 3, 300)]
    if extra:
        hours = np.arange(STEPS)
        user, page = np.append(user, np.full(STEPS, 1000)), np.append(page, ["/a"] * STEPS)
        at = np.append(at, 3600 * hours + 30)
    return pa.table({"user": user, "page": page, "at": at})


class Grouped:
    """A GROUP BY with two windows and a snapshot every second step."""

    text = None
    query = dps.Query(
        name="clicks", privacy_unit_column="user", keys=("page",), public_groups=("/a", "/b", "/c"),
        epsilon=2, delta=1e-6, max_groups_contributed=3, time_column="at", time_unit="s",
        start="1970-01-01",
        end="1970-01-01T06:00", window=dps.Tumble("3 hours"), every="1 hour",
        privacy_unit_period="3 hours",
    )  # fmt: skip
    options = EngineOptions(buckets=1, threads=1, snapshot_every=2)

    def start(self, state, ledger, extra):
        return iter(dps.run(self.query, source=rows(extra), state=state,
                            secret=SECRET, ledger=ledger, options=self.options))  # fmt: skip

    def shown(self, table):
        index = table["release_index"][0].as_py(), table["trigger_time"][0].as_py()
        return index, table.select(["page", "count"]).to_pylist()


class Series(Grouped):
    """The same rows through a mechanism."""

    query = dps.sql("""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, privacy_unit = 'w_event', w = 3,
               mechanism = 'uniform', privacy_unit_column = user, time_unit = 's',
               public_groups = ('/a', '/b', '/c'), start = '1970-01-01', end = '1970-01-01 06:00')
               page, window_start, COUNT(*) AS "count"
        FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR) GROUP BY page, window_start""")


class Stepped:
    """A Runner that tests for changes, saved after every second step."""

    def start(self, state, ledger, extra):
        block = np.array([[30 + 7 * step + extra, 12] for step in range(STEPS)])
        facts = {"state": state, "secret": SECRET, "ledger": ledger}
        runner = dps.Runner(Spas(epsilon=1, window=3), **facts)
        try:
            for step in range(runner.steps_done, STEPS):
                yield from ((step, each) for each in runner.step(block[step]))
                if step % 2:
                    runner.save()
        finally:
            runner.close()

    def shown(self, release):
        return release[0], release[1].values.tolist()


def some(kind, state, ledger, many, extra=0):
    """The first releases of a start; then it is broken off."""
    running = kind.start(state, ledger, extra)
    try:
        return dict(kind.shown(one) for one in itertools.islice(running, many))
    finally:
        running.close()


class Kept:
    """Folders as they are now, to be put back in place: files keep their inodes."""

    def __init__(self, *places):
        self.places = places
        found = [path for place in places for path in (place, *sorted(place.rglob("*")))]
        self.files = {path: path.read_bytes() for path in found if path.is_file()}
        self.folders = [path for path in found if path.is_dir()]

    def put_back(self):
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
        for path, content in self.files.items():
            path.write_bytes(content)
        for place in self.places:
            for path in place.rglob("*"):
                if path.is_file() and path not in self.files:
                    path.unlink()


def losses(state, old, other):
    """Every way to lose something: (what, how, do it, undo it)."""
    aside = state.with_name("aside")
    for path in sorted(state.rglob("*")):
        name = path.relative_to(state)

        def remove(path=path):
            path.rename(aside)

        def bring_back(path=path):
            if path.is_dir():
                shutil.rmtree(path)
            aside.rename(path)

        yield name, "removed", remove, bring_back
        if path.is_dir():
            continue
        content = path.read_bytes()
        lines = [n + 1 for n, byte in enumerate(content) if byte == 10]
        is_text = path.suffix == ".log" or path.name == "ledger"
        for size in {0, len(content) // 2, *(lines[:-1] if is_text else ())}:
            yield name, f"cut at {size}", lambda p=path, s=size: os.truncate(p, s), lambda: None
        for where, which in ((old, "older"), (other, "another run's")):
            if (where / name).is_file() and (where / name).read_bytes() != content:
                bytes_of = (where / name).read_bytes()
                yield name, which, lambda p=path, b=bytes_of: p.write_bytes(b), lambda: None


CASES = [
    (kind, inside, stage)
    for kind in (Grouped, Series, Stepped)
    for inside in (True, False)
    for stage in ("before", "between", "after")
]
STARTS = {"before": (1, 1), "between": (2, 1), "after": (3, 3)}
"""Releases of a first start, whose state becomes the older copy, and of a second one."""


def problems(place, case):
    """What went wrong when things were lost from a run of this kind at this stage."""
    (kind, inside, stage), number = case, CASES.index(case)
    run, state, book = kind(), place / "state", place / "books" / "book"
    book.parent.mkdir(parents=True)
    ledger = None if inside else book
    first, second = STARTS[stage]
    shown = some(run, state, ledger, first)
    shutil.copytree(state, place / "old")
    shown |= some(run, state, ledger, second)
    for many in (first, second):
        some(run, place / "other", None if inside else place / "other.book", many)
    kept, found = Kept(state, book.parent), []
    for at, (name, how, lose, undo) in enumerate(losses(state, place / "old", place / "other")):
        if "DPSTREAM_LONG" not in os.environ and (at + number) % SOME:
            continue
        for extra in (1, 0):
            lose()
            try:
                again = some(run, state, ledger, STEPS, extra)
                if any(again[key] != shown[key] for key in shown if key in again):
                    found.append(f"{name} {how}, {extra} user more: other values")
            except DpstreamError as refusal:
                if not any(word in str(refusal) for word in WAYS_OUT):
                    found.append(f"{name} {how}: {refusal}")
            except Exception as problem:
                found.append(f"{name} {how}: {problem!r}")
            finally:
                undo()
                kept.put_back()
    rest = some(run, state, ledger, STEPS)
    replayed = [key for key in shown if key in rest]
    assert replayed
    assert [rest[key] for key in replayed] == [shown[key] for key in replayed]
    assert len(shown | rest) == STEPS
    return found


@pytest.mark.filterwarnings("ignore::dpstream.engines.embedded.snapshots.DamagedSnapshot")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}")
def test_what_is_lost_is_never_made_up(tmp_path, case):
    """Identical releases, or a refusal that says what to do."""
    assert problems(tmp_path, case) == []


@pytest.mark.parametrize("inside", [True, False])
def test_without_the_ledgers_witness_other_values_are_shown(tmp_path, monkeypatch, inside):
    """The control: what the law above would find in a directory that trusts itself."""
    monkeypatch.setenv("DPSTREAM_LONG", "1")
    monkeypatch.setattr(run_directory, "_compare", lambda found: None)
    monkeypatch.setattr(Ledger, "note_windows", lambda *_, **__: None)
    found = problems(tmp_path, (Grouped, inside, "before"))

    assert "windows removed, 0 user more: other values" in found
    assert [line for line in found if line.startswith("inputs.log cut") and "1 user more" in line]
