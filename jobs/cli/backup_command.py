"""`tidegate backup` and `tidegate move`: a pipeline in another store, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments, output
from .arguments import PipelineArgument, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.backup import BackupReport
    from tidegate.checkpoints.store import Store
    from tidegate.checkpoints.verify import Verification


def copy_pipeline(
    pipeline: PipelineArgument,
    to: Annotated[
        str,
        typer.Argument(metavar="URL", help="Where the copy goes: s3://bucket/prefix or a folder."),
    ],
    store: StoreOption = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Verify presence and size only, no checksums.")
    ] = False,
) -> None:
    """Copy a pipeline into another bucket, prefix or folder, and verify every checkpoint there.

    The pipeline may be running. A second run copies only what is new, and deletes nothing. Another
    bucket is reached with the same endpoint and keys. Exit code 1 if the copy is damaged.
    """
    from tidegate.checkpoints import backup
    from tidegate.checkpoints.open_store import open_store
    from tidegate.checkpoints.verify import CheckpointVerdict

    log = arguments.open_log(pipeline, store)
    target = open_store(to)
    _print_report(log.pipeline, target, backup.copy_pipeline(log.store, target, log.pipeline))
    results = _verify_copy(log.pipeline, target, checksums=not fast)
    if any(result.verdict is CheckpointVerdict.DAMAGED for result in results):
        raise typer.Exit(1)


def move_pipeline(
    pipeline: SpecArgument,
    target: Annotated[
        str, typer.Argument(metavar="URL", help="Where it goes: s3://bucket/prefix or a folder.")
    ],
    store: StoreOption = None,
) -> None:
    """Move a pipeline to another bucket, prefix or folder; its driver has to be stopped.

    The copy is verified before the move counts; it may have no damage but that of the original.
    From then on drivers refuse the old address. Nothing is deleted there. If the command breaks
    off, run it again.
    """
    from tidegate.checkpoints.open_store import open_store
    from tidegate.jobs.sinks import pipeline_move

    spec, log = arguments.open_any_spec_and_log(pipeline, store)
    place = open_store(target)

    def verify() -> None:
        results = _verify_copy(log.pipeline, place, checksums=True)
        if pipeline_move.require_whole_copy(log, place, results):
            output.print_line("the origin has the same damage; the move leaves it as it is")

    _print_report(log.pipeline, place, pipeline_move.move_pipeline(spec, log, place, verify))
    output.print_line(
        f"{log.pipeline} is at {place.url} now: give its drivers and Airflow that address"
        " (TIDEGATE_STORE)"
    )


def _print_report(pipeline: str, target: Store, report: BackupReport) -> None:
    output.print_line(
        f"{pipeline}: {report.copied} of {report.objects} objects copied to {target.url},"
        f" {report.bytes:,} bytes"
    )


def _verify_copy(pipeline: str, target: Store, *, checksums: bool) -> list[Verification]:
    """Verify all checkpoints of a copy, print what is wrong, and return the results."""
    from tidegate.checkpoints.bucket_layout import CheckpointId
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.verify import CheckpointVerdict, scrub_checkpoints

    copy = SlotLog(target, pipeline)
    chosen = [
        CheckpointId.parse(row.id) for row in CheckpointCatalog(copy).list_checkpoints() if row.id
    ]
    results = [*scrub_checkpoints(copy, chosen, checksums=checksums)]
    for result in results:
        if result.findings:
            output.print_text("verification", result=result, index=1, total=1)
    healthy = sum(result.verdict is CheckpointVerdict.HEALTHY for result in results)
    output.print_line(f"{healthy} of {len(results)} checkpoints of the copy are whole")
    return results
