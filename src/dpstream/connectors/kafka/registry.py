"""Messages whose schemas a registry holds: Avro, JSON Schema and Protobuf, in Confluent's frame.

A message begins with a zero byte and the number of its schema, which means that schema for ever.
Each message is read by its own schema, never by "the newest", and a number that the registry does
not have is waited for. A column that was renamed is found by the alias that the newer schema names,
by both of its names, one that was added is null before, a number may get wider. What would lose
rows in silence (a column that a later schema drops, or makes another kind of value) stops the run,
or is set aside. That is asked of the other versions under all subjects that have the schema: a
replay finds the same while those before it stay as they were, and no alias comes for a column that
a query has asked for already.
"""

from __future__ import annotations

import base64
import io
import json
import ssl
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import numpy as np
import pyarrow as pa

from dpstream.connectors.changes import rule_from
from dpstream.connectors.encode import jsonl, simple_column
from dpstream.connectors.kafka.debezium import FORMAT as DEBEZIUM
from dpstream.connectors.kafka.debezium import DebeziumDecoder
from dpstream.connectors.messages import FORMATS, Decoded, Decoder, decoder_from
from dpstream.connectors.server_base import RetryPolicy, ServerAway, ServerOptions
from dpstream.errors import DpstreamError, InvalidInput, InvalidParameter
from dpstream.optional import optional
from dpstream.records import Columns
from dpstream.rows.column_values import text_of

_KINDS = {"avro": "AVRO", "json-schema": "JSON", "protobuf": "PROTOBUF"}
_TIMEOUT = 10.0  # seconds that an answer may take
_FRAME = 5  # bytes before a message's value
_REFUSED = (401, 403)
_BUSY = (408, 429)  # too slow, too many: for now
_DEEPEST = 100  # types inside types
_FREE = 100  # values that a byte of a message may stand for
_NUMBER, _TEXT = "a number", "text"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of a schema: what kind of value it has, and whether a message may lack it."""

    kind: str
    may_lack: bool = False
    default: Any = None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A schema of the registry: its number, its text, and where it stands there."""

    number: int
    kind: str
    text: str
    name: str

    @property
    def fields(self) -> Mapping[str, Field]:
        """Its columns, by their names and by those they had before."""
        parsed = json.loads(self.text)
        return _avro_fields(parsed) if self.kind == "AVRO" else _json_fields(parsed)


