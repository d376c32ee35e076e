"""`tidegate checkpoints`: list, show, verify, restore, pin, compare and adopt checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.errors import ConfigurationError

from . import arguments, output
from .arguments import (
    DryRunOption,
    JsonOption,
    PipelineArgument,
    SpecArgument,
    StoreOption,
    WhyOption,
)
from .errors import UNKNOWN_PIN

if TYPE_CHECKING:
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog, CheckpointDiff
    from tidegate.checkpoints.manifest import FileRef, Manifest
    from tidegate.checkpoints.restore import RestorePlan
    from tidegate.checkpoints.slot_index import SlotSummary
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.verify import Verification
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.spec.spec_changes import SpecChange

app = typer.Typer(no_args_is_help=True, help="List, verify, restore, pin and compare checkpoints.")

BEGINNING = "beginning"  # the restore target before the first checkpoint
_LIST_COLUMNS = (
    *("checkpoint", "age", "read", "released", "late"),
    *("retained", "files", "size", "notes"),
)
_TIMING_STEPS = ["plan", "survey", "decide", "move", "seal_before"]

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="latest, latest_healthy, a pin's name, a slot, an id or its prefix.",
    ),
]


@app.command("list")
def list_checkpoints(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest N.")] = 20,
    everything: Annotated[
        bool,
        typer.Option("--all", help="On every timeline, with retired checkpoints and restores."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List completed checkpoints of the current lineage, newest first.

    --all lists all of them, whatever --limit says.
    """
    catalog = _open_catalog(pipeline, store)
    kinds = ("epoch", "stub", "fork") if everything else ("epoch",)
    checkpoints = catalog.list_checkpoints(all_timelines=everything, kinds=kinds)
    # `--all` is for looking behind a restore, where the end of the list may be what is sought.
    shown = checkpoints if everything else checkpoints[:limit]
    if as_json:
        output.print_envelope("checkpoints", [row.model_dump(mode="json") for row in shown])
        return
    output.print_table(_LIST_COLUMNS, [_format_summary_row(row) for row in shown])
    if len(checkpoints) > len(shown):
        output.print_line(f"{len(checkpoints) - len(shown):,} older ones: --limit N or --all")


