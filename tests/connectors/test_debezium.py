"""Messages of Debezium as rows."""

import base64
import json
from decimal import Decimal

import pytest

from dpstream.connectors.changes import OPERATIONS, RULES, UnwantedChange, adds_row
from dpstream.connectors.kafka.debezium import DebeziumDecoder
from dpstream.connectors.messages import Decoder


def message(op, after=None, before=None, *, lsn=None, commit=0, **more):
    source = {"connector": "postgresql", "snapshot": "false", "table": "clicks"}
    if lsn is not None:
        source |= {"lsn": lsn, "sequence": json.dumps([str(commit), str(lsn)])}
    return json.dumps(
        {"op": op, "before": before, "after": after, "source": source} | more
    ).encode()


def wrapped(payload, **types):
    """With the schema that Kafka Connect adds."""
    fields = [{"field": name, "type": "x", **kind} for name, kind in types.items()]
    schema = {"type": "struct", "fields": [{"field": "after", "type": "struct", "fields": fields}]}
    return json.dumps({"schema": schema, "payload": json.loads(payload)}).encode()


def decode(payloads, rule="versions", columns=None, place=None):
    return DebeziumDecoder(Decoder("json"), rule).changes(payloads, place, columns)


def rows(payloads, rule="versions", columns=None):
    return decode(payloads, rule, columns).decoded.table.to_pylist()


def bad(payloads, rule="versions", columns=None):
    return decode(payloads, rule, columns).decoded.bad


A, B = {"user": "a", "page": "x"}, {"user": "a", "page": "y"}


@pytest.mark.parametrize("wrap", [lambda each: each, wrapped])
def test_each_operation_by_each_rule(wrap):
    """Inserts and snapshots are rows; what else is one, the rule says."""
    changed = [("c", A), ("r", A), ("u", B), ("d", None), ("t", None), ("m", None)]
    payloads = [*(wrap(message(op, after, A)) for op, after in changed), None]

    assert rows(payloads, "inserts") == [A, A]
    assert rows(payloads, "versions") == [A, A, B]
    assert not bad(payloads)
    for at in (2, 3, 4):
        with pytest.raises(UnwantedChange) as stopped:
            decode([*payloads[:2], payloads[at]], "stop")
        assert stopped.value.at == 2
    assert rows([*payloads[:2], payloads[5], None], "stop") == [A, A]
    taken = {rule: [op for op in OPERATIONS if adds_row(rule, op)] for rule in RULES[1:]}
    assert taken == {"inserts": ["insert"], "versions": ["insert", "update"]}


def test_what_is_no_event_is_set_aside_with_the_reason():
    """Poison, unknown operations, unwrapped rows; marks of transactions are passed over."""
    begin = json.dumps({"status": "BEGIN", "id": "571:5", "event_count": None}).encode()
    payloads = [
        b"{oops", message("q", A), json.dumps(A).encode(), message("c"), b"[1]", b"",
        begin, message("c", A), message("c", A | {"user": {"deep": [1, 2.5]}}), message(["c"], A),
    ]  # fmt: skip
    found = decode(payloads).decoded

    assert [at for at, _ in found.bad] == [0, 1, 2, 3, 4, 5, 9]
    reasons = dict(found.bad)
    for at, words in {
        0: "not JSON",
        1: "'q'",
        2: "format=json",
        3: "no row after",
        9: "op",
    }.items():
        assert words in reasons[at]
    assert found.origin.tolist() == [7, 8]
    assert found.table["user"].to_pylist() == ["a", '{"deep": [1, 2.5]}']


def test_what_comes_again_is_set_aside():
    """By its place in the database's log, wherever the reading was broken off."""
    # two transactions that overlap in the log; the second has a record of three rows
    places = [(0, 200), (205, 100), (205, 300), (205, 300), (205, 300), (310, 320)]
    events = [
        message("c", {"user": str(n), "page": "x"}, lsn=lsn, commit=commit)
        for n, (commit, lsn) in enumerate(places)
    ]
    whole = [str(n) for n in range(6)]
    for sent in range(len(events) + 1):
        for back in range(sent + 1):
            log = [*events[:sent], *events[back:]]
            for cut in range(len(log) + 1):
                first = decode(log[:cut])
                place = json.loads(json.dumps(first.place))
                second = decode(log[cut:], place=place)
                tables = [one.decoded.table.to_pylist() for one in (first, second)]
                assert [row["user"] for table in tables for row in table] == whole, (sent, back)
                again = [*first.decoded.bad, *second.decoded.bad]
                assert len(again) == sent - back
                assert all("came again" in reason for _, reason in again)


