"""Encrypted connections: the options reach the servers, and a wrong authority is refused."""

import shutil
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpstream.connectors.sinks import open_sink
from dpstream.connectors.sources import open_source
from dpstream.errors import DpstreamError
from tests.servers.conftest import PASSWORD
from tests.servers.nats_tools import Stream
from tests.support.servers import NatsServer

pytestmark = pytest.mark.servers


def certificate(place, name):
    """A certificate for loopback that is its own authority: its files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, private = place / f"{name}.crt", place / f"{name}.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    private.chmod(0o600)
    return cert, private


@pytest.fixture
def encrypted(postgres, tmp_path):
    """PostgreSQL with TLS, for as long as the test runs."""
    cert, key = certificate(tmp_path, "server")
    for path, name in ((cert, "server.crt"), (key, "server.key")):
        placed = postgres.folder / "data" / name
        shutil.copy(path, placed)
        shutil.chown(placed, *2 * ((postgres.folder / "data").owner(),))
        placed.chmod(0o600)
    with psycopg.connect(postgres.address, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET ssl = on")
        connection.execute("SELECT pg_reload_conf()")
        yield postgres, cert
        connection.execute("ALTER SYSTEM RESET ssl")
        connection.execute("SELECT pg_reload_conf()")


def test_postgres(encrypted, tmp_path):
    """With sslmode and the files that libpq takes."""
    server, cert = encrypted
    other, _ = certificate(tmp_path, "other")
    sure = f"{server.address}?schema=public&sslmode=verify-full"
    sink = open_sink(f"{sure}&sslrootcert={cert}")
    used = sink.connection.execute(
        "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
    ).fetchone()
    sink.close()

    assert used == (True,)
    with pytest.raises(DpstreamError, match="certificate verify failed"):
        open_sink(f"{sure}&sslrootcert={other}")


def test_nats(place, tmp_path):
    """With an authority of one's own."""
    cert, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    server = NatsServer(place / "nats-tls", password=PASSWORD, config=config)
    server.start()
    try:
        stream = Stream(server, "S", make=False)
        sink = open_sink(stream.uri(f"&tls_ca={cert}"))
        sink.close()
        open_source(stream.uri(f"&tls_ca={cert}")).close()
        for wrong in (f"&tls_ca={other}", "&tls=true"):
            with pytest.raises(DpstreamError, match=r"does not answer|refuses"):
                open_source(stream.uri(wrong))
    finally:
        server.stop()
