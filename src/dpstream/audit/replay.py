"""Record a run, then replay its noisy answers over neighbouring data.

With every noisy answer frozen, a sound mechanism must ask the same questions in the same order
(no control flow depends on raw data), and no question's exact value may differ between the
neighbours by more than the sensitivity it declared. What the differences cost, added up, is the
privacy loss along this path; it must stay within the promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dpstream.mechanisms.base import Mechanism, Spender
from dpstream.privacy.ledger.charges import Cells, Cover, Interval, Paid, Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.spend import Spend
from dpstream.privacy.state import Secret
from dpstream.records import Integers, Release

_AMOUNTS = ("epsilon", "rho", "amount")


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One question to `spend`: what was asked, the exact value, the noisy answer."""

    kind: str
    step: int
    purpose: str
    value: Integers
    sensitivity: Fraction
    amount: Fraction
    cells: Cells | None
    interval: Interval | Paid | None
    cover: Cover | None
    answer: Any

    def question(self) -> tuple[Any, ...]:
        """What must not depend on raw data: everything but the value and the answer."""
        return (
            *(self.kind, self.step, self.purpose, self.value.shape, self.sensitivity),
            *(self.amount, self.cells, self.interval, self.cover),
        )


class Changed(AssertionError):
    """The neighbour made the mechanism ask something else: raw data steer its control flow."""


def _recorded(kind: str, first: str | None = None) -> Any:
    """A method of `Spend`, recorded; `first`: the name of its first argument, if it is no value."""

    def ask(self: Recorder, value: Any, **asked: Any) -> Any:
        if first is None:
            return self._ask(kind, value, **asked)
        return self._ask(kind, **asked, **{first: value})

    return ask


class Recorder:
    """A Spend that remembers; given `script`, one that repeats the script's answers instead."""

    laplace = _recorded("laplace")
    gaussian = _recorded("gaussian")
    normals = _recorded("normals")
    """Who is asked for must not depend on raw data."""
    choose = _recorded("choose")
    respond = _recorded("respond")
    pay = _recorded("pay")
    cover = _recorded("cover", "amount")
    open_interval = _recorded("open_interval", "epsilon")
    close_interval = _recorded("close_interval", "interval")

    def __init__(self, spend: Spend | None = None, script: Sequence[Call] | None = None) -> None:
        self.step = -1
        self.calls: list[Call] = []
        self._spend, self._script = spend, script

    def begin(self, step: int) -> None:
        """Move to `step`."""
        self.step = step
        if self._spend is not None:
            self._spend.begin(step, lambda _: "")

    def _ask(self, kind: str, value: npt.ArrayLike | None = None, **asked: Any) -> Any:
        exact = np.zeros(0, np.int64) if value is None else np.asarray(value, dtype=np.int64)
        cells = Cells(first=self.step, last=asked["last"]) if "last" in asked else None
        call = Call(
            kind=kind,
            step=self.step,
            purpose=asked.get("purpose", ""),
            value=exact,
            sensitivity=Fraction(asked.get("sensitivity", 1)),
            amount=Fraction(next((asked[name] for name in _AMOUNTS if name in asked), 0)),
            cells=asked.get("cells", cells),
            interval=asked.get("interval"),
            cover=asked.get("cover"),
            answer=None,
        )
        answer = self._answer(call, value, asked)
        self.calls.append(replace(call, answer=answer))
        return answer

    def _answer(self, call: Call, value: npt.ArrayLike | None, asked: dict[str, Any]) -> Any:
        if self._script is None:
            return getattr(self._spend, call.kind)(*(() if value is None else (value,)), **asked)
        position = len(self.calls)
        if position >= len(self._script):
            raise Changed(f"the neighbour asks one question more: {call.question()}")
        old = self._script[position]
        if old.question() != call.question():
            raise Changed(f"asked {old.question()}, the neighbour {call.question()}")
        return old.answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """What the neighbour changed: the loss along the path, and calls beyond their sensitivity."""

    loss: Fraction
    violations: list[str]


def spend_on(terms: Terms, *, secret: bytes, run: bytes = bytes(16)) -> Spend:
    """The real `Spend`, on a ledger of its own with these terms."""
    ledger, key = Ledger(), Secret(secret).key("runner noise", run)
    ledger.open("audit", terms)
    return Spend(run=run, key=key, ledger=ledger, dataset="audit")


