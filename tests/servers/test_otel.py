"""Metrics and spans of a run, through a real collector of OpenTelemetry."""

import json

import pytest

from dpstream.errors import InvalidParameter
from dpstream.serve.metrics import METRICS
from dpstream.serve.otel import check_collector
from tests.support.pipelines import PAGES, rows, write
from tests.support.processes import Command, until
from tests.support.served import served

pytestmark = pytest.mark.servers


def attributes(one):
    """Names and plain values."""
    return {each["key"]: next(iter(each["value"].values())) for each in one.get("attributes", [])}


def spans(kept):
    """Every span."""
    return [
        span
        for path, content in list(kept)
        if path == "/v1/traces"
        for resource in content["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def metrics(kept):
    """The last value of each metric and query, and which kind it is."""
    found, kinds = {}, {}
    for path, content in list(kept):
        for resource in content["resourceMetrics"] if path == "/v1/metrics" else ():
            assert attributes(resource["resource"])["service.name"] == "dpstream"
            for scope in resource["scopeMetrics"]:
                for metric in scope["metrics"]:
                    kind = "sum" if "sum" in metric else "gauge"
                    kinds[metric["name"]] = kind
                    for point in metric[kind]["dataPoints"]:
                        value = point.get("asDouble", point.get("asInt"))
                        found[metric["name"], attributes(point).get("query")] = float(value)
    return found, kinds


def test_a_run_tells_a_collector_what_it_does(collector, tmp_path):
    """Spans of triggers, stages, charges and sinks; the metrics; no value of the data."""
    path = write(tmp_path / "p", rows(users=300))
    run = Command("run", path, "--otel", collector.address)
    assert run.wait(timeout=100) == 0
    until(lambda: {"trigger", "charge", "sink"} <= {span["name"] for span in spans(collector.kept)})
    until(lambda: ("dpstream_releases_total", "pages") in metrics(collector.kept)[0])

    told = spans(collector.kept)
    by_id = {span["spanId"]: span for span in told}
    triggers = [span for span in told if span["name"] == "trigger"]
    asked = {attributes(span)["dpstream.query"] for span in triggers}
    assert asked == {"pages", "changed", "all"}
    inside = {
        span["name"]
        for span in told
        if by_id.get(span.get("parentSpanId"), {}).get("name") == "trigger"
    }
    assert {"aggregate", "publish"} <= inside
    written = [attributes(span) for span in told if span["name"] == "sink"]
    places = {
        (each["dpstream.query"], each["dpstream.window"], each["dpstream.release"])
        for each in written
    }
    files = list((tmp_path / "p" / "out").glob("pages-*.parquet"))
    assert len([place for place in places if place[0] == "pages"]) == len(files) > 4
    assert all(int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) for span in told)
    values, kinds = metrics(collector.kept)
    assert values["dpstream_releases_total", "pages"] == len(files)
    assert values["dpstream_rows_read_total", "pages"] == 300 * len(PAGES)
    assert values["dpstream_budget_spent", None] > 0
    assert {name.removeprefix("dpstream_") for name in kinds} <= set(METRICS)
    assert {kind for name, kind in kinds.items() if name.endswith("_total")} == {"sum"}
    text = json.dumps(collector.kept)
    assert not any(page in text for page in (PAGES[2], "right to left", '"home"', '"u17"'))


def test_a_server_passes_the_address_on_to_its_run(collector, tmp_path):
    """Which is a process of its own."""
    path = write(tmp_path / "p", rows(users=100))
    with served(path, "--otel", collector.address) as server:
        until(lambda: ("dpstream_releases_total", "pages") in metrics(collector.kept)[0])
        until(lambda: {"trigger", "sink"} <= {span["name"] for span in spans(collector.kept)})
        assert server.stop()[0] == 0


def test_a_collector_that_is_away_holds_nothing_up(collector, tmp_path):
    """The run ends as always, with all its releases."""
    path = write(tmp_path / "p", rows(users=50))
    collector.stop()
    run = Command("run", path, "--otel", collector.address)

    assert run.wait(timeout=100) == 0
    assert len(list((tmp_path / "p" / "out").glob("pages-*.parquet"))) > 4


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:4318", "must be the address"),
        ("grpc://127.0.0.1:4317", "must be the address"),
        ("http://127.0.0.1:abc", "must be the address"),
        ("http://[::1", "must be the address"),
        ("http://127.0.0.1:4318/v1/traces", "must be the address"),
        ("http://0.0.0.0:4318", "without encryption"),
    ],
)
def test_an_address_must_be_one_that_is_safe(url, words):
    """Exact numbers do not go out unencrypted by mistake."""
    with pytest.raises(InvalidParameter, match=words):
        check_collector(url, plain_http=False)
    check_collector("https://collector.example", plain_http=False)
    check_collector("http://0.0.0.0:4318", plain_http=True)
