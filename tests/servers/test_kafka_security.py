"""Passwords and TLS: from files and the environment to the broker, and to nowhere else."""

import logging
from contextlib import suppress

import pytest

from dpstream.connectors.registry import open_sink, open_source
from dpstream.connectors.testing.suites import all_rows, drain, release
from dpstream.errors import DpstreamError, InvalidParameter, SecretError, ServerUnreachable
from tests.servers import kafka_tools as tools
from tests.servers.conftest import PASSWORD

pytestmark = pytest.mark.servers


@pytest.fixture
def topic(kafka):
    name = tools.make_topic(kafka, 1)
    tools.send(kafka, name, [{"user": "a"}] * 3)
    return name


def secure(kafka, topic, **options):
    given = {"ca_file": kafka.certificate, "sasl_mechanism": "PLAIN"} | options
    words = "&".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return f"kafka://dpstream@{kafka.secure_address}/{topic}?{words}"


def count(uri):
    source, found = open_source(uri), {}
    drain(source, found, rows=3)
    source.close()
    return all_rows(found).total()


def test_every_way_to_give_a_password(kafka, topic, tmp_path, monkeypatch):
    """A file, a variable, or a file of the client's own properties; for source and sink."""
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    properties = tmp_path / "client.properties"
    properties.write_text(f"# of this client\nsasl.password={PASSWORD}\nsasl.mechanism=PLAIN\n")
    ways = [
        secure(kafka, topic, password_file=kafka.password_file),
        secure(kafka, topic, password_env="KAFKA_PASSWORD"),
        secure(kafka, topic, config_file=properties, sasl_mechanism=None),
    ]

    assert [count(uri) for uri in ways] == [3, 3, 3]
    sink = open_sink(ways[0])
    sink.write("a", 0, 1, release("a", 0, 1))
    sink.close()
    assert len(tools.committed(kafka, topic)) == 6


def test_a_broker_that_keeps_no_passwords(kafka, topic):
    """SCRAM over TLS: what a user name means if nothing else is said; a source and a sink."""
    uri = secure(kafka, topic, password_file=kafka.password_file, sasl_mechanism=None)

    assert count(uri) == 3
    sink = open_sink(uri)
    sink.write("a", 0, 1, release("a", 0, 1))
    sink.close()
    assert len(tools.committed(kafka, topic)) == 6


@pytest.mark.parametrize("mechanism", ["PLAIN", None])
def test_a_wrong_password_is_told_at_once(kafka, topic, tmp_path, mechanism):
    """Trying again would not help."""
    wrong = tmp_path / "wrong"
    wrong.write_text("planted-wrong-password\n")
    for kind, use in ((open_source, lambda s: s.partitions()), (open_sink, _claim)):
        uri = secure(kafka, topic, password_file=wrong, sasl_mechanism=mechanism)
        with pytest.raises(InvalidParameter, match="refuses the user name or password"):
            use(kind(uri))


def _claim(sink):
    sink.fence("a", "run")


def test_a_certificate_that_nobody_vouches_for(kafka, topic):
    """No connection, and so no answer."""
    uri = secure(kafka, topic, password_file=kafka.password_file, ca_file=None, patience=0.5)
    with pytest.raises(ServerUnreachable):
        open_source(f"{uri}&security_protocol=sasl_ssl").partitions()


def test_a_password_is_never_shown(kafka, topic, tmp_path, monkeypatch, caplog):
    """Not in errors, logs or names, whatever is wrong."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    told = []
    bad = tmp_path / "bad.properties"
    bad.write_text(f"sasl.password={PASSWORD}\nno.such.setting={PASSWORD}\n")
    attempts = [
        f"kafka://dpstream:{PASSWORD}@{kafka.secure_address}/{topic}",
        secure(kafka, topic, password=PASSWORD),
        secure(kafka, topic, config_file=bad),
        secure(kafka, "nowhere", password_env="KAFKA_PASSWORD"),
        secure(kafka, topic, password_env="KAFKA_PASSWORD", formt=1),
        secure(kafka, topic, password_env="KAFKA_PASSWORD", sasl_mechanism="SCRAM-SHA-256"),
    ]
    for uri in attempts:
        with pytest.raises(DpstreamError) as caught:
            open_source(uri).partitions()
        told += [str(caught.value), repr(caught.value)]
    with suppress(DpstreamError):
        open_source(secure(kafka, topic, password_env="KAFKA_PASSWORD")).read("no/0", None)
    told += [record.getMessage() for record in caplog.records]

    assert not [text for text in told if PASSWORD in text]


def test_where_a_password_is_said_to_be(kafka, topic):
    """A variable that is not set, a file that is not there."""
    with pytest.raises(SecretError, match="NOT_SET"):
        open_source(secure(kafka, topic, password_env="NOT_SET"))
    with pytest.raises(SecretError, match="cannot be read"):
        open_source(secure(kafka, topic, password_file="/nowhere/password"))
