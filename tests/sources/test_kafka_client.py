"""Which settings the client in the driver's process understands, and how it names errors.

tests/e2e/test_kafka.py and its neighbours read a real broker with it.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources import kafka_client
from tidegate.jobs.sources.kafka_client import (
    ClientTopicOffsets,
    translate_client_error,
    translate_settings,
)
from tidegate.jobs.sources.kafka_source import JvmTopicOffsets, needs_jvm, open_topic_offsets
from tidegate.jobs.spec.source_options import KafkaOptions

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


@pytest.mark.parametrize("module", [_PLAIN, _SCRAM])
def test_a_login_is_translated(module: str) -> None:
    """Java's text of a login names the same user here."""
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f'{module} required username="ann" password="p w=1;";',
    }
    assert translate_settings(options) == {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": "p w=1;",
    }


def test_a_truststore_in_pem_is_translated() -> None:
    """Both clients read that form."""
    options = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/etc/ca.pem",
    }
    assert translate_settings(options) == {
        "security.protocol": "SSL",
        "ssl.ca.location": "/etc/ca.pem",
    }


@pytest.mark.parametrize(
    "options",
    [
        {"security.protocol": "SSL"},
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
        {"security.protocol": "SSL", "ssl.truststore.location": "/etc/ca.p12"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"},
        {"sasl.jaas.config": "com.example.Module required;"},
        {"sasl.login.callback.handler.class": "com.example.Handler"},
        {"fetch.max.bytes": "1"},
    ],
)
def test_other_settings_need_the_jvm(options: dict[str, str]) -> None:
    """What only the Java client understands, or understands in another way, is left to it."""
    assert translate_settings(options) is None
    kafka = KafkaOptions(servers="b:9092", topic="t", options=options)
    assert needs_jvm(kafka)
    assert isinstance(open_topic_offsets(kafka), JvmTopicOffsets)


def test_without_the_library_the_jvm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in an extra."""
    kafka = KafkaOptions(servers="b:9092", topic="t")
    assert isinstance(open_topic_offsets(kafka), ClientTopicOffsets)

    def find_nothing(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(kafka_client, "find_spec", find_nothing)
    assert isinstance(open_topic_offsets(kafka), JvmTopicOffsets)


class Told:
    """An error of the library."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Its name."""
        return self._name

    def str(self) -> str:
        """Its words."""
        return "words"


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("UNKNOWN_TOPIC_OR_PART", TransientError, "there is no topic t"),
        ("TOPIC_AUTHORIZATION_FAILED", ConfigurationError, "refuses this client: words"),
        ("_AUTHENTICATION", ConfigurationError, "refuses this client: words"),
        ("_SSL", TransientError, "its certificate: words"),
        ("_TRANSPORT", TransientError, "could not be reached"),
    ],
)
def test_errors_are_told_in_the_words_of_the_catalogue(
    name: str, kind: type[Exception], said: str
) -> None:
    """Both clients end in the same codes."""
    error: Any = translate_client_error(Told(name), KafkaOptions(servers="b:9092", topic="t"))
    assert isinstance(error, kind)
    assert said in str(error)
