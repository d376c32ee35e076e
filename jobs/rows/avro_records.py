"""Avro messages as values of the declared columns, many at a time, by fastavro.

What fastavro might read in another way than `avro_values` is not read here: schemas and values out
of the ordinary are left to it.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.engine.arrow_tables import to_arrow_type
from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.json_types import JsonObject

from .avro_values import make_decimal, parse_avro_schema
from .json_messages import convert_texts, list_field_kinds

_PRIMITIVES: Final = ("boolean", "int", "long", "float", "double", "bytes", "string")
_FIELD_TYPES: Final[dict[tuple[str, str | None], pa.DataType]] = {
    ("boolean", None): pa.bool_(),
    ("int", None): pa.int32(),
    ("long", None): pa.int64(),
    ("float", None): pa.float32(),
    ("double", None): pa.float64(),
    ("bytes", None): pa.binary(),
    ("fixed", None): pa.binary(),
    ("string", None): pa.string(),
    ("string", "uuid"): pa.string(),
    ("enum", None): pa.string(),
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
}
_SOURCES: Final = {
    "boolean": ("bool",),
    "int": ("int32", "int64", "string"),
    "long": ("int32", "int64", "string"),
    "float": ("float",),
    "double": ("float", "double", "int32", "int64"),
    "decimal": ("decimal", "int32", "int64", "string"),
    "string": ("string",),
    "binary": ("binary",),
    "date": ("date32[day]", "string"),
    "timestamp": ("timestamp", "string"),
}
"""Declared type -> types of fields of which a plain value becomes one here."""
_MOST_DIGITS: Final = 38
_INT: Final = "tidegate-int"


class _OtherSchemaError(ValueError):
    """A schema out of the ordinary."""


def _read_int(number: int, *_: Any) -> int:
    if not -(1 << 31) <= number < 1 << 31:  # fastavro reads a long
        raise OverflowError(number)
    return number


# fastavro's documented registry of custom logical types. It is global, hence the prefix.
fastavro.read.LOGICAL_READERS[f"int-{_INT}"] = _read_int


@dataclass(frozen=True)
class AvroRecords:
    """How the records of a schema are read.

    Attributes:
        physical: the schema without logical types, as fastavro has parsed it.
        fields: field -> its type as a column; None if it has none here.
    """

    physical: Any
    fields: Mapping[str, pa.DataType | None]

    def read_record(self, body: bytes) -> JsonObject | None:
        """Return the values of a message's fields; None if it has to be looked at by itself.

        A record of nulls is none. What is behind a record is ignored.
        """
        try:
            record: Any = fastavro.schemaless_reader(io.BytesIO(body), self.physical, None)
            written = io.BytesIO()
            fastavro.schemaless_writer(written, self.physical, record)
        # fastavro lets the exceptions of damaged bytes through, of any kind.
        except Exception:
            return None
        # Numbers that are too long or negative lengths are other values in other libraries.
        is_plain = body.startswith(written.getvalue())
        return record if is_plain and any(one is not None for one in record.values()) else None


def plan_records(schema: bytes, source: SourceSpec) -> AvroRecords | None:
    """Return how the records of a schema are read; None if one by one."""
    records = _plan_schema(schema)
    if records is None:
        return None
    wanted = _find_fields(records, source).items()
    is_plain = all(_is_source(records.fields[name], kind, source) for name, kind in wanted)
    return records if is_plain else None


@cache
def _plan_schema(schema: bytes) -> AvroRecords | None:
    record = parse_avro_schema(schema).record
    reducer = _SchemaReducer()
    try:
        fields = {
            field["name"]: reducer.reduce(field["type"], nested=False) for field in record["fields"]
        }
        physical = _build_record(record, {name: own for name, (own, _) in fields.items()})
        parsed = fastavro.parse_schema(physical)
    # Of attributes that are none, of any kind.
    except (LookupError, TypeError, ValueError, fastavro.schema.SchemaParseException):
        return None
    return AvroRecords(parsed, {name: kind for name, (_, kind) in fields.items()})


def _build_record(record: JsonObject, fields: JsonObject) -> JsonObject:
    declared = [{"name": name, "type": own} for name, own in fields.items()]
    return {"type": "record", "name": record["name"], "fields": declared}


class _SchemaReducer:
    """Reduces a schema that fastavro has parsed to physical types.

    Raises:
        _OtherSchemaError: a type is out of the ordinary.
    """

    def __init__(self) -> None:
        self._done = set[str]()

    def reduce(self, schema: Any, *, nested: bool) -> tuple[Any, pa.DataType | None]:
        """Return the physical schema of a type, and its type as a column if it has one here."""
        if isinstance(schema, list):
            return self._reduce_union(schema, nested=nested)
        if isinstance(schema, str) and schema not in _PRIMITIVES:
            # Not known yet: a record inside itself.
            _require_ordinary(schema in self._done)
            return schema, None
        own: Any = {"type": schema} if isinstance(schema, str) else schema
        if not isinstance(own["type"], str):
            return self.reduce(own["type"], nested=nested)
        match own:
            case {"type": "record", "fields": fields}:
                _require_ordinary(bool(fields))  # a damaged count of empty ones has no end
                reduced = {f["name"]: self.reduce(f["type"], nested=True)[0] for f in fields}
                self._done.add(own["name"])
                return _build_record(own, reduced), None
            case {"type": "array", "items": items}:
                return {"type": "array", "items": self.reduce(items, nested=True)[0]}, None
            case {"type": "map", "values": values}:
                return {"type": "map", "values": self.reduce(values, nested=True)[0]}, None
        self._done.add(own.get("name", ""))
        # The ranges of nested values are not looked at.
        _require_ordinary(not nested or own.get("logicalType") in (None, "uuid"))
        return _reduce_leaf(own), _find_type(own)

    def _reduce_union(self, options: list[Any], *, nested: bool) -> tuple[Any, pa.DataType | None]:
        others = [option for option in options if option != "null"]
        is_plain = len(others) == 1
        reduced = [
            ("null", None) if one == "null" else self.reduce(one, nested=nested or not is_plain)
            for one in options
        ]
        kinds = [kind for option, kind in reduced if option != "null"]
        return [option for option, _ in reduced], kinds[0] if is_plain else None


def _reduce_leaf(own: JsonObject) -> Any:
    match own:
        case {"type": "int"}:
            return {"type": "int", "logicalType": _INT}
        case {"type": "enum", "name": name, "symbols": symbols}:
            return {"type": "enum", "name": name, "symbols": symbols}
        case {"type": "fixed", "name": name, "size": size}:
            _require_ordinary(size > 0)
            return {"type": "fixed", "name": name, "size": size}
    return own["type"]


def _require_ordinary(condition: bool) -> None:
    if not condition:
        raise _OtherSchemaError


def _find_type(own: JsonObject) -> pa.DataType:
    kind, logical = own["type"], own.get("logicalType")
    if logical != "decimal":
        _require_ordinary((kind, logical) in _FIELD_TYPES)
        return _FIELD_TYPES[kind, logical]
    precision, scale = own["precision"], own.get("scale", 0)
    _require_ordinary(kind in ("bytes", "fixed") and precision <= _MOST_DIGITS)
    return pa.decimal128(precision, scale)


def _find_fields(records: AvroRecords, source: SourceSpec) -> dict[str, str]:
    """Field that is wanted of a schema -> declared kind; the old name of one if it has no new."""
    renamed = source.evolution.renamed
    return {
        name: kind
        for name, kind in list_field_kinds(source).items()
        if name in records.fields and renamed.get(name) not in records.fields
    }


def _is_source(kind: pa.DataType | None, declared: str, source: SourceSpec) -> bool:
    if kind is None:
        return False
    if declared == "timestamp" and pa.types.is_integer(kind):
        return source.parse.timestamps in TICKS_PER_UNIT
    own = str(kind) if "[day]" in str(kind) else re.split(r"\[|128", str(kind))[0]
    return own in _SOURCES.get(declared.partition("(")[0], ())


def convert_records(
    records: AvroRecords, found: Sequence[JsonObject], fields: pa.Schema, source: SourceSpec
) -> pa.StructArray:
    """Return records as structs of the wanted fields.

    Raises:
        ValueError, pa.ArrowException: a value is out of the ordinary, or does not fit.
    """
    wanted = _find_fields(records, source)
    columns = {}
    for name, kind in records.fields.items():
        values = [record[name] for record in found]
        # Also of others: a value out of range makes its message bad.
        if kind is not None and (name in wanted or not _is_plain(kind)):
            columns[name] = _make_column(values, kind)
    own = [
        _convert_field(columns[field.name], wanted[field.name], source)
        if field.name in wanted
        else pa.nulls(len(found), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(own, fields=list(fields))


def _is_plain(kind: pa.DataType) -> bool:
    return not (pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _make_column(values: list[Any], kind: Any) -> pa.Array:
    """The values of a field, as the schema of the messages has it."""
    if pa.types.is_decimal(kind):
        digits = kind.precision, kind.scale
        return pa.array(
            [one if one is None else make_decimal(one, *digits) for one in values], kind
        )
    if pa.types.is_date(kind):
        return pa.array(values, pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind).cast(pa.timestamp("us", "UTC"))
    return pa.array(values, kind)


def _convert_field(column: pa.Array, declared: str, source: SourceSpec) -> pa.Array:
    """A field as a column of its declared type.

    Raises:
        pa.ArrowException: a value does not fit, or not plainly.
    """
    kind = to_arrow_type(declared)
    if pa.types.is_integer(column.type):
        if pa.types.is_timestamp(kind):
            tick = TICKS_PER_UNIT[source.parse.timestamps]
            return pc.multiply_checked(column.cast(pa.int64()), tick).cast(kind)
        if pa.types.is_decimal(kind):
            # Arrow wants room for every value of a type at first.
            column = column.cast(pa.decimal128(_MOST_DIGITS, 0))
    if not pa.types.is_string(column.type) or pa.types.is_string(kind):
        return column.cast(kind)
    per_unit = TICKS_PER_UNIT.get(source.parse.timestamps)
    return _require_none(*convert_texts(column, declared, per_unit))


def _require_none(column: pa.Array, odd: Any) -> pa.Array:
    if np.any(odd):
        raise pa.ArrowInvalid("a text that is looked at by itself")
    return column