def record(
    mechanism: Mechanism, block: Integers, *, secret: bytes, run: bytes
) -> tuple[list[Call], list[Release]]:
    """Run a mechanism on its own book and keep every question and answer."""
    recorder = Recorder(spend_on(mechanism.terms(), secret=secret, run=run))
    return recorder.calls, drive(mechanism, block, recorder)


def replay(
    mechanism: Mechanism,
    neighbour: Integers,
    calls: Sequence[Call],
    *,
    original: Integers | None = None,
) -> Replay:
    """Feed neighbouring data against the recorded answers; raises Changed if questions differ.

    Given the `original` data, a call must also have named the cells whose change has moved it.
    """
    twin = Recorder(script=calls)
    drive(mechanism, neighbour, twin)
    if len(twin.calls) < len(calls):
        raise Changed(f"the neighbour asks only {len(twin.calls)} of {len(calls)} questions")
    loss, violations, moved = Fraction(0), [], set()
    paid: Counter[str] = Counter()  # by purpose: how many of the values paid for have changed
    users = mechanism.terms().unit == "user"
    for old, new in zip(calls, twin.calls, strict=True):
        change, allowed, cost = _compare(old, new, paid)
        if original is not None and old.interval is None and old.kind not in _JOINT:
            declared = _changed_cells(old, original, neighbour, user=users)
            if cost > old.amount * declared:
                violations.append(f"step {old.step}, {old.purpose!r}: moved by cells not named")
        if not allowed:
            violations.append(f"step {old.step}, {old.purpose!r}: moved by {change}")
        if old.kind == "pay":
            paid[old.purpose] += int((old.value != new.value).sum())
        if old.interval is None or isinstance(old.interval, Paid):
            loss += cost
        elif change:
            moved.add(old.interval)
    opened = {call.answer: call.amount for call in calls if call.kind == "open_interval"}
    loss += sum((opened[interval] for interval in moved), Fraction(0))
    return Replay(loss=loss, violations=violations)


def _compare(old: Call, new: Call, paid: Counter[str]) -> tuple[Fraction, bool, Fraction]:
    """By how much a call's value moved, whether it may move so far, and what that costs."""
    moves = np.abs(old.value - new.value)
    change = Fraction(int(moves.max(initial=0) if old.kind == "choose" else moves.sum()))
    if old.kind in ("normals", "cover"):
        return change, not change, Fraction(0)
    if old.kind == "gaussian":  # L2; under a cover the squares of all its calls add up
        squares = Fraction(sum(int(move) ** 2 for move in moves.flat))
        allowed = old.sensitivity**2
        return change, squares <= allowed, old.amount * squares / allowed
    if old.kind == "respond":
        return change, True, old.amount * int((moves != 0).sum())
    if isinstance(old.interval, Paid):  # paid for with the values that it reads
        return change, change <= old.sensitivity * paid[old.interval.purpose], Fraction(0)
    return change, change <= old.sensitivity, old.amount * change / old.sensitivity


_JOINT = ("normals", "cover", "open_interval", "close_interval", "gaussian")
"""Calls that are charged for whole blocks of steps: their cover or interval names the cells."""


def _changed_cells(call: Call, original: Integers, neighbour: Integers, *, user: bool) -> int:
    """How many of the cells that a call named differ between the neighbours, in events.

    Where users are protected a call is charged once for all that a user did until then.
    """
    if user:
        return int((original != neighbour)[: call.step + 1].any())
    cells = call.cells or Cells(first=call.step, last=call.step)
    moved = np.abs(original - neighbour)[cells.first : cells.last + 1]
    if cells.bins is not None:
        moved = np.concatenate([moved[:, a:b] for a, b in cells.bins], axis=1)
    return int((moved != 0).sum())


class SteppedSpender(Spender, Protocol):
    """A Spender that is told which step comes next."""

    def begin(self, step: int) -> None:
        """Move to `step`."""


def drive(mechanism: Mechanism, block: Integers, spend: SteppedSpender) -> list[Release]:
    """Feed a whole stream, step by step."""
    state, releases = mechanism.start(), []
    for step, row in enumerate(block):
        spend.begin(step)
        state, new = mechanism.step(state, row, spend)
        releases += new
    _, last = mechanism.finish(state, spend)
    return releases + last
