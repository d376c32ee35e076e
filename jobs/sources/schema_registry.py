"""Schemas by number, as a schema registry gives them, or as files of a folder.

What the first bytes of a message name.

A registry is asked once for each number; a number stands for the same schema for ever. One that it
does not know is asked for again with the next message that carries it, since schemas are registered
while streams run.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from tidegate.errors import ConfigurationError, TransientError

_ANSWER_SECONDS: Final = 10.0  # seconds for one answer
_FILE_ENDINGS: Final = {"avro": ".avsc", "protobuf": ".desc"}
_SCHEMA_TYPES: Final = {"avro": "AVRO", "protobuf": "PROTOBUF"}


@dataclass(frozen=True, slots=True)
class UnusableSchema:
    """A schema that is registered, and that no message can be read with."""

    why: str


class SchemaCache:
    """Schemas known so far, and where to ask for more.

    Args:
        ask: number -> the schema's bytes (Avro: JSON, Protobuf: a descriptor set), or why it cannot
            be used; None when there is none.
    """

    def __init__(self, ask: Callable[[int], bytes | UnusableSchema | None]) -> None:
        self._ask = ask
        self.known: dict[int, bytes | UnusableSchema] = {}

    def fetch_missing(self, numbers: set[int]) -> bool:
        """Ask for schemas. Returns whether any of them was new."""
        new = numbers - set(self.known)
        for number in new:
            schema = self._ask(number)
            if schema is not None:
                self.known[number] = schema
        return bool(new & set(self.known))


@cache
def open_schemas(address: str, payload: str, login: str | None = None) -> SchemaCache:
    """The schemas at an address.

    The same object for the same address, so that a driver asks once.
    """
    if address.startswith(("http://", "https://")):
        return SchemaCache(make_registry_reader(address, payload, login))
    return SchemaCache(make_folder_reader(Path(address), payload))


def make_folder_reader(folder: Path, payload: str) -> Callable[[int], bytes | None]:
    """Files ``<number>.avsc`` or ``<number>.desc`` of a folder.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"kafka.registry: there is no folder {folder}", code="kafka.no_registry"
        )

    def read_schema_file(number: int) -> bytes | None:
        path = folder / f"{number}{_FILE_ENDINGS[payload]}"
        return path.read_bytes() if path.exists() else None

    return read_schema_file


def make_registry_reader(
    address: str, payload: str, login: str | None = None
) -> Callable[[int], bytes | UnusableSchema | None]:
    """A registry that answers ``GET /schemas/ids/<number>``. `login` is ``user:password``."""

    def fetch_schema(number: int) -> bytes | UnusableSchema | None:
        form = "?format=serialized" if payload == "protobuf" else ""
        request = urllib.request.Request(f"{address.rstrip('/')}/schemas/ids/{number}{form}")  # noqa: S310 - http or https
        if login:
            request.add_header(
                "Authorization", "Basic " + base64.b64encode(login.encode()).decode()
            )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310
                return _parse_registry_answer(payload, json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                _raise_for_status(address, number, error.code)
                return None
        except (OSError, ValueError) as error:
            raise _registry_unreachable_error(address, str(error)) from error

    return fetch_schema


def _parse_registry_answer(payload: str, answer: dict[str, Any]) -> bytes | UnusableSchema:
    kind = answer.get("schemaType", "AVRO")
    if kind != _SCHEMA_TYPES[payload]:
        return UnusableSchema(f"it is of type {kind}")
    if answer.get("references"):
        return UnusableSchema("it refers to other schemas")
    text = str(answer["schema"])
    return text.encode() if payload == "avro" else _to_descriptor_set(base64.b64decode(text))


def _to_descriptor_set(file: bytes) -> bytes:
    """One file's descriptor as a set of one, as compilers write it."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    return bytes(FileDescriptorSet(file=[FileDescriptorProto.FromString(file)]).SerializeToString())


def _raise_for_status(address: str, number: int, code: int) -> None:
    """Nothing, when the registry says that there is no such schema.

    Raises:
        ConfigurationError: it does not let us in.
        TransientError: it has troubles of its own.
    """
    if code == 404:
        return
    if code in (401, 403):
        raise ConfigurationError(
            f"the registry {address} refuses to tell schema {number} ({code})",
            code="kafka.registry_denied",
            kept="everything sealed so far",
            advice="set kafka.registry_login to env:NAME, with user:password in that variable",
        )
    raise _registry_unreachable_error(address, f"it answers {code}")


def _registry_unreachable_error(address: str, why: str) -> TransientError:
    return TransientError(
        f"the schema registry {address} could not be reached ({why[:200]})",
        code="kafka.registry",
        kept="everything sealed so far",
        advice="check kafka.registry and that the registry runs; tidegate tries again",
        retry_after=2.0,
    )
