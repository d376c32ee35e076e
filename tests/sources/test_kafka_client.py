"""Which settings the client in the driver's process understands, and how it names errors.

tests/e2e/test_kafka.py and its neighbours read a real broker with it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import confluent_kafka
import pyarrow as pa
import pytest

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources import kafka_client
from tidegate.jobs.sources.kafka_client import (
    ClientTopicOffsets,
    RangeReader,
    translate_client_error,
    translate_settings,
)
from tidegate.jobs.sources.kafka_source import open_topic_offsets
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
    ("options", "translated"),
    [
        ({"security.protocol": "SSL"}, {"security.protocol": "SSL"}),
        ({"isolation.level": "READ_COMMITTED"}, {"isolation.level": "read_committed"}),
        ({"sasl.username": "ann", "fetch.max.bytes": "1"}, None),
        (
            {"ssl.keystore.type": "PEM", "ssl.keystore.location": "/k", "ssl.key.password": "p"},
            {
                "ssl.certificate.location": "/k",
                "ssl.key.location": "/k",
                "ssl.key.password": "p",
            },
        ),
        (
            {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": "/k"},
            {"ssl.keystore.location": "/k"},
        ),
        (
            {"ssl.endpoint.identification.algorithm": ""},
            {"ssl.endpoint.identification.algorithm": "none"},
        ),
    ],
)
def test_settings_of_either_client_are_taken(
    options: dict[str, str], translated: dict[str, str] | None
) -> None:
    """Those of librdkafka as they are."""
    assert translate_settings(options) == (options if translated is None else translated)


@pytest.mark.parametrize(
    ("options", "option", "instead"),
    [
        ({"ssl.truststore.location": "/etc/ca.p12"}, "ssl.truststore.location", "ssl.ca.location"),
        (
            {"ssl.keystore.type": "JKS", "ssl.keystore.location": "/k"},
            "ssl.keystore.location",
            "ssl.certificate.location and ssl.key.location",
        ),
        ({"sasl.jaas.config": "com.example.Module required;"}, "sasl.jaas.config", "sasl.username"),
        (
            {"sasl.login.callback.handler.class": "com.example.Handler"},
            "sasl.login.callback.handler.class",
            "sasl.oauthbearer.method",
        ),
        ({"fetch.max.wait.ms": "1"}, "fetch.max.wait.ms", "leave it out"),
        ({"key.deserializer": "x"}, "key.deserializer", "leave it out"),
        ({"error_cb": "x"}, "error_cb", "leave it out"),
    ],
)
def test_settings_of_java_alone_are_refused(
    options: dict[str, str], option: str, instead: str
) -> None:
    """With what to use instead."""
    with pytest.raises(ConfigurationError) as refused:
        translate_settings(options)
    assert refused.value.code == "kafka.other_option"
    assert f"{option} is no setting of librdkafka" in refused.value.message
    assert instead in str(refused.value.advice)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in an extra."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    kafka_client._is_known_option.cache_clear()
    with pytest.raises(ConfigurationError, match="confluent-kafka, which is not installed"):
        open_topic_offsets(KafkaOptions(servers="b:9092", topic="t"))


class Told:
    """An error of the library."""

    def __init__(self, name: str, code: int = 0) -> None:
        self._name, self._code = name, code

    def code(self) -> int:
        """Its number."""
        return self._code

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
        ("_INVALID_ARG", ConfigurationError, "refuses this client: words"),
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


class Event:
    """A message of the library, or an error of a partition."""

    def __init__(
        self, partition: int, offset: int, error: Told | None = None, time: int = 0
    ) -> None:
        self._partition, self._offset, self._error = partition, offset, error
        self._time = time

    def timestamp(self) -> tuple[int, int]:
        """Its kind and the milliseconds."""
        return 1, self._time

    def topic(self) -> str | None:
        """None for an error that concerns no topic."""
        return None if self._partition < 0 else "t"

    def partition(self) -> int:
        """Its partition."""
        return self._partition

    def offset(self) -> int:
        """Its offset."""
        return self._offset

    def error(self) -> Told | None:
        """What is wrong."""
        return self._error

    def key(self) -> bytes | None:
        """None."""
        return None

    def value(self) -> bytes:
        """An object."""
        return b"{}"


class Consumer:
    """Hands out what a test says."""

    batches: ClassVar[list[list[Event]]] = []

    def __init__(self, settings: dict[str, Any]) -> None:
        self.unassigned: list[int] = []
        self.tell_error = settings["error_cb"]

    def assign(self, places: list[Any]) -> None:
        """Nothing is fetched."""

    def incremental_unassign(self, places: list[Any]) -> None:
        """Note it."""
        self.unassigned += [place.partition for place in places]

    def poll(self, seconds: float) -> None:
        """Call back with an error that came between two ranges."""
        self.tell_error(Told("_AUTHENTICATION"))

    def unassign(self) -> None:
        """Nothing is left."""

    def consume(self, number: int, seconds: float) -> list[Event]:
        """The next batch; none when all were handed out."""
        if self.batches:
            self.tell_error(Told("_AUTHENTICATION"))
        return self.batches.pop(0) if self.batches else []

    def close(self) -> None:
        """Nothing to close."""


def read(
    monkeypatch: pytest.MonkeyPatch, ranges: dict[int, tuple[int, int]], *batches: list[Event]
) -> list[tuple[int, int]]:
    """The places of the messages of ranges, from a client that hands out these batches."""
    monkeypatch.setattr(confluent_kafka, "Consumer", Consumer)
    monkeypatch.setattr(kafka_client, "_SILENCE_SECONDS", 0.0)
    monkeypatch.setattr(Consumer, "batches", [*batches])
    reader = RangeReader("web", KafkaOptions(servers="b:9092", topic="t"), {})
    found = [row for batch in reader.read_ranges(ranges) for row in batch.to_pylist()]
    reader.close()
    return [(row["partition"], row["offset"]) for row in found]


def test_a_range_ends_with_its_last_offset_or_at_the_end_of_its_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets may be missing, and what lies behind the range is not in it."""
    end = Told("_PARTITION_EOF", confluent_kafka.KafkaError._PARTITION_EOF)
    first = [Event(0, 5), Event(1, 3), Event(0, 7), Event(0, 8)]
    found = read(
        monkeypatch,
        {0: (5, 8), 1: (3, 6), 2: (4, 4)},
        first,
        [Event(1, 5, end)],
        [Event(1, 6, end)],
    )
    assert found == [(0, 5), (1, 3), (0, 7)]


