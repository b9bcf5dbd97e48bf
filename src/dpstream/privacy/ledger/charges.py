"""What a ledger writes down: a book's terms, charges with the cells they read, facts about runs.

A mechanism's state holds tokens for what its run has paid for and may draw under later: `Interval`,
`Paid`, `Cover`. Each is tied to the run that paid; a copied state pays again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.amounts import exact, positive, show, units
from dpstream.privacy.state.journal import Record
from dpstream.privacy.state.serial import storable

Measure = Literal["epsilon", "rho", "mu_squared"]
Unit = Literal["event", "w_event", "user"]
Kind = Literal["cells", "open", "close", "cover"]

_ZERO = Fraction(0)
BUDGET = ("total", "delta_slack", "rounding_slack", "epsilon")
"""What may change in a book's terms; whom they protect stays."""
_STORED_AS = {"tail": "delta_slack", "drift": "rounding_slack", "epsilon": "epsilon"}


def chain_digest(key: bytes, previous: bytes, content: bytes) -> bytes:
    """Keyed digest of a step's input and of all input before it, which a charge is tied to."""
    return hashlib.blake2b(previous + content, digest_size=16, key=key).digest()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What one dataset's book protects, and how much may ever be spent.

    `unit`: one event (`event`), any events within `window` successive steps (`w_event`), or all
    rows of a user for ever or within a `period` (`user`). `measure`: what `total` and every
    charge count, pure-DP epsilon, zCDP rho or GDP mu^2. `clock`: what one step is, in words.
    `change`: how far one event may move the data, in words; a mechanism with another is refused.

    A book of users may also allow for what holds only nearly: `delta_slack`, the probability that
    all the rest fails (thresholds on keys, float error), and `rounding_slack`, the log-ratio (xi)
    between the laws that are sampled in floats and the ideal ones; files and reports call them
    `tail` and `drift`. Both add up over all charges. `epsilon` is where the promise is read: a lost
    float mass counts e^epsilon times (`promises.with_lost_mass`).

    >>> Terms(unit="w_event", total=Fraction(1), window=24).describe()
    '...'
    """

    unit: Unit
    total: Fraction
    window: int | None = None
    measure: Measure = "epsilon"
    period: str = "forever"
    time_zone: str = "UTC"
    clock: str = "steps"
    change: str = "a count by 1"
    delta_slack: Fraction = Fraction(0)
    rounding_slack: Fraction = Fraction(0)
    epsilon: Fraction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", positive(self.total, f"the book's {self.measure}"))
        for name in ("delta_slack", "rounding_slack"):
            object.__setattr__(self, name, exact(getattr(self, name), name))
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", positive(self.epsilon, "epsilon"))
        if not 0 <= self.delta_slack < 1 or self.rounding_slack < 0:
            raise InvalidParameter(
                "a book needs 0 <= delta_slack < 1 and rounding_slack >= 0; got "
                f"{self.delta_slack} and {self.rounding_slack}"
            )
        slack = self.delta_slack or self.rounding_slack
        if self.unit != "user" and (slack or self.epsilon is not None):
            raise InvalidParameter(
                "delta_slack, rounding_slack and epsilon go with unit 'user', whose charges all "
                f"add up; got unit {self.unit!r}"
            )
        if self.unit not in ("event", "w_event", "user"):
            raise InvalidParameter(f"unit must be event, w_event or user; got {self.unit!r}")
        if self.measure not in ("epsilon", "rho", "mu_squared"):
            raise InvalidParameter(
                f"measure must be epsilon, rho or mu_squared; got {self.measure!r}"
            )
        if (self.unit == "w_event") != (self.window is not None):
            raise InvalidParameter("window (w) goes with unit 'w_event', and only with it")
        if self.window is not None and self.window < 1:
            raise InvalidParameter(f"window must be at least 1 step; got {self.window}")

    @property
    def width(self) -> int | None:
        """Steps that one protected unit can touch; None means all of them."""
        return 1 if self.unit == "event" else self.window

    def joins(self, kind: Kind) -> bool:
        """May one charge stand for a block of steps that were measured together?

        Where a unit touches one step, yes. Where it touches k, each cell costs the amount: their
        epsilons add up, but rho and mu^2 grow with k^2, and a cover counts once whatever k is.
        """
        return self.width == 1 or (kind == "cells" and self.measure == "epsilon")

    def with_budget_of(self, other: Terms) -> Terms:
        """The same protection with the budget of another book.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> small, large = (promise(epsilon=each, delta=1e-6) for each in (1, 2))
        >>> small.with_budget_of(large) == large
        True
        """
        budget = {name: getattr(other, name) for name in BUDGET}
        return dataclasses.replace(self, **budget)

    def describe(self) -> str:
        """The promise in words.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> promise(epsilon=2, delta=1e-6).describe().partition(",")[0]
        'mu_squared = 0.187551'
        """
        what = {
            "event": "one event",
            "w_event": f"any events within {self.window} successive steps",
            "user": f"{self._rows()} ({self.period})",
        }[self.unit]
        also = "".join(
            f", {name} = {show(amount)}"
            for name, amount in (("tail", self.delta_slack), ("drift", self.rounding_slack))
            if amount
        )
        return f"{self.measure} = {show(self.total)}{also} for {what}{self._how()}"

    def _rows(self) -> str:
        return self.change if self.change.startswith("all rows") else "all rows of one user"

    def _how(self) -> str:
        if self.change == "a count by 1" or (self.unit == "user" and self.change[:4] == "all "):
            return ""
        return f", each changing {self.change}"

    def to_json(self) -> dict[str, Any]:
        """As stored; slacks and epsilon only where they are given.

        >>> from dpstream.privacy.accounting.promises import promise
        >>> promise(epsilon=2, delta=1e-6).to_json()["unit"]
        'user'
        """
        record = {**self.__dict__, "total": str(self.total)}
        for key, name in _STORED_AS.items():
            if amount := record.pop(name):
                record[key] = str(amount)
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Terms:
        """As read."""
        return cls(**{_STORED_AS.get(key, key): value for key, value in record.items()})


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a book lets one analyst spend: a share of all that it counts, and for how large a query.

    `largest`: the most that one query may cost, as epsilon at the book's delta; None: the share.
    """

    share: Fraction = Fraction(1)
    largest: Fraction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", positive(self.share, "share"))
        if self.share > 1:
            raise InvalidParameter(f"a share is a part of the book, 1 at most; got {self.share}")
        if self.largest is not None:
            object.__setattr__(self, "largest", positive(self.largest, "largest"))

    def to_json(self) -> dict[str, str]:
        """As stored; the largest query only where it is given."""
        return {key: str(value) for key, value in self.__dict__.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """A block of the stream: steps `first` to `last`, all bins or some half-open ranges of them."""

    first: int
    last: int
    bins: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise LedgerError(f"cells need 0 <= first <= last; got {self.first} to {self.last}")
        if self.bins is None:
            return
        if not (self.bins and all(0 <= a < b for a, b in self.bins)):
            raise LedgerError(f"bins must be ranges (a, b) with 0 <= a < b; got {self.bins}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """`amount` for having read `cells` at `step`; the same again at the next `repeat - 1` steps.

    A charge is known by (run, query, purpose, step): made twice it counts once, made again with
    another amount, other cells or another input digest it is refused.
    `kind`: "cells" costs every cell it read; "open" starts an interval that costs `amount` once to
    every window that it overlaps; "close" ends that interval with this step; "cover" costs every
    window that it overlaps `amount` once, for all noise that one mechanism adds to its cells.
    `delta_slack` and `rounding_slack`: what is spent of the book's, once. `lost_mass` (tau): what
    float noise may lose; the book counts it in `delta_slack`, times a factor of its epsilon.
    `periods`: where a user within a period is one unit, the first and the last period that pay
    (last None: it goes on); without it all periods do, for ever.
    `own_periods`: (k, s), for reports: k of the book's periods are one of the query (0: all), and
    rows of s of its own may share a window; None: (1, 1), and unknown without `periods`.
    """

    run: str
    query: str
    purpose: str
    step: int
    amount: Fraction
    cells: Cells
    repeat: int = 1
    digest: str = ""
    kind: Kind = "cells"
    delta_slack: Fraction = _ZERO
    rounding_slack: Fraction = _ZERO
    lost_mass: Fraction = _ZERO
    periods: tuple[int, int | None] | None = None
    own_periods: tuple[int, int] | None = None
    units: int = field(init=False, repr=False, compare=False)
    """The amount in grid steps, rounded up."""
    plain: bool = field(init=False, repr=False, compare=False)
    """The ordinary case: one step, charged by itself, in all bins, for nothing besides."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", units(self.amount))
        cells = self.cells
        plain = (
            self.kind == "cells"
            and cells.bins is None
            and cells.first == cells.last == self.step
            and self.repeat == 1
            and self.delta_slack is _ZERO
            and self.rounding_slack is _ZERO
            and self.lost_mass is _ZERO
            and self.periods is None
        )
        object.__setattr__(self, "plain", plain)
        if self.amount.numerator < 0 or self.repeat < 1 or self.step < 0:
            raise LedgerError(f"a charge needs amount, step >= 0 and repeat >= 1; got {self}")
        if self.periods is not None:
            first, last = self.periods
            if (self.repeat, self.kind) != (1, "cells") or (last is not None and last < first):
                raise LedgerError(
                    "periods go with a single charge of kind cells, the first before the last; got "
                    f"{self}"
                )
        if self.delta_slack is _ZERO and self.rounding_slack is _ZERO:
            return
        if self.delta_slack < 0 or self.rounding_slack < 0:
            raise LedgerError(f"a charge needs delta_slack, rounding_slack >= 0; got {self}")
        if (self.delta_slack or self.rounding_slack) and (self.repeat, self.kind) != (1, "cells"):
            raise LedgerError(f"slack goes with a single charge of kind cells; got {self}")

    def at(self, step: int, **changes: Any) -> Charge:
        """The same charge at another step."""
        first, last, bins = self.offsets
        cells = Cells(first=step + first, last=step + last, bins=bins)
        return dataclasses.replace(self, step=step, cells=cells, **changes)

    @property
    def offsets(self) -> tuple[int, int, tuple[tuple[int, int], ...] | None]:
        """Its cells, seen from its step."""
        return self.cells.first - self.step, self.cells.last - self.step, self.cells.bins

    @property
    def last_step(self) -> int:
        """The last step at which this charge is made."""
        return self.step + self.repeat - 1

    @property
    def source(self) -> tuple[str, str, str, str]:
        """What is charging: one charge per source and step."""
        return self.run, self.query, self.purpose, self.kind

    def to_json(self) -> dict[str, Any]:
        """As stored; defaults are left out."""
        optional = {
            "bins": self.cells.bins,
            "repeat": self.repeat if self.repeat > 1 else None,
            "digest": self.digest,
            "kind": self.kind if self.kind != "cells" else None,
            "tail": str(self.delta_slack) if self.delta_slack else None,
            "drift": str(self.rounding_slack) if self.rounding_slack else None,
            "lost": str(self.lost_mass) if self.lost_mass else None,
            "periods": self.periods,
            "own_periods": self.own_periods,
        }
        return {
            "run": self.run,
            "query": self.query,
            "purpose": self.purpose,
            "step": self.step,
            "amount": str(self.amount),
            "cells": [self.cells.first, self.cells.last],
        } | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Charge:
        """As read."""
        bins = record.get("bins")
        first, last = record["cells"]
        periods, own = record.get("periods"), record.get("own_periods")
        others = ("run", "query", "purpose", "step", "repeat", "digest", "kind")
        return cls(
            cells=Cells(first=first, last=last, bins=bins and tuple((a, b) for a, b in bins)),
            amount=Fraction(record["amount"]),
            delta_slack=Fraction(record.get("tail", 0)),
            rounding_slack=Fraction(record.get("drift", 0)),
            lost_mass=Fraction(record.get("lost", 0)),
            periods=periods and (periods[0], periods[1]),
            own_periods=own and (own[0], own[1]),
            **{name: record[name] for name in others if name in record},
        )


RECENT = 256
"""Newest steps whose digests are held in memory, or the newest batch of them; the file has all."""


@dataclass(kw_only=True)
class KnownRun:
    """What a ledger knows of a run besides its charges: enough to recognise its state directory.

    A state directory can lose files, or be put back from an older copy. The ledger is the witness:
    it is told of every start (epoch) and of every step's input before noise is drawn for it, and
    how many windows have had a key. What does not agree with it is refused (`run_directory.py`).
    """

    dataset: str = ""
    fingerprint: str = ""
    """Of everything that fixes its releases besides the data; "" until it is registered."""
    epoch: str = ""
    """Of its newest start; "" if none was kept in a state directory."""
    reached: int = -1
    """The newest step whose input is known."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the newest steps, in order."""
    types: str = ""
    """Digest of the types of its columns at that step."""
    minted: int = 0
    final: int = 0
    """Windows that have had a key, and those whose keys were erased: from 0 to here, exclusive."""
    finished: int | None = None
    """After how many steps a series was finished: none may follow."""
    erasure: tuple[int, str] | None = None
    """Before which step a unit was last erased from the state, and the digest chain from there."""
    begun: int | None = None
    """The last period of units that any window drawn so far reaches into; None: none was drawn, or
    units are not protected by period."""
    ended: tuple[str, str] | None = None
    """Why the run was ended, and by whom: it never draws again."""
    analyst: str = ""
    """Who asked for it; "" if nobody said."""
    kept: bool = False
    """Does it have a state directory, and so tell of every step before it draws?"""
    voided: bool = False
    """Was its charge given back?"""
    until: int | None = None
    """The last period that it may begin, where it is to end with one."""

    def apply(self, record: Record) -> None:
        """Take in a record about this run."""
        self.dataset = record["dataset"]
        if "ended" in record:  # its epoch is one that no directory has
            self.ended, self.epoch = (record["ended"], record["who"]), record["epoch"]
        elif "begun" in record:
            known = record["begun"] if self.begun is None else self.begun
            self.begun = max(known, record["begun"])
        elif "fingerprint" in record:
            self.fingerprint, self.analyst = record["fingerprint"], record.get("analyst", "")
            self.kept = self.kept or record.get("kept", False)
        elif "voided" in record:
            self.voided = True
        elif "until" in record:
            self.until = record["until"]
        elif "epoch" in record:
            self.epoch, self.kept = record["epoch"], True
        elif "reached" in record:
            last, digests = record["reached"], digests_by_step(record)
            self.digests.update(digests)
            self.reached, self.types = max(self.reached, last), record["types"]
            while len(self.digests) > max(RECENT, len(digests)):
                del self.digests[next(iter(self.digests))]
        elif "minted" in record:
            self.minted = max(self.minted, record["minted"])
            self.final = max(self.final, record["final"])
        elif "finished" in record:
            self.finished = record["finished"]
        elif "erasure" in record:
            self.erasure = (record["erasure"], record["digest"])

    def snapshot(self) -> KnownRun:
        """A copy that does not change."""
        return dataclasses.replace(self, digests=dict(self.digests))

    def records(self, run: str) -> list[Record]:
        """Records that, applied to a new one, make this one again."""
        facts: list[Record] = []
        if self.fingerprint:
            facts.append(registration(self.fingerprint, self.analyst, kept=self.kept))
        if self.voided:
            facts.append({"voided": True})
        if self.until is not None:
            facts.append({"until": self.until})
        if self.epoch:
            facts.append({"epoch": self.epoch})
        if self.digests:
            digests = [self.digests[step] for step in sorted(self.digests)]
            facts.append({"reached": self.reached, "digests": digests, "types": self.types})
        if self.minted or self.final:
            facts.append({"minted": self.minted, "final": self.final})
        if self.finished is not None:
            facts.append({"finished": self.finished})
        if self.erasure is not None:
            facts.append({"erasure": self.erasure[0], "digest": self.erasure[1]})
        if self.begun is not None:
            facts.append({"begun": self.begun})
        if self.ended is not None:
            because, who = self.ended
            facts.append({"ended": because, "who": who, "epoch": self.epoch})
        return [{"dataset": self.dataset, "run": run} | fact for fact in facts]


def registration(fingerprint: str, analyst: str, *, kept: bool) -> Record:
    """A run's first record; who asked, and that it is kept, only where that is so."""
    more = {"analyst": analyst} if analyst else {}
    return {"fingerprint": fingerprint} | more | ({"kept": True} if kept else {})


def digests_by_step(record: Record) -> dict[int, str]:
    """The digests of a record that says how far a run has come."""
    digests = record["digests"]
    digests = digests.split() if isinstance(digests, str) else digests  # folded
    return dict(enumerate(digests, start=record["reached"] + 1 - len(digests)))


def is_about_run(record: Record) -> bool:
    """Is this a record about a run, not a book, a charge or a settlement?"""
    return "run" in record and "amount" not in record


@storable("interval")
@dataclass(frozen=True, kw_only=True)
class Interval:
    """A test that stays open over several steps, charged once to every window it overlaps."""

    purpose: str
    start: int
    amount: Fraction = Fraction(0)
    run: str = ""


@storable("paid")
@dataclass(frozen=True, kw_only=True)
class Paid:
    """Values that were paid for when they came, with all that later draws will read of them.

    Draws under it must be such that, however many of the values change, all draws together cost at
    most what was paid for the changed ones.
    """

    purpose: str
    run: str = ""


@storable("cover")
@dataclass(frozen=True, kw_only=True)
class Cover:
    """One charge for all Gaussian noise of a mechanism over steps `first` to `last`.

    Noise drawn under it must be such that, whatever one event changes, the squared changes of all
    values together, each over its own noise, cost at most `amount`.
    """

    purpose: str
    first: int
    last: int
    amount: Fraction
    run: str = ""
