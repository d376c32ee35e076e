"""`tidegate checkpoints`: list, show, verify, restore, pin, compare and adopt checkpoints."""

from __future__ import annotations

import secrets
from contextlib import suppress
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
from .errors import NO_SPARK_STATE, UNKNOWN_PIN

if TYPE_CHECKING:
    from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
    from tidegate.checkpoints.manifest import Manifest
    from tidegate.checkpoints.restore import RestorePlan
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.store import Store
    from tidegate.checkpoints.verify import Verification
    from tidegate.jobs.sealed_queries.state_diff import OperatorDifference

app = typer.Typer(no_args_is_help=True, help="List, verify, restore, pin and compare checkpoints.")

BEGINNING = "beginning"  # the restore target before the first checkpoint
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
    data = [row.model_dump(mode="json") for row in shown]
    output.print_result(as_json, "checkpoints", data, older=len(checkpoints) - len(shown))


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
    data = manifest.model_dump(mode="json") | {"id": str(manifest.id)}
    counters = manifest.counters.model_dump(exclude={"per_source", "dropped"})
    counters["dropped"] = sum(manifest.counters.dropped.values())
    steps = [*_TIMING_STEPS, *manifest.timings]
    timings = sorted(manifest.timings.items(), key=lambda timing: steps.index(timing[0]))
    output.print_result(
        as_json, "checkpoint", data, manifest=manifest, counters=counters, timings=timings
    )


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
            counts = {"index": len(results), "total": len(chosen)}
            output.print_text("verification", result=result, **counts)
    if as_json:
        output.print_envelope("verification", [r.model_dump(mode="json") for r in results])
    if any(r.verdict == verify.CheckpointVerdict.DAMAGED for r in results):
        raise typer.Exit(1)


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
    from tidegate.jobs.spec.pipeline import PipelineSpec

    catalog = _open_catalog(pipeline, store)
    log, changes = catalog.log, []
    # Resolved before the question, so that the person confirms one definite checkpoint.
    target = None if checkpoint == BEGINNING else catalog.resolve(checkpoint)
    spec = None
    # Restored by name, without its spec: the driver checks it when it starts.
    with suppress(ConfigurationError):
        spec = arguments.find_any_spec(pipeline)
    plan = plan_restore(log, target, catalog=catalog, spec=spec)
    if isinstance(spec, PipelineSpec) and target:
        manifest = log.open_checkpoint(target).epoch
        changes = checkpoint_specs.SealedSpecs(log).compare_with(spec, manifest) or []
    if not as_json:
        output.print_text("restore", plan=plan, changes=changes)
    if not dry_run:
        plan.require_sinks_follow()
        # Before the question: what the next driver would refuse must not be committed first.
        if isinstance(spec, PipelineSpec) and target:
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
        output.print_line(f"what it left: tidegate checkpoints list {log.pipeline} --all")


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
    state: Annotated[
        bool,
        typer.Option(
            "--state", help="Also the rows of a job's state. Starts Spark and fetches both states."
        ),
    ] = False,
    examples: Annotated[
        int, typer.Option(min=0, help="With --state: keys to show of each change.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: rows, positions, frontiers, state, tables."""
    from tidegate.checkpoints.checkpoint_catalog import diff_checkpoints

    catalog = _open_catalog(pipeline, store)
    first, second = (catalog.read_manifest(catalog.resolve(name)) for name in (left, right))
    diff = diff_checkpoints(first, second)
    states = _compare_states(catalog.log.store, first, second, examples) if state else None
    more = {} if states is None else {"state_rows": [one.model_dump() for one in states]}
    about: dict[str, Any] = {"left": first, "right": second, "raw": raw}
    output.print_result(as_json, "diff", diff.model_dump(mode="json") | more, **about)


def _compare_states(
    store: Store, first: Manifest, second: Manifest, examples: int
) -> list[OperatorDifference]:
    from tidegate.checkpoints.batch_notes import BatchNotes
    from tidegate.jobs.sealed_queries.state_diff import compare_states
    from tidegate.jobs.spark.spark_session import start_classic_session
    from tidegate.jobs.spec.operations import SparkSpec

    if BatchNotes.from_manifest(first) is None:
        raise NO_SPARK_STATE(pipeline=first.pipeline)
    session = start_classic_session(SparkSpec(jvm="quick"), first.pipeline)
    try:
        return list(compare_states(session, store, first, second, examples))
    finally:
        session.stop()


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
