"""`tidegate checkpoints`: list, look, verify, go back, keep, compare."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, PipelineArgument, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
    from tidegate.checkpoints.manifest import Manifest
    from tidegate.checkpoints.restore import RestorePlan
    from tidegate.checkpoints.slot_index import SlotSummary
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.verify import DeepCheck
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.jobs.spec.spec_changes import SpecChange

app = typer.Typer(no_args_is_help=True, help="List, verify, restore, pin and compare checkpoints.")

BEGINNING = "beginning"  # before the first checkpoint
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="latest, latest_healthy, a pin's name, an id, or the beginning of one.",
    ),
]
WhyOption = Annotated[str, typer.Option(help="Kept with it, for whoever asks later.")]


@app.command("list")
def list_checkpoints(
    pipeline: PipelineArgument,
    store: StoreOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="All of them, on every timeline, retired ones and restores too."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List completed checkpoints, newest first."""
    catalog = _open_catalog(pipeline, store)
    kinds = ("epoch", "stub", "fork") if everything else ("epoch",)
    found = catalog.list_checkpoints(all_timelines=everything, kinds=kinds)
    shown = found if everything else found[:limit]
    if as_json:
        output.print_envelope("checkpoints", [row.model_dump(mode="json") for row in shown])
        return
    columns = [
        "checkpoint",
        "age",
        "read",
        "released",
        "late",
        "retained",
        "files",
        "size",
        "notes",
    ]
    output.print_table(columns, [_format_summary_row(row) for row in shown])
    if len(found) > len(shown):
        output.console().print(f"{len(found) - len(shown):,} older ones: --limit N or --all")


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
        output.print_envelope(
            "checkpoint", manifest.model_dump(mode="json") | {"id": str(manifest.id)}
        )
        return
    facts: list[tuple[str, object]] = [
        ("checkpoint", manifest.id),
        ("continues", manifest.parent or "the beginning"),
        (
            "sealed",
            (
                f"{output.format_short_instant(manifest.created_at)},"
                f" {output.format_age(manifest.created_at)} ago, by {manifest.driver}"
            ),
        ),
        (
            "frontier",
            (
                f"{output.format_short_instant(manifest.frontier_before)} to"
                f" {output.format_short_instant(manifest.frontier_after)}"
            ),
        ),
        ("barriers closed", len(manifest.barriers)),
        ("requests applied", ", ".join(manifest.requests) or "none"),
        ("spec", manifest.spec_digest[:12]),
        (
            "seconds",
            ", ".join(
                f"{s} {manifest.timings[s]:.2f}"
                for s in sorted(manifest.timings, key=_rank_timing_step)
            ),
        ),
    ]
    output.print_table(["", ""], [(f"{name}:", value) for name, value in facts])
    counters = manifest.counters.model_dump(exclude={"per_source", "dropped"}) | {
        "dropped": sum(manifest.counters.dropped.values())
    }
    output.print_table(list(counters), [list(counters.values())], title="rows since the beginning")
    ends = [
        (m, _format_position(p), "yes" if p.get("pending") else "no")
        for m, p in sorted(manifest.cut.items())
    ]
    output.print_table(["partition", "read up to", "more waiting"], ends)
    files = [
        (f"table {t}", len(fs), sum(f.rows for f in fs), sum(f.bytes for f in fs))
        for t, fs in manifest.files.items()
    ]
    kinds = sorted({s.kind for s in manifest.segments})
    for kind in kinds:
        segments = [s for s in manifest.segments if s.kind == kind]
        files.append(
            (
                f"state {kind}",
                len(segments),
                sum(s.rows for s in segments),
                sum(s.bytes for s in segments),
            )
        )
    output.print_table(
        ["files of", "count", "rows", "size"],
        [(n, c, r, output.format_size(b)) for n, c, r, b in files],
    )


