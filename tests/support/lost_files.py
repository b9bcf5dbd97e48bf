"""Small runs whose state directories lose something, on either engine, and what they show then."""

import itertools
import os
import shutil

import numpy as np
import pyarrow as pa

import dpstream as dps
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import DpstreamError
from dpstream.mechanisms import Spas
from tests.support.fixed import SECRET

STEPS = 6
WAYS_OUT = ("restore", "use a new state directory", "start a new run")


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

    query = dps.Query(
        name="clicks", privacy_unit_column="user", keys=("page",), public_groups=("/a", "/b", "/c"),
        epsilon=2, delta=1e-6, max_groups_contributed=3, time_column="at", time_unit="s",
        start="1970-01-01", end="1970-01-01T06:00", window=dps.Tumble("3 hours"), every="1 hour",
        privacy_unit_period="3 hours",
    )  # fmt: skip
    options = EngineOptions(buckets=1, threads=1, snapshot_every=2)

    def __init__(self, engine=None):
        self.where = {"options": self.options} if engine is None else {"engine": engine}

    def start(self, state, ledger, extra):
        return iter(dps.run(self.query, source=rows(extra), state=state,
                            secret=SECRET, ledger=ledger, **self.where))  # fmt: skip

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
        runner = dps.Runner(Spas(epsilon=1, window=3), state=state, secret=SECRET, ledger=ledger)
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


def find_problems(run, place, ledger, starts, is_tried, *, extras=(1, 0), releases=STEPS):
    """What goes wrong when a run loses things after two starts with so many releases each.

    Everything that `losses` finds and `is_tried(number, name)` takes is lost in turn, and the run
    is started for some `releases` over rows with `extras` users more. The second answer: which
    releases the run shows again when it has lost nothing.
    """
    state = place / "state"
    shown = some(run, state, ledger, starts[0])
    shutil.copytree(state, place / "old")
    shown |= some(run, state, ledger, starts[1])
    for many in starts:
        some(run, place / "other", ledger and place / "other.book", many)
    kept = Kept(state, *([ledger.parent] if ledger else []))
    found = []
    for number, (name, how, lose, undo) in enumerate(losses(state, place / "old", place / "other")):
        if not is_tried(number, name):
            continue
        for extra in extras:
            lose()
            try:
                again = some(run, state, ledger, releases, extra)
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
    assert [rest[key] for key in replayed] == [shown[key] for key in replayed]
    assert len(shown | rest) == STEPS
    return found, replayed
