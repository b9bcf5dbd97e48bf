"""A bucket of an object store, and what its errors are.

    s3://bucket/logs/*.parquet?endpoint=http://127.0.0.1:9000

Keys and region come from the variables that each store's own tools read (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL; GOOGLE_APPLICATION_CREDENTIALS,
GOOGLE_BASE_URL; AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_ENDPOINT).

A call is made once, and `ServerAway` says that it may or may not have been done: who writes under
a condition must look what is there before the next try, and does that by what he has written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from dpstream.connectors.server_base import ServerAway, ServerOptions
from dpstream.errors import DpstreamError, InvalidInput, InvalidParameter, StateError
from dpstream.privacy.state.journal import this_process

_PART = 8 << 20  # bytes of an object that are in memory at a time
_ANSWER, _CONNECT = timedelta(seconds=60), timedelta(seconds=10)
_CODE, _STATUS = re.compile(r"<Code>(\w+)</Code>"), re.compile(r"status code: (\d+)")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName")
_WRONG_KEY = (
    "XAdminUserNotFound", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthorizationFailure",
    "AuthenticationFailed",
)  # fmt: skip
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
_LATER = (408, 409, 425, 429)
"""Answers below 500 that mean: not now."""
_METADATA = ("169.254.169.254", "metadata.google.internal")
"""Where a library asks for keys that nobody has given it."""
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}

Version = dict[str, str]
"""Which content of an object this is: what a store compares before it replaces it."""


class Listed(NamedTuple):
    """An object of a listing."""

    key: str
    size: int
    tag: str
    """Tells its content from another one."""


class Content(NamedTuple):
    """What an object holds, and which version of it that is."""

    data: bytes
    version: Version


class Bucket:
    """Calls of one bucket; keys are whole. `where` names the bucket and what was asked in it."""

    def __init__(self, options: ServerOptions) -> None:
        self.where, self.scheme, self.name = options.where, options.scheme, options.servers
        self.path = options.path
        self.place = f"{self.scheme}/{self.name}"
        """Which bucket of which store this is."""
        self._process = this_process.id
        if not self.name or options.user is not None:
            raise InvalidParameter(
                f"{self.where} must name a bucket, as in {self.scheme}://bucket/folder/; keys "
                f"stand in {_KEYS[self.scheme]}"
            )
        self._store = self._opened(options)

    def uri(self, key: str) -> str:
        """What an object is called."""
        return f"{self.scheme}://{self.name}/{key}"

    def find(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin so, by key."""
        folder = prefix.rpartition("/")[0]  # the library lists whole folders
        with self._explained(prefix):
            parts = self._checked().list(folder or None, chunk_size=1000)
            found = [one for part in parts for one in part]
        listed = [Listed(one["path"], one["size"], _tag(one)) for one in found]
        return sorted(one for one in listed if one.key.startswith(prefix))

    def get(self, key: str, *, known: Version | None = None) -> Content | None:
        """An object; None: there is none. The version that is known comes without data."""
        options = {"if_none_match": known["e_tag"]} if known and "e_tag" in known else {}
        with self._explained(key):
            try:
                return _content(self._checked().get(key, options=options))
            except FileNotFoundError as problem:
                self._refuse_no_bucket(problem)
                return None
            except NotModifiedError:
                assert known is not None
                return Content(b"", known)

    def fetch(self, key: str, path: Path) -> Listed | None:
        """Copy an object into a new file; None: there is none."""
        with self._explained(key):
            try:
                answer = self._checked().get(key)
            except FileNotFoundError as problem:
                self._refuse_no_bucket(problem)
                return None
            with path.open("wb") as file:
                for part in answer.stream(min_chunk_size=_PART):
                    file.write(part)
            return Listed(key, answer.meta["size"], _tag(answer.meta))

    def create(self, key: str, data: bytes) -> Version | None:
        """Make an object that is not there; None: it is there, and stays as it is."""
        with self._explained(key):
            try:
                return _version(self._checked().put(key, data, mode="create", use_multipart=False))
            except AlreadyExistsError:
                return None

    def replace(self, key: str, data: bytes, known: Version) -> Version | None:
        """Put an object in place of a version of it; None: it is not that version any more."""
        with self._explained(key):
            try:
                return _version(self._checked().put(key, data, mode=known, use_multipart=False))
            except PreconditionError:
                return None

    def refuse_unfenced(self, what: str) -> None:
        """Refuse what rests on conditional writes where nobody has seen them hold."""
        if self.scheme == "gs":
            raise InvalidParameter(
                f"{self.where} is for sources alone: {what} rests on conditional writes, and those "
                "of gs:// could not be tried against a server that has them; use s3:// or az://, a "
                "directory, or a database"
            )

    def refuse_read_only(self, key: str) -> None:
        """Refuse a key that may not write, and a store that heeds no condition; nothing is written.

        The condition of this write cannot be true: no content of an object has such a version.
        """
        never = {"e_tag": '"none"', "version": "1"}
        with self._explained(key):
            try:
                self._checked().put(key, b"", mode=never, use_multipart=False)
            except (PreconditionError, AlreadyExistsError):
                return
            except FileNotFoundError as problem:
                self._refuse_no_bucket(problem)
                return
        self.remove([key])
        raise InvalidInput(
            f"{self.where}: the store takes the condition of a write (If-Match) and ignores it, so "
            "two writers could both win; use a store that has conditional writes"
        )

    def remove(self, keys: list[str]) -> None:
        """Remove objects; those that are gone are none."""
        for key in keys:
            with self._explained(key):
                try:
                    self._checked().delete(key)
                except FileNotFoundError as problem:
                    self._refuse_no_bucket(problem)

    def _opened(self, options: ServerOptions) -> Any:
        kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        given: dict[str, Any] = {
            "retry_config": {"max_retries": 0},
            "client_options": {"timeout": _ANSWER, "connect_timeout": _CONNECT},
        }
        endpoint = options.text("endpoint")
        if endpoint is None:
            variables = (os.environ.get(name) for name in _ENDPOINTS[self.scheme])
            endpoint = next((one for one in variables if one), None)
        if endpoint is not None:
            given["base_url" if self.scheme == "gs" else "endpoint"] = endpoint
            self.place = f"{self.scheme}/{endpoint.partition('://')[2].strip('/')}/{self.name}"
            given["client_options"]["allow_http"] = endpoint.startswith("http://")
        if self.scheme == "s3":
            region = options.text("region")
            key, secret = options.text("access_key"), options.secret("secret_key")
            found = {"region": region, "access_key_id": key, "secret_access_key": secret}
            given |= {name: value for name, value in found.items() if value is not None}
            if (key is None) != (secret is None):
                raise InvalidParameter(
                    f"{self.where}: access_key goes with secret_key_file or secret_key_env"
                )
        try:
            return kinds[self.scheme](self.name, **given)
        except (BaseError, ValueError, TypeError) as problem:
            words = str(problem).partition("\n")[0].rpartition("error: ")[2]
            raise InvalidParameter(
                f"{self.where} cannot be opened: {words}; set {_KEYS[self.scheme]}"
            ) from None

    def _checked(self) -> Any:
        if this_process.id != self._process:  # the library's threads are not there, and it hangs
            raise StateError(f"{self.where} was opened before a fork; open it in each process")
        return self._store

    def _refuse_no_bucket(self, problem: Exception) -> None:
        code = _code(problem)
        if code in _NO_BUCKET:
            raise InvalidInput(
                f"{self.where}: there is no bucket {self.name!r}; make it, or mend its name"
            ) from None
        if code in _WRONG_KEY:
            raise self._refused(code)

    def _refused(self, code: str) -> DpstreamError:
        if code in _SKEWED:
            return InvalidInput(
                f"{self.where}: the store's clock and that of this machine, where it is "
                f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, are too far apart ({code}); set it right"
            )
        return InvalidInput(
            f"{self.where}: the store refuses the key ({code or 'no permission'}); see "
            f"{_KEYS[self.scheme]}, and that this key may list, read and write there"
        )

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """What a store says may hold keys: only codes of it are passed on."""
        try:
            yield
        except (NotModifiedError, AlreadyExistsError, PreconditionError):
            raise
        except (PermissionDeniedError, UnauthenticatedError) as problem:
            raise self._refused(_code(problem)) from None
        except NotSupportedError:
            raise InvalidInput(f"{self.where}: the store has no conditional writes") from None
        except (BaseError, FileNotFoundError) as problem:
            self._refuse_no_bucket(problem)
            text, code = str(problem), _code(problem)
            if isinstance(problem, FileNotFoundError):
                raise InvalidInput(f"there is no object {self.uri(key)}") from None
            if any(host in text for host in _METADATA):
                raise InvalidParameter(
                    f"{self.where}: no key was given, and this machine has none of its own; set "
                    f"{_KEYS[self.scheme]}"
                ) from None
            status = _STATUS.search(text)
            number = int(status[1]) if status else 0
            if number == 501 or (status and number < 500 and number not in _LATER):
                raise InvalidInput(
                    f"{self.where}: the store refuses this, with {number} {code}"
                ) from None
            said = f"it answers {number} {code}" if status else "it cannot be reached"
            raise ServerAway(said.strip()) from None


def _code(problem: Exception) -> str:
    found = _CODE.search(str(problem))
    return found[1] if found else ""


def _content(answer: Any) -> Content:
    return Content(bytes(answer.bytes()), _version(answer.meta))


def _version(facts: Any) -> Version:
    return {name: facts[name] for name in ("e_tag", "version") if facts.get(name) is not None}


def _tag(facts: Any) -> str:
    """The e_tag; a store that has none for an object has its size and time."""
    return (facts["e_tag"] or f"{facts['size']} {facts['last_modified']}").strip('"')
