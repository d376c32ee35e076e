"""JSON messages in Spark's Python workers: Arrow parses a batch of objects at once.

It decides nothing. Objects that Arrow might read in another way than Spark are null in its answer,
and Spark reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.pandas.functions import arrow_udf

_SMALLEST_BATCH: Final = 64
"""So many messages go to Spark for one odd message among them; a larger batch is halved."""
_MOST: Final = 1_000
"""Spark refuses longer numbers and deeper values. A text of this length has neither."""
_MOST_BYTES: Final = 50_000
"""Spark refuses names of more characters. Longer messages gain little from Arrow."""
_ODD_NUMBER: Final = r"[0-9]{300}|[:,\[]\s*-?(NaN|Inf)"
_MOST_DIGITS: Final = 15
"""A double gives so many decimal digits back, and holds ten to the power of up to 22 exactly."""
_MOST_SCALE: Final = 22


def make_object_reader(
    schema: pa.Schema, answer: str, *, ignore_others: bool
) -> Callable[..., Any]:
    """A function of Spark's: bytes -> a struct.

    Args:
        schema: the fields of an object, and last one that is null.
        answer: their types in Spark, to which values are cast.
        ignore_others: whether an object may have more fields.
    """

    def read_objects(values: pa.Array) -> pa.Array:
        """Parse one batch, in a Python worker of Spark's."""
        return parse_objects(values, schema, ignore_others=ignore_others)

    found: Callable[..., Any] = arrow_udf(read_objects, answer)  # type: ignore[call-overload]
    return found


def parse_objects(values: pa.Array, schema: pa.Schema, *, ignore_others: bool) -> pa.Array:
    """Messages as structs, for `make_object_reader`; null where Spark has to read the message."""
    fit = _find_objects(values, ignore_others=ignore_others)
    try:
        rows = _parse_texts(values.filter(pa.array(fit)), schema, ignore_others=ignore_others)
    except pa.ArrowException:
        if len(values) <= _SMALLEST_BATCH:
            return pa.nulls(len(values), pa.struct(schema))
        middle = len(values) // 2
        halves = (values[:middle], values[middle:])
        return pa.concat_arrays(
            [parse_objects(half, schema, ignore_others=ignore_others) for half in halves]
        )
    return rows.take(pa.array(np.cumsum(fit) - 1, mask=~fit))


def _find_objects(values: pa.Array, *, ignore_others: bool) -> Any:
    """Messages that are objects if they can be parsed, and of which Arrow accepts no more."""
    fit = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))
    sizes = pc.binary_length(values)
    if ignore_others or pc.any(pc.greater(sizes, _MOST)).as_py():
        depth = pc.add(pc.count_substring(values, "{"), pc.count_substring(values, "["))
        odd = pc.or_(pc.match_substring_regex(values, _ODD_NUMBER), pc.greater(depth, _MOST))
        fit = pc.and_not(fit, pc.or_(odd, pc.greater(sizes, _MOST_BYTES)))
    return pc.fill_null(fit, False).to_numpy(zero_copy_only=False)


def _parse_texts(texts: pa.Array, schema: pa.Schema, *, ignore_others: bool) -> pa.Array:
    """Objects, one for each text; null where a number is read in another way by Spark.

    Raises:
        pa.ArrowException: one of the texts is odd.
    """
    if not len(texts):
        return pa.nulls(0, pa.struct(schema))
    # The cast refuses what is not UTF-8. A zero byte would end the input.
    words = texts.cast(pa.string())
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(words)], words), "\n")[0].as_buffer()
    fields = list(schema)[:-1]
    # Spark takes a fraction for a double on its way to a decimal, and Arrow's own decimals may
    # overflow without a word.
    parsed = [f.with_type(pa.float64()) if pa.types.is_decimal(f.type) else f for f in fields]
    found = pj.read_json(
        pa.BufferReader(lines),
        pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
        pj.ParseOptions(
            explicit_schema=pa.schema(parsed),
            unexpected_field_behavior="ignore" if ignore_others else "error",
        ),
    )
    # Each text begins and ends with a brace, so as many objects as texts are one in each: between
    # a closing and an opening brace there is a comma in anything but a row of objects.
    if found.num_rows != len(words) or pc.any(pc.match_substring(words, "\0")).as_py():
        raise pa.ArrowInvalid("a message has more than one object")
    found.validate(full=True)  # an escape of half a character is no UTF-8
    columns, odd = [], np.zeros(len(words), dtype=bool)
    for field in fields:
        column = found[field.name].combine_chunks()
        if pa.types.is_floating(column.type):
            values = column.fill_null(0.0).to_numpy()
            # Spark reads -0 as 0.0, and takes no number for an infinity.
            strange = ~np.isfinite(values) | ((values == 0) & np.signbit(values))
            if pa.types.is_decimal(field.type):
                ticks, strange = _find_decimals(values, field.type)
                whole = pa.array(ticks, mask=column.is_null().to_numpy(zero_copy_only=False))
                column = whole.cast(pa.decimal128(19, 0)).view(pa.decimal128(19, field.type.scale))
            odd |= strange
        columns.append(column.cast(field.type))
    columns.append(pa.nulls(len(words), pa.string()))
    return pa.StructArray.from_arrays(columns, fields=list(schema), mask=pa.array(odd))


def _find_decimals(values: Any, kind: Any) -> tuple[Any, Any]:
    """Doubles as decimals without a point, and which of them Spark may take for another one.

    Spark makes a decimal of the text of the double, which has up to 17 digits. Up to 15 of them are
    those of the number as it was written.
    """
    power = 10.0**kind.scale
    with np.errstate(over="ignore"):
        ticks = np.rint(values * power)
    fit = (np.abs(ticks) < 10.0 ** min(_MOST_DIGITS, kind.precision)) & (ticks / power == values)
    fit &= (values == 0) | (kind.scale <= _MOST_SCALE)
    return np.where(fit, ticks, 0).astype(np.int64), ~fit
