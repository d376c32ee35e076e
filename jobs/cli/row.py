"""`tidegate row`: where is my row? Released, late for which output, dead, asked for, merged, and in which results it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.jobs.splice.trace import RowTrace

__all__ = ["follow_row"]


def follow_row(
    pipeline: SpecArgument,
    fields: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE...", help="Columns of the row; also _source, _partition, _seq.")
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow an input row, by any of its fields, through all outputs. Exit code 1 if no output knows it."""
    spec = context.find_spec(pipeline)
    log = context.open_log(spec.name, store)
    from tidegate.jobs.splice.trace import trace_rows

    wanted = dict(_parse_field(text) for text in fields)
    found = trace_rows(spec, log, wanted)
    if as_json:
        output.print_envelope("row", [one.model_dump(mode="json") for one in found])
    else:
        for one in found:
            _print_row_trace(one)
        if not found:
            output.console().print(
                "no output knows such a row: it was not read yet, waits in the order buffer, or was dropped by policy"
            )
    raise typer.Exit(0 if found else 1)


def _parse_field(text: str) -> tuple[str, str]:
    from tidegate.jobs.spec.errors import ConfigurationError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"{text!r} is no FIELD=VALUE", code="cli.bad_field", advice="write for example flight=1545")
    return name, value


def _print_row_trace(one: RowTrace) -> None:
    screen = output.console()
    values = ", ".join(f"{name}={value}" for name, value in one.values.items() if value is not None)
    screen.print(f"{one.source}/{one.partition}/{one.seq}  {one.event_time or ''}  {values}")
    for place in one.places:
        detail = ", ".join(f"{name}: {_format_detail(value)}" for name, value in place.detail.items() if value is not None)
        screen.print(f"  {place.output:<14} {place.state:<18} {detail}")


def _format_detail(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else str(value)