@app.command("verify")
def verify_checkpoints(
    pipeline: PipelineArgument,
    checkpoint: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECKPOINT]...", help="Which ones. Default: the newest."),
    ] = None,
    store: StoreOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of the current lineage.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Presence and size only, no checksums.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Open every file as well, and count its rows again.")
    ] = False,
    condemn: Annotated[
        bool, typer.Option(help="Note damaged ones in the bucket, so that nobody restores them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the chain, presence, size and checksum of every object a checkpoint needs.

    Exit 1 if one is damaged.
    """
    from tidegate.checkpoints import verify as verifying
    from tidegate.checkpoints.bucket_layout import CheckpointId

    catalog = _open_catalog(pipeline, store)
    if everything:
        chosen = [CheckpointId.parse(row.id) for row in catalog.list_checkpoints() if row.id]
    else:
        chosen = [catalog.resolve(text) for text in checkpoint or ["latest"]]
    results = []
    for result in verifying.scrub_checkpoints(
        catalog.log, chosen, checksums=not fast, deep=_make_deep_check(catalog) if deep else None
    ):
        results.append(result)
        if condemn:
            verifying.condemn_if_damaged(catalog.log, result)
        if not as_json:
            share = f"{len(results):,}/{len(chosen):,}  " if len(chosen) > 1 else ""
            output.console().print(
                f"{share}{result.checkpoint}  {result.verdict}  {result.objects:,} objects,"
                f" {output.format_size(result.bytes)}"
            )
            for finding in result.findings:
                output.console().print(f"    {finding.problem}: {finding.key} {finding.detail}")
    if as_json:
        output.print_envelope("verification", [r.model_dump(mode="json") for r in results])
    if any(r.verdict == verifying.CheckpointVerdict.DAMAGED for r in results):
        raise typer.Exit(1)


@app.command("restore")
def restore_checkpoint(
    pipeline: PipelineArgument,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help=f"latest, latest_healthy, {BEGINNING}, a pin's name, an id or a part of it.",
        ),
    ],
    store: StoreOption = None,
    why: WhyOption = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would happen, and stop there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Go back to a checkpoint. The stream has to stand still; the next driver goes on from there.

    Nothing is deleted: the epochs after it stay on their own timeline and can be restored in turn.
    From `beginning` every row is read anew.
    """
    from tidegate.checkpoints.restore import plan_restore

    catalog = _open_catalog(pipeline, store)
    log = catalog.log
    plan = plan_restore(
        log, None if checkpoint == BEGINNING else catalog.resolve(checkpoint), catalog=catalog
    )
    changes = _find_spec_changes(pipeline, log, plan)
    if not as_json:
        _print_restore_plan(plan)
        if plan.spec_changed and not changes:
            output.console().print("the spec has changed since then")
        if changes:
            output.print_table(
                ["the spec has changed", "", "state"],
                [(c.what, c.verdict.value, c.why) for c in changes],
            )
    if not dry_run:
        _refuse_unfit_spec(pipeline, log, plan)
        if not yes:
            typer.confirm("restore?", abort=True, err=as_json)
        _commit_under_lease(log, plan, why)
    if as_json:
        output.print_envelope(
            "restore",
            plan.model_dump(mode="json")
            | {"done": not dry_run, "spec_changes": [asdict(c) for c in changes]},
        )
    elif not dry_run:
        output.console().print(
            f"{log.pipeline} stands at {plan.target or BEGINNING}; start it to go on from there"
        )


@app.command("pin")
def pin_under_name(
    pipeline: PipelineArgument,
    checkpoint: CheckpointArgument,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="What to call it; usable wherever a checkpoint is asked for."
        ),
    ],
    store: StoreOption = None,
    why: WhyOption = "",
) -> None:
    """Keep a checkpoint under a name: retention leaves it alone."""
    from tidegate.checkpoints.pins import pin_checkpoint

    catalog = _open_catalog(pipeline, store)
    found = catalog.resolve(checkpoint)
    pin_checkpoint(catalog.log, name, found, who=arguments.get_user_name(), why=why)
    output.console().print(f"{found} is pinned as {name}")


