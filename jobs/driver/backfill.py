"""``python -m tidegate.jobs.driver.backfill SPEC --store URL --start T --end T``.

Computes the windows of a past range again in a batch run, and compares them with the stream's.

1. The same pipeline, under another name, reads all its input in one epoch: rows that were late for
   the stream are on time here.
2. The windows of the range that both runs have closed are compared.
3. The result is written to ``<p>/backfills/<name>.json``; its key is the last line of the output.
   The state of the batch run is deleted, unless ``--keep`` is given.

The stream is not changed and may run meanwhile; the batch run has no sinks. To put late rows into
the stream's tables is the task of a merge (`tidegate splice`).
"""

import hashlib
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import structlog
import typer

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import exit_on_error
from tidegate.jobs.engine.arrow_tables import list_rows
from tidegate.jobs.engine.replay import values_differ
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import BATCH_RUN_MARK, PipelineSpec, ReadLimits
from tidegate.jobs.spec.window_specs import WindowSpec
from tidegate.json_types import JsonObject, JsonView

from .epoch_loop import EndConditions
from .errors import BAD_BACKFILL_RANGE
from .log_output import configure_logs
from .pipeline_run import RunOptions, run_pipeline

_log = structlog.get_logger("tidegate.backfill")

_IDLE_SECONDS = 3.0  # without a row the batch run ends: a stream's sources have no end
# A source without limits would get those of one epoch of a stream.
_UNLIMITED_EPOCH = ReadLimits(objects=1_000_000, rows=2**31 - 1)
_MAX_EXAMPLES = 10  # differences of each kind that are listed; all are counted

_Rows = list[dict[str, Any]]
_Range = tuple[datetime, datetime]


def run_backfill(
    spec: Annotated[Path, typer.Argument(help="the pipeline's YAML file")],
    store: Annotated[
        str, typer.Option(help="s3://bucket/prefix or a folder", envvar="TIDEGATE_STORE")
    ],
    start: Annotated[str, typer.Option(help="first window start, ISO, with its offset from UTC")],
    end: Annotated[str, typer.Option(help="windows end at this instant or before")],
    keep: Annotated[
        bool, typer.Option(help="leave the batch run's state and tables in the store")
    ] = False,
) -> None:
    """Run and compare. Exit code 0 means that both were done, not that all windows are equal."""
    configure_logs(json=True)
    with exit_on_error():
        pipeline = load_spec(spec)
        bounds = _parse_range_instant("start", start), _parse_range_instant("end", end)
        with TemporaryDirectory(prefix="tidegate-backfill-") as folder:
            key = _run_and_compare(pipeline, store, bounds, keep, Path(folder))
    sys.stdout.write(f"{key}\n")


def make_batch_spec(spec: PipelineSpec, bounds: _Range, folder: Path) -> PipelineSpec:
    """Return the pipeline under another name, with a first epoch that reads all there is.

    The name is the same for the same range. The epoch takes at most 1,000,000 objects and 2**31 - 1
    rows of each partition. Nothing outside is changed: the pipeline has no sinks, and its catalog
    is a file in `folder`.
    """
    text = f"{bounds[0].isoformat()} {bounds[1].isoformat()}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    sources = {
        name: source.model_copy(update={"limits": _UNLIMITED_EPOCH})
        for name, source in spec.sources.items()
    }
    catalog: dict[str, object] = {
        "catalog": f"sqlite:///{folder / 'catalog.sqlite'}",
        "catalog_options": {},
        "namespace": None,
    }
    return spec.model_copy(
        update={
            "name": f"{spec.name[:50]}{BATCH_RUN_MARK}{digest}",
            "sources": sources,
            "outputs": spec.outputs.model_copy(update=catalog),
            "sinks": {},
        }
    )


def compare_windows(
    spec: PipelineSpec, batch: PipelineSpec, store: Store, bounds: _Range
) -> JsonObject:
    """Return, per window of the spec, the comparison of `compare_results` within the range.

    A result is within the range if its window begins and ends in it.
    """
    from tidegate.jobs.sinks.published_tables import read_table

    def read_range(side: PipelineSpec, name: str) -> _Rows:
        """Return the current results of one window that lie in the range."""
        rows = list_rows(read_table(side, store, name, current_only=True))
        return [
            row
            for row in rows
            if bounds[0] <= row["window_start"] and row["window_end"] <= bounds[1]
        ]

    return {
        name: compare_results(window, read_range(spec, name), read_range(batch, name))
        for name, window in spec.windows.items()
    }


