"""Avro messages as values of the declared columns.

The converter of a field is chosen once for each schema.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from typing import Any, Final

from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.row_rules import EXACT_BITS, accepts_family, build_text_pattern

from .avro_records import NESTED, AvroBytes, AvroField, parse_avro_schema, write_time
from .json_messages import is_plain_kind, list_former_names, list_payload_columns
from .odd_messages import DeadMessageError
from .row_texts import write_json
from .text_values import (
    TICKS_PER_DAY,
    cast_text,
    check_whole_number,
    find_instant,
    read_decimal_digits,
    round_decimal,
    to_float32,
)

_NO_RECORD: Final = "the message is not a record of the schema"
_FAMILIES: Final = {
    "boolean": "bool",
    "long": "int",
    "double": "float",
    "bytes": "binary",
    "instant": "timestamp",
    "local": "timestamp",
}
"""Kind of a field -> family of another name."""
_KEPT: Final = frozenset(
    {
        ("int", "long"),
        ("bytes", "binary"),
        ("instant", "timestamp"),
    }
)
"""Kinds and declared types of other names with the same values."""
_Converter = Callable[[Any], Any]
"""A value as one of a declared type; None if it does not fit."""


@dataclass(frozen=True)
class _Column:
    name: str
    declared: str
    field: AvroField
    convert: _Converter


def make_avro_decoder(
    source: SourceSpec, *, keeps_texts: bool = False
) -> Callable[[bytes, bytes], dict[str, Any]]:
    """Return what makes column -> value of a payload and its schema.

    What is behind a record is ignored. It raises `DeadMessageError` if the bytes are no record, or
    a value does not fit.

    Args:
        source: a topic.
        keeps_texts: whether texts are left to `convert_texts`, which converts many at a time.
    """

    @cache
    def plan_columns(schema: bytes) -> list[_Column]:
        """The columns that have a field in a schema."""
        return _plan_columns(parse_avro_schema(schema), source, keeps_texts=keeps_texts)

    def decode(body: bytes, schema: bytes) -> dict[str, Any]:
        """Return column -> value."""
        data = AvroBytes(body)
        try:
            record = {field.name: field.read(data) for field in parse_avro_schema(schema)}
        # Of damaged bytes, or of a type whose attributes are none.
        except (ArithmeticError, EOFError, LookupError, RecursionError, TypeError, ValueError):
            raise DeadMessageError(_NO_RECORD) from None
        if all(value is None for value in record.values()):
            raise DeadMessageError(_NO_RECORD)
        row = {}
        for column in plan_columns(schema):
            value = record[column.field.name]
            if value is not None:
                row[column.name] = converted = column.convert(value)
                if converted is None:
                    raise DeadMessageError(_describe_fault(column, value))
        return row

    return decode


def _plan_columns(
    found: Sequence[AvroField], source: SourceSpec, *, keeps_texts: bool
) -> list[_Column]:
    """The columns with a field, by its new or its old name."""
    fields = {field.name: field for field in found}
    former = list_former_names(source)
    columns = []
    for name, declared in list_payload_columns(source).items():
        field = fields.get(name) or fields.get(former.get(name, name))
        if field is not None:
            is_kept = keeps_texts and field.kind == "string" and is_plain_kind(declared)
            target = "string" if is_kept else declared
            convert = _choose_converter(field.kind, target, source)
            columns.append(_Column(name, declared, field, convert))
    return columns


def _describe_fault(column: _Column, value: Any) -> str:
    shown = _show_value(value, column.field.kind)
    what = f"{column.name} is {column.field.described}, declared {column.declared}"
    return f"{what}: {shown}"


def _show_value(value: Any, kind: str) -> str | None:
    """A value as text; bytes that are none are replaced."""
    if kind in ("date", "instant", "local"):
        return write_time(value, kind)
    match value:
        case str():
            text = value
        case bytes():
            return value.decode("utf-8", "replace")
        case Decimal():
            return format(value, "f")
        case float() | bool():
            return write_json(value).strip('"')
        case _:
            text = write_json(value)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _choose_converter(kind: str, declared: str, source: SourceSpec) -> _Converter:
    if kind == declared == "string":
        return _keep_text
    if kind == "string" and declared != "timestamp":
        return partial(_convert_text, declared=declared, source=source)
    if (kind, declared) in _KEPT or kind == declared.replace(" ", ""):
        return lambda value: value
    if declared == "timestamp":
        return _choose_time_converter(kind, source)
    fits = accepts_family(declared, _find_family(kind))
    if declared == "string" and (fits or kind == NESTED):
        return partial(_show_value, kind=kind)
    if not fits:
        return lambda _: None
    if declared.startswith("decimal"):
        return partial(_convert_to_decimal, declared=declared)
    return _CONVERTERS[declared]


def _find_family(kind: str) -> str:
    own = kind.partition("(")[0]
    return _FAMILIES.get(own, own)


def _choose_time_converter(kind: str, source: SourceSpec) -> _Converter:
    if kind == "local" and source.timezone is not None:
        return partial(find_instant, timezone=source.timezone)
    family, tick = _find_family(kind), TICKS_PER_UNIT.get(source.parse.timestamps)
    if family == "int" and tick is not None:
        return lambda value: check_whole_number(value * tick, "long")
    # A text, or a number that the schema does not call a time: as in JSON.
    if family == "string" or (family in ("float", "decimal") and tick is not None):
        write = float if family == "float" else str
        return lambda value: cast_text(str(write(value)), "timestamp", source)
    return lambda _: None


def _keep_text(value: str) -> str | None:
    """Return a text; None if its bytes are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _convert_text(value: str, declared: str, source: SourceSpec) -> Any:
    """A text in the plain form of a type."""
    if _keep_text(value) is None:
        return None
    if declared == "binary":
        return value.encode()
    form = build_text_pattern(declared)
    is_plain = form is None or re.fullmatch(form, value)
    return cast_text(value, declared, source) if is_plain else None


def _convert_to_decimal(value: Any, declared: str) -> Decimal | None:
    own = value if isinstance(value, Decimal | int) else str(float(value))
    try:
        found = round_decimal(Decimal(own), *read_decimal_digits(declared))
    except ValueError:
        return None
    if found is None:
        return None
    back = found if isinstance(value, Decimal | int) else type(value)(found)
    return found if back == value else None


def _convert_to_whole(value: Any, declared: str) -> int | None:
    """Return the number; None if it has a fraction or is too large."""
    try:
        number = int(value)
    except (OverflowError, ValueError):  # no number, or an infinity
        return None
    return None if number != value else check_whole_number(number, declared)


def _convert_to_floating(value: Any, declared: str) -> Any:
    if type(value) is int and abs(value) > 1 << EXACT_BITS[declared]:
        return None
    return float(value) if declared == "double" else to_float32(float(value))


_CONVERTERS: Final[dict[str, _Converter]] = {
    "boolean": bool,
    "int": partial(_convert_to_whole, declared="int"),
    "long": partial(_convert_to_whole, declared="long"),
    "float": partial(_convert_to_floating, declared="float"),
    "double": partial(_convert_to_floating, declared="double"),
    "date": lambda ticks: ticks // TICKS_PER_DAY,
}
