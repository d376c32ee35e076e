"""How the files of the Iceberg tables are arranged: ``outputs.layout`` of a spec.

It decides in which files rows are, never which rows there are::

    outputs:
      layout:
        events: {partition_by: ["day(placed)", "bucket(16, shop)"], sort_by: [shop, "placed desc"]}
        per_minute: {partition_by: ["month(window_start)"]}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from pydantic import field_validator

from tidegate.json_types import read_data_file

from .event_time_options import SpecModel

ColumnTypes = Mapping[str, str]
"""Column -> its declared type."""


class PartitionTransform(StrEnum):
    """What a partition is made of: Iceberg's own names."""

    IDENTITY = "identity"
    YEAR = "year"
    MONTH = "month"
    DAY = "day"
    HOUR = "hour"
    BUCKET = "bucket"
    TRUNCATE = "truncate"


# Shown in errors: the forms are Iceberg's, written as calls.
_PARTITION_FORMS = "a column, year(c), month(c), day(c), hour(c), bucket(n, c) or truncate(n, c)"
_COLUMN_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*"
# The three written forms, each with groups of its own.
_PARTITION_PATTERN = re.compile(
    rf"({_COLUMN_PATTERN})|(year|month|day|hour)\(\s*({_COLUMN_PATTERN})\s*\)|(bucket|truncate)\(\s*(\d+)\s*,\s*({_COLUMN_PATTERN})\s*\)"
)
_SORT_PATTERN = re.compile(rf"({_COLUMN_PATTERN})(?:\s+(asc|desc))?")
_TIME_TRANSFORMS = ("year", "month", "day", "hour")

WINDOW_COLUMNS: Final = {"window_start": "timestamp", "window_end": "timestamp", "revision": "int"}
"""Columns of a window's table besides its keys.

Aggregates are left out: their types are known with the first result only.
"""
_TABLES = read_data_file(__package__, "tables.toml")
# Popped, so that only tables are left.
_NOT_FOR_LAYOUT = _TABLES.pop("not_for_layout")
_ALLOWED_TRANSFORMS = _TABLES.pop("transforms")
OWN_COLUMNS: Final[dict[str, dict[str, str]]] = _TABLES
"""Table -> tidegate's own columns; ``<stream>`` has those of the table of any stream."""
LAYOUT_COLUMNS: Final = {
    table: {
        column: kind
        for column, kind in columns.items()
        if column not in _NOT_FOR_LAYOUT.get(table, ())
    }
    for table, columns in OWN_COLUMNS.items()
}
"""The same, without the columns by which files cannot be arranged."""


