"""`tidegate backup` copies a pipeline to another store, and verifies the copy."""

from typing import Annotated

import typer

from . import arguments, output
from .arguments import PipelineArgument, StoreOption


def copy_pipeline(
    pipeline: PipelineArgument,
    to: Annotated[
        str,
        typer.Option(metavar="URL", help="Where the copy goes: s3://bucket/prefix or a folder."),
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
    from tidegate.checkpoints.bucket_layout import CheckpointId
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
    from tidegate.checkpoints.open_store import open_store
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.verify import CheckpointVerdict, scrub_checkpoints

    log = arguments.open_log(pipeline, store)
    target = open_store(to)
    report = backup.copy_pipeline(log.store, target, log.pipeline)
    output.print_line(
        f"{log.pipeline}: {report.copied} of {report.objects} objects copied to {target.url},"
        f" {report.bytes:,} bytes"
    )
    copy = SlotLog(target, log.pipeline)
    chosen = [
        CheckpointId.parse(row.id) for row in CheckpointCatalog(copy).list_checkpoints() if row.id
    ]
    results = [*scrub_checkpoints(copy, chosen, checksums=not fast)]
    for result in results:
        if result.findings:
            output.print_text("verification", result=result, index=1, total=1)
    healthy = sum(result.verdict is CheckpointVerdict.HEALTHY for result in results)
    output.print_line(f"{healthy} of {len(results)} checkpoints of the copy are whole")
    if any(result.verdict is CheckpointVerdict.DAMAGED for result in results):
        raise typer.Exit(1)
