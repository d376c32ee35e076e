"""Types on their way from an object's columns to the declared ones, and tidegate's own column names.

User columns never start with ``_`` (the spec refuses it), so every inner column does.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "PROVENANCE",
    "spark_to_arrow_type",
    "cast_never_fails",
    "classify_arrow_type",
    "is_naive_timestamp",
    "quote_name",
    "arrow_to_spark_type",
    "declared_to_spark_type",
    "unwrap_dictionary",
]

PROVENANCE: Final = ("_source", "_partition", "_seq", "_timeline", "_epoch")

_SPARK_OF_ARROW: Final = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",  # Spark has no unsigned types: the next wider one holds every value
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "string_view": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
}
_ARROW_OF_SPARK: Final = {
    "boolean": "bool",
    "int": "int32",
    "bigint": "int64",
    "date": "date32[day]",
    "timestamp": "timestamp[us, tz=UTC]",
    "timestamp_ntz": "timestamp[us]",
}
_SPARK_OF_DECLARED: Final = {"long": "bigint"}
_WIDENING: Final = {
    "int": {"int8", "int16", "int32", "uint8", "uint16"},
    "long": {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"},
    "float": {"float"},
    "double": {"float", "double", "int8", "int16", "int32", "uint8", "uint16", "uint32"},
}
_TIMESTAMP: Final = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=([^\]]+))?\]\Z")
_DECIMAL: Final = re.compile(r"decimal(?:32|64|128|256)\((\d+), ?(-?\d+)\)\Z")
_DICTIONARY: Final = re.compile(r"dictionary<values=(.+), indices=\w+, ordered=\d>\Z")


def quote_name(name: str) -> str:
    """A column name in Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def unwrap_dictionary(arrow: str) -> str:
    """The value type of a dictionary-encoded column; any other type as it is."""
    match = _DICTIONARY.match(arrow)
    return match[1] if match else arrow


def is_naive_timestamp(arrow: str) -> bool:
    """Whether the type is a timestamp without a time zone."""
    match = _TIMESTAMP.match(unwrap_dictionary(arrow))
    return match is not None and match[2] is None


def arrow_to_spark_type(arrow: str) -> str | None:
    """The Spark SQL type that reads this physical column; None when no declared type can come from it.

    >>> arrow_to_spark_type("timestamp[us]"), arrow_to_spark_type("uint16"), arrow_to_spark_type("list<item: int64>")
    ('timestamp_ntz', 'int', None)
    """
    arrow = unwrap_dictionary(arrow)
    if match := _TIMESTAMP.match(arrow):
        return "timestamp" if match[2] else "timestamp_ntz"
    if (match := _DECIMAL.match(arrow)) and int(match[1]) <= 38 and int(match[2]) >= 0:
        return f"decimal({match[1]},{match[2]})"
    return _SPARK_OF_ARROW.get(arrow)


def spark_to_arrow_type(own: str) -> str:
    """The physical type that Spark reads as this one: the way back of `arrow_to_spark_type`.

    >>> spark_to_arrow_type("bigint"), spark_to_arrow_type("decimal(6,2)"), spark_to_arrow_type("timestamp_ntz")
    ('int64', 'decimal128(6,2)', 'timestamp[us]')
    """
    return own.replace("decimal", "decimal128") if own.startswith("decimal") else _ARROW_OF_SPARK.get(own, own)


def classify_arrow_type(arrow: str) -> str:
    """The family of a physical type, as `tidegate.jobs.spec.casts.accepts` names it.

    >>> classify_arrow_type("uint64"), classify_arrow_type("decimal128(6, 2)"), classify_arrow_type("list<item: int64>")
    ('int', 'decimal', 'other')
    """
    own = unwrap_dictionary(arrow)
    if own.startswith(("timestamp", "decimal", "date32")):
        return re.split(r"\d|\[", own)[0]
    names = {"bool": "bool", "double": "float", "float": "float", "halffloat": "float"}
    names |= {name: "int" for name in _SPARK_OF_ARROW if "int" in name}
    names |= {name: name.rpartition("_")[2] for name in ("string", "large_string", "binary", "large_binary")}
    return names.get(own, "string" if own == "string_view" else "other")


def is_nanosecond_timestamp(arrow: str) -> bool:
    """Whether the column is a timestamp of nanoseconds, which Spark reads as plain integers."""
    match = _TIMESTAMP.match(unwrap_dictionary(arrow))
    return match is not None and match[1] == "ns"


def declared_to_spark_type(declared: str) -> str:
    """The Spark SQL type of a declared column type."""
    return _SPARK_OF_DECLARED.get(declared, declared)


def cast_never_fails(arrow: str, declared: str) -> bool:
    """Whether every value of the physical type fits the declared one: no row can be bad by its types."""
    arrow = unwrap_dictionary(arrow)
    if declared == "timestamp":
        match = _TIMESTAMP.match(arrow)
        return match is not None and match[2] is not None and match[1] != "ns"
    own = arrow_to_spark_type(arrow)
    return own is not None and (own == declared_to_spark_type(declared).replace(" ", "") or arrow in _WIDENING.get(declared, ()))
