"""Objects of other formats as Parquet.

Decoded once, when they are first looked at, and read like any other object afterwards.

Typed formats (Avro, ORC, Parquet with renamed columns) keep their own types; the mover casts them,
as it does for Parquet. Text (JSON lines, CSV) is cast here, column by column. A row that cannot be
decoded has no values, the reason in `BAD_REASON` and its text in `BAD_TEXT`: it becomes a dead
letter like any other row without an event time, and its neighbours are untouched.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tidegate.jobs.sources.avro import read_avro_file
from tidegate.jobs.sources.parquet_footers import BadObject, read_parquet_table
from tidegate.jobs.spec.cast_rules import EXACT_BITS, build_text_pattern
from tidegate.jobs.spec.pipeline import SourceSpec

BAD_REASON: Final = "_why"
BAD_TEXT: Final = "_text"
_DUCKDB_TYPES: Final = {
    "long": "bigint",
    "timestamp": "timestamptz",
    "binary": "blob",
}  # where the names differ
_ZONED_TIMESTAMP: Final = (
    r"^\s*\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|z|[+-]\d{2}(:?\d{2})?)\s*$"
)
_NAIVE_TIMESTAMP: Final = r"^\s*\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?\s*$"
_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER: Final = r"^\s*[+-]?\d+\s*$"
_LONG_FRACTION: Final = (
    r"[0-9.]{17}|[0-9][eE][+-]?[0-9]|0[.]0000"  # a line that may hold such a fraction
)
_MAX_DIGITS: Final = 80
_MICROS_PER_UNIT: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}

_DECODE_ERRORS = (
    pa.ArrowException,
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    duckdb.Error,
)  # a ValueError is bz2's


def needs_decoding(spec: SourceSpec) -> bool:
    """Whether objects of this source are read through a decoded copy."""
    return (
        spec.format != "parquet"
        or bool(spec.evolution.renamed)
        or (spec.table is not None and spec.table.format == "delta")
    )


def decode_to_parquet(key: str, data: bytes, spec: SourceSpec, out: Path) -> BadObject | None:
    """Write an object as one Parquet file.

    Returns why it cannot be read, if it cannot; then there is no file.
    """
    if not data:
        return BadObject("empty_object", "the object has no bytes")
    try:
        table = _add_folder_columns(
            key, _FORMAT_READERS[spec.format](decompress_object(key, data), spec), spec
        )
        both = [
            new
            for old, new in spec.evolution.renamed.items()
            if {old, new} <= set(table.column_names)
        ]
        table = table.rename_columns(
            [spec.evolution.renamed.get(name, name) for name in table.column_names]
        )
    except _DECODE_ERRORS as error:
        return _describe_unreadable(spec, error)
    if both:
        return BadObject(
            "unknown_column", f"both the old and the new name of {', '.join(both)} are there"
        )
    try:
        pq.write_table(
            table,
            out,
            coerce_timestamps="us",
            allow_truncated_timestamps=True,
            compression="snappy",
        )
    except (
        pa.ArrowException,
        ValueError,
    ) as error:  # a time beyond all time; a full disk is an OSError, and no object's fault
        out.unlink(missing_ok=True)
        return _describe_unreadable(spec, error)
    return None


def _add_folder_columns(key: str, table: pa.Table, spec: SourceSpec) -> pa.Table:
    """With the values that stand in the names of a table's folders only."""
    for name, value in parse_folder_values(key).items() if spec.table is not None else ():
        if name not in table.column_names:
            table = table.append_column(name, pa.array([value] * table.num_rows, pa.string()))
    return table


def _describe_unreadable(spec: SourceSpec, error: Exception) -> BadObject:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return BadObject("truncated", f"the object cannot be read as {spec.format}: {said[:200]}")


def parse_folder_values(key: str) -> dict[str, str | None]:
    """Values that stand in the names of folders, as ``column=value``.

    The partition columns of a table.

    >>> parse_folder_values("@lake/day=2026-01-01/shop=a%20b/part-0.parquet")
    {'day': '2026-01-01', 'shop': 'a b'}
    """
    pairs = [piece.partition("=") for piece in key.split("/")[:-1] if "=" in piece]
    return {
        unquote(name): None if value == _NULL_FOLDER else unquote(value) for name, _, value in pairs
    }


