"""Addressed random blocks: AES-256 under keys that only the secret and the address determine.

A *stream key* is a CMAC of the whole address, so two addresses share nothing. Inside a stream each
draw owns 2^32 blocks that nobody else reads:

    vector mode   AES(step: 48 bits | coordinate: 48 bits | counter: 32 bits)
    keyed mode    AES(AES(key id: 128 bits) xor (step: 64 bits | counter: 32 bits)), a fixed-length
                  CBC-MAC of two blocks

and the counter itself is `attempt: 20 | lane: 2 | extension: 10`, because exact samplers read a
variable number of bits: a rejected attempt moves to the next attempt, an undecided comparison asks
for extensions of its own lane, and neither can run into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpstream.compiled import njit
from dpstream.errors import InvalidParameter, NoiseExhausted, NoiseReuse
from dpstream.privacy.state.secret import derive
from dpstream.records import Integers, Words

Mode = Literal["vector", "keyed"]

NOISE_VERSION = 1
"""Part of every address: a change to any sampler's use of its bits must change this number."""

ATTEMPTS, LANES, EXTENSIONS = 1 << 20, 1 << 2, 1 << 10
MAX_STEP = MAX_COORDINATE = (1 << 48) - 1
SMALL: int = 64
"""Draws of at most this many coordinates share blocks that are made for several steps at once."""

_BLOCK = 16
_AHEAD = 1024  # blocks made at a time for small draws: one call of AES costs more than they do


def _fixed(text: str, width: int, field: str) -> bytes:
    """Length byte, UTF-8, zero padding: injective and always `width` bytes long."""
    raw = text.encode()
    if len(raw) >= width:
        raise InvalidParameter(
            f"the noise address field {field} must be shorter than {width} bytes; "
            f"got {len(raw)} bytes ({text[:40]!r}...); use a shorter name or its digest"
        )
    return bytes([len(raw)]) + raw.ljust(width - 1, b"\0")


@dataclass(frozen=True, kw_only=True)
class Address:
    """What a stream of noise is for. Two addresses that differ anywhere have independent noise."""

    run: bytes
    query: str = ""
    column: str = ""
    window: int = 0
    purpose: str

    def __post_init__(self) -> None:
        if len(self.run) != 16:
            raise InvalidParameter(f"a run id must be 16 bytes; got {len(self.run)}")

    def encode(self, mode: Mode) -> bytes:
        """Injective, fixed-width: 16 + 64 + 64 + 8 + 48 + 8 + 4 = 212 bytes."""
        return b"".join(
            (
                self.run,
                _fixed(self.query, 64, "query"),
                _fixed(self.column, 64, "column"),
                self.window.to_bytes(8, "big", signed=True),
                _fixed(self.purpose, 48, "purpose"),
                _fixed(mode, 8, "mode"),
                NOISE_VERSION.to_bytes(4, "big"),
            )
        )