@app.command("show")
def show_checkpoint(
    pipeline: PipelineArgument,
    checkpoint: CheckpointArgument,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one checkpoint: rows, positions, files, timings; with --json the whole manifest."""
    catalog = _open_catalog(pipeline, store)
    manifest = catalog.read_manifest(catalog.resolve(checkpoint))
    if as_json:
        data = manifest.model_dump(mode="json") | {"id": str(manifest.id)}
        output.print_envelope("checkpoint", data)
        return
    output.print_facts(_list_manifest_facts(manifest))
    counters = manifest.counters.model_dump(exclude={"per_source", "dropped"})
    counters["dropped"] = sum(manifest.counters.dropped.values())
    output.print_table(list(counters), [list(counters.values())], title="rows since the beginning")
    positions = [
        (member, _format_position(part), "yes" if part.get("pending") else "no")
        for member, part in sorted(manifest.cut.items())
    ]
    output.print_table(["partition", "read up to", "more waiting"], positions)
    files = [_sum_files(f"table {table}", refs) for table, refs in manifest.files.items()]
    # State consists of many small segments: their sum per kind says more than their names.
    for kind in sorted({segment.kind for segment in manifest.segments}):
        segments = [segment for segment in manifest.segments if segment.kind == kind]
        files.append(_sum_files(f"state {kind}", segments))
    output.print_table(["files of", "count", "rows", "size"], files)


def _list_manifest_facts(manifest: Manifest) -> list[tuple[str, object]]:
    sealed_at, frontiers = manifest.created_at, (manifest.frontier_before, manifest.frontier_after)
    age = output.format_age(sealed_at)
    steps = sorted(
        manifest.timings, key=lambda s: _TIMING_STEPS.index(s) if s in _TIMING_STEPS else 99
    )
    return [
        ("checkpoint", manifest.id),
        ("continues", manifest.parent or "the beginning"),
        ("sealed", f"{output.format_short_instant(sealed_at)}, {age} ago, by {manifest.driver}"),
        ("frontier", " to ".join(map(output.format_short_instant, frontiers))),
        ("barriers closed", len(manifest.barriers)),
        ("requests applied", ", ".join(manifest.requests) or "none"),
        ("spec", manifest.spec_digest[:12]),
        ("seconds", ", ".join(f"{step} {manifest.timings[step]:.2f}" for step in steps)),
    ]


def _sum_files(name: str, files: Iterable[FileRef]) -> tuple[object, ...]:
    """Return a row of the files table: name, count, rows, size."""
    refs = list(files)
    size = output.format_size(sum(ref.bytes for ref in refs))
    return name, len(refs), sum(ref.rows for ref in refs), size


@app.command("verify")
def verify_checkpoints(
    pipeline: PipelineArgument,
    checkpoint: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECKPOINT]...", help="Checkpoints. Default: the newest."),
    ] = None,
    store: StoreOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of the current lineage.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Presence and size only, no checksums.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also open every file and count its rows.")
    ] = False,
    condemn: Annotated[
        bool, typer.Option(help="Record damaged ones in the bucket, so that no restore uses them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the chain, presence, size and checksum of every object a checkpoint needs.

    Exit code 1 if a checkpoint is damaged. If the store did not answer for one, it is `unknown`,
    with exit code 0.
    """
    from tidegate.checkpoints import verify

    catalog = _open_catalog(pipeline, store)
    if everything:
        chosen = [CheckpointId.parse(row.id) for row in catalog.list_checkpoints() if row.id]
    else:
        chosen = [catalog.resolve(name) for name in checkpoint or ["latest"]]
    check = None
    if deep:
        from tidegate.jobs.engine.replay import make_content_check

        check = make_content_check(catalog.log.store)
    # Printed one by one, because a scrub over many checkpoints takes minutes.
    results: list[Verification] = []
    for result in verify.scrub_checkpoints(catalog.log, chosen, checksums=not fast, deep=check):
        results.append(result)
        if condemn:
            verify.condemn_if_damaged(catalog.log, result)
        if not as_json:
            _print_verification(result, len(results), len(chosen))
    if as_json:
        output.print_envelope("verification", [r.model_dump(mode="json") for r in results])
    if any(r.verdict == verify.CheckpointVerdict.DAMAGED for r in results):
        raise typer.Exit(1)


def _print_verification(result: Verification, number: int, count: int) -> None:
    progress = f"{number:,}/{count:,}  " if count > 1 else ""
    output.print_line(
        f"{progress}{result.checkpoint}  {result.verdict}  {result.objects:,} objects,"
        f" {output.format_size(result.bytes)}"
    )
    for finding in result.findings:
        output.print_line(f"    {finding.problem}: {finding.key} {finding.detail}")


@app.command("restore")
def restore_checkpoint(
    pipeline: PipelineArgument,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help=f"latest, latest_healthy, {BEGINNING}, a pin's name, a slot, an id or its prefix.",
        ),
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go back to a checkpoint. The pipeline must be stopped; its next driver continues from there.

    Nothing is deleted: later epochs stay on their own timeline and can be restored in turn. From
    `beginning` every row is read again.
    """
    from tidegate.checkpoints import checkpoint_specs
    from tidegate.checkpoints.restore import plan_restore

    catalog = _open_catalog(pipeline, store)
    log, changes = catalog.log, []
    # Resolved before the question, so that the person confirms one definite checkpoint.
    target = None if checkpoint == BEGINNING else catalog.resolve(checkpoint)
    plan = plan_restore(log, target, catalog=catalog)
    spec = _find_local_spec(pipeline) if target else None
    if spec and target:
        manifest = log.open_checkpoint(target).epoch
        changes = checkpoint_specs.compare_spec_with_checkpoint(log.store, spec, manifest) or []
    if not as_json:
        _print_restore_plan(plan, changes)
    if not dry_run:
        plan.require_sinks_follow()
        # Before the question: what the next driver would refuse must not be committed first.
        if spec and target:
            checkpoint_specs.require_compatible_spec(log, spec, manifest)
        if not yes:
            typer.confirm("restore?", abort=True, err=as_json)
        _commit_under_lease(log, plan, why)
    if as_json:
        data = {"done": not dry_run, "spec_changes": [asdict(change) for change in changes]}
        output.print_envelope("restore", plan.model_dump(mode="json") | data)
    elif not dry_run:
        output.print_line(
            f"{log.pipeline} is at {plan.target or BEGINNING}; start it to go on from there"
        )


@app.command("pin")
def pin_under_name(
    pipeline: PipelineArgument,
    checkpoint: CheckpointArgument,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the pin; commands take it as a CHECKPOINT."),
    ],
    store: StoreOption = None,
    why: WhyOption = "",
) -> None:
    """Keep a checkpoint under a name: retention does not remove it."""
    from tidegate.checkpoints.pins import pin_checkpoint

    catalog = _open_catalog(pipeline, store)
    target = catalog.resolve(checkpoint)
    pin_checkpoint(catalog.log, name, target, who=arguments.get_user_name(), why=why)
    output.print_line(f"{target} is pinned as {name}")


@app.command("unpin")
def remove_pin(
    pipeline: PipelineArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pin's name.")],
    store: StoreOption = None,
) -> None:
    """Remove a pin; retention may remove the checkpoint from now on."""
    from tidegate.checkpoints.pins import RootsFile

    log = arguments.open_log(pipeline, store)
    roots = RootsFile(log.store, log.pipeline)
    pins = roots.read().pins
    # `unpin` itself is silent, so a mistyped name would seem to have worked.
    if name not in pins:
        raise UNKNOWN_PIN(pipeline=log.pipeline, name=name, pins=", ".join(sorted(pins)) or "none")
    roots.unpin(name)
    output.print_line(f"{pins[name].checkpoint} is no longer pinned as {name}")


@app.command("diff")
def compare_checkpoints(
    pipeline: PipelineArgument,
    left: CheckpointArgument,
    right: CheckpointArgument,
    store: StoreOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Also the state of the decider, and plain positions.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: rows, positions, frontiers, state, tables."""
    from tidegate.checkpoints.checkpoint_catalog import diff_checkpoints

    catalog = _open_catalog(pipeline, store)
    first, second = (catalog.read_manifest(catalog.resolve(name)) for name in (left, right))
    diff = diff_checkpoints(first, second)
    if as_json:
        output.print_envelope("diff", diff.model_dump(mode="json"))
    elif diff.same:
        exception = ", except for the spec" if diff.spec_changed else ""
        output.print_line(f"{diff.left} and {diff.right} are equal{exception}")
    else:
        _print_diff(diff, first, second, raw=raw)


def _print_diff(diff: CheckpointDiff, first: Manifest, second: Manifest, *, raw: bool) -> None:
    rows: list[tuple[object, ...]] = [
        ("rows", name, "", f"{change:+,}") for name, change in diff.counters.items()
    ]
    frontiers = [output.format_short_instant(one.frontier_after) for one in (first, second)]
    rows += [("frontier", "output", *frontiers)] if frontiers[0] != frontiers[1] else []
    for member in () if raw else diff.positions:
        parts = [_format_position(one.cut.get(member, {})) for one in (first, second)]
        rows.append(("read up to", member, *parts))
    # In the order of the data flow: input, decisions, state, output.
    for what in ("positions", "decider", "state", "tables") if raw else ("state", "tables"):
        rows += [(what, name, pair.left, pair.right) for name, pair in getattr(diff, what).items()]
    rows += [("spec", "digest", "", "changed")] if diff.spec_changed else []
    cells = [[_shorten_cell(value) for value in row] for row in rows]
    output.print_table(["what", "name", diff.left, diff.right], cells)


@app.command("adopt")
def adopt_store_copy(spec: SpecArgument, store: StoreOption = None) -> None:
    """Turn the copy of a store into a pipeline that is independent of the original.

    Until then drivers refuse to run on the copy, because it names the original's tables. The copy's
    next run makes new tables. Sinks and shared catalogs that the original filled stay the
    original's: give the copy a spec with other ones.
    """
    from tidegate.jobs.sinks.iceberg_catalog import adopt_copied_store

    pipeline, log = arguments.open_spec_and_log(spec, store)
    uid = adopt_copied_store(pipeline, log)
    output.print_line(
        f"{log.store.url} is now a pipeline of its own with uid {uid}; its tables are made again"
        " when it runs"
    )


def _open_catalog(pipeline: str, store: str | None) -> CheckpointCatalog:
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog

    return CheckpointCatalog(arguments.open_log(pipeline, store))


def _format_summary_row(row: SlotSummary) -> tuple[object, ...]:
    notes = [f"pinned as {name}" for name in row.pins]
    notes += [row.condemned] if row.condemned else []
    # A person who reads the list must see why a checkpoint is not the newest, or cannot be
    # restored.
    notes += [] if row.on_lineage else ["left by a restore"]
    notes += [f"not restorable: slot {row.gap} was retired"] if row.gap is not None else []
    kinds = {"stub": ["retired"], "fork": [f"restore of {row.parent or 'the beginning'}"]}
    notes += kinds.get(row.kind, [])
    name = row.id or f"t{row.timeline}-{row.slot:06d}"
    counts = (row.read, row.released, row.late, row.retained, row.files)
    age, size = output.format_age(row.created_at), output.format_size(row.bytes)
    return (name, age, *counts, size, ", ".join(notes))


def _format_position(part: dict[str, Any]) -> str:
    """Format where a slice ends: object and row, or the position as the source counts it."""
    resume = part.get("resume") or {}
    # Objects have an ordinal and a row; Kafka and tables count in their own way.
    if {"ordinal", "row"} <= set(resume):
        return f"object {resume['ordinal']}, row {resume['row']}"
    return str(part.get("end"))


def _print_restore_plan(plan: RestorePlan, changes: list[SpecChange]) -> None:
    # The time of the checkpoint tells people more than its number.
    since = f" of {output.format_short_instant(plan.since)}" if plan.since else ""
    regained = plan.epochs_regained
    again = f", {regained:,} of an older timeline come back" if regained else ""
    output.print_line(
        f"{plan.pipeline}: from {plan.head} back to {plan.target or BEGINNING}{since};"
        f" {plan.epochs_rewound:,} epochs are taken back{again}"
    )
    rows: list[tuple[str, Any]] = [(f"rows {name}", n) for name, n in plan.rows.items() if n]
    rows += [(f"table {name}", count) for name, count in plan.tables.items()]
    rows += [(f"window results of {name}", count) for name, count in plan.windows.items()]
    if rows:
        output.print_table(["taken back", "rows"], rows)
    if plan.sinks:
        _print_sink_plans(plan)
    if changes:
        cells = [(change.what, change.verdict.value, change.why) for change in changes]
        output.print_table(["the spec has changed", "", "state"], cells)
    elif plan.spec_changed:
        output.print_line("the spec has changed since then")


def _print_sink_plans(plan: RestorePlan) -> None:
    words = {
        "log": "its log is cut; files of later batches stay, and readers of the log skip them",
        "callback": "the script's on_restore takes the later batches back",
        "rollback": "the table goes back in one commit",
        "repeat": "gets the later batches a second time",
        "refused": "cannot follow: nothing takes the later batches back",
    }
    cells = [
        (
            one.query,
            one.newest,
            BEGINNING if one.batch is None else one.batch,
            one.sink,
            words[one.rewind],
        )
        for one in plan.sinks
    ]
    output.print_table(["query", "batch", "back to", "sink", "what happens to the sink"], cells)


def _find_local_spec(pipeline: str) -> PipelineSpec | None:
    try:
        return arguments.find_spec(pipeline)
    except ConfigurationError:
        return None  # restored by name, without its spec: the driver checks it when it starts


def _commit_under_lease(log: SlotLog, plan: RestorePlan, why: str) -> None:
    """Commit the restore while holding the lease, so that no driver can seal in between.

    Meanwhile the desired state is recovering, so that Airflow's sweep starts no driver. Afterwards
    the previous one is set again, unless it was changed meanwhile.
    """
    from tidegate.checkpoints.driver_requests import (
        DesiredState,
        read_desired_state,
        set_desired_state,
    )
    from tidegate.checkpoints.lease import Lease
    from tidegate.checkpoints.pipeline_identity import ProcessIdentity
    from tidegate.checkpoints.restore import commit_restore

    who, set_state = arguments.get_user_name(), partial(set_desired_state, log.store, log.pipeline)
    lease = Lease.acquire(log.store, log.pipeline, ProcessIdentity.this_process())
    try:
        # Remembered, because a restore must not turn a stopped pipeline into a running one.
        before = read_desired_state(log.store, log.pipeline)
        set_state(DesiredState.RECOVERING, who=who, why="restore")
        try:
            request = f"restore-{secrets.token_hex(6)}"
            why = why or "asked for on the command line"
            commit_restore(log, lease, plan, request_id=request, who=who, why=why)
        finally:
            only_from = DesiredState.RECOVERING
            set_state(before.state, who=before.who, why=before.why, only_from=only_from)
    finally:
        # Released at once, so that the next driver does not wait for the TTL.
        lease.release()


def _shorten_cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
