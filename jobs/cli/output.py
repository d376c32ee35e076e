"""How the command line speaks.

Tables and sentences for people, one envelope for machines, errors without tracebacks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from tidegate.errors import TidegateError

SCHEMA_VERSION = 1
_TICKS_PER_SECOND = 1_000_000


class ErrorReportingGroup(TyperGroup):
    """The outermost group.

    Turns errors into words and exit codes (0 fine, 1 poison, 2 configuration, 3 transient, 4
    fenced).
    """

    def invoke(self, ctx: Any) -> Any:
        from tidegate.errors import TidegateError

        try:
            return super().invoke(ctx)
        except TidegateError as error:
            if _is_debugging():
                raise
            print_error(error)
            raise typer.Exit(error.failure_class.exit_code) from None
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except BrokenPipeError:  # `tidegate ... | head`
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            if _is_debugging() or _is_usage_error(error):
                raise
            print_error(_wrap_unexpected_error(error))
            raise typer.Exit(1) from None


def console(*, stderr: bool = False) -> Console:
    """A rich console on the current stream.

    Wide when nobody looks, so that lines can be searched.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, highlight=False, soft_wrap=not stream.isatty(), width=width)


def print_envelope(kind: str, data: Any) -> None:
    """Print the one JSON shape that every reading command has."""
    typer.echo(
        json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, "data": data}, default=str)
    )


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    grouped: bool = True,
) -> None:
    """Print a table; numbers stand to the right, with thousands apart if `grouped`.

    Without names it is a list of facts.
    """
    from rich.table import Table

    found = [list(row) for row in rows]
    named = any(columns)
    grid = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=named,
    )
    for number, name in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in found) and bool(found)
        grid.add_column(
            name, justify="right" if numeric else "left", no_wrap=number == 0, overflow="fold"
        )
    for row in found:
        grid.add_row(*(_format_table_cell(value, grouped) for value in row))
    console().print(grid)
    console().print()


def print_error(error: TidegateError) -> None:
    """What happened, what was kept, what to do next.

    On standard error, and as an envelope where JSON was asked for.
    """
    from rich.text import Text

    if "--json" in sys.argv:
        print_envelope("error", error.as_dict())
    screen = console(stderr=True)
    screen.print(Text.assemble((f"{error.failure_class.value} error: ", "bold red"), error.message))
    if error.kept:
        screen.print(Text.assemble(("kept: ", "bold"), error.kept))
    if error.advice:
        screen.print(Text.assemble(("next: ", "bold"), error.advice))


def format_short_instant(ticks: int | None) -> str:
    """An instant for people, to the second where that says enough."""
    from tidegate.time_units import format_instant

    text = format_instant(ticks)
    return text.split(".")[0] + "Z" if "." in text else text


def format_age(ticks: int | None, now: int | None = None) -> str:
    """How long ago, in the two largest units; nothing for no instant."""
    from tidegate.time_units import format_duration

    if ticks is None:
        return ""
    gone = max(0, (time.time_ns() // 1000 if now is None else now) - ticks)
    unit = (
        1_000
        if gone < _TICKS_PER_SECOND
        else _TICKS_PER_SECOND
        if gone < 3600 * _TICKS_PER_SECOND
        else 60 * _TICKS_PER_SECOND
    )
    return format_duration(gone // unit * unit) if gone >= unit else "0s"


def format_size(count: int) -> str:
    """Bytes as people read them."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _format_table_cell(value: object, grouped: bool) -> str:
    if value is None:
        return ""
    return (
        f"{value:,}"
        if grouped and isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )


def _is_debugging() -> bool:
    return os.environ.get("TIDEGATE_DEBUG", "") not in ("", "0")


def _is_usage_error(error: Exception) -> bool:
    """Usage errors are worded by the library itself, with exit code 2."""
    return hasattr(error, "exit_code") and hasattr(error, "show")


def _wrap_unexpected_error(error: Exception) -> TidegateError:
    from tidegate.errors import PoisonError

    return PoisonError(
        f"{type(error).__name__}: {error}",
        code="cli.unexpected",
        advice=(
            "this is a defect of tidegate; run again with TIDEGATE_DEBUG=1 for the traceback and"
            " report it"
        ),
    )
