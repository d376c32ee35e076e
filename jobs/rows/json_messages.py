"""Parses plain JSON messages of a topic into rows, many at a time, by Arrow.

Messages that Arrow might read in another way than `odd_messages` are handed back.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tidegate.jobs.engine.arrow_tables import to_arrow_type, to_arrow_types
from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.sources.kafka_source import build_range_schema
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.row_rules import build_text_pattern
from tidegate.jobs.spec.source_options import KafkaOptions

SMALLEST_BATCH: Final = 64
"""So many messages are handed back for one odd message among them; a larger batch is halved."""
_LOWER_HALF = (1 << 32) - 1
PARTITION: Final = "_partition"
"""Column of a staged range: the partition of the topic."""
_PLAIN_KINDS = frozenset({"int", "long", "double", "boolean", "string", "timestamp", "date"})
_MOST = 1_000
"""Longer numbers and deeper values are refused. A text of this length has neither."""
_MOST_BYTES = 50_000
"""Names of more characters are refused. Longer messages gain little from Arrow."""
_ODD_NUMBER = r"[0-9]{300}|[:,\[]\s*-?(NaN|Inf)"
_MOST_DIGITS = 15
"""A double gives so many decimal digits back, and holds ten to the power of up to 22 exactly."""
_MOST_SCALE = 22
_MOST_TEXT = 38
"""Longer texts of numbers are handed back."""
_PARSED_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int32": (int,),
    "int64": (int,),
    "double": (int, float),
    "bool": (bool,),
    "string": (str,),
}
"""Type that Arrow reads a field as -> types of Python's parser."""
_WIDEST = 76
_DATE = "[1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])"


@dataclass(frozen=True)
class PlainMessages:
    """What becomes of the plain messages of a topic.

    Attributes:
        fields: of an object, with the types of their columns.
        columns: of the file: those of the source, then four: the reason why a message is bad, its
            text, its offset within 32 bits, its partition.
        former: column -> the name that its field had before.
        texts: column -> the header that it takes, or None for the key; and its declared type.
        timestamp: the column that takes the timestamp of the message.
        ignore_others: whether an object may have more fields.
        tick: microseconds in the unit of times that are numbers; None: they are ISO texts.
        is_plain: whether plain messages can be read many at a time; otherwise all are odd.
    """

    fields: pa.Schema
    columns: pa.Schema
    former: Mapping[str, str]
    texts: Mapping[str, tuple[str | None, str]]
    timestamp: str | None
    ignore_others: bool
    tick: int | None
    is_plain: bool


def plan_messages(source: SourceSpec) -> PlainMessages:
    """Return how tasks read a topic."""
    kafka = get_kafka_options(source)
    texts: dict[str, tuple[str | None, str]] = {
        name: (header, source.columns[name]) for name, header in kafka.headers.items()
    }
    if kafka.key is not None:
        texts[kafka.key] = (None, source.columns[kafka.key])
    payload = list_payload_columns(source)
    known = kafka.payload == "avro" or all(map(is_plain_kind, payload.values()))
    return PlainMessages(
        pa.schema(to_arrow_types(list_field_kinds(source))),
        build_range_schema(source).append(pa.field(PARTITION, pa.int32())),
        list_former_names(source),
        texts,
        kafka.timestamp,
        source.evolution.added == "ignore",
        TICKS_PER_UNIT.get(source.parse.timestamps),
        bool(payload) and known,
    )


def is_plain_kind(declared: str) -> bool:
    """Whether texts have a plain form of a declared type, which is cast many at a time."""
    return declared in _PLAIN_KINDS or declared.startswith("decimal")


def list_payload_columns(source: SourceSpec) -> dict[str, str]:
    """Column -> declared kind, of those that do not come from beside the payload."""
    kafka = get_kafka_options(source)
    beside = (kafka.key, kafka.timestamp, *kafka.headers)
    return {name: kind for name, kind in source.columns.items() if name not in beside}


def list_former_names(source: SourceSpec) -> dict[str, str]:
    """Column -> the name that its field had before."""
    return {new: before for before, new in source.evolution.renamed.items()}


def get_kafka_options(source: SourceSpec) -> KafkaOptions:
    """The options of a source that is a topic."""
    assert source.kafka is not None  # noqa: S101
    return source.kafka


def list_field_kinds(source: SourceSpec) -> dict[str, str]:
    """Field of a message -> declared kind; a renamed column has two fields."""
    payload = list_payload_columns(source)
    renamed = source.evolution.renamed.items()
    return {**payload, **{before: payload.get(new, "string") for before, new in renamed}}


