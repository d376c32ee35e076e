"""What can be wrong with a topic, on a real broker.

Each fault has its state, and what was read before is kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.e2e.drivers import Piped, wait_for
from tests.e2e.kafka_marks import ON_A_BROKER
from tests.rows.topic_messages import proto
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources.kafka_client import (
    RangeReader,
    translate_settings,
)
from tidegate.jobs.sources.kafka_source import (
    build_consumer_settings,
    open_topic_offsets,
)
from tidegate.jobs.spec.source_options import KafkaOptions

pytestmark = ON_A_BROKER

START = datetime(2026, 3, 1, tzinfo=UTC)
AVRO = {
    1: {
        "fields": [
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "amount", "type": "int"},
        ]
    },
    2: {
        "fields": [
            {"name": "count", "type": "long"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "unwanted", "type": "string"},
            {"name": "who", "type": ["null", {"type": "array", "items": "long"}]},
        ]
    },
}
SPEC = """\
apiVersion: tidegate/v1
name: faults
sources:
  avro: &topic
    kind: kafka
    kafka: {{servers: "{servers}", topic: avro, payload: avro, registry: "{registry}", on_unknown_schema: wait}}
    schema: {{at: timestamp, amount: long, who: string}}
    event_time: at
    lag: 1h
    evolution: {{renamed: {{count: amount}}}}
  proto:
    <<: *topic
    kafka: {{servers: "{servers}", topic: proto, payload: protobuf, message: shop.Click, registry: "{folder}"}}
    evolution: {{renamed: {{n: amount}}}}
  keyed:
    <<: *topic
    kafka: {{servers: "{servers}", topic: keyed, key: who, on_gap: report}}
coalesce: {{idle_timeout: never}}
release: {{mode: pass_through}}
checkpoint: {{idle_interval: 200ms}}
spark: {{driver_memory: 1g, jvm: quick}}
"""


@pytest.fixture
def registry() -> Iterator[tuple[str, dict[int, str]]]:
    """A schema registry: its address, and the schemas that it knows."""
    known: dict[int, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            schema = known.get(int(self.path.rpartition("/")[2]))
            self.send_response(200 if schema else 404)
            self.end_headers()
            self.wfile.write(
                json.dumps({"schema": schema} if schema else {"error_code": 40403}).encode()
            )

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", known
    server.shutdown()
    thread.join()
    server.server_close()


def number(value: int) -> bytes:
    """An integer in Avro."""
    left, found = (value << 1) ^ (value >> 63), bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def framed(schema: int, body: bytes) -> bytes:
    """A message as a registry's serializer writes it."""
    return b"\0" + schema.to_bytes(4, "big") + body


def schema_text(which: int) -> str:
    """A registered schema."""
    return json.dumps({"type": "record", "name": "Click", **AVRO[which]})


AT = number(int(START.timestamp()) * 1_000_000)
LIST = (
    number(1) + number(2) + number(5) + number(6) + number(0)
)  # the union's second branch: one block of two, the end
CLICK = bytes([0x0A, 0x06, 0x08, 0x80, 0xEA, 0x8E, 0xCD, 0x06])  # a shop.Click's time


def compacted(broker: KafkaServer, topic: str) -> bool:
    """Whether the broker's cleaner has been through the topic."""
    place = broker.folder / "data" / "cleaner-offset-checkpoint"
    lines = place.read_text().splitlines() if place.exists() else []
    return any(
        line.startswith(f"{topic} 0 ") and int(line.rpartition(" ")[2]) > 0 for line in lines
    )


def dead(pipeline: Piped) -> list[tuple[str, int, str]]:
    """(source, offset, detail) of every dead letter."""
    rows = pipeline.table("dead_letters").to_pylist()
    return sorted((row["_source"], row["_seq"], row["detail"]) for row in rows)


def events(pipeline: Piped, source: str) -> list[tuple[int, int]]:
    """(offset, amount) of every event of a source."""
    rows = [row for row in pipeline.table("events").to_pylist() if row["_source"] == source]
    return sorted((row["_seq"], row["amount"]) for row in rows)


def sealed(pipeline: Piped, member: str) -> int:
    """How far a partition is sealed."""
    record = pipeline.log().head().record
    return 0 if record is None or member not in record.cut else int(record.cut[member]["end"])


