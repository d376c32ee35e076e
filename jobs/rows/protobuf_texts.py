"""Protobuf messages as the texts of the wanted fields, by the Protobuf library itself.

Numbers, booleans, text, bytes (as Base64), enums (by name) and the well-known types (a Timestamp as
ISO text, a wrapper as its value) are columns of the declared type; lists, maps and messages are
JSON text, as they are in a JSON payload. A field that a proto3 message does not carry has its
default value, a list is then empty; one that is declared ``optional``, or is a message, is null.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from .errors import NO_SUCH_MESSAGE, NOT_A_DESCRIPTOR_SET, PROTOBUF_UNUSABLE
from .odd_messages import DeadMessageError

_WELL_KNOWN = "google.protobuf."
_WELL_KNOWN_FILES = "any|duration|empty|field_mask|struct|timestamp|wrappers"
_FIRST_MESSAGE_INDEX = b"\x00"  # short for the list [0]
_ONE = b"\x02"  # the length of a list, doubled as all its numbers


@lru_cache(maxsize=64)
def find_message_index(schema: bytes, message: str) -> bytes:
    """The bytes by which a registry's serializer names a message of a file.

    Behind the schema's number, before the payload.

    Raises:
        ConfigurationError: there is no such message, or it is inside another one.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.wrappers_pb2 import Int64Value

    for file in FileDescriptorSet.FromString(schema).file:
        prefix = f"{file.package}." if file.package else ""
        names = [prefix + found.name for found in file.message_type]
        if message in names:
            place = names.index(message)
            if place == 0:
                return _FIRST_MESSAGE_INDEX
            # The list [place]. Its numbers are those of a message without the tag before them.
            number: bytes = Int64Value(value=2 * place).SerializeToString()[1:]
            return _ONE + number
    raise NO_SUCH_MESSAGE(message=message)


def make_text_reader(
    schema: bytes, message: str, names: Sequence[str], index: bytes
) -> Callable[[bytes], dict[str, str | None]]:
    """Return what makes field -> text of a payload that begins with `index`.

    It raises `DeadMessageError`. The library tells a payload that is cut or damaged. One of another
    message it mostly does not: its fields are passed over, and the wanted ones have their defaults.
    """
    from google.protobuf.message import DecodeError

    made = load_message_class(schema, message)
    readers = {name: _make_field_reader(made.DESCRIPTOR, name) for name in names}

    def read(value: bytes) -> dict[str, str | None]:
        """Return the texts of a message."""
        if not value.startswith(index):
            raise DeadMessageError(f"the message is not a {message}, but another one of its schema")
        try:
            one = made.FromString(value[len(index) :])
            return {name: reader(one) for name, reader in readers.items()}
        except DecodeError:
            raise DeadMessageError(f"the message is no {message}") from None
        # Of the well-known types: a time out of range, an Any of a type no one knows.
        except (TypeError, ValueError) as error:
            raise DeadMessageError(
                f"the message has a value that cannot be written as text: {error}"
            ) from error

    return read


@cache
def load_message_class(schema: bytes, message: str) -> Any:
    """Return the class of a message.

    Raises:
        ConfigurationError: the schema cannot be used, or has no such message.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    # A pool of its own: versions of a schema have files and messages of the same names.
    pool = DescriptorPool()
    try:
        files = {file.name: file for file in FileDescriptorSet.FromString(schema).file}
        for name in list(files):
            _add_file_to_pool(pool, files, name)
        return GetMessageClass(pool.FindMessageTypeByName(message))
    except DecodeError as error:
        raise NOT_A_DESCRIPTOR_SET() from error
    except KeyError:
        raise NO_SUCH_MESSAGE(message=message) from None
    except TypeError as error:
        raise PROTOBUF_UNUSABLE(error=error) from error


def _add_file_to_pool(pool: Any, files: dict[str, Any], name: str) -> None:
    """A file, and before it what it imports.

    Google's well-known types come from the library where the set lacks them.
    """
    with suppress(KeyError):
        pool.FindFileByName(name)
        return
    file = files.get(name) or _find_well_known_file(name)
    if file is None:
        raise TypeError(f"it imports {name}, which is not in it")
    for needed in file.dependency:
        _add_file_to_pool(pool, files, needed)
    pool.Add(file)


def _find_well_known_file(name: str) -> Any:
    """A file of Google's well-known types; None when it is not one."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    known = re.fullmatch(rf"google/protobuf/({_WELL_KNOWN_FILES})\.proto", name)
    if known is None:
        return None
    module = import_module(f"google.protobuf.{known[1]}_pb2")
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


def _make_field_reader(descriptor: Any, name: str) -> Callable[[Any], str | None]:
    field = descriptor.fields_by_name.get(name)
    if field is None:
        return lambda _: None
    # A field without presence cannot be null; it has its default.
    return lambda one: (
        None
        if field.has_presence and not one.HasField(name)
        else _value_to_text(_field_to_json(field, getattr(one, name)))
    )


def _value_to_text(value: Any) -> str:
    """A value as a JSON payload would have it in a column of text."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )


def _field_to_json(field: Any, held: Any) -> Any:
    """What a field holds, in JSON's terms."""
    own = field.message_type
    if own is not None and own.GetOptions().map_entry:
        of = own.fields_by_name["value"]
        # Sorted, because a replay must find the same text.
        return {_value_to_text(key): _element_to_json(of, held[key]) for key in sorted(held)}
    return (
        [_element_to_json(field, one) for one in held]
        if field.is_repeated
        else _element_to_json(field, held)
    )


def _element_to_json(field: Any, held: Any) -> Any:
    if field.message_type is not None:
        return _message_to_json(held)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(held)
        return str(held) if known is None else known.name
    if field.type == field.TYPE_BYTES:
        return base64.b64encode(held).decode()
    return str(held) if isinstance(held, float) and not math.isfinite(held) else held


def _message_to_json(message: Any) -> Any:
    from google.protobuf.json_format import MessageToDict

    if message.DESCRIPTOR.full_name.startswith(_WELL_KNOWN):  # each has a form of its own in JSON
        return MessageToDict(
            message, preserving_proto_field_name=True, descriptor_pool=message.DESCRIPTOR.file.pool
        )
    fields = message.DESCRIPTOR.fields
    return {
        f.name: _field_to_json(f, getattr(message, f.name))
        for f in fields
        if not f.has_presence or message.HasField(f.name)
    }