@dataclass(frozen=True)
class PartitionBy:
    """One part of a partition: a column and the transform of its values.

    `width` is the number of buckets, or the width of truncation (of numbers: values are rounded
    down to a multiple of it); 0 for other transforms.
    """

    column: str
    transform: PartitionTransform = PartitionTransform.IDENTITY
    width: int = 0

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Read the written form.

        Raises:
            ValueError: it is none of the forms, or its number is 0.
        """
        match = _PARTITION_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a partition; allowed: {_PARTITION_FORMS}")
        identity, time, of_time, sized, width, of_sized = match.groups()
        if identity:
            return cls(identity)
        if time:
            return cls(of_time, PartitionTransform(time))
        if int(width) == 0:
            raise ValueError(f"{text!r}: the number must be above 0")
        return cls(of_sized, PartitionTransform(sized), int(width))

    @property
    def iceberg_transform(self) -> str:
        """The transform as Iceberg writes it."""
        return f"{self.transform.value}[{self.width}]" if self.width else self.transform.value

    def __str__(self) -> str:
        if self.transform is PartitionTransform.IDENTITY:
            return self.column
        return f"{self.transform.value}({f'{self.width}, ' if self.width else ''}{self.column})"


@dataclass(frozen=True)
class SortBy:
    """One sort key; nulls are last in both directions."""

    column: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str) -> SortBy:
        """Read the written form.

        Raises:
            ValueError: it is neither a column nor one with ``asc`` or ``desc``.
        """
        match = _SORT_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a sort key; allowed: a column, 'column asc' or 'column desc'"
            )
        return cls(match[1], match[2] == "desc")


class TableLayout(SpecModel):
    """How the files of one table are arranged."""

    partition_by: tuple[str, ...] = ()
    """Parts such as ``day(t)``, ``hour(t)``, ``bucket(16, c)``, ``truncate(4, c)`` or a column.

    Each epoch writes one file per partition that it has rows for, so choose partitions of which few
    occur at a time.
    """
    sort_by: tuple[str, ...] = ()
    """Columns that sort the rows of each file, optionally with ``desc``; nulls come last."""

    @field_validator("partition_by")
    @classmethod
    def _refuse_duplicate_partitions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        fields = [PartitionBy.parse(text) for text in value]
        times = [field.column for field in fields if field.transform in _TIME_TRANSFORMS]
        # Iceberg refuses two time transforms of one column as redundant.
        if len(set(fields)) < len(fields) or len(set(times)) < len(times):
            raise ValueError("the same column twice, or two times of it: the finer one is enough")
        return value

    @field_validator("sort_by")
    @classmethod
    def _refuse_duplicate_sort_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        columns = [SortBy.parse(text).column for text in value]
        if len(set(columns)) < len(columns):
            raise ValueError("the same column twice")
        return value

    def _list_problems(self) -> Iterator[str]:
        # An empty layout is more likely a misspelt field than a wish.
        if not self.partition_by and not self.sort_by:
            yield "says neither partition_by nor sort_by"

    @property
    def partition_fields(self) -> tuple[PartitionBy, ...]:
        """Return the parsed entries of `partition_by`."""
        return tuple(PartitionBy.parse(text) for text in self.partition_by)

    @property
    def sort_fields(self) -> tuple[SortBy, ...]:
        """Return the parsed entries of `sort_by`."""
        return tuple(SortBy.parse(text) for text in self.sort_by)


def list_layout_problems(
    layout: Mapping[str, TableLayout], tables: Mapping[str, ColumnTypes]
) -> Iterator[str]:
    """Return what a layout asks for that its tables do not have, a sentence each.

    Args:
        layout: table -> wanted arrangement of its files.
        tables: table -> column -> type, for every table there is.
    """
    for table, given in layout.items():
        columns = tables.get(table)
        if columns is None:
            yield f"outputs.layout.{table}: no such table; there are {', '.join(tables)}"
            continue
        where = f"outputs.layout.{table}"
        for part in given.partition_fields:
            if part.column not in columns:
                yield (
                    f"{where}.partition_by: no column {part.column!r} to partition by; there are"
                    f" {', '.join(columns)}"
                )
                continue
            kind = columns[part.column]
            # `decimal(6,2)` is looked up as `decimal`.
            allowed = _ALLOWED_TRANSFORMS[kind.partition("(")[0]]
            if part.transform not in allowed:
                others = ", ".join(allowed) or "nothing: choose another column"
                yield f"{where}.partition_by: {part} does not go with a {kind}; allowed: {others}"
        for key in given.sort_fields:
            if key.column not in columns:
                yield (
                    f"{where}.sort_by: no column {key.column!r} to sort by; there are"
                    f" {', '.join(columns)}"
                )


# The values of the tables' column `reason`.
LateReason = Literal[
    "late_order",
    "late_window",
    "rejected",
    "max_jump",
    "cti_violation",
    "flagged",  # the row is also among the events
]

DeadLetterReason = Literal[
    "not_parquet",
    "truncated",
    "empty_object",
    "unknown_column",
    "missing_column",
    "changed_object",
    "table_rewritten",
    "missing_offsets",
    "bad_value",
    "no_event_time",
    "before_min_event_time",
    "naive_time",
    "rule_quarantined",
]
