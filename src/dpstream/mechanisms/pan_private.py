"""Count a step's events under noise, so that a look into the memory tells hardly anything.

A count begins as a draw of Laplace noise of scale 1 / `intrusion`; every event adds one to it. At
the end of the step the mechanism asks its questions about this noisy count, with noise of their
own. Between steps nothing is kept but the mechanism's state, a function of answers that were paid
for. No secret is kept: each step's noise comes from the system's random source, after the step's
last event, and is forgotten. No digest of an input is kept: a step's mark in the log and in the
ledger is a random number. `docs/soundness/pan_privacy.md` has the proof.

The state directory has the files of a Runner's, without a secret. Before a step draws, its mark is
in the log and in the ledger; before its release is returned, the release and the new state are in
the snapshot. So a restart repeats the newest release as it was (`last`), and a step that was begun
and whose release is not there is never drawn again: the last release is held for it (zeros, if
there is none), and for the `window` - 1 steps after it, in which the ledger may count what it has
drawn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, StateError
from dpstream.mechanisms import REGISTRY, find, name_of
from dpstream.mechanisms.base import HistogramMechanism, Mechanism, Spender, whole
from dpstream.mechanisms.runner import PAN_PRIVATE, mechanism_of, write_snapshot
from dpstream.privacy.amounts import Amount, laplace_stddev, positive
from dpstream.privacy.ledger.charges import Interval, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.sensitivity import histogram_change
from dpstream.privacy.spend import Spend, positive_amount
from dpstream.privacy.state import Secret, mint_run_id, pack, read_packed, unpack
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.journal import this_process
from dpstream.privacy.state.run_directory import (
    About,
    GivenLedger,
    RunDirectory,
    drop_unbegun,
    make_empty,
    make_run,
    open_ledger,
    open_run,
    read_about,
    refuse_rolled_back,
)
from dpstream.records import Integers, Release

_NOTHING = Secret(bytes(32))
"""Stands where a run's directory asks for a secret: nothing is drawn from it."""

_NEVER_OPENED = -1
"""What a ledger says of the end of a charge that it does not have."""


def cover_counts(
    spend: Spender, counts: Integers, intrusion: Fraction | None, paid: Interval | None
) -> Integers:
    """Counts with noise of their own; as they are where memory is protected between steps only.

    A step's counts begin so, and get another such noise when a look is announced.
    """
    if intrusion is None:
        return counts
    return spend.laplace(
        counts,
        sensitivity=histogram_change(),
        epsilon=intrusion,
        purpose="intrusion" if paid is None else paid.purpose,
        interval=paid,
    )


def with_first_noise(release: Release, intrusion: Fraction | None, noises: int = 1) -> Release:
    """A release whose deviation also has the noises that its counts held."""
    if intrusion is None or release.stddev is None:
        return release
    first = math.sqrt(noises) * laplace_stddev(histogram_change(), intrusion)
    return dataclasses.replace(release, stddev=np.hypot(release.stddev, first))