def decompress_object(key: str, data: bytes) -> bytes:
    """The bytes inside, by the ending of the key."""
    for ending, inflate in _INFLATE_BY_ENDING.items():
        if key.endswith(ending):
            return inflate(data)
    return data


def _make_stream_inflater(codec: str) -> Callable[[bytes], bytes]:
    def inflate_stream(data: bytes) -> bytes:
        with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
            return bytes(stream.read())

    return inflate_stream


_INFLATE_BY_ENDING: Final[dict[str, Callable[[bytes], bytes]]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".zst": _make_stream_inflater("zstd"),
    ".lz4": _make_stream_inflater("lz4"),
}


def _read_parquet_object(data: bytes, _spec: SourceSpec) -> pa.Table:
    return read_parquet_table(io.BytesIO(data))


def _read_orc_object(data: bytes, _spec: SourceSpec) -> pa.Table:
    import pyarrow.orc as orc

    return orc.ORCFile(io.BytesIO(data)).read()


def _read_avro_object(data: bytes, _spec: SourceSpec) -> pa.Table:
    return read_avro_file(data)


def _read_json_object(data: bytes, spec: SourceSpec) -> pa.Table:
    """One JSON object a line; empty lines are no rows, and do not count."""
    lines = data.split(b"\n")
    numbers = np.flatnonzero(
        np.fromiter((bool(line.strip()) for line in lines), dtype=bool, count=len(lines))
    )
    texts = pa.array([lines[n].decode("utf-8", "replace") for n in numbers], pa.string())
    known = [*spec.columns, *spec.evolution.renamed]
    fields = ", ".join(
        f"""CASE WHEN ok THEN line->>'$."{name}"' END AS "{name}" """ for name in known
    )
    strange = (
        "list_filter(CASE WHEN ok THEN json_keys(line) END, lambda k: NOT list_contains($known, k))"
    )
    with _connect_duckdb() as db:
        db.register("lines", pa.table({"line": texts}))
        found: Any = db.sql(
            f"""WITH judged AS (
                SELECT line, CASE WHEN json_valid(line) THEN json_type(line) = 'OBJECT' ELSE false END AS ok FROM lines)
            SELECT line AS {BAD_TEXT}, {fields},
                CASE WHEN NOT ok THEN 'the line is not a JSON object'
                     WHEN len({strange}) > 0 THEN 'not in the schema: ' || array_to_string({strange}, ', ') END AS {BAD_REASON}
            FROM judged""",
            params={"known": known},
        ).to_arrow_table()
    if spec.evolution.added == "ignore":
        malformed = pa.compute.equal(found[BAD_REASON], "the line is not a JSON object")
        found = found.set_column(
            found.schema.get_field_index(BAD_REASON),
            BAD_REASON,
            pa.compute.if_else(malformed, found[BAD_REASON], None),
        )
    return _cast_texts(_merge_renamed_columns(_restore_exact_numbers(found, spec), spec), spec)


class _JsonNumber(str):
    """A number of JSON as it was written."""

    def to_plain_text(self) -> str:
        """Without an exponent, as long as that is no longer than any column."""
        value = Decimal(self)
        return format(value, "f") if abs(value.adjusted()) <= _MAX_DIGITS else str(self)


def _restore_exact_numbers(found: pa.Table, spec: SourceSpec) -> pa.Table:
    """Fractions with more digits than a double holds, as they were written.

    DuckDB gives them rounded, or with an exponent.
    """
    renamed = spec.evolution.renamed
    kinds = {
        name: spec.columns[renamed.get(name, name)]
        for name in found.column_names
        if name not in (BAD_TEXT, BAD_REASON)
    }
    wanted = {
        name: kind for name, kind in kinds.items() if kind == "string" or kind.startswith("decimal")
    }
    suspects = np.flatnonzero(
        pa.compute.match_substring_regex(found[BAD_TEXT], _LONG_FRACTION)
        .combine_chunks()
        .to_numpy(zero_copy_only=False)
    )
    if not wanted or not suspects.size:
        return found
    values = {name: found[name].to_pylist() for name in wanted}
    for row in suspects:
        try:
            parsed = json.loads(found[BAD_TEXT][int(row)].as_py(), parse_float=_JsonNumber)
        except (ValueError, RecursionError):
            continue  # DuckDB takes a little more for JSON
        for name, kind in wanted.items():
            number = parsed.get(name) if isinstance(parsed, dict) else None
            if isinstance(number, _JsonNumber):
                values[name][row] = str(number) if kind == "string" else number.to_plain_text()
    for name, column in values.items():
        found = found.set_column(
            found.schema.get_field_index(name), name, pa.array(column, pa.string())
        )
    return found


