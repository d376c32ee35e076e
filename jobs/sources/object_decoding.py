"""Decodes objects of other formats to Parquet, a chunk of their rows at a time.

Typed formats (Avro, ORC, Parquet with renamed columns) keep their own types; the mover casts them,
as it does for Parquet. Text (JSON lines, CSV) is cast here, column by column. A row that cannot be
decoded has no values, the reason in `BAD_REASON` and its text in `BAD_TEXT`. It becomes a dead
letter like any other row without an event time, and the rows around it are not affected.
See docs/decisions/0070-objects-of-other-formats-are-decoded-to-parquet.md.
"""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tidegate.errors import get_first_line
from tidegate.jobs.engine.arrow_tables import replace_column
from tidegate.jobs.rules.declared_values import build_cast_sql, build_complaint_sql
from tidegate.jobs.rules.duck_frame import MEMORY_ERRORS, query_table
from tidegate.jobs.spec.pipeline import SourceSpec
from tidegate.jobs.spec.table_layout import DeadLetterReason
from tidegate.json_types import JsonObject, JsonView

from .avro import iterate_avro_tables
from .byte_streams import ByteStream, copy_to_scratch, find_codec, open_compressed
from .odd_texts import MarkedText, add_marks, decode_line
from .orc import iterate_orc_tables
from .text_chunks import (
    CHUNK_BYTES,
    Chunk,
    find_csv_header_end,
    iterate_csv_chunks,
    iterate_line_chunks,
)

BREAK_BYTES: Final = 3 << 20
"""Between two breaks of an object at least: a little less than a chunk of a text."""
FRAMING: Final = "framing"
"""Of a planned object that was half read: the options that say which rows an object of CSV has.

They are those with which its first rows were read, whatever the spec says since.
"""
BAD_REASON: Final = "_why"
BAD_TEXT: Final = "_text"
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
# A line that may hold a fraction which DuckDB does not return as it was written.
_INEXACT_FRACTION = r"[0-9.]{17}|[0-9][eE][+-]?[0-9]|0[.]0000"
_MAX_MARKED_COLUMNS = 20  # their names go into the manifest
_MAX_DIGITS = 80  # longer than any column
_MOST_ROWS: Final = 128 << 10  # of one batch of a typed format

_DECODE_ERRORS = (
    pa.ArrowException,
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    ValueError,  # bz2's, among others
    duckdb.Error,
)


@dataclass(frozen=True, slots=True)
class BadObject:
    """Why an object cannot be read: the reason of its dead letter, with details.

    Attributes:
        rows: its number of rows; None if it is not known.
    """

    reason: DeadLetterReason
    detail: str
    rows: int | None = None


@dataclass
class CountedRows:
    """The rows of an object, as far as they were counted.

    Attributes:
        number: how many there are.
        breaks: rows from which on it can be decoded without those before them, the first row and
            others that are `BREAK_BYTES` apart or more; none if it cannot.
        offsets: where each of these begins.
    """

    number: int = 0
    breaks: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add_break(self, row: int, offset: int) -> None:
        """Note where a row begins, in the order of the rows."""
        if not self.breaks or (row > self.breaks[-1] and offset - self.offsets[-1] >= BREAK_BYTES):
            self.breaks.append(row)
            self.offsets.append(offset)


def needs_decoding(spec: SourceSpec, key: str) -> bool:
    """Return whether an object of this source is read through a decoded copy.

    The key may leave out the source's own folder. A file of a Delta table that lies in
    ``column=value`` folders lacks these columns.
    """
    if spec.format != "parquet" or spec.evolution.renamed:
        return True
    is_delta = spec.table is not None and spec.table.format == "delta"
    return is_delta and bool(parse_folder_values(key))


def describe_framing(spec: SourceSpec) -> JsonObject:
    """Return what a plan keeps of a source for its half read objects; empty if it is not CSV."""
    options = {"delimiter", "quote", "header"}
    return {FRAMING: spec.parse.model_dump(include=options)} if spec.format == "csv" else {}


def restore_framing(spec: SourceSpec, part: JsonView) -> SourceSpec:
    """Return the source with the options with which a planned object was begun."""
    parse = spec.parse.model_copy(update=part.get(FRAMING, {}))
    return spec.model_copy(update={"parse": parse})


class _UnreadableError(Exception):
    """An object cannot be read."""

    def __init__(self, bad: BadObject) -> None:
        super().__init__(bad.detail)
        self.bad = bad


