"""`tidegate tables`, `row`, `storage` and `gc`: what a pipeline has written, and its cleaning.

`row` follows one input row through all outputs.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.errors import get_first_line

from . import arguments, output
from .arguments import DryRunOption, JsonOption, SpecArgument, StoreOption
from .errors import BAD_CONDITION, BAD_FIELD

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.checkpoints.slot_log import SlotLog

_EPOCHS_SAMPLED = 50  # newest epochs whose writes are averaged


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
        str | None,
        typer.Option(
            metavar="CHECKPOINT", help="The table after this checkpoint or slot, such as a merge's."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Only rows that meet a condition, as DuckDB reads it."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Print only the newest N rows.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the tables of a pipeline, show one, or write it to a file.

    --json prints all rows of a table.
    """
    spec, log = arguments.open_spec_and_log(pipeline, store)
    if name is None:
        from tidegate.jobs.sinks.lineage_position import count_table_rows, read_published_cut

        cut, found = read_published_cut(log.store, spec.name), []
        for listed in spec.table_names:
            address = cut.tables.get(listed) if cut else None
            rows = count_table_rows(log.store, spec.name, address) if address else 0
            # A merge leaves rows in a stream's files that readers do not see.
            if rows is None or (rows and listed in spec.streams):
                # A second of imports, which the list needs for these tables only.
                from tidegate.jobs.sinks.published_tables import read_table

                rows = read_table(spec, log.store, listed, columns=("_epoch",)).num_rows
            found.append({"table": listed, "rows": rows, "address": address})
        output.print_result(as_json, "tables", found)
        return
    from tidegate.jobs.sinks.published_tables import export_table, read_table

    slot = None if at is None else arguments.resolve_slot(log, at)
    table = read_table(spec, log.store, name, current_only=current, at=slot)
    if where is not None:
        table = _select_rows(name, table, where)
    if out is not None:
        export_table(table, out)
        facts = {"table": name, "rows": table.num_rows, "file": str(out)}
        text = f"{table.num_rows:,} rows of {name} in {out}"
        output.print_result(as_json, "export", facts, text)
    elif as_json:
        from tidegate.jobs.engine.arrow_tables import list_rows

        output.print_envelope("table", {"table": name, "rows": list_rows(table)})
    else:
        _print_newest_rows(name, table, limit)


def _select_rows(name: str, table: pa.Table, where: str) -> pa.Table:
    import duckdb

    from tidegate.jobs.rules.duck_frame import select_rows

    try:
        # The condition is the user's own, over a table that this user may read.
        return select_rows(table, where)
    except duckdb.Error as error:
        cause, columns = get_first_line(error), ", ".join(table.column_names)
        raise BAD_CONDITION(table=name, cause=cause, columns=columns) from error


def _print_newest_rows(name: str, table: pa.Table, limit: int) -> None:
    from tidegate.jobs.engine.arrow_tables import list_rows
    from tidegate.jobs.spec.pipeline import DEAD_LETTERS, LATE

    newest = table.slice(max(0, table.num_rows - limit))
    if name == DEAD_LETTERS:
        for row in list_rows(newest):
            place = f"{row['_source']}/{row['_partition']}/{row['_seq']} of {row['object']}"
            output.print_line(f"{row['reason']}  {place}\n  {row['detail']}\n  {row['row'] or ''}")
    else:
        if "window_start" in newest.column_names:
            order = ("window_start", "window_end", "revision")
            newest = newest.sort_by([(column, "ascending") for column in order])
        rows = [list(map(_format_value, row.values())) for row in list_rows(newest)]
        output.print_rendered(output.format_table(newest.column_names, rows))
    # Otherwise it looks as if more rows were late than the status says.
    note = "; a late row is there once for each output that it missed" if name == LATE else ""
    output.print_line(f"{newest.num_rows:,} of {table.num_rows:,} rows of {name}{note}")


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
    output.print_result(as_json, "row", [trace.model_dump(mode="json") for trace in traces])
    # So that a script can ask whether a row has arrived.
    raise typer.Exit(0 if traces else 1)


def _parse_field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BAD_FIELD(text=text)
    return name, value


def _format_value(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return float(f"{value:.15g}")  # 0.3, where a sum of 0.1 and 0.2 has 0.30000000000000004
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else value


def show_storage(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Count objects and bytes in the bucket by kind, and what an epoch wrote on average.

    The average is that of the newest 50 epochs.
    """
    from tidegate.jobs.driver.housekeeping import make_retention

    spec, log = arguments.open_spec_and_log(pipeline, store)
    usage, newest = make_retention(spec, log).storage_report(), _average_newest_epochs(log)
    output.print_result(as_json, "storage", usage.model_dump() | {"epochs": newest})


def _average_newest_epochs(log: SlotLog) -> dict[str, float]:
    """Return the mean number and bytes of the data objects that the newest epochs wrote."""
    from tidegate.checkpoints.manifest import Manifest

    ancestors = islice(log.iterate_ancestors(log.head().checkpoint), _EPOCHS_SAMPLED)
    epochs = [slot.record for slot in ancestors if isinstance(slot.record, Manifest)]
    # A manifest also lists objects that it took over; an epoch's objects carry its attempt's name.
    written = [
        f
        for epoch in epochs
        for f in epoch.all_files()
        if f"/{epoch.slot:06d}-{epoch.attempt}/" in f.key
    ]
    count = max(1, len(epochs))
    total = sum(file.bytes for file in written)
    return {"epochs": len(epochs), "data_objects": len(written) / count, "bytes": total / count}


def collect_garbage(
    pipeline: SpecArgument,
    store: StoreOption = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="Keep younger checkpoints, on any timeline. Default: checkpoint.retain_for."
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small files, retire old checkpoints, and delete what no checkpoint needs.

    ``checkpoint.retain`` decides which checkpoints are old. Safe while a driver runs.
    """
    from tidegate.jobs.driver.housekeeping import maintain_bucket

    spec, log = arguments.open_any_spec_and_log(pipeline, store)
    # None leaves the decision to the spec; 0 keeps only what `checkpoint.retain` counts.
    keep_for = None if keep_hours is None else keep_hours * 3600
    done = maintain_bucket(spec, log, keep_for, dry_run=dry_run)
    compacted = {table: asdict(files) for table, files in done.compacted.items()}
    data = {"compacted": compacted, "compaction_left": done.compaction_obstacle}
    output.print_result(as_json, "gc", done.swept.model_dump() | data)
