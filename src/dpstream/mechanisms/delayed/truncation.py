"""Truncate values at a bound that is chosen privately, so that less noise is needed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from dpstream.errors import InvalidParameter
from dpstream.mechanisms import find, name_of
from dpstream.mechanisms.base import SeriesMechanism, Spender, whole
from dpstream.mechanisms.parts.batches import (
    BatchMechanism,
    DelayedMechanism,
    GroupedMechanism,
    LabelledBatch,
    SharedMechanism,
    releases,
)
from dpstream.mechanisms.parts.grouping import History
from dpstream.privacy.amounts import Amount, on_grid, positive
from dpstream.privacy.ledger.charges import Cells, Paid
from dpstream.privacy.sensitivity import truncation_change
from dpstream.privacy.state.serial import storable
from dpstream.records import Integers, Release


def candidate_bounds(lo: int, hi: int, count: int) -> Integers:
    """Equally spaced bounds above `lo` up to `hi`, on the grid, without repetition."""
    return np.unique(lo + np.maximum(1, np.arange(1, count + 1) * (hi - lo) // count))


def bound_scores(values: Integers, bounds: Integers, lo: int, hi: int, saved: Fraction) -> Integers:
    """Twice the score of every bound, in grid steps; the more the better.

    Truncating at tau saves, for each of m values, `saved` (hi - tau) of error from noise, and costs
    max(v - tau, 0) for a value v. Of each value (v - lo)/2 is added to all scores alike, which
    changes no difference between them and halves what one value can move: by half of the range, up
    or down, instead of by the whole range one way. The exponential mechanism then chooses as well
    as if it were told that all scores move one way.

    Guarantee: one value moves every score by at most `truncation_change`.

    >>> bound_scores(np.array([2, 3, 10]), np.array([5, 10]), 0, 10, Fraction(0)).tolist()
    [5, 15]
    >>> bound_scores(np.array([2, 3, 10]), np.array([5, 10]), 0, 10, Fraction(1)).tolist()
    [35, 15]
    """
    above = np.maximum(values[:, None] - bounds[None, :], 0).sum(axis=0)
    both = int((values - lo).sum()) - 2 * above
    saving = [int(2 * saved * len(values) * (hi - int(b))) for b in bounds]
    total: Integers = both + np.array(saving, np.int64)
    return total


def unsampled_mask(labels: Integers, every: int) -> Integers:
    """0 for every `every`-th value of each group, in the order of the steps; 1 for the others.

    >>> unsampled_mask(np.array([[0], [0], [7], [0], [7], [0]]), 2)[:, 0].tolist()
    [1, 0, 1, 1, 0, 0]
    """
    keep = np.ones_like(labels)
    for j in range(labels.shape[1]):
        for label in np.unique(labels[:, j]):
            keep[np.flatnonzero(labels[:, j] == label)[every - 1 :: every], j] = 0
    return keep


def parse_options(options: Any) -> tuple[tuple[str, Any], ...]:
    """(name, value) pairs; "name=value" texts are taken too."""
    pairs = []
    for option in (options,) if isinstance(options, str) else options:
        name, value = option.split("=", 1) if isinstance(option, str) else option
        if isinstance(value, str):
            value = int(value) if value.isdigit() else value
            value = {"true": True, "false": False}.get(str(value).lower(), value)
        pairs.append((name, value))
    return tuple(pairs)


_NOISE, _MOST = Fraction(1414, 1000), Fraction(1, 4)
_FAMILY = ("epsilon", "lo", "hi", "quantum", "delay")


@storable("truncation state")
@dataclass(frozen=True, kw_only=True, eq=False)
class TruncationState:
    """The exact values of this batch, the bound, and the state of the mechanism inside."""

    values: History
    count: int
    batch: int
    bound: int
    inside: Any


@dataclass(frozen=True, kw_only=True)
class SensitivityTruncation(
    DelayedMechanism,
    identity="sensitivity_truncation",
    keys="inside options every share candidates sampled",
):
    """Any event-level mechanism, on values truncated at a bound that is renewed now and then.

    `inside`: the mechanism's name; `options`: its other parameters, as (name, value) pairs. In
    Python, `SensitivityTruncation.of(mechanism)` takes both from a mechanism. The bound is one of
    `candidates` equally spaced ones, renewed in the first of `every` delays from that batch's
    values with `share` of what publishes them; a mechanism that works in batches uses it at once,
    any other from the next batch on. `sampled` = k: every k-th value of each group chooses the
    bound with all of its share, is not read again and gets its group's value. When to use it: a few
    values are far above the rest, and a public bound near the rest is not known.

    Guarantee: event-level epsilon-DP: choosing a bound costs eps_s to each value of that batch,
        which the mechanism inside then lacks (or has never read the value); truncated at tau, a
        value moves by tau - lo at most.
    Unit: one value, replaced by any other in [`lo`, `hi`].
    Delay: that of the mechanism inside, `delay` steps at most.
    Paper: Li, Qin, Ren, Gong, Feng, Hong, Wang, "Delay-allowed Differentially Private Data Stream
        Release", 2025; the exponential mechanism with centred scores chooses, and the error saved
        is what a value in a public range can have.

    >>> from dpstream import release
    >>> inside = {"delay": 20, "inside": "buc_order", "options": (("bucket", 5),)}
    >>> low = SensitivityTruncation(epsilon=20, lo=0, hi=1000, **inside)
    >>> bool(release(low, [5] * 60, secret=bytes(32), run_id=bytes(16)).values.max() <= 100)
    True
    """

    inside: str = "contin_group"
    options: tuple[tuple[str, Any], ...] = ()
    every: int = 5
    share: Amount = Fraction(1, 2)
    candidates: int = 20
    sampled: int = 0
    publishes_stddev: ClassVar[bool] = False
    why_least: ClassVar[str] = "a bound is chosen from a batch of values"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "options", parse_options(self.options))
        for name, least in (("every", 1), ("candidates", 2), ("sampled", 0)):
            object.__setattr__(self, name, whole(getattr(self, name), name, at_least=least))
        object.__setattr__(self, "share", positive(self.share, "share"))
        if Fraction(self.share) >= 1:
            raise InvalidParameter(f"share must be below 1; got {self.share}")
        if not issubclass(find(self.inside), SeriesMechanism) or find(self.inside) is type(self):
            raise InvalidParameter(
                f"inside must be an event-level mechanism with lo and hi; got {self.inside!r}"
            )
        if self.sampled == 1 or (self.sampled and not self.batched):
            why = "nothing would be left to publish; take 2 or more"
            if not self.batched:
                why = f"{self.inside} does not group values in batches; take 0"
            raise InvalidParameter(f"sampled={self.sampled} is not possible: {why}")
        _ = self.untruncated  # its own checks

    def written(self) -> dict[str, Any]:
        """The mechanism inside has keys for its parameters, too."""
        inside: Any = find(self.inside)
        options = tuple((inside.written_keys[name], value) for name, value in self.options)
        return super().written() | {"options": options}

    @classmethod
    def of(cls, mechanism: Any, **parameters: Any) -> SensitivityTruncation:
        """Around a mechanism, with its epsilon, range and delay (or the `delay` given)."""
        own = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
        family = {name: own.pop(name) for name in _FAMILY if name in own}
        if "delay" not in family and "delay" not in parameters:
            raise InvalidParameter(
                f"{name_of(mechanism)} has no delay; say from how many steps a bound is chosen: "
                "delay=..."
            )
        given = {"inside": name_of(mechanism), "options": tuple(own.items())}
        return cls(**(family | given | parameters))

    @cached_property
    def batched(self) -> bool:
        """Does the mechanism inside publish whole batches?"""
        return issubclass(find(self.inside), BatchMechanism)

    @cached_property
    def untruncated(self) -> Any:
        """The mechanism inside, for values in all of the range."""
        return _inside(self, self.grid_range[1])

    @cached_property
    def bounds(self) -> Integers:
        """What may be chosen."""
        return candidate_bounds(*self.grid_range, self.candidates)

    @cached_property
    def for_bound(self) -> Fraction:
        """eps_s, what a choice costs."""
        publishing = self.untruncated.for_values if self.batched else self.budget
        return on_grid(publishing * Fraction(self.share))

    def step(
        self, state: TruncationState | None, x: Integers, spend: Spender
    ) -> tuple[Any, list[Release]]:
        """Truncate, and let the mechanism inside go on."""
        if state is None:
            values = History.of(bins=len(x), longest=self.delay, dtype=np.int64)
            state = TruncationState(
                values=values, count=0, batch=0, bound=self.grid_range[1], inside=None
            )
        state = replace(state, values=state.values.append(x), count=state.count + 1)
        low = np.minimum(x, state.bound)
        if self.batched:
            inside = _inside(self, state.bound)
            batch = state.inside or inside.open_batch(len(x), inside.no_groups(len(x)))
            state = replace(state, inside=inside.take(batch, low, spend))
            return self._close(state, spend) if state.count == self.delay else (state, [])
        now = _inside(self, state.bound, choosing=self._chooses(state))
        began = now.start() if state.inside is None else state.inside
        after, out = now.step(began, low, spend)
        state = replace(state, inside=after)
        return self._turn(state, out, spend) if state.count == self.delay else (state, out)

    def finish(self, state: TruncationState | None, spend: Spender) -> tuple[Any, list[Release]]:
        """The last batch, however short, in the same way."""
        if state is None or (self.batched and state.count == 0) or state.inside is None:
            return state, []
        if self.batched:
            return self._close(state, spend)
        now = _inside(self, state.bound, choosing=self._chooses(state))
        after, out = now.finish(state.inside, spend)
        return replace(state, inside=after), out

    def _chooses(self, state: TruncationState) -> bool:
        """Is a bound chosen from this batch?"""
        return state.batch % self.every == 0

    def _block(self, state: TruncationState) -> Integers:
        """The exact values of this batch, steps x bins."""
        return state.values.last(state.count).T

    def _turn(
        self, state: TruncationState, out: list[Release], spend: Spender
    ) -> tuple[TruncationState, list[Release]]:
        """End of a batch: with another bound or epsilon, what is inside begins anew."""
        bound, chose = state.bound, self._chooses(state)
        if chose:
            cells = Cells(first=spend.step - state.count + 1, last=spend.step)
            bound = self._choose(self._block(state).ravel(), cells, self.for_bound, spend)
        after = replace(state, count=0, batch=state.batch + 1, bound=bound)
        if bound == state.bound and chose == self._chooses(after):
            return after, out
        now = _inside(self, state.bound, choosing=chose)
        _, last = now.finish(state.inside, spend)
        return replace(after, inside=None), out + last

    def _close(
        self, state: TruncationState, spend: Spender
    ) -> tuple[TruncationState, list[Release]]:
        """End of a batch of a mechanism that publishes batches."""
        inside, batch, bound = _inside(self, state.bound), state.inside, state.bound
        cells = Cells(first=spend.step - state.count + 1, last=spend.step)
        block, (_, labels) = self._block(state), batch.contents()
        keep = paid = None
        if self._chooses(state) and self.sampled:
            epsilon = inside.for_values
            labels = inside.label(np.minimum(block, bound), labels, cells, spend)
            paid = spend.pay(
                block, sensitivity=self.change, epsilon=epsilon, purpose="values", cells=cells
            )
            keep = unsampled_mask(labels, self.sampled)
            bound = self._choose(block[keep == 0], cells, epsilon, spend, paid)
            after = _inside(self, bound)
            publisher = inside if inside.labels_read_range else after
        else:
            if self._chooses(state):
                bound = self._choose(block.ravel(), cells, self.for_bound, spend)
            # labels that are made under the new bound are paid for by its parts
            publisher = after = _inside(self, bound)
            epsilon = min(inside.for_values, after.for_values)
            epsilon -= self.for_bound if self._chooses(state) else 0
            labels = after.label(np.minimum(block, bound), labels, cells, spend)
        groups = batch.groups if bound == state.bound else after.no_groups(block.shape[1])
        known = publisher.next_groups(groups if publisher is after else batch.groups, labels)
        labelled = LabelledBatch(
            block=np.minimum(block, bound),
            labels=labels,
            epsilon=epsilon,
            cells=cells,
            groups=known,
            keep=keep,
            paid=paid,
        )
        values = publisher.answer(labelled, spend)
        following = after.open_batch(block.shape[1], known if publisher is after else groups)
        state = replace(state, count=0, batch=state.batch + 1, bound=bound, inside=following)
        return state, releases(cells.first, values)

    def _choose(
        self,
        values: Integers,
        cells: Cells,
        epsilon: Fraction,
        spend: Spender,
        paid: Paid | None = None,
    ) -> int:
        """A bound for these values."""
        if len(values) == 0:
            return self.grid_range[1]
        inside = self.untruncated
        together = inside.together if isinstance(inside, GroupedMechanism) else 1
        published = inside.for_values if isinstance(inside, SharedMechanism) else self.budget
        saved = min(_NOISE / (published * together), _MOST)
        chosen = spend.choose(
            bound_scores(values, self.bounds, *self.grid_range, saved),
            sensitivity=truncation_change(self.change),
            epsilon=epsilon,
            purpose="bound",
            **({"cells": cells} if paid is None else {"interval": paid}),
        )
        return int(self.bounds[chosen])


@lru_cache(maxsize=256)
def _inside(outer: SensitivityTruncation, bound: int, choosing: bool = False) -> Any:
    """The mechanism inside, for values truncated at `bound`; `choosing` leaves it less."""
    cls: Any = find(outer.inside)
    names = {field.name for field in fields(cls)}
    less = outer.for_bound if choosing else 0
    family = {"epsilon": outer.budget - less, "lo": outer.lo, "quantum": outer.quantum}
    family |= {"hi": bound * outer.range[2], "delay": outer.delay}
    given = {name: value for name, value in family.items() if name in names}
    unknown = sorted({name for name, _ in outer.options} - names - set(_FAMILY))
    if unknown:
        raise InvalidParameter(f"{outer.inside} has no parameter {unknown[0]!r}")
    return cls(**(dict(outer.options) | given))
