"""Live runs for tests: clocks that tests move, rows that arrive by them, one query or several."""

import hashlib
import os
from collections import Counter
from threading import Thread, current_thread
from threading import enumerate as enumerate_threads

import pyarrow as pa
import pyarrow.parquet as pq

import dpstream as dps
from benchmarks.recovery_case import CheckingSink
from dpstream.connectors.pipes import StandardInput
from tests.support.fixed import RUN, SECRET
from tests.support.kill_and_replay import KindOfRun
from tests.support.processes import until
from tests.support.runs import charges, options, published

HOUR = 3_600_000_000
QUERY = {
    "name": "live",
    "privacy_unit_column": "user",
    "keys": ("page",),
    "public_groups": ["/1", "/2"],
    "epsilon": 8,
    "delta": 1e-5,
    "time_column": "at",
    "time_unit": "us",
    "start": "1970-01-01",
    "end": "1970-01-01T06:00",
    "window": dps.Tumble("3 hours"),
    "every": "1 hour",
    "allowed_lateness": "1 hour",
    "max_groups_contributed": 2,
    "max_rows_per_group": 3,
}
TIMES = [HOUR // 3, HOUR, 5 * HOUR // 2, 4 * HOUR, 9 * HOUR // 2]
"""When rows arrive."""
LAST = ["live-w000000-t000004.parquet", "live-w000001-t000004.parquet"]
"""The last release of each window."""


class ScriptedClock:
    """Time that moves only when the engine waits; things happen at their times."""

    real_time = False

    def __init__(self, now=0, events=(), keep=None):
        self.time, self.keep = now, keep
        self.events = sorted((one for one in events if one[0] >= now), key=lambda one: one[0])

    def now(self):
        return self.time

    def wait(self, until, stop):
        if self.events and self.events[0][0] <= until:
            time, action = self.events.pop(0)
            self.time = max(self.time, time)
            action()
        else:
            self.time = until
        if self.keep is not None:
            new = self.keep.with_suffix(".new")
            new.write_text(str(self.time))
            os.rename(new, self.keep)


def rows(times, user="u"):
    """A row at each time, of its own user, pages in turn."""
    users = [f"{user} {time}" for time in times]
    pages = [f"/{1 + number % 2}" for number in range(len(times))]
    return pa.table({"user": users, "page": pages, "at": pa.array(times, pa.int64())})


def drop(folder, name, table):
    """Put a file there whole, once."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        pq.write_table(table, folder / f".{name}", row_group_size=5)
        os.rename(folder / f".{name}", folder / name)


def arrivals(folder):
    """Files that come between the triggers; names sort against the order in which they come."""
    return [
        (time, lambda n=n, time=time: drop(folder, f"{9 - n}.parquet", rows(seconds_before(time))))
        for n, time in enumerate(TIMES)
    ]


def seconds_before(time):
    return [max(time - second * 1_000_000, 0) for second in range(12)]


def start_live(place, clock, asked=QUERY, **named):
    """A run over the growing directory `place/in`."""
    (place / "in").mkdir(parents=True, exist_ok=True)
    settings = {
        "source": place / "in",
        "live": True,
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": options(),
        "clock": clock,
    }
    return dps.run(dps.Query(**asked), **(settings | named))


def lines(time):
    """The rows that arrive at a time, as CSV."""
    table = rows(seconds_before(time)).to_pydict()
    return "".join(f"{u},{p},{a}\n" for u, p, a in zip(*table.values(), strict=True))


def whole_live(place, **named):
    """What an unbroken run publishes."""
    start_live(place, ScriptedClock(0, arrivals(place / "in")), **named).finish()
    return published(place)


def kept_clock(place):
    """A clock that goes on where the run before it was killed."""
    keep = place / "clock"
    now = int(keep.read_text()) if keep.exists() else 0
    return ScriptedClock(now, arrivals(place / "in"), keep)


def live():
    """Live runs whose sink looks at every release that comes again."""
    return KindOfRun(
        start=lambda place: start_live(
            place, kept_clock(place), sink=CheckingSink(place, lambda: None)
        ),
        published=published,
        charges=lambda place: charges(place / "state" / "ledger"),
    )


def settled(place):
    """Every release; of those that had not to hold all rows of their window only the name."""
    found = published(place)
    return {name: content if name in LAST else b"" for name, content in found.items()}


def last(releases):
    return [releases[name] for name in LAST]


SMALL = {"epsilon": 0.2, "delta": 1e-6}
EQUAL = ("1 hour",)
DIFFERENT = ("1 hour", "2 hours", "3 hours", "30 minutes")


def queries(count, every=EQUAL, **changes):
    """Queries that differ in their names, and in their triggers if there are several kinds."""
    return [
        dps.Query(**QUERY | SMALL | {"name": f"q{n}", "every": every[n % len(every)]} | changes)
        for n in range(count)
    ]


class HandClock:
    """Goes on by itself, as far as the test lets it."""

    real_time = True

    def __init__(self, now=0):
        self.time, self.looks = now, 0
        self.by_reader = Counter()  # looks

    def now(self):
        return self.time

    def wait(self, until, stop):
        self.looks += 1
        if current_thread().name == "dpstream-reader":
            self.by_reader[current_thread()] += 1
        stop.wait(0.001)

    def move(self, time):
        """It is `time`; back when the reader has looked through everything after that."""
        self.time = time
        self.settle()

    def settle(self):
        seen, readers = self.looks, self.by_reader.copy()
        until(lambda: self.looks > seen + 2 or self.over(), every=0.001)
        for reader, looks in readers.items():
            until(lambda r=reader, n=looks: self.by_reader[r] > n + 2 or not r.is_alive())

    def over(self):
        return self.looks and not any(one.name == "dpstream-reader" for one in enumerate_threads())


def live_through(clock, events, asked):
    """Let everything happen at its time; the reader meets it before the next."""
    triggers = {time for query in asked for time in triggers_of(query)}
    both = [*events, *((time, None) for time in triggers)]
    for time, action in sorted(both, key=lambda one: (one[0], one[1] is not None)):
        clock.move(time)
        if action is not None:
            action()
            clock.settle()


def triggers_of(query):
    schedule = query.schedule
    return [schedule.time_of(step) for step in range(schedule.steps)]


def start_all(place, asked, clock, **named):
    """Queries over the growing directory `place/in`; their noise is fixed."""
    (place / "in").mkdir(parents=True, exist_ok=True)
    if not (place / "book").exists():
        book = dps.Ledger(place / "book")
        first = next(query for query in asked if isinstance(query, dps.Query))
        book.open("stream", first.promise(epsilon=20, delta=1e-2))
        book.close()
    settings = {
        "source": place / "in",
        "live": True,
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": options(),
        "clock": clock,
        "ledger": place / "book",
    }
    return dps.run_all(asked, **(settings | named))


def alone(place, query, events=arrivals):
    """What a query publishes when it runs by itself."""
    (place / "in").mkdir(parents=True)
    run_id = hashlib.sha256(RUN + query.name.encode()).digest()[:16]
    dps.run(
        query, source=place / "in", live=True, sink=place / "out", secret=SECRET,
        state=place / "state", options=options(run_id=run_id),
        clock=ScriptedClock(0, events(place / "in")),
    ).finish()  # fmt: skip
    return published(place)


def several_live(asked, started):
    """Live runs of several queries over one source; `started` gets the runs of this process."""

    def start(place):
        sink = CheckingSink(place, lambda: None)
        started.append(start_all(place, asked, kept_clock(place), sink=sink))
        return started[-1]

    return KindOfRun(
        start=start, published=published, charges=lambda place: charges(place / "book")
    )


def last_releases(query):
    schedule = query.schedule
    return [
        f"{query.name}-w{window:06d}-t{schedule.releases(window):06d}.parquet"
        for window in range(schedule.windows)
    ]


class Pipe:
    """Standard input of one process; `feed` returns once the source has what was written."""

    def __init__(self):
        self._out, self._in = os.pipe()
        self.source = StandardInput(self._out)
        self.feed("user,page,at\n")

    def feed(self, text):
        os.write(self._in, text.encode())
        until(lambda: not self.source._queue.empty())

    def close(self):
        os.close(self._in)


class Publishing:
    """Runs that are iterated over in a thread, with a clock that the test moves."""

    def __init__(self, runs):
        self.runs, self.found, self.problem = runs, [], None
        self._thread = Thread(target=self._go)
        self._thread.start()

    def _go(self):
        try:
            for name, table in self.runs:
                self.found.append((name, table))
        except dps.DpstreamError as problem:
            self.problem = problem
        finally:
            self.runs.close()

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self