def decode_to_parquet(
    key: str, file: Any, spec: SourceSpec, out: Any, columns: Iterable[str] | None = None
) -> BadObject | None:
    """Write an object as one Parquet file; times are cut to microseconds.

    A chunk of its rows is held at a time.

    Args:
        key: its ending tells the compression; for a table, its folders tell partition columns.
        file: the object, which can be read from any place.
        spec: the source.
        out: the path of the file, or what is written to.
        columns: of the file, as planned; None: JSON lines are read once more to find them.

    Returns:
        Why the object cannot be read, and then there is no file; None if it was written.

    Raises:
        OSError: the file cannot be written.
    """
    fields: set[str] = set()
    try:
        if spec.format == "json" and spec.evolution.added == "ignore":
            found = _find_unknown_fields(key, file, spec) if columns is None else columns
            fields = {*found} - {*spec.columns, BAD_REASON, BAD_TEXT}
        tables = _decode_object(key, file, spec, lambda rows: _read_object(rows, spec, fields))
        _write_tables(tables, spec, out)
    except BaseException as error:
        if isinstance(out, Path):
            out.unlink(missing_ok=True)
        if isinstance(error, _UnreadableError):
            return error.bad
        raise
    return None


def describe_decoded_object(
    key: str, file: Any, spec: SourceSpec
) -> tuple[CountedRows, io.BytesIO] | BadObject:
    """Return the rows that `decode_to_parquet` writes, and a file with its columns.

    Texts are counted only, so this takes a fraction of the time.
    """
    counted, out = CountedRows(), io.BytesIO()
    tables = _decode_object(key, file, spec, lambda rows: _read_columns(rows, spec, counted))
    try:
        first = next(tables)
        _write_tables(iter([first.slice(0, 0)]), spec, out)
        # Typed values may not fit into Parquet.
        _write_tables(chain([first], tables), spec, pa.MockOutputStream())
    except _UnreadableError as error:
        return error.bad
    if find_codec(key) is not None:  # the breaks are places in what it holds
        counted = CountedRows(counted.number)
    return counted, out


def _decode_object(
    key: str, file: Any, spec: SourceSpec, read: Callable[[Any], Iterator[pa.Table]]
) -> Iterator[pa.Table]:
    """Yield what `read` makes of the decompressed object, with the columns of the copy.

    Raises:
        _UnreadableError: the object cannot be read.
    """
    if not file.seek(0, io.SEEK_END):
        raise _UnreadableError(BadObject("empty_object", "the object has no bytes"))
    file.seek(0)
    renamed = spec.evolution.renamed
    try:
        for table in read(_open_rows(find_codec(key), file, spec.format)):
            # The values of some columns of a lakehouse table are only in the names of folders.
            for name, value in parse_folder_values(key).items() if spec.table is not None else ():
                if name not in table.column_names:
                    values = pa.array([value] * table.num_rows, pa.string())
                    table = table.append_column(name, values)
            both = [new for old, new in renamed.items() if {old, new} <= set(table.column_names)]
            if both:
                detail = f"both the old and the new name of {', '.join(both)} are there"
                raise _UnreadableError(BadObject("unknown_column", detail))
            yield table.rename_columns([renamed.get(name, name) for name in table.column_names])
    except MEMORY_ERRORS:
        raise  # that is not the object's fault
    except _DECODE_ERRORS as error:
        raise _UnreadableError(_describe_unreadable(spec, error)) from error


def _open_rows(codec: str | None, file: Any, form: str) -> Any:
    """Open what is in an object: as a stream, or for formats with an index as a file."""
    if form not in ("orc", "parquet"):
        return open_compressed(codec, file)
    return file if codec is None else copy_to_scratch(open_compressed(codec, file))


def _write_tables(tables: Iterator[pa.Table], spec: SourceSpec, out: Any) -> None:
    """Write tables with the same columns as the row groups of one file."""
    writer = None
    try:
        for table in tables:
            try:
                writer = writer or pq.ParquetWriter(
                    out,
                    table.schema,
                    coerce_timestamps="us",
                    allow_truncated_timestamps=True,
                    compression="snappy",
                )
                writer.write_table(table)
            except MemoryError:
                raise
            # A time out of range. A full disk is an OSError, which is not the object's fault.
            except (pa.ArrowException, ValueError) as error:
                raise _UnreadableError(_describe_unreadable(spec, error)) from error
    finally:
        if writer is not None:
            writer.close()


def _describe_unreadable(spec: SourceSpec, error: Exception) -> BadObject:
    reason = get_first_line(error)[:200]
    return BadObject("truncated", f"the object cannot be read as {spec.format}: {reason}")


