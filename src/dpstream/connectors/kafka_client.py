"""What the Kafka source and sink share: the client's settings, and what its errors mean.

Settings with secrets come from files and the environment and are handed to the client alone. What
a broker or the client says is not repeated, only the name of its error.
"""

from __future__ import annotations

import logging
from typing import Any

from confluent_kafka import KafkaError

from dpstream.connectors.options import Options
from dpstream.errors import InvalidParameter

_log = logging.getLogger("dpstream.kafka")
_log.addHandler(logging.NullHandler())  # for who wants it; RetryPolicy tells what matters

_FILES = {
    "ca_file": "ssl.ca.location",
    "cert_file": "ssl.certificate.location",
    "key_file": "ssl.key.location",
}
_REFUSED = {
    KafkaError._AUTHENTICATION: "refuses the user name or password",
    KafkaError.SASL_AUTHENTICATION_FAILED: "refuses the user name or password",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "does not allow this user to use the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "does not allow this user transactions",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "does not allow this user to do that",
}


def client_settings(options: Options) -> dict[str, Any]:
    """The client's settings; `config_file` may hold any, in the form name=value a line."""
    found: dict[str, Any] = {
        "bootstrap.servers": options.servers,
        "client.id": "dpstream",
        "log.connection.close": False,
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 2000,
        "allow.auto.create.topics": False,
        "logger": _log,
    }
    path = options.text("config_file")
    if path is not None:
        found |= _properties(options.file(path, "config_file"), f"{options.where}: {path}")
    user, password = options.text("username", options.user), options.secret("password")
    if user is not None:
        found["sasl.username"] = user
    if password is not None:
        found["sasl.password"] = password
    key_password = options.secret("key_password")
    if key_password is not None:
        found["ssl.key.password"] = key_password
    for option, name in _FILES.items():
        value = options.text(option)
        if value is not None:
            found[name] = value
    tls = any(name.startswith("ssl.") for name in found)
    sasl = "sasl.username" in found
    protocol = ("sasl_" if sasl else "") + ("ssl" if tls else "plaintext")
    found["security.protocol"] = options.text(
        "security_protocol", found.get("security.protocol", protocol)
    )
    mechanism = options.text("sasl_mechanism", found.get("sasl.mechanism"))
    if sasl or mechanism is not None:
        found["sasl.mechanism"] = mechanism or "SCRAM-SHA-512"
    if not options.servers:
        raise InvalidParameter(f"{options.where} names no broker; write kafka://HOST:PORT/TOPIC")
    return found


def topic_of(options: Options) -> str:
    """The topic that the URI's path names."""
    if not options.path or "/" in options.path:
        raise InvalidParameter(
            f"{options.where} must name one topic, as in kafka://HOST:PORT/TOPIC"
        )
    return options.path


def create(kind: type, settings: dict[str, Any], where: str) -> Any:
    """A client; a setting that it does not take is named, never its value."""
    from confluent_kafka import KafkaException

    try:
        return kind(settings)
    except (KafkaException, ValueError, TypeError) as problem:
        named = [name for name in settings if name in str(problem)]
        which = f" ({', '.join(named)})" if named else ""
        raise InvalidParameter(
            f"{where}: the client does not take its settings{which}; look at the options, "
            "config_file and the files that they name"
        ) from None


class Problems:
    """What a client tells of by its callback; most of it the client mends itself.

    It knows nothing of the client: a cycle of references would leave the client to whichever
    thread collects it, and a client that ends in a thread of its own takes the process with it.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._refused: str | None = None
        self.down = False
        """No broker can be reached."""

    def __call__(self, error: KafkaError) -> None:
        """Note it."""
        self._refused = _REFUSED.get(error.code()) or self._refused
        self.down = self.down or error.code() == KafkaError._ALL_BROKERS_DOWN

    def raise_refusal(self) -> None:
        """Raise what trying again cannot mend."""
        if self._refused is not None:
            raise InvalidParameter(f"{self._where}: the broker {self._refused}")


def _properties(text: str, where: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.partition("=")
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            if not equals:
                raise InvalidParameter(f"{where}, line {number} must be name=value")
            found[name.strip()] = value.strip()
    return found
