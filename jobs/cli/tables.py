"""`tidegate tables`: what the output tables hold, on the screen or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import JsonOption, StoreOption

__all__ = ["show_tables"]


def show_tables(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="Path of the pipeline's spec, or the name of a known pipeline.")
    ],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A table. Default: list them.")] = None,
    store: StoreOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all rows to a .parquet, .csv or .json file.")] = None,
    current: Annotated[bool, typer.Option(help="Of a window only the newest revision of each result.")] = False,
    at: Annotated[
        int | None, typer.Option(metavar="SLOT", help="As it stood after this slot, for example before a merge. Default: now.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows shown on the screen: the newest so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the tables of a pipeline, show one, or write it to a file."""
    spec = context.find_spec(pipeline)
    log = context.open_log(spec.name, store)
    from tidegate.jobs.sinks.tables import export_table, read_table

    if name is None:
        counts = [(table, read_table(spec, log.store, table, columns=("_epoch",)).num_rows) for table in spec.table_names]
        if as_json:
            output.print_envelope("tables", [{"table": table, "rows": rows} for table, rows in counts])
        else:
            output.print_table(["table", "rows"], counts)
        return
    found = read_table(spec, log.store, name, current_only=current, at=at)
    if out is not None:
        export_table(found, out)
        written = {"table": name, "rows": found.num_rows, "file": str(out)}
        output.print_envelope("export", written) if as_json else output.console().print(f"{found.num_rows:,} rows of {name} in {out}")
    elif as_json:
        output.print_envelope("table", {"table": name, "rows": found.to_pylist()})
    else:
        _print_newest_rows(name, found, limit)


def _print_newest_rows(name: str, found: Any, limit: int) -> None:
    newest = found.slice(max(0, found.num_rows - limit))
    output.print_table(newest.column_names, [[_format_column_value(v) for v in row.values()] for row in newest.to_pylist()], grouped=False)
    output.console().print(f"{newest.num_rows:,} of {found.num_rows:,} rows of {name}")


def _format_column_value(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else value
