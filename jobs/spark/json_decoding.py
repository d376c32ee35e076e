"""Plain JSON messages of a topic become files of rows without Spark SQL.

Batches are parsed (jobs/rows/json_messages.py) in the driver.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.jobs.rows.json_messages import PARTITION, PlainMessages, split_messages

_ROW_GROUP = 65_536
"""Rows of a partition that are held before they are written."""
_MOST_HELD_BYTES = 64 << 20
"""So much is held for all partitions together."""
_PARSERS = 2
"""Threads that parse batches in the driver."""
_NO_ROWS = pa.table({PARTITION: pa.array([], pa.int32())})
MESSAGE_DDL: Final = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp,"
    " headers array<struct<key:string,value:binary>>"
)
"""Columns of the messages that Spark has to read."""


def write_batches(
    batches: Iterable[pa.RecordBatch], plan: PlainMessages | None, folder: Path
) -> None:
    """Write messages into a folder, each partition in their order into files of its own.

    ``plain-*.parquet`` has the columns of the plan. ``other-*.parquet`` has the messages that Spark
    has to read, as they came; without a plan it has all.
    """
    if plan is None:
        _write_tables(((_NO_ROWS, pa.Table.from_batches([batch])) for batch in batches), folder)
        return
    with ThreadPoolExecutor(_PARSERS, thread_name_prefix="kafka-parse") as pool:
        _write_tables(_parse_ahead(pool, batches, plan), folder)


def _parse_ahead(
    pool: ThreadPoolExecutor, batches: Iterable[pa.RecordBatch], plan: PlainMessages
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Parse a few batches beside each other; yield what becomes of each, in their order."""
    waiting = deque[Future[tuple[pa.Table, pa.Table]]]()
    for batch in batches:
        waiting.append(pool.submit(split_messages, batch, plan))
        if len(waiting) > _PARSERS:
            yield waiting.popleft().result()
    yield from (parsed.result() for parsed in waiting)


def _write_tables(found: Iterable[tuple[pa.Table, pa.Table]], folder: Path) -> None:
    """Write pairs of plain rows and other messages."""
    writers: dict[tuple[str, int], _RowsWriter] = {}
    for rows, others in found:
        for kind, table, column in (("plain", rows, PARTITION), ("other", others, "partition")):
            for partition, own in _split_by_partition(table, column):
                if (kind, partition) not in writers:
                    path = folder / f"{kind}-{uuid4().hex}.part"
                    writers[kind, partition] = _RowsWriter(path)
                writers[kind, partition].add(own)
        if sum(writer.held_bytes for writer in writers.values()) > _MOST_HELD_BYTES:
            for writer in writers.values():
                writer.flush()
    for writer in writers.values():
        writer.finish()


def _split_by_partition(table: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    partitions = pc.unique(table[column]).to_pylist()
    for partition in partitions:
        is_own = pc.equal(table[column], partition)
        yield partition, table if len(partitions) == 1 else table.filter(is_own)


class _RowsWriter:
    """Writes one file, many rows at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._pieces = path, list[pa.Table]()
        self._writer: Any = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are not yet written."""
        return sum(piece.nbytes for piece in self._pieces)

    def add(self, rows: pa.Table) -> None:
        """Take rows behind the others."""
        self._pieces.append(rows)
        if sum(piece.num_rows for piece in self._pieces) >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._pieces:
            rows = pa.concat_tables(self._pieces)
            self._pieces.clear()
            # Not before: a topic may have more partitions than a process may have files open.
            self._writer = self._writer or pq.ParquetWriter(
                self._path, rows.schema, use_dictionary=False, compression="lz4"
            )
            self._writer.write_table(rows)

    def finish(self) -> None:
        """Write the rest. Only now the file has its name: Spark may run a task that fails again."""
        self.flush()
        self._writer.close()
        self._path.rename(self._path.with_suffix(".parquet"))
