"""A query's way to noise: one charge for the whole run, then normals per key, window by window.

The charge pays for every column, window and trigger of the query, as `docs/soundness/latched.md`
proves; draws under it cost nothing more. What is enforced here is the order (ledger, durable input,
draw) and that no normal is drawn twice in a run of the process; a replay draws the same ones.

Where a user within a period is one unit, the charge names the periods whose rows the query reads,
and the ledger learns of the last period that a window reaches into before that window is drawn
(`docs/soundness/periods.md`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from dpstream.errors import InvalidParameter, NoiseReuse, StateError
from dpstream.privacy import noise
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.ledger.charges import Cells, Charge, Measure, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.state.journal import this_process
from dpstream.privacy.state.secret import derive
from dpstream.privacy.state.window_keys import WindowKeySource
from dpstream.records import Integers, Reals, Words

T = TypeVar("T")

_LONGEST = 62  # bytes of a name that is written out; the hash of a longer one takes 63


class NoiseStreams(Protocol):
    """Whatever opens a query's noise streams."""

    step: int

    def noise_stream(self, *, window: int, column: str, part: int) -> NoiseStream:
        """The noise of one column of one window, for the keys of one hash bucket; made once."""

    def refuse_fork(self) -> None:
        """Refuse to draw in a copy of this process."""


@dataclass(frozen=True, kw_only=True)
class PaidPeriods:
    """Which periods of its book a query reads, and up to which one a window of it reaches.

    `first` None: all of them, for ever. `own`: as `Charge.own_periods`.
    """

    first: int | None = None
    last: int | None = None
    last_of: Callable[[int], int] = field(default=lambda window: 0)
    own: tuple[int, int] | None = None


ALL_PERIODS = PaidPeriods()