class PanPrivateRunner:
    """A w-event mechanism that counts events itself, under noise, and keeps no secret.

    `mechanism` is one of those whose state is made of answers that were paid for (`uniform`,
    `sample`, `budget_distribution`, `budget_absorption`, `pacer`, `fast_w`, `rescue_dp`). `count`
    takes events as they come, by bin; `end_step` publishes. `intrusion` is what one look at the
    memory and the files may cost at any moment between two calls: the book's epsilon is the
    mechanism's and `intrusion` together. Without it the counts of the running step are exact, and
    only who looks between steps learns no more than the releases tell. Who finds out that memory
    was seen calls `announce_intrusion`, before it is seen again; a window of a run with
    `intrusions` = k has room for k looks.

    Guarantee: w-event (epsilon + k `intrusion`)-DP, w = the mechanism's `window`, k = `intrusions`,
        for all releases and looks at memory and files, at times that do not depend on the data:
        at most k of them in a window, each announced before the next one comes.
    Unit: one event per step, L1 change at most 1.
    Delay: none.
    Paper: after Kellaris, Papadopoulos, Xiao, Papadias, "Differentially Private Event Sequences
        over Infinite Streams", 2014, section 4.5, whose budgets overspend; the accounting is
        dpstream's. Pan-privacy is that of Dwork, Naor, Pitassi, Rothblum, Yekhanin, "Pan-Private
        Streaming Algorithms", 2010.

    >>> from dpstream.mechanisms import Sample
    >>> runner = PanPrivateRunner(Sample(epsilon=1, window=2), bins=3, intrusion="1/2")
    >>> runner.count([0, 2, 2])
    >>> runner.end_step().paid, runner.end_step().paid
    (True, False)
    >>> runner.ledger.terms("stream").total
    Fraction(3, 2)
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        bins: int,
        intrusion: Amount | None = None,
        intrusions: int = 1,
        state: str | Path | None = None,
        ledger: GivenLedger = None,
        dataset: str = "stream",
        name: str = "",
        clock: str = "steps",
        analyst: str = "",
    ) -> None:
        _refuse_unfit(mechanism)
        assert isinstance(mechanism, HistogramMechanism)
        self.mechanism: Mechanism = mechanism
        self.dataset, self.name, self._window = dataset, name, mechanism.window
        self._bins = whole(bins, "bins", at_least=1)
        self._intrusion = None if intrusion is None else Fraction(positive(intrusion, "intrusion"))
        self._intrusions = whole(intrusions, "intrusions", at_least=1)
        if self._intrusions > 1 and self._intrusion is None:
            raise InvalidParameter(
                f"intrusions={intrusions} looks need `intrusion`, what each of them may cost; "
                "without it only looks between steps are safe, and these cost nothing"
            )
        self._announced: tuple[int, ...] = ()
        self._first_noises = 1
        self._clock, self._analyst = clock, analyst
        self._state = mechanism.start()
        self._steps, self._held_before = 0, 0
        self._counts = np.zeros(0, np.int64)
        self._closed, self._process = False, this_process.id
        self.last: Release | None = None
        self.directory: RunDirectory | None = None
        folder = None if state is None else Path(state)
        about = None if folder is None else _begun(folder)
        self._own_ledger = not isinstance(ledger, Ledger)
        with ExitStack() as undo:
            if about is None or folder is None:
                self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
                self.run_id = mint_run_id()
            else:
                self._refuse_others(folder, about)
                self._ledger = open_ledger(folder, about, ledger)
                self.run_id = about["run"]
            undo.callback(self.close)
            if about is not None and folder is not None:
                self.directory = open_run(folder, about=about, secret=_NOTHING, ledger=self._ledger)
            self._ledger.admit(dataset, self.terms(), type(mechanism).__name__)
            run = self.run_id.hex()
            self._ledger.register(dataset, run, self._fingerprint(), analyst=analyst)
            if self.directory is not None:
                self._take_over(self.directory)
            elif folder is not None:
                self._attach(folder)
                self._save()  # before anything is charged: a kill must not leave a charge of nobody
            self._intruder = self._charge_intrusions()
            self._begin_step()
            undo.pop_all()

    def terms(self) -> Terms:
        """The mechanism's promise, and what the looks of a window add to it."""
        terms = self.mechanism.terms()
        total = terms.total + self._intrusions * (self._intrusion or 0)
        return dataclasses.replace(terms, total=total, clock=self._clock)

    def count(self, bins: npt.ArrayLike) -> None:
        """Add events to the running step, each by the number of its bin.

        At most one event of a person and step. What is passed here is in memory while the call
        lasts: pass events as they come.
        """
        self._refuse_closed()
        numbers = np.atleast_1d(np.asarray(bins))
        if numbers.size == 0:
            return
        if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= self._bins:
            raise InvalidInput(
                f"count takes bin numbers from 0 to {self._bins - 1}, one for each event; got "
                f"{numbers.dtype} values; did you forget to give the bins of a table numbers?"
            )
        np.add.at(self._counts, numbers, 1)

    def end_step(self) -> Release:
        """End the running step and publish it; the next one begins."""
        self._refuse_closed()
        if self._steps < self._held_before:
            assert self.last is not None
            self.last = _hold(self.last, self._steps)
        try:
            if self._steps >= self._held_before:
                self.last = self._draw()
            self._steps += 1
            if self.directory is not None:
                self._save()
        except BaseException:
            self.close()  # what was drawn may have been seen: not a second time
            raise
        assert self.last is not None
        self._begin_step()
        return self.last

    def announce_intrusion(self) -> None:
        """Say that memory was seen: counts get new noise, and `intrusion` is charged once more.

        The charge is for every window that has a step from this one on; what was charged before
        stays with windows that reach back to this step. Where a window would have more than
        `intrusions` looks the run ends here: nothing more is counted.

        >>> from dpstream.mechanisms import Sample
        >>> runner = PanPrivateRunner(
        ...     Sample(epsilon=1, window=2), bins=3, intrusion="1/2", intrusions=2
        ... )
        >>> runner.count([0, 2])
        >>> runner.announce_intrusion()
        >>> len(runner.end_step().values)
        3
        """
        self._refuse_closed()
        if self._intrusion is None:
            raise InvalidParameter(
                "this run has no `intrusion`: looks between its steps cost nothing, however many, "
                "and a look within a step has seen exact counts, which nothing can mend"
            )
        self._announced = (*self._announced, self._steps)
        try:
            if self.directory is not None:
                self._save()  # a restart charges what a kill has left out
            self._intruder = self._charge_intrusions()
            seen = self._counts
            self._counts = self._cover_counts(seen)
            seen.fill(0)
        except BaseException:
            self.close()  # counts that were seen must not go on without new noise
            raise
        self._first_noises += 1

    def close(self) -> None:
        """Forget the running step, release the state directory and a ledger of its own.

        >>> from dpstream.mechanisms import Sample
        >>> PanPrivateRunner(Sample(epsilon=1, window=2), bins=3).close()
        """
        self._counts.fill(0)
        if self.directory is not None:
            self.directory.close()
        if self._own_ledger:
            self._ledger.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_done(self) -> int:
        """How many steps were ended."""
        return self._steps

    @property
    def left(self) -> Fraction:
        """What may still be spent in the window that ends at the newest step."""
        return self._ledger.left(self.dataset, max(self._steps - 1, 0))

    @property
    def ledger(self) -> Ledger:
        """The book that this run charges."""
        return self._ledger

    def _draw(self) -> Release:
        mark = mint_run_id()
        logged = self.directory is not None
        if self.directory is not None:
            self.directory.record(self._steps, [mark])
        spend = self._new_spend()
        spend.begin(self._steps, lambda _: mark.hex(), verified=logged)
        self._state, releases = self.mechanism.step(self._state, self._counts, spend)
        (release,) = releases
        return with_first_noise(release, self._intrusion, self._first_noises)

    def _begin_step(self) -> None:
        self._counts.fill(0)  # what is freed may stay in memory as it is
        self._counts = self._cover_counts(np.zeros(self._bins, np.int64))
        self._first_noises = 1

    def _cover_counts(self, counts: Integers) -> Integers:
        """Counts with noise that no look has seen yet."""
        spend = self._new_spend()
        spend.begin(self._steps, lambda _: "", verified=True)
        return cover_counts(spend, counts, self._intrusion, self._intruder)

    def _new_key(self) -> bytes:
        """A key from the system's random source, for a few draws."""
        return Secret.of(None).key("one step")

    def _new_spend(self) -> Spend:
        return Spend(
            run=self.run_id,
            key=self._new_key(),
            ledger=self._ledger,
            dataset=self.dataset,
            query=self.name,
        )

    def _charge_intrusions(self) -> Interval | None:
        """One charge from each announcement to the next, the first from step 0 on.

        Each is charged to all windows that have one of its steps; only the newest may be missing.
        """
        if self._intrusion is None:
            return None
        newest = len(self._announced)
        self._refuse_more_looks()
        paid = self._interval(newest)
        if self._end_of(paid) != _NEVER_OPENED:
            return paid
        spend = self._new_spend()
        spend.begin(paid.start, lambda _: "", verified=True)
        if newest:
            spend.close_interval(self._interval(newest - 1))
        return spend.open_interval(self._intrusion, purpose=paid.purpose)

    def _refuse_more_looks(self) -> None:
        """The mechanism's own charges of the window, made or to come, need the rest of the book."""
        newest = self._announced[-1] if self._announced else 0
        recent = [step for step in self._announced if step > newest - self._window]
        if len(recent) >= self._intrusions:
            raise BudgetExceeded(
                f"a look was announced at step {newest}, and one more may come: "
                f"{len(recent) + 1} looks in {self._window} steps, of which intrusions="
                f"{self._intrusions} are paid for; this run is over: begin a new one, in another "
                "book, with more `intrusions`"
            )

    def _interval(self, number: int) -> Interval:
        """The charge for looks after the announcement of this number; 0 is the run's start."""
        assert self._intrusion is not None
        return Interval(
            purpose=f"intrusion {number + 1}" if number else "intrusion",
            start=self._announced[number - 1] if number else 0,
            amount=positive_amount(self._intrusion, "intrusion"),
            run=self.run_id.hex(),
        )

    def _end_of(self, paid: Interval) -> int | None:
        """The last step that a charge covers; None while it is open."""
        return self._ledger.interval_end(
            self.dataset, self.run_id.hex(), self.name, paid.purpose, paid.start
        )

    def _facts(self) -> tuple[Any, ...]:
        begun = (PAN_PRIVATE, self.mechanism, self.dataset, self.name, self._bins, self._intrusion)
        return begun if self._intrusions == 1 else (*begun, self._intrusions)

    def _fingerprint(self) -> str:
        return hashlib.sha256(canonical(self._facts()).encode()).hexdigest()

    def _attach(self, folder: Path) -> None:
        make_empty(folder)
        self._ledger.persist(folder / "ledger")
        self.directory = make_run(
            folder,
            kind=PAN_PRIVATE,
            run=self.run_id,
            dataset=self.dataset,
            secret=_NOTHING,
            ledger=self._ledger,
            log_name=f"inputs-{self.run_id.hex()[:16]}.log",
            more={
                "name": name_of(self.mechanism),
                "mechanism": pack(self.mechanism, kind="mechanism"),
                "query": self.name,
                "bins": self._bins,
                "intrusion": self._intrusion,
                "intrusions": self._intrusions,
            },
        )

    def _refuse_others(self, folder: Path, about: About) -> None:
        kept = (about[key] for key in ("dataset", "query", "bins", "intrusion"))
        several = about.get("intrusions", 1)
        begun = (PAN_PRIVATE, mechanism_of(about), *kept, *((several,) if several > 1 else ()))
        if begun != self._facts():
            raise StateError(
                f"{folder} was made for other parameters: {begun[1:]}; asked for "
                f"{self._facts()[1:]}; use the same, or a new state directory (a new run, "
                "charged anew)"
            )

    def _take_over(self, directory: RunDirectory) -> None:
        """Go on from the snapshot; a step that was begun after it is lost."""
        folder = directory.folder
        try:
            kept = read_packed(folder / "snapshot.dps", kind="snapshot")
        except StateError:
            kept = read_packed(folder / "snapshot.1.dps", kind="snapshot")
        refuse_rolled_back(
            folder,
            self._ledger,
            kept["ledger head"],
            run=self.run_id,
            told=kept["told"],
        )
        self._state = unpack(kept["state"], kind="mechanism state")
        self._steps, self._held_before = kept["steps"], kept["held before"]
        self._announced = tuple(kept.get("announced", ()))
        if kept["release"] is not None:
            self.last = Release(**kept["release"])
        newest = directory.log.last
        if newest >= self._steps:
            self._lose(newest)

    def _lose(self, newest: int) -> None:
        """Hold the last release for a step that was begun, until no window counts it any more."""
        self._held_before = newest + self._window
        self.last = _hold(self.last or self._nothing(), newest)
        self._steps = newest + 1
        self._save()

    def _nothing(self) -> Release:
        """What is held where nothing was ever published: zeros, of no known deviation."""
        values = np.zeros(self._bins)
        return Release(step=0, values=values, paid=False, stddev=np.full(self._bins, np.nan))

    def _save(self) -> None:
        assert self.directory is not None
        write_snapshot(
            self.directory.folder,
            {
                "state": pack(self._state, kind="mechanism state"),
                "steps": self._steps,
                "held before": self._held_before,
                "announced": list(self._announced),
                "told": self._ledger.known(self.run_id.hex()).reached,
                "release": None if self.last is None else dict(vars(self.last)),
                "ledger head": self._ledger.head(),
                "run": self.run_id,
            },
        )
        self.directory.settle(self._steps, endless=True)

    def _refuse_closed(self) -> None:
        if this_process.id != self._process:
            raise StateError("this run was started before a fork; go on with it in one process")
        if self._closed:
            raise StateError(
                "this run is closed; go on with a new PanPrivateRunner(..., state=...)"
            )


def _hold(last: Release, step: int) -> Release:
    """The last release once more."""
    return dataclasses.replace(last, step=step, paid=False, held=True)


def _begun(folder: Path) -> About | None:
    """What a directory says about its run; one of another kind is refused."""
    drop_unbegun(folder)
    return read_about(folder, kind=PAN_PRIVATE)


def _is_fit(kind: type) -> bool:
    return issubclass(kind, HistogramMechanism) and kind.remembers in ("releases", "answers")


def _refuse_unfit(mechanism: object) -> None:
    if _is_fit(type(mechanism)):
        return
    fit = [name for name in REGISTRY if _is_fit(find(name))]
    raise InvalidParameter(
        f"a pan-private run takes one of {', '.join(fit)}, whose state tells no more than what "
        f"was paid for; got {mechanism!r}"
    )