def parse_folder_values(key: str) -> dict[str, str | None]:
    """Return the values in folder names ``column=value``: the partition columns of a table.

    Hive's folder name for null gives None.

    >>> parse_folder_values("@lake/day=2026-01-01/shop=a%20b/part-0.parquet")
    {'day': '2026-01-01', 'shop': 'a b'}
    """
    pairs = [folder.partition("=") for folder in key.split("/")[:-1] if "=" in folder]
    return {
        unquote(name): None if value == _NULL_FOLDER else unquote(value) for name, _, value in pairs
    }


def decompress_object(key: str, data: bytes) -> bytes:
    """Return the bytes of an object, decompressed if its key ends in .gz, .bz2, .xz, .zst or .lz4.

    Broken data raises one of `_DECODE_ERRORS`.
    """
    return open_compressed(find_codec(key), io.BytesIO(data)).read()


def _read_object(rows: Any, spec: SourceSpec, fields: Collection[str]) -> Iterator[pa.Table]:
    """Yield the rows; `fields` of JSON lines are those that the schema lacks."""
    if spec.format == "json":
        for _, chunk in _iterate_lines(rows):
            yield _read_json_lines(_split_json_lines(chunk), spec, fields)
    elif spec.format == "csv":
        for _, texts in _iterate_csv_texts(rows, spec):
            yield _cast_texts(texts, spec)
    else:
        yield from _iterate_typed_tables(rows, spec.format)


def _read_columns(rows: Any, spec: SourceSpec, counted: CountedRows) -> Iterator[pa.Table]:
    """Yield tables with the columns, which may have no rows, and count the rows of the object."""
    if spec.format == "json":
        fields: set[str] = set()
        for start, chunk in _iterate_lines(rows):
            lines = _split_json_lines(chunk)
            counted.add_break(counted.number, start)
            counted.number += len(lines)
            if spec.evolution.added == "ignore":
                fields.update(_list_unknown_fields(lines, spec))
        yield _read_json_lines([], spec, fields)
    elif spec.format == "csv":
        for begin, texts in _iterate_csv_texts(rows, spec):
            if begin is not None:
                counted.add_break(counted.number, begin)
            counted.number += texts.num_rows
            yield _cast_texts(texts.slice(0, 0), spec)
    else:
        for table in _iterate_typed_tables(rows, spec.format, counted):
            counted.number += table.num_rows
            yield table


def _iterate_typed_tables(
    file: Any, form: str, counted: CountedRows | None = None
) -> Iterator[pa.Table]:
    """Yield the rows; breaks go to `counted`."""
    note = (counted or CountedRows()).add_break
    if form == "avro":
        return iterate_avro_tables(file, CHUNK_BYTES, note)
    if form == "parquet":
        return _iterate_parquet_tables(file)
    return iterate_orc_tables(file, CHUNK_BYTES, note)


def read_typed_object(data: bytes, form: str) -> pa.Table:
    """Return the rows of an object whose format (parquet, avro, orc) has types of its own.

    Broken data raises one of `_DECODE_ERRORS`.
    """
    return pa.concat_tables(_iterate_typed_tables(io.BytesIO(data), form))


