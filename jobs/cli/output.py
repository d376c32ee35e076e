"""How the command line prints: tables and sentences, JSON envelopes, errors without tracebacks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from tidegate.errors import TidegateError

from .errors import UNEXPECTED

if TYPE_CHECKING:
    from rich.console import Console


# Grows when a field of an envelope changes its meaning or goes; new fields leave it as it is.
SCHEMA_VERSION = 1
_TICKS_PER_SECOND = 1_000_000
COLUMN_NOTES = {
    "nulls_filled": "rows without a declared column, read as null",
    "columns_left_out": "rows of objects with columns that the schema lacks, left out",
}
"""Count of rows whose columns were not as declared -> what it says."""


class ErrorReportingGroup(TyperGroup):
    """The outermost command group: prints errors and turns them into exit codes.

    0 success, 1 poison or a defect, 2 configuration or usage, 3 transient, 4 fenced, 130 Ctrl-C.
    With TIDEGATE_DEBUG set, errors are raised as they are.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn an error into its exit code."""
        try:
            return super().invoke(ctx)
        except TidegateError as error:
            if _is_debugging():
                raise
            print_error(error)
            raise typer.Exit(error.failure_class.exit_code) from None
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None  # 128 and the number of SIGINT, as shells report it
        # The reader has closed the pipe, which Python would report on stderr at its end.
        except BrokenPipeError:  # `tidegate ... | head`
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            if _is_debugging() or _is_usage_error(error):
                raise
            print_error(UNEXPECTED(kind=type(error).__name__, text=error))
            raise typer.Exit(1) from None


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on the current stream.

    If the stream is not a terminal, lines stay long, so that `grep` finds whole sentences.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, highlight=False, soft_wrap=not stream.isatty(), width=width)


def print_line(text: object) -> None:
    """Print one line of text. Square brackets in it are not read as markup."""
    console().print(text, markup=False)


def print_envelope(kind: str, data: Any) -> None:
    """Print `data` in the one JSON shape that every command's ``--json`` has."""
    typer.echo(
        json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": data}, default=str)
    )


def print_result(as_json: bool, kind: str, data: Any, text: str) -> None:
    """Print a result that people read as one line: the envelope of `data`, or `text`."""
    if as_json:
        print_envelope(kind, data)
    else:
        print_line(text)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    grouped: bool = True,
) -> None:
    """Print a table, with numbers aligned to the right.

    Args:
        columns: headings; if all are empty, no heading is printed.
        rows: a value per column.
        title: printed above the table.
        grouped: separate the thousands of integers.
    """
    from rich.table import Table

    cells = [list(row) for row in rows]
    grid = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(columns),
    )
    for number, name in enumerate(columns):
        # An empty table has no numbers: its headings are aligned as text.
        numeric = bool(cells) and all(isinstance(row[number], int | float) for row in cells)
        justify: Any = "right" if numeric else "left"
        grid.add_column(name, justify=justify, no_wrap=number == 0, overflow="fold")
    for row in cells:
        grid.add_row(*(_format_table_cell(value, grouped) for value in row))
    console().print(grid)
    console().print()


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, a line each."""
    print_table(["", ""], [(f"{name}:", value) for name, value in facts])


def print_error(error: TidegateError) -> None:
    """Print on standard error what happened, what was kept and what to do next.

    With ``--json`` the error is also printed as an envelope on standard output.
    """
    from rich.text import Text

    # From the arguments: the command that knows its options may have failed before reading them.
    if "--json" in sys.argv:
        print_envelope("error", error.as_dict())
    screen = console(stderr=True)
    screen.print(Text.assemble((f"{error.failure_class.value} error: ", "bold red"), error.message))
    for name, text in (("kept", error.kept), ("next", error.advice)):
        if text:
            screen.print(Text.assemble((f"{name}: ", "bold"), text))


def format_row_counts(rows: dict[str, Any] | None) -> str:
    """Format the row equation of a manifest's counters: rows read = rows by disposition.

    ``none`` without counters.
    """
    if rows is None:
        return "none"
    parts = [
        f"{rows[k]:,} {k.replace('_', '-')}"
        for k in ("released", "late", "rejected", "dead_lettered", "retained")
    ]
    parts.append(f"{sum(rows['dropped'].values()):,} dropped")
    if quarantined := rows.get("rule_quarantined"):
        parts.append(f"{quarantined:,} quarantined by rules")
    if filtered := rows.get("filtered"):
        parts.append(f"{filtered:,} filtered")
    return f"{rows['read']:,} read = " + " + ".join(parts)


def format_short_instant(ticks: int | None) -> str:
    """Format an instant, cut to whole seconds."""
    from tidegate.time_units import format_instant

    text = format_instant(ticks)
    return text.split(".")[0] + "Z" if "." in text else text


def format_age(ticks: int | None, now: int | None = None) -> str:
    """Format the time from `ticks` to `now` (ticks; None: the clock) in its two largest units.

    Empty without an instant.
    """
    from tidegate.time_units import format_duration

    if ticks is None:
        return ""
    age = max(0, (time.time_ns() // 1000 if now is None else now) - ticks)
    # Cut to two units: they are enough to judge an age.
    if age < _TICKS_PER_SECOND:
        unit = 1_000
    elif age < 3600 * _TICKS_PER_SECOND:
        unit = _TICKS_PER_SECOND
    else:
        unit = 60 * _TICKS_PER_SECOND
    return format_duration(age // unit * unit) if age >= unit else "0s"


def format_size(count: int) -> str:
    """Format a number of bytes with its decimal unit, for example ``1.5 MB``."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _format_table_cell(value: object, grouped: bool) -> str:
    if value is None:
        return ""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if grouped and is_count else str(value)


def _is_debugging() -> bool:
    return os.environ.get("TIDEGATE_DEBUG", "") not in ("", "0")


def _is_usage_error(error: Exception) -> bool:
    """Whether the error is one of click's, which prints it itself, with exit code 2."""
    return hasattr(error, "exit_code") and hasattr(error, "show")
