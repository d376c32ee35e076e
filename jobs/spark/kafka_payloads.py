"""Decodes the messages of a topic into rows of the declared columns.

Each row carries its position in the partition, or the reason why it could not be decoded.

JSON and Avro are decoded by Spark's own functions; `json_messages` takes plain JSON objects of
large ranges before. Protobuf is decoded in Spark's Python workers by the Protobuf library, and its
values are cast like JSON's: Spark's own package for it is not to be had everywhere (see
docs/decisions/0073).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DataType, MapType, NumericType, StringType, StructType

from tidegate.errors import ConfigurationError
from tidegate.jobs.engine.interfaces import ROWS_PER_ORDINAL
from tidegate.jobs.rows.column_casts import (
    cast_with_check_sql,
    declared_to_spark_type,
    spark_to_arrow_type,
)
from tidegate.jobs.rows.json_messages import (
    PARTITION,
    get_kafka_options,
    list_field_kinds,
    list_former_names,
    list_payload_columns,
)
from tidegate.jobs.rows.message_schemas import read_schema_file
from tidegate.jobs.rows.protobuf_texts import find_message_index, require_message
from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.rules.row_conditions import quote_name, quote_text
from tidegate.jobs.sources.kafka_source import (
    OFFSET_COLUMN,
    UnusableSchema,
    open_schema_registry,
)
from tidegate.jobs.sources.object_decoding import BAD_REASON, BAD_TEXT
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.source_options import KafkaOptions

from .errors import (
    AVRO_NOT_A_RECORD,
    AVRO_REFUSED,
    REGISTERED_SCHEMA_UNUSABLE,
    SCHEMA_NOT_REGISTERED,
)
from .protobuf_decoding import make_payload_reader
from .spark_session import SPARK_ERRORS, extract_cause

MESSAGE_DDL: Final = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp,"
    " headers array<struct<key:string,value:binary>>"
)
"""Columns of the messages that Spark has to read."""
UNKNOWN_SCHEMA: Final = "_schema"
"""Column of a topic with a registry.

