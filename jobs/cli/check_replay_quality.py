"""`tidegate check`, `replay` and `quality`: whether the tables agree with the input and the log."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments, output
from .arguments import JsonOption, SpecArgument, StoreOption
from .errors import NO_EPOCH, SLOT_IS_MERGE

if TYPE_CHECKING:
    from tidegate.checkpoints.manifest import Manifest
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.engine.replay import ReplayResult
    from tidegate.jobs.spec.pipeline import PipelineSpec
    from tidegate.json_types import JsonObject


def check_exactness(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Compare input, tables and an independent recomputation: is every row in exactly one place?

    Reads the input objects and every table again, but no topic. Sealed rows that are not published
    yet count as missing. Exit code 1 if something is not exact.
    """
    from tidegate.checkpoints.s3_store import list_bucket_hazards
    from tidegate.jobs.sinks.exactness_audit import audit_exactness
    from tidegate.jobs.sinks.published_tables import read_table
    from tidegate.jobs.sources.input_view import InputView

    spec, log = arguments.open_spec_and_log(pipeline, store)
    with TemporaryDirectory(prefix="tidegate-check-") as folder:
        view = InputView(log.store, spec, Path(folder))
        report = audit_exactness(
            spec, view, log, lambda name: read_table(spec, log.store, name, current_only=True)
        )
    hazards = list_bucket_hazards(log.store, log.layout.pipeline_prefix)
    fields = ("rows", "windows", "problems", "skipped", "topics", "set_aside", "retired_upto")
    data = {"exact": report.is_exact, "bucket_rules": hazards}
    data |= {name: getattr(report, name) for name in fields}
    names = {name for places in report.rows.values() for name in places}
    # "read" first: the other columns have to add up to it.
    columns = sorted(names, key=lambda name: (name != "read", name))
    output.print_result(as_json, "check", data, columns=columns)
    raise typer.Exit(0 if report.is_exact else 1)


def replay_sealed_epoch(
    pipeline: SpecArgument,
    epoch: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="A checkpoint or slot. Default: the newest."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a sealed epoch again and compare its rows with the sealed ones.

    Uses the spec that sealed the epoch and its recorded cut, decides again, and seals nothing.
    Spark runs on this machine, whatever the spec's master. Exit code 1 if the decision or a table
    comes out differently.
    """
    from tidegate.jobs.engine.recorded_epochs import find_own_spec

    spec, log = arguments.open_spec_and_log(pipeline, store)
    slot = None if epoch is None else arguments.resolve_slot(log, epoch)
    sealed, parent = _read_epoch_and_parent(log, slot)
    # The spec may have changed since; the epoch can only be repeated by its own.
    spec = find_own_spec(spec, sealed, log.store)
    result = _replay_in_scratch_store(spec, sealed, parent, log.store)
    data = {
        "checkpoint": result.checkpoint,
        "equal": result.is_equal,
        "tables": result.tables,
        "decided_differently": list(result.decided_differently),
    }
    output.print_result(as_json, "replay", data)
    raise typer.Exit(0 if result.is_equal else 1)


def _read_epoch_and_parent(log: SlotLog, epoch: int | None) -> tuple[Manifest, Manifest | None]:
    """Return the manifest of a slot (default: the newest) and of the slot before, if there is one.

    Raises:
        ConfigurationError: the slot has no epoch, or a merge filled it.
    """
    head = log.head()
    slot = epoch or head.slot
    # The slot before is read with it, because the epoch began with that state.
    slots = list(log.epochs_between(head.timeline, max(1, slot - 1), slot))
    if not slots or slots[-1].record.slot != slot:
        raise NO_EPOCH(pipeline=log.pipeline, epoch=epoch, newest=head.slot)
    sealed = slots[-1].epoch
    # A merge has no cut, so there is nothing to run again.
    if sealed.is_merge:
        raise SLOT_IS_MERGE(pipeline=log.pipeline, slot=sealed.slot)
    return sealed, slots[0].epoch if len(slots) == 2 else None


def _replay_in_scratch_store(
    spec: PipelineSpec, epoch: Manifest, parent: Manifest | None, sealed: Store
) -> ReplayResult:
    from tidegate.checkpoints.local_store import LocalStore
    from tidegate.checkpoints.open_store import ScratchStore
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.driver.pipeline_run import make_dispatcher
    from tidegate.jobs.engine.epoch_engine import EpochPorts
    from tidegate.jobs.engine.replay import replay_epoch
    from tidegate.jobs.sinks.output_tables import DriverTables
    from tidegate.jobs.sources.input_view import InputView
    from tidegate.jobs.spark.mover import SparkMover

    with TemporaryDirectory(prefix="tidegate-replay-") as folder:
        scratch = LocalStore(Path(folder) / "store")
        # Reads come from the real store, writes stay in the temporary one.
        overlay = ScratchStore(InputView(sealed, spec, Path(folder)), scratch)
        mover = SparkMover(overlay, _use_local_master(spec), Path(folder) / "work")
        try:
            dispatch = make_dispatcher(spec, overlay, SlotLog(overlay, spec.name), mover, parent)
            ports = EpochPorts((), mover, DriverTables(overlay).write, dispatch)
            return replay_epoch(spec, epoch, parent, ports, sealed, scratch)
        finally:
            mover.close()


def _use_local_master(spec: PipelineSpec) -> PipelineSpec:
    """The spec for tasks that see a temporary folder of this machine."""
    if spec.spark.master.startswith("local"):
        return spec
    spark = spec.spark.model_copy(update={"master": "local[2]"})
    return spec.model_copy(update={"spark": spark})


def run_quality_checks(
    spec: SpecArgument,
    store: StoreOption = None,
    docs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Copy the Data Docs of this run there, for a browser."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check late rows, barriers, checkpoints, dead letters and order of a pipeline.

    Of a job: the duration of its batches, backlog, state, dropped rows and watermarks.

    Exit code 1 if a critical check fails. The result and the Data Docs are in the store, under
    <pipeline>/quality/.
    """
    from tidegate.expectations.quality_run import check_quality
    from tidegate.expectations.suite_files import find_suites

    checked, log = arguments.open_any_spec_and_log(spec, store)
    folder = arguments.resolve_spec_path(spec).parent
    result = check_quality(find_suites(checked, folder), log.store)
    copied = None if docs is None else _copy_data_docs(log.store, result, docs)
    where = log.store.uri(result["docs"])
    output.print_result(as_json, "quality", result, docs=where, copied=copied)
    raise typer.Exit(1 if result["verdict"] == "fail" else 0)


def _copy_data_docs(store: Store, result: JsonObject, folder: Path) -> Path:
    """Return the copied page to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in store.list_objects(result["docs"].removesuffix("index.html")):
        (folder / page.key.rsplit("/", 1)[1]).write_bytes(store.get(page.key).data)
    return folder / "index.html"
