"""`tidegate tables` and `row`: the contents of output tables, and the path of one input row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, SpecArgument, StoreOption
from tidegate.jobs.cli.errors import BAD_FIELD

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.splice.row_trace import RowTrace


def show_tables(
    pipeline: SpecArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table. Default: list them.")
    ] = None,
    store: StoreOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all rows to a .parquet, .csv or .json file."),
    ] = None,
    current: Annotated[
        bool, typer.Option(help="Only the newest revision of each window result.")
    ] = False,
    at: Annotated[
        int | None,
        typer.Option(metavar="SLOT", help="The table after this slot, for example before a merge."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Print only the newest N rows.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the tables of a pipeline, show one, or write it to a file."""
    from tidegate.jobs.sinks.published_tables import export_table, read_table

    spec, log = arguments.open_spec_and_log(pipeline, store)
    if name is None:
        _list_tables(spec, log, as_json)
        return
    table = read_table(spec, log.store, name, current_only=current, at=at)
    if out is not None:
        export_table(table, out)
        facts = {"table": name, "rows": table.num_rows, "file": str(out)}
        text = f"{table.num_rows:,} rows of {name} in {out}"
        output.print_result(as_json, "export", facts, text)
    elif as_json:
        output.print_envelope("table", {"table": name, "rows": table.to_pylist()})
    else:
        _print_newest_rows(name, table, limit)


def _list_tables(spec: PipelineSpec, log: SlotLog, as_json: bool) -> None:
    from tidegate.jobs.sinks.published_tables import read_table

    counts = [
        (table, read_table(spec, log.store, table, columns=("_epoch",)).num_rows)
        for table in spec.table_names
    ]
    if as_json:
        data = [{"table": table, "rows": rows} for table, rows in counts]
        output.print_envelope("tables", data)
    else:
        output.print_table(["table", "rows"], counts)


def _print_newest_rows(name: str, table: pa.Table, limit: int) -> None:
    newest = table.slice(max(0, table.num_rows - limit))
    rows = [[_format_value(v, ", ") for v in row.values()] for row in newest.to_pylist()]
    output.print_table(newest.column_names, rows, grouped=False)
    output.print_line(f"{newest.num_rows:,} of {table.num_rows:,} rows of {name}")


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
    """Find an input row, by any of its fields, in all outputs.

    Shows where it was released, where it is late, dead, requested or merged, and in which window
    results it counts. Exit code 1 if no output has it.
    """
    from tidegate.jobs.splice.row_trace import trace_rows

    spec, log = arguments.open_spec_and_log(pipeline, store)
    traces = trace_rows(spec, log, dict(map(_parse_field, fields)))
    if as_json:
        output.print_envelope("row", [trace.model_dump(mode="json") for trace in traces])
    else:
        for trace in traces:
            _print_row_trace(trace)
        if not traces:
            output.print_line(
                "no output has such a row: it was not read yet, waits in the order buffer, or was"
                " dropped by policy"
            )
    raise typer.Exit(0 if traces else 1)


def _parse_field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BAD_FIELD(text=text)
    return name, value


def _print_row_trace(trace: RowTrace) -> None:
    values = ", ".join(f"{name}={v}" for name, v in trace.values.items() if v is not None)
    row = f"{trace.source}/{trace.partition}/{trace.seq}"
    output.print_line(f"{row}  {trace.event_time or ''}  {values}")
    for place in trace.places:
        details = [
            f"{name}: {_format_value(value, ' ')}"
            for name, value in place.detail.items()
            if value is not None
        ]
        output.print_line(f"  {place.output:<14} {place.state:<18} {', '.join(details)}")


def _format_value(value: Any, separator: str) -> Any:
    if isinstance(value, list):
        return separator.join(map(str, value))
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else value
