"""Rows of one unit, made of a table's changes, depend on that unit's rows alone.

That is all that the contribution bounds rest on (docs/soundness/changes.md). A history is a list of
(operation, id of the row, its unit then, its page); an update may give a row to another unit.
"""

import json
import struct
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpstream as dps
from dpstream.connectors.changes import RULES, adds_row
from dpstream.connectors.kafka.debezium import DebeziumDecoder
from dpstream.connectors.messages import Decoder
from dpstream.connectors.postgres.pgoutput import Change, parse
from tests.support.fixed import SECRET

RULES = RULES[1:]  # `stop` goes no further than a change
UNITS = ["u", "v", "w"]
changes = st.tuples(
    st.sampled_from(["insert", "update", "delete"]),
    st.integers(0, 3),
    st.sampled_from(UNITS),
    st.sampled_from(["x", "y"]),
)
histories = st.lists(changes, max_size=12)
OPS = {"insert": "c", "update": "u", "delete": "d"}


def messages_of(history):
    """Each with its number as its place; several of one record have a place of their own."""
    messages = []
    for number, (operation, row, unit, page, *record) in enumerate(history, 1):
        after = None if operation == "delete" else {"id": row, "user": unit, "page": page}
        place = record[0] if record else number
        source = {"connector": "postgresql", "sequence": f'["0", "{place}"]'}
        messages.append(json.dumps({"op": OPS[operation], "after": after, "source": source}))
    return messages


def rows_of_log(log, rule):
    payloads = [one.encode() for one in log]
    found = DebeziumDecoder(Decoder("json"), rule).changes(payloads, None, ["id", "user", "page"])
    return [(row["id"], row["user"], row["page"]) for row in found.decoded.table.to_pylist()]


def by_debezium(history, rule, restarts=()):
    """The rows; at each restart the messages since some earlier one are sent again."""
    messages = messages_of(history)
    log, sent = [], 0
    for until, back in [*restarts, (len(messages), 0)]:
        until = min(max(until, sent), len(messages))
        log += messages[max(0, sent - back) : until]
        sent = until
    return rows_of_log(log, rule)


def by_pgoutput(history, rule):
    """The rows, by the bytes that the server sends."""

    def tuple_of(*cells):
        texts = [str(cell).encode() for cell in cells]
        return struct.pack(">H", len(texts)) + b"".join(
            b"t" + struct.pack(">i", len(text)) + text for text in texts
        )

    rows = []
    for operation, row, unit, page in history:
        new, key = b"N" + tuple_of(row, unit, page), b"K" + tuple_of(row)
        content = {"insert": b"I", "update": b"U", "delete": b"D"}[operation]
        content += struct.pack(">I", 7)
        content += {"insert": new, "update": key + new, "delete": key}[operation]
        (change,) = parse(content)
        assert isinstance(change, Change)
        if adds_row(rule, change.operation):
            rows.append(change.row)
    return rows


def each_row_once(history, rule):
    """A broken form: the first version of each row counts, whoever has it later."""
    seen, rows = set(), []
    for row in by_pgoutput(history, rule):
        if row[0] not in seen:
            rows.append(row)
        seen.add(row[0])
    return rows


def others(rows, unit):
    return Counter(row for row in rows if row[1] != unit)


def without(history, unit):
    """The history in which the unit never had a row."""
    return [change for change in history if change[2] != unit]


def holds(rows_of, history, rule, unit):
    return others(rows_of(history, rule), unit) == others(
        rows_of(without(history, unit), rule), unit
    )


@given(histories, st.sampled_from(RULES), st.sampled_from(UNITS))
@settings(max_examples=150, deadline=None)
def test_other_units_rows_are_as_they_were(history, rule, unit):
    """Whatever the unit inserted, changed, deleted, gave away or was given."""
    assert holds(by_debezium, history, rule, unit)
    assert holds(by_pgoutput, history, rule, unit)


restarts = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4)


@given(histories, st.sampled_from(RULES), restarts)
@settings(max_examples=150, deadline=None)
def test_what_is_sent_again_changes_nothing(history, rule, restarts):
    """The rows are those of the history, each once and in its order."""
    restarts = sorted(restarts)
    assert by_debezium(history, rule, restarts) == by_debezium(history, rule)
    texts = [tuple(map(str, row)) for row in by_debezium(history, rule)]
    assert texts == by_pgoutput(history, rule)


records = st.lists(st.integers(1, 4), max_size=8).map(sorted)


@given(records, st.data(), st.sampled_from(UNITS))
@settings(max_examples=150, deadline=None)
def test_what_is_sent_again_depends_on_no_other_unit(places, data, unit):
    """Records of several rows, sent again from anywhere on, also the last alone: others' rows are
    the same without the unit, whose messages are in neither part of the log then."""
    history = [
        ("insert", number, data.draw(st.sampled_from(UNITS)), "x", place)
        for number, place in enumerate(places)
    ]
    log, back = messages_of(history), data.draw(st.integers(0, len(history)))
    less = messages_of(without(history, unit))
    again = messages_of(without(history[back:], unit))

    rows, fewer = rows_of_log(log + log[back:], "inserts"), rows_of_log(less + again, "inserts")
    assert others(rows, unit) == Counter(fewer)


def test_a_form_that_looks_at_rows_of_others_is_caught():
    """A row that u has given to v counts for v, whether u is there or not."""
    history = [("insert", 1, "u", "x"), ("update", 1, "v", "x")]

    assert not holds(each_row_once, history, "versions", "u")
    assert holds(by_pgoutput, history, "versions", "u")


@pytest.mark.parametrize("rule", RULES)
def test_a_unit_counts_no_more_than_its_bound(rule):
    """However often its rows are changed; deleting them takes nothing back."""
    history = [("insert", n, "u", "x") for n in range(300)]
    history += [("update", n, "u", "x") for n in range(300)]
    history += [("delete", n, "u", "x") for n in range(300)]
    rows = by_debezium(history, rule)
    assert len(rows) == {"inserts": 300, "versions": 600}[rule]
    query = dps.Query(
        name="pages", privacy_unit_column="user", keys=["page"], public_groups=["x"], epsilon=10,
        delta=1e-9, max_groups_contributed=1, max_rows_per_group=3, report_bias=False,
    )  # fmt: skip
    table = pa.table({"user": [row[1] for row in rows], "page": [row[2] for row in rows]})
    (release,) = dps.run(query, source=table, secret=SECRET)
    (n,), (stddev,) = release["count"].to_pylist(), release["count_stddev"].to_pylist()

    assert abs(n - 3) <= 6 * stddev < 50  # false alarm 1e-8; all versions would be 300 and more
