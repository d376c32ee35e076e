"""Decodes objects of other formats to Parquet, once, when a slice with them is planned.

Typed formats (Avro, ORC, Parquet with renamed columns) keep their own types; the mover casts them,
as it does for Parquet. Text (JSON lines, CSV) is cast here, column by column. A row that cannot be
decoded has no values, the reason in `BAD_REASON` and its text in `BAD_TEXT`. It becomes a dead
letter like any other row without an event time, and the rows around it are not affected.
See docs/decisions/0070-objects-of-other-formats-are-decoded-to-parquet.md.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
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

from .avro import decompress_stream, read_avro_file
from .odd_texts import MarkedText, add_marks, decode_line
from .orc import read_orc_file

BAD_REASON: Final = "_why"
BAD_TEXT: Final = "_text"
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
# A line that may hold a fraction which DuckDB does not return as it was written.
_INEXACT_FRACTION = r"[0-9.]{17}|[0-9][eE][+-]?[0-9]|0[.]0000"
_MAX_MARKED_COLUMNS = 20  # their names go into the manifest
_MAX_DIGITS = 80  # longer than any column

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


def needs_decoding(spec: SourceSpec, key: str) -> bool:
    """Return whether an object of this source is read through a decoded copy.

    The key may leave out the source's own folder. A file of a Delta table that lies in
    ``column=value`` folders lacks these columns.
    """
    if spec.format != "parquet" or spec.evolution.renamed:
        return True
    is_delta = spec.table is not None and spec.table.format == "delta"
    return is_delta and bool(parse_folder_values(key))


def decode_to_parquet(
    key: str, data: bytes, spec: SourceSpec, out: Path | io.BytesIO
) -> BadObject | None:
    """Write an object as one Parquet file; times are cut to microseconds.

    Args:
        key: its ending tells the compression; for a table, its folders tell partition columns.
        data: the object's bytes.
        spec: the source.
        out: the file.

    Returns:
        Why the object cannot be read, and then there is no file; None if it was written.

    Raises:
        OSError: the file cannot be written.
    """
    table = _decode_object(key, data, spec, _read_object)
    return table if isinstance(table, BadObject) else _write_table(table, spec, out)


def describe_decoded_object(
    key: str, data: bytes, spec: SourceSpec
) -> tuple[int, io.BytesIO] | BadObject:
    """Return the number of rows that `decode_to_parquet` writes, and a file with its columns.

    Texts are counted only, so this takes a fraction of the time.
    """
    sizes: list[int] = []

    def read(data: bytes, spec: SourceSpec) -> pa.Table:
        """Read an object, or of texts only the columns."""
        size, table = _read_columns(data, spec)
        sizes.append(size)
        return table

    table, out = _decode_object(key, data, spec, read), io.BytesIO()
    bad = table if isinstance(table, BadObject) else _write_table(table, spec, out)
    return (sizes[0], out) if bad is None else bad


def _decode_object(
    key: str, data: bytes, spec: SourceSpec, read: Callable[[bytes, SourceSpec], pa.Table]
) -> pa.Table | BadObject:
    if not data:
        return BadObject("empty_object", "the object has no bytes")
    try:
        table = read(decompress_object(key, data), spec)
        # The values of some columns of a lakehouse table are only in the names of folders.
        for name, value in parse_folder_values(key).items() if spec.table is not None else ():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([value] * table.num_rows, pa.string()))
    except MEMORY_ERRORS:
        raise  # that is not the object's fault
    except _DECODE_ERRORS as error:
        return _describe_unreadable(spec, error)
    renamed = spec.evolution.renamed
    both = [new for old, new in renamed.items() if {old, new} <= set(table.column_names)]
    if both:
        names = ", ".join(both)
        return BadObject("unknown_column", f"both the old and the new name of {names} are there")
    return table.rename_columns([renamed.get(name, name) for name in table.column_names])


def _write_table(table: pa.Table, spec: SourceSpec, out: Path | io.BytesIO) -> BadObject | None:
    try:
        pq.write_table(
            table,
            out,
            coerce_timestamps="us",
            allow_truncated_timestamps=True,
            compression="snappy",
        )
    except MemoryError:
        raise
    # A time out of range. A full disk is an OSError, which is not the object's fault.
    except (pa.ArrowException, ValueError) as error:
        if isinstance(out, Path):
            out.unlink(missing_ok=True)
        return _describe_unreadable(spec, error)
    return None


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
    for ending, decompress in _DECOMPRESS_BY_ENDING.items():
        if key.endswith(ending):
            return decompress(data)
    return data


_DECOMPRESS_BY_ENDING: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": partial(decompress_stream, "zstd"),
    ".lz4": partial(decompress_stream, "lz4"),
}


def _read_object(data: bytes, spec: SourceSpec) -> pa.Table:
    match spec.format:
        case "json":
            return _read_json_lines(_split_json_lines(data), spec)
        case "csv":
            return _cast_texts(_read_csv_texts(data, spec), spec)
    return read_typed_object(data, spec.format)


def _read_columns(data: bytes, spec: SourceSpec) -> tuple[int, pa.Table]:
    """Return the number of rows, and a table with the columns, which may have no rows."""
    if spec.format == "json":
        lines = _split_json_lines(data)
        columns = _read_json_lines([], spec)
        if spec.evolution.added == "ignore":
            columns = _add_marked_fields(columns, _list_unknown_fields(lines, spec))
        return len(lines), columns
    if spec.format == "csv":
        texts = _read_csv_texts(data, spec)
        return texts.num_rows, _cast_texts(texts.slice(0, 0), spec)
    table = _read_object(data, spec)
    return table.num_rows, table


def read_typed_object(data: bytes, form: str) -> pa.Table:
    """Return the rows of an object whose format (parquet, avro, orc) has types of its own.

    Broken data raises one of `_DECODE_ERRORS`.
    """
    if form == "avro":
        return read_avro_file(data)
    if form == "parquet":
        return read_parquet_table(io.BytesIO(data))
    return read_orc_file(data)


def open_parquet_file(source: Path | io.IOBase) -> pq.ParquetFile:
    """Open a file so that INT96 times come as microseconds, which have the larger range."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def read_parquet_table(source: Path | io.BytesIO) -> pa.Table:
    """Return the rows of an object in the types that a `Footer` names.

    INT96 does not say whether it is an instant. Its writers (older Spark, Hive, Impala) mean one,
    in UTC.
    """
    file = open_parquet_file(source)
    rows = file.read()
    instants, instant = find_int96_columns(file.metadata), pa.timestamp("us", "UTC")
    fields = [pa.field(f.name, instant if f.name in instants else f.type) for f in rows.schema]
    return rows.cast(pa.schema(fields)) if instants else rows


