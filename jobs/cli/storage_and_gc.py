"""`tidegate storage` and `gc`: how much space a pipeline uses, and freeing it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import DryRunOption, JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.driver.housekeeping import MaintenanceReport

_EPOCHS_SAMPLED = 50  # newest epochs whose writes are averaged


def show_storage(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Count objects and bytes in the bucket by kind, and what each of the newest epochs wrote."""
    from tidegate.jobs.driver.housekeeping import make_retention

    spec, log = arguments.open_spec_and_log(pipeline, store)
    usage, newest = make_retention(spec, log).storage_report(), _average_newest_epochs(log)
    if as_json:
        output.print_envelope("storage", usage.model_dump() | {"epochs": newest})
        return
    kinds = sorted(usage.objects.items())
    rows = [(kind, count, output.format_size(usage.bytes[kind])) for kind, count in kinds]
    output.print_table(["kind", "objects", "size"], rows)
    if newest["epochs"]:
        output.print_line(
            f"the newest {newest['epochs']} epochs wrote {newest['data_objects']:.1f} data objects"
            f" each, {output.format_size(round(newest['bytes']))}; in addition each wrote its slot,"
            " the tables' metadata and the pointer"
        )


def _average_newest_epochs(log: SlotLog) -> dict[str, float]:
    """Return the mean number and bytes of the data objects that the newest epochs wrote."""
    from tidegate.checkpoints.manifest import Manifest

    ancestors = islice(log.iterate_ancestors(log.head().checkpoint), _EPOCHS_SAMPLED)
    epochs = [slot.record for slot in ancestors if isinstance(slot.record, Manifest)]
    # A manifest also lists objects that it took over; an epoch's objects carry its attempt's name.
    written = [
        [f for f in epoch.all_files() if f"/{epoch.slot:06d}-{epoch.attempt}/" in f.key]
        for epoch in epochs
    ]
    count = max(1, len(epochs))
    return {
        "epochs": len(epochs),
        "data_objects": sum(map(len, written)) / count,
        "bytes": sum(file.bytes for files in written for file in files) / count,
    }


def collect_garbage(
    pipeline: SpecArgument,
    store: StoreOption = None,
    keep_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Keep younger checkpoints, on any timeline. Default: checkpoint.retain_for.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small files, retire old checkpoints, and delete what no checkpoint needs.

    ``checkpoint.retain`` decides which checkpoints are old. Safe while a driver runs.
    """
    from dataclasses import asdict

    from tidegate.jobs.driver.housekeeping import maintain_bucket

    spec, log = arguments.open_spec_and_log(pipeline, store)
    keep_for = None if keep_hours is None else keep_hours * 3600
    done = maintain_bucket(spec, log, keep_for, dry_run=dry_run)
    if as_json:
        compacted = {table: asdict(files) for table, files in done.compacted.items()}
        data = {"compacted": compacted, "compaction_left": done.compaction_obstacle}
        output.print_envelope("gc", done.swept.model_dump() | data)
    else:
        _print_maintenance(done, dry_run)


def _print_maintenance(done: MaintenanceReport, dry_run: bool) -> None:
    for table, files in done.compacted.items():
        if files.skipped:
            output.print_line(f"{table} is not compacted: {files.skipped}")
        elif files.before != files.after:
            output.print_line(f"{table}: {files.before:,} data files became {files.after:,}")
    if done.compaction_obstacle:
        output.print_line(f"tables are not compacted: {done.compaction_obstacle}")
    swept = done.swept
    retired, deleted = ("would retire", "would delete") if dry_run else ("retired", "deleted")
    output.print_line(
        f"{retired} {len(swept.retired):,} checkpoints; {deleted} {len(swept.deleted):,} files,"
        f" {output.format_size(swept.deleted_bytes)}; {swept.kept_by_grace:,} young files stay for"
        " now"
    )