The number of the schema, where it is not known (yet) or cannot be used.
"""

_WHOLE_NUMBER_PATTERN = r"\\A\\s*[+-]?[0-9]+\\s*\\z"
# A sign counts only behind a time of day: the end of a plain date is not a zone.
_ZONE_PATTERN = r"(Z|z|[T ].*[+-][0-9]{2}(:?[0-9]{2})?)\\z"
_CORRUPT_COLUMN = "_tidegate_bad"
_STRICT_JSON_OPTIONS = (
    "map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false',"
    f" 'columnNameOfCorruptRecord', '{_CORRUPT_COLUMN}')"
)
"""JSON as it is written down, and no more."""
_NATIVE_JSON_TYPES = {
    "int": "int",
    "long": "bigint",
    "double": "double",
    "boolean": "boolean",
}
"""Kinds that JSON has as well, as they are read from it; all others are taken as texts and cast."""
# A zero byte and four of the schema's number, in front of what a registry's serializer writes.
_WIRE_HEADER_BYTES = 5


class _DecodedPayload(NamedTuple):
    """A payload's columns as expressions.

    Attributes:
        frame: the messages, with what the expressions need.
        values: column -> expression.
        why: expression of what is wrong with the message, else null.
        faults: (condition, complaint) of single values.
    """

    frame: DataFrame
    values: dict[str, str]
    why: str
    faults: list[tuple[str, str]]


def decode_messages(
    messages: DataFrame,
    source: SourceSpec,
    known: Mapping[int, bytes | UnusableSchema] | None = None,
    places: Sequence[str] = (),
) -> DataFrame:
    """Decode messages into rows with the source's columns, `BAD_REASON` and `BAD_TEXT`.

    A row with a reason has nulls in all columns of the source. Beside these each row has its offset
    modulo `ROWS_PER_ORDINAL` (`OFFSET_COLUMN`), `PARTITION` and, with a registry, `UNKNOWN_SCHEMA`.

    Args:
        messages: as Spark's Kafka source gives them.
        source: its spec.
        known: schemas by number, for a topic with a registry. Of one that cannot be used, messages
            are bad.
        places: further columns of the messages that the rows have as well.

    Raises:
        ConfigurationError: the schema file of the spec cannot be read or used.
    """
    kafka = get_kafka_options(source)
    taken, beside = _select_envelope_columns(source)
    decode = _DECODERS[kafka.payload]
    fit, unfit = split_usable_schemas(kafka, known or {})
    frame, values, why, faults = decode(messages, source, fit)
    values = {**values, **taken}
    # Each step wraps the one before, so the last is judged first: not UTF-8, a tombstone, a schema
    # that cannot be used, what the decoder says, and at last single values.
    for number, reason in unfit.items():
        words = quote_text(
            f"the message was written with schema {number}, which cannot be used: {reason}"
        )
        why = f"CASE WHEN _id = {number} THEN {words} ELSE {why} END"
    if kafka.tombstones == "dead_letter":
        why = f"CASE WHEN value IS NULL THEN 'a tombstone: the message has no value' ELSE {why} END"
    if kafka.payload == "json":
        why = (
            "CASE WHEN NOT is_valid_utf8(CAST(value AS string)) THEN 'the message is not UTF-8'"
            f" ELSE {why} END"
        )
    for condition, complaint in [*faults, *beside]:
        why = f"coalesce({why}, CASE WHEN {condition} THEN {complaint} END)"
    frame = frame.selectExpr("*", f"{why} AS _w")
    columns = [
        f"CASE WHEN _w IS NULL THEN {values[name]} END AS {quote_name(name)}"
        for name in source.columns
    ]
    raw = "CAST(value AS string)" if kafka.payload == "json" else "concat('0x', hex(value))"
    shown = f"coalesce({raw}, concat('key ', CAST(key AS string)))"
    strangers = (
        [f"CASE WHEN NOT coalesce(_known, true) THEN _id END AS {UNKNOWN_SCHEMA}"]
        if kafka.registry is not None
        else []
    )
    return frame.selectExpr(
        *columns,
        f"_w AS {BAD_REASON}",
        f"CASE WHEN _w IS NOT NULL THEN make_valid_utf8({shown}) END AS {BAD_TEXT}",
        f"pmod(offset, {ROWS_PER_ORDINAL}L) AS {OFFSET_COLUMN}",
        f"partition AS {PARTITION}",
        *strangers,
        *places,
    )


def split_usable_schemas(
    kafka: KafkaOptions, known: Mapping[int, bytes | UnusableSchema]
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return the schemas that messages can be read with, and why others cannot be used."""
    fit, unfit = dict[int, bytes](), dict[int, str]()
    for number, schema in known.items():
        try:
            if isinstance(schema, UnusableSchema):
                unfit[number] = schema.why
            else:
                _require_usable_schema(kafka.payload, kafka.message, schema)
                fit[number] = schema
        except ConfigurationError as error:
            unfit[number] = error.message
    return fit, unfit


def require_schemas(source: str, kafka: KafkaOptions, schemas: Mapping[int, str]) -> None:
    """Refuse schemas of messages that cannot be used, if the source waits for them.

    Args:
        source: its name.
        kafka: its options.
        schemas: number -> place of a message with it; those that can be used are passed over.

    Raises:
        TransientError: a schema is not registered yet.
        ConfigurationError: a registered schema cannot be used.
    """
    registry = open_schema_registry(kafka)
    if registry is None or kafka.on_unknown_schema != "wait":
        return
    fit, _ = split_usable_schemas(kafka, registry.known)
    for number, place in schemas.items():
        if number not in fit:
            # A number that the registry knows will never name another schema: waiting does not
            # help.
            is_known = number in registry.known
            error = REGISTERED_SCHEMA_UNUSABLE if is_known else SCHEMA_NOT_REGISTERED
            place = f"{kafka.topic} {place}"
            raise error(source=source, number=number, registry=kafka.registry, place=place)


