"""Messages of a topic as rows of the declared columns, each with its place in the partition, or why it could not be decoded.

JSON and Avro are decoded by Spark's own functions. Protobuf is decoded by the Protobuf library in Spark's Python workers, and its
values are cast like JSON's: Spark's own package for it is not to be had everywhere (see docs/decisions/0073).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from tidegate.jobs.sources.decode import TEXT, WHY
from tidegate.jobs.sources.kafka import PLACE
from tidegate.jobs.spark.cast import text
from tidegate.jobs.spark.protobuf import message_index, reader_of
from tidegate.jobs.spark.schema import quote, spark_of_declared
from tidegate.jobs.spec.errors import ConfigurationError
from tidegate.jobs.spec.inputs import KafkaOptions
from tidegate.jobs.spec.pipeline import SourceSpec

__all__ = ["PARTITION", "STRANGER", "decoded"]

PARTITION: Final = "_partition"
"""Column of a staged range: the partition of the topic."""
STRANGER: Final = "_schema"
"""Column of a topic with a registry: the number of the schema, where it is not known (yet)."""

_WHOLE: Final = r"\\A\\s*[+-]?[0-9]+\\s*\\z"
_ZONED: Final = r"(Z|z|[+-][0-9]{2}(:?[0-9]{2})?)\\z"
_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_STRICT: Final = "'allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false'"  # JSON as it is written down, and no more
_BAD: Final = "_tidegate_bad"  # set where a message, or one of its fields, is not what it was read as
_READ: Final = {"int": "int", "long": "bigint", "double": "double", "boolean": "boolean"}  # kinds that JSON has as well
_HEADER: Final = 5  # a zero byte and four of the schema's number, in front of what a registry's serializer writes


class _Decoded(NamedTuple):
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


def decoded(messages: DataFrame, source: SourceSpec, known: Mapping[int, bytes] | None = None) -> DataFrame:
    """The rows.

    Args:
        messages: as Spark's Kafka source gives them.
        source: its spec.
        known: schemas by number, for a topic with a registry.
    """
    kafka = _options(source)
    taken = _taken(source)
    payload = {name: kind for name, kind in source.columns.items() if name not in taken}
    decode = _PAYLOADS[kafka.payload]
    frame, values, why, faults = decode(messages, source, payload, known or {})
    values = {**values, **taken}
    body, shown = ("_s", "_s") if kafka.payload == "json" else ("value", "concat('0x', hex(value))")
    if kafka.tombstones == "dead_letter":
        why = f"CASE WHEN {body} IS NULL THEN 'a tombstone: the message has no value' ELSE {why} END"
    for condition, complaint in faults:
        why = f"coalesce({why}, CASE WHEN {condition} THEN {complaint} END)"
    frame = frame.withColumn("_w", F.expr(why))
    columns = [f"CASE WHEN _w IS NULL THEN {values[name]} END AS {quote(name)}" for name in source.columns]
    shown = f"coalesce({shown}, concat('key ', CAST(key AS string)))"
    strangers = [f"CASE WHEN NOT coalesce(_known, true) THEN _id END AS {STRANGER}"] if kafka.registry is not None else []
    return frame.selectExpr(
        *columns,
        f"_w AS {WHY}",
        f"CASE WHEN _w IS NOT NULL THEN {shown} END AS {TEXT}",
        f"pmod(offset, {1 << 32}L) AS {PLACE}",
        f"partition AS {PARTITION}",
        *strangers,
    )


def _options(source: SourceSpec) -> KafkaOptions:
    assert source.kafka is not None  # noqa: S101
    return source.kafka


def _taken(source: SourceSpec) -> dict[str, str]:
    """Columns that come from beside the payload."""
    kafka = _options(source)
    found = {kafka.key: "CAST(key AS string)"} if kafka.key else {}
    if kafka.timestamp:
        found[kafka.timestamp] = "timestamp"
    for column, header in kafka.headers.items():
        wanted = header.replace("'", "\\'")
        found[column] = f"CAST(try_element_at(filter(headers, h -> h.key = '{wanted}'), -1).value AS string)"
    return {name: f"CAST({value} AS {spark_of_declared(source.columns[name])})" for name, value in found.items()}


# Text: JSON, and Protobuf's values as text


def _json(messages: DataFrame, source: SourceSpec, payload: dict[str, str], _known: Mapping[int, bytes]) -> _Decoded:
    """A JSON object per message.

    A plain one is parsed once, straight into values. Of any other every field is taken as text, so that one bad value is told
    from a bad message: one pass over it gives keys and texts, as a map; and where the map has more entries than wanted keys (a
    key twice, of which the last one counts, or one that is not in the schema) it is parsed once more.
    """
    kinds = {**payload, **{old: payload.get(new, "string") for old, new in source.evolution.renamed.items()}}
    kinds = kinds or {"_none": "string"}  # a schema needs a field, also where all columns come from beside the payload
    frame = _plainly(messages.withColumn("_s", F.expr("CAST(value AS string)")), source, kinds)
    schema = ", ".join(f"{quote(name)} string" for name in kinds)
    keys = [text(name) for name in kinds]
    present = " + ".join(f"CAST(map_contains_key(m, {key}) AS int)" for key in keys) or "0"
    texts = ", ".join(f"{key}, try_element_at(m, {key})" for key in keys)
    more = f"size(m) > {present}"
    strange = "CAST(NULL AS array<string>)"
    if source.evolution.added == "dead_letter":
        strange = f"CASE WHEN {more} THEN array_except(map_keys(m), array({', '.join(keys)})) END"
    parsed = f"CASE WHEN {more} THEN from_json(_s, {text(schema)}) ELSE named_struct({texts}) END"
    # One expression, with the map as a variable: an expression that Spark does not compile costs every message a copy of its row.
    slowly = f"transform(array(from_json(_s, 'map<string,string>', map({_STRICT}))), m -> struct(m IS NOT NULL AS is_object, "
    slowly += f"{strange} AS strange, {parsed} AS texts))[0]"
    frame = frame.withColumn("_j", F.expr(f"CASE WHEN NOT _plain THEN {slowly} END"))
    why = """CASE WHEN _s IS NOT NULL AND NOT _j.is_object THEN 'the message is not a JSON object'
        WHEN size(_j.strange) > 0 THEN concat('not in the schema: ', array_join(_j.strange, ', ')) END"""

    def text_of(name: str) -> str:
        """None of a value that was read as one."""
        own = f"_j.texts.{quote(name)}"
        return own if kinds[name] in _READ else f"CASE WHEN _plain THEN _f.{quote(name)} ELSE {own} END"

    found = _of_texts(frame, source, payload, why, text_of)
    old = {new: before for before, new in source.evolution.renamed.items()}
    for name in (name for name, kind in payload.items() if kind in _READ):
        read = ", ".join(f"_f.{quote(n)}" for n in (name, old.get(name)) if n is not None)
        found.values[name] = f"CASE WHEN _plain THEN coalesce({read}) ELSE {found.values[name]} END"
    return found


def _plainly(frame: DataFrame, source: SourceSpec, kinds: dict[str, str]) -> DataFrame:
    """Add `_f`, the fields as values or texts, and `_plain`: whether they are what the slow way would find.

    An object of which every field is of its kind is left to show that it has no other key, and none twice. Each key ends with a
    quote and a colon. So when the text has as many of these as there are wanted names in it, every key is one of them, once.
    A name is in it if its field has a value, or if it stands there between quotes (an escape could make that another key).
    """
    fields = [f"{quote(name)} {_READ.get(kind, 'string')}" for name, kind in kinds.items()]
    options = f"map({_STRICT}, 'columnNameOfCorruptRecord', '{_BAD}')"
    conditions = ["startswith(_s, '{')", f"_f.{_BAD} IS NULL"]
    # 1e999 is an infinity as a number and nothing as a text.
    conditions += [f"coalesce(abs(_f.{quote(n)}) < double('Infinity'), true)" for n, kind in kinds.items() if kind == "double"]
    if source.evolution.added == "dead_letter":
        conditions += [f"NOT contains(_s, '{space}:')" for space in (" ", r"\t", r"\n", r"\r")]
        escaped = r"contains(_s, '\\')"
        there = (f"WHEN contains(_s, {text(json.dumps(name, ensure_ascii=False) + ':')}) AND NOT {escaped}" for name in kinds)
        found = (f"CASE WHEN _f.{quote(n)} IS NOT NULL THEN 1 {w} THEN 1 ELSE 0 END" for n, w in zip(kinds, there, strict=True))
        conditions.append(f"""octet_length(_s) - octet_length(replace(_s, '":', '"')) = {" + ".join(found) or "0"}""")
    frame = frame.withColumn("_f", F.expr(f"from_json(_s, {text(', '.join([*fields, f'{_BAD} string']))}, {options})"))
    return frame.withColumn("_plain", F.expr(f"coalesce({' AND '.join(conditions)}, false)"))


def _of_texts(frame: DataFrame, source: SourceSpec, payload: dict[str, str], why: str, text_of: Callable[[str], str]) -> _Decoded:
    """Values cast from texts; one that does not fit is a fault of its row."""
    old = {new: before for before, new in source.evolution.renamed.items()}
    values, faults, casts = {}, [], []
    for number, (name, kind) in enumerate(payload.items()):
        raw = f"coalesce({text_of(name)}, {text_of(old[name])})" if name in old else text_of(name)
        if kind == "string":
            values[name] = raw
            continue
        values[name] = f"_v{number}"  # a column of its own: it is asked for twice, and shall be cast once
        casts.append(f"{_cast(raw, kind, source)} AS _v{number}")
        faults.append((f"{raw} IS NOT NULL AND _v{number} IS NULL", f"concat('{name} is no {kind}: ', {raw})"))
    return _Decoded(frame.selectExpr("*", *casts), values, why, faults)


def _cast(raw: str, kind: str, source: SourceSpec) -> str:
    target = spark_of_declared(kind)
    if kind == "string":
        return raw
    if kind == "binary":
        return f"try_to_binary({raw}, 'base64')"
    cast = f"try_cast({raw} AS {target})"
    if kind in ("int", "long"):  # what reads back as it was written needs no pattern, which would take longer than the cast
        return f"CASE WHEN CAST({cast} AS string) = {raw} OR {raw} RLIKE '{_WHOLE}' THEN {cast} END"
    if kind != "timestamp":
        return cast
    if source.parse.timestamps != "iso":
        return f"timestamp_micros(CAST(round(try_cast({raw} AS decimal(30,6)) * {_UNITS[source.parse.timestamps]}) AS bigint))"
    naive = "NULL" if source.timezone is None else f"to_utc_timestamp(try_cast({raw} AS timestamp), '{source.timezone}')"
    return f"CASE WHEN endswith({raw}, 'Z') OR {raw} RLIKE '{_ZONED}' THEN {cast} ELSE {naive} END"


# Avro and Protobuf: the schema is a file of the spec's, or what the message's first bytes name


def _avro(messages: DataFrame, source: SourceSpec, payload: dict[str, str], known: Mapping[int, bytes]) -> _Decoded:
    from pyspark.sql.avro.functions import from_avro

    schemas = {number: schema.decode() for number, schema in _schemas(_options(source), known).items()}
    frame, why = _bodies(messages, _options(source), known, f"substring(value, {_HEADER + 1})")
    held: dict[int, dict[str, DataType]] = {}
    for number, schema in schemas.items():
        _require_record(schema)
        frame = frame.withColumn(f"_j{number}", from_avro(_body(number), schema, {"mode": "PERMISSIVE"}))
        held[number] = _types(frame.schema[f"_j{number}"].dataType)
    old = {new: before for before, new in source.evolution.renamed.items()}

    def value(name: str, kind: str) -> str:
        """Of each schema that has the field under its new name, or its old one."""
        fields = {n: name if name in types else old.get(name, name) for n, types in held.items()}
        found = [_typed(f"_j{n}.{quote(f)}", held[n][f], kind, source) for n, f in fields.items() if f in held[n]]
        return f"coalesce({', '.join(found)})" if found else f"CAST(NULL AS {spark_of_declared(kind)})"

    values = {name: value(name, kind) for name, kind in payload.items()}
    # A record that cannot be read comes as nulls: the event time, which no good record lacks, tells.
    if source.event_time in payload:
        lost = f"_b IS NOT NULL AND {values[source.event_time]} IS NULL"
        why = f"coalesce({why}, CASE WHEN {lost} THEN 'the message is not a record of the schema, or has no event time' END)"
    return _Decoded(frame, values, why, [])


def _require_record(schema: str) -> None:
    """Refuse what is no record's schema.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        _ = [field["name"] for field in json.loads(schema)["fields"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"no Avro record schema: {schema[:200]}: {error}", code="kafka.bad_schema") from error