class Stream:
    """The blocks of one address. Steps only move forward: a second draw at a step raises."""

    def __init__(self, key: bytes, address: Address, mode: Mode = "vector") -> None:
        self.address, self.mode = address, mode
        cipher = Cipher(algorithms.AES(derive(key, address.encode(mode))), modes.ECB())
        self._aes: Any = cipher.encryptor()
        self._last: tuple[int, set[int]] = (-1, set())
        self._ahead = (0, 0, 0, np.empty((0, 2), dtype="<u8"))  # first step, steps, width, words

    def at(self, step: int, size: int) -> Draws:
        """`size` draws at `step`, one per coordinate."""
        if self.mode != "vector":
            raise InvalidParameter("this noise stream is keyed; use at_keys(step, ids)")
        if size > MAX_COORDINATE:
            raise InvalidParameter(f"a vector draw has at most 2^48 coordinates; got {size}")
        self._refuse_reuse(step, 0)
        return VectorDraws(self, step, size)

    def at_keys(self, step: int, ids: Words, part: int = 0, *, distinct: bool = False) -> Draws:
        """One draw per 128-bit key id (rows of two words) at `step`.

        `part` names a disjoint share of the keys (a hash bucket): each share draws once a step.
        Equal ids would share noise and are refused; `distinct` skips that check for tables whose
        ids cannot repeat.
        """
        if self.mode != "keyed":
            raise InvalidParameter("this noise stream is a vector stream; use at(step, size)")
        if not distinct and len(np.unique(np.asarray(ids), axis=0)) < len(ids):
            raise NoiseReuse("two keys of a draw have the same id and would share their noise")
        self._refuse_reuse(step, part)
        return KeyedDraws(self, step, ids)

    def _refuse_reuse(self, step: int, part: int) -> None:
        last, parts = self._last
        if not 0 <= step <= MAX_STEP:
            raise InvalidParameter(f"a noise step must be in [0, 2^48); got {step}")
        if step < last or (step == last and part in parts):
            raise NoiseReuse(
                f"noise for purpose {self.address.purpose!r} was already drawn at step {last}; "
                f"asked again at step {step}; one call per purpose and step, in order"
            )
        self._last = (step, parts | {part} if step == last else {part})

    def first_blocks(self, step: int, size: int) -> Words:
        """Attempt 0 of the first `size` coordinates at `step`, for `size` below 2^32.

        If they are few, the blocks of the steps that follow are made along with them. They are a
        function of the address alone, as always; nobody reads them before a draw of their step
        asks for them.
        """
        first, steps, width, words = self._ahead
        if size > width or not first <= step < first + steps:
            first, width = step, max(size, min(width, SMALL))
            steps = min(max(_AHEAD // max(width, 1), 1), MAX_STEP - step + 1)
            words = np.empty((steps * width, 2), dtype="<u8")
            _fill_ahead(words, step, width)
            words = self.encrypt(words)
            self._ahead = (first, steps, width, words)
        start = (step - first) * width
        return words[start : start + size]

    def encrypt(self, blocks: Words) -> Words:
        """AES over rows of two little-endian words, in whatever order they come."""
        out = np.empty(blocks.nbytes + _BLOCK - 1, dtype=np.uint8)
        self._aes.update_into(blocks.reshape(-1).view(np.uint8), out)
        return out[: blocks.nbytes].view("<u8").reshape(-1, 2)


class Draws:
    """Numbered draws, each with its own attempts, lanes and extensions."""

    def __init__(self, stream: Stream, step: int, size: int) -> None:
        self.stream, self.step, self.size = stream, step, size
        self._used = False

    def use(self) -> None:
        """Each sampler calls this once: two samplers on the same bits would be dependent."""
        if self._used:
            raise NoiseReuse(f"the draws of step {self.step} were already used by a sampler")
        self._used = True

    def blocks(self, which: Integers, counters: Integers) -> Words:
        """Row i: the two words of draw which[i] at counters[i] (or at the one counter given)."""
        out = np.empty((len(which), 2), dtype="<u8")
        self._fill(out, which, counters)
        return self.stream.encrypt(out)

    def between(self, start: int, stop: int) -> Callable[[int], Words]:
        """The blocks of draws `start` to `stop` at one counter after another."""
        which = np.arange(start, stop)
        return lambda number: self.blocks(which, np.array([number]))

    def extension(self, draw: int, attempt: int, lane: int, number: int) -> int:
        """128 more bits for a comparison that the first block left undecided."""
        if number >= EXTENSIONS:
            raise NoiseExhausted(f"draw {draw} at step {self.step} asked for too many bits")
        which, counters = np.array([draw]), np.array([counter(attempt, lane, number)])
        low, high = self.blocks(which, counters)[0]
        return int(high) << 64 | int(low)

    def first(self, largest: int = SMALL) -> Words | None:
        """The blocks of every draw's attempt 0, if they are at most `largest` and a vector's."""
        return None

    def _fill(self, out: Words, which: Integers, counters: Integers) -> None:
        raise NotImplementedError  # the two kinds of draws below fill their own way


class VectorDraws(Draws):
    """Draws numbered by coordinate."""

    def first(self, largest: int = SMALL) -> Words | None:
        """From those that the stream has made, for several steps if draws are few."""
        return self.stream.first_blocks(self.step, self.size) if self.size <= largest else None

    def _fill(self, out: Words, which: Integers, counters: Integers) -> None:
        _fill_vector(out, self.step, which, counters)


class KeyedDraws(Draws):
    """Draws numbered by row of a table of 128-bit key ids; the first AES pass is done once."""

    def __init__(self, stream: Stream, step: int, ids: Words) -> None:
        super().__init__(stream, step, len(ids))
        self._ids = np.ascontiguousarray(ids, dtype="<u8")

    @cached_property
    def _masked(self) -> Words:
        return self.stream.encrypt(self._ids)

    def between(self, start: int, stop: int) -> Callable[[int], Words]:
        """The same with both AES passes over a part of the ids, which stays in the cache."""
        masked = self.stream.encrypt(self._ids[start:stop])

        def blocks(number: int) -> Words:
            out = np.empty((stop - start, 2), dtype="<u8")
            _fill_all_keyed(out, masked, self.step, number)
            return self.stream.encrypt(out)

        return blocks

    def _fill(self, out: Words, which: Integers, counters: Integers) -> None:
        _fill_keyed(out, self._masked, self.step, which, counters)


def counter(attempt: int, lane: int = 0, extension: int = 0) -> int:
    """The 32-bit counter of a block; running out of attempts raises."""
    if attempt >= ATTEMPTS:
        raise NoiseExhausted("a draw used up its 2^20 attempts; its sampler rejects too much")
    return attempt << 12 | lane << 10 | extension


@njit(cache=True, nogil=True)
def _fill_vector(out, step, which, counters):  # type: ignore[no-untyped-def]
    """Blocks of vector mode: step 48 | coordinate 48 | counter 32."""
    single = counters.shape[0] == 1
    for row in range(which.shape[0]):
        coordinate = np.uint64(which[row])
        out[row, 0] = (np.uint64(step) << np.uint64(16)) | (coordinate >> np.uint64(32))
        out[row, 1] = ((coordinate & np.uint64(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(
            counters[0 if single else row]
        )


@njit(cache=True, nogil=True)
def _fill_ahead(out, step, width):  # type: ignore[no-untyped-def]
    """Attempt 0 of coordinates 0 to `width` - 1 at `step` and the steps after it, in vector mode.

    `width` < 2^32.
    """
    for row in range(out.shape[0]):
        out[row, 0] = np.uint64(step + row // width) << np.uint64(16)
        out[row, 1] = np.uint64(row % width) << np.uint64(32)


@njit(cache=True, nogil=True)
def _fill_keyed(out, masked, step, which, counters):  # type: ignore[no-untyped-def]
    """Second blocks of keyed mode: AES(key id) xor (step 64 | counter 32)."""
    single = counters.shape[0] == 1
    for row in range(which.shape[0]):
        out[row, 0] = masked[which[row], 0] ^ np.uint64(step)
        out[row, 1] = masked[which[row], 1] ^ np.uint64(counters[0 if single else row])


@njit(cache=True, nogil=True)
def _fill_all_keyed(out, masked, step, counter):  # type: ignore[no-untyped-def]
    """The same of every row, in order, at one counter."""
    for row in range(out.shape[0]):
        out[row, 0] = masked[row, 0] ^ np.uint64(step)
        out[row, 1] = masked[row, 1] ^ np.uint64(counter)