@cache
def _require_usable_schema(payload: str, message: str | None, schema: bytes) -> None:
    """Refuse a schema that no message can be read with.

    Raises:
        ConfigurationError: it is one.
    """
    if payload == "avro":
        _require_record_schema(schema)
    else:
        assert message is not None  # noqa: S101 - the spec says so
        require_message(schema, message)


def _select_envelope_columns(source: SourceSpec) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Columns that come from beside the payload, and the faults of their values."""
    kafka = get_kafka_options(source)
    found = {kafka.key: "key"} if kafka.key else {}
    for column, header in kafka.headers.items():
        found[column] = (
            f"try_element_at(filter(headers, h -> h.key = {quote_text(header)}), -1).value"
        )
    values: dict[str, str] = {}
    faults: list[tuple[str, str]] = []
    if kafka.timestamp:
        values[kafka.timestamp] = "timestamp"
        words = "the timestamp of the message is more than a column holds"
        faults.append(("timestamp IS NULL", quote_text(words)))
    for name, raw in found.items():
        kind, words = source.columns[name], f"CAST({raw} AS string)"
        values[name] = raw if kind == "binary" else _cast_text_sql(words, kind, source)
        if kind != "binary":
            faults.append(
                (f"NOT is_valid_utf8({words})", f"concat('{name} is not UTF-8: 0x', hex({raw}))")
            )
        if kind not in ("binary", "string"):
            is_bad = f"{raw} IS NOT NULL AND {values[name]} IS NULL"
            faults.append((is_bad, f"concat('{name} is no {kind}: ', {words})"))
    return values, faults


# Text: JSON, and Protobuf's values as text


# A registry's serializer puts the byte 0 and the schema's id, four bytes, before the JSON.
_NO_JSON_OBJECT: Final = (
    "CASE WHEN hex(substring(value, 1, 1)) = '00' AND hex(substring(value, 6, 1)) = '7B'"
    " THEN concat('the message is not a JSON object: it begins with the 5 bytes of a serializer"
    " that uses a schema registry, schema ', conv(hex(substring(value, 2, 4)), 16, 10),"
    " '; payload: json reads JSON without them')"
    " ELSE 'the message is not a JSON object' END"
)


def _decode_json(
    messages: DataFrame, source: SourceSpec, known: Mapping[int, bytes]
) -> _DecodedPayload:
    """A JSON object per message, read straight into values.

    Where one is not of its column's kind, the message is read once more, with its fields as texts,
    so that one bad value is not taken for a bad message. Where the text does not show that all its
    keys are in the schema, they are listed.
    """
    old = list_former_names(source)
    kinds = list_field_kinds(source)
    read = {name: own for name, kind in kinds.items() if (own := _NATIVE_JSON_TYPES.get(kind))}
    frame = messages.selectExpr("*", "CAST(value AS string) AS _s")
    types = {name: _NATIVE_JSON_TYPES.get(kind, "string") for name, kind in kinds.items()}
    frame = frame.selectExpr("*", f"{_from_json_sql(types)} AS _f")
    # 1e999 is an infinity as a number and nothing as a text.
    finite = [
        f"coalesce(abs(_f.{quote_name(n)}) < double('Infinity'), true)"
        for n, own in read.items()
        if own == "double"
    ]
    fits = " AND ".join([f"_f.{_CORRUPT_COLUMN} IS NULL", *finite])
    frame = frame.selectExpr("*", f"coalesce({fits}, false) AS _fits")
    plain = f"coalesce(_fits AND {_no_other_key_sql(kinds, source)}, false)"
    frame = frame.selectExpr("*", f"{plain} AS _plain").selectExpr(
        "*",
        "CASE WHEN NOT _plain THEN json_object_keys(_s) END AS _k",
        f"CASE WHEN NOT _fits THEN {_from_json_sql(dict.fromkeys(read, 'string'))} END AS _j",
    )
    no_object = f"NOT _plain AND (_k IS NULL OR _j.{_CORRUPT_COLUMN} IS NOT NULL)"
    why = f"CASE WHEN value IS NOT NULL AND {no_object} THEN {_NO_JSON_OBJECT} END"
    if source.evolution.added == "dead_letter":
        strange = f"array_except(_k, array({', '.join(map(quote_text, kinds))}))"
        why = (
            f"coalesce({why}, CASE WHEN size({strange}) > 0 THEN concat('not in the schema: ',"
            f" array_join({strange}, ', ')) END)"
        )
    found = _cast_texts(
        frame,
        source,
        why,
        lambda name: f"{'_j' if name in read else '_f'}.{quote_name(name)}",
    )
    for name in found.values.keys() & read.keys():
        own = ", ".join(f"_f.{quote_name(n)}" for n in (name, old.get(name)) if n is not None)
        found.values[name] = f"CASE WHEN _fits THEN coalesce({own}) ELSE {found.values[name]} END"
    return found


def _from_json_sql(fields: Mapping[str, str]) -> str:
    """The fields of an object.

    `_CORRUPT_COLUMN` has a value where it is none, or where a field is not of its type.
    """
    every = {**fields, _CORRUPT_COLUMN: "string"}
    ddl = ", ".join(f"{quote_name(name)} {own}" for name, own in every.items())
    return f"from_json(_s, {quote_text(ddl)}, {_STRICT_JSON_OPTIONS})"


def _no_other_key_sql(names: Iterable[str], source: SourceSpec) -> str:
    """A condition that only an object fulfils.

    And of which all keys are wanted, unless others may be there.

    Every key ends with a quote and a colon, if no blank is between them. As many of these as there
    are fields with a value: then there is no other key. A null, an object inside or a text like
    that spoils the count, and the keys have to be listed.
    """
    if source.evolution.added == "ignore":
        return "startswith(_s, '{')"
    present = " + ".join(f"CAST(_f.{quote_name(name)} IS NOT NULL AS int)" for name in names) or "0"
    blanks = " AND ".join(f"NOT contains(_s, '{blank}:')" for blank in (" ", r"\t", r"\n", r"\r"))
    colons = """octet_length(_s) - octet_length(replace(_s, '":', '"'))"""
    return f"startswith(_s, '{{') AND {blanks} AND {colons} = {present}"


def _cast_texts(
    frame: DataFrame,
    source: SourceSpec,
    why: str,
    text_of: Callable[[str], str],
) -> _DecodedPayload:
    """Values cast from texts; one that does not fit is a fault of its row."""
    old = list_former_names(source)
    values, faults, casts = {}, [], []
    for number, (name, kind) in enumerate(list_payload_columns(source).items()):
        raw = f"coalesce({text_of(name)}, {text_of(old[name])})" if name in old else text_of(name)
        if kind == "string":
            values[name] = raw
            continue
        # A column of its own, because it is asked for twice and should be cast once.
        values[name] = f"_v{number}"
        casts.append(f"{_cast_text_sql(raw, kind, source)} AS _v{number}")
        faults.append(
            (f"{raw} IS NOT NULL AND _v{number} IS NULL", f"concat('{name} is no {kind}: ', {raw})")
        )
    return _DecodedPayload(frame.selectExpr("*", *casts), values, why, faults)


def _cast_text_sql(raw: str, kind: str, source: SourceSpec) -> str:
    target = declared_to_spark_type(kind)
    if kind == "string":
        return raw
    if kind == "binary":
        return f"try_to_binary({raw}, 'base64')"
    cast = f"try_cast({raw} AS {target})"
    if kind in ("int", "long"):
        # What reads back as it was written needs no pattern, which takes longer than the cast.
        return (
            f"CASE WHEN CAST({cast} AS string) = {raw} OR {raw} RLIKE '{_WHOLE_NUMBER_PATTERN}'"
            f" THEN {cast} END"
        )
    if kind.startswith("decimal"):
        # With all further digits that fit into a decimal: `try_cast` rounds without a word.
        precision, scale = map(int, re.findall(r"\d+", kind))
        whole = f"try_cast({raw} AS decimal(38,{38 - precision + scale}))"
        return f"CASE WHEN {cast} = {whole} THEN {cast} END"
    if kind != "timestamp":
        return cast
    if source.parse.timestamps != "iso":
        per_unit = TICKS_PER_UNIT[source.parse.timestamps]
        ticks = f"round(try_cast({raw} AS decimal(30,6)) * {per_unit})"
        return f"timestamp_micros(try_cast({ticks} AS bigint))"
    naive = "NULL"
    if source.timezone is not None:
        local = f"try_cast({raw} AS timestamp)"
        instant = f"to_utc_timestamp({local}, '{source.timezone}')"
        # A local time that the zone skips does not come back.
        is_there = f"from_utc_timestamp({instant}, '{source.timezone}') = {local}"
        naive = f"CASE WHEN {is_there} THEN {instant} END"
    return (
        f"CASE WHEN endswith({raw}, 'Z') OR {raw} RLIKE '{_ZONE_PATTERN}' THEN {cast} ELSE"
        f" {naive} END"
    )


# Avro and Protobuf: the schema is a file of the spec's, or what the message's first bytes name


def _decode_avro(
    messages: DataFrame, source: SourceSpec, known: Mapping[int, bytes]
) -> _DecodedPayload:
    from pyspark.sql.avro.functions import from_avro

    schemas = _load_schemas(get_kafka_options(source), known)
    frame, why = _split_wire_header(messages, get_kafka_options(source), known)
    held: dict[int, dict[str, DataType]] = {}
    for number, schema in schemas.items():
        _require_usable_schema("avro", None, schema)
        frame = frame.withColumn(
            f"_j{number}", from_avro(_select_body(number), schema.decode(), {"mode": "PERMISSIVE"})
        )
        record: Any = frame.schema[f"_j{number}"].dataType
        held[number] = {field.name: field.dataType for field in record}
    old = list_former_names(source)
    values, faults = {}, []
    for name, kind in list_payload_columns(source).items():
        # Each schema may have the field under its new name or its old one.
        fields = {n: name if name in types else old.get(name, name) for n, types in held.items()}
        places = [(f"_j{n}.{quote_name(f)}", held[n][f]) for n, f in fields.items() if f in held[n]]
        found = [_convert_field_sql(place, own, kind, source) for place, own in places]
        null = f"CAST(NULL AS {declared_to_spark_type(kind)})"
        values[name] = f"coalesce({', '.join([*(value for value, _ in found), null])})"
        for (place, own), (_, unfit) in zip(places, found, strict=True):
            shown = f"make_valid_utf8(CAST({place} AS string))"
            faults.append(
                (unfit, f"concat('{name} is {own.simpleString()}, declared {kind}: ', {shown})")
            )
    # In permissive mode a record that cannot be read comes as nulls.
    for number, types in held.items():
        lost = " AND ".join(
            [
                f"_id = {number} AND _b IS NOT NULL",
                *(f"_j{number}.{quote_name(field)} IS NULL" for field in types),
            ]
        )
        why = (
            f"coalesce({why}, CASE WHEN {lost} THEN 'the message is not a record of the schema'"
            " END)"
        )
    return _DecodedPayload(
        frame,
        values,
        why,
        [(condition, complaint) for condition, complaint in faults if condition is not None],
    )


def _require_record_schema(schema: bytes) -> None:
    """Refuse what is not the schema of a record, or none that Spark can read.

    Raises:
        ConfigurationError: it is one of these.
    """
    from pyspark.sql.avro.functions import from_avro

    try:
        _ = [field["name"] for field in json.loads(schema)["fields"]]
    except (ValueError, KeyError, TypeError) as error:
        raise AVRO_NOT_A_RECORD(schema=schema[:200], error=error) from error
    try:
        _ = (
            SparkSession.active()
            .range(1)
            .select(from_avro(F.lit("").cast("binary"), schema.decode()))
            .schema
        )
    except SPARK_ERRORS as error:
        raise AVRO_REFUSED(cause=extract_cause(error)[:300]) from error


def _convert_field_sql(
    field: str, own: DataType, kind: str, source: SourceSpec
) -> tuple[str, str | None]:
    """A value as the declared type, and the condition under which it does not fit."""
    words = isinstance(own, StringType)
    if kind == "timestamp" and (
        words or (isinstance(own, NumericType) and source.parse.timestamps != "iso")
    ):
        # A text or a plain number, which the schema does not call a time: as in a JSON payload.
        value = _cast_text_sql(field, kind, source)
        return value, f"{field} IS NOT NULL AND {value} IS NULL"
    if kind == "string" and isinstance(own, ArrayType | MapType | StructType):
        # As a JSON payload would have it.
        return f"to_json({field})", None
    if kind == "string" and words:
        return field, f"NOT is_valid_utf8({field})"
    return cast_with_check_sql(
        field, kind, spark_to_arrow_type(own.simpleString()), source.timezone
    )


def _decode_protobuf(
    messages: DataFrame, source: SourceSpec, known: Mapping[int, bytes]
) -> _DecodedPayload:
    kafka = get_kafka_options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    schemas = _load_schemas(kafka, known)
    names = tuple(dict.fromkeys(list_field_kinds(source)))
    frame, why = _split_wire_header(messages, kafka, known)
    for number, schema in schemas.items():
        index = find_message_index(schema, kafka.message) if _has_schema_prefix(kafka) else None
        read_payload = make_payload_reader(schema, kafka.message, names, index)
        frame = frame.withColumn(f"_j{number}", read_payload(_select_body(number)))
    bad = [f"_j{number}._bad" for number in schemas]
    why = f"coalesce({', '.join([why, *bad])})"

    def coalesced_text_sql(name: str) -> str:
        """Return the field's text, which only the schema of the message has."""
        texts = [f"_j{number}.{quote_name(name)}" for number in schemas]
        return f"coalesce({', '.join([*texts, 'CAST(NULL AS string)'])})"

    return _cast_texts(frame, source, why, coalesced_text_sql)