def _types(record: DataType) -> dict[str, DataType]:
    assert isinstance(record, StructType)  # noqa: S101 - its schema was looked at
    return {field.name: field.dataType for field in record}


def _typed(field: str, own: DataType, kind: str, source: SourceSpec) -> str:
    if kind == "timestamp" and source.parse.timestamps != "iso":  # a plain number, which the schema calls no time
        return _cast(field, kind, source)
    if kind == "string" and isinstance(own, ArrayType | MapType | StructType):  # as it would stand in a JSON payload
        return f"to_json({field})"
    return f"try_cast({field} AS {spark_of_declared(kind)})"


def _protobuf(messages: DataFrame, source: SourceSpec, payload: dict[str, str], known: Mapping[int, bytes]) -> _Decoded:
    kafka = _options(source)
    assert kafka.message is not None  # noqa: S101 - the spec says so
    schemas = _schemas(kafka, known)
    names = tuple(dict.fromkeys([*payload, *source.evolution.renamed]))
    frame, why = _bodies(messages, kafka, known, f"substring(value, {_HEADER + 1})")
    for number, schema in schemas.items():
        index = message_index(schema, kafka.message) if _wired(kafka) else None
        frame = frame.withColumn(f"_j{number}", reader_of(schema, kafka.message, names, index)(_body(number)))
    bad = [f"_j{number}._bad" for number in schemas]
    why = f"coalesce({', '.join([why, *bad])})"

    def text_of(name: str) -> str:
        return f"coalesce({', '.join([*(f'_j{number}.{quote(name)}' for number in schemas), 'CAST(NULL AS string)'])})"

    return _of_texts(frame, source, payload, why, text_of)