def compare_results(window: WindowSpec, stream: _Rows, batch: _Rows) -> dict[str, Any]:
    """Compare results by key and span: counts, and examples of each kind of difference.

    Results that end after the last window of the other side are not compared, because the other
    side may still emit them. `uncompared` counts them; they are all if a side has no result.
    Aggregates may differ as in `values_differ`. At most 10 examples of each kind are listed.
    """
    ends = [[row["window_end"] for row in rows] for rows in (stream, batch)]
    # A window that only one side has closed yet says nothing about the other side.
    closed = min(map(max, ends)) if all(ends) else None
    ours, theirs = (
        {
            _make_result_key(window, row): row
            for row in rows
            if closed is not None and row["window_end"] <= closed
        }
        for rows in (stream, batch)
    )
    both = ours.keys() & theirs.keys()
    different = sorted(
        key
        for key in both
        if any(values_differ(ours[key][name], theirs[key][name]) for name in window.aggregates)
    )
    only_stream = sorted(ours.keys() - theirs.keys())
    only_batch = sorted(theirs.keys() - ours.keys())
    return {
        "equal": len(both) - len(different),
        "different": len(different),
        "only_stream": len(only_stream),
        "only_batch": len(only_batch),
        "uncompared": len(stream) + len(batch) - len(ours) - len(theirs),
        "examples": {
            "different": [
                {
                    "window": key,
                    "stream": _format_aggregates(window, ours[key]),
                    "batch": _format_aggregates(window, theirs[key]),
                }
                for key in different[:_MAX_EXAMPLES]
            ],
            "only_stream": only_stream[:_MAX_EXAMPLES],
            "only_batch": only_batch[:_MAX_EXAMPLES],
        },
    }


def is_equal(window: JsonView) -> bool:
    """Whether a comparison found no difference, and compared a result if there is one."""
    differs = any(window[kind] for kind in ("different", "only_stream", "only_batch"))
    return not differs and not (window["uncompared"] and not window["equal"])


def _run_and_compare(spec: PipelineSpec, url: str, bounds: _Range, keep: bool, folder: Path) -> str:
    batch, store = make_batch_spec(spec, bounds, folder), open_store(url)
    _delete_pipeline_state(store, batch.name)  # an earlier run may have left it behind
    code = run_pipeline(batch, RunOptions(store_url=url, until=EndConditions(idle=_IDLE_SECONDS)))
    if code != 0:
        raise typer.Exit(code)
    windows = compare_windows(spec, batch, store, bounds)
    equal = all(is_equal(window) for window in windows.values())
    checkpoint = SlotLog(store, spec.name).head().checkpoint
    newest = SlotLog(store, batch.name).head().record
    result = {
        "pipeline": spec.name,
        "start": bounds[0].isoformat(),
        "end": bounds[1].isoformat(),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "equal": equal,
        # Rows that arrived while the batch ran, or did not fit into one epoch.
        "late_in_batch": newest.counters.late if newest is not None else 0,
        "windows": windows,
    }
    key = BucketLayout(spec.name).backfill_report_key(batch.name)
    store.put(key, canonical_bytes(result))
    if not keep:
        _delete_pipeline_state(store, batch.name)
    _log.info("compared", pipeline=spec.name, equal=equal, key=key)
    return key


def _delete_pipeline_state(store: Store, pipeline: str) -> None:
    for entry in list(store.list_objects(BucketLayout(pipeline).pipeline_prefix)):
        store.delete(entry.key)


def _make_result_key(window: WindowSpec, row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in ("window_start", "window_end", *window.keys))


def _format_aggregates(window: WindowSpec, row: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(row[name]) for name in window.aggregates}


def _parse_range_instant(option: str, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise BAD_BACKFILL_RANGE(option=option, text=text)
    return instant


if __name__ == "__main__":
    typer.run(run_backfill)