def test_changes_of_one_record_that_differ_are_each_a_row():
    """A key that changes is a deletion and an insert at one place; so may two units' rows be."""
    log = [
        message("d", None, before=A, lsn=7),
        message("c", A, lsn=7),
        message("c", B, lsn=7),
    ]
    assert rows([*log, *log]) == [A, B]


def test_snapshots_and_other_databases_have_no_place():
    """Nothing of them is taken for something that came again, but MySQL's by file and position."""
    reads = [message("r", A, lsn=900) for _ in range(3)]
    assert len(rows([message("c", A, lsn=1000), *reads])) == 4

    def of(connector, **place):
        source = {"connector": connector, "snapshot": "false"} | place
        return json.dumps({"op": "c", "after": A, "source": source}).encode()

    mysql = [
        of("mysql", file=f"bin.{n}", pos=p, row=r)
        for n, p, r in [(999_999, 9, 0), (999_999, 9, 1), (1_000_000, 4, 0)]
    ]
    found = decode([*mysql, *mysql[1:]]).decoded
    assert (len(found.table), len(found.bad)) == (3, 2)
    assert len(rows([of("oracle", scn="7")] * 2)) == 2


def test_types_that_only_the_schema_tells():
    """Times, days and decimals are spelled out; numbers keep all their digits."""
    unscaled = base64.b64encode((-12_345).to_bytes(3, "big", signed=True)).decode()
    after = {
        "micro": 1_714_564_800_123_456,
        "milli": 1_714_564_800_123,
        "day": 19_844,
        "zoned": "2024-05-01T14:00:00.5+02:00",
        "money": unscaled,
        "free": {"scale": 1, "value": unscaled},
        "whole": 2**63,
        "real": 0.5,
        "flag": True,
        "none": None,
        "text": "007",
        "many": [1, None],
    }
    time, connect = "io.debezium.time", "org.apache.kafka.connect.data"
    types = {
        "micro": {"name": f"{time}.MicroTimestamp"},
        "milli": {"name": f"{time}.Timestamp"},
        "day": {"name": f"{time}.Date"},
        "zoned": {"name": f"{time}.ZonedTimestamp"},
        "money": {"name": f"{connect}.Decimal", "parameters": {"scale": "2"}},
        "free": {"name": "io.debezium.data.VariableScaleDecimal"},
        "text": {"name": "io.debezium.data.Uuid"},
    }
    (row,) = rows([wrapped(message("c", after), **types)])

    assert row == {
        "micro": "2024-05-01 12:00:00.123456",
        "milli": "2024-05-01 12:00:00.123000",
        "day": "2024-05-01",
        "zoned": "2024-05-01T12:00:00.500000+00:00",
        "money": "-123.45",
        "free": "-1234.5",
        "whole": str(2**63),
        "real": "0.5",
        "flag": "true",
        "none": None,
        "text": "007",
        "many": "[1, null]",
    }
    (exact,) = rows([b'{"op": "c", "after": {"n": 12345678901234567890.1230}}'])
    assert Decimal(exact["n"]) == Decimal("12345678901234567890.123")
    ((_, reason),) = bad([wrapped(message("c", {"money": "?"}), money=types["money"])])
    assert "'money'" in reason


def test_a_value_that_was_not_sent():
    """It is taken from the row before, if that has it; otherwise its row cannot be used."""
    unknown = {"user": "a", "page": "__debezium_unavailable_value"}

    assert rows([message("u", unknown, B)]) == [B]
    assert "REPLICA" in bad([message("u", unknown)])[0][1]
    assert rows([message("u", unknown)], columns=["user"]) == [{"user": "a"}]