def test_each_fault_has_its_state(
    jars: tuple[list[Path], list[Path]], registry: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    """Unknown schemas, damaged messages, compaction, retention, and a topic that is deleted and
    made again: each is reported.

    A schema that the registry does not know yet is waited for, or makes a dead letter; offsets that
    compaction took are no rows; offsets that retention took are a dead letter; without its topic
    the driver waits, and another topic of that name ends it.
    """
    broker = KafkaServer(jars[0], tmp_path / "broker")
    broker.start()
    client = KafkaClient(jars[0], broker.servers)
    address, known = registry
    known[1] = schema_text(1)
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "7.desc").write_bytes(proto())
    client.topic("avro", 1)
    client.topic("proto", 1)
    client.topic(
        "keyed",
        1,
        cleanup_policy="compact",
        segment_ms="50",
        min_cleanable_dirty_ratio="0.001",
        delete_retention_ms="0",
    )
    for amount in (1, 2):
        client.send("avro", 0, framed(1, AT + number(amount)))
    client.send("avro", 0, framed(2, number(3) + AT + number(1) + b"x" + LIST))
    client.send("proto", 0, framed(7, b"\x02\x02" + CLICK + b"\x10\x08"))
    client.send("proto", 0, framed(9, b"\x00" + CLICK))
    client.send("proto", 0, framed(7, b"\x02\x02" + CLICK[:-1]))
    client.send("proto", 0, b"text")
    for turn in range(20):
        body = {"at": (START + timedelta(seconds=turn)).isoformat(), "amount": turn}
        client.send("keyed", 0, json.dumps(body), key=f"user {turn % 3}")
    client.flush()
    deadline = time.monotonic() + 60
    while not compacted(broker, "keyed") and time.monotonic() < deadline:
        time.sleep(0.1)
        client.send(
            "keyed", 0, json.dumps({"at": START.isoformat(), "amount": 99}), key="roll"
        )  # closes a segment
        client.flush()

    spec = SPEC.format(servers=broker.servers, registry=address, folder=tmp_path / "protos")
    pipeline = Piped(tmp_path / "p", spec)
    environment = {"TIDEGATE_SPARK_JARS": ",".join(map(str, jars[1]))}
    driver = pipeline.start("", environment=environment)
    try:
        wait_for(
            lambda: any(
                "schema 2 is not known" in str(line) for line in pipeline.said("transient")
            ),
            driver,
        )
        known[2] = schema_text(2)
        wait_for(lambda: sealed(pipeline, "avro/0") == 3, driver)
        read_to = sealed(pipeline, "keyed/0")
        client.drop("proto")
        wait_for(
            lambda: any(
                "there is no topic proto" in str(line) for line in pipeline.said("transient")
            ),
            driver,
        )
        client.topic("proto", 1)
        assert driver.wait(120) == 1, pipeline.log_text()
        assert "it is not the topic that source proto read" in pipeline.log_text()
    finally:
        driver.kill()
        driver.wait(30)

    assert events(pipeline, "avro") == [(0, 1), (1, 2), (2, 3)]
    lists = [row["who"] for row in pipeline.table("events").to_pylist() if row["_source"] == "avro"]
    assert set(lists) == {None, "[5,6]"}, "a list is JSON text"
    assert events(pipeline, "proto") == [(0, 4)]
    assert [(source, offset) for source, offset, _ in dead(pipeline)] == [
        ("proto", 1),
        ("proto", 2),
        ("proto", 3),
    ]
    assert [detail.partition(",")[0] for _, _, detail in dead(pipeline)] == [
        "the message was written with schema 9",
        "the message is no shop.Click",
        "the message does not begin with the number of a schema",
    ]
    found = events(pipeline, "keyed")
    assert len(found) < read_to, "compaction took offsets, and they are no rows"
    assert pipeline.said("offsets_missing")
    assert {amount for _, amount in found} >= {17, 18, 19}, "the newest value of each key is there"

    for turn in range(10):
        client.send(
            "keyed",
            0,
            json.dumps({"at": START.isoformat(), "amount": 100 + turn}),
            key=f"late {turn}",
        )
    client.flush()
    low, _ = open_topic_offsets(KafkaOptions(servers=broker.servers, topic="keyed")).read_offsets()[
        0
    ]
    assert low == 0, "compaction does not move a topic's beginning"
    client.close()
    broker.stop()


