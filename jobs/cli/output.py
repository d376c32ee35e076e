"""How the command line prints: JSON envelopes, texts for people, errors without tracebacks.

A command passes its result to `print_result`. With ``--json`` that is printed as an envelope; for
people the template `templates/<kind>.txt` makes a text of the same data.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from tidegate.errors import TidegateError

from .errors import UNEXPECTED

if TYPE_CHECKING:
    from fractions import Fraction

    from jinja2 import Environment
    from rich.console import Console


# Grows when a field of an envelope changes its meaning or goes; new fields leave it as it is.
SCHEMA_VERSION = 1
_TICKS_PER_SECOND = 1_000_000
COLUMN_NOTES = {
    "nulls_filled": "rows without a declared column, read as null",
    "columns_left_out": "rows of objects with columns that the schema lacks, left out",
}
"""Count of rows whose columns were not as declared -> what it says."""
_ROW_NOTES = COLUMN_NOTES | {
    "flagged": "released late, flagged",
    "tardy": "read before a tardy barrier",
    "filtered": "left out by where",
}
_NUMBER = re.compile(r"-?[\d,]*\.?\d+(e[+-]\d+)?")


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
    """Print one line of text. Square brackets and names of emoji in it stay as they are."""
    console().print(text, markup=False, emoji=False)


def print_envelope(kind: str, data: Any) -> None:
    """Print `data` in the one JSON shape that every command's ``--json`` has."""
    typer.echo(
        json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": data}, default=str)
    )


def print_result(as_json: bool, kind: str, data: Any, text: str | None = None, **more: Any) -> None:
    """Print a result: the envelope of `data`, or a text for people.

    Args:
        as_json: print the envelope.
        kind: of the envelope; the template of this name makes the text.
        data: JSON-ready; the template knows it as `data`.
        text: a line to print instead of a template.
        more: what the template knows besides `data`.
    """
    if as_json:
        print_envelope(kind, data)
    elif text is not None:
        print_line(text)
    else:
        print_text(kind, data=data, **more)


def print_text(template: str, **values: Any) -> None:
    """Print what `templates/<template>.txt` makes of values; nothing if that is empty."""
    print_rendered(render_text(template, **values))


def render_text(template: str, **values: Any) -> str:
    """Return what `templates/<template>.txt` makes of values."""
    return _load_templates().get_template(f"{template}.txt").render(values)


def print_rendered(text: str) -> None:
    """Print a text that may have tables, which have escape codes on a terminal."""
    from rich.text import Text

    if text := text.rstrip("\n"):
        console().print(Text.from_ansi(text))


@cache
def _load_templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from rich.filesize import decimal

    templates = Environment(  # noqa: S701 - the texts are not HTML
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,  # a misspelt field must fail in the tests
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "age": format_age,
        "cell": _format_markdown_cell,
        "facts": _format_facts,
        "instant": format_short_instant,
        "joined": lambda lines: ", ".join(_list_lines(lines)),
        "lag": format_lag,
        "listed": _format_list,
        "number": "{:,}".format,
        # A broken bar would begin a cell.
        "oneline": lambda text: " ".join(str(text).replace("¦", "|").split()),
        "percent": "{:.1%}".format,
        "quoted": json.dumps,
        "row_equation": format_row_counts,
        "seconds": lambda ticks: "" if ticks is None else f"{ticks / _TICKS_PER_SECOND:,.0f} s",
        "share": format_share,
        "size": decimal,
        "table": _format_cells,
    }
    templates.globals |= {"column_notes": COLUMN_NOTES, "row_notes": _ROW_NOTES}
    return templates


def _format_markdown_cell(text: str) -> str:
    """Return a text in one line without signs that end a cell or code, or begin HTML."""
    line = " ".join(text.split()).replace("`", "'")
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _list_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _format_list(items: Iterable[Any], form: str, separator: str = ", ") -> str:
    """Format each item, a tuple as several values, and join them."""
    values = (item if isinstance(item, tuple) else (item,) for item in items)
    return separator.join(form.format(*one) for one in values)


def _format_facts(text: str) -> str:
    """Align lines of the form ``name: value``; those without a value are left out."""
    pairs = (line.partition(": ") for line in _list_lines(text))
    rows = [(f"{name}:", value) for name, _, value in pairs if value]
    return format_table(["", ""], rows) + "\n"


def _format_cells(text: str, title: str | None = None, always: bool = False) -> str:
    """Align the cells of lines, which a broken bar separates; the first line has the headings.

    Empty without other lines, unless `always` is set.
    """
    columns, *rows = ([cell.strip() for cell in line.split("¦")] for line in _list_lines(text))
    return format_table(columns, rows, title) + "\n" if rows or always else ""


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> str:
    """Return a table as text that ends with a line break; numbers are aligned to the right.

    Args:
        columns: headings; if all are empty, there is no heading.
        rows: a value per column.
        title: a line above the table.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [["" if value is None else str(value) for value in row] for row in rows]
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
        numeric = bool(cells) and all(_NUMBER.fullmatch(row[number]) for row in cells)
        justify: Any = "right" if numeric else "left"
        grid.add_column(Text(name), justify=justify, no_wrap=number == 0, overflow="fold")
    for row in cells:
        # As `Text`, because rich reads markup and names of emoji in plain strings.
        grid.add_row(*map(Text, row))
    screen = console()
    with screen.capture() as found:
        screen.print(grid)
    return found.get()


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
    """Format an instant, cut to whole seconds; the ends of time as the Streams page says them."""
    from tidegate.time_units import TICK_MAX, TICK_MIN, format_instant

    if ticks in (TICK_MIN, TICK_MAX):
        return "none yet" if ticks == TICK_MIN else "end of time"
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


def format_share(share: Fraction | float) -> str:
    """Format a share in percent, with four digits; one below a hundredth percent with one."""
    percent = float(share) * 100
    return f"{percent:.4g} %" if percent >= 0.01 or percent == 0 else f"{percent:.1g} %"


def format_lag(ticks: int | None) -> str:
    """Format a duration, rounded up to milliseconds from 1 s on, to seconds from 10 min on.

    Rounded up, because a lag that is a little too short misses its target. Empty for None.
    """
    from tidegate.time_units import format_duration

    if ticks is None:
        return ""
    unit = 1_000 if ticks >= _TICKS_PER_SECOND else 1
    if ticks >= 600 * _TICKS_PER_SECOND:
        unit = _TICKS_PER_SECOND
    return format_duration(-(-ticks // unit) * unit)


def _is_debugging() -> bool:
    return os.environ.get("TIDEGATE_DEBUG", "") not in ("", "0")


def _is_usage_error(error: Exception) -> bool:
    """Whether the error is one of click's, which prints it itself, with exit code 2."""
    return hasattr(error, "exit_code") and hasattr(error, "show")
