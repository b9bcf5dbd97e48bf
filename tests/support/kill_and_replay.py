"""Kill a run, start it again, and look at what was published and paid: for every kind of run.

A `KindOfRun` says how a run is started in a folder, or goes on there, what it has published and how
often it was charged. A kill says at which moment the run ends: `BeforeDiskOperation`, `AtCall`,
`WhenSeen` from outside, or, in this process, `AfterReleases` and `FailAtCall`.

    after = kill_and_replay(group_by(), tmp_path, BeforeDiskOperation(17))
    assert (after.published, after.charges) == (expected, 1)
"""

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from benchmarks.recovery_child import killer, watched
from tests.support.processes import (
    exit_status,
    kill_this_process,
    run_in_fork,
    start_fork,
    until,
)


def make_folder(place: Path) -> None:
    """All that a run needs whose rows come with its start."""
    place.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, kw_only=True)
class KindOfRun:
    """How a run goes on in a folder, what it has published there, how often it was charged."""

    start: Callable[[Path], Iterable[object]]
    published: Callable[[Path], Mapping[Any, object]]
    charges: Callable[[Path], object]
    prepare: Callable[[Path], None] = make_folder

    def finish(self, place: Path) -> None:
        """Start the run, and let it publish everything that is left."""
        for _ in self.start(place):
            pass

    def unbroken(self, place: Path) -> Mapping[Any, object]:
        """What a run publishes that nobody kills."""
        self.prepare(place)
        self.finish(place)
        return self.published(place)


class Kill(Protocol):
    """The end of a run at a certain moment."""

    def strike(self, kind: KindOfRun, place: Path) -> int:
        """Start the run and end it: -signal; 0: the moment never came, the run is over."""


@dataclass(frozen=True)
class BeforeDiskOperation:
    """SIGKILL before the n-th operation on the disk; `where`: of this name or in this phase.

    With `torn` the file that is being synced loses half of what is new in it, as it may if the
    power fails.
    """

    nth: int
    where: str = "any"
    torn: bool = False

    def strike(self, kind: KindOfRun, place: Path) -> int:
        job = {"kill": {"where": self.where, "nth": self.nth, "torn": self.torn}}

        def work() -> None:
            with watched(killer(job, Counter())):
                kind.finish(place)

        return run_in_fork(work)


@dataclass(frozen=True)
class AtCall:
    """SIGKILL instead of the call of a function."""

    owner: object
    name: str

    def strike(self, kind: KindOfRun, place: Path) -> int:
        def work() -> None:
            setattr(self.owner, self.name, kill_this_process)
            kind.finish(place)

        return run_in_fork(work)


@dataclass(frozen=True)
class WhenSeen:
    """SIGKILL from another process, when it sees something."""

    seen: Callable[[Path], object]

    def strike(self, kind: KindOfRun, place: Path) -> int:
        pid = start_fork(lambda: kind.finish(place), trials=True)
        try:
            until(lambda: self.seen(place), every=0.001)
        finally:
            os.kill(pid, signal.SIGKILL)
            status = exit_status(pid)
        return status


@dataclass(frozen=True)
class AfterReleases:
    """Leave a run in this process after some releases; it saves nothing on its way out."""

    count: int

    def strike(self, kind: KindOfRun, place: Path) -> int:
        running = iter(kind.start(place))
        taken = len(list(itertools.islice(running, self.count)))
        assert isinstance(running, Iterator)
        running.close()  # type: ignore[attr-defined]
        return 0 if taken < self.count else -signal.SIGKILL


class BrokenOff(Exception):
    """Stands for a kill of an engine whose process cannot be forked."""


@dataclass(frozen=True)
class FailAtCall:
    """Break a run off in this process at the n-th call of a function, or right `after` it."""

    owner: Any
    name: str
    nth: int = 1
    after: bool = False

    def strike(self, kind: KindOfRun, place: Path) -> int:
        real, calls = getattr(self.owner, self.name), itertools.count(1)

        def counted(*args: object, **named: object) -> object:
            last = next(calls) == self.nth
            if last and not self.after:
                raise BrokenOff
            answer = real(*args, **named)
            if last:
                raise BrokenOff
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, counted)
            with suppress(BrokenOff):
                kind.finish(place)
                return 0
        return -signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """A run that was killed and is over: how each start ended, and what there is now."""

    place: Path
    statuses: list[int]
    published: Mapping[Any, object]
    charges: object

    @property
    def survived(self) -> bool:
        """Was the run over before its kill came?"""
        return self.statuses[-1] == 0


def kill_and_replay(
    kind: KindOfRun,
    place: Path,
    kills: Kill | Iterable[Kill],
    *,
    damage: Callable[[Path], object] = lambda place: None,
) -> Aftermath:
    """Start a run once for every kill, until one comes too late; then let it go on to its end.

    `damage` is done to the folder after each kill. Any end but a kill or a good one is an error.
    """
    kind.prepare(place)
    statuses = []
    for kill in kills if isinstance(kills, Iterable) else [kills]:
        statuses.append(kill.strike(kind, place))
        assert statuses[-1] in (0, -signal.SIGKILL), f"{kill}: ended with {statuses[-1]}"
        if statuses[-1] == 0:
            break
        damage(place)
    kind.finish(place)
    return Aftermath(
        place=place,
        statuses=statuses,
        published=kind.published(place),
        charges=kind.charges(place),
    )


def kill_everywhere(
    kind: KindOfRun, folder: Path, points: Iterable[int], **where: Any
) -> Iterator[tuple[int, Aftermath]]:
    """A run for each point, killed before that operation on the disk; the last one survives."""
    for nth in points:
        after = kill_and_replay(kind, folder / str(nth), BeforeDiskOperation(nth, **where))
        yield nth, after
        if after.survived:
            return
