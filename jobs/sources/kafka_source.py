"""A Kafka topic as a source, read by explicit offset ranges without a consumer group.

A partition is a member and an offset is a position. A slice is a range from the offset at which the
last checkpoint ended to the end that the broker named at planning, so the same range can be read
again. Offsets inside it may be missing (compaction, transaction markers); the mover counts them.
Offsets that retention removed before they were read are a gap, which is always reported
(`KafkaOptions.on_gap`).
"""

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import urllib3

from tidegate.jobs.engine.arrow_tables import to_arrow_types
from tidegate.jobs.engine.interfaces import DeadObject, Slice, join_seq, split_seq
from tidegate.jobs.eventtime.decision_types import Member
from tidegate.jobs.spec.pipeline import ReadLimits, SourceSpec
from tidegate.jobs.spec.source_options import (
    KafkaOptions,
    resolve_environment_value,
    resolve_environment_values,
)
from tidegate.json_types import JsonObject, JsonView

from .errors import (
    CHANGED_WHILE_READ,
    KAFKA_GAP,
    KAFKA_OTHER_TOPIC,
    NO_SCHEMA_FOLDER,
    REGISTRY_DENIED,
    REGISTRY_UNAVAILABLE,
)
from .input_view import STAGED_PREFIX
from .kafka_client import ClientTopicOffsets, translate_settings
from .object_decoding import BAD_REASON, BAD_TEXT

OFFSET_COLUMN: Final = "_at"
"""Column of a staged range: the lower half of the offset."""
_MAX_MESSAGES_PER_SLICE = 1_000_000  # of one partition in one epoch, if the spec has no limit


class TopicOffsets(Protocol):
    """Answers questions about one topic."""

    def read_offsets(self, *, settled: bool = True) -> Mapping[int, tuple[int, int]]:
        """Return partition -> (first offset held, offset after the last that may be read).

        Args:
            settled: respect the source's isolation level; otherwise count open transactions too.

        Raises:
            TransientError: no broker answers, or there is no such topic.
            ConfigurationError: the brokers refuse this client.
        """
        ...

    def read_topic_id(self) -> str | None:
        """Return an id that a topic created again under the same name does not share.

        None from brokers that have no such ids.

        Raises:
            TransientError, ConfigurationError: as for `read_offsets`.
        """
        ...


def build_range_key(source: str, topic: str, partition: int, start: int, end: int) -> str:
    """Return the name of the offsets `start` to `end` (exclusive), in place of an object's key."""
    return f"{STAGED_PREFIX}{source}/{topic}/{partition}/{start}-{end}"