def join_messages(
    batch: pa.RecordBatch, found: pa.Array, plan: PlainMessages
) -> tuple[pa.Table, pa.Table]:
    """Return the rows of plain messages, and the other messages.

    Args:
        batch: messages.
        found: the fields of each; null if its payload is odd.
        plan: of the topic.
    """
    beside, odd = _read_texts(batch, plan)
    plain = pc.and_(found.is_valid(), pa.array(~odd))
    if plan.timestamp is not None:
        plain = pc.and_(plain, batch["timestamp"].is_valid())
        beside[plan.timestamp] = batch["timestamp"]
    fields = dict(zip(plan.fields.names, found.filter(plain).flatten(), strict=True))
    messages = batch.filter(plain)
    own: list[Any] = [
        beside[column.name].filter(plain).cast(column.type)
        if column.name in beside
        else pc.coalesce(fields[column.name], fields[plan.former[column.name]])
        if column.name in plan.former
        else fields[column.name]
        for column in list(plan.columns)[:-4]
    ]
    good = pa.nulls(messages.num_rows, pa.string())
    offsets = pc.bit_wise_and(messages["offset"], _LOWER_HALF)
    rows = pa.table([*own, good, good, offsets, messages["partition"]], plan.columns)
    return rows, pa.Table.from_batches([batch.filter(pc.invert(plain))])


def _read_texts(batch: pa.RecordBatch, plan: PlainMessages) -> tuple[dict[str, pa.Array], Any]:
    """The columns of keys and headers, and the messages in which one is odd."""
    found: dict[str, pa.Array] = {}
    odd = np.zeros(batch.num_rows, dtype=bool)
    for name, (header, declared) in plan.texts.items():
        raw = batch["key"] if header is None else _select_last_values(batch["headers"], header)
        if declared == "binary":
            found[name] = raw
            continue
        found[name] = convert_texts(raw, declared, plan.tick)
        odd |= find_odd_values(raw, found[name])
    return found, odd


def _select_last_values(headers: Any, name: str) -> pa.Array:
    """The value of the last header of this name in each message; null without one."""
    pairs, places = pc.list_flatten(headers), pc.list_parent_indices(headers).to_numpy()
    is_own = pc.equal(pairs.field("key"), name).to_numpy(zero_copy_only=False)
    last = np.full(len(headers), -1)
    last[places[is_own]] = np.flatnonzero(is_own)  # of several, the last one is kept
    return pairs.field("value").take(pa.array(last, mask=last < 0))


def convert_texts(raw: Any, declared: str, tick: int | None) -> pa.Array:
    """Texts, or their bytes, as values of a declared type; null where one is odd."""
    convert = partial(_convert_plain_texts, declared=declared, tick=tick)
    return _convert_in_halves(raw, to_arrow_type(declared), convert)


def _convert_in_halves(
    values: pa.Array, kind: pa.DataType, convert: Callable[[pa.Array], pa.Array]
) -> pa.Array:
    """Values as `convert` makes them; null near one of which it refuses all."""
    try:
        return convert(values)
    except pa.ArrowException:  # one of them spoils the others
        if len(values) <= SMALLEST_BATCH:
            return pa.nulls(len(values), kind)
    middle = len(values) // 2
    halves = values[:middle], values[middle:]
    return pa.concat_arrays([_convert_in_halves(half, kind, convert) for half in halves])


def find_odd_values(written: Any, found: Any) -> Any:
    """Which values are null only because what was written is odd."""
    return pc.and_(written.is_valid(), found.is_null()).to_numpy(zero_copy_only=False)


def _convert_plain_texts(raw: Any, declared: str, tick: int | None) -> pa.Array:
    kind = to_arrow_type(declared)
    words = raw.cast(pa.string())  # refuses bytes that are not UTF-8
    if pa.types.is_string(kind):
        return words
    if pa.types.is_temporal(kind) and (tick is None or pa.types.is_date(kind)):
        return convert_column(words, kind, None)
    if pa.types.is_timestamp(kind):
        declared = "long"
    plain = pc.match_substring_regex(words, f"^(?:{build_text_pattern(declared)})$")
    plain = pc.and_(plain, pc.less(pc.utf8_length(words), _MOST_TEXT))
    values = pc.if_else(plain, words, None)
    if pa.types.is_timestamp(kind):
        return convert_column(values.cast(pa.int64()), kind, tick)
    if pa.types.is_decimal(kind):
        # Arrow does not notice that 128 bits are too few for the digits behind the point as well.
        values = values.cast(pa.decimal256(_WIDEST, kind.scale))
    return values.cast(kind)


def parse_objects(values: pa.Array, plan: PlainMessages) -> pa.Array:
    """Return messages as structs of the fields; null where a message is odd."""
    objects = _select_objects(values, ignore_others=plan.ignore_others)
    parse = partial(_parse_fit_texts, plan=plan)
    try:
        return parse(objects)
    except pa.ArrowException:
        # One odd message spoils all others, and each further attempt costs more than this check.
        accepts = _make_check(plan)
        kept = [None if one is None or not accepts(one) else one for one in objects.to_pylist()]
        fit = pa.array(kept, values.type)
        return _convert_in_halves(fit, pa.struct(plan.fields), parse)


def _parse_fit_texts(values: pa.Array, plan: PlainMessages) -> pa.Array:
    fit = values.is_valid().to_numpy(zero_copy_only=False)
    rows = _parse_texts(values.drop_null(), plan)
    return rows.take(pa.array(np.cumsum(fit) - 1, mask=~fit))


