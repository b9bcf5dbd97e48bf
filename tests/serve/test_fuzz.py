"""Whatever is asked, of either side: an answer that the OpenAPI document knows, and never a 5xx."""

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dpstream.serve.operator_side import ARROW, JSONL
from dpstream.session.pipeline import load_pipeline
from tests.support.long import some_examples
from tests.support.pipelines import HEADERS, PAGES, PUSHED, operator_side, write

HOSTILE = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.sampled_from(["", "0", "-1", "1.5", "1e309", "nan", "9" * 30, "all", "null", "[]", "[[1]]"]),
    st.sampled_from(["[" * 2000, '";--', "../..", "%00", "\x00", "{name}", "true", "<script>"]),
)


def fitting(parameter):
    """Values that a parameter's own schema allows."""
    schema = parameter["schema"]
    schema = schema.get("items", schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "integer":
        most = schema.get("maximum", 9)
        return st.integers(schema.get("minimum", 0), min(most, 50)).map(str)
    if schema["type"] == "number":
        return st.floats(schema.get("minimum", 0), schema.get("maximum", 1)).map(repr)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    known = {"sort": ["clicks", "seconds"], "key": [json.dumps([PAGES[2]])]}
    return st.sampled_from(known.get(parameter["name"], ["home", "x"]))


@st.composite
def requests(draw, document, *, leave_out=()):
    """A method, an address, and headers."""
    path = draw(st.sampled_from([path for path in document["paths"] if path not in leave_out]))
    (method,) = document["paths"][path]
    operation, asked = document["paths"][path][method], []
    filled = path
    for parameter in operation["parameters"]:
        value = fitting(parameter) if draw(st.integers(0, 3)) else HOSTILE
        if parameter["in"] == "path":
            given = draw(value)
            filled = filled.replace("{" + parameter["name"] + "}", quote(given, safe="") or "%20")
        else:
            values = draw(st.lists(value, max_size=2))
            asked += [f"{parameter['name']}={quote(each, safe='')}" for each in values]
    if draw(st.booleans()):
        asked.append(f"{quote(draw(HOSTILE))}={quote(draw(HOSTILE))}")
    headers = draw(
        st.dictionaries(
            st.sampled_from(["if-none-match", "last-event-id", "accept", "range", "host"]),
            st.sampled_from(["*", '"x"', "-1", "9" * 30, "text/csv", "bytes=0-1", "evil.example"]),
            max_size=2,
        )
    )
    return method, path, f"{filled}?{'&'.join(asked)}", headers


def check(document, path, method, answer):
    """The answer is one of those that the route has declared."""
    declared = document["paths"].get(path, {}).get(method, {"responses": {}})["responses"]
    assert str(answer.status_code) in {*declared, "404", "414"}, (path, answer.status_code)
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error"}
    kinds = declared.get(str(answer.status_code), {}).get("content")
    if kinds and answer.content:
        assert answer.headers["content-type"].partition(";")[0] in kinds


def test_the_public_side_answers_everything(feed, public):
    """Events do not end, and are asked for elsewhere."""
    document = public.document()

    @some_examples(400, of=4)
    @given(requests(document, leave_out=["/api/events"]))
    def answers(request):
        method, path, address, headers = request
        check(document, path, method, feed.request(method, address, headers=headers))

    answers()


@pytest.mark.parametrize("key", ["", "[", "[" * 2000, "{}", "[[1]]", '"x"', "nul", "[NaN", "\x00"])
@pytest.mark.parametrize("route", ["series", "releases"])
def test_a_key_that_is_no_key_is_refused(feed, route, key):
    """However deep, or short."""
    answer = feed.get(f"/api/queries/pages/{route}", params={"key": key})

    assert answer.status_code == 422
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("query", ["last_id=-1", "last_id=x", "rows=2", "last_id=" + "9" * 30])
def test_events_refuse_what_they_cannot_follow(feed, query):
    """Before the stream begins."""
    assert feed.get(f"/api/events?{query}").status_code == 422


def test_the_operator_side_answers_everything(tmp_path):
    """Bodies of any kind and content, too."""
    pipeline = load_pipeline(write(tmp_path / "p", [], PUSHED))
    side = operator_side(pipeline)
    document = side.document()
    lines = st.lists(st.dictionaries(st.sampled_from(["user", "page", "at"]), HOSTILE), max_size=3)
    bodies = st.one_of(
        st.binary(max_size=60),
        lines.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
        st.just(b'{"user":' * 500),
    )
    kinds = st.sampled_from([*JSONL, ARROW, "text/plain", "", "application/json; charset=x"])

    with TestClient(side.app(), raise_server_exceptions=False) as client:

        @some_examples(300, of=4)
        @given(requests(document), bodies, kinds, HOSTILE)
        def answers(request, body, kind, key):
            method, path, address, headers = request
            headers = headers | HEADERS
            if method == "post":
                headers |= {"content-type": kind, "idempotency-key": quote(key)}
            answer = client.request(method, address, headers=headers, content=body)
            check(document, path, method, answer)

        answers()