def open_parquet_file(source: Path | io.IOBase) -> pq.ParquetFile:
    """Open a file so that INT96 times come as microseconds, which have the larger range."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def _iterate_parquet_tables(source: Any) -> Iterator[pa.Table]:
    """Yield the rows of an object in the types that a `Footer` names; at least one table.

    INT96 does not say whether it is an instant. Its writers (older Spark, Hive, Impala) mean one,
    in UTC.
    """
    file = open_parquet_file(source)
    instants, instant = find_int96_columns(file.metadata), pa.timestamp("us", "UTC")
    empty = file.read_row_groups([])
    fields = [pa.field(f.name, instant if f.name in instants else f.type) for f in empty.schema]
    schema = pa.schema(fields) if instants else empty.schema
    yield empty.cast(schema)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        rows = CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1)
        for batch in file.iter_batches(max(min(rows, _MOST_ROWS), 1), [number]):
            yield pa.Table.from_batches([batch]).cast(schema)


def find_int96_columns(metadata: Any) -> set[str]:
    """Return the top-level columns with the old timestamps of twelve bytes."""
    leaves = (metadata.schema.column(n) for n in range(metadata.num_columns))
    return {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}


def _iterate_lines(rows: ByteStream) -> Iterator[Chunk]:
    """Yield chunks of lines; at least one, which may be empty."""
    chunks = iterate_line_chunks(rows)
    yield next(chunks, (0, b""))
    yield from chunks


def _find_unknown_fields(key: str, file: Any, spec: SourceSpec) -> list[str]:
    tables = _decode_object(key, file, spec, lambda rows: _read_columns(rows, spec, CountedRows()))
    return [name for table in tables for name in table.column_names]


def _split_json_lines(data: bytes) -> list[bytes]:
    """Return the lines; empty ones are not rows and do not count."""
    # A byte order mark is before the first line, or before others where files were joined.
    lines = (line.removeprefix(codecs.BOM_UTF8) for line in data.split(b"\n"))
    return [line for line in lines if line.strip()]


def _to_text_table(lines: list[bytes]) -> pa.Table:
    texts = [decode_line(line) for line in lines]
    return pa.table(
        {
            "line": pa.array([text for text, _ in texts], pa.string()),
            "is_text": pa.array([is_text for _, is_text in texts], pa.bool_()),
        }
    )


_IS_OBJECT = "CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END"


def _read_json_lines(lines: list[bytes], spec: SourceSpec, unknown: Collection[str]) -> pa.Table:
    """Read one JSON object per line; `unknown` are fields that the schema lacks."""
    fields = {
        name: ", ".join(f"""line->>'$."{one}"'""" for one in _list_field_names(name, spec))
        for name in spec.columns
    }
    columns = ", ".join(
        f'CASE WHEN ok THEN coalesce({values}) END AS "{name}"' for name, values in fields.items()
    )
    # Fields that the spec does not declare are not a fault then; malformed lines still are.
    is_strict = spec.evolution.added != "ignore"
    names = _build_unknown_fields_sql(spec) if is_strict else "NULL::VARCHAR[]"
    rows = query_table(
        _to_text_table(lines),
        f"""WITH judged AS (SELECT line, is_text, {_IS_OBJECT} AS ok FROM rows),
        named AS (SELECT *, {names} AS _unknown FROM judged)
        SELECT line AS {BAD_TEXT}, {columns},
            CASE WHEN NOT is_text THEN 'the line is not UTF-8'
            WHEN NOT ok THEN 'the line is not a JSON object'
            WHEN len(_unknown) > 0
            THEN 'not in the schema: ' || array_to_string(_unknown, ', ') END AS {BAD_REASON}
        FROM named""",
        for_frames=True,
    )
    rows = _add_marked_fields(rows, unknown)
    return _cast_texts(_restore_exact_numbers(rows, spec), spec)


def _list_unknown_fields(lines: list[bytes], spec: SourceSpec) -> list[str]:
    """Return the names that the schema lacks."""
    found = query_table(
        _to_text_table(lines),
        f"""WITH judged AS (SELECT line, {_IS_OBJECT} AS ok FROM rows)
        SELECT DISTINCT unnest({_build_unknown_fields_sql(spec)}) AS name FROM judged""",
        for_frames=True,
    )
    names: list[str] = found["name"].to_pylist()
    return names


def _add_marked_fields(rows: pa.Table, names: Collection[str]) -> pa.Table:
    """Add a column of nulls for each name that the schema lacks, so that its rows are counted."""
    for name in sorted(names)[:_MAX_MARKED_COLUMNS]:
        if name.lower() not in map(str.lower, rows.column_names):  # see `_drop_lookalikes`
            rows = rows.append_column(name, pa.nulls(rows.num_rows, pa.string()))
    return rows


def _build_unknown_fields_sql(spec: SourceSpec) -> str:
    """SQL for the names in a line that the schema lacks."""
    known = (*spec.columns, *spec.evolution.renamed)
    names = ", ".join("'" + name.replace("'", "''") + "'" for name in known)
    return f"""list_filter(CASE WHEN ok THEN json_keys(line) END,
        lambda k: NOT list_contains([{names}], k))"""


def _list_field_names(column: str, spec: SourceSpec) -> list[str]:
    """Return the names of a column in text: its own, then old ones. Any row may begin to rename."""
    return [column, *(old for old, new in spec.evolution.renamed.items() if new == column)]


class _JsonNumber(str):
    """A number of JSON as it was written."""

    def to_plain_text(self) -> str:
        """Return it without an exponent, unless that would be longer than any column."""
        value = Decimal(self)
        return format(value, "f") if abs(value.adjusted()) <= _MAX_DIGITS else str(self)


def _restore_exact_numbers(rows: pa.Table, spec: SourceSpec) -> pa.Table:
    """Restore fractions with more digits than a double holds to what was written.

    DuckDB rounds them, or writes them with an exponent.
    """
    kinds = {
        name: kind
        for name, kind in spec.columns.items()
        if kind == "string" or kind.startswith("decimal")
    }
    matches = pa.compute.match_substring_regex(rows[BAD_TEXT], _INEXACT_FRACTION).combine_chunks()
    suspects = np.flatnonzero(matches.to_numpy(zero_copy_only=False))
    if not kinds or not suspects.size:
        return rows
    columns = {name: rows[name].to_pylist() for name in kinds}
    for row in suspects:
        try:
            parsed = json.loads(rows[BAD_TEXT][int(row)].as_py(), parse_float=_JsonNumber)
        except (ValueError, RecursionError):
            continue  # DuckDB accepts a little more than JSON
        for name, kind in kinds.items() if isinstance(parsed, dict) else ():
            values = map(parsed.get, _list_field_names(name, spec))
            number = next((value for value in values if value is not None), None)
            if isinstance(number, _JsonNumber):
                columns[name][row] = str(number) if kind == "string" else number.to_plain_text()
    for name, values in columns.items():
        rows = replace_column(rows, name, pa.array(values, pa.string()))
    return rows


def _read_csv_header(marked: MarkedText, spec: SourceSpec) -> list[str]:
    """Return the names in the first line as Python's reader of CSV sees them.

    Raises:
        ValueError: the line cannot be read, or names a column twice.
    """
    text = io.TextIOWrapper(io.BytesIO(marked.data), "utf-8-sig", newline="")
    try:
        lines = csv.reader(text, delimiter=spec.parse.delimiter, quotechar=spec.parse.quote)
        names = next((line for line in lines if line), [])
    except csv.Error as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    odd = [why for mark, why in marked.complaints.items() if mark in "".join(names)]
    if odd:
        raise ValueError(f"the header cannot be read: {odd[0]}")
    if len(set(names)) < len(names):
        raise ValueError("the header names a column twice")
    return names


def _iterate_csv_texts(rows: ByteStream, spec: SourceSpec) -> Iterator[tuple[int | None, pa.Table]]:
    """Yield where rows begin, and their values as texts; at least one table.

    None: they have no beginning that can be read behind the header, or without one.
    """
    delimiter, quote = spec.parse.delimiter, spec.parse.quote
    names = None if spec.parse.header else list(spec.columns)
    for number, (start, chunk) in enumerate(iterate_csv_chunks(rows, delimiter, quote)):
        begin: int | None = start
        marked = add_marks(chunk, delimiter, quote)
        has_header = spec.parse.header and number == 0
        if has_header:
            begin = start + find_csv_header_end(chunk, delimiter, quote)
        elif number and chunk.startswith(codecs.BOM_UTF8):
            begin = None  # at the beginning of a text it would be no part of the value
        if names is None:
            names = _read_csv_header(marked, spec)
        # Arrow takes away one mark at the beginning of what it reads.
        mark = codecs.BOM_UTF8 if number else b""
        yield begin, _read_csv_texts(marked, names, spec, mark, has_header=has_header)


def _read_csv_texts(
    marked: MarkedText, names: list[str], spec: SourceSpec, start: bytes, *, has_header: bool
) -> pa.Table:
    table, broken = _parse_csv(start + marked.data, names, spec, has_header=has_header)
    if table.column_names != names:  # the type of a column with another name would be guessed
        raise ValueError(
            f"the header reads as {', '.join(names)} or as {', '.join(table.column_names)}"
        )
    names = [spec.evolution.renamed.get(name, name) for name in names]
    columns = [column.cast(pa.string()) for column in table.columns]
    written = [pa.compute.fill_null(column, spec.parse.null) for column in columns]
    if spec.parse.quote.encode() in marked.data:
        written = [_quote_values(column, spec) for column in written]
    row_texts = pa.compute.binary_join_element_wise(*written, spec.parse.delimiter)
    reasons = pa.nulls(table.num_rows, pa.string())
    for mark, why in marked.complaints.items():
        has_mark = pa.compute.match_substring(row_texts, mark)
        reasons = pa.compute.if_else(has_mark, why, reasons)
        row_texts = pa.compute.replace_substring(row_texts, mark, "\ufffd")
    texts = pa.table([*columns, reasons, row_texts], names=[*names, BAD_REASON, BAD_TEXT])
    broken = {number: marked.clean(text) for number, text in broken.items()}
    return _insert_broken_rows(_drop_lookalikes(texts, spec), broken)


def _quote_values(column: pa.ChunkedArray, spec: SourceSpec) -> pa.ChunkedArray:
    """Return texts as CSV writes them, so that the line can be read again."""
    quote, delimiter = spec.parse.quote, re.escape(spec.parse.delimiter)
    is_quoted = pa.compute.match_substring_regex(column, f"[{re.escape(quote)}\r\n]|{delimiter}")
    inner = pa.compute.replace_substring(column, quote, quote * 2)
    whole = pa.compute.binary_join_element_wise(quote, inner, quote, "")
    return pa.compute.if_else(is_quoted, whole, column)


def _drop_lookalikes(texts: pa.Table, spec: SourceSpec) -> pa.Table:
    """Leave out undeclared columns whose name differs from another one in case only.

    DuckDB does not tell them apart, and would take the value of the wrong one.
    """
    seen = {name.lower() for name in spec.columns}
    kept = []
    for name in texts.column_names:
        if name in spec.columns or name.lower() not in seen:
            kept.append(name)
            seen.add(name.lower())
    return texts.select(kept)


def _parse_csv(
    data: bytes, names: list[str], spec: SourceSpec, *, has_header: bool
) -> tuple[pa.Table, dict[int, str]]:
    """Return the rows as text, and number -> text of lines with too many or too few values."""
    broken: dict[int, str] = {}

    def keep_broken_row(row: Any) -> str:
        """Note a line with too many or too few values, and let Arrow go on."""
        broken[row.number - 1 - has_header] = row.text
        return "skip"

    table = pacsv.read_csv(
        io.BytesIO(data),
        # Only one thread knows the number of a broken line. A block is the longest row.
        read_options=pacsv.ReadOptions(
            use_threads=False,
            column_names=None if has_header else names,
            block_size=max(len(data), 1),
        ),
        parse_options=pacsv.ParseOptions(
            delimiter=spec.parse.delimiter,
            quote_char=spec.parse.quote,
            newlines_in_values=True,
            invalid_row_handler=keep_broken_row,
        ),
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[spec.parse.null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return table, broken


def _insert_broken_rows(texts: pa.Table, broken: dict[int, str]) -> pa.Table:
    """Put lines that are not rows back where they were, so that all rows keep their numbers."""
    if not broken:
        return texts
    why = "the line has more or fewer values than there are columns"
    dead: dict[str, Any] = dict.fromkeys(texts.column_names, pa.nulls(len(broken), pa.string()))
    dead |= {BAD_REASON: [why] * len(broken), BAD_TEXT: [*broken.values()]}
    good = np.setdiff1d(np.arange(texts.num_rows + len(broken)), [*broken])
    both = pa.concat_tables([texts, pa.table(dead)])
    return both.take(pa.array(np.argsort([*good, *broken])))


def _cast_texts(texts: pa.Table, spec: SourceSpec) -> pa.Table:
    """Cast texts to the declared types.

    If one value does not fit, its whole row becomes null, with the reason in `BAD_REASON`.
    """
    present = {name: kind for name, kind in spec.columns.items() if name in texts.column_names}
    casts = {name: build_cast_sql(f'"{name}"', kind, spec) for name, kind in present.items()}
    faults = [
        f'WHEN "{name}" IS NOT NULL AND {casts[name]} IS NULL'
        f" THEN {build_complaint_sql(name, kind, spec)}"
        for name, kind in present.items()
        if kind != "string"
    ]
    why = f"CASE WHEN {BAD_REASON} IS NOT NULL THEN {BAD_REASON} {' '.join(faults)} END"
    columns = ", ".join(f'CASE WHEN why IS NULL THEN typed."{n}" END AS "{n}"' for n in present)
    typed = ", ".join(f'{cast} AS "{name}"' for name, cast in casts.items())
    undeclared = [n for n in texts.column_names if n not in (*present, BAD_REASON, BAD_TEXT)]
    # The names of undeclared columns come from the data: they may contain quotes.
    extra = "".join(', "' + name.replace('"', '""') + '"' for name in undeclared)
    # DuckDB keeps the order of the rows.
    return query_table(
        texts,
        f"""WITH typed AS (SELECT {typed}{extra}, {why} AS why, {BAD_TEXT} FROM rows)
        SELECT {columns}{extra}, why AS {BAD_REASON},
            CASE WHEN why IS NOT NULL THEN {BAD_TEXT} END AS {BAD_TEXT}
        FROM typed""",
        for_frames=True,
    )
