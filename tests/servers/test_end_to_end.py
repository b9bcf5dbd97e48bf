"""Producer -> Kafka -> dpstream -> PostgreSQL, killed again and again: the table of a calm run."""

import json
from dataclasses import replace

import pytest

from benchmarks.connector_kills import PARTITIONS, Storm, storm
from tests.servers import kafka_tools as tools

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

PLAN = Storm(kills=6, restarts=1, rows=100)


def test_the_table_of_a_calm_run(kafka, postgres, tmp_path):
    """Killed at random moments, the broker restarted once: every release is the same, once."""
    topic, out = (tools.make_topic(kafka, n) for n in (PARTITIONS, 1))
    into = f"kafka://{kafka.address}/{out}"
    found = storm(tmp_path, kafka, postgres, topic, PLAN, more_sinks=[into])

    assert found.kills == PLAN.kills
    assert found.releases == 18  # 4 + 4 + 4 + 4 + 2, by window
    assert found.tables["killed"] == found.tables["calm"]
    assert found.letters["killed"] == found.letters["calm"]
    assert len(set(found.letters["calm"])) == PLAN.steps * PARTITIONS
    assert found.identical
    sent = [json.loads(value) for _, value, _ in tools.committed(kafka, out)]
    place = found.columns.index("clicks")
    assert sorted(row["clicks"] for row in sent) == sorted(
        row[place] for row in found.tables["calm"]
    )
    for lost in (found.tables["calm"][1:], found.tables["calm"] + found.tables["calm"][:1], []):
        tables = found.tables | {"killed": lost}  # control: what is missing or double is seen
        assert not replace(found, tables=tables).identical
