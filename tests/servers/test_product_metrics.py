"""The guide to product metrics, from a Kafka topic to the page, with windows of a minute."""

import json
import re
from datetime import UTC, datetime

import pytest

from dpstream.privacy.state import Secret
from tests.cli.test_docs import ROOT
from tests.servers import kafka_tools as tools
from tests.support.fixed import SECRET
from tests.support.processes import until
from tests.support.served import Follower, served

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

TEXT = (ROOT / "docs" / "howto" / "product-metrics.md").read_text()


def query_of_the_guide():
    """Its SQL, with a window of a minute that is published every second."""
    found = re.search(r'>>> text = """\n(.*?)"""\n', TEXT, re.DOTALL).group(1)
    query = re.sub(r"^\.\.\. ", "", found, flags=re.MULTILINE)
    for long, short in (("'1' HOUR)", "'30' SECOND)"), ("'1' DAY", "'1' MINUTE")):
        assert long in query
        query = query.replace(long, short)
    assert query.endswith("EMIT EVERY INTERVAL '1' HOUR")
    return query.removesuffix("'1' HOUR") + "'1' SECOND"


def test_from_a_topic_to_the_page(kafka, tmp_path):
    """600 users look, 400 of them take a cart, 200 pay: the feed behind the page has it live."""
    topic = tools.make_topic(kafka, 2)
    pipeline = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL).group(1)
    assert "kafka://broker:9092/events" in pipeline
    place = tmp_path / "pipeline.toml"
    place.write_text(pipeline.replace("broker:9092/events", f"{kafka.address}/{topic}"))
    (tmp_path / "funnel.sql").write_text(query_of_the_guide())
    Secret.create(tmp_path / "funnel.state.secret", value=SECRET)
    with served(place) as server:
        follower = Follower(server, last=0)
        until(lambda: follower.events)  # from now on rows belong to a window of the run
        best = {}

        def reached():
            now = datetime.now(UTC).isoformat()
            steps = [("home", 600), ("cart", 400), ("thanks", 200)]
            rows = [
                {"user_id": f"u{n}", "page": page, "ts": now}
                for page, users in steps
                for n in range(users)
            ]
            tools.send(kafka, topic, rows)
            _, answer = server.ask("/api/queries/funnel/releases?limit=10000")
            for row in json.loads(answer)["rows"]:
                step, users = row["key"][1], row["values"]["users"]
                best[step] = max(best.get(step, 0), users)
            return best.get("thanks", 0) > 100 and best.get("home", 0) > 500

        until(reached, seconds=150, every=1)
        status, page = server.ask("/")

    assert status == 200
    assert b"<html" in page
    # 600, 400 and 200 users, each with noise of less than 20 (deviations of which six are 120)
    assert best["thanks"] < 320
    assert best["cart"] < 520