def test_expired_certificate(jars: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    """A broker whose certificate is expired is waited for, and said so.

    With a good one it is asked.
    """
    if shutil.which("keytool") is None:
        pytest.skip("keytool is not installed")
    authority(tmp_path)
    for name, begun, said in (
        ("expired", "-10d", "its certificate: "),
        ("good", "-1d", "there is no topic t"),
    ):
        broker = KafkaServer(
            jars[0], tmp_path / f"broker-{name}", tls=keystore(tmp_path, name, begun)
        )
        broker.start()
        pem = {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(tmp_path / "ca.crt")}
        own = open_topic_offsets(
            KafkaOptions(
                servers=broker.servers, topic="t", options={"security.protocol": "SSL", **pem}
            )
        )
        with pytest.raises(TransientError, match=said):
            own.read_offsets()
        broker.stop()


def test_a_user_needs_no_right_but_to_read_the_topic(
    jars: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    """No group is needed; a wrong password and a topic without rights are refusals."""
    broker = KafkaServer(jars[0], tmp_path / "broker", login=("ann", "right"))
    broker.start()
    client = KafkaClient(jars[0], broker.open_servers)
    for topic in ("t", "hidden"):
        client.topic(topic, 2)
    client.allow("ann", "t")
    for number in range(10):
        client.send("t", number % 2, json.dumps({"n": number}))
    client.flush()

    def options_for(topic: str, password: str) -> KafkaOptions:
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        options = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{module} required username="ann" password="{password}";',
        }
        return KafkaOptions(servers=broker.servers, topic=topic, options=options)

    try:
        right = options_for("t", "right")
        own = open_topic_offsets(right)
        assert own.read_offsets() == {0: (0, 5), 1: (0, 5)}
        settings = translate_settings(build_consumer_settings(right))
        reader = RangeReader("web", right, settings)
        begun = time.monotonic()
        while time.monotonic() < begun + 2:  # the answer about the group may come with any read
            batches = [*reader.read_ranges({0: (0, 5), 1: (2, 5)})]
            assert sum(batch.num_rows for batch in batches) == 8
        reader.close()
        for topic, password in (("hidden", "right"), ("t", "wrong")):
            with pytest.raises(ConfigurationError, match="refuses this client"):
                open_topic_offsets(options_for(topic, password)).read_offsets()
    finally:
        client.close()
        broker.stop()


def test_a_name_that_dns_does_not_know() -> None:
    """Not now, perhaps: a name server that is away says the same, so it is waited for."""
    offsets = open_topic_offsets(KafkaOptions(servers="broker.invalid:9092", topic="t"))
    with pytest.raises(TransientError, match="could not be reached"):
        offsets.read_offsets()


def keytool(folder: Path, command: str) -> None:
    """One command of Java's keytool; every store has the same password."""
    words = ["keytool", *command.split(), "-storepass", "secret"]
    subprocess.run(words, check=True, capture_output=True, timeout=60, cwd=folder)


def authority(folder: Path) -> Path:
    """A certificate authority of our own; returns the store of those who trust it."""
    keytool(
        folder,
        "-genkeypair -keystore ca.p12 -alias ca -keyalg RSA -dname CN=ours -ext bc:c -validity 30",
    )
    keytool(folder, "-exportcert -rfc -keystore ca.p12 -alias ca -file ca.crt")
    keytool(folder, "-importcert -noprompt -keystore trusted.p12 -alias ca -file ca.crt")
    return folder / "trusted.p12"


def keystore(folder: Path, name: str, begun: str) -> dict[str, str]:
    """A broker's settings with a certificate that is valid for five days from `begun` on."""
    own = f"-keystore {name}.p12"
    keytool(folder, f"-genkeypair {own} -alias broker -keyalg RSA -dname CN=127.0.0.1")
    keytool(folder, f"-certreq {own} -alias broker -file {name}.csr")
    signed = (
        f"-infile {name}.csr -outfile {name}.crt -ext SAN=IP:127.0.0.1 -startdate {begun}"
        " -validity 5"
    )
    keytool(folder, f"-gencert -keystore ca.p12 -alias ca {signed}")
    keytool(folder, f"-importcert -noprompt {own} -alias ca -file ca.crt")
    keytool(folder, f"-importcert -noprompt {own} -alias broker -file {name}.crt")
    return {
        "ssl.keystore.location": str(folder / f"{name}.p12"),
        "ssl.keystore.password": "secret",
        "ssl.keystore.type": "PKCS12",
    }
