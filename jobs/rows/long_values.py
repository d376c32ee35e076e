"""Bounds the rows that a task holds where values are long, of which `MOST_CELLS` knows nothing.

Long may be texts, binaries, lists, maps and structs. A footer says how many bytes of them a row
group has. Where values repeat it says too little, so the first rows are looked at as well. What is
found follows from the object alone: a replay has the same batches.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .slice_reading import CutPart, name_damaged_object

MOST_LONG_BYTES: Final = 64 << 20
"""Bytes of long values up to which one process holds rows, besides its other values.

As `MOST_CELLS` it belongs to the division of a cut (`DIVISION`).
"""
_FEW_VALUES: Final = 1_000
"""Long values of a unit up to which nothing is measured."""
_SAMPLED_ROWS: Final = 1_024
_ROWS_AT_ONCE: Final = 64
_READ_BYTES: Final = 256 << 10
"""Bytes of a column that are read at a time for the first rows."""
_LONG_KINDS: Final = (
    *("string", "large_string", "binary", "large_binary", "fixed_size_binary", "dictionary"),
    *("list", "large_list", "fixed_size_list", "struct", "map"),
)


def limit_rows(parts: Sequence[CutPart], names: Collection[str] | None = None) -> int | None:
    """Return how many rows of these objects a task may hold at once; None: all of them.

    Args:
        parts: objects; rows of topics are not looked at.
        names: columns that are read; None: all.

    Raises:
        CorruptObjectsError: an object cannot be read.
    """
    columns = [(part, _list_long_columns(part, names)) for part in parts]
    values = sum(len(found) * (part.row_end - part.row_start) for part, found in columns)
    if values <= _FEW_VALUES:
        return None
    found = [(part.row_end - part.row_start, _measure_row(part, own)) for part, own in columns]
    if sum(rows * size for rows, size in found) <= MOST_LONG_BYTES:
        return None
    most = max(int(MOST_LONG_BYTES / max(size for _, size in found)), 1)
    return most if sum(rows for rows, _ in found) > most else None


def _list_long_columns(part: CutPart, names: Collection[str] | None) -> list[str]:
    if part.has_row_numbers:
        return []
    return [
        name
        for name, kind in part.columns
        if kind.startswith(_LONG_KINDS) and (names is None or name in names)
    ]


def _measure_row(part: CutPart, found: list[str]) -> float:
    """Return about how many bytes of the values of these columns a row of an object has."""
    if not found:
        return 0.0
    with name_damaged_object(part), pq.ParquetFile(part.path, buffer_size=_READ_BYTES) as file:
        groups = list(_list_groups(file.metadata, part))
        if not groups:  # the object has changed since it was planned
            return 0.0
        stored = [_measure_stored_row(file.metadata.row_group(n), found) for n in groups]
        return max(*stored, _measure_first_rows(file, groups[0], found))


def _list_groups(metadata: Any, part: CutPart) -> Iterator[int]:
    """Yield the row groups with rows of a part."""
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    first, last = part.row_start - part.skipped, part.row_end - part.skipped
    for number, (start, end) in enumerate(pairwise([0, *np.cumsum(sizes).tolist()])):
        if max(start, first) < min(end, last):
            yield number


def _measure_stored_row(group: Any, names: Collection[str]) -> float:
    columns = [group.column(place) for place in range(group.num_columns)]
    sizes = [
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in names
    ]
    return float(sum(sizes) / group.num_rows)


def _measure_first_rows(file: pq.ParquetFile, group: int, names: list[str]) -> float:
    rows = size = 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, [group], names):
        rows += batch.num_rows
        size += sum(
            column.dictionary_decode().nbytes
            if pa.types.is_dictionary(column.type)
            else column.nbytes
            for column in batch.columns
        )
        if rows >= _SAMPLED_ROWS or size >= MOST_LONG_BYTES:
            break
    return size / rows
