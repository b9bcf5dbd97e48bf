"""A ledger in an object store, which several hosts share: the lines of a ledger file, in objects.

    s3://bucket/books/clicks

`clicks/head` says where the lines end, and holds the newest of them; older ones are in objects that
never change, which the head names: `clicks/lines-OFFSET-ID`. Nobody holds a lock. A section reads
the head, and what it appends is a new head that takes the place of the one it has read, compared by
its e_tag (`If-Match`): of two writers who have read the same head one wins, and the other does its
section anew, over what the first has written. So sections are serialisable, in the order of heads.

Each head carries an id that its writer has drawn for this one write, and those of the writes before
it. If the answer is lost the same write is sent again. The store refuses it if it was made, or if
others have written since; then the ids in the head tell the two apart. Nothing is drawn before one
of the two answers is there.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from dpstream.connectors.ledger_lines import KIND, LedgerEnd, Rows, ServerLedger, base_of
from dpstream.connectors.objects.client import Bucket, Version
from dpstream.connectors.server_base import ServerAway, ServerOptions, unreachable
from dpstream.errors import InvalidParameter, LedgerError
from dpstream.privacy.ledger.store import LedgerAddress
from dpstream.privacy.state import mint_run_id
from dpstream.privacy.state.journal import FORMAT, NO_TAG

_SEAL = 1 << 16  # bytes of lines from which the head's go into an object of their own
_WRITES = 256  # ids of writes that a head has

Head = dict[str, Any]


def open_store(address: LedgerAddress) -> ObjectLedger:
    """The ledger at an address; its head is made if it is not there."""
    return ObjectLedger(address)


def exists(address: LedgerAddress) -> bool:
    """Is a ledger's head there?"""
    options = ServerOptions(address.uri)
    options.retry_policy()
    bucket = _bucket(options)
    options.finish()
    try:
        return bucket.get(_head_key(bucket)) is not None
    except ServerAway as problem:
        raise unreachable(options.where, problem) from None


