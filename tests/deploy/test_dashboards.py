"""The dashboards of deploy/grafana: what they ask for is there. Grafana itself is not tried."""

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from starlette.testclient import TestClient

from dpstream.serve.metrics import METRICS
from tests.support.pipelines import public_side, published, rows

ROOT = Path(__file__).resolve().parent.parent.parent
GRAFANA = ROOT / "deploy" / "grafana"
PROMTOOL = ROOT / ".cache" / "deploy" / "bin" / "promtool"
LABELS = {"instance", "query", "partition", "dataset", "measure", "ledger", "process", "source"}


def board(name):
    """A dashboard's content."""
    return json.loads((GRAFANA / f"{name}.json").read_text())


def targets(name):
    """Every query of a dashboard's panels."""
    return [target for panel in board(name)["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("name", ["operator", "feed"])
def test_panels_stand_beside_each_other(name):
    """Each has an id of its own and a place that no other one covers; variables are declared."""
    content = board(name)
    panels = content["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    declared = {variable["name"] for variable in content["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(content)))
    assert used <= declared
    assert {panel["datasource"]["uid"] for panel in panels} == {"${source}"}


def test_the_operators_one_asks_for_metrics_that_there_are():
    """By name, with labels that they have, in words of the page about monitoring."""
    expressions = [target["expr"] for target in targets("operator")]
    variables = [each["definition"] for each in board("operator")["templating"]["list"][1:]]
    asked = {name for text in [*expressions, *variables] for name in metrics_in(text)}

    assert asked <= set(METRICS)
    assert len(asked) > 30
    legends = " ".join(target["legendFormat"] for target in targets("operator"))
    selected = set(re.findall(r"(\w+)=~", " ".join([*expressions, *variables])))
    assert selected | set(re.findall(r"{{(\w+)}}", legends)) <= LABELS


def metrics_in(text):
    """The names of metrics in an expression, without their prefix."""
    return re.findall(r"dpstream_(\w+)", text)


def test_a_metric_that_is_not_there_would_be_found():
    """The test above can fail."""
    assert not set(metrics_in("rate(dpstream_rows_red_total[5m])")) <= set(METRICS)


@pytest.mark.deploy
def test_promtool_accepts_the_expressions(tmp_path):
    """As rules, with what Grafana puts in for its variables."""

    def check(expressions):
        rules = [
            {"record": f"r{n}", "expr": text.replace("$__rate_interval", "1m").replace("$", "")}
            for n, text in enumerate(expressions)
        ]
        path = tmp_path / "rules.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
        return subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True).returncode

    assert check([target["expr"] for target in targets("operator")]) == 0
    assert check(["rate(dpstream_rows_read_total)"]) != 0


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    side = public_side(published(tmp_path_factory.mktemp("feed") / "p", rows(300)))
    with TestClient(side.app()) as client:
        yield client


def found(content, path):
    """What a path with dots leads to."""
    for word in path.split("."):
        content = content[int(word)] if isinstance(content, list) else content[word]
    return content


def given(query, answer):
    """The rows of an answer, with the columns that are asked for."""
    rows = found(answer, query["root_selector"])
    return [
        {each["text"]: found(row, each["selector"]) for each in query["columns"]} for row in rows
    ]


def asked(feed, query, variables):
    """The rows that a query of the dashboard gets of the feed."""
    text = json.dumps(query)
    for name, value in variables.items():
        text = re.sub(rf"\$\{{{name}(:text)?\}}", value, text)
    filled = json.loads(text)
    place = urlsplit(filled["url"])
    answer = feed.get(f"{place.path}?{place.query}")
    assert answer.status_code == 200, answer.text
    return given(filled, answer.json())


def test_the_feeds_one_asks_for_what_there_is(feed):
    """Every address answers, and every column is in the answer; lists choose from it, too."""
    variables = {"feed": "http://127.0.0.1:8000"}
    for each in board("feed")["templating"]["list"][2:]:
        options = asked(feed, each["query"]["infinityQuery"], variables)
        last = options[0]
        variables[each["name"]] = last.get("__value") or last["name"]
    shown = {
        panel["title"].partition(",")[0]: asked(feed, panel["targets"][0], variables)
        for panel in board("feed")["panels"]
    }

    assert variables["query"] == "pages"
    assert variables["figure"] == "clicks"
    assert {row["name"] for row in shown["Queries"]} == {"pages", "changed", "all", "steps"}
    assert [row["releases"] for row in shown["Windows"]] == [4, 4]
    values = [row["clicks"] for row in shown["Newest values"]]
    assert values == sorted(values, reverse=True)
    assert all(rows for rows in shown.values())
    assert len(board("feed")["panels"]) == 6
