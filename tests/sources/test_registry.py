"""Schemas by number.

A registry that answers, refuses, is away; a folder; each number is asked for once.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tidegate.errors import ConfigurationError, TransientError
from tidegate.jobs.sources.kafka_source import (
    SchemaCache,
    UnusableSchema,
    make_folder_reader,
    make_registry_reader,
)


class Registry:
    """Answers as schema registries do."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, dict[str, Any]]] = {}
        self.asked: list[str] = []
        self.login: str | None = None
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                registry.login = self.headers["Authorization"]
                code, body = registry.answers.get(self.path, (404, {"error_code": 40403}))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def registry() -> Iterator[Registry]:
    found = Registry()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def test_a_number_is_asked_for_once(registry: Registry) -> None:
    """What is known is not asked for again; what was not known is."""
    registry.answers["/schemas/ids/3"] = (200, {"schema": "{}"})
    schemas = SchemaCache(make_registry_reader(registry.address, "avro", "ann:secret"))
    schemas.fetch_missing({3, 4})
    assert schemas.known == {3: b"{}"}
    assert registry.login == "Basic " + base64.b64encode(b"ann:secret").decode()
    schemas.fetch_missing({4})
    registry.answers["/schemas/ids/4"] = (200, {"schema": "[]"})
    schemas.fetch_missing({4})
    assert schemas.known.keys() == {3, 4}
    assert sorted(registry.asked) == ["/schemas/ids/3", *["/schemas/ids/4"] * 3]


def test_protobuf_comes_serialized(registry: Registry) -> None:
    """The registry's compiled form of a file is a set of one file here."""
    file = FileDescriptorProto(name="a.proto", package="a")
    text = base64.b64encode(file.SerializeToString()).decode()
    registry.answers["/schemas/ids/3?format=serialized"] = (
        200,
        {"schemaType": "PROTOBUF", "schema": text},
    )
    found = make_registry_reader(registry.address, "protobuf")(3)
    assert found is not None
    assert FileDescriptorSet.FromString(found).file[0].package == "a"


@pytest.mark.parametrize(
    "answer",
    [
        {"schemaType": "PROTOBUF", "schema": base64.b64encode(b"message A {}").decode()},
        {"schemaType": "PROTOBUF"},
    ],
)
def test_a_broken_answer_may_be_better_later(registry: Registry, answer: dict[str, Any]) -> None:
    """Bytes that are no descriptor, and an answer without a schema, are the registry's trouble."""
    registry.answers["/schemas/ids/3?format=serialized"] = (200, answer)
    with pytest.raises(TransientError):
        make_registry_reader(registry.address, "protobuf")(3)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((403, {}), ConfigurationError, "refuses to tell schema 3"),
        ((500, {}), TransientError, "it answers 500"),
        ((200, ["not", "found"]), TransientError, "without a schema"),
    ],
)
def test_answers_that_are_no_schema(
    registry: Registry, answer: tuple[int, Any], error: type[Exception], said: str
) -> None:
    """Each says what it is: a right that is missing, a registry in trouble."""
    registry.answers["/schemas/ids/3"] = answer
    with pytest.raises(error, match=said):
        make_registry_reader(registry.address, "avro")(3)


def test_schemas_that_cannot_be_used(registry: Registry) -> None:
    """They are known, with the reason, and asked for once.

    A message that was written with one is not a fault of the spec.
    """
    registry.answers["/schemas/ids/3"] = (200, {"schemaType": "JSON", "schema": ""})
    registry.answers["/schemas/ids/4"] = (200, {"schema": "{}", "references": [{"name": "x"}]})
    schemas = SchemaCache(make_registry_reader(registry.address, "avro"))
    schemas.fetch_missing({3, 4, 5})
    assert schemas.known == {
        3: UnusableSchema("it is of type JSON"),
        4: UnusableSchema("it refers to other schemas"),
    }
    schemas.fetch_missing({3, 4})
    assert len(registry.asked) == 3


def test_a_registry_that_is_away() -> None:
    """No one listens: waited for."""
    with pytest.raises(TransientError, match="could not be reached"):
        make_registry_reader("http://127.0.0.1:9", "avro")(3)


def test_a_folder(tmp_path: Path) -> None:
    """Files named by their numbers; a folder that is not there is a mistake in the spec."""
    (tmp_path / "3.avsc").write_text("{}")
    ask = make_folder_reader(tmp_path, "avro")
    assert (ask(3), ask(4)) == (b"{}", None)
    with pytest.raises(ConfigurationError, match="there is no folder"):
        make_folder_reader(tmp_path / "no", "avro")
