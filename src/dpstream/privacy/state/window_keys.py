"""One random key per window, wrapped by the secret, erased when the window is final.

The noise of a window comes from its key alone. Once the key is gone, a later theft of the secret
does not peel the noise off what was published: keys derived from the secret would not give this.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from secrets import token_bytes

from cryptography.hazmat.primitives.keywrap import (
    InvalidUnwrap,
    aes_key_unwrap,
    aes_key_wrap,
)

from dpstream.errors import StateError
from dpstream.privacy.state.files import create_exclusive, erase, make_directory
from dpstream.privacy.state.secret import Secret


class WindowKeys:
    """The keys of a state directory's open windows: `<window>.key`, then `<window>.erased`."""

    def __init__(self, folder: Path, secret: Secret, *, derived_for_tests: bool = False) -> None:
        self._folder, self._secret = Path(folder), secret
        self._derived = derived_for_tests
        make_directory(self._folder, mode=0o700)

    def mint(self, window: int) -> bytes:
        """Make the window's key, durably, before its first draw; a second call returns it."""
        self._refuse_erased(window)
        path = self._folder / f"{window}.key"
        if not path.exists():
            with suppress(FileExistsError):  # another process minted it first: use that one
                create_exclusive(path, aes_key_wrap(self._wrapping_key(), self._draw(window)))
        return self.get(window)

    def get(self, window: int) -> bytes:
        """The key of a window that was minted; a lost one is never replaced by another."""
        self._refuse_erased(window)
        path = self._folder / f"{window}.key"
        try:
            key = aes_key_unwrap(self._wrapping_key(), path.read_bytes())
        except FileNotFoundError:
            self._refuse_erased(window)
            raise StateError(
                f"the key of window {window} was never minted, or is lost: restore {path}; "
                "another key would publish a second noisy copy"
            ) from None
        except (InvalidUnwrap, ValueError):
            raise StateError(
                f"{path} does not open with this secret, or is damaged; use the secret that the "
                "state directory was made with"
            ) from None
        if self._tombstone(window).exists():  # erased meanwhile: what was just minted goes too
            self.erase(window)
            self._refuse_erased(window)
        return key

    def erase(self, window: int) -> None:
        """Forget the window's key for good; a second call does nothing."""
        if not self._tombstone(window).exists():
            with suppress(FileExistsError):
                create_exclusive(self._tombstone(window), b"")
        with suppress(FileNotFoundError):
            erase(self._folder / f"{window}.key")

    def open_windows(self) -> list[int]:
        """Windows whose key still exists, in order."""
        return sorted(int(path.stem) for path in self._folder.glob("*.key"))

    def _refuse_erased(self, window: int) -> None:
        if self._tombstone(window).exists():
            raise StateError(f"window {window} is final: its key was erased and no noise is left")

    def _tombstone(self, window: int) -> Path:
        return self._folder / f"{window}.erased"

    def _wrapping_key(self) -> bytes:
        return self._secret.key("window keys")

    def _draw(self, window: int) -> bytes:
        if self._derived:
            return self._secret.key("window key for tests", window.to_bytes(8, "big", signed=True))
        return token_bytes(32)
