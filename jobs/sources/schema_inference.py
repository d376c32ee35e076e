"""Proposes a schema for a source from its objects (`tidegate infer`, `tidegate init`).

Nothing else uses the proposal: what counts is the schema that the user writes into the spec.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, islice
from typing import Any

import pyarrow as pa

from tidegate.jobs.engine.arrow_tables import ARROW_TYPES
from tidegate.jobs.rules.declared_values import TICKS_PER_UNIT
from tidegate.jobs.spec.row_rules import build_text_pattern

from .object_decoding import decompress_object, read_typed_object

_MAX_SAMPLE_ROWS = 10_000  # of JSON or CSV
_LEAST_GOOD_SHARE = 0.9  # of JSON lines, and of the values of an event time
_TIMESTAMP_PATTERN = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|z|[+-]\d{2}(:?\d{2})?)?"
# In order of preference.
_TYPE_PATTERNS = {
    "boolean": "true|false",
    "long": r"-?(0|[1-9][0-9]{0,17})",  # 01234 is a code of something, not a number
    "double": r"-?(0|[1-9][0-9]{0,14})([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "date": str(build_text_pattern("date")),
    "timestamp": _TIMESTAMP_PATTERN,
}
# 2001 and 2100 in seconds since 1970: no number is a plausible time in two units.
_EARLIEST_TIME, _LATEST_TIME = 978_307_200, 4_102_444_800


@dataclass(frozen=True, slots=True)
class ColumnSample:
    """What some objects show of one column.

    Attributes:
        kind: its declared type; empty if text formats show nulls only.
        texts: its values that are not null, as texts in reading order; a JSON string that is not
            a time ends with ``~``.
    """

    kind: str
    texts: list[str]

    def join(self, later: ColumnSample) -> ColumnSample:
        """Return the sample with that of later objects; its type takes both, at worst `string`."""
        kinds = {self.kind, later.kind} - {""}
        if len(kinds) > 1:
            numbers = ("int", "long"), ("int", "long", "float", "double")
            kinds = {next((wide[-1] for wide in numbers if kinds <= {*wide}), "string")}
        return ColumnSample("".join(kinds), self.texts + later.texts)

    @property
    def epoch_unit(self) -> str | None:
        """The unit in which all values can be times of 2001 to 2099, counted since 1970.

        `s`, `ms` or `us`; None if there is none, or the column is neither `long` nor `double`.
        """
        if self.kind not in ("long", "double") or not self.texts:
            return None
        low, high = min(map(float, self.texts)), max(map(float, self.texts))
        fits = (
            unit
            for unit, ticks in TICKS_PER_UNIT.items()
            if low * ticks >= _EARLIEST_TIME * 1e6 and high * ticks <= _LATEST_TIME * 1e6
        )
        return next(fits, None)

    def keep_times(self) -> ColumnSample:
        """Return the sample without values that are no times, if at least nine of ten are.

        A row without a time is a dead letter anyhow, so a few of them must not hide the rest.
        """
        for kind in ("long", "double", "date", "timestamp") if self.kind == "string" else ():
            fitting = [one for one in self.texts if _is_of_type(one, kind)]
            found = ColumnSample(kind, fitting)
            is_time = kind in ("date", "timestamp") or found.epoch_unit
            is_enough = len(fitting) >= _LEAST_GOOD_SHARE * len(self.texts)
            if is_time and fitting and is_enough:
                return found
        return self

    def count_misfits(self) -> tuple[str, int] | None:
        """Return the number type that at least nine of ten texts of a `string` column have.

        With it the number of the others. None for a column without such a type.
        """
        for kind in ("long", "double") if self.kind == "string" else ():
            misfits = sum(not _is_of_type(text, kind) for text in self.texts)
            if misfits <= (1 - _LEAST_GOOD_SHARE) * len(self.texts):
                return kind, misfits
        return None

    @property
    def lacks_zone(self) -> bool:
        """Whether a time in the sample names no time zone; a date never does."""
        return self.kind in ("timestamp", "date") and any(
            _parse_time(text).tzinfo is None for text in self.texts
        )

    def list_instants(self) -> list[int]:
        """Return the times in ticks, in reading order; a time without a zone counts as UTC.

        Raises:
            ValueError: the values are not times.
        """
        if unit := self.epoch_unit:
            return [round(float(text) * TICKS_PER_UNIT[unit]) for text in self.texts]
        times = map(_parse_time, self.texts)
        aware = (time if time.tzinfo else time.replace(tzinfo=UTC) for time in times)
        return [round(time.timestamp() * 1e6) for time in aware]

    def measure_disorder(self) -> int:
        """Return by how many ticks a row was behind the newest row before it, at most.

        0 without values.

        Raises:
            ValueError: the values are not times.
        """
        instants = self.list_instants()
        pairs = zip(accumulate(instants, max), instants, strict=True)
        return max((newest - instant for newest, instant in pairs), default=0)


def _is_of_type(text: str, kind: str) -> bool:
    """Whether a text has the form of a type; of a time also whether it exists, unlike 25:61."""
    if not re.fullmatch(_TYPE_PATTERNS[kind], text):
        return False
    if kind in ("date", "timestamp"):
        try:
            _parse_time(text)
        except ValueError:
            return False
    return True


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.upper())


def sample_columns(
    key: str, data: bytes, form: str, delimiter: str = ","
) -> dict[str, ColumnSample]:
    """Return the columns of an object, with the values of at most 10,000 rows.

    Args:
        key: the object's name, whose ending announces its compression.
        data: the object's bytes.
        form: a `format` of a source.
        delimiter: of a CSV object.

    Raises:
        ValueError: the bytes are not an object of this format, or they are a text without
            rows (of CSV: without a header).
        OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error: they are damaged.
    """
    data = decompress_object(key, data)
    if form == "json":
        return _sample_json(data)
    if form == "csv":
        return _sample_csv(data, delimiter)
    table = read_typed_object(data, form).slice(0, _MAX_SAMPLE_ROWS)
    return {name: _sample_typed_column(table[name]) for name in table.column_names}


def choose_delimiter(key: str, data: bytes) -> str:
    """Return what most likely separates the values of a CSV object: a comma, ; | or tab."""
    header = decompress_object(key, data)[:10_000].decode("utf-8", "replace").partition("\n")[0]
    return max(",;\t|", key=header.count)


def _sample_typed_column(column: pa.ChunkedArray) -> ColumnSample:
    kind = _to_declared_type(column.type)
    if kind == "timestamp":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    values = [value for value in column.to_pylist() if value is not None]
    return ColumnSample(
        kind, [v.isoformat() if isinstance(v, datetime) else str(v) for v in values]
    )


def _to_declared_type(arrow_type: Any) -> str:
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_timestamp(arrow_type):
        return "timestamp"
    if pa.types.is_decimal(arrow_type) and 0 <= arrow_type.scale <= arrow_type.precision <= 38:
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    return str(ARROW_TYPES.get(str(arrow_type), {}).get("declared", "string"))


def _sample_json(data: bytes) -> dict[str, ColumnSample]:
    lines = [line for line in data.split(b"\n") if line.strip()][:_MAX_SAMPLE_ROWS]
    parsed = list(map(_parse_json_object, lines))
    rows = [row for row in parsed if row is not None]
    # With more bad lines it is another form, such as an array of objects over several lines.
    if len(rows) < _LEAST_GOOD_SHARE * len(lines):
        raise ValueError(f"no JSON object: {lines[parsed.index(None)][:80]!r}")
    texts: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.items():
            column = texts.setdefault(name, [])
            if value is not None:
                column.append(_to_pattern_text(value))
    return _sample_texts(texts)


def _parse_json_object(line: bytes) -> dict[str, Any] | None:
    """Return None for another line; a driver makes it a dead letter, and goes on."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _to_pattern_text(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    # A number or a boolean in quotes is text; times have no other form in JSON.
    is_time = re.fullmatch(f"{_TIMESTAMP_PATTERN}|{_TYPE_PATTERNS['date']}", value)
    return value if is_time else f"{value}~"


def _sample_csv(data: bytes, delimiter: str) -> dict[str, ColumnSample]:
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter)
    names = next((line for line in reader if line), [])
    rows = [row for row in islice(reader, _MAX_SAMPLE_ROWS) if len(row) == len(names)]
    return _sample_texts({name: [row[n] for row in rows if row[n]] for n, name in enumerate(names)})


def _sample_texts(columns: Mapping[str, Iterable[str]]) -> dict[str, ColumnSample]:
    if not columns:
        raise ValueError("there is no row in it")
    texts = {name: list(values) for name, values in columns.items()}
    return {name: ColumnSample(_choose_type(own), own) for name, own in texts.items()}


def _choose_type(texts: list[str]) -> str:
    """Return the first type whose form all texts have; none if there are none."""
    fits = (kind for kind in _TYPE_PATTERNS if all(_is_of_type(text, kind) for text in texts))
    return next(fits, "string") if texts else ""