def test_an_error_that_concerns_no_partition_ends_no_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the answer about the coordinator of a group, which no reader needs."""
    refusal = Told("GROUP_AUTHORIZATION_FAILED", 30)
    assert read(monkeypatch, {0: (0, 1)}, [Event(-1, 0, refusal)], [Event(0, 0)]) == [(0, 0)]


def test_messages_that_were_removed_while_they_were_read_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The range is planned again."""
    gone = Told("_AUTO_OFFSET_RESET", confluent_kafka.KafkaError._AUTO_OFFSET_RESET)
    with pytest.raises(TransientError, match="messages of t were removed"):
        read(monkeypatch, {0: (0, 9)}, [Event(0, 0)], [Event(0, 1, gone)])


def test_silence_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that sends nothing of a range that it has is not waited for without end."""
    with pytest.raises(TransientError, match="nothing came"):
        read(monkeypatch, {0: (0, 9)}, [Event(0, 0)])


def test_an_old_refusal_explains_no_later_outage_of_a_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that restarts during a login looks like one that refuses it.

    Between two ranges, and before messages that came all the same.
    """
    with pytest.raises(TransientError, match="nothing came"):
        read(monkeypatch, {0: (0, 9)})
    with pytest.raises(TransientError, match="nothing came"):
        read(monkeypatch, {0: (0, 9)}, [Event(0, 0)])


class Admin:
    """Answers a question about a topic, or does not."""

    answers: ClassVar[bool] = True
    heard: ClassVar[list[str]] = []

    def __init__(self, settings: dict[str, Any]) -> None:
        self._tell_error = settings["error_cb"]

    def poll(self, seconds: float) -> None:
        """Call back with what was heard."""
        while self.heard:
            self._tell_error(Told(self.heard.pop()))

    def describe_topics(self, names: Any, request_timeout: float) -> Any:
        """Answer with a topic, or fail."""
        if not self.answers:
            raise confluent_kafka.KafkaException(Told("_TIMED_OUT"))
        half = SimpleNamespace(get_most_significant_bits=int, get_least_significant_bits=int)
        topic = SimpleNamespace(topic_id=half, partitions=[])
        return {"t": SimpleNamespace(result=lambda: topic)}


@pytest.mark.parametrize("question", ["read_offsets", "read_topic_id"])
def test_an_old_refusal_explains_no_later_outage_of_a_question(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """The error of the question that failed counts."""
    monkeypatch.setattr("confluent_kafka.admin.AdminClient", Admin)
    monkeypatch.setattr(Admin, "answers", True)
    settings = {"isolation.level": "read_committed"}
    offsets = ClientTopicOffsets(KafkaOptions(servers="b:9092", topic="t"), settings)
    assert offsets.read_topic_id() is None
    Admin.heard.append("_AUTHENTICATION")
    monkeypatch.setattr(Admin, "answers", False)
    with pytest.raises(TransientError, match="could not be reached"):
        getattr(offsets, question)()


def test_a_time_that_no_column_holds_costs_only_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nanoseconds in the place of milliseconds come as null, beside the times of the others."""
    monkeypatch.setattr(confluent_kafka, "Consumer", Consumer)
    held = [1_700_000_000_000, -1, 2**63 // 1000]
    stamps = [*held, held[-1] + 1, -held[-1] - 1, 1_700_000_000_000_000_000]
    events = [Event(0, offset, time=stamp) for offset, stamp in enumerate(stamps)]
    monkeypatch.setattr(Consumer, "batches", [events])
    reader = RangeReader("web", KafkaOptions(servers="b:9092", topic="t", timestamp="sent"), {})
    (batch,) = reader.read_ranges({0: (0, len(events))})
    times = batch["timestamp"].cast(pa.int64()).to_pylist()
    assert times == [*(stamp * 1000 for stamp in held), None, None, None]
