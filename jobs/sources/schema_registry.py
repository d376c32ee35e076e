"""Looks up schemas by the number that messages carry: in a schema registry or in a folder.

A number always means the same schema, so each schema is fetched once. A number that the registry
does not know is asked for again with the next message that carries it, because producers register
schemas while streams run.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import urllib3

from tidegate.jobs.sources.errors import NO_SCHEMA_FOLDER, REGISTRY_DENIED, REGISTRY_UNAVAILABLE

_TIMEOUT_SECONDS: Final = 10.0
_FILE_ENDINGS: Final = {"avro": ".avsc", "protobuf": ".desc"}
_SCHEMA_TYPES: Final = {"avro": "AVRO", "protobuf": "PROTOBUF"}


@dataclass(frozen=True, slots=True)
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

    def fetch_missing(self, numbers: set[int]) -> bool:
        """Fetch the schemas that are not in the cache; return whether any of them exists.

        An `UnusableSchema` exists. False if all are in the cache already. Raises what the reader
        raises.
        """
        missing = numbers - set(self.known)
        for number in missing:
            schema = self._fetch(number)
            if schema is not None:
                self.known[number] = schema
        return bool(missing & set(self.known))


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
                timeout=_TIMEOUT_SECONDS,
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