def _merge_renamed_columns(found: pa.Table, spec: SourceSpec) -> pa.Table:
    """Values under old names join those under the new one.

    In text a rename happens from row to row.
    """
    for old, new in spec.evolution.renamed.items():
        joined = pa.compute.coalesce(found[new], found[old])
        found = found.set_column(found.schema.get_field_index(new), new, joined).drop_columns([old])
    return found


def _read_csv_header(data: bytes, spec: SourceSpec) -> list[str]:
    """The names in the first line, as any reader of CSV has them.

    Raises:
        ValueError: they are none.
    """
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
    try:
        lines = csv.reader(text, delimiter=spec.parse.delimiter, quotechar=spec.parse.quote)
        names = next((line for line in lines if line), [])
    except csv.Error as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    if len(set(names)) < len(names):
        raise ValueError("the header names a column twice")
    return names


def _read_csv_object(data: bytes, spec: SourceSpec) -> pa.Table:
    broken: dict[int, str] = {}

    def keep_broken_row(row: Any) -> str:
        broken[row.number - 1 - spec.parse.header] = row.text
        return "skip"

    names = _read_csv_header(data, spec) if spec.parse.header else list(spec.columns)
    table = pacsv.read_csv(
        io.BytesIO(data),
        # One thread: a broken line is then known by number.
        read_options=pacsv.ReadOptions(
            use_threads=False, column_names=None if spec.parse.header else names
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
    if table.column_names != names:  # the type of a column that has another name would be guessed
        raise ValueError(
            f"the header reads as {', '.join(names)} or as {', '.join(table.column_names)}"
        )
    rename = spec.evolution.renamed
    table = table.rename_columns([rename.get(n, n) for n in names])
    texts = pa.table(
        {
            name: column.cast(pa.string())
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    )
    texts = texts.append_column(BAD_REASON, pa.nulls(texts.num_rows, pa.string()))
    joined = [pa.compute.fill_null(texts[n], "") for n in table.column_names]
    texts = texts.append_column(
        BAD_TEXT, pa.compute.binary_join_element_wise(*joined, spec.parse.delimiter)
    )
    return _cast_texts(_insert_broken_rows(texts, broken), spec)


def _insert_broken_rows(texts: pa.Table, broken: dict[int, str]) -> pa.Table:
    """Lines that are no rows, put back where they stood."""
    if not broken:
        return texts
    why = "the line has more or fewer values than there are columns"
    nothing = {name: pa.nulls(len(broken), pa.string()) for name in texts.column_names}
    rows = pa.table(
        {
            **nothing,
            BAD_REASON: pa.array([why] * len(broken)),
            BAD_TEXT: pa.array(list(broken.values())),
        }
    )
    total = texts.num_rows + len(broken)
    places = np.array(sorted(broken), dtype=np.int64)
    good = np.setdiff1d(np.arange(total), places)
    order = np.empty(total, dtype=np.int64)
    order[good], order[places] = np.arange(texts.num_rows), texts.num_rows + np.arange(len(broken))
    return pa.concat_tables([texts, rows]).take(pa.array(order))


def _cast_texts(texts: pa.Table, spec: SourceSpec) -> pa.Table:
    """Texts cast to the declared types.

    A value that does not fit takes its whole row's and says so in `BAD_REASON`.
    """
    present = {name: kind for name, kind in spec.columns.items() if name in texts.column_names}
    casts = {name: _build_cast_sql(f'"{name}"', kind, spec) for name, kind in present.items()}
    faults = [
        f"""WHEN "{name}" IS NOT NULL AND {cast} IS NULL THEN {_build_complaint_sql(name, kind, spec)}"""
        for name, (kind, cast) in ((n, (present[n], casts[n])) for n in present)
        if kind != "string"
    ]
    why = f"CASE WHEN {BAD_REASON} IS NOT NULL THEN {BAD_REASON} {' '.join(faults)} END"
    columns = ", ".join(f'CASE WHEN why IS NULL THEN typed."{n}" END AS "{n}"' for n in present)
    typed = ", ".join(f'{cast} AS "{name}"' for name, cast in casts.items())
    strangers = [
        name
        for name in texts.column_names
        if name not in present and name not in (BAD_REASON, BAD_TEXT)
    ]
    extra = "".join(f', "{name}"' for name in strangers)
    with _connect_duckdb() as db:
        db.register("texts", texts.append_column("_n", pa.array(np.arange(texts.num_rows))))
        return db.sql(
            f"""WITH typed AS (SELECT {typed}{extra}, {why} AS why, {BAD_TEXT}, _n FROM texts)
            SELECT {columns}{extra}, why AS {BAD_REASON}, CASE WHEN why IS NOT NULL THEN {BAD_TEXT} END AS {BAD_TEXT} FROM typed ORDER BY _n"""
        ).to_arrow_table()


def _build_complaint_sql(name: str, kind: str, spec: SourceSpec) -> str:
    if kind == "timestamp" and spec.parse.timestamps == "iso" and spec.timezone is None:
        zone = f"""'{name} has no time zone, and the source has no "timezone": '"""
        return f"""CASE WHEN regexp_matches("{name}", '{_NAIVE_TIMESTAMP}') THEN {zone} ELSE '{name} is no timestamp: ' END || "{name}" """
    return f"""'{name} is no {kind}: ' || "{name}" """


def _build_cast_sql(column: str, kind: str, spec: SourceSpec) -> str:
    target = _DUCKDB_TYPES.get(kind, kind)
    if kind == "string":
        return column
    if kind == "binary":
        return f"TRY(from_base64({column}))"
    if kind != "timestamp":
        return _build_plain_cast_sql(column, kind, target)
    if spec.parse.timestamps != "iso":
        ticks = (
            f"round(try_cast({column} AS DECIMAL(30, 6)) *"
            f" {_MICROS_PER_UNIT[spec.parse.timestamps]})"
        )
        return f"TRY(make_timestamptz(CAST({ticks} AS BIGINT)))"
    naive = (
        "NULL"
        if spec.timezone is None
        else f"try_cast({column} AS TIMESTAMP) AT TIME ZONE '{spec.timezone}'"
    )
    return f"""CASE WHEN regexp_matches({column}, '{_ZONED_TIMESTAMP}') THEN try_cast({column} AS TIMESTAMPTZ)
        WHEN regexp_matches({column}, '{_NAIVE_TIMESTAMP}') THEN {naive} END"""


def _build_plain_cast_sql(column: str, kind: str, target: str) -> str:
    """Text in the plain form of its type, with spaces around it at most.

    DuckDB would round what has too many digits.
    """
    form = _WHOLE_NUMBER if kind in ("int", "long") else rf"^\s*({build_text_pattern(kind)})\s*$"
    cast = f"try_cast({column} AS {target})"
    if kind in EXACT_BITS:
        whole = (
            f"regexp_matches({column}, '{_WHOLE_NUMBER}') AND abs(try_cast({column} AS HUGEINT)) <="
            f" {2 ** EXACT_BITS[kind]}"
        )
        cast = (
            f"CASE WHEN {whole} OR NOT regexp_matches({column}, '{_WHOLE_NUMBER}') AND"
            f" isfinite({cast}) THEN {cast} END"
        )
    return f"CASE WHEN regexp_matches({column}, '{form}') THEN {cast} END"


def _connect_duckdb() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect()
    database.execute(
        "SET TimeZone = 'UTC'; SET threads = 1; SET autoinstall_known_extensions = false"
    )
    return database


_FORMAT_READERS: Final[dict[str, Callable[[bytes, SourceSpec], pa.Table]]] = {
    "parquet": _read_parquet_object,
    "orc": _read_orc_object,
    "avro": _read_avro_object,
    "json": _read_json_object,
    "csv": _read_csv_object,
}