class SchemaRegistry:
    """A registry with the interface of Confluent's, such as Apicurio's at /apis/ccompat/v7.

    Options: `registry` (its address), `registry_user`, `registry_password_file` or `_env`,
    `registry_ca_file`.
    """

    def __init__(self, options: ServerOptions, url: str, *, patience: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise InvalidParameter(
                f"{options.where}: registry must be an address such as http://HOST:PORT, without a "
                "user and a password in it (registry_user, registry_password_file); got "
                f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
            )
        self._url, self.where = url.rstrip("/"), f"the registry {parts.scheme}://{parts.netloc}"
        self._headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        user, password = options.text("registry_user"), options.secret("registry_password")
        if user is not None:
            token = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"
        trusted = options.text("registry_ca_file")
        tls = None if trusted is None else ssl.create_default_context(cafile=trusted)
        self._opener = build_opener(_SameServer, HTTPSHandler(context=tls))
        self._retry = RetryPolicy(self.where, seconds=patience)
        self._schemas: dict[int, Schema] = {}

    def schema(self, number: int) -> Schema:
        """The schema with this number, which never changes; one that is not there is waited for."""
        if number not in self._schemas:
            found = self._ask(
                f"/schemas/ids/{number}",
                missing=f"it has no schema {number}, which a message names (register it there)",
            )
            if found.get("references"):
                raise InvalidInput(
                    f"schema {number} of {self.where} refers to others, which are not followed; "
                    "register it in one piece"
                )
            self._schemas[number] = self._named(number, found)
        return self._schemas[number]

    def earlier(self, schema: Schema) -> list[Schema]:
        """Those that stood under the same subject before, the newest first."""
        return self._beside(schema, lambda version, own: version < own)

    def later(self, schema: Schema) -> list[Schema]:
        """Those that were put there since, the newest first."""
        return self._beside(schema, lambda version, own: version > own)

    def _beside(self, schema: Schema, wanted: Callable[[int, int], bool]) -> list[Schema]:
        found = []
        for place in self._ask(f"/schemas/ids/{schema.number}/versions") or []:
            subject = quote(place["subject"], safe="")
            for version in sorted(self._ask(f"/subjects/{subject}/versions") or [], reverse=True):
                if wanted(version, place["version"]):
                    about = self._ask(f"/subjects/{subject}/versions/{version}")
                    if about is not None:
                        found.append(self._named(about["id"], about, f"{place['subject']}"))
        return found

    def refuse_incompatible(self, subject: str, schema: Mapping[str, str]) -> None:
        """Refuse a schema that the subject's rule does not allow beside its newest one."""
        place = f"/compatibility/subjects/{quote(subject, safe='')}/versions/latest?verbose=true"
        answer = self._ask(place, schema)
        if answer is not None and not answer.get("is_compatible", True):
            newest = self._ask(f"/subjects/{quote(subject, safe='')}/versions/latest") or {}
            raise InvalidInput(
                f"{self.where} does not take the columns of the releases: their schema is "
                f"{schema['schema']}, the newest of {subject!r} is {newest.get('schema')}; use "
                "another topic, or name another subject="
            )

    def register(self, subject: str, schema: Mapping[str, str]) -> int:
        """The number of a schema, which is added if it is not there."""
        answer = self._ask(f"/subjects/{quote(subject, safe='')}/versions", schema)
        if answer is None:
            raise InvalidInput(f"{self.where} does not take a schema for {subject!r}")
        return int(answer["id"])

    def _named(self, number: int, found: Mapping[str, Any], subject: str = "") -> Schema:
        kind = str(found.get("schemaType") or "AVRO")
        version = f" ({subject}, version {found['version']})" if subject else ""
        name = f"schema {number}{version}"
        return Schema(number=number, kind=kind, text=str(found["schema"]), name=name)

    def _ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, missing: str | None = None
    ) -> Any:
        """What it answers; None: it has no such thing. Waits for one that is away.

        `missing`: why to wait for what it does not have, too.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, self._headers)

        def ask() -> Any:
            try:
                with self._opener.open(request, timeout=_TIMEOUT) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as problem:
                problem.close()
                if problem.code == 404:
                    if missing is not None:
                        raise ServerAway(missing) from None
                    return None
                if 300 <= problem.code < 400:
                    raise InvalidParameter(
                        f"{self.where} sends to another server, which may not see the password; "
                        "give registry= the address that it has now"
                    ) from None
                if problem.code in _REFUSED:
                    raise InvalidParameter(
                        f"{self.where} refuses the user name or password"
                    ) from None
                if problem.code == 409:
                    raise InvalidInput(
                        f"{self.where} does not take the schema: it is not compatible with the "
                        "newest one; use another topic, or name another subject="
                    ) from None
                if 400 <= problem.code < 500 and problem.code not in _BUSY:
                    raise InvalidInput(
                        f"{self.where} answers {problem.code} to {path.partition('?')[0]}"
                    ) from None
                raise ServerAway(f"it answers {problem.code}") from None
            except (OSError, ValueError):
                raise ServerAway("it does not answer") from None

        return self._retry.insist(ask)


class _SameServer(HTTPRedirectHandler):
    """Follows redirects within a server alone: the headers of a request hold the password."""

    def redirect_request(self, req: Request, fp: Any, code: int, *rest: Any) -> Request | None:
        """The next request, or None."""
        following = super().redirect_request(req, fp, code, *rest)
        if following is None or _server(following.full_url) != _server(req.full_url):
            return None
        return following


def _server(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


# From messages to rows.


def message_decoder(
    options: ServerOptions, patience: float
) -> Decoder | RegistryDecoder | DebeziumDecoder:
    """The decoder that the options ask for: of plain messages, of changes, of those with a schema.

    `patience`: seconds that the registry may be away.
    """
    url = options.text("registry")
    kinds = (*FORMATS, DEBEZIUM, *_KINDS)
    kind = options.choice("format", kinds, "json" if url is None else "avro")
    if (kind in _KINDS) != (url is not None):
        raise InvalidParameter(
            f"{options.where}: format={kind} needs registry=http://HOST:PORT, which has the schemas"
            if url is None
            else f"{options.where}: messages of a registry have format={', '.join(_KINDS)}; "
            f"got {kind!r}"
        )
    plain = decoder_from(options, kind=kind if kind in FORMATS else "json")
    if kind == DEBEZIUM:
        return DebeziumDecoder(plain, rule_from(options))
    if url is None:
        return plain
    registry = SchemaRegistry(options, url, patience=patience)
    stops = options.choice("incompatible", ("stop", "dead_letters"), "stop") == "stop"
    message = _message_class(options) if kind == "protobuf" else None
    return RegistryDecoder(kind, registry, plain, stops=stops, message=message)


class RegistryDecoder:
    """Turns framed messages into JSON by the schema of each, and JSON into rows as ever."""

    def __init__(
        self,
        kind: str,
        registry: SchemaRegistry,
        plain: Decoder,
        *,
        stops: bool = True,
        message: Any = None,
    ) -> None:
        self._kind, self._registry, self._plain = kind, registry, plain
        self._stops, self._message = stops, message
        self._readers: dict[tuple[int, tuple[str, ...] | None], Callable[[bytes], bytes] | str] = {}
        """By number of the schema and columns: how to read a message, or why none can be."""

    def decode(self, payloads: Sequence[bytes | None], columns: Columns = None) -> Decoded:
        """The rows of all payloads; what is not of its schema costs only itself."""
        usable: list[int] = []
        texts: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for at, payload in enumerate(payloads):
            try:
                texts.append(self._as_json(payload, columns))
                usable.append(at)
            except _BadMessage as problem:
                bad.append((at, str(problem)))
        found = self._plain.decode(texts, columns)
        places = np.array(usable, dtype=np.int64)
        bad += [(usable[at], reason) for at, reason in found.bad]
        return Decoded(table=found.table, origin=places[found.origin], bad=sorted(bad))

    def _as_json(self, payload: bytes | None, columns: Columns) -> bytes | None:
        if payload is None:
            return None
        if len(payload) > self._plain.max_bytes:
            raise _BadMessage(
                f"it has {len(payload)} bytes, more than max_message_bytes={self._plain.max_bytes}"
            )
        if len(payload) < _FRAME or payload[0] != 0:
            raise _BadMessage("it does not begin with a zero byte and the number of its schema")
        number = int.from_bytes(payload[1:_FRAME], "big")
        asked = None if columns is None else tuple(columns)
        reader = self._readers.get((number, asked))
        if reader is None:
            reader = self._readers[number, asked] = self._reader(number, asked)
        if isinstance(reader, str):
            raise _BadMessage(reader)
        try:
            return reader(payload[_FRAME:])
        except Exception as problem:  # of whatever kind the parsers have
            words = str(problem).partition("\n")[0][:200] or type(problem).__name__
            raise _BadMessage(f"it is not of its schema {number}: {words}") from None

    def _reader(
        self, number: int, columns: tuple[str, ...] | None
    ) -> Callable[[bytes], bytes] | str:
        schema = self._registry.schema(number)
        if schema.kind != _KINDS[self._kind]:
            return f"its schema {number} is {schema.kind}, not {_KINDS[self._kind]}"
        if self._message is not None:
            return _protobuf_reader(self._message)
        try:
            absent, lost = ({}, "") if columns is None else self._absent(schema, columns)
            if self._kind == "avro":
                renamed, other = self._renamed(schema, columns or ())
                reader, lost = _avro_reader(schema, absent, renamed), lost or other
            else:
                reader = _json_reader(schema, absent)
        except DpstreamError:  # of the registry, not of the schema
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            return f"its schema {number} cannot be used: {str(problem)[:200]}"
        if lost and self._stops:
            raise InvalidInput(
                f"{lost}; write such messages to another topic, or set them aside with "
                "incompatible=dead_letters"
            )
        return lost or reader

    def _absent(self, schema: Schema, columns: tuple[str, ...]) -> tuple[dict[str, Any], str]:
        """Values of columns that the schema has dropped; and what rows would be lost by, if so."""
        fields, absent = schema.fields, dict[str, Any]()
        for earlier in self._registry.earlier(schema):
            for name in columns:
                was, now = earlier.fields.get(name), fields.get(name)
                if was is None or name in absent or earlier.kind != schema.kind:
                    continue
                if now is None and was.may_lack:
                    absent[name] = was.default
                elif now is None or now.kind != was.kind:
                    found = "does not have" if now is None else f"has, as {now.kind},"
                    return {}, (
                        f"{schema.name} of {self._registry.where} {found} the column {name!r}, "
                        f"which is {was.kind} in {earlier.name}: that would lose its rows"
                    )
        return absent, ""

    def _renamed(self, schema: Schema, columns: Sequence[str]) -> tuple[dict[str, str], str]:
        """Columns that later schemas call by another name, and what they are in this one.

        And what rows would be lost by, if the later column holds another kind of value.
        """
        fields, renamed = schema.fields, dict[str, str]()
        for name in [name for name in columns if name not in fields]:
            names, kind = {name}, ""
            for later in self._registry.later(schema) if schema.kind == "AVRO" else ():
                for field in json.loads(later.text).get("fields", []):
                    if field["name"] in names and field.get("aliases"):
                        names.update(field["aliases"])
                        kind = kind or later.fields[field["name"]].kind
            for own in sorted(names & {*fields}):
                if fields[own].kind != kind:
                    return {}, (
                        f"{schema.name} of {self._registry.where} has the column {own!r}, as "
                        f"{fields[own].kind}, which a later schema calls {name!r} and makes {kind}"
                    )
                renamed[name] = own
        return renamed, ""


class _BadMessage(Exception):
    """A message that is no row; its text is the reason."""


def _avro_reader(
    schema: Schema, absent: Mapping[str, Any], renamed: Mapping[str, str]
) -> Callable[[bytes], bytes]:
    fastavro = optional("fastavro", extra="registry", who="format=avro")
    parsed = json.loads(schema.text)
    try:
        writer = fastavro.parse_schema(parsed)
    except fastavro.schema.SchemaParseException as problem:
        raise ValueError(str(problem)) from None
    if _Weights().of(writer).free > _FREE**2:
        raise ValueError("it has too many values that take no bytes")
    names = {
        alias: field["name"]
        for field in parsed.get("fields", [])
        for alias in field.get("aliases", [])
    }

    def read(body: bytes) -> bytes:
        file = io.BytesIO(body)
        record = fastavro.schemaless_reader(file, writer, None)
        if file.tell() != len(body):
            raise ValueError("bytes follow its end")
        row = {**absent, **{alias: record[name] for alias, name in names.items()}, **record}
        return _json_row(row | {name: row[own] for name, own in renamed.items()})

    return read


class _Weight(NamedTuple):
    """How deep a type is, and how much a message of it may hold for nothing.

    `free`: the most values of a message, less `_FREE` for each of its bytes.
    """

    depth: int
    free: int


class _Weights:
    """Weighs the types of a schema as fastavro has parsed it: a short message must stay small.

    A list of values that take no bytes could have billions of them. A type inside itself could be
    as deep as a message is long, which fastavro, and with it the process, does not survive.
    """

    def __init__(self) -> None:
        self._named: dict[str, _Weight | None] = {}  # None: its inside is being weighed

    def of(self, kind: Any) -> _Weight:
        """The weight of a type."""
        if isinstance(kind, list):
            return self._around(kind, max, 1 - _FREE)
        if isinstance(kind, str):
            if kind in self._named:
                named = self._named[kind]
                if named is None:
                    raise ValueError(f"{kind} is inside itself; use a record that ends")
                return named
            return _Weight(1, 1 if kind == "null" else 1 - _FREE)
        inner = kind["type"]
        if not isinstance(inner, str):
            return self.of(inner)
        if inner in ("record", "error"):
            self._named[kind["name"]] = None
            found = self._around([field["type"] for field in kind["fields"]], sum, 1)
            self._named[kind["name"]] = found
            return found
        if inner in ("array", "map"):
            found = self.of(kind["items" if inner == "array" else "values"])
            if found.free - (_FREE if inner == "map" else 0) > 0:  # a map has a key for each
                raise ValueError(f"it has {inner}s of values that take no bytes, or almost none")
            return self._deeper(found.depth, 1 - _FREE)
        if inner in ("fixed", "enum"):
            size = kind["size"] if inner == "fixed" else 1
            self._named[kind["name"]] = found = _Weight(1, 1 - _FREE * size)
            return found
        return self.of(inner)

    def _around(
        self, kinds: Sequence[Any], join: Callable[[Sequence[int]], int], own: int
    ) -> _Weight:
        inside = [self.of(kind) for kind in kinds] or [_Weight(0, 0)]
        return self._deeper(
            max(each.depth for each in inside), own + join([e.free for e in inside])
        )

    def _deeper(self, depth: int, free: int) -> _Weight:
        if depth >= _DEEPEST:
            raise ValueError(f"it has more than {_DEEPEST} types inside each other")
        return _Weight(depth + 1, free)


def _json_reader(schema: Schema, absent: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    jsonschema = optional("jsonschema", extra="registry", who="format=json-schema")
    referencing = optional("referencing", extra="registry", who="format=json-schema")
    parsed = json.loads(schema.text)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft7Validator)
    checker = kind(parsed, registry=referencing.Registry())  # which fetches nothing

    def read(body: bytes) -> bytes:
        value = json.loads(body)
        problem = next(iter(checker.iter_errors(value)), None)
        if problem is not None:
            raise ValueError(f"{'.'.join(map(str, problem.absolute_path)) or 'it'} is wrong")
        if absent and isinstance(value, dict):
            body = json.dumps({**absent, **value}, ensure_ascii=False).encode()
        return body

    return read


def _message_class(options: ServerOptions) -> Any:
    """The class of the messages, from a file that `protoc --descriptor_set_out` has written."""
    path, name = options.text("descriptor_file"), options.text("message")
    if path is None or name is None:
        raise InvalidParameter(
            f"{options.where}: format=protobuf needs descriptor_file (protoc --include_imports "
            "--descriptor_set_out=FILE) and message=PACKAGE.NAME"
        )
    optional("google.protobuf", extra="registry", who="format=protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(path).read_bytes())
        pool = descriptor_pool.DescriptorPool()
        for each in files.file:
            pool.Add(each)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except OSError as problem:
        raise InvalidInput(f"{options.where}: {path} cannot be read: {problem.strerror}") from None
    except Exception:  # of whatever kind protobuf has
        raise InvalidInput(f"{options.where}: {path} describes no message {name!r}") from None


def _protobuf_reader(message: Any) -> Callable[[bytes], bytes]:
    from google.protobuf import json_format

    def value_of(parsed: Any, field: Any) -> Any:
        value = getattr(parsed, field.name)
        if field.is_repeated or field.message_type is not None:
            if field.has_presence and not parsed.HasField(field.name):
                return None
            plain = json_format.MessageToDict(parsed, preserving_proto_field_name=True)
            return plain.get(field.name, [] if field.is_repeated else None)
        if field.has_presence and not parsed.HasField(field.name):
            return None
        if field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            return str(value) if known is None else known.name
        return value

    def read(body: bytes) -> bytes:
        count, at = _varint(body, 0)  # which message of the schema's file it is
        for _ in range(count):
            _, at = _varint(body, at)
        parsed = message.FromString(body[at:])
        return _json_row({each.name: value_of(parsed, each) for each in parsed.DESCRIPTOR.fields})

    return read


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A number in zigzag coding, and where it ends."""
    number = shift = 0
    while True:
        byte = body[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return (number >> 1) ^ -(number & 1), at


def _json_row(row: Mapping[str, Any]) -> bytes:
    """A row as JSON; its values are texts, as the columns will be, lists and records JSON."""
    return json.dumps({name: _plain(value) for name, value in row.items()}).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, default=_text, ensure_ascii=False)
    return None if value is None else _text(value)


