"""Nobody gets in without the token, and nothing gets out with an error."""

import os
import socket
from contextlib import ExitStack

import pytest
from starlette.testclient import TestClient

from dpstream.errors import InvalidParameter, SecretError
from dpstream.serve import access
from dpstream.serve.access import Token, bound_socket, check_binding, is_loopback, load_token
from dpstream.serve.server import Settings
from dpstream.serve.sides import HEADERS as SECURITY
from dpstream.serve.sides import Parameter, Refusal
from tests.support.pipelines import HEADERS, TOKEN, operator_side, public_side


@pytest.fixture(scope="module")
def operator(pipeline):
    with TestClient(operator_side(pipeline).app(), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/api/queries", 200),
        ("GET", "/nothing", 404),
        ("GET", "/assets/../../description.py", 404),
        ("GET", "/assets/%2e%2e/description.py", 404),
        ("POST", "/api/queries", 405),
        ("GET", "/api/queries/pages/latest?limit=0", 422),
        ("GET", "/api/queries/pages/series?id=0&window=all%0A", 422),
        ("GET", "/api/queries/none/latest", 404),
        ("GET", "/api/queries/pages/latest?q=" + "x" * 9000, 414),
        ("HEAD", "/api/events", 200),
    ],
)
def test_every_answer_has_the_security_headers(feed, method, path, status):
    """The refusals too; and no script or style that is not a file of the server's own."""
    answer = feed.request(method, path)

    assert answer.status_code == status
    assert {name: answer.headers.get(name) for name in SECURITY} == SECURITY
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_pages_of_an_origin_that_is_named_may_frame_it(pipeline):
    """And no others; whatever is no origin is refused before anything listens."""
    side = public_side(pipeline, framed_by=("https://example.org", "https://example.com:8443"))
    with TestClient(side.app()) as client:
        headers = client.get("/").headers

    policy = headers["content-security-policy"]
    assert "frame-ancestors https://example.org https://example.com:8443" in policy
    assert "x-frame-options" not in headers
    others = dict(SECURITY)
    del others["x-frame-options"], others["content-security-policy"]
    assert {name: headers.get(name) for name in others} == others
    for wrong in ("example.org", "https://example.org/path", "*", "https://a.b; script-src *"):
        with pytest.raises(InvalidParameter, match="must be the origin of a page"):
            Settings(framed_by=(wrong,)).check()


def test_an_error_says_nothing_of_itself(public, monkeypatch, caplog):
    """An exception's words may hold a row; the operator's log has them, the answer has not."""
    planted = "planted-value-4711"

    def fail(*_, **__):
        raise RuntimeError(planted)

    monkeypatch.setattr(type(public.hub.reader), "newest", fail)
    with TestClient(public.app(), raise_server_exceptions=False) as client:
        answer = client.get("/api/queries/pages/latest")

    assert answer.status_code == 500
    assert planted not in answer.text
    assert "RuntimeError" not in answer.text
    assert {name: answer.headers.get(name) for name in SECURITY} == SECURITY
    assert planted in caplog.text


def test_who_asks_too_often_is_refused(pipeline):
    """Each address has its own bucket, which fills again."""
    with TestClient(public_side(pipeline, rate=0.001, burst=3).app()) as client:
        found = [client.get("/api/ledger").status_code for _ in range(5)]
        slow = client.get("/api/ledger")

    assert found == [200, 200, 200, 429, 429]
    assert slow.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \xff",
    ],
)
@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/ledger", "/lag", "/dead-letters", "/openapi.json", "/nothing"]
)
def test_the_operator_side_wants_the_token(operator, path, header):
    """On every route, also on those that are not there."""
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = operator.get(path, headers=headers)

    assert answer.status_code == 401
    assert answer.json() == {"error": "the operator's token is needed"}
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_token_lets_in(operator):
    """Spelled as headers may be."""
    for spelled in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "):
        assert operator.get("/health", headers={"authorization": spelled}).status_code == 200


def test_tokens_are_compared_by_digests_in_constant_time(monkeypatch):
    """Whatever is given, two digests of one length are compared, and all of them."""
    compared = []
    compare = access.hmac.compare_digest
    monkeypatch.setattr(
        access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b)
    )
    token = Token(TOKEN, source="a test")
    for given in ("", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}", "Bearer " + "y" * 5000):
        token.fits(given)

    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 5
    assert TOKEN not in repr(token)


