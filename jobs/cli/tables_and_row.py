"""`tidegate tables`: what the output tables hold, on the screen or in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.jobs.splice.row_trace import RowTrace

from pathlib import Path


def show_tables(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="PIPELINE", help="Path of the pipeline's spec, or the name of a known pipeline."
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table. Default: list them.")
    ] = None,
    store: StoreOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all rows to a .parquet, .csv or .json file."),
    ] = None,
    current: Annotated[
        bool, typer.Option(help="Of a window only the newest revision of each result.")
    ] = False,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="SLOT",
            help="As it stood after this slot, for example before a merge. Default: now.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Rows shown on the screen: the newest so many.")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the tables of a pipeline, show one, or write it to a file."""
    spec = arguments.find_spec(pipeline)
    log = arguments.open_log(spec.name, store)
    from tidegate.jobs.sinks.published_tables import export_table, read_table

    if name is None:
        counts = [
            (table, read_table(spec, log.store, table, columns=("_epoch",)).num_rows)
            for table in spec.table_names
        ]
        if as_json:
            output.print_envelope(
                "tables", [{"table": table, "rows": rows} for table, rows in counts]
            )
        else:
            output.print_table(["table", "rows"], counts)
        return
    found = read_table(spec, log.store, name, current_only=current, at=at)
    if out is not None:
        export_table(found, out)
        written = {"table": name, "rows": found.num_rows, "file": str(out)}
        (
            output.print_envelope("export", written)
            if as_json
            else output.console().print(f"{found.num_rows:,} rows of {name} in {out}")
        )
    elif as_json:
        output.print_envelope("table", {"table": name, "rows": found.to_pylist()})
    else:
        _print_newest_rows(name, found, limit)


def _print_newest_rows(name: str, found: Any, limit: int) -> None:
    newest = found.slice(max(0, found.num_rows - limit))
    output.print_table(
        newest.column_names,
        [[_format_column_value(v) for v in row.values()] for row in newest.to_pylist()],
        grouped=False,
    )
    output.console().print(f"{newest.num_rows:,} of {found.num_rows:,} rows of {name}")


def _format_column_value(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else value


# `tidegate row`: where is my row? Released, late for which output, dead, asked for, merged, and in
# which results it counts.


def follow_row(
    pipeline: SpecArgument,
    fields: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE...", help="Columns of the row; also _source, _partition, _seq."
        ),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow an input row, by any of its fields, through all outputs.

    Exit code 1 if no output knows it.
    """
    spec = arguments.find_spec(pipeline)
    log = arguments.open_log(spec.name, store)
    from tidegate.jobs.splice.row_trace import trace_rows

    wanted = dict(_parse_field(text) for text in fields)
    found = trace_rows(spec, log, wanted)
    if as_json:
        output.print_envelope("row", [one.model_dump(mode="json") for one in found])
    else:
        for one in found:
            _print_row_trace(one)
        if not found:
            output.console().print(
                "no output knows such a row: it was not read yet, waits in the order buffer, or was"
                " dropped by policy"
            )
    raise typer.Exit(0 if found else 1)


def _parse_field(text: str) -> tuple[str, str]:
    from tidegate.errors import ConfigurationError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(
            f"{text!r} is no FIELD=VALUE",
            code="cli.bad_field",
            advice="write for example flight=1545",
        )
    return name, value


def _print_row_trace(one: RowTrace) -> None:
    screen = output.console()
    values = ", ".join(f"{name}={value}" for name, value in one.values.items() if value is not None)
    screen.print(f"{one.source}/{one.partition}/{one.seq}  {one.event_time or ''}  {values}")
    for place in one.places:
        detail = ", ".join(
            f"{name}: {_format_detail(value)}"
            for name, value in place.detail.items()
            if value is not None
        )
        screen.print(f"  {place.output:<14} {place.state:<18} {detail}")


def _format_detail(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else str(value)
