"""`tidegate check` and `tidegate replay`: do the tables say what the input and the log say?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.jobs.cli import arguments, output
from tidegate.jobs.cli.arguments import JsonOption, SpecArgument, StoreOption

if TYPE_CHECKING:
    from tidegate.checkpoints.slot_log import SlotLog

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.checkpoints.manifest import Manifest
    from tidegate.checkpoints.store import Store
    from tidegate.jobs.engine.replay import ReplayResult
    from tidegate.jobs.spec.pipeline import PipelineSpec


def check_exactness(
    pipeline: SpecArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Compare input, tables and an independent recomputation: is every row in exactly one place?

    Reads the input objects again and every table, but no topic. Exit code 1 if something is not
    exact.
    """
    spec = arguments.find_spec(pipeline)
    log = arguments.open_log(spec.name, store)
    from tidegate.jobs.sinks.exactness_audit import audit_exactness
    from tidegate.jobs.sinks.published_tables import read_table
    from tidegate.jobs.sources.input_view import InputView

    with TemporaryDirectory(prefix="tidegate-check-") as folder:
        view = InputView(log.store, spec, Path(folder))
        found = audit_exactness(
            spec, view, log, lambda name: read_table(spec, log.store, name, current_only=True)
        )
    if as_json:
        data = {
            "exact": found.is_exact,
            "rows": found.rows,
            "windows": found.windows,
            "problems": found.problems,
        }
        output.print_envelope("check", data | {"skipped": found.skipped, "topics": found.topics})
    else:
        columns = sorted(
            {name for places in found.rows.values() for name in places}, key=_order_read_first
        )
        output.print_table(
            ["source", *columns],
            [[s, *(p.get(c, 0) for c in columns)] for s, p in found.rows.items()],
        )
        for name in found.topics:
            output.console().print(
                f"source {name}: a topic, which is not read again; no row of it stands in two"
                " places"
            )
        for name, count in found.windows.items():
            output.console().print(f"window {name}: {count:,} results compared")
        for name, why in found.skipped.items():
            output.console().print(f"window {name}: not compared, {why}")
        compared = (
            "what was compared is exact"
            if found.topics
            else "exact: every row in one place, windows equal a recomputation"
        )
        for problem in found.problems or [compared]:
            output.console().print(problem)
    raise typer.Exit(0 if found.is_exact else 1)


def _order_read_first(name: str) -> tuple[bool, str]:
    return name != "read", name


def replay_sealed_epoch(
    pipeline: SpecArgument,
    epoch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Slot of the epoch. Default: the newest.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a sealed epoch again from its recorded cut and decision, and compare its rows.

    Seals nothing.

    Exit code 1 if a table comes out differently.
    """
    spec = arguments.find_spec(pipeline)
    log = arguments.open_log(spec.name, store)
    head = log.head()
    slots = list(
        log.epochs_between(head.timeline, max(1, (epoch or head.slot) - 1), epoch or head.slot)
    )
    if not slots or slots[-1].record.slot != (epoch or head.slot):
        from tidegate.errors import ConfigurationError

        raise ConfigurationError(
            f"{spec.name} has no epoch {epoch}; the newest is {head.slot}",
            code="replay.no_epoch",
            advice=f"see: tidegate checkpoints list {spec.name}",
        )
    if slots[-1].epoch.is_merge:
        from tidegate.errors import ConfigurationError

        raise ConfigurationError(
            f"slot {slots[-1].epoch.slot} of {spec.name} is no epoch of a run but the merge of a"
            " splice request",
            code="replay.merge",
            advice=(
                "name another one with --epoch; what a merge did stands in: tidegate splice list"
            ),
        )
    parent = slots[0].epoch if len(slots) == 2 else None
    found = _replay_in_scratch_store(spec, slots[-1].epoch, parent, log.store)
    if as_json:
        output.print_envelope(
            "replay",
            {"checkpoint": found.checkpoint, "equal": found.is_equal, "tables": found.tables},
        )
    else:
        rows = [[name, *counts] for name, counts in found.tables.items()]
        output.print_table(
            ["table", "rows sealed", "rows replayed", "rows that differ"],
            rows,
            title=found.checkpoint,
        )
        output.console().print("equal" if found.is_equal else "NOT equal")
    raise typer.Exit(0 if found.is_equal else 1)


def _replay_in_scratch_store(
    spec: PipelineSpec, epoch: Manifest, parent: Manifest | None, sealed: Store
) -> ReplayResult:
    from tidegate.checkpoints.local_store import LocalStore
    from tidegate.checkpoints.scratch_store import ScratchStore
    from tidegate.checkpoints.slot_log import SlotLog
    from tidegate.jobs.driver.pipeline_run import make_dispatcher
    from tidegate.jobs.engine.replay import replay_epoch
    from tidegate.jobs.sources.input_view import InputView
    from tidegate.jobs.spark.mover import SparkMover

    with TemporaryDirectory(prefix="tidegate-replay-") as folder:
        scratch = LocalStore(Path(folder) / "store")
        overlay = ScratchStore(InputView(sealed, spec, Path(folder)), scratch)
        mover = SparkMover(overlay, spec, Path(folder) / "work")
        try:
            dispatch = make_dispatcher(spec, overlay, SlotLog(overlay, spec.name), mover, parent)
            return replay_epoch(spec, epoch, parent, mover, overlay, scratch, dispatch)
        finally:
            mover.close()


# `tidegate quality`: the checks, in a process of their own, because Great Expectations takes
# seconds and 300 MB to load.


def run_quality_checks(
    spec: SpecArgument,
    store: StoreOption = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy the Data Docs of this run there, to open them in a browser.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check late rows, barriers, checkpoints, dead letters and order of a pipeline.

    Exit 1 when a critical check fails.

    The result and the Data Docs lie in the store, under <pipeline>/quality/.
    """
    pipeline = arguments.find_spec(spec)
    log = arguments.open_log(pipeline.name, store)
    command = [
        sys.executable,
        "-m",
        "tidegate.expectations",
        "run",
        str(arguments.resolve_spec_path(spec)),
        "--store",
        log.store.url,
    ]
    done = subprocess.run([*command, *(["--json"] if as_json else [])], check=False)
    if docs is not None and done.returncode in (0, 1):
        _copy_data_docs(log, docs, quiet=as_json)
    raise typer.Exit(done.returncode)


def _copy_data_docs(log: SlotLog, folder: Path, *, quiet: bool) -> None:
    from tidegate.checkpoints.bucket_layout import BucketLayout
    from tidegate.checkpoints.canonical_json import parse_json

    latest = parse_json(
        log.store.get(f"{BucketLayout(log.pipeline).quality_prefix}results/latest.json").data
    )
    folder.mkdir(parents=True, exist_ok=True)
    for page in log.store.list_objects(latest["docs"].removesuffix("index.html")):
        (folder / page.key.rsplit("/", 1)[1]).write_bytes(log.store.get(page.key).data)
    if not quiet:
        output.console().print(f"Data Docs copied: {folder / 'index.html'}")
