"""`tidegate storage` and `tidegate gc`: what lies in the bucket, and what may go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog

_EPOCHS_SAMPLED = 50  # of the newest, looked at one by one


def show_storage(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Count objects and bytes in the bucket, by kind, and what the newest epochs wrote each."""
    from tidegate.jobs.driver.housekeeping import make_retention

    spec = arguments.find_spec(pipeline)
    log = arguments.open_log(spec.name, store)
    found, newest = make_retention(spec, log).storage_report(), _average_newest_epochs(log)
    if as_json:
        output.print_envelope("storage", found.model_dump() | {"epochs": newest})
        return
    output.print_table(
        ["kind", "objects", "size"],
        [[k, n, output.format_size(found.bytes[k])] for k, n in sorted(found.objects.items())],
    )
    if newest["epochs"]:
        output.console().print(
            f"the newest {newest['epochs']} epochs wrote {newest['data_objects']:.1f} data objects"
            f" each, {output.format_size(round(newest['bytes']))}; slot, tables' metadata and"
            " pointer come on top of it"
        )


def _average_newest_epochs(log: SlotLog) -> dict[str, float]:
    """Means over the newest epochs: objects and bytes that are their own."""
    from itertools import islice

    from tidegate.checkpoints.manifest import Manifest

    records = [
        filled.record
        for filled in islice(log.iterate_ancestors(log.head().checkpoint), _EPOCHS_SAMPLED)
    ]
    epochs = [record for record in records if isinstance(record, Manifest)]
    own = [
        [f for f in epoch.all_files() if f"/{epoch.slot:06d}-{epoch.attempt}/" in f.key]
        for epoch in epochs
    ]
    count = max(1, len(epochs))
    return {
        "epochs": len(epochs),
        "data_objects": sum(map(len, own)) / count,
        "bytes": sum(file.bytes for files in own for file in files) / count,
    }


def collect_garbage(
    pipeline: SpecArgument,
    store: StoreOption = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(
            min=0, help="Younger checkpoints stay, on any timeline. Default: checkpoint.retain_for."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small files of the tables, retire checkpoints beyond ``checkpoint.retain``, delete what nothing needs.

    Safe beside a live driver.
    """
    from dataclasses import asdict

    from tidegate.jobs.driver.housekeeping import maintain_bucket

    spec = arguments.find_spec(pipeline)
    keep_for = None if keep_hours is None else keep_hours * 3600
    done = maintain_bucket(spec, arguments.open_log(spec.name, store), keep_for, dry_run=dry_run)
    report, compacted = (
        done.swept,
        {table: asdict(files) for table, files in done.compacted.items()},
    )
    if as_json:
        output.print_envelope(
            "gc",
            report.model_dump()
            | {"compacted": compacted, "compaction_left": done.compaction_obstacle},
        )
        return
    for table, files in done.compacted.items():
        if files.skipped:
            output.console().print(f"{table} is not compacted: {files.skipped}", markup=False)
        elif files.before != files.after:
            output.console().print(f"{table}: {files.before:,} data files became {files.after:,}")
    if done.compaction_obstacle:
        output.console().print(
            f"tables are not compacted: {done.compaction_obstacle}", markup=False
        )
    does = "would retire" if dry_run else "retired"
    output.console().print(
        f"{does} {len(report.retired):,} checkpoints; {'would delete' if dry_run else 'deleted'}"
        f" {len(report.deleted):,} files, {output.format_size(report.deleted_bytes)};"
        f" {report.kept_by_grace:,} young files stay for now"
    )
