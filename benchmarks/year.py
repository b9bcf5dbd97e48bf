"""A simulated year of a pipeline, twice: with crashes, a move and restores, and without.

Five queries share one live source and one book. Both lives have the same rotation, the same upgrade
(from the version that `--earlier` names, or to a new interpreter of this one) and the same change
of one query every month, by take-over. In one of them the process is
killed before operations on the disk, the state is moved, and twice it is lost and put back from a
backup. Releases, books and states of the two are compared.

Time is simulated: it stands still while nothing runs, so that a restart meets the rows that it
would have met. Nothing waits for the disk (fsync is left out); a kill loses nothing that is
written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa

import dpstream as dps
from benchmarks.harness import Findings, Progress, Row, child_environment, target
from benchmarks.recovery_child import watched
from dpstream.engines.query_run import EngineOptions
from dpstream.engines.run_storage import run_tag
from dpstream.errors import InvalidParameter, StateError
from dpstream.privacy.ledger import ledger as ledgers
from dpstream.privacy.state import Secret, WindowKeys, journal
from dpstream.privacy.state.backup import Restoration, back_up, move, runs_in
from dpstream.privacy.state.inspection import describe, find_faults
from dpstream.privacy.state.run_directory import rotate_keys
from dpstream.query.noise_plan import plan_query
from dpstream.query.windows import Micros
from dpstream.records import Batch

SECRET: Final = bytes(range(32))
MINUTE: Final = 60_000_000  # microseconds
HOUR, DAY = 60 * MINUTE, 24 * 60 * MINUTE
FIRST: Final = datetime(2026, 1, 1, tzinfo=UTC)  # a Thursday, as weeks are counted from 1970-01-01
START: Final = int(FIRST.timestamp()) * 1_000_000
ROWS: Final = 6  # at a time
PAGES: Final = [f"/{number}" for number in range(12)]
LIVES: Final = ("unbroken", "broken")
YEAR, QUICK_DAYS = 365, 3
SHORT: Final = 28
"""In fewer days than this the shortest trigger is ten minutes, and a week has two days."""
_BOOK, _CHANGED = "clicks", "pages"
_A_PERIOD: Final = {_CHANGED: 24}  # windows that begin in a period, if there are several
_MEMORY_SLACK = 16.0  # MB
_DISK_SLACK = 1.3
_POLL = 0.2  # seconds
_LATER = "DPSTREAM_YEAR_LATER"  # where the version after the upgrade is


# The pipeline


def queries(days: int, change: int) -> list[dps.Query]:
    """Five queries; one of them is another one after every change."""
    week = "1 week" if days >= SHORT else "2 days"
    minute = f"{_tick(days) // MINUTE} minutes"
    common: dict[str, Any] = {
        "privacy_unit_column": "user",
        "privacy_unit_period": "1 day",
        "keys": ("page",),
        "epsilon": 2,
        "delta": 1e-6,
        "time_column": "at",
        "time_unit": "us",
        "start": FIRST.strftime("%Y-%m-%d"),
        "max_groups_contributed": 3,
        "max_rows_per_group": 3,
    }
    if "report_bias" in dps.Query.__dataclass_fields__:  # as in an earlier version, which has none
        common["report_bias"] = False
    spent = dps.Sum("seconds", column="seconds", contribution_bounds_per_row=(0, 60))
    each: list[dict[str, Any]] = [
        {"name": "minute", "window": "1 hour", "every": minute, "public_groups": PAGES[:4]},
        {"name": "hour", "window": "1 day", "every": "1 hour", "aggregates": (spent,)},
        {"name": "day", "window": "1 day", "every": "1 day", "aggregates": (dps.CountUnits(),)},
        {"name": "week", "window": week, "every": week, "privacy_unit_period": week},
        {"name": _CHANGED, "window": "1 hour", "every": "10 minutes", "epsilon": 2 + change % 3},
    ]
    lateness = {"minute": "10 minutes", "hour": "2 hours", "day": "1 day", "week": week}
    return [
        dps.Query(
            **common
            | one
            | {"window": dps.Tumble(one["window"])}
            | {"allowed_lateness": lateness.get(one["name"], "20 minutes")}
        )
        for one in each
    ]


class Clicks:
    """A live source that can be read again from anywhere: rows come between two triggers.

    A seventh of them are late, by up to two hours, a few by up to three days.
    """

    bounded, replayable = False, True

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock, self._tick = clock, clock.tick
        self._made: tuple[int, pa.Table] = (-1, None)

    def partitions(self) -> list[str]:
        """One."""
        return ["clicks"]

    def columns(self, partition: str) -> dict[str, pa.DataType]:
        """Names and types."""
        number = pa.int64()
        return {"user": number, "page": pa.string(), "at": number, "seconds": number}

    def read(
        self,
        partition: str,
        position: Any,
        *,
        columns: Sequence[str] | None = None,
        until: Any = None,
    ) -> Batch:
        """What has come since a position, a day of it at most."""
        first, tick = position or 0, self._tick
        come = (self._clock.now() - START + tick // 2) // tick
        last = min(come if until is None else until, first + DAY // tick)
        table = self._rows(first, max(first, last))
        return Batch(table=table, position=max(first, last), done=last <= first)

    def _rows(self, first: int, last: int) -> pa.Table:
        """Rows of these ticks, cut from an hour that is made at once."""
        hour = first * self._tick // HOUR
        ticks = HOUR // self._tick
        if last > (hour + 1) * ticks:
            return rows(first, last, self._tick)
        if self._made[0] != hour:
            self._made = (hour, rows(hour * ticks, (hour + 1) * ticks, self._tick))
        return self._made[1].slice((first - hour * ticks) * ROWS, (last - first) * ROWS)

    def close(self) -> None:
        """Do nothing."""


def rows(first: int, last: int, tick: int) -> pa.Table:
    """Rows that come in these ticks; the same whenever they are asked for."""
    number = np.repeat(np.arange(first, last, dtype=np.int64), ROWS)
    draws = _mixed(np.arange(first * ROWS, last * ROWS, dtype=np.uint64))
    user, page, how_late, delay, seconds = (
        ((draws >> np.uint64(shift)) % np.uint64(1 << 12)).astype(np.int64)
        for shift in (0, 12, 24, 36, 48)
    )
    longest = np.select([how_late < 3500, how_late < 4000], [50, 7200], 3 * 86_400)
    at = START + number * tick + tick // 2 - delay * longest * 1_000_000 // 4096
    return pa.table(
        {
            "user": user % 700,
            "page": pa.array(PAGES).take(pa.array(page * page % 4096 * len(PAGES) // 4096)),
            "at": at,
            "seconds": seconds % 70,
        }
    )


def _mixed(number: np.ndarray) -> np.ndarray:
    """Numbers that look drawn (the finaliser of splitmix64)."""
    z = number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


class SimulatedClock:
    """Moves when somebody waits, and stops where rows come; `reach` is called when it is `until`.

    After a restart it goes on just before what the slowest query has not logged yet.
    """

    real_time = False

    def __init__(self, keep: Path, *, tick: int, until: int = 1 << 62) -> None:
        self.tick, self.until = tick, until
        self.time = int(keep.read_text()) if keep.exists() else START
        self._keep = keep.open("r+" if keep.exists() else "w")
        self.reach: Callable[[], None] = lambda: None
        self.measured = -1

    def now(self) -> int:
        """The time."""
        return self.time

    def wait(self, until: int, stop: Event) -> None:
        """Go on to where rows come, or to `until`."""
        half = self.tick // 2
        rows_come = (self.time - START + half) // self.tick * self.tick + START + half
        self.time = min(until, rows_come)
        self._keep.seek(0)
        self._keep.write(f"{self.time:020d}")
        self._keep.flush()
        if self.time >= self.until:
            self.reach()

    def go_back(self, due: int) -> None:
        """Go to where a trigger's last rows have not come yet."""
        self.time = max(START, min(self.time, due) - 2 * self.tick // 3)


class DigestSink:
    """Notes the digest of each release, again whenever it comes again."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._runs: dict[str, str] = {}

    def fence(self, name: str, run: str) -> None:
        """A query that takes over begins at window 0 again, with another run."""
        self._runs[name] = run

    def write(self, name: str, window: int, trigger: int, table: pa.Table) -> None:
        """Note it at once: a kill may come next."""
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
        digest = sha256(stream.getvalue()).hexdigest()[:16]
        print(self._runs[name], name, window, trigger, digest, file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# What happens


@dataclass(frozen=True, order=True)
class Occurrence:
    """Something that happens at a time: a crash, a backup, a restore, ..."""

    at: int
    kind: str
    nth: int = 0
    """A crash: before so many further operations on the disk."""


def calendar(days: int, life: str) -> list[Occurrence]:
    """What happens in a life, in order: both have the changes, the rotation and the upgrade."""
    rng, end = np.random.default_rng(days), days * DAY
    month = max(1, days // 12) * DAY
    found = [Occurrence(at - HOUR // 3, "change") for at in range(month, end, month)]
    found += [Occurrence(_morning(days, 0.45, 9), "rotate")]
    found += [Occurrence(_morning(days, 0.03, 17), "upgrade")]
    if life == "broken":
        lost_after = min(14 * HOUR, end // 15)
        for part in (0.15, 0.7):
            backup = _morning(days, part, 1)
            found += [Occurrence(backup, "backup"), Occurrence(backup + lost_after, "restore")]
        found += [Occurrence(_morning(days, 0.4, 12), "move")]
        for _ in range(max(5, days // 5)):
            hour, operation = rng.integers(end // HOUR), rng.integers(1, 90)
            found += [Occurrence(int(hour) * HOUR, "crash", int(operation))]
    return [*sorted(found), Occurrence(end, "end")]


def _tick(days: int) -> int:
    return MINUTE if days >= SHORT else 10 * MINUTE


def _morning(days: int, part: float, hour: int) -> int:
    return int(part * days) * DAY + hour * HOUR + 20 * MINUTE


@dataclass(kw_only=True)
class Life:
    """One life of the pipeline, in a folder of its own."""

    place: Path
    days: int
    kind: str
    done: int = 0
    """How many occurrences are over."""
    changes: int = 0
    moves: int = 0

    @property
    def state(self) -> Path:
        """The state directory; a move and a restore bring it elsewhere."""
        return self.place / f"state-{self.moves}"

    def live(self) -> None:
        """Go on from where it is to the end; a process of its own between two occurrences."""
        _warm_up(self.days)
        for number, what in enumerate(calendar(self.days, self.kind)):
            if number < self.done:
                continue
            crash = what if what.kind == "crash" else None
            until = 1 << 62 if crash else START + what.at
            status = _in_fork(partial(self._run, until, crash))
            if status != (-signal.SIGKILL if crash else 0):
                raise StateError(f"the {self.kind} life ended with {status} before: {what}")
            status = 0 if crash else _in_fork(partial(self._carry_out, what))
            if status:
                raise StateError(f"the {self.kind} life failed at: {what}")
            self.done = number + 1
            self.changes += what.kind == "change"
            self.moves += what.kind in ("move", "restore")
            facts = {"done": self.done, "changes": self.changes, "moves": self.moves}
            (self.place / "life").write_text(json.dumps(facts))
            if what.kind == "upgrade":
                later = os.environ | {"PYTHONPATH": os.environ[_LATER]}
                os.execve(sys.executable, _command(self.place, self.days, self.kind), later)

    def _run(self, until: int, crash: Occurrence | None) -> None:
        """The pipeline, until a time, or until it is killed."""
        clock = SimulatedClock(self.place / "clock", tick=_tick(self.days), until=until)
        asked = queries(self.days, self.changes)
        logged = {}
        if self.state.exists():
            logged = {p.name: describe(p)["steps"]["logged"] for p in runs_in(self.state)}
        with ExitStack() as stack:
            stack.enter_context(injected(clock, self.days))
            book = stack.enter_context(closing(_open_book(self.place, self.days)))
            if crash:
                stack.enter_context(watched(_killer(clock, crash)))
            stack.enter_context(noted_begins(self.place / "begins"))
            runs = stack.enter_context(
                dps.run_all(
                    asked,
                    source=Clicks(clock),
                    live=True,
                    sink=DigestSink(self.place / "published"),
                    state=self.state,
                    secret=SECRET,
                    ledger=book,
                    dataset=_BOOK,
                    clock=clock,
                    options=EngineOptions(buckets=1, threads=1, run_id=b"change %d" % self.changes),
                    take_over=True,
                )
            )
            runs.open()
            due = [run.query.schedule.time_of(logged.get(n, 0)) for n, run in runs.runs.items()]
            clock.go_back(min(time for time in due if time is not None))
            clock.reach = runs.stop
            self._follow(runs, clock)

    def _follow(self, runs: Any, clock: SimulatedClock) -> None:
        every = self.days * DAY // 120
        for _ in runs:
            if runs.failures:
                raise next(iter(runs.failures.values()))
            if clock.now() // every != clock.measured:
                clock.measured = clock.now() // every
                _note(self.place / "measured", day=(clock.now() - START) / DAY, **self._sizes())
        if runs.failures:  # of queries after which none had a release
            raise next(iter(runs.failures.values()))

    def _sizes(self) -> dict[str, float]:
        status = Path("/proc/self/status").read_text().split("\n")
        (memory,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return {
            "memory_mb": memory / 1024,
            "state_mb": sum(_sizes_of_files(self.state)) / 1e6,
            "book_mb": (self.place / "book").stat().st_size / 1e6,
        }

    def _carry_out(self, what: Occurrence) -> None:
        """What an operator does while the pipeline stands still."""
        clock = SimulatedClock(self.place / "clock", tick=_tick(self.days))
        facts: dict[str, Any] = {}
        backup, new = self.place / "backup.tar", self.place / f"state-{self.moves + 1}"
        because: dict[str, Any] = {"because": "the year's calendar", "who": "operator"}
        with injected(clock, self.days):
            if what.kind == "change":
                shutil.rmtree(self.state / _CHANGED)
            elif what.kind == "rotate":
                for place in runs_in(self.state):
                    rotate_keys(place, given_secret=SECRET)
            elif what.kind == "move":
                move(self.state, new, **because)
            elif what.kind == "backup":
                back_up(self.state, backup)
            elif what.kind == "restore":
                secrets = {path.name: path.read_bytes() for path in self.state.glob("*.secret")}
                shutil.rmtree(self.state)  # the disk is lost; secrets and the ledger are elsewhere
                restored = Restoration(folder=new, **because).restore(backup)
                for name, content in secrets.items():
                    (new / name).write_bytes(content)
                    (new / name).chmod(0o600)
                backup.unlink()
                facts["lost"] = [
                    [run_tag(run.about["run"]), name, window]
                    for name, run in restored.items()
                    for window in run.lost
                ]
                facts["anew"] = [
                    [run_tag(run.about["run"]), run.remembers_from]
                    for run in restored.values()
                    if run.remembers_from is not None
                ]
                facts["again"] = {name: run.told - run.logged for name, run in restored.items()}
            elif what.kind == "upgrade":
                facts["from"] = str(Path(dps.__file__).parent)
        _note(self.place / "events", event=what.kind, day=what.at / DAY, **facts)


def _sizes_of_files(folder: Path) -> Iterator[int]:
    """Snapshots are written meanwhile: a file may go between two looks."""
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                yield Path(root, name).stat().st_size


def _open_book(place: Path, days: int) -> dps.Ledger:
    """Digests are kept for 35 days in a year, and for as large a part of a shorter run."""
    book = dps.Ledger(place / "book", backups=timedelta(days=35 * min(1, days / YEAR)))
    book.open(_BOOK, queries(days, 0)[0].promise(epsilon=24, delta=1e-4))
    return book


@contextmanager
def injected(clock: SimulatedClock, days: int) -> Iterator[None]:
    """The ledger goes by the simulated time; in less than a year it folds sooner, in proportion."""

    def now() -> str:
        return datetime.fromtimestamp(clock.now() / 1e6, UTC).isoformat(timespec="milliseconds")

    part = min(1.0, days / YEAR)
    with (
        patch.object(ledgers, "_now", now),
        patch.object(ledgers, "_VERBATIM", ledgers._VERBATIM * part),
        patch.object(ledgers, "_WORTHWHILE", max(64, int(ledgers._WORTHWHILE * part))),
        patch.object(journal, "LARGE", max(1 << 14, int(journal.LARGE * part))),
        patch.object(os, "fsync", lambda descriptor: None),
    ):
        yield


@contextmanager
def noted_begins(path: Path) -> Iterator[None]:
    """Note a digest of the keys that each window remembers as it begins."""
    real = getattr(WindowKeys, "note_content", None)
    if real is None:  # an earlier version, in which windows remember nothing
        yield
        return
    with path.open("a") as file:

        def note_content(self: WindowKeys, window: int, digest: bytes) -> None:
            real(self, window, digest)
            print(run_tag(self._run), window, digest.hex(), file=file, flush=True)

        with patch.object(WindowKeys, "note_content", note_content):
            yield


def _killer(clock: SimulatedClock, crash: Occurrence) -> Callable[[str, str, Any], None]:
    """Kill this process before the n-th operation on the disk from a time on."""
    left = [crash.nth]

    def each(operation: str, phase: str, argument: Any) -> None:
        if clock.now() >= START + crash.at:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return each


def _in_fork(work: Callable[[], None]) -> int:
    """Do it in a process of its own; its exit status, or -signal."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _warm_up(days: int) -> None:
    """Load what is compiled and calibrate every query once, so that forks have it."""
    for change in range(3):
        for asked in queries(days, change):
            plan_query(asked)
    for asked in queries(days, 0)[1:3]:
        dps.run(
            replace(asked, end=Micros(START + DAY)),
            source=rows(0, DAY // _tick(days), _tick(days)),
            ledger=dps.Ledger(),
            options=EngineOptions(buckets=1, threads=1),
        ).finish()


def _note(path: Path, **facts: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _command(place: Path, days: int, kind: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.year", str(place), str(days), kind]


def main() -> None:
    """Live one life, from where it is."""
    place, days, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    kept = place / "life"
    more = json.loads(kept.read_text()) if kept.exists() else {}
    Life(place=place, days=days, kind=kind, **more).live()


# What is compared


@dataclass(kw_only=True)
class Comparison:
    """What differs between the two lives."""

    releases: int
    differ: list[str] = field(default_factory=list)
    """Releases with other bytes, in one life or between the two."""
    unlisted: list[str] = field(default_factory=list)
    """Releases that one of them lacks, and no restore has listed."""
    lost: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    """Releases that are missing, by the restore that has listed them, query and window."""
    begun_anew: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    """Releases of windows that begin with other keys, since a restore has said so; likewise."""
    books: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def compare_releases(unbroken: Path, broken: Path) -> Comparison:
    """Compare releases by digest; what is missing must have been listed by a restore."""
    expected, differ = published(unbroken)
    found, again = published(broken)
    both = Comparison(releases=len(expected), differ=differ + again)
    shared = expected.keys() & found.keys()
    both.unlisted += [f"{key} is too many" for key in found.keys() - expected.keys()]
    restores = [e for e in read_lines(broken / "events") if e["event"] == "restore"]
    begins = [_begins(place) for place in (unbroken, broken)]
    for key in (key for key in shared if expected[key] != found[key]):
        restore = _begins_anew(key, restores, begins)
        if restore is None:
            both.differ.append(f"{key} has other bytes")
        else:
            both.begun_anew[restore, key[1], int(key[2])] += 1
    listed: dict[tuple[str, ...], int] = {
        (tag, name, str(window)): number
        for number, restore in enumerate(restores, 1)
        for tag, name, window in restore["lost"]
    }
    for key in expected.keys() - found.keys():
        if key[:3] in listed:
            both.lost[listed[key[:3]], key[1], int(key[2])] += 1
        else:
            both.unlisted.append(f"{key} is missing")
    return both


def _begins(place: Path) -> dict[tuple[str, int], str]:
    """(run, window) -> the digest of the keys that it begins with, where it remembers any."""
    path = place / "begins"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {(run, int(window)): digest for run, window, digest in lines}


def _begins_anew(
    key: tuple[str, ...],
    restores: Sequence[dict[str, Any]],
    begins: Sequence[dict[tuple[str, int], str]],
) -> int | None:
    """The restore after which the window of a release remembers other keys; None: it does not.

    In the period of windows that were given up, units may have other rows left to give, too.
    """
    run, name, window = key[0], key[1], int(key[2])
    one, other = (known.get((run, window)) for known in begins)
    size = _A_PERIOD.get(name, 1)
    for number, restore in enumerate(restores, 1):
        for tag, first in restore.get("anew", []):
            same_period = window // size == (first - 1) // size
            if tag == run and window >= first and one and (one != other or same_period):
                return number
    return None


def compare_books(unbroken: Path, broken: Path) -> list[str]:
    """Lines that are not the same to the last digit: charges, amounts, periods, what is left."""
    one, other = (_book(place) for place in (unbroken, broken))
    return [
        f"{key}: {one.get(key)} != {other.get(key)}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]


def published(place: Path) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """(run, query, window, trigger) -> digest; and those that came again with another one."""
    found: dict[tuple[str, ...], str] = {}
    differ = []
    with (place / "published").open() as lines:
        for line in lines:
            *key, digest = line.split()
            if found.setdefault(tuple(key), digest) != digest:
                differ.append(f"{key} came again with other bytes")
    return found, differ


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `_note` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _book(place: Path) -> dict[str, Any]:
    """What the book says, line by line."""
    with closing(dps.Ledger(place / "book")) as ledger:
        (book,) = ledger.report()
    lines = {f"{x['query']} {x['run'][:8]} {x['purpose']}": x for x in book.pop("spent_on")}
    return book | lines


def growth(measured: Sequence[dict[str, Any]], what: str) -> tuple[float, float]:
    """The most of the first two thirds, and of the last one."""
    last = max(line["day"] for line in measured) * 2 / 3
    parts = ([m[what] for m in measured if (m["day"] > last) == late] for late in (False, True))
    early, late = (max(part) for part in parts)
    return early, late


def measure(
    *, quick: bool, progress: Progress, days: int | None = None, earlier: Path | None = None
) -> Findings:
    """Live both lives side by side, and compare them.

    `earlier`: the sources of the version that lives until the upgrade; None: those of this one.
    """
    days = days or (QUICK_DAYS if quick else YEAR)
    if days < QUICK_DAYS:
        raise InvalidParameter(f"a year has at least {QUICK_DAYS} days here; got {days}")
    if earlier is not None and not (earlier / "dpstream").is_dir():
        raise InvalidParameter(f"{earlier} holds no package dpstream; name a src folder")
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dpstream-year-"))  # stays if anything goes wrong
        lives = [Life(place=folder / kind, days=days, kind=kind) for kind in LIVES]
        hours = _live_side_by_side(lives, progress, earlier)
        stack.callback(shutil.rmtree, folder)
        for life in lives:
            life.moves = json.loads((life.place / "life").read_text())["moves"]
        progress(2 * days, 2 * days, "comparing")
        both = compare_releases(*(life.place for life in lives))
        both.books = compare_books(*(life.place for life in lives))
        for place in (place for life in lives for place in runs_in(life.state)):
            both.faults += find_faults(place, secret=Secret.of(SECRET))
        measured = {life.kind: read_lines(life.place / "measured") for life in lives}
        events = read_lines(lives[1].place / "events")
    spent = (time.monotonic() - began) / 3600
    crashes = sum(one.kind == "crash" for one in calendar(days, "broken"))
    return Findings(
        rows=_rows(measured, days, hours),
        targets=targets(both, measured, days),
        notes=_notes(both, events, days, crashes, spent, earlier),
        draw=lambda figure: draw(figure, measured),
    )


def _live_side_by_side(
    lives: Sequence[Life], progress: Progress, earlier: Path | None
) -> dict[str, float]:
    """A process for each, in a session of its own; the hours that each has taken."""
    environment = child_environment()
    environment[_LATER] = environment["PYTHONPATH"]
    if earlier is not None:
        environment["PYTHONPATH"] = f"{earlier.resolve()}{os.pathsep}{environment[_LATER]}"
    began, hours, going = time.monotonic(), {}, {}
    with ExitStack() as stack:
        for life in lives:
            life.place.mkdir()
            said = stack.enter_context((life.place / "said").open("wb"))
            command = _command(life.place, life.days, life.kind)
            going[life.kind] = subprocess.Popen(
                command, env=environment, stderr=said, start_new_session=True
            )
            stack.callback(going[life.kind].wait)
            stack.callback(going[life.kind].terminate)
        while going:
            time.sleep(_POLL)
            progress(sum(map(_day, lives)), 2 * lives[0].days, "simulated days of both lives")
            for life in lives:
                status = going[life.kind].poll() if life.kind in going else None
                if status is None:
                    continue
                del going[life.kind]
                hours[life.kind] = (time.monotonic() - began) / 3600
                if status:
                    said_last = (life.place / "said").read_text()[-3000:]
                    raise StateError(f"{life.place}: this life has failed:\n{said_last}")
    return hours


def _day(life: Life) -> int:
    with suppress(FileNotFoundError, ValueError):
        return (int((life.place / "clock").read_text()) - START) // DAY
    return 0


def targets(both: Comparison, measured: dict[str, Any], days: int) -> list[Row]:
    """Equal or listed, exact, whole, flat."""
    found = [
        target("releases that differ, and no restore said so", len(both.differ), "==", 0),
        target("releases missing or too many that no restore listed", len(both.unlisted), "==", 0),
        target("differences between the books", len(both.books), "==", 0),
        target("faults in the states at the end", len(both.faults), "==", 0),
    ]
    short = f"{days} days are too few to tell"
    for kind, lines in measured.items():
        early, late = growth(lines, "memory_mb")
        name = f"{kind}: MB of memory more in the last third"
        found.append(target(name, late - early, "<=", _MEMORY_SLACK))
        for what in ("state_mb", "book_mb"):
            early, late = growth(lines, what)
            name = f"{kind}: {what[:-3]} on disk, last third over the others"
            ratio = None if days < SHORT else late / early
            found.append(target(name, ratio, "<=", _DISK_SLACK, reason=short))
    whole = days if days >= YEAR else None
    return [*found, target("simulated days", whole, ">=", YEAR, reason=f"this run had {days}")]


def _rows(measured: dict[str, Any], days: int, hours: dict[str, float]) -> list[Row]:
    """A line for each month of each life."""
    month, found = max(1, days // 12), []
    for kind, lines in measured.items():
        for first in range(0, days, month):
            mine = [line for line in lines if first <= line["day"] < first + month]
            sizes = {
                w: max((m[w] for m in mine), default=None)
                for w in ("memory_mb", "state_mb", "book_mb")
            }
            found.append({"life": kind, "days": f"{first} to {min(days, first + month)}"} | sizes)
        found.append({"life": kind, "days": f"all {days}", "hours": hours[kind]})
    return found


def _notes(
    both: Comparison,
    events: Sequence[dict[str, Any]],
    days: int,
    crashes: int,
    hours: float,
    earlier: Path | None,
) -> list[str]:
    counts = Counter(event["event"] for event in events if event["event"] != "end")
    happened = ", ".join(f"{n} x {kind}" for kind, n in sorted(counts.items()))
    took = f"{days} simulated days in {hours:.2f} hours, both lives side by side"
    notes = [
        f"{took}: {both.releases:,} releases without a break; {crashes} crashes, {happened}",
        "the upgrade is a new interpreter of the same version; --earlier names another"
        if earlier is None
        else f"the upgrade is from the sources in {earlier}",
        "time stands still while nothing runs, and fsync is left out",
    ]
    notes += [
        f"lost by restore {restore}: {count} releases of query {name!r}, window {window}: its key "
        "was made after the backup, and is never made again"
        for (restore, name, window), count in sorted(both.lost.items())
    ]
    notes += [
        f"anew since restore {restore}: {count} releases of query {name!r}, window {window}, are "
        "others: it begins without keys that none but windows of before have shown"
        for (restore, name, window), count in sorted(both.begun_anew.items())
    ]
    for what in ("differ", "unlisted", "books", "faults"):
        notes += [f"{what}: {line}" for line in sorted(getattr(both, what))[:5]]
    return notes


def draw(figure: Any, measured: dict[str, Any]) -> None:
    """Memory and disk over the simulated days."""
    for panel, (what, label) in zip(
        figure.subplots(1, 3),
        {"memory_mb": "memory, MB", "state_mb": "state, MB", "book_mb": "ledger, MB"}.items(),
        strict=True,
    ):
        for kind, color in zip(LIVES, ("#0b6e99", "#d9730d"), strict=True):
            lines = measured[kind]
            panel.plot([m["day"] for m in lines], [m[what] for m in lines], color=color, label=kind)
        panel.set(xlabel="simulated day", title=label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
