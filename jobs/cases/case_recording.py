"""Writes what a case leads to into its file, for review."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tidegate.checkpoints.row_counts import ROW_EQUATION
from tidegate.jobs.spec.pipeline import BUILT, EVENTS, LATE

from .case_file import Case
from .case_rows import format_value, quote_text
from .case_run import CaseOutcome
from .table_diff import list_shown_columns, list_values, make_sort_key

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.jobs.spec.pipeline import PipelineSpec

_RECORDED_COUNTS = (*ROW_EQUATION, "retained")
_NOT_RECORDED = {LATE: ("lateness_us", "frontier")}
"""Columns that a new expectation leaves out: they change with every change of the clock."""


def record_expectation(case: Case, outcome: CaseOutcome, spec: PipelineSpec) -> None:
    """Replace the section `expect` of a case, or add it; the rest of the file stays as it is.

    Tables, columns and counters are those of the old section. A new one has the late rows, the
    results of windows and streams, and the counters that are not 0.
    """
    lines = case.path.read_text("utf-8").splitlines()
    begin, end = _find_section(lines)
    new = list(_render_section(case, outcome, spec))
    case.path.write_text("\n".join([*lines[:begin], *new, *lines[end:]]) + "\n", "utf-8")


def _find_section(lines: Sequence[str]) -> tuple[int, int]:
    """Return the first line of the section `expect`, and the line behind it."""
    begin = next((i for i, line in enumerate(lines) if line.startswith("expect:")), len(lines))
    later = (i for i, line in enumerate(lines) if i > begin and _is_top_level(line))
    return begin, next(later, len(lines))


def _is_top_level(line: str) -> bool:
    return bool(line) and not line[0].isspace() and line[0] not in "-"


def _render_section(case: Case, outcome: CaseOutcome, spec: PipelineSpec) -> Iterator[str]:
    yield "expect:"
    if outcome.error is not None:
        yield f"  error: {outcome.error.code}"
    yield "  tables:"
    for table, columns in _choose_tables(case, outcome, spec).items():
        yield from _render_table(table, outcome.tables[table], columns)
    counts = _choose_counts(case, outcome)
    if counts:
        yield "  counters:"
    yield from _render_counts(counts, outcome)


def _choose_tables(
    case: Case, outcome: CaseOutcome, spec: PipelineSpec
) -> dict[str, Sequence[str]]:
    """Return table -> columns."""
    expected = case.expected
    if expected is not None and expected.tables:
        return {
            table: list(dict.fromkeys(name for row in rows for name in row.values))
            or _choose_columns(spec, table, outcome.tables[table])
            for table, rows in expected.tables.items()
        }
    built = [BUILT] if spec.release.glom is not None else []
    results = [*built, *spec.windows, *spec.streams] or [EVENTS]
    return {name: _choose_columns(spec, name, outcome.tables[name]) for name in (*results, LATE)}


def _choose_columns(spec: PipelineSpec, name: str, table: pa.Table) -> list[str]:
    window = spec.windows.get(name)
    if window is None:
        left_out: Sequence[str] = _NOT_RECORDED.get(name, ())
        return [column for column in list_shown_columns(table) if column not in left_out]
    own = ("window_start", "window_end", "revision", *window.aggregates)
    return [*window.keys, *own]


def _render_table(name: str, table: pa.Table, columns: Sequence[str]) -> Iterator[str]:
    kinds = [table.schema.field(column).type for column in columns]
    rows = [
        [format_value(value, kind) for value, kind in zip(row, kinds, strict=True)]
        for row in sorted(list_values(table, columns), key=make_sort_key)
    ]
    if not rows:
        yield f"    {name}: []"
        return
    yield f"    {name}:"
    for row in rows:
        pairs = zip(map(quote_text, columns), row, strict=True)
        yield f"      - {{{', '.join(f'{column}: {text}' for column, text in pairs)}}}"


def _choose_counts(case: Case, outcome: CaseOutcome) -> Iterable[str]:
    if case.expected is not None and case.expected.counters:
        return list(case.expected.counters)
    return [name for name in _RECORDED_COUNTS if outcome.counters.get(name)]


def _render_counts(names: Iterable[str], outcome: CaseOutcome) -> Iterator[str]:
    """Render counters: first those of all sources, then those of each one."""
    own: dict[str, list[str]] = {}
    for name in names:
        source, _, count = name.rpartition(".")
        own.setdefault(source, []).append(f"{count}: {outcome.counters.get(name, 0)}")
    for line in own.pop("", []):
        yield f"    {line}"
    for source, counts in own.items():
        yield f"    {source}: {{{', '.join(counts)}}}"
