"""A running private count or sum, in a few lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.counting.buffered import BufferedLinearToeplitz
from dpstream.counting.noise_process import KeyedNoise, advance_noise
from dpstream.counting.noise_scale import calibrate
from dpstream.errors import InvalidInput, InvalidParameter
from dpstream.mechanisms.base import as_block, whole
from dpstream.mechanisms.counters.blt import BltCounter
from dpstream.mechanisms.counters.factorised_counter import CountingParameters
from dpstream.mechanisms.counters.unbounded import UnboundedCounter
from dpstream.mechanisms.runner import Runner
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.ledger.charges import Cover, Terms, chain_digest
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.spend import Spend, noise_versions
from dpstream.privacy.state import Secret, mint_run_id
from dpstream.privacy.state.identity import canonical
from dpstream.privacy.state.run_directory import GivenLedger
from dpstream.records import Integers, Reals, Release, Words


@dataclass(frozen=True, kw_only=True)
class KeyedCounting(CountingParameters, identity="keyed_counter", keys="steps buffers"):
    """Parameters of running sums per key in floats, in GDP; they need `epsilon` and `delta`."""

    steps: int
    buffers: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole(self.steps, "steps", at_least=1))
        if self.epsilon is None or self.delta is None:
            raise InvalidParameter(
                f"a counter with keys needs epsilon and delta; got epsilon={self.epsilon}, "
                f"delta={self.delta}"
            )
        super().__post_init__()
        _ = self.calibrated  # refuses streams that are too long for floats

    @cached_property
    def process(self) -> BufferedLinearToeplitz:
        """The scheme's matrices."""
        return BufferedLinearToeplitz(steps=self.steps, buffers=self.buffers)

    @cached_property
    def calibrated(self) -> tuple[Fraction, Fraction, FloatError]:
        """mu^2, sigma in grid steps, and what floats add to the promise."""
        assert self.epsilon is not None
        assert self.delta is not None
        epsilon, delta = Fraction(self.epsilon), Fraction(self.delta)
        return calibrate(self.process, change=self.change, epsilon=epsilon, delta=delta)

    def terms(self) -> Terms:
        """Event-level GDP."""
        mu_squared, change = self.calibrated[0], self.change_in_words()
        return Terms(unit="event", total=mu_squared, measure="mu_squared", change=change)

    def stddev(self, step: int) -> float:
        """Standard deviation of the noise in step `step` (from 1), rounding included."""
        sigma, quantum = float(self.calibrated[1]), float(Fraction(self.quantum))
        return quantum * float(np.hypot(sigma * self.process.row_norm(step), 12**-0.5))

    def step(
        self, noise: KeyedNoise | None, joining: Words, step: int, spend: Spend, cover: Cover
    ) -> tuple[KeyedNoise, Integers]:
        """Move everybody to `step` (from 1) and let `joining` in; noise in grid steps, per key.

        The arrays of `noise` (None: nobody has joined) become those of the answer.
        """

        def draw(ids: Words, purpose: str, each: int) -> Reals:
            distinct = purpose == "step"  # whoever joins may be named twice, and is checked
            return spend.normals(ids, each=each, purpose=purpose, cover=cover, distinct=distinct)

        return advance_noise(self.process, noise, joining, step, float(self.calibrated[1]), draw)


_LARGEST_SUM = 1 << 62  # a step adds less than 2^53, so a sum is seen here before it could wrap


