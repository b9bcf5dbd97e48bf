"""Avro, JSON Schema and Protobuf through a real broker and a real registry of schemas."""

import io
import json
import urllib.request
from contextlib import closing

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import dpstream as dps
from dpstream.connectors.kafka.registry import PlainRows
from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.testing import SourceSuite
from dpstream.connectors.testing.suites import drain, release, replay
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import InvalidInput, InvalidParameter, ServerUnreachable
from tests.connectors.test_sinks import RELEASE
from tests.servers import kafka_tools as tools
from tests.support.fixed import RUN, SECRET

pytestmark = pytest.mark.servers

CLICK = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "page", "type": ["null", "string"]},
    ],
}


def ask(registry, path, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(registry.address + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def register(registry, subject, schema, kind="AVRO"):
    """Its number."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    body = {"schemaType": kind, "schema": text}
    return ask(registry, f"/subjects/{subject}/versions", body)["id"]


def framed(number, body):
    return b"\0" + number.to_bytes(4, "big") + body


def avro(number, schema, row):
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), row)
    return framed(number, file.getvalue())


def fields(**kinds):
    listed = [{"name": name, "type": kind} for name, kind in kinds.items()]
    return {"type": "record", "name": "Click", "fields": listed}


@pytest.fixture
def topic(kafka):
    return tools.make_topic(kafka, 1)


@pytest.fixture
def uri(kafka, registry, topic):
    return f"kafka://{kafka.address}/{topic}?registry={registry.address}"


def read(uri, columns=None, rows=1):
    """The rows of a topic and what is none."""
    reads = {}
    with closing(open_source(uri)) as source:
        (name,) = source.partitions()
        drain(_Columns(source, columns), reads, rows=rows)
        again = replay(source, name, None, reads[name].positions[-1], columns)
    assert again.rejected() == reads[name].rejected()
    assert again.rows() == reads[name].rows()
    listed = [row for batch in reads[name].batches for row in batch.table.to_pylist()]
    return listed, reads[name].rejected()


class _Columns:
    """A source that is read in some columns."""

    def __init__(self, source, columns):
        self.partitions, self._source, self._columns = source.partitions, source, columns

    def read(self, partition, position):
        return self._source.read(partition, position, columns=self._columns)


class TestAvroSource(SourceSuite):
    growing = True

    @pytest.fixture(autouse=True)
    def _topic(self, kafka, registry, topic, uri):
        self.kafka, self.topic, self.uri = kafka, topic, uri
        self.number = register(registry, f"{topic}-value", CLICK)

    def open(self):
        return open_source(self.uri)

    def put(self, rows):
        tools.send(self.kafka, self.topic, [avro(self.number, CLICK, row) for row in rows])

    def foreign_positions(self):
        return ["clicks", [self.topic, 0, 1, 2], -1]


def test_every_kind_of_value(kafka, registry, topic, uri):
    """As text, in the spelling that JSON and Arrow messages have."""
    kinds = {
        "n": "long", "real": "double", "yes": "boolean", "raw": "bytes", "none": ["null", "string"],
        "at": {"type": "long", "logicalType": "timestamp-micros"},
        "day": {"type": "int", "logicalType": "date"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "kind": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]},
        "tags": {"type": "array", "items": "string"},
        "place": {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "int"}]},
    }  # fmt: skip
    schema = fields(**kinds)
    number = register(registry, f"{topic}-value", schema)
    row = {
        "n": 2**60, "real": 5.0, "yes": True, "raw": b"\0\xff", "none": None, "at": 1_000_000,
        "day": 1, "price": pa.scalar("1.50").cast(pa.decimal128(9, 2)).as_py(), "kind": "B",
        "tags": ["x"], "place": {"x": 1},
    }  # fmt: skip
    odd = row | {"real": float("nan"), "n": -1}
    tools.send(kafka, topic, [avro(number, schema, one) for one in (row, odd)])
    found, bad = read(uri, rows=2)

    assert not bad
    assert found[0] == {
        "n": str(2**60), "real": "5", "yes": "true", "raw": "00ff", "none": None,
        "at": "1970-01-01T00:00:01+00:00", "day": "1970-01-02", "price": "1.5", "kind": "B",
        "tags": '["x"]', "place": '{"x": 1}',
    }  # fmt: skip
    assert found[1]["real"].lower() == "nan"


def test_a_schema_that_changes(kafka, registry, topic, uri):
    """Added, renamed and wider columns go on; one that is dropped, or is no number now, stops."""
    first = fields(user="string", url="string", n="int")
    second = fields(user="string", page="string", n="double", lang="string")
    second["fields"][1]["aliases"] = ["url"]
    second["fields"][2]["default"] = 7.0
    third = fields(user="string", url="string", lang="string")  # n had a default
    row = {"user": "ann", "url": "/a", "page": "/b", "n": 3, "lang": "de"}
    numbers = {}
    for schema in (first, second, third):
        number = register(registry, f"{topic}-value", schema)
        numbers[number] = schema
        tools.send(kafka, topic, [avro(number, schema, row)])
    found, bad = read(uri, ["user", "url", "n", "lang"], rows=3)

    assert not bad
    assert [tuple(one.values()) for one in found] == [
        ("ann", "/a", "3", None), ("ann", "/b", "3", "de"), ("ann", "/a", "7", "de"),
    ]  # fmt: skip
    fourth = fields(user="int", url="string", n="int")
    number = register(registry, f"{topic}-value", fourth)
    tools.send(kafka, topic, [avro(number, fourth, {"user": 1, "url": "/", "n": 1})])
    assert len(read(uri, ["url", "n"], rows=4)[0]) == 4  # of what is not read nobody asks
    words = rf"schema {number} .* has, as a number, the column 'user', which is text in schema \d+"
    with pytest.raises(InvalidInput, match=words):
        read(uri, ["user"], rows=4)
    with pytest.raises(InvalidInput, match=r"does not have the column 'lang', .*dead_letters"):
        read(uri, ["lang"], rows=4)
    found, bad = read(f"{uri}&incompatible=dead_letters", ["user"], rows=3)
    assert [one["user"] for one in found] == ["ann"] * 3
    assert "the column 'user'" in bad[0].reason


def test_a_column_by_its_new_name(kafka, registry, topic, uri):
    """Messages from before it was renamed have it, too, also after it was renamed again."""
    first = fields(user="string", url="string")
    second, third = fields(user="string", page="string"), fields(user="string", site="string")
    second["fields"][1]["aliases"], third["fields"][1]["aliases"] = ["url"], ["page"]
    numbers = [register(registry, f"{topic}-value", one) for one in (first, second, third)]
    rows = [{"user": "a", "url": "/a"}, {"user": "b", "page": "/b"}, {"user": "c", "site": "/c"}]
    for number, schema, row in zip(numbers, (first, second, third), rows, strict=True):
        tools.send(kafka, topic, [avro(number, schema, row)])

    for name in ("site", "page"):
        found, bad = read(uri, [name], rows=3)
        assert ([one[name] for one in found], bad) == (["/a", "/b", "/c"], [])
    with pytest.raises(InvalidInput, match="does not have the column 'url'"):  # nobody says so
        read(uri, ["url"], rows=3)
    other = fields(user="string", visit="long")
    other["fields"][1]["aliases"] = ["site"]
    register(registry, f"{topic}-value", other)
    with pytest.raises(InvalidInput, match="a later schema calls 'visit' and makes a number"):
        read(uri, ["visit"], rows=3)


def test_poison_costs_only_itself(kafka, registry, topic, uri):
    """Each with a reason; the messages around it come."""
    number = register(registry, f"{topic}-value", CLICK)
    bomb = fields(user="string", page={"type": "array", "items": "null"})
    bombs = register(registry, f"{topic}-value", bomb)
    good = avro(number, CLICK, {"user": "ann", "page": "/a"})
    poison = [
        b"", b"\0\0", b"\1" + good[1:], good[:-1], good + b"\0",
        framed(number, b"\xff" * 12), avro(bombs, bomb, {"user": "x", "page": [None] * 9}),
        framed(number, b"\x80\x80\x80\x80\x20ann"), good + b"x" * 600,
    ]  # fmt: skip
    tools.send(kafka, topic, [good, *poison, good])
    found, bad = read(f"{uri}&max_message_bytes=500", rows=2)

    assert found == [{"user": "ann", "page": "/a"}] * 2
    assert [one.where for one in bad] == [f"{topic}/0, offset {n}" for n in range(1, 10)]
    reasons = " | ".join(one.reason for one in bad)
    for words in ("zero byte", "bytes follow its end", "no bytes", "more than"):
        assert words in reasons, reasons


def test_json_with_a_schema(kafka, registry, topic, uri):
    """What is not of its schema is set aside; a column that must be there is not lost."""
    kinds = {"user": {"type": "string"}, "n": {"type": "integer"}}
    first = {"type": "object", "properties": kinds, "required": ["user", "n"]}
    number = register(registry, f"{topic}-value", first, "JSON")
    rows = [b'{"user": "ann", "n": 1}', b'{"user": 5, "n": 1}', b'{"user": "bob"}', b"{", b"[]"]
    tools.send(kafka, topic, [framed(number, row) for row in rows])
    found, bad = read(f"{uri}&format=json-schema", ["user", "n"])
    assert found == [{"user": "ann", "n": "1"}]
    assert len(bad) == 4
    dropped = {"type": "object", "properties": {"user": {"type": "string"}}}
    number = register(registry, f"{topic}-value", dropped, "JSON")
    tools.send(kafka, topic, [framed(number, b'{"user": "eve"}')])

    with pytest.raises(InvalidInput, match="does not have the column 'n', which is a number"):
        read(f"{uri}&format=json-schema", ["user", "n"], rows=2)


def test_protobuf_by_its_descriptor(kafka, registry, topic, uri, tmp_path):
    """Fields by number: later ones are passed over; presence, enums, lists and times."""
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    message = file.message_type.add(name="Click")
    for n, (name, type_, label) in enumerate(
        [
            ("user", kind.TYPE_STRING, kind.LABEL_OPTIONAL),
            ("n", kind.TYPE_INT64, kind.LABEL_OPTIONAL),
            ("tags", kind.TYPE_STRING, kind.LABEL_REPEATED),
            ("raw", kind.TYPE_BYTES, kind.LABEL_OPTIONAL),
        ],
        start=1,
    ):
        message.field.add(name=name, number=n, type=type_, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    click = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Click"))
    (tmp_path / "click.pb").write_bytes(
        descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    )
    text = 'syntax = "proto3"; package shop; message Click { string user = 1; int64 n = 2; '
    text += "repeated string tags = 3; bytes raw = 4; }"
    number = register(registry, f"{topic}-value", text, "PROTOBUF")
    body = click(user="ann", n=3, tags=["x"], raw=b"\xff").SerializeToString()
    later = body + b"\x78\x05"  # a field 15 that this reader has not
    indexes = b"\x04\x02\x00"  # the message is named by its place in the file: 2 of them, 1 and 0
    sent = [b"\0" + body, b"\0" + later, indexes + body, b"\0\xff\xff", b"\0" + b"\x0a\x7fann"]
    tools.send(kafka, topic, [framed(number, one) for one in sent])
    how = f"&format=protobuf&descriptor_file={tmp_path}/click.pb&message=shop."
    found, bad = read(f"{uri}{how}Click", rows=3)

    assert found == [{"user": "ann", "n": "3", "tags": '["x"]', "raw": "ff"}] * 3
    assert len(bad) == 2
    with pytest.raises(InvalidInput, match=r"describes no message 'shop\.Other'"):
        open_source(f"{uri}{how}Other")
    with pytest.raises(InvalidParameter, match="needs descriptor_file"):
        open_source(f"{uri}&format=protobuf")


def test_releases_with_a_schema(kafka, registry, topic, uri):
    """Avro's own types; JSON as ever, behind the number of its schema; registered once."""
    for kind in ("avro", "json-schema"):
        with closing(open_sink(f"{uri}&format={kind}&subject={topic}-{kind}")) as sink:
            sink.check(kind, RELEASE.schema)
            sink.write(kind, 3, 1, RELEASE)
            sink.write(kind, 3, 2, RELEASE.slice(0, 1))
        assert ask(registry, f"/subjects/{topic}-{kind}/versions") == [1]
    sent = {key: [] for key in (b"avro", b"json-schema")}
    for key, value, _ in tools.committed(kafka, topic):
        number = int.from_bytes(value[1:5], "big")
        schema = json.loads(ask(registry, f"/schemas/ids/{number}")["schema"])
        if key == b"avro":
            row = fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)
        else:
            assert [*schema["properties"]] == ["window", "release", *RELEASE.column_names]
            row = json.loads(value[5:])
        sent[key].append(row)
    found = sent[b"avro"][0]
    expected = {"window": 3, "release": 4} | RELEASE.to_pylist()[0] | {"big": str(2**64 - 1)}
    assert found == expected
    plain = PlainRows().encode("x", RELEASE.slice(0, 1))
    first = sent[b"json-schema"][0]
    assert {name: first[name] for name in RELEASE.column_names} == json.loads(plain[0])

    (read_back, *_), bad = read(f"{uri}&format=json-schema", ["url", "clicks"], rows=4)
    assert read_back == {"url": '/a"b', "clicks": "1"}
    assert len(bad) == 4  # those of Avro


def test_columns_that_the_subject_does_not_allow(kafka, registry, topic, uri):
    """Refused before anything is charged, with both schemas."""
    subject = f"{topic}-value"
    register(registry, subject, fields(page="int"))
    ask(registry, f"/config/{subject}", {"compatibility": "FORWARD"}, method="PUT")
    with (
        closing(open_sink(uri)) as sink,
        pytest.raises(InvalidInput, match=r"release_a.*the newest of .*Click"),
    ):
        sink.check("a", release("a", 0, 1).schema)
    assert ask(registry, f"/subjects/{subject}/versions") == [1]


def test_a_registry_that_is_away(kafka, topic):
    """It is waited for like a broker; what an address must be is said."""
    tools.send(kafka, topic, [framed(1, b"x")])
    where = f"kafka://{kafka.address}/{topic}?patience=0.3&registry=http://127.0.0.1:9"
    with closing(open_source(where)) as source, pytest.raises(ServerUnreachable, match="registry"):
        drain(source, {}, rows=1)
    for wrong, words in (
        ("registry=127.0.0.1:8081", "must be an address"),
        ("registry=http://a:secret@h", "without a user"),
        ("format=avro", "needs registry="),
        ("registry=http://127.0.0.1:9&format=csv", "have format=avro"),
    ):
        with pytest.raises(InvalidParameter, match=words) as told:
            open_source(f"kafka://{kafka.address}/{topic}?{wrong}")
        assert "secret" not in str(told.value)


def test_a_query_over_avro_and_over_json(kafka, registry, topic, uri):
    """The same rows, whatever they are wrapped in, give the same bytes."""
    other = tools.make_topic(kafka, 1)
    number = register(registry, f"{topic}-value", CLICK)
    rows = [{"user": f"u{n}", "page": "home" if n % 3 else "news"} for n in range(900)]
    tools.send(kafka, other, rows, partition=0)
    tools.send(kafka, topic, [avro(number, CLICK, row) for row in rows], partition=0)
    query = dps.Query(
        name="pages", privacy_unit_column="user", keys=["page"], epsilon=1, delta=1e-9,
        max_groups_contributed=1,
    )  # fmt: skip
    named = {"secret": SECRET, "options": EngineOptions(run_id=RUN)}
    plain = f"kafka://{kafka.address}/{other}?until=900"
    (first,), (second,) = (dps.run(query, source=s, **named) for s in (plain, f"{uri}&until=900"))

    assert first.equals(second, check_metadata=True)
    assert len(first) == 2