def _text(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return text_of(value)


def _avro_fields(parsed: Any) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for each in parsed.get("fields", []) if isinstance(parsed, dict) else []:
        field = Field(
            kind=_avro_kind(each["type"]),
            may_lack="default" in each,
            default=each.get("default"),
        )
        for name in (*each.get("aliases", []), each["name"]):
            fields[name] = field
    return fields


def _avro_kind(kind: Any) -> str:
    """What values it has, in words; a union is what it holds beside null."""
    if isinstance(kind, list):
        kinds = {_avro_kind(each) for each in kind if each != "null"}
        return " or ".join(sorted(kinds)) or "null"
    if isinstance(kind, dict):
        logical = kind.get("logicalType", "")
        if logical == "decimal":
            return _NUMBER
        if logical == "uuid":
            return _TEXT
        if logical.startswith(("timestamp", "local-timestamp")):
            return "a time"
        return str(logical) or _avro_kind(kind["type"])
    if kind in ("int", "long", "float", "double"):
        return _NUMBER
    return _TEXT if kind in ("string", "enum") else str(kind)


def _json_fields(parsed: Any) -> dict[str, Field]:
    parsed = parsed if isinstance(parsed, dict) else {}
    required = parsed.get("required", [])
    fields = {}
    for name, each in parsed.get("properties", {}).items():
        kinds = each.get("type", "any") if isinstance(each, dict) else "any"
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        named = {"integer": _NUMBER, "number": _NUMBER, "string": _TEXT}
        words = " or ".join(sorted({named.get(kind, kind) for kind in kinds - {"null"}}))
        default = each.get("default") if isinstance(each, dict) else None
        fields[name] = Field(kind=words, may_lack=name not in required, default=default)
    return fields


# From releases to messages.


def message_encoder(
    options: ServerOptions, topic: str, patience: float
) -> PlainRows | RegistryRows:
    """What makes messages of a release's rows: JSON, or what the registry's schema says."""
    url = options.text("registry")
    kind = options.choice(
        "format", ("json", "avro", "json-schema"), "json" if url is None else "avro"
    )
    if (kind == "json") != (url is None):
        raise InvalidParameter(
            f"{options.where}: format={kind} goes {'with' if url is None else 'without'} registry="
        )
    if url is None:
        return PlainRows()
    subject = options.text("subject") or f"{topic}-value"
    return RegistryRows(kind, SchemaRegistry(options, url, patience=patience), subject)


class PlainRows:
    """JSON objects."""

    def check(self, query: str, table: pa.Table) -> None:
        """Any columns will do."""

    def encode(self, query: str, table: pa.Table) -> list[bytes]:
        """A message for each row."""
        return jsonl(table).splitlines()


class RegistryRows:
    """Avro records, or JSON with a schema; the schema is registered with the first release."""

    def __init__(self, kind: str, registry: SchemaRegistry, subject: str) -> None:
        self._kind, self._registry, self._subject = kind, registry, subject
        self._numbers: dict[str, int] = {}  # by schema
        if kind == "avro":
            self._fastavro = optional("fastavro", extra="registry", who="format=avro")

    def check(self, query: str, table: pa.Table) -> None:
        """Refuse columns that the format has not, or that the subject's rule does not allow."""
        self._registry.refuse_incompatible(self._subject, self._schema(query, table))

    def encode(self, query: str, table: pa.Table) -> list[bytes]:
        """A message for each row, behind the number of its schema."""
        schema = self._schema(query, table)
        text = schema["schema"]
        if text not in self._numbers:
            self._numbers[text] = self._registry.register(self._subject, schema)
        head = b"\0" + self._numbers[text].to_bytes(4, "big")
        if self._kind == "json-schema":
            return [head + row for row in jsonl(table).splitlines()]
        parsed = self._fastavro.parse_schema(json.loads(text))
        rows = pa.table([_avro_column(c) for c in table.columns], names=table.column_names)
        messages = []
        for row in rows.to_pylist():
            file = io.BytesIO(head)
            file.seek(0, io.SEEK_END)
            self._fastavro.schemaless_writer(file, parsed, row)
            messages.append(file.getvalue())
        return messages

    def _schema(self, query: str, table: pa.Table) -> dict[str, str]:
        if self._kind == "avro":
            return {"schemaType": "AVRO", "schema": _avro_schema(query, table.schema)}
        return {"schemaType": "JSON", "schema": _json_schema(query, table.schema)}


def _avro_schema(query: str, schema: pa.Schema) -> str:
    """A record of the columns; each may be null, so that later ones may leave it out."""
    for name in schema.names:
        if not (name.isascii() and name.isidentifier()):
            raise InvalidInput(
                f"a name in Avro has letters, digits and underscores; got {name!r}: rename the "
                "column (AS), or write format=json-schema"
            )
    record = "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in query)
    fields = [
        {"name": field.name, "type": ["null", _avro_type(field.type)], "default": None}
        for field in schema
    ]
    about = {"type": "record", "name": f"release_{record}", "fields": fields}
    return json.dumps(about)


def _avro_type(kind: pa.DataType) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": f"{'' if kind.tz else 'local-'}timestamp-micros"}
    if pa.types.is_date(kind):
        return {"type": "int", "logicalType": "date"}
    if pa.types.is_list(kind):
        return {"type": "array", "items": ["null", _avro_type(kind.value_type)]}
    if pa.types.is_uint64(kind):
        return "string"  # Avro's numbers end before
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return "long"
    if pa.types.is_floating(kind):
        return "double"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "bytes" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "string"


def _avro_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as `_avro_type` says; days and times as numbers, since Python has fewer of them."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32())
    if pa.types.is_uint64(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    return simple_column(column)


def _json_schema(query: str, schema: pa.Schema) -> str:
    """An object with the columns, as JSON has their values."""
    about = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": query,
        "type": "object",
        "properties": {field.name: {"type": [_json_type(field.type), "null"]} for field in schema},
    }
    return json.dumps(about, ensure_ascii=False)


def _json_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "number"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "array" if pa.types.is_list(kind) else "string"
