"""Addresses of servers, their options and secrets; trying again when a server is away."""

import pytest

from dpstream.connectors.registry import open_uri
from dpstream.connectors.server_base import RetryPolicy, ServerOptions, is_uri
from dpstream.errors import InvalidParameter, SecretError, ServerUnreachable


def test_what_is_an_address():
    """Paths are none, whatever they hold."""
    assert is_uri("kafka://localhost:9092/clicks")
    assert not any(map(is_uri, ("clicks/*.csv", "csv:out/", "-", "a:b", None)))


def test_options_of_the_table_go_before_those_of_the_address():
    """And are text, whatever they were."""
    options = ServerOptions("x://h1:1,h2:2/a%20b?n=1&flag=no", {"n": 2.5, "flag": True})

    assert (options.servers, options.path) == ("h1:1,h2:2", "a b")
    assert options.number("n", 0) == 2.5
    assert options.text("flag") == "true"
    options.finish()


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x", ""])
def test_a_number_that_is_none(value):
    """The error names the option and what was found."""
    with pytest.raises(InvalidParameter, match="patience must be a number from 0 on"):
        ServerOptions(f"x://h/t?patience={value}").number("patience", 1)


def test_a_secret_has_one_place(tmp_path, monkeypatch):
    """A file or a variable; never the address, which others see."""
    kept = tmp_path / "kept"
    kept.write_text("s3cret\n")
    monkeypatch.setenv("KEPT", "other")

    assert ServerOptions(f"x://h/t?password_file={kept}").secret("password") == "s3cret"
    assert ServerOptions("x://h/t?password_env=KEPT").secret("password") == "other"
    assert ServerOptions("x://h/t").secret("password") is None
    with pytest.raises(InvalidParameter, match="not both"):
        ServerOptions(f"x://h/t?password_env=KEPT&password_file={kept}").secret("password")
    with pytest.raises(SecretError, match="NONE"):
        ServerOptions("x://h/t?password_env=NONE").secret("password")
    for uri in ("x://me:s3cret@h/t", "x://h/t?password=s3cret"):
        with pytest.raises(InvalidParameter) as caught:
            ServerOptions(uri).secret("password")
        assert "s3cret" not in str(caught.value)


def test_an_unknown_scheme_and_an_unknown_option():
    """What there is instead."""
    with pytest.raises(
        InvalidParameter, match="there is no source ftp://; there are s3://, kafka://"
    ):
        open_uri("source", "ftp://h/t")
    options = ServerOptions("x://h/t?formt=json")
    options.text("format")
    with pytest.raises(InvalidParameter, match="did you mean 'format'"):
        options.finish()


def test_patience_waits_longer_each_time_and_ends(caplog):
    """The operator is told once that a server is away, and once that it is back."""
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    retry = RetryPolicy("x://h", seconds=10, now=lambda: now[0], sleep=sleep)
    for _ in range(4):
        retry.report_failure("silence")
        retry.wait()
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8])
    retry.report_success()
    assert [record.getMessage() for record in caplog.records] == [
        "x://h: silence; trying again for 10 s",
        "x://h: answers again, after 1.5 s",
    ]
    assert not retry.failing

    def go_on():
        while True:
            retry.report_failure("silence")
            retry.wait()

    with pytest.raises(ServerUnreachable, match=r"silence, for 1\d s now"):
        go_on()
    assert max(slept) == pytest.approx(5.0)
