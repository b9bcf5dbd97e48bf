"""The bench of the server judges what clients have seen; it can fail."""

import pytest

from benchmarks import serve


def client(ids, connections=1):
    return {"ids": ids, "connections": connections, "delays": [0.5] * len(ids)}


def judged(*seen, clients=2):
    plan = serve.Plan(clients=clients, seconds=1, alone=1)
    found = serve.findings(plan, before=100.0, with_clients=90.0, after=110.0, seen=seen)
    return found, [row["reached"] for row in found.targets]


def test_clients_that_have_seen_everything_pass():
    """They may have begun at different events, and have broken off."""
    found, reached = judged(client([1, 2, 3, 4], 2), client([3, 4]))

    assert reached == [True, True, True]
    assert found.rows[1]["connections"] == 3
    assert "+14.3% slower" in found.notes[0]


@pytest.mark.parametrize(
    ("seen", "reached"),
    [
        ([client([1, 2, 4]), client([1, 2, 3, 4])], [True, False, True]),
        ([client([1, 2, 3]), client([1, 2, 3, 4])], [True, False, True]),
        ([client([]), client([1, 2])], [True, False, True]),
        ([client([1, 2, 2, 3]), client([1, 2, 3])], [True, True, False]),
        ([client([1, 2, 3])], [False, True, True]),
    ],
)
def test_lost_and_repeated_events_and_lost_clients_fail(seen, reached):
    """A gap, an end that was not reached, nothing at all, the same twice, nobody."""
    assert judged(*seen)[1] == reached