def find_int96_columns(metadata: Any) -> set[str]:
    """Return the top-level columns with the old timestamps of twelve bytes."""
    leaves = (metadata.schema.column(n) for n in range(metadata.num_columns))
    return {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}


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


def _read_json_lines(lines: list[bytes], spec: SourceSpec) -> pa.Table:
    """Read one JSON object per line."""
    fields = {
        name: ", ".join(f"""line->>'$."{one}"'""" for one in _list_field_names(name, spec))
        for name in spec.columns
    }
    columns = ", ".join(
        f'CASE WHEN ok THEN coalesce({values}) END AS "{name}"' for name, values in fields.items()
    )
    # Fields that the spec does not declare are not a fault then; malformed lines still are.
    ignored = spec.evolution.added == "ignore"
    rows = query_table(
        _to_text_table(lines),
        f"""WITH judged AS (SELECT line, is_text, {_IS_OBJECT} AS ok FROM rows),
        named AS (SELECT *, {_build_unknown_fields_sql(spec)} AS _unknown FROM judged)
        SELECT line AS {BAD_TEXT}, {columns}, _unknown,
            CASE WHEN NOT is_text THEN 'the line is not UTF-8'
            WHEN NOT ok THEN 'the line is not a JSON object'
            WHEN len(_unknown) > 0 AND NOT {ignored}
            THEN 'not in the schema: ' || array_to_string(_unknown, ', ') END AS {BAD_REASON}
        FROM named""",
        for_frames=True,
    )
    unknown = pa.compute.list_flatten(rows["_unknown"]).unique().to_pylist() if ignored else []
    rows = _add_marked_fields(rows.drop_columns(["_unknown"]), unknown)
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


def _add_marked_fields(rows: pa.Table, names: list[str]) -> pa.Table:
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


def _read_csv_texts(data: bytes, spec: SourceSpec) -> pa.Table:
    marked = add_marks(data, spec.parse.delimiter, spec.parse.quote)
    names = _read_csv_header(marked, spec) if spec.parse.header else list(spec.columns)
    table, broken = _parse_csv(marked.data, names, spec)
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


def _parse_csv(data: bytes, names: list[str], spec: SourceSpec) -> tuple[pa.Table, dict[int, str]]:
    """Return the rows as text, and number -> text of lines with too many or too few values."""
    broken: dict[int, str] = {}

    def keep_broken_row(row: Any) -> str:
        """Note a line with too many or too few values, and let Arrow go on."""
        broken[row.number - 1 - spec.parse.header] = row.text
        return "skip"

    header_names = None if spec.parse.header else names
    table = pacsv.read_csv(
        io.BytesIO(data),
        # Only one thread knows the number of a broken line.
        read_options=pacsv.ReadOptions(use_threads=False, column_names=header_names),
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
