"""Messages of pgoutput: what the server cannot have sent is an error in words."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.connectors.postgres.pgoutput import UNSENT, Change, Relation, parse
from dpstream.errors import InvalidInput

RELATION = (
    b"R\0\0\0\7public\0clicks\0d\0\2"
    b"\1id\0\0\0\0\x17\xff\xff\xff\xff"
    b"\0user\0\0\0\0\x19\xff\xff\xff\xff"
)
UPDATE = b"U\0\0\0\7O\0\2t\0\0\0\0011nN\0\2t\0\0\0\0011u"


def test_what_a_message_says():
    """Tables with their columns; rows with NULL, values that were not sent, and the row before."""
    assert parse(RELATION) == [
        Relation(table=7, name="public.clicks", columns=[("id", 23, -1), ("user", 25, -1)])
    ]
    assert parse(UPDATE) == [
        Change(operation="update", table=7, row=("1", UNSENT), before=("1", None))
    ]
    assert parse(b"D\0\0\0\7K\0\1t\0\0\0\0011")[0].operation == "delete"
    found = parse(b"T\0\0\0\2\0\0\0\0\7\0\0\0\x08")
    assert [(one.operation, one.table) for one in found] == [("truncate", 7), ("truncate", 8)]
    assert parse(b"Y\0\0\0\7public\0kind\0") == parse(b"O" + bytes(9)) == []


def test_every_message_that_is_cut_off():
    """Wherever it ends."""
    for message in (RELATION, UPDATE, b"B" + bytes(20), b"C" + bytes(25)):
        parse(message)
        for end in range(1, len(message)):
            with pytest.raises(InvalidInput, match="cut off"):
                parse(message[:end])


@pytest.mark.parametrize("kind", [b"S", b"b", b"P", b"K", b"r", b"?"])
def test_messages_of_other_protocols(kind):
    """Streamed and prepared transactions, which nobody has asked for."""
    with pytest.raises(InvalidInput, match="two_phase"):
        parse(kind + bytes(40))


@given(st.sampled_from("BCRIUDT"), st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes(kind, content):
    """They are read or refused."""
    with suppress(InvalidInput):
        parse(kind.encode() + content)
