"""Protobuf messages as texts, by the library alone.

Single values, lists, maps, messages, and Google's well-known types.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from tidegate.errors import ConfigurationError
from tidegate.jobs.rows.odd_messages import DeadMessageError
from tidegate.jobs.rows.protobuf_texts import load_message_class, make_text_reader

FIELD = FieldDescriptorProto
ONE, MANY = FIELD.LABEL_OPTIONAL, FIELD.LABEL_REPEATED
GOOGLE = ("timestamp", "duration", "wrappers", "struct", "any")


def schema(of: str = "shop.proto") -> FileDescriptorProto:
    """A file with shop.Order, whose fields are of every kind."""
    imports = [f"google/protobuf/{name}.proto" for name in GOOGLE]
    file = FileDescriptorProto(name=of, package="shop", syntax="proto3", dependency=imports)
    file.enum_type.add(name="Kind").value.add(name="BUY", number=0)
    item = file.message_type.add(name="Item")
    add(item, "name", 1, FIELD.TYPE_STRING)
    add(item, "amount", 2, FIELD.TYPE_INT64)
    add(item, "kind", 3, FIELD.TYPE_ENUM, of=".shop.Kind")
    add(item, "parts", 4, FIELD.TYPE_MESSAGE, MANY, ".shop.Item")
    add(item, "at", 5, FIELD.TYPE_MESSAGE, of=".google.protobuf.Timestamp")
    order = file.message_type.add(name="Order")
    add(order, "numbers", 1, FIELD.TYPE_INT64, MANY)
    add(order, "kinds", 2, FIELD.TYPE_ENUM, MANY, ".shop.Kind")
    add(order, "first", 3, FIELD.TYPE_MESSAGE, of=".shop.Item")
    add(order, "items", 4, FIELD.TYPE_MESSAGE, MANY, ".shop.Item")
    add(order, "tags", 5, FIELD.TYPE_MESSAGE, MANY, ".shop.Order.TagsEntry")
    entry = order.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, FIELD.TYPE_STRING)
    add(entry, "value", 2, FIELD.TYPE_DOUBLE)
    add(order, "took", 6, FIELD.TYPE_MESSAGE, of=".google.protobuf.Duration")
    add(order, "count", 7, FIELD.TYPE_MESSAGE, of=".google.protobuf.Int64Value")
    add(order, "free", 8, FIELD.TYPE_MESSAGE, of=".google.protobuf.Struct")
    add(order, "at", 9, FIELD.TYPE_MESSAGE, of=".google.protobuf.Timestamp")
    add(order, "blobs", 10, FIELD.TYPE_BYTES, MANY)
    add(order, "what", 11, FIELD.TYPE_MESSAGE, of=".google.protobuf.Any")
    add(order, "paid", 12, FIELD.TYPE_BOOL)
    return file


def add(
    message: DescriptorProto,
    name: str,
    number: int,
    kind: int,
    label: int = ONE,
    of: str | None = None,
) -> None:
    """A field."""
    message.field.add(name=name, number=number, type=kind, label=label, type_name=of)


SET = bytes(FileDescriptorSet(file=[schema()]).SerializeToString())
"""Without the files that it imports, as a registry gives it."""


def order(**values: Any) -> bytes:
    """A message, written by the library."""
    pool = DescriptorPool()
    for name in GOOGLE:
        module = __import__(f"google.protobuf.{name}_pb2", fromlist=["DESCRIPTOR"])
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.Add(schema())
    return bytes(
        GetMessageClass(pool.FindMessageTypeByName("shop.Order"))(**values).SerializeToString()
    )


def text(name: str, **values: Any) -> str | None:
    """The text of a field of a message with these values."""
    return make_text_reader(SET, "shop.Order", [name], b"")(order(**values))[name]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("numbers", {"numbers": [1, -(2**62)]}, "[1,-4611686018427387904]"),
        ("numbers", {}, "[]"),
        ("kinds", {"kinds": [0, 7]}, '["BUY","7"]'),
        ("blobs", {"blobs": [b"\0\xff"]}, '["AP8="]'),
        ("first", {}, None),
        (
            "first",
            {"first": {"name": "é", "amount": 2}},
            '{"name":"é","amount":2,"kind":"BUY","parts":[]}',
        ),
        ("tags", {"tags": {"b": 1.5, "a": float("inf")}}, '{"a":"inf","b":1.5}'),
        ("took", {"took": {"seconds": 1, "nanos": 500_000_000}}, "1.500s"),
        ("count", {"count": {"value": 5}}, "5"),
        ("count", {}, None),
        ("free", {"free": {"a": [1, None]}}, '{"a":[1.0,null]}'),
        ("at", {"at": {"seconds": 1}}, "1970-01-01T00:00:01Z"),
        ("paid", {}, "false"),
    ],
)
def test_fields(name: str, values: dict[str, Any], expected: str | None) -> None:
    """Lists, maps and messages are JSON.

    Wrappers and times are their values; what is absent is null, and a list is empty.
    """
    assert text(name, **values) == expected


def test_messages_in_messages() -> None:
    """A list of messages that hold messages."""
    part = {"name": "p", "at": {"seconds": 1}}
    found = json.loads(text("items", items=[{"name": "i", "parts": [part, part]}]) or "")
    plain = {"name": "p", "amount": 0, "kind": "BUY", "parts": [], "at": "1970-01-01T00:00:01Z"}
    assert found == [{"name": "i", "amount": 0, "kind": "BUY", "parts": [plain, plain]}]


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("at", {"at": {"seconds": 10**12}}, "Timestamp"),
        ("first", {"first": {"at": {"seconds": 10**12}}}, "Timestamp"),
        ("what", {"what": {"type_url": "t/shop.No one", "value": b"\x08\x01"}}, "shop.No one"),
    ],
)
def test_values_that_have_no_text(name: str, values: dict[str, Any], complaint: str) -> None:
    """A time that no calendar has, a message of a type that no one knows.

    The message's fault, its neighbours are read.
    """
    read = make_text_reader(SET, "shop.Order", [name, "paid"], b"")
    with pytest.raises(DeadMessageError, match=complaint):
        read(order(**values))
    assert read(order(paid=True))["paid"] == "true"


def test_a_mistake_in_a_schema_is_reported() -> None:
    """A message that the schema has not, a file that is not there."""
    with pytest.raises(ConfigurationError, match=r"no message shop\.Nothing"):
        load_message_class(SET, "shop.Nothing")
    lonely = schema()
    lonely.dependency.append("other.proto")
    with pytest.raises(ConfigurationError, match=r"it imports other\.proto, which is not in it"):
        load_message_class(
            bytes(FileDescriptorSet(file=[lonely]).SerializeToString()), "shop.Order"
        )
