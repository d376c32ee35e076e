"""Protobuf messages as rows: fields become texts, and these are cast like texts of JSON."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import get_kafka_options, list_field_kinds
from .message_schemas import has_header
from .odd_messages import cast_fields
from .protobuf_texts import find_message_index, make_text_reader


def make_protobuf_decoder(
    source: SourceSpec, *, keeps_texts: bool = False
) -> Callable[[bytes, bytes], Mapping[str, Any]]:
    """Return what makes column -> value of a payload and its schema.

    It raises `DeadMessageError` if the bytes are no message, or a value does not fit.

    Args:
        source: a topic.
        keeps_texts: whether texts are left to `convert_texts`, which converts many at a time.
    """
    kafka = get_kafka_options(source)
    message = kafka.message
    assert message is not None  # noqa: S101 - the spec says so

    @cache
    def make_reader(schema: bytes) -> Callable[[bytes], Mapping[str, str | None]]:
        """Return the reader of a schema."""
        index = find_message_index(schema, message) if has_header(kafka) else b""
        return make_text_reader(schema, message, [*list_field_kinds(source)], index)

    def decode(body: bytes, schema: bytes) -> Mapping[str, Any]:
        """Return column -> value, or field -> text."""
        texts = make_reader(schema)(body)
        return texts if keeps_texts else cast_fields(texts, source)

    return decode