def _has_schema_prefix(kafka: KafkaOptions) -> bool:
    """Whether messages begin with the number of their schema."""
    return kafka.schema_id is not None or kafka.registry is not None


def _load_schemas(kafka: KafkaOptions, known: Mapping[int, bytes]) -> dict[int, bytes]:
    """Number -> schema; one for all messages has the number 0 when they bear none."""
    if kafka.registry is not None:
        return dict(known)
    return {kafka.schema_id or 0: read_schema_file(kafka)}


def _split_wire_header(
    messages: DataFrame, kafka: KafkaOptions, known: Mapping[int, bytes]
) -> tuple[DataFrame, str]:
    """The messages with `_id`, `_known` and `_b`, the payload behind the schema's number.

    And what is wrong with them so far.
    """
    if not _has_schema_prefix(kafka):
        frame = messages.selectExpr("*", "0 AS _id", "true AS _known", "value AS _b")
        return frame, "CAST(NULL AS string)"
    ids = list(known) if kafka.schema_id is None else [kafka.schema_id]
    numbers = ", ".join(map(str, ids)) or "NULL"
    marked = f"length(value) > {_WIRE_HEADER_BYTES} AND hex(substring(value, 1, 1)) = '00'"
    number = "CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS bigint)"
    frame = messages.selectExpr("*", f"CASE WHEN {marked} THEN {number} END AS _id")
    known_sql = f"CASE WHEN _id IS NOT NULL THEN coalesce(_id IN ({numbers}), false) END"
    frame = frame.selectExpr("*", f"{known_sql} AS _known")
    # A single schema of the spec may still have a number, which its messages carry.
    where = "the registry" if kafka.registry is not None else "the spec"
    why = f"""CASE WHEN value IS NULL THEN NULL
        WHEN _id IS NULL THEN 'the message does not begin with the number of a schema'
        WHEN NOT _known
        THEN concat('the message was written with schema ', _id, ', which {where} does not know')
        END"""
    body = f"CASE WHEN _known THEN substring(value, {_WIRE_HEADER_BYTES + 1}) END"
    return frame.selectExpr("*", f"{body} AS _b"), why


def _select_body(number: int) -> Column:
    return F.expr(f"CASE WHEN _id = {number} THEN _b END")


_DECODERS = {
    "json": _decode_json,
    "avro": _decode_avro,
    "protobuf": _decode_protobuf,
}