@app.command("unpin")
def remove_pin(
    pipeline: PipelineArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pin's name.")],
    store: StoreOption = None,
) -> None:
    """Give up a pin; the checkpoint may be retired from now on."""
    from tidegate.checkpoints.pins import RootsFile
    from tidegate.errors import ConfigurationError

    log = arguments.open_log(pipeline, store)
    roots = RootsFile(log.store, log.pipeline)
    pins = roots.read().pins
    if name not in pins:
        raise ConfigurationError(
            f"{log.pipeline} has no pin {name!r}",
            code="cli.unknown_pin",
            advice=f"there are: {', '.join(sorted(pins)) or 'none'}",
        )
    roots.unpin(name)
    output.console().print(f"{pins[name].checkpoint} is no longer pinned as {name}")


@app.command("diff")
def compare_checkpoints(
    pipeline: PipelineArgument,
    left: CheckpointArgument,
    right: CheckpointArgument,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: rows, positions, frontiers, state, tables."""
    from tidegate.checkpoints.checkpoint_catalog import diff_checkpoints

    catalog = _open_catalog(pipeline, store)
    found = diff_checkpoints(
        *(catalog.read_manifest(catalog.resolve(text)) for text in (left, right))
    )
    if as_json:
        output.print_envelope("diff", found.model_dump(mode="json"))
        return
    if found.same:
        output.console().print(
            f"{found.left} and {found.right} are equal"
            + (", but for the spec" if found.spec_changed else "")
        )
        return
    rows: list[tuple[object, ...]] = [
        ("rows", name, "", f"{change:+,}") for name, change in found.counters.items()
    ]
    for what in ("positions", "decider", "state", "tables"):
        rows += [(what, name, pair.left, pair.right) for name, pair in getattr(found, what).items()]
    rows += [("spec", "digest", "", "changed")] if found.spec_changed else []
    output.print_table(
        ["what", "name", found.left, found.right],
        [[_shorten_cell(value) for value in row] for row in rows],
    )


def _open_catalog(pipeline: str, store: str | None) -> CheckpointCatalog:
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog

    return CheckpointCatalog(arguments.open_log(pipeline, store))


def _make_deep_check(catalog: CheckpointCatalog) -> DeepCheck:
    from tidegate.jobs.engine.verify_contents import make_content_check

    return make_content_check(catalog.log.store)


def _format_summary_row(row: SlotSummary) -> tuple[object, ...]:
    notes = [f"pinned as {name}" for name in row.pins]
    notes += [row.condemned] if row.condemned else []
    notes += [] if row.on_lineage else ["left by a restore"]
    notes += {"stub": ["retired"], "fork": [f"restore of {row.parent or 'the beginning'}"]}.get(
        row.kind, []
    )
    name = row.id or f"t{row.timeline}-{row.slot:06d}"
    age = output.format_age(row.created_at)
    return (
        name,
        age,
        row.read,
        row.released,
        row.late,
        row.retained,
        row.files,
        output.format_size(row.bytes),
        ", ".join(notes),
    )


def _format_position(part: dict[str, Any]) -> str:
    """Where a slice ends, in the words of its source."""
    resume = part.get("resume") or {}
    if {"ordinal", "row"} <= set(resume):
        return f"object {resume['ordinal']}, row {resume['row']}"
    return str(part.get("end"))


def _rank_timing_step(step: str) -> int:
    order = ["plan", "survey", "decide", "move", "seal_before"]
    return order.index(step) if step in order else len(order)


def _print_restore_plan(plan: RestorePlan) -> None:
    since = f" of {output.format_short_instant(plan.since)}" if plan.since else ""
    back = f"{plan.epochs_rewound:,} epochs are taken back"
    again = (
        f", {plan.epochs_regained:,} of an older timeline come back" if plan.epochs_regained else ""
    )
    output.console().print(
        f"{plan.pipeline}: from {plan.head} back to {plan.target or BEGINNING}{since};"
        f" {back}{again}"
    )
    rows: list[tuple[str, Any]] = [
        (f"rows {name}", count) for name, count in plan.rows.items() if count
    ]
    rows += [(f"table {name}", count) for name, count in plan.tables.items()]
    rows += [(f"window results of {name}", count) for name, count in plan.windows.items()]
    if rows:
        output.print_table(["taken back", "rows"], rows)


def _find_spec_changes(pipeline: str, log: SlotLog, plan: RestorePlan) -> list[SpecChange]:
    """What the spec at hand makes of the checkpoint's state.

    Nothing where there is no spec at hand.
    """
    from tidegate.checkpoints.checkpoint_specs import compare_spec_with_checkpoint

    found = _find_spec_and_target(pipeline, log, plan)
    return (compare_spec_with_checkpoint(log.store, *found) or []) if found else []


@app.command("adopt")
def adopt_store_copy(spec: SpecArgument, store: StoreOption = None) -> None:
    """Make a copy of a store a pipeline of its own, with tables of its own, beside the original or in its place.

    Until then its drivers refuse to run, because it names the original's places. Sinks and tables
    of a shared catalog that the original filled stay the original's: give the copy a spec with
    other ones.
    """
    from tidegate.jobs.sinks.adopt_copy import adopt_copied_store

    pipeline = arguments.find_spec(spec)
    log = arguments.open_log(pipeline.name, store)
    uid = adopt_copied_store(pipeline, log)
    output.console().print(
        f"{log.store.url} is a pipeline of its own now, uid {uid}; its tables are made anew when it"
        " runs"
    )


def _refuse_unfit_spec(pipeline: str, log: SlotLog, plan: RestorePlan) -> None:
    from tidegate.checkpoints.checkpoint_specs import require_compatible_spec

    found = _find_spec_and_target(pipeline, log, plan)
    if found:
        require_compatible_spec(log, *found)


def _find_spec_and_target(
    pipeline: str, log: SlotLog, plan: RestorePlan
) -> tuple[PipelineSpec, Manifest] | None:
    from tidegate.checkpoints.bucket_layout import CheckpointId
    from tidegate.errors import ConfigurationError

    if plan.target is None:
        return None
    try:
        spec = arguments.find_spec(pipeline)
    except ConfigurationError:
        return None  # restored by name, far from its spec: the driver judges when it starts
    return spec, log.open_checkpoint(CheckpointId.parse(plan.target)).epoch


def _commit_under_lease(log: SlotLog, plan: RestorePlan, why: str) -> None:
    from tidegate.checkpoints.lease import Lease
    from tidegate.checkpoints.process_identity import ProcessIdentity
    from tidegate.checkpoints.restore import commit_restore

    lease = Lease.acquire(log.store, log.pipeline, ProcessIdentity.this_process())
    try:
        with _declare_recovering(log):
            request = f"restore-{secrets.token_hex(6)}"
            commit_restore(
                log,
                lease,
                plan,
                request_id=request,
                who=arguments.get_user_name(),
                why=why or "asked for on the command line",
            )
    finally:
        lease.release()


@contextmanager
def _declare_recovering(log: SlotLog) -> Iterator[None]:
    """Keep the sweep from starting a driver in the middle.

    Afterwards what was wanted before is wanted again.
    """
    from tidegate.checkpoints.desired_state import (
        DesiredState,
        read_desired_state,
        set_desired_state,
    )

    before = read_desired_state(log.store, log.pipeline)
    set_desired_state(
        log.store,
        log.pipeline,
        DesiredState.RECOVERING,
        who=arguments.get_user_name(),
        why="restore",
    )
    try:
        yield
    finally:
        set_desired_state(
            log.store,
            log.pipeline,
            before.state,
            who=before.who,
            why=before.why,
            only_from=DesiredState.RECOVERING,
        )


def _shorten_cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