class Counter:
    """A running count or sum of a stream, published after every step with its error.

    Give `epsilon` and `delta` (or `rho`), and `steps` if the number of steps is known: the error is
    smaller then. One event moves one value of one step by at most `sensitivity`; with `lo` and `hi`
    values are clamped to that public range and one of them may be replaced by any other.

    >>> counter = Counter(epsilon=1, delta=1e-9, steps=1000)
    >>> first, second = counter.add(120), counter.add(95)
    >>> second.step, second.values.shape, bool(abs(second.values[0] - 215) < 10 * second.stddev[0])
    (1, (1,), True)

    With `keys=True` each key has a sum of its own, and keys may join at any step. Which keys there
    are, and when they join, must be public; what is counted for them is protected.

    >>> visits = Counter(epsilon=1, delta=1e-9, steps=365, keys=True)
    >>> day = visits.add({"north": 30, "south": 12})
    >>> day = visits.add({"south": 15, "west": 4})
    >>> visits.keys, day.values.shape
    (['north', 'south', 'west'], (3,))
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        keys: bool = False,
        secret: Secret | bytes | str | Path | None = None,
        run_id: bytes | None = None,
        ledger: GivenLedger = None,
        dataset: str = "stream",
        **parameters: Any,
    ) -> None:
        if keys and steps is None:
            raise InvalidParameter("a counter with keys needs steps: how many there will be")
        self._counting: Runner | _Keyed
        if steps is not None and keys:
            keyed = KeyedCounting(steps=steps, **parameters)
            self._counting = _Keyed(keyed, secret, run_id, ledger, dataset)
            return
        exact = (
            UnboundedCounter(**parameters)
            if steps is None
            else BltCounter(steps=steps, **parameters)
        )
        self._counting = Runner(exact, secret=secret, run_id=run_id, ledger=ledger, dataset=dataset)

    def add(self, counts: Any, *, keys: Iterable[Any] | None = None) -> Release:
        """Take one step's counts; publish the running sums.

        Without keys: a number, or one number per bin. With keys: a mapping from key to count, or
        counts with `keys` in the same order; a key that is not named adds 0. `values` and `stddev`
        are in the order of `keys`.
        """
        if isinstance(self._counting, _Keyed):
            return self._counting.add(counts, keys)
        if keys is not None or isinstance(counts, Mapping):
            raise InvalidInput("this counter has no keys; make it with Counter(keys=True, ...)")
        return self._counting.step(counts)[0]

    @property
    def keys(self) -> list[Any]:
        """Every key so far, in the order of joining."""
        return list(self._counting.rows) if isinstance(self._counting, _Keyed) else []

    @property
    def steps_done(self) -> int:
        """How many steps were published."""
        return self._counting.steps_done


class _Keyed:
    """Many keys: exact integer sums, float noise rounded to the grid."""

    def __init__(
        self,
        mechanism: KeyedCounting,
        secret: Secret | bytes | str | Path | None,
        run_id: bytes | None,
        ledger: GivenLedger,
        dataset: str,
    ) -> None:
        self.mechanism, self.steps_done, self.rows = mechanism, 0, dict[Any, int]()
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        run, run_secret = mint_run_id() if run_id is None else run_id, Secret.of(secret)
        book.admit(dataset, mechanism.terms(), "a counter with keys")
        facts = ("keyed counter", mechanism, dataset, tuple(noise_versions()))
        fingerprint = run_secret.fingerprint(run, canonical(facts))
        book.register(dataset, run.hex(), fingerprint)
        self._spend = Spend(
            run=run, key=run_secret.noise_key(run, fingerprint), ledger=book, dataset=dataset
        )
        self._digest_key, self._chain = run_secret.key("input digest", run), bytes(16)
        self._noise: KeyedNoise | None = None
        self._cover: Cover | None = None
        self._sums = np.zeros(0, np.int64)

    def add(self, counts: Any, keys: Iterable[Any] | None) -> Release:
        step, mechanism = self.steps_done, self.mechanism
        if step >= mechanism.steps:
            raise InvalidInput(f"this counter was made for steps={mechanism.steps}; they are over")
        names, values = _keys_and_counts(counts, keys)
        grid = mechanism.check(as_block(values)[:, 0][None])[0] if names else np.zeros(0, np.int64)
        rows = dict(self.rows)
        places = np.array([rows.setdefault(name, len(rows)) for name in names], np.int64)
        sums = np.concatenate([self._sums, np.zeros(len(rows) - len(self._sums), np.int64)])
        np.add.at(sums, places, grid)
        if sums.size and int(np.abs(sums).max()) >= _LARGEST_SUM:
            raise InvalidInput("a running sum left the integers of 62 bits; use a coarser quantum")
        joining = key_ids(list(rows)[len(self.rows) :])
        content = joining.tobytes() + sums.astype("<i8").tobytes()
        chain = chain_digest(self._digest_key, self._chain, content)
        self._spend.begin(step, lambda _: chain.hex())
        if self._cover is None:
            self._cover = self._spend.cover(mechanism.calibrated[0], last=mechanism.steps - 1)
        self._noise, noise = mechanism.step(
            self._noise, joining, step + 1, self._spend, self._cover
        )
        self.rows, self._sums, self._chain, self.steps_done = rows, sums, chain, step + 1
        published = (sums + noise).astype(np.float64) * float(mechanism.quantum)
        stddev = np.full(len(sums), mechanism.stddev(step + 1))
        return Release(step=step, values=published, paid=True, stddev=stddev)


def _keys_and_counts(counts: Any, keys: Iterable[Any] | None) -> tuple[list[Any], Any]:
    """Names and their counts; each name once."""
    if isinstance(counts, Mapping):
        if keys is not None:
            raise InvalidInput("give keys in the mapping or beside it, not both")
        return list(counts), list(counts.values())
    names = [] if keys is None else list(keys)
    values: npt.NDArray[Any] = np.atleast_1d(np.asarray(counts))
    if keys is None or values.shape != (len(names),):
        raise InvalidInput(
            f"a step needs one count per key; got {values.size} counts and {len(names)} keys"
        )
    if len(set(names)) < len(names):
        raise InvalidInput("each key may be named once in a step; add its counts up first")
    return names, values


def key_ids(names: list[Any]) -> Words:
    """128 bits for each key; different keys have different ids."""
    digests = [hashlib.blake2b(canonical(name).encode(), digest_size=16).digest() for name in names]
    ids: Words = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).astype(np.uint64)
    return ids
