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
from dpstream.privacy.state.files import create_exclusive, erase
from dpstream.privacy.state.secret import Secret


class WindowKeys:
    """The keys of a state directory's open windows: `<window>.key`, then `<window>.erased`."""

    def __init__(self, folder: Path, secret: Secret, *, derived_for_tests: bool = False) -> None:
        self._folder, self._secret = Path(folder), secret
        self._derived = derived_for_tests
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, window: int) -> bytes:
        """The window's key, minted durably on first use; an erased window's key raises."""
        if self._tombstone(window).exists():
            raise StateError(f"window {window} is final: its key was erased and no noise is left")
        path = self._folder / f"{window}.key"
        if not path.exists():
            with suppress(FileExistsError):  # another process minted it first: use that one
                create_exclusive(path, aes_key_wrap(self._wrapping_key(), self._mint(window)))
        try:
            return aes_key_unwrap(self._wrapping_key(), path.read_bytes())
        except (InvalidUnwrap, ValueError):
            raise StateError(
                f"{path} does not open with this secret, or is damaged; use the secret that the "
                "state directory was made with"
            ) from None

    def erase(self, window: int) -> None:
        """Forget the window's key for good; a second call does nothing."""
        if not self._tombstone(window).exists():
            create_exclusive(self._tombstone(window), b"")
        path = self._folder / f"{window}.key"
        if path.exists():
            erase(path)

    def open_windows(self) -> list[int]:
        """Windows whose key still exists, in order."""
        return sorted(int(path.stem) for path in self._folder.glob("*.key"))

    def _tombstone(self, window: int) -> Path:
        return self._folder / f"{window}.erased"

    def _wrapping_key(self) -> bytes:
        return self._secret.key("window keys")

    def _mint(self, window: int) -> bytes:
        if self._derived:
            return self._secret.key("window key for tests", window.to_bytes(8, "big", signed=True))
        return token_bytes(32)
