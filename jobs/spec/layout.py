"""How the files of the Iceberg tables are arranged: ``outputs.layout`` of a spec. It says where rows lie, not which there are.

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
from typing import Final

from pydantic import field_validator, model_validator

from tidegate.jobs.spec.options import Model

__all__ = [
    "OWN_COLUMNS",
    "STREAM_COLUMNS",
    "WINDOW_COLUMNS",
    "PartitionBy",
    "SortBy",
    "TableLayout",
    "Transform",
    "misplaced",
]


class Transform(StrEnum):
    """What a partition is made of: Iceberg's own names."""

    IDENTITY = "identity"
    YEAR = "year"
    MONTH = "month"
    DAY = "day"
    HOUR = "hour"
    BUCKET = "bucket"
    TRUNCATE = "truncate"


_FORMS: Final = "a column, year(c), month(c), day(c), hour(c), bucket(n, c) or truncate(n, c)"
_COLUMN: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_PARTITION: Final = re.compile(
    rf"({_COLUMN})|(year|month|day|hour)\(\s*({_COLUMN})\s*\)|(bucket|truncate)\(\s*(\d+)\s*,\s*({_COLUMN})\s*\)"
)
_SORT: Final = re.compile(rf"({_COLUMN})(?:\s+(asc|desc))?")
_TIMES: Final = frozenset({Transform.YEAR, Transform.MONTH, Transform.DAY, Transform.HOUR})
_DATES: Final = frozenset({Transform.YEAR, Transform.MONTH, Transform.DAY})
_FITS: Final[dict[str, frozenset[Transform]]] = {
    "timestamp": frozenset({Transform.BUCKET, *_TIMES}),  # by the microsecond each row would be a partition of its own
    "date": frozenset({Transform.IDENTITY, Transform.BUCKET, *_DATES}),
    "string": frozenset({Transform.IDENTITY, Transform.BUCKET, Transform.TRUNCATE}),
    "int": frozenset({Transform.IDENTITY, Transform.BUCKET, Transform.TRUNCATE}),
    "long": frozenset({Transform.IDENTITY, Transform.BUCKET, Transform.TRUNCATE}),
    "decimal": frozenset({Transform.IDENTITY, Transform.BUCKET, Transform.TRUNCATE}),
    "binary": frozenset({Transform.BUCKET, Transform.TRUNCATE}),
    "boolean": frozenset({Transform.IDENTITY}),
    "float": frozenset(),
    "double": frozenset(),
}

_ORIGIN: Final = {"_source": "string", "_partition": "string", "_seq": "long"}
WINDOW_COLUMNS: Final = {"window_start": "timestamp", "window_end": "timestamp", "revision": "int"}
"""Columns of a window's table beside its keys. Aggregates are left out: their types are known with the first result only."""
STREAM_COLUMNS: Final = {"position": "long", "stream_time": "timestamp", "_via": "string", "_origin": "string"}
"""Columns of a stream's table beside its own."""
OWN_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "events": {"position": "long", "section": "long", "_late": "boolean", **_ORIGIN},
    "late": {"output": "string", "reason": "string", "lateness_us": "long", "frontier": "timestamp", **_ORIGIN},
    "built": {"number": "long", "stamp": "timestamp", "section": "long", "first_time": "timestamp", "last_time": "timestamp"},
    "dead_letters": {"reason": "string", "object": "string", **_ORIGIN},
    "rejections": {"stream": "string", "destination": "string", "via": "string", "stamp": "timestamp", "reason": "string"},
    "barriers": {"barrier_id": "long", "outcome": "string", "opened": "timestamp", "closed": "timestamp", "section": "long"},
    "checkpoints": {"slot": "long", "sealed_at": "timestamp", "recorded_now": "timestamp", "frontier": "timestamp"},
}
"""Table -> tidegate's own columns by which its files can be arranged; user columns come beside them."""