def test_a_token_is_made_on_first_use_and_kept(tmp_path, monkeypatch):
    """Private to this user; the environment goes before the file."""
    monkeypatch.delenv(access.VARIABLE, raising=False)
    path = tmp_path / "operator.token"
    first = load_token(path)
    text = path.read_text().strip()

    assert path.stat().st_mode & 0o777 == 0o600
    assert len(text) >= 40
    assert first.fits(f"Bearer {text}")
    assert load_token(path).fits(f"Bearer {text}")
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    assert load_token(path).fits(f"Bearer {TOKEN}")
    assert not load_token(path).fits(f"Bearer {text}")


@pytest.mark.parametrize(
    ("text", "mode"), [("short", 0o600), ("x" * 20 + "\xe9", 0o600), ("x" * 40, 0o640)]
)
def test_a_token_that_is_weak_or_readable_is_refused(tmp_path, monkeypatch, text, mode):
    """With what to do about it, and without the token."""
    monkeypatch.delenv(access.VARIABLE, raising=False)
    path = tmp_path / "token"
    path.write_text(text, encoding="latin-1")
    path.chmod(mode)

    with pytest.raises(SecretError) as refused:
        load_token(path)
    assert text not in str(refused.value)


def test_only_loopback_is_bound_without_more_words():
    """Others can reach anything else: it must be encrypted, or meant."""
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_binding(host, "it", encrypted=False, allowed=False)
    for host in ("0.0.0.0", "::", "", "192.0.2.1", "8.8.8.8"):
        with pytest.raises(InvalidParameter, match="--tls-cert"):
            check_binding(host, "it", encrypted=False, allowed=False)
        check_binding(host, "it", encrypted=True, allowed=False)
        check_binding(host, "it", encrypted=False, allowed=True)
    with pytest.raises(InvalidParameter, match="not known"):
        is_loopback("no such host.invalid")


def test_a_port_that_is_taken_is_said_so():
    """With what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidParameter, match="name another port with --operator-port"):
            bound_socket("127.0.0.1", taken.getsockname()[1], "--operator-port")


def test_one_address_cannot_take_all_event_streams(feed, public):
    """Streams are counted by address while they last; others may still come."""
    followers = public.hub.followers
    with ExitStack() as open_streams:
        for _ in range(followers.per_address):
            open_streams.enter_context(followers.taken("testclient"))
        refused = feed.head("/api/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert public.hub.clients == followers.per_address
    with followers.taken("another"):
        assert feed.head("/api/events").status_code == 200
    assert not followers.addresses


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"kind": "integer", "least": 0}, "-1"),
        ({"kind": "integer"}, "1e3"),
        ({"kind": "integer"}, "٣"),
        ({"kind": "integer"}, "9" * 40),
        ({"kind": "integer"}, ""),
        ({"kind": "number"}, "nan"),
        ({"kind": "number"}, "inf"),
        ({"kind": "number"}, "1" * 50),
        ({"longest": 3}, "four"),
        ({"choices": ("a", "b")}, "c"),
        ({"pattern": "^[a-z]$"}, "A"),
        ({}, "\udc80"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_without_repeating_it(settings, given):
    """What is said is fixed: nothing of the request comes back."""
    parameter = Parameter(name="it", about="", **settings)
    with pytest.raises(Refusal) as refused:
        parameter.read([given])

    assert refused.value.status == 422
    assert refused.value.words == f"the parameter it must be {parameter.wanted}"


def test_a_body_that_is_too_large_is_not_read(pipeline, tmp_path):
    """The answer comes before the rest of it."""
    side = operator_side(pipeline, most_body=1000)
    side.intakes = {"clicks": object()}
    sent = []

    def body():
        for _ in range(100):
            sent.append(1)
            yield b"x" * 600

    with TestClient(side.app()) as client:
        answer = client.post("/ingest/clicks", headers=HEADERS, content=body())

    assert answer.status_code == 413
    assert os.environ.get(access.VARIABLE) is None
