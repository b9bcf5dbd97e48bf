"""Nothing that depends on the data leaves on a public route but the releases.

Two runs whose releases are equal must give equal answers, byte by byte, on every route: what
differs between them (rows that were late, broken, out of range, of keys below the threshold) can
then not be told from outside. And values that were planted in the input are nowhere.
"""

import json
import re
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.support.pipelines import PIPELINE, public_side, published, rows

PLANTED = "planted4711"
UNITS = [f"{PLANTED}user{number}" for number in range(3)]
ASIDE = [
    f"{UNITS[0]},,not a time {PLANTED},5",  # dead letters
    f"{UNITS[1]},{PLANTED}page,,",
    f",{PLANTED}page,100,5",
    f"{UNITS[2]},{PLANTED}page,99999999,5",  # outside
    f"{UNITS[2]},{PLANTED}page,-5,5",
]
COUNTED = [  # where rows are measured as a whole, these are among them: that is paid for
    f"{UNITS[0]},{PLANTED}rare,1800,5",  # a key that one user has, before `all` begins
    f"{UNITS[0]},{PLANTED}value,1800,{PLANTED}",  # a value that is no number
]
UNMEASURED = PIPELINE.replace("privacy_unit_column", "report_bias = false, privacy_unit_column", 3)
CASES = {"measured": (PIPELINE, ASIDE), "unmeasured": (UNMEASURED, ASIDE + COUNTED)}
LETTERS = {"measured": 6, "unmeasured": 7}
"""Dead letters of the queries that are looked at."""


def everything(client, document, queries):
    """Every route of the document with what there is to ask, and the page with what it links to."""
    names = [each["name"] for each in queries]
    keys = {
        name: [row["id"] for row in client.get(f"/api/queries/{name}/latest").json()["rows"]]
        for name in names
    }
    asked = ["/", *_linked(client)]
    for path in document["paths"]:
        for name in names if "{name}" in path else [""]:
            filled = path.replace("{name}", name)
            if "{id}" in path:
                asked += [filled.replace("{id}", each) for each in keys[name]]
            elif path.endswith("/series"):
                asked += [
                    f"{filled}?id={each}&window={w}" for each in keys[name] for w in ("0", "all")
                ]
            elif path.endswith("/download"):
                asked += [
                    f"{filled}?format={kind}" for kind in ("arrow", "csv", "parquet", "jsonl")
                ]
            elif path.endswith("/what-if"):
                asked += [f"{filled}?query={each}&epsilon=1" for each in names]
            elif path.endswith("/events"):
                continue  # it does not end; its events are compared below
            else:
                asked.append(filled)
    for name in names:
        asked += [
            f"/api/queries/{name}/{word}"
            for word in ("latest?window=9", "series?window=9&id=" + "0" * 32)
        ]
        asked += [
            f"/api/queries/{name}/latest?q={PLANTED}",
            f"/api/queries/{name}/series?key=[%22{PLANTED}page%22]",
        ]
        asked += [
            f"/api/queries/{name}/releases?limit=1&after=1.1",
            f"/api/queries/{name}/releases?format=csv",
        ]
    asked += [
        "/nothing",
        "/metrics",
        "/health",
        "/dead-letters",
        "/lag",
        "/ledger",
        "/api/queries/none",
    ]
    return list(dict.fromkeys(asked))


def _linked(client):
    page = client.get("/").text
    return [f"/{link}" for link in re.findall(r'(?:src|href)="/?(assets/[^"]+)"', page)]


def answers(pipeline):
    """Status, headers and body of every route, by its address."""
    public = public_side(pipeline, rate=1e6, burst=10**6)
    with TestClient(public.app(), raise_server_exceptions=False) as client:
        queries = client.get("/api/queries").json()["queries"]
        found = {}
        for path in everything(client, public.document(), queries):
            answer = client.get(path)
            headers = {name: value for name, value in answer.headers.items() if name != "date"}
            found[path] = (answer.status_code, headers, answer.content)
        events = public.endpoints()[8].handler.__self__
        assert type(events).__name__ == "EventStream"
        for released in public.hub.reader.after(0, 1000):
            for with_rows in (False, True):
                place = f"event {released.id} {with_rows}"
                found[place] = (200, {}, events._render(released, with_rows))
    return found


@pytest.fixture(scope="module")
def plain(pipeline):
    return answers(pipeline)


@pytest.fixture(scope="module", params=CASES)
def planted(request, tmp_path_factory):
    text, aside = CASES[request.param]
    pipeline = published(tmp_path_factory.mktemp("planted") / "p", [*rows(), *aside], text)
    return pipeline, answers(pipeline)


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory):
    return answers(published(tmp_path_factory.mktemp("unmeasured") / "p", rows(), UNMEASURED))


@pytest.mark.parametrize("planted", CASES, indirect=True)
def test_equal_releases_give_equal_answers(request, planted):
    """Rows that change no release change no byte of any answer."""
    _, found = planted
    case = request.node.callspec.params["planted"]
    without = request.getfixturevalue("plain" if case == "measured" else case)

    assert found.keys() == without.keys()
    assert len(found) > 150
    assert [path for path in found if found[path] != without[path]] == []


@pytest.mark.parametrize("planted", CASES, indirect=True)
def test_the_planted_rows_were_there(request, planted):
    """The operator has them all: the test above compares two different inputs."""
    pipeline, _ = planted
    kept = [
        json.loads(line)
        for folder in (pipeline.folders["pages"], pipeline.folders["steps"])
        for path in (folder / "dead-letters").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]

    assert len(kept) == LETTERS[request.node.callspec.params["planted"]]
    assert PLANTED in json.dumps(kept)


def test_nothing_planted_is_on_any_route(planted):
    """Units and raw values of rows, that were used and that were not."""
    _, found = planted
    for path, (_, headers, body) in found.items():
        assert PLANTED.encode() not in body, path
        assert PLANTED not in json.dumps(headers), path
        # the units of all other rows
        assert not re.search(rb"\bu\d{1,4}\b", _as_text(path, body)), path


def _as_text(path, body):
    """What an answer says: bytes of numbers in a binary table may look like anything."""
    if not body or not re.search("format=(arrow|parquet)", path):
        return body
    table = pa.ipc.open_stream(body).read_all() if "arrow" in path else pq.read_table(BytesIO(body))
    return f"{table.schema} {table.to_pylist()}".encode()


def test_no_public_route_is_the_operators(plain):
    """What only the operator may see is not there at all."""
    for path in ("/metrics", "/health", "/dead-letters", "/lag", "/ledger"):
        assert plain[path][0] == 404


def test_a_row_that_changes_a_release_is_seen_by_this_test(plain, tmp_path_factory):
    """The control: with another user in a published key, answers differ."""
    pipeline = published(tmp_path_factory.mktemp("other") / "p", [*rows(), "new,home,3700,5"])
    found = answers(pipeline)

    assert [path for path in plain if found.get(path) != plain[path]]