@dataclass(frozen=True, slots=True)
class PartitionBy:
    """One part of a partition: a column, and what is taken of it; `width` of buckets and truncation."""

    column: str
    transform: Transform = Transform.IDENTITY
    width: int = 0

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Read the written form.

        Raises:
            ValueError: it is none of the forms.
        """
        match = _PARTITION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no partition; allowed: {_FORMS}")
        identity, time, of_time, sized, width, of_sized = match.groups()
        if identity:
            return cls(identity)
        if time:
            return cls(of_time, Transform(time))
        if int(width) == 0:
            raise ValueError(f"{text!r}: the number must be above 0")
        return cls(of_sized, Transform(sized), int(width))

    @property
    def iceberg(self) -> str:
        """The transform as Iceberg writes it."""
        return f"{self.transform.value}[{self.width}]" if self.width else self.transform.value

    def __str__(self) -> str:
        if self.transform is Transform.IDENTITY:
            return self.column
        return f"{self.transform.value}({f'{self.width}, ' if self.width else ''}{self.column})"


@dataclass(frozen=True, slots=True)
class SortBy:
    """One sort key; nulls stand last in both directions."""

    column: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str) -> SortBy:
        """Read the written form.

        Raises:
            ValueError: it is neither a column nor one with ``asc`` or ``desc``.
        """
        match = _SORT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no sort key; allowed: a column, 'column asc' or 'column desc'")
        return cls(match[1], match[2] == "desc")


class TableLayout(Model):
    """How the files of one table are arranged."""

    partition_by: tuple[str, ...] = ()
    """Files by ``day(t)`` (also ``year``, ``month``, ``hour``), ``bucket(16, c)``, ``truncate(4, c)`` or a column's value.
    Each epoch writes a file per partition that it has rows for: choose those that come few at a time."""
    sort_by: tuple[str, ...] = ()
    """Columns by which the rows of each file are sorted, each with ``desc`` behind it or not; nulls last."""

    @field_validator("partition_by")
    @classmethod
    def _partitions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        fields = [PartitionBy.parse(text) for text in value]
        times = [field.column for field in fields if field.transform in _TIMES]
        if len(set(fields)) < len(fields) or len(set(times)) < len(times):
            raise ValueError("the same column twice, or two times of it: the finer one is enough")
        return value

    @field_validator("sort_by")
    @classmethod
    def _order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        columns = [SortBy.parse(text).column for text in value]
        if len(set(columns)) < len(columns):
            raise ValueError("the same column twice")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> TableLayout:
        if not self.partition_by and not self.sort_by:
            raise ValueError("says neither partition_by nor sort_by")
        return self

    @property
    def partitions(self) -> tuple[PartitionBy, ...]:
        """What `partition_by` says."""
        return tuple(PartitionBy.parse(text) for text in self.partition_by)

    @property
    def order(self) -> tuple[SortBy, ...]:
        """What `sort_by` says."""
        return tuple(SortBy.parse(text) for text in self.sort_by)


def misplaced(layout: Mapping[str, TableLayout], tables: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What a layout says that its tables cannot do, a sentence each.

    Args:
        layout: table -> how its files shall be arranged.
        tables: table -> column -> type, for every table there is.
    """
    for table, given in layout.items():
        columns = tables.get(table)
        if columns is None:
            yield f"outputs.layout.{table}: no such table; there are {', '.join(tables)}"
            continue
        where = f"outputs.layout.{table}"
        for part in given.partitions:
            if part.column not in columns:
                yield f"{where}.partition_by: no column {part.column!r} to partition by; there are {', '.join(columns)}"
                continue
            kind = columns[part.column]
            allowed = _FITS[kind.partition("(")[0]]
            if part.transform not in allowed:
                others = ", ".join(one.value for one in Transform if one in allowed) or "nothing: choose another column"
                yield f"{where}.partition_by: {part} does not go with a {kind}; allowed: {others}"
        for key in given.order:
            if key.column not in columns:
                yield f"{where}.sort_by: no column {key.column!r} to sort by; there are {', '.join(columns)}"
