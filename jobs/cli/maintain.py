"""`tidegate storage` and `tidegate gc`: what lies in the bucket, and what may go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import context, output
from tidegate.jobs.cli.context import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.log import SlotLog
    from tidegate.checkpoints.retention import Retention
    from tidegate.jobs.spec.pipeline import PipelineSpec

__all__ = ["gc", "storage"]


def storage(pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Count objects and bytes in the bucket, by kind."""
    spec = context.find_spec(pipeline)
    found = _retention(spec, context.open_log(spec.name, store), 24.0).storage()
    if as_json:
        output.envelope("storage", found.model_dump())
    else:
        output.table(["kind", "objects", "size"], [[k, n, output.size(found.bytes[k])] for k, n in sorted(found.objects.items())])


def gc(
    pipeline: SpecArgument,
    store: StoreOption = None,
    keep_hours: Annotated[float, typer.Option(min=0, help="Checkpoints younger than this stay, on any timeline.")] = 24.0,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Retire checkpoints beyond ``checkpoint.retain`` and delete files that nothing needs. Safe beside a live driver."""
    spec = context.find_spec(pipeline)
    report = _retention(spec, context.open_log(spec.name, store), keep_hours).run(dry_run=dry_run)
    if as_json:
        output.envelope("gc", report.model_dump())
        return
    does = "would retire" if dry_run else "retired"
    output.console().print(
        f"{does} {len(report.retired):,} checkpoints; {'would delete' if dry_run else 'deleted'} "
        f"{len(report.deleted):,} files, {output.size(report.deleted_bytes)}; {report.kept_by_grace:,} young files stay for now"
    )


def _retention(spec: PipelineSpec, log: SlotLog, keep_hours: float) -> Retention:
    from tidegate.checkpoints.retention import Policy, Retention
    from tidegate.jobs.sinks.tables import published_upto, referenced_files, rewound

    return Retention(
        log,
        Policy(keep_last=spec.checkpoint.retain, keep_for=keep_hours * 3600),
        external=lambda: referenced_files(spec, log.store),
        published_upto=lambda: published_upto(spec, log),
        rewound=lambda: rewound(spec, log),
    )