def divide_range(part: JsonView, number: int) -> Iterator[JsonObject]:
    """Yield a planned range as so many ranges of about as many offsets, in their order."""
    place, folder = part["kafka"], part["key"].rpartition("/")[0]
    first, offsets = place["from"], place["to"] - place["from"]
    for share in range(number):
        start, end = (first + offsets * edge // number for edge in (share, share + 1))
        ordinal, row = split_seq(start)
        yield {
            **part,
            "key": f"{folder}/{start}-{end}",
            "ordinal": ordinal,
            "rows": end - start,
            "row_start": row,
            "row_end": row + end - start,
            "kafka": {**place, "from": start, "to": end},
        }


def build_range_schema(source: SourceSpec) -> pa.Schema:
    """Return the columns of a decoded range.

    They are those of the source, why a message is bad and its text, and the lower half of the
    offset.
    """
    own = {BAD_REASON: pa.string(), BAD_TEXT: pa.string(), OFFSET_COLUMN: pa.int64()}
    return pa.schema(to_arrow_types(source.columns) | own)


class KafkaSource:
    """Implements `Source`. Keeps the broker's answers of one planning, and the lag.

    Attributes:
        lag: member -> messages after the last planned slice.
    """

    def __init__(self, name: str, spec: SourceSpec, offsets: TopicOffsets) -> None:
        assert spec.kafka is not None  # noqa: S101 - checked by the spec
        self.name, self.spec, self.kafka, self._offsets = name, spec, spec.kafka, offsets
        self._bounds: Mapping[int, tuple[int, int]] = {}
        self._topic_id: str | None = None
        self._has_been_read = False  # a partition of the topic has a position in a checkpoint
        self._checked: set[Member] = set()  # by `find_changed_objects`, since its last question
        self._first_positions: dict[Member, JsonObject] = {}
        self.lag: dict[str, int] = {}

    def list_members(self) -> Sequence[Member]:
        """Return one member for each partition that the topic has now.

        The broker is asked here; `plan` works with its answers.

        Raises:
            TransientError, ConfigurationError: as for `TopicOffsets.read_offsets`.
        """
        self._topic_id, self._bounds = self._offsets.read_topic_id(), self._offsets.read_offsets()
        self._has_been_read = bool(self._first_positions)
        self._checked.clear()
        return [Member(self.name, str(partition)) for partition in sorted(self._bounds)]

    def plan(
        self, member: Member, resume: JsonView | None, limits: ReadLimits, *, blocked: bool = False
    ) -> Slice:
        """Return the next range.

        Of `limits` only `rows` counts, as a number of offsets; without it 1,000,000.

        Raises:
            PoisonError: the next offsets are gone and `on_gap` is ``fail``, or the topic is not the
                one that was read.
        """
        first, end_of_topic = self._bounds[int(member.partition)]
        self._has_been_read = self._has_been_read or resume is not None
        position = resume or self._get_first_position(member, first, end_of_topic)
        self._refuse_other_topic(member, position, end_of_topic)
        start, dead = self._skip_gap(member, int(position["offset"]), first)
        end_of_topic = max(end_of_topic, start)
        end_of_ordinal = join_seq(split_seq(start)[0] + 1, 0)
        most = start + (limits.rows or _MAX_MESSAGES_PER_SLICE)
        end = start if blocked else min(end_of_topic, most, end_of_ordinal)
        self.lag[str(member)] = end_of_topic - end
        return Slice(
            member,
            dead[0].seq if dead else start,
            end,
            (self._build_part(member, start, end),) if end > start else (),
            self._build_position(end),
            pending=end < end_of_topic,
            dead=dead,
            # `latest` is a choice that a later driver must repeat, so its epoch is sealed at once.
            begins=resume is None and self.kafka.start == "latest",
        )

    def trim(self, part: Slice, end: int) -> Slice:
        """Return the slice cut short at offset `end`."""
        if end >= part.end:
            return part
        # A gap may lie before the first offset that is read.
        start = int(part.parts[0]["kafka"]["from"]) if part.parts else part.end
        parts = (self._build_part(part.member, start, end),) if end > start else ()
        position = {**part.resume, "offset": end}
        return replace(part, end=end, parts=parts, resume=position, pending=True)

    def find_changed_objects(self, part: Slice) -> tuple[DeadObject, ...]:
        """Check that the topic is still the one that was planned; a range cannot change otherwise.

        A range is fetched whole or not at all, so retention does not matter here. The broker is
        asked once per cut: its answer holds until the same partition comes again.

        Raises:
            TransientError: the topic is another one, or the brokers do not answer.
        """
        if not self._checked or part.member in self._checked:
            self._checked.clear()
            if self._offsets.read_topic_id() != self._topic_id:
                what = f"{self.kafka.topic} was deleted and created again"
                raise CHANGED_WHILE_READ(source=self.name, what=what)
        self._checked.add(part.member)
        return ()

    def _get_first_position(self, member: Member, first: int, end_of_topic: int) -> JsonView:
        """Return where a partition begins that has no position in a checkpoint.

        `start: latest` applies to a topic that is new to the source. A partition that is added
        later is read whole. Its number is higher, so older partitions are planned before it.
        """
        if member not in self._first_positions:
            skips = self.kafka.start == "latest" and not self._has_been_read
            self._first_positions[member] = self._build_position(end_of_topic if skips else first)
        return self._first_positions[member]

    def _build_position(self, offset: int) -> JsonObject:
        return {"offset": offset} | ({} if self._topic_id is None else {"topic": self._topic_id})

    def _refuse_other_topic(self, member: Member, position: JsonView, end_of_topic: int) -> None:
        start, topic_id = int(position["offset"]), position.get("topic", self._topic_id)
        evidence = None
        if topic_id is not None and self._topic_id is not None and topic_id != self._topic_id:
            evidence = f"has the id {self._topic_id} instead of {topic_id}"
        elif start > end_of_topic:
            # A source that once read uncommitted messages may be ahead of the committed end.
            end = self._offsets.read_offsets(settled=False)[int(member.partition)][1]
            if start > end:
                evidence = f"ends at offset {end}, but {start} was read before"
        if evidence is not None:
            raise KAFKA_OTHER_TOPIC(
                topic=self.kafka.topic,
                partition=member.partition,
                evidence=evidence,
                source=self.name,
            )

    def _skip_gap(
        self, member: Member, start: int, first: int
    ) -> tuple[int, tuple[DeadObject, ...]]:
        """Return where reading begins, and a dead letter for offsets that retention removed."""
        if start >= first:
            return start, ()
        topic, partition = self.kafka.topic, int(member.partition)
        if self.kafka.on_gap == "fail":
            raise KAFKA_GAP(
                first=start, last=first - 1, topic=topic, partition=partition, source=self.name
            )
        key = build_range_key(self.name, topic, partition, start, first)
        detail = f"offsets {start} to {first - 1} were removed by retention before they were read"
        rows = first - start  # at most: compaction may have removed some of them before
        return first, (DeadObject(member, start, key, "", 0, "missing_offsets", detail, rows),)

    def _build_part(self, member: Member, start: int, end: int) -> JsonObject:
        topic, partition = self.kafka.topic, int(member.partition)
        ordinal, row = split_seq(start)
        return {
            "key": build_range_key(self.name, topic, partition, start, end),
            "etag": "",
            "size": 0,
            "ordinal": ordinal,
            "rows": end - start,
            "row_start": row,
            "row_end": row + end - start,
            "columns": {field.name: str(field.type) for field in build_range_schema(self.spec)},
            "kafka": {"topic": topic, "partition": partition, "from": start, "to": end},
        }


def build_consumer_settings(kafka: KafkaOptions) -> dict[str, str]:
    """Return a source's settings by the names of the spec, with the values of ``env:NAME``.

    Unless the options set another isolation level, only committed messages are read.

    Raises:
        ConfigurationError: a variable is not set.
    """
    options = resolve_environment_values("kafka.options", kafka.options, os.environ)
    return {"bootstrap.servers": kafka.servers, "isolation.level": "read_committed", **options}


def open_topic_offsets(kafka: KafkaOptions) -> TopicOffsets:
    """Return the client that asks the brokers of a topic; it connects with the first question.

    Raises:
        ConfigurationError: a variable that the options name is not set, or the client does not know
            one of the options.
    """
    return ClientTopicOffsets(kafka, translate_settings(build_consumer_settings(kafka)))


# Schemas by the number that messages carry, from a schema registry or a folder. A number always
# means the same schema, so each schema is fetched once. A number that the registry does not know is
# asked for again with the next message that carries it, because producers register schemas while
# streams run.

_REGISTRY_SECONDS = 10.0
_FILE_ENDINGS = {"avro": ".avsc", "protobuf": ".desc"}
_SCHEMA_TYPES = {"avro": "AVRO", "protobuf": "PROTOBUF"}


@dataclass(frozen=True)
class UnusableSchema:
    """Returned instead of a schema's bytes: the schema is registered, but cannot be used.

    A value, not an exception. `why` goes into the dead letters.
    """

    why: str


FetchSchema = Callable[[int], bytes | UnusableSchema | None]
"""Number -> the schema's bytes, why it cannot be used, or None if there is no such schema.

The bytes are JSON for Avro, a descriptor set for Protobuf."""


class SchemaCache:
    """The schemas that were fetched so far, by number, in `known`."""

    def __init__(self, fetch: FetchSchema) -> None:
        self._fetch = fetch
        self.known: dict[int, bytes | UnusableSchema] = {}

    def fetch_missing(self, numbers: set[int]) -> None:
        """Fetch the schemas that are not in the cache; raises what the reader raises."""
        for number in numbers - set(self.known):
            schema = self._fetch(number)
            if schema is not None:
                self.known[number] = schema


def open_schema_registry(kafka: KafkaOptions) -> SchemaCache | None:
    """Return the schemas of a topic's registry; None without a registry.

    Raises:
        ConfigurationError: there is no such folder, or the variable of the login is not set.
    """
    if kafka.registry is None:
        return None
    # The cache belongs to the process: a number always names the same schema.
    login = kafka.registry_login
    return open_schemas(
        kafka.registry,
        kafka.payload,
        login and resolve_environment_value("kafka.registry_login", login, os.environ),
    )


@cache
def open_schemas(address: str, payload: str, login: str | None = None) -> SchemaCache:
    """Return the process's cache of the schemas at `address`, a URL or a folder.

    Args:
        address: where the schemas are.
        payload: ``avro`` or ``protobuf``.
        login: ``user:password`` for a URL.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if address.startswith(("http://", "https://")):
        return SchemaCache(make_registry_reader(address, payload, login))
    return SchemaCache(make_folder_reader(Path(address), payload))


def make_folder_reader(folder: Path, payload: str) -> Callable[[int], bytes | None]:
    """Return a reader of the files ``<number>.avsc`` or ``<number>.desc`` in a folder.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not folder.is_dir():
        raise NO_SCHEMA_FOLDER(folder=folder)

    def read_schema_file(number: int) -> bytes | None:
        """Return the file of a number; None if there is none."""
        path = folder / f"{number}{_FILE_ENDINGS[payload]}"
        return path.read_bytes() if path.exists() else None

    return read_schema_file


# urllib3, not confluent_kafka.schema_registry: that one retries for seconds inside the call where
# the driver waits and reports by itself, and needs more packages (docs/dependencies.md, Kafka).
def make_registry_reader(address: str, payload: str, login: str | None = None) -> FetchSchema:
    """Return a client of ``GET /schemas/ids/<number>``; `login` is ``user:password``.

    It returns an `UnusableSchema` for a schema of another type or with references. It raises
    TransientError if the registry does not answer within 10 s or answers with an error, and
    ConfigurationError if it refuses the login.
    """
    query = "?format=serialized" if payload == "protobuf" else ""

    def fetch_schema(number: int) -> bytes | UnusableSchema | None:
        """Ask the registry for a number; None if it does not know it."""
        url = f"{address.rstrip('/')}/schemas/ids/{number}{query}"
        try:
            # A redirect is not followed: it would carry the login to another server.
            answer = urllib3.request(
                "GET",
                url,
                headers=urllib3.make_headers(basic_auth=login) if login else {},
                timeout=_REGISTRY_SECONDS,
                redirect=False,
                retries=False,
            )
            if answer.status == 200:
                return _parse_registry_answer(payload, answer.json())
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise REGISTRY_UNAVAILABLE(address=address, detail=str(error)[:200]) from error
        if answer.status == 404:
            return None
        if answer.status in (401, 403):
            raise REGISTRY_DENIED(address=address, number=number, status=answer.status)
        raise REGISTRY_UNAVAILABLE(address=address, detail=f"it answers {answer.status}")

    return fetch_schema


def _parse_registry_answer(payload: str, answer: Any) -> bytes | UnusableSchema:
    if not isinstance(answer, dict):
        raise ValueError("it answers without a schema")
    kind = answer.get("schemaType", "AVRO")
    if kind != _SCHEMA_TYPES[payload]:
        return UnusableSchema(f"it is of type {kind}")
    if answer.get("references"):  # the decoders take one schema and no others
        return UnusableSchema("it refers to other schemas")
    if "schema" not in answer:
        raise ValueError("it answers without a schema")
    text = str(answer["schema"])
    return text.encode() if payload == "avro" else _to_descriptor_set(base64.b64decode(text))


def _to_descriptor_set(file: bytes) -> bytes:
    """Wrap one file's descriptor in a set, which is what Protobuf compilers write.

    Raises:
        ValueError: the bytes are no descriptor.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
    from google.protobuf.message import DecodeError

    try:
        descriptor = FileDescriptorProto.FromString(file)
    except DecodeError as error:
        raise ValueError(f"it answers with bytes that are no descriptor: {error}") from error
    return bytes(FileDescriptorSet(file=[descriptor]).SerializeToString())
