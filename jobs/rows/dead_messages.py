"""Messages of a JSON topic that are dead letters for certain, whatever reads them.

Spark SQL reads the others of those that Arrow does not read (`json_messages.split_messages`).
"""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.interfaces import ROWS_PER_ORDINAL
from tidegate.jobs.spec.pipeline import SourceSpec

from .json_messages import PlainMessages, get_kafka_options, list_field_kinds

_MOST_BYTES = 1_000
"""Of an object that is looked at: Spark SQL refuses longer numbers and deeper values."""
_BLANKS = b" \t\r\n"
_NO_OBJECT = "the message is not a JSON object"
_SERIALIZER_BYTES = 5


def explain_dead_message(value: bytes | None, source: SourceSpec) -> str | None:
    """Why a message is a dead letter; None where only Spark SQL can tell."""
    if value is None:
        return explain_tombstone(source)
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "the message is not UTF-8"
    if value[:1] == b"\0" and value[_SERIALIZER_BYTES : _SERIALIZER_BYTES + 1] == b"{":
        number = int.from_bytes(value[1:_SERIALIZER_BYTES], "big")
        return (
            f"{_NO_OBJECT}: it begins with the 5 bytes of a serializer that uses a schema registry,"
            f" schema {number}; payload: json reads JSON without them"
        )
    if not value.lstrip(_BLANKS).startswith(b"{"):
        return _NO_OBJECT
    return _explain_dead_object(text, source) if len(value) <= _MOST_BYTES else None


def explain_tombstone(source: SourceSpec) -> str | None:
    """Why a message without a value is a dead letter; None if it is a row."""
    is_dead = get_kafka_options(source).tombstones == "dead_letter"
    return "a tombstone: the message has no value" if is_dead else None


def _explain_dead_object(text: str, source: SourceSpec) -> str | None:
    try:
        # Text behind the object is no fault.
        found: dict[str, Any] = _DECODER.raw_decode(text.lstrip(_BLANKS.decode()))[0]
    except json.JSONDecodeError:
        return _NO_OBJECT
    except (ValueError, RecursionError):
        return None
    strange = [name for name in found if name not in list_field_kinds(source)]
    if not strange or source.evolution.added == "ignore" or "\\" in text:
        return None
    return f"not in the schema: {', '.join(strange)}"


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def take_dead_messages(
    messages: pa.Table, plan: PlainMessages, source: SourceSpec
) -> tuple[pa.Table, pa.Table]:
    """Rows without values for messages that are dead letters, and the messages that may be good."""
    reasons = [explain_dead_message(value, source) for value in messages["value"].to_pylist()]
    is_dead = pa.array([reason is not None for reason in reasons], pa.bool_())
    dead = messages.filter(is_dead)
    pairs = zip(dead["value"].to_pylist(), dead["key"].to_pylist(), strict=True)
    texts = [show_message(*one) for one in pairs]
    rows = show_dead_messages(dead, list(filter(None, reasons)), texts, plan)
    return rows, messages.filter(pc.invert(is_dead))


def show_dead_messages(
    messages: pa.Table, reasons: list[str], texts: list[str | None], plan: PlainMessages
) -> pa.Table:
    """Rows without values for messages that are dead, with the reason and the text of each."""
    offsets = [offset % ROWS_PER_ORDINAL for offset in messages["offset"].to_pylist()]
    own = [pa.nulls(len(offsets), field.type) for field in list(plan.columns)[:-4]]
    words = [pa.array(told, pa.string()) for told in (reasons, texts)]
    return pa.table([*own, *words, offsets, messages["partition"]], plan.columns)


def show_message(value: bytes | None, key: bytes | None) -> str | None:
    """The text of a message in its dead letter."""
    if value is not None:
        return value.decode("utf-8", "replace")
    return show_key(key)


def show_key(key: bytes | None) -> str | None:
    """The text of a message without a value in its dead letter."""
    return None if key is None else f"key {key.decode('utf-8', 'replace')}"