def _wired(kafka: KafkaOptions) -> bool:
    """Whether messages begin with the number of their schema."""
    return kafka.schema_id is not None or kafka.registry is not None


def _schemas(kafka: KafkaOptions, known: Mapping[int, bytes]) -> dict[int, bytes]:
    """Number -> schema; one for all messages has the number 0 when they bear none."""
    if kafka.registry is not None:
        return dict(known)
    assert kafka.schema_file is not None  # noqa: S101 - the spec says so
    try:
        return {kafka.schema_id or 0: Path(kafka.schema_file).read_bytes()}
    except OSError as error:
        raise ConfigurationError(
            f"kafka.schema_file {kafka.schema_file} cannot be read: {error.strerror}", code="kafka.bad_schema"
        ) from error


def _bodies(messages: DataFrame, kafka: KafkaOptions, known: Mapping[int, bytes], body: str) -> tuple[DataFrame, str]:
    """The messages with `_id`, `_known` and `_b`, the payload behind the schema's number; and what is wrong with them so far."""
    if not _wired(kafka):
        frame = messages.withColumn("_id", F.lit(0)).withColumn("_known", F.lit(True)).withColumn("_b", F.expr("value"))
        return frame, "CAST(NULL AS string)"
    numbers = ", ".join(str(n) for n in ([kafka.schema_id] if kafka.schema_id is not None else known)) or "NULL"
    marked = f"length(value) > {_HEADER} AND hex(substring(value, 1, 1)) = '00'"
    frame = messages.withColumn(
        "_id", F.expr(f"CASE WHEN {marked} THEN CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS bigint) END")
    )
    frame = frame.withColumn("_known", F.expr(f"CASE WHEN _id IS NOT NULL THEN coalesce(_id IN ({numbers}), false) END"))
    where = "the registry" if kafka.registry is not None else "the spec"
    why = f"""CASE WHEN value IS NULL THEN NULL
        WHEN _id IS NULL THEN 'the message does not begin with the number of a schema'
        WHEN NOT _known THEN concat('the message was written with schema ', _id, ', which {where} does not know') END"""
    return frame.withColumn("_b", F.expr(f"CASE WHEN _known THEN {body} END")), why


def _body(number: int) -> Column:
    return F.expr(f"CASE WHEN _id = {number} THEN _b END")


_PAYLOADS: Final[dict[str, Callable[[DataFrame, SourceSpec, dict[str, str], Mapping[int, bytes]], _Decoded]]] = {
    "json": _json,
    "avro": _avro,
    "protobuf": _protobuf,
}