class QuerySpend:
    """Charges one query of a run to its dataset's book, and opens its noise streams.

    `keys` are those of this query's windows alone: queries number their windows independently.
    """

    def __init__(
        self, *, run: bytes, query: str, ledger: Ledger, dataset: str, keys: WindowKeySource
    ) -> None:
        self._run, self._query = run, query
        self._ledger, self._dataset, self._keys = ledger, dataset, keys
        _users_book(ledger, dataset)  # another one is refused
        self._digest: bytes | None = None  # of the plan, once paid for
        self._periods = ALL_PERIODS
        self._begun: int | None = None
        self._opened: dict[tuple[int, str, int], NoiseStream] = {}
        self._lock, self._process = threading.Lock(), this_process.id
        self.step = -1

    @property
    def book(self) -> Terms:
        """The terms of the book that is charged; its budget may change."""
        return _users_book(self._ledger, self._dataset)

    def pay(
        self,
        *,
        amount: Fraction,
        delta_slack: Fraction,
        error: FloatError,
        digest: str,
        measure: Measure = "mu_squared",
        periods: PaidPeriods = ALL_PERIODS,
        instead_of: str = "",
    ) -> None:
        """Charge all noise of the query; made again by the same run it counts once.

        `amount` of `measure`, which is what the book counts. Without `periods` all of them pay, for
        ever. `instead_of`: a run that has held its place.

        `digest` names everything that fixes the releases besides the data: the same run with
        another one is refused, and would have other noise. `delta_slack` is that of the thresholds;
        `error` is float error, whose lost mass is counted at the book's epsilon.
        """
        if not digest:
            raise InvalidParameter("a query is charged under the digest of its plan; got none")
        charge = self._charge(amount, measure, delta_slack, error, periods, digest)
        self._ledger.charge(self._dataset, charge, lambda step: digest, instead_of=instead_of)
        self._digest = hashlib.sha256(digest.encode()).digest()
        self._periods = periods

    def first_room(
        self,
        *,
        amount: Fraction,
        delta_slack: Fraction,
        error: FloatError,
        periods: PaidPeriods,
        measure: Measure = "mu_squared",
    ) -> int | None:
        """The first period from which on the book could pay; None: it never can."""
        charge = self._charge(amount, measure, delta_slack, error, periods, "")
        return self._ledger.first_room(self._dataset, charge)

    def _charge(
        self,
        amount: Fraction,
        measure: Measure,
        delta_slack: Fraction,
        error: FloatError,
        periods: PaidPeriods,
        digest: str,
    ) -> Charge:
        if amount <= 0:
            raise InvalidParameter(f"{measure} must be greater than 0; got {amount}")
        if self.book.measure != measure:
            raise InvalidParameter(
                f"the book of {self._dataset!r} counts {self.book.measure}; got {measure}"
            )
        return Charge(
            run=self._run.hex(),
            query=self._query,
            purpose="query",
            step=0,
            amount=amount,
            cells=Cells(first=0, last=0),
            digest=digest,
            delta_slack=delta_slack,
            rounding_slack=error.xi,
            lost_mass=error.tau,
            periods=None if periods.first is None else (periods.first, periods.last),
            own_periods=periods.own,
        )

    def begin(self, step: int) -> None:
        """The input of schedule step `step` is durable in the input log: draw under it."""
        self.refuse_fork()
        if self._digest is None:
            raise StateError("a query draws after it has paid; call pay first")
        if step <= self.step:
            raise NoiseReuse(
                f"schedule step {step} was asked for after step {self.step}; steps only move "
                "forward; to replay, start from the state directory"
            )
        self.step = step

    def noise_stream(self, *, window: int, column: str, part: int) -> NoiseStream:
        """The noise of one column of one window, for the keys of one hash bucket; made once."""
        self.refuse_fork()
        if self._digest is None:
            raise StateError("a query draws after it has paid; call pay first")
        place = (window, column, part)
        with self._lock:
            if place in self._opened:
                raise NoiseReuse(
                    f"the noise of window {window}, column {column!r}, part {part} has a stream "
                    "already; two would draw the same normals for different data"
                )
            self._begin_periods([window])
            key = derive(self._keys.mint(window), b"query" + self._digest)
            address = _address(self._run, self._query, column, window)
            self._opened[place] = NoiseStream(self, key=key, address=address, part=part)
            return self._opened[place]

    def grant_keys(self, windows: Iterable[int]) -> WindowKeyGrant:
        """The keys of some windows, for tasks elsewhere that draw under the step of now.

        What a task draws depends on the run, the window, the column, the key's id, the release and
        the purpose: a task that is done twice draws the same, and the input log says for what data.
        """
        self.refuse_fork()
        if self._digest is None or self.step < 0:
            raise StateError("a query lends its keys after it has paid and its input is durable")
        with self._lock:
            digest, windows = b"query" + self._digest, list(windows)
            self._begin_periods(windows)
            keys = {window: derive(self._keys.mint(window), digest) for window in windows}
        return WindowKeyGrant(run=self._run, query=self._query, step=self.step, keys=keys)

    def _begin_periods(self, windows: Sequence[int]) -> None:
        """Tell the ledger up to which period these windows reach, before they are drawn."""
        if self._periods.first is None or not windows:
            return
        last = max(map(self._periods.last_of, windows))
        if self._begun is None or last > self._begun:
            self._ledger.note_begun(self._dataset, self._run.hex(), last)
            self._begun = last

    def erase(self, window: int) -> None:
        """The window is final and every sink has its last table: forget its key for good."""
        with self._lock:
            for place in [place for place in self._opened if place[0] == window]:
                self._opened.pop(place).close()
            self._keys.erase(window)

    def refuse_fork(self) -> None:
        """A copy of this process would draw the same noise for other data."""
        if this_process.id != self._process:
            raise StateError("this run was started before a fork; start or load it in each process")


@dataclass(frozen=True, kw_only=True)
class WindowKeyGrant:
    """Keys of windows on their way to a task: secret; never in a plan, a log or a file."""

    run: bytes
    query: str
    step: int
    keys: dict[int, bytes] = field(repr=False)

    def noise_streams(self) -> RemoteNoiseStreams:
        """The streams of one task; each task opens its own."""
        return RemoteNoiseStreams(self)


class RemoteNoiseStreams:
    """Streams of noise that was paid for, and whose input is durable, in another process."""

    def __init__(self, grant: WindowKeyGrant) -> None:
        self._grant, self.step, self._process = grant, grant.step, this_process.id
        self._opened: set[tuple[int, str, int]] = set()

    def noise_stream(self, *, window: int, column: str, part: int) -> NoiseStream:
        """The noise of one column of one window, for the keys of one hash bucket; made once."""
        place = (window, column, part)
        if place in self._opened:
            raise NoiseReuse(
                f"the noise of window {window}, column {column!r} has a stream already"
            )
        if window not in self._grant.keys:
            raise StateError(f"the key of window {window} was not lent to this task")
        self._opened.add(place)
        address = _address(self._grant.run, self._grant.query, column, window)
        return NoiseStream(self, key=self._grant.keys[window], address=address, part=part)

    def refuse_fork(self) -> None:
        """A copy of this process would draw the same noise for other data."""
        if this_process.id != self._process:
            raise StateError("a task's noise streams do not survive a fork")


