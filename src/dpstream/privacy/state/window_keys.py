"""One random key per window, wrapped by the secret, erased when the window is final.

The noise of a window comes from its key alone. Once the key is gone, a later theft of the secret
does not peel the noise off what was published: keys derived from the secret would not give this.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_bytes
from typing import Protocol

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from dpstream.errors import NoiseReuse, StateError
from dpstream.privacy.state.durable_files import (
    create_exclusive,
    erase,
    erase_part,
    make_directory,
    replace,
)
from dpstream.privacy.state.secret import Secret


class WindowKeySource(Protocol):
    """The keys of one query's windows; another query has windows, and keys, of its own."""

    def mint(self, window: int) -> bytes:
        """Make the window's key before its first draw; a second call returns it."""

    def note_content(self, window: int, digest: bytes) -> None:
        """What a window begins with, before its first draw; later it must be the same."""

    def erase(self, window: int) -> None:
        """Forget the window's key for good."""


class WindowKeys:
    """The keys of a state directory's windows: `<window>.key` while open.

    An erased window leaves `<window>.erased`, or, where all windows before it are erased too, only
    a larger number in the file `final`: windows 0 to final - 1 are gone.

    Windows are opened from 0 on, those in between being minted with them. So the file `minted`
    tells a key that is lost from one that never was, and `mint` refuses the first: another key
    would publish a second noisy copy.

    `<window>.begins` is a digest of what a window began with, where that fixes its noise.

    `wrapping`: what wraps keys since a rotation, the newest first; without one `secret` does.
    `run` is in every file, so that those of another run are refused. `witness` is told the two
    numbers, minted and final, whenever they grow and before a new key is used: a ledger that knows
    them notices that this folder was lost, or is an older copy.
    """

    def __init__(
        self,
        folder: Path,
        secret: Secret,
        *,
        run: bytes = b"",
        wrapping: Sequence[Secret] = (),
        derived_for_tests: bool = False,
        witness: Callable[[int, int], None] = lambda minted, final: None,
    ) -> None:
        self._folder, self._run = Path(folder), run
        self._secrets = [*wrapping, secret]
        self._tag = run.hex().encode()
        self._derived, self._witness = secret if derived_for_tests else None, witness
        make_directory(self._folder, mode=0o700)
        for window in self._key_files():
            if self._is_erased(window):  # a kill came between the mark and the key
                self.erase(window)
        for path in self._folder.glob("*.begins"):
            if self._is_erased(int(path.stem)):
                path.unlink()

    def mint(self, window: int) -> bytes:
        """Make the window's key, durably, before its first draw; a second call returns it."""
        self._refuse_erased(window)
        self._mint_up_to(window)
        return self.get(window)

    def get(self, window: int) -> bytes:
        """The key of a window that was minted; a lost one is never replaced by another."""
        self._refuse_erased(window)
        path = self._key_file(window)
        try:
            key = self._unwrap(window, path.read_bytes())
        except FileNotFoundError:
            self._refuse_erased(window)
            raise StateError(
                f"the key of window {window} was never minted, or is lost: restore {path}; "
                "another key would publish a second noisy copy"
            ) from None
        if key is None:
            raise StateError(
                f"{path} does not open with this secret, or is damaged; restore it, or use the "
                "secret that the state directory was made with"
            )
        if self._is_erased(window):  # erased meanwhile: what was just minted goes too
            self.erase(window)
            self._refuse_erased(window)
        return key

    def note_content(self, window: int, digest: bytes) -> None:
        """What a window begins with, before its first draw; later it must be the same."""
        path = self._content_file(window)
        try:
            create_exclusive(path, digest)
        except FileExistsError:
            if path.read_bytes() != digest:
                raise NoiseReuse(
                    f"window {window} began with other keys than it does now ({path} tells): the "
                    "same noise over other groups would reveal their difference, so nothing was "
                    "published; restore the newest state (manifest-*.dps and segments/)"
                ) from None

    def rewrap(self) -> list[int]:
        """Wrap every key anew, by the newest secret; the windows. The keys stay what they are."""
        windows = self.open_windows()
        for window in windows:
            wrapped = aes_key_wrap(self._wrapping_key(window), self.get(window))
            erase_part(self._key_file(window), wrapped)
        return windows

    def erase(self, window: int) -> None:
        """Forget the window's key for good; a second call does nothing.

        The mark comes first: after a kill at any point the key is refused, and the next call, or
        the next opening of the directory, removes what is left of it.
        """
        with self._locked():
            if not self._is_erased(window):
                if window == self.final:
                    self._write("final", window + 1)
                else:
                    create_exclusive(self._tombstone(window), self._tag)
            with suppress(FileNotFoundError):
                erase(self._key_file(window))
            self._content_file(window).unlink(missing_ok=True)
            self._fold()
            minted, final = self.minted, self.final
        self._witness(minted, final)

    def abandon(self, *, minted: int, final: int, together: bool = False) -> list[int]:
        """Give up the windows that an older folder lacks: no key is made for them again.

        `minted`, `final`: as the newest folder had them. Keys that were erased since are erased
        first. `together`: where one is given up, so are all that were open, because what they draw
        depends on the others' tables. Returns the windows that were open then and have lost their
        keys.
        """
        with self._locked():
            older = minted > self.minted or final > self.final
            self._write("final", max(final, self.final))
            for window in [w for w in self._key_files() if w < final]:
                erase(self._key_file(window))
            for path in self._folder.glob("*.erased"):
                if int(path.stem) < final:
                    path.unlink()
            first = self.final if together and older else max(self.minted, final)
            lost = [w for w in range(first, max(minted, self.minted)) if not self._is_erased(w)]
            for window in lost:
                create_exclusive(self._tombstone(window), self._tag)
                with suppress(FileNotFoundError):  # a key that was made and never used
                    erase(self._key_file(window))
            self._write("minted", max(minted, self.minted))
            self._fold()
            return lost

    def open_windows(self) -> list[int]:
        """Windows whose key still exists, in order."""
        return sorted(window for window in self._key_files() if not self._is_erased(window))

    def _fold(self) -> None:
        """Let `final` stand for the tombstones that have come next to it."""
        final = first = self.final
        while self._has_tombstone(final):
            with suppress(FileNotFoundError):  # a kill left it
                erase(self._key_file(final))
            final += 1
        if final > first:
            self._write("final", final)
            for window in range(first, final):
                self._tombstone(window).unlink(missing_ok=True)

    def _mint_up_to(self, window: int) -> None:
        """The keys first, then the mark, both before the caller may draw."""
        if window < 0:
            raise StateError(f"ordered windows are numbered from 0; got {window}")
        with self._locked():
            minted, final = self.minted, self.final
            if window < minted:
                return  # the key is there, was erased, or is lost
            for each in range(max(minted, final), window + 1):
                if not self._is_erased(each):
                    wrapped = aes_key_wrap(self._wrapping_key(each), _draw(each, self._derived))
                    with suppress(FileExistsError):  # a kill left it, never used: use that one
                        create_exclusive(self._key_file(each), wrapped)
            self._write("minted", window + 1)
        self._witness(window + 1, final)

    @property
    def minted(self) -> int:
        """Windows 0 to this one, exclusive, have had a key."""
        return self._number("minted")

    @property
    def final(self) -> int:
        """The keys of windows 0 to this one, exclusive, were erased."""
        return self._number("final")

    def _number(self, name: str) -> int:
        """What `final` or `minted` says; 0 without the file."""
        path = self._folder / name
        try:
            number, _, tag = path.read_bytes().partition(b" ")
        except FileNotFoundError:
            return 0
        self._refuse_other(path, tag)
        if not number.isdigit():
            raise StateError(f"{path} is damaged: it must hold a number; restore it")
        return int(number)

    def _write(self, name: str, number: int) -> None:
        replace(self._folder / name, b" ".join([b"%d" % number, *([self._tag] * bool(self._tag))]))

    def _refuse_other(self, path: Path, tag: bytes) -> None:
        if tag != self._tag:
            raise StateError(f"{path} is damaged, or belongs to another run; restore this run's")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder against other processes and threads: its two numbers only grow."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _is_erased(self, window: int) -> bool:
        # a tombstone goes only after `final` covers it, so this order misses neither
        return self._has_tombstone(window) or 0 <= window < self.final

    def _has_tombstone(self, window: int) -> bool:
        path = self._tombstone(window)
        try:
            self._refuse_other(path, path.read_bytes())
        except FileNotFoundError:
            return False
        return True

    def _refuse_erased(self, window: int) -> None:
        if self._is_erased(window):
            raise StateError(
                f"window {window} is final: its key was erased and no noise is left; if a run goes "
                "back to it, its snapshots are lost: restore them (manifest-*.dps and segments/, "
                "or snapshot.dps), or use a new state directory (a new run, charged anew)"
            )

    def _key_files(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.key")]

    def _key_file(self, window: int) -> Path:
        return self._folder / f"{window}.key"

    def _content_file(self, window: int) -> Path:
        return self._folder / f"{window}.begins"

    def _tombstone(self, window: int) -> Path:
        return self._folder / f"{window}.erased"

    def _unwrap(self, window: int, wrapped: bytes) -> bytes | None:
        """The key, by the newest secret that opens it; None if none does."""
        for secret in self._secrets:
            with suppress(InvalidUnwrap, ValueError):
                return aes_key_unwrap(self._wrapping_key(window, secret), wrapped)
        return None

    def _wrapping_key(self, window: int, secret: Secret | None = None) -> bytes:
        """Of the run and of the window: the key of another one does not open."""
        context = self._run + window.to_bytes(8, "big", signed=True)
        return (secret or self._secrets[0]).key("window keys", context)


class MemoryWindowKeys:
    """Random keys of a run that keeps no state: they end with the process, or when erased.

    >>> keys = MemoryWindowKeys()
    >>> keys.mint(0) == keys.mint(0) != keys.mint(1)
    True
    """

    def __init__(self, *, derived_for_tests: Secret | None = None) -> None:
        self._keys: dict[int, bytes] = {}
        self._erased, self._final = set[int](), 0  # windows 0 to final - 1 are erased too
        self._lock, self._derived = threading.Lock(), derived_for_tests

    def mint(self, window: int) -> bytes:
        """Make the window's key; a second call returns it."""
        with self._lock:
            if window in self._erased or 0 <= window < self._final:
                raise StateError(
                    f"window {window} is final: its key was erased and no noise is left"
                )
            return self._keys.setdefault(window, _draw(window, self._derived))

    def note_content(self, window: int, digest: bytes) -> None:
        """Nothing: no window of a run that keeps no state begins once more."""

    def erase(self, window: int) -> None:
        """Forget the window's key; it is never minted again."""
        with self._lock:
            self._keys.pop(window, None)
            self._erased.add(window)
            while self._final in self._erased:
                self._erased.remove(self._final)
                self._final += 1


def _draw(window: int, derived_for_tests: Secret | None) -> bytes:
    """32 random bytes; in tests, those that a secret gives for the window."""
    if derived_for_tests is None:
        return token_bytes(32)
    return derived_for_tests.key("window key for tests", window.to_bytes(8, "big", signed=True))
