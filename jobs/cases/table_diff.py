"""Compares what a case has led to with what it expects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.errors import TidegateError
from tidegate.jobs.engine.arrow_tables import convert_to_ticks, list_rows, replace_column

from .case_file import Case, Expectation
from .case_rows import CaseRow, convert_value, format_value
from .case_run import CaseOutcome
from .errors import CASE_INVALID

_MOST_EQUAL_ROWS = 20  # that are shown beside those that differ


@dataclass(frozen=True)
class Difference:
    """Something that is not as expected.

    Attributes:
        place: file and line of what was expected.
        summary: a line.
        rows: a table of lines: those that are missing begin with ``-``, others that are there
            instead with ``+``.
    """

    place: str
    summary: str
    rows: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.place}: {self.summary}", *(f"  {row}" for row in self.rows)])


def find_differences(case: Case, outcome: CaseOutcome) -> list[Difference]:
    """Return what is not as a case expects.

    Raises:
        ConfigurationError: an expected value is not of the type of its column.
    """
    expected = case.expected
    if expected is None:
        text = "nothing is expected yet: --record writes what happens, for review"
        return [Difference(f"{case.path}:1", text)]
    found = list(_compare_errors(case, expected, outcome.error))
    findings: list[str] = []
    for table, rows in expected.tables.items():
        try:
            found += _compare_table(expected, table, rows, outcome.tables[table])
        except ValueError as error:
            findings.append(str(error))
    if findings:
        raise CASE_INVALID(findings="\n".join(findings))
    return found + list(_compare_counters(expected, outcome))


def _compare_errors(
    case: Case, expected: Expectation, error: TidegateError | None
) -> Iterator[Difference]:
    code = error and error.code
    if code == expected.error:
        return
    place = f"{case.path}:1"
    if error is not None:
        yield Difference(place, f"the run ended with {code}: {error.message}")
    else:
        yield Difference(place, f"the run was to end with {expected.error}; it did not")


def _compare_counters(expected: Expectation, outcome: CaseOutcome) -> Iterator[Difference]:
    for name, rows in expected.counters.items():
        found = outcome.counters.get(name, 0)
        if found != rows:
            place = expected.counter_places[name]
            yield Difference(place, f"counter {name} is {found}; expected {rows}")


def _compare_table(
    expected: Expectation, table: str, rows: Sequence[CaseRow], found: pa.Table
) -> list[Difference]:
    place = expected.table_places[table]
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    if not rows:
        names = list_shown_columns(found)
    kinds = {name: found.schema.field(name).type for name in names}
    wanted = [_convert_row(row, kinds) for row in rows]
    missing, more, equal = divide_rows(wanted, list_values(found, names))
    if not missing and not more:
        return []
    parts = [f"{len(missing)} missing"] if missing else []
    parts += [f"{len(more)} not expected"] if more else []
    summary = f"table {table}: {' and '.join(parts)}"
    marked = [*(("-", row) for row in missing), *(("+", row) for row in more)]
    marked += [(" ", row) for row in equal[:_MOST_EQUAL_ROWS]]
    return [Difference(place, summary, format_rows(marked, kinds))]


def _convert_row(row: CaseRow, kinds: dict[str, pa.DataType]) -> list[Any]:
    found = []
    for name, kind in kinds.items():
        try:
            found.append(convert_value(row.values.get(name), kind))
        except ValueError as error:
            raise ValueError(f"{row.place}: {name}: {error}") from None
    return found


def list_shown_columns(table: pa.Table) -> list[str]:
    """Return the columns of a table but for those that say where its rows come from."""
    return [name for name in table.schema.names if not name.startswith("_")]


def list_values(table: pa.Table, names: Sequence[str]) -> list[list[Any]]:
    """Return the rows of a table with these columns, as `convert_value` gives values."""
    table = table.select(list(names))
    for field in table.schema:
        if pa.types.is_timestamp(field.type):
            table = replace_column(table, field.name, convert_to_ticks(table[field.name]))
    return [[row[name] for name in names] for row in list_rows(table)]


def divide_rows(
    wanted: Iterable[list[Any]], found: Iterable[list[Any]]
) -> tuple[list[list[Any]], list[list[Any]], list[list[Any]]]:
    """Return the rows that are only wanted, only found, and both. Their order does not count."""
    more, missing, equal = list(found), [], []
    for row in wanted:
        at = next((i for i, other in enumerate(more) if _has_equal_values(row, other)), None)
        if at is None:
            missing.append(row)
        else:
            equal.append(more.pop(at))
    return missing, more, equal


def _has_equal_values(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_has_equal_values, left, right))
    if isinstance(left, float) and isinstance(right, float):
        # The order of a sum decides its last digits.
        is_close = math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
        return is_close or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def make_sort_key(row: Sequence[Any]) -> list[tuple[bool, Any]]:
    """Return what rows of one table are sorted by; nulls come first."""
    return [(value is not None, value) for value in row]


def format_rows(
    marked: Iterable[tuple[str, list[Any]]], kinds: dict[str, pa.DataType]
) -> list[str]:
    """Return rows in columns, sorted by their values; each line begins with its mark."""
    texts = [
        [mark, *(format_value(value, kinds[name]) for name, value in zip(kinds, row, strict=True))]
        for mark, row in sorted(marked, key=lambda one: (make_sort_key(one[1]), one[0]))
    ]
    lines = [[" ", *kinds], *texts]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