class ObjectLedger(ServerLedger):
    """The store of one ledger; see `LedgerStore`."""

    _head = "its object `head`"

    def __init__(self, address: LedgerAddress) -> None:
        options = ServerOptions(address.uri)
        super().__init__(address, options.retry_policy())
        self._bucket = _bucket(options)
        options.finish()
        self._key = _head_key(self._bucket)
        self._version: Version = {}
        self._content: Head | None = None
        self._sealed: dict[str, Rows] = {}  # lines of objects that were read
        self._write = ""  # the id of the write that is under way
        try:
            self._look(make=True)
        except ServerAway as problem:
            raise unreachable(options.where, problem) from None

    # Sections

    def _begin(self) -> LedgerEnd | None:
        self._look()
        head = self._content
        return None if head is None else LedgerEnd(head["end"], head["tag"], head["base"])

    def _commit(self) -> None:
        assert self._noted is not None
        assert self._content is not None
        lines = [*self._content["lines"], *self._pending]
        self._put({"end": self._offset, "tag": self._tag}, lines)

    def _leave(self) -> None:
        """Nothing is held."""

    def _drop(self) -> None:
        self._version, self._content, self._write = {}, None, ""

    def close(self) -> None:
        """Let it go."""
        self._closed = True

    def _look(self, *, make: bool = False) -> None:
        """Read the head, if it is not the one that is known."""
        found = self._bucket.get(self._key, known=self._version)
        if found is not None and self._version and found.version == self._version:
            return
        if found is None and make:
            first = {"dpstream": KIND, "format": FORMAT, "id": mint_run_id().hex()}
            place = {"end": 0, "tag": NO_TAG, "base": 0, "sealed": [], "lines": [], "writes": []}
            self._bucket.create(self._key, _packed(first | place))  # or somebody else was first
            found = self._bucket.get(self._key)
        if found is None:
            self._version, self._content = {}, None
            return
        try:
            head: Head = json.loads(found.data)
            known = head["dpstream"], head["format"]
        except (ValueError, KeyError, TypeError):
            known = None, None
        if known != (KIND, FORMAT):
            raise LedgerError(
                f"{self._bucket.uri(self._key)} is no head of a ledger that this version reads; "
                "name another place, or use the version of dpstream that wrote it"
            )
        if not found.version:
            raise LedgerError(f"{self.place}: the store gives no e_tag, and no fence without one")
        identity = f"objects/{self._bucket.place}/{self._key}/{head['id']}"
        if self._identity not in ("", identity):
            raise LedgerError(f"{self.place} is not the ledger that was there; restore it")
        head["lines"] = [(start, line) for start, line in head["lines"]]
        self._identity, self._version, self._content = identity, found.version, head

    def _put(self, changed: Head, lines: Rows, *, sealed: list[list[Any]] | None = None) -> None:
        """Put a head with these lines in place of the one that the section has read."""
        head = self._content
        assert head is not None
        self._write = self._write or mint_run_id().hex()
        sealed = head["sealed"] if sealed is None else sealed
        if sum(len(line) for _, line in lines) >= _SEAL:
            sealed, lines = [*sealed, self._seal(lines)], []
        writes = [self._write, *head["writes"]][:_WRITES]
        new = head | changed | {"sealed": sealed, "lines": lines, "writes": writes}
        version = self._bucket.replace(self._key, _packed(new), self._version)
        if version is None:  # refused: our own write of before, or others have written
            write = self._write
            self._look()
            if self._content is None or write not in self._content["writes"]:
                with suppress(ServerAway):
                    self._bucket.remove([key for _, key in sealed if key.endswith(write)])
                raise self._overtaken()
        else:
            self._version, self._content = version, new
        self._write = ""

    def _seal(self, lines: Rows) -> list[Any]:
        """Put lines into an object of this write; where it begins, and its key."""
        key = f"{self._key.removesuffix('head')}lines-{lines[0][0]:016d}-{self._write}"
        self._bucket.create(key, "".join(f"{line}\n" for _, line in lines).encode())
        self._sealed[key] = lines
        return [lines[0][0], key]

    # Records

    def _fetch(self, first: int, most: int | None = None) -> Rows:
        if self._content is None:
            return []
        rows: Rows = []
        sealed = self._content["sealed"]
        for number, (start, key) in enumerate(sealed, 1):
            if number == len(sealed) or sealed[number][0] > first:
                rows += self._retry.insist(partial(self._lines_of, start, key))
        rows += self._content["lines"]
        rows = [row for row in rows if row[0] >= first]
        return rows if most is None else rows[:most]

    def _last_before(self, offset: int) -> Rows:
        return [row for row in self._fetch(0) if row[0] < offset][-1:]

    def _lines_of(self, start: int, key: str) -> Rows:
        """The lines of an object; each begins where the one before it ends, or has folded to."""
        if key not in self._sealed:
            found, rows = self._bucket.get(key), list[tuple[int, str]]()
            if found is None:
                raise LedgerError(
                    f"{self.place} is damaged: {self._bucket.uri(key)} is missing; restore it"
                )
            for line in found.data.decode(errors="replace").split("\n")[:-1]:
                rows.append((start, line))
                start += len(line.encode()) + 1
                if len(rows) == 1 and rows[0][0] == 0:
                    start = base_of(line)[0] or start
            self._sealed[key] = rows
        return self._sealed[key]

    def _put_end(self, added: tuple[int, str], new: LedgerEnd) -> None:
        if self._content is None:
            raise LedgerError(
                f"{self.place}: its object `head` is lost, and with it the newest lines; restore it"
            )
        self._put(_as_head(new), [*self._content["lines"], added])

    def _put_all(self, rows: Rows, new: LedgerEnd) -> None:
        self._put(_as_head(new), rows)

    def _put_folded(self, header: str, base: int) -> None:
        rest = [row for row in self._fetch(0) if row[0] >= base]
        old = [] if self._content is None else [key for _, key in self._content["sealed"]]
        self._put({"base": base}, [(0, header), *rest], sealed=[])
        self._bucket.remove(old)  # nobody who reads this head needs them


def _as_head(end: LedgerEnd) -> Head:
    return {"end": end.offset, "tag": end.tag, "base": end.base}


def _packed(head: Head) -> bytes:
    return json.dumps(head, separators=(",", ":")).encode()


def _bucket(options: ServerOptions) -> Bucket:
    if not options.path.strip("/"):
        raise InvalidParameter(
            f"{options.where} must name a ledger in the bucket, as in s3://bucket/books/clicks"
        )
    bucket = Bucket(options)
    bucket.refuse_unfenced("a ledger")
    return bucket


def _head_key(bucket: Bucket) -> str:
    return f"{bucket.path.strip('/')}/head"