class NoiseStream:
    """Standard normals for keys of one (window, column, hash bucket).

    Streams share nothing that changes, so each may be used by a thread of its own. A normal depends
    on the key's id and not on the bucket: a replay may divide keys into other buckets. The ids of
    all buckets together must be distinct, as those of a table are.
    """

    def __init__(
        self, spend: NoiseStreams, *, key: bytes, address: noise.Address, part: int
    ) -> None:
        self._spend, self._address, self._part = spend, address, part
        self._key: bytes | None = key
        self._streams: dict[str, noise.Stream] = {}
        self._lock = threading.Lock()

    def normals(self, ids: Words, *, release: int, purpose: str, each: int = 1) -> Reals:
        """`each` standard normals for every id, `[ids, each]`, at trigger `release` (from 1).

        Releases only move forward, one call per purpose and release.
        """
        if each < 1:
            raise InvalidParameter(f"each counts from 1; got {each}")
        return self._draw(ids, release, purpose, lambda draws: noise.normals(draws, each))

    def laplace(self, ids: Words, *, release: int, scale: Fraction) -> Integers:
        """Discrete Laplace noise of this scale for every id, exact."""
        draw = partial(noise.discrete_laplace, scale=scale)
        return self._draw(ids, release, "laplace", draw)

    def choose(
        self,
        ids: Words,
        *,
        release: int,
        count: int,
        gaps: Callable[[Integers, Integers], Integers],
        slope: Fraction,
    ) -> Integers:
        """For every id a candidate below `count`, with odds e^(-gap slope), exact.

        `gaps(which, candidates)`: how far these candidates of these ids are from the best one.
        """

        def draw(draws: noise.Draws) -> Integers:
            return noise.choose_each(draws, count, gaps, slope)

        return self._draw(ids, release, "choose", draw)

    def _draw(
        self, ids: Words, release: int, purpose: str, sample: Callable[[noise.Draws], T]
    ) -> T:
        """Sample from the draws of these ids, once per purpose and release."""
        self._spend.refuse_fork()
        if self._spend.step < 0:
            raise StateError("no input is durable yet; call begin(step) before the first draw")
        if release < 1:
            raise InvalidParameter(f"release counts from 1; got {release}")
        if ids.ndim != 2 or ids.shape[1] != 2 or ids.dtype != np.uint64:
            raise InvalidParameter(
                f"ids must be uint64 [keys, 2]; got {ids.dtype} of shape {ids.shape}"
            )
        with self._lock:
            return sample(self._stream(purpose).at_keys(release, ids, self._part, distinct=True))

    def close(self) -> None:
        """Draw nothing more, and let go of the key."""
        with self._lock:
            self._key = None
            self._streams.clear()

    def _stream(self, purpose: str) -> noise.Stream:
        if self._key is None:
            raise StateError(
                f"window {self._address.window} is final: its key was erased and no noise is left"
            )
        stream = self._streams.get(purpose)
        if stream is None:
            address = replace(self._address, purpose=purpose)
            stream = self._streams[purpose] = noise.Stream(self._key, address, "keyed")
        return stream


def _users_book(ledger: Ledger, dataset: str) -> Terms:
    terms = ledger.terms(dataset)
    if terms is None:
        raise InvalidParameter(f"dataset {dataset!r} has no book in this ledger; admit the query")
    if terms.unit != "user" or terms.measure == "rho":
        raise InvalidParameter(
            f"a query over users is charged to a book of users in mu_squared, or in epsilon where "
            f"it has no delta; that of {dataset!r} promises {terms.describe()}"
        )
    return terms


def _address(run: bytes, query: str, column: str, window: int) -> noise.Address:
    return noise.Address(
        run=run, query=_name(query), column=_name(column), window=window, purpose=""
    )


def _name(text: str) -> str:
    """A name of any length for an address field of 64 bytes; different names stay different."""
    if len(text.encode()) <= _LONGEST:
        return text
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:_LONGEST]