def _make_check(plan: PlainMessages) -> Callable[[bytes], bool]:
    """A test whether a message is an object with fields of such types as Arrow takes."""
    kinds = {f.name: str(_choose_parsed_type(f.type, plan.tick)) for f in plan.fields}
    types = {name: _PARSED_TYPES[kind] for name, kind in kinds.items()}

    def accepts(value: bytes) -> bool:
        """Whether Arrow may take the message."""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return False
        return isinstance(found, dict) and all(
            one is None
            or type(one) in types.get(name, ())
            or (plan.ignore_others and name not in types)
            for name, one in found.items()
        )

    return accepts


def _select_objects(values: pa.Array, *, ignore_others: bool) -> pa.Array:
    """Messages that are objects if they can be parsed, and of which Arrow accepts no more.

    Others are null.
    """
    fit = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))
    sizes = pc.binary_length(values)
    if ignore_others or pc.any(pc.greater(sizes, _MOST)).as_py():
        depth = pc.add(pc.count_substring(values, "{"), pc.count_substring(values, "["))
        odd = pc.or_(pc.match_substring_regex(values, _ODD_NUMBER), pc.greater(depth, _MOST))
        fit = pc.and_not(fit, pc.or_(odd, pc.greater(sizes, _MOST_BYTES)))
    return pc.if_else(fit, values, None)


def _parse_texts(texts: pa.Array, plan: PlainMessages) -> pa.Array:
    """Objects, one for each text; null where a value is odd.

    Raises:
        pa.ArrowException: one of the texts is odd.
    """
    schema = plan.fields
    if not len(texts):
        return pa.nulls(0, pa.struct(schema))
    # The cast refuses what is not UTF-8. A zero byte would end the input.
    words = texts.cast(pa.string())
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(words)], words), "\n")[0].as_buffer()
    parsed = [field.with_type(_choose_parsed_type(field.type, plan.tick)) for field in schema]
    found = pj.read_json(
        pa.BufferReader(lines),
        pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
        pj.ParseOptions(
            explicit_schema=pa.schema(parsed),
            unexpected_field_behavior="ignore" if plan.ignore_others else "error",
        ),
    )
    # Each text begins and ends with a brace, so as many objects as texts are one in each: between
    # a closing and an opening brace there is a comma in anything but a row of objects.
    if found.num_rows != len(words) or b"\0" in memoryview(lines).tobytes():
        raise pa.ArrowInvalid("a message has more than one object")
    found.validate(full=True)  # an escape of half a character is no UTF-8
    columns, odd = [], np.zeros(len(words), dtype=bool)
    for field in schema:
        values = found[field.name].combine_chunks()
        column = convert_column(values, field.type, plan.tick)
        columns.append(column)
        odd |= find_odd_values(values, column)
    return pa.StructArray.from_arrays(columns, fields=list(schema), mask=pa.array(odd))


def _choose_parsed_type(kind: pa.DataType, tick: int | None) -> pa.DataType:
    """What Arrow reads a field as, before it is converted."""
    # A fraction is a double on its way to a decimal, and Arrow's own decimals may overflow without
    # a word.
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind):
        return pa.string() if tick is None else pa.int64()
    return pa.string() if pa.types.is_date(kind) else kind


def convert_column(column: Any, kind: pa.DataType, tick: int | None) -> Any:
    """The values as they were parsed, as values of a type; null where one is odd.

    Raises:
        pa.ArrowException: one of the values cannot be converted.
    """
    if pa.types.is_floating(column.type):
        values = column.fill_null(0.0).to_numpy()
        if pa.types.is_decimal(kind):
            ticks, fit = _find_decimals(values, kind)
            whole = pa.array(ticks, mask=~fit | column.is_null().to_numpy(zero_copy_only=False))
            wide = whole.cast(pa.decimal128(19, 0)).view(pa.decimal128(19, kind.scale))
            return wide.cast(kind)
        # A zero may be a whole number, which has no sign; no number is an infinity.
        fit = np.isfinite(values) & ((values != 0) | ~np.signbit(values))
        return pc.if_else(pa.array(fit), column, None)
    if pa.types.is_timestamp(kind) and tick is not None:
        return pc.multiply_checked(column, tick).cast(kind)
    if pa.types.is_temporal(kind):
        form = f"^{_DATE}$" if pa.types.is_date(kind) else f"^{_DATE}[T ]{_TIME}{_ZONE}$"
        return pc.if_else(pc.match_substring_regex(column, form), column, None).cast(kind)
    return column


def _find_decimals(values: Any, kind: Any) -> tuple[Any, Any]:
    """Doubles as decimals without a point, and which of them are sure to be right.

    A decimal is made of the text of the double, which has up to 17 digits. Up to 15 of them are
    those of the number as it was written.
    """
    power = 10.0**kind.scale
    with np.errstate(over="ignore"):
        ticks = np.rint(values * power)
    fit = (np.abs(ticks) < 10.0 ** min(_MOST_DIGITS, kind.precision)) & (ticks / power == values)
    fit &= (values == 0) | (kind.scale <= _MOST_SCALE)
    return np.where(fit, ticks, 0).astype(np.int64), fit
