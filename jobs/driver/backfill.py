"""``python -m tidegate.jobs.driver.backfill SPEC --store URL --start T --end T``.

What a batch run makes of a past range.

1. The same pipeline under a name of its own reads its whole input at once: whatever came late for
  the stream is in time here.
2. Its windows in the range are compared with the stream's, those that both have closed.
3. The result goes to ``<p>/backfills/<name>.json``, whose key is the last line of the output; the
  batch run's state is deleted.

The stream is not touched and may go on meanwhile, and its sinks hear nothing. Putting rows into its
tables is the business of a splice.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import structlog
import typer

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.errors import ConfigurationError, TidegateError
from tidegate.jobs.driver.epoch_loop import EndConditions
from tidegate.jobs.driver.log_output import configure_logs
from tidegate.jobs.driver.pipeline_run import RunOptions, run_pipeline
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.pipeline import PipelineSpec, ReadLimits
from tidegate.jobs.spec.window_specs import WindowSpec

_log = structlog.get_logger("tidegate.backfill")

_IDLE_SECONDS: Final = 3.0  # seconds without a row: a stream's sources need not end
_UNLIMITED_EPOCH: Final = ReadLimits(
    objects=1_000_000, rows=2**31 - 1
)  # a source without limits has those of an epoch of a stream
_MAX_EXAMPLES: Final = 10  # differences of each kind that are named; all are counted
_FLOAT_TOLERANCE: Final = 1e-9  # sums of floats depend on their order


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
    """Run and compare; exit code 0 says that this was done, the result says what was found."""
    configure_logs(json=True)
    try:
        pipeline, bounds = (
            load_spec(spec),
            (_parse_range_instant("start", start), _parse_range_instant("end", end)),
        )
        with TemporaryDirectory(prefix="tidegate-backfill-") as folder:
            key = _run_and_compare(pipeline, store, bounds, keep, Path(folder))
    except TidegateError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.failure_class.exit_code) from None
    sys.stdout.write(f"{key}\n")


def make_batch_spec(
    spec: PipelineSpec, bounds: tuple[datetime, datetime], folder: Path
) -> PipelineSpec:
    """The same pipeline with a name of its own, whose first epoch takes all there is, so that nothing of it is late.

    Nothing of it reaches the outside: it has no sinks, and registers its tables in a catalog in
    this folder.
    """
    mark = hashlib.sha256(f"{bounds[0].isoformat()} {bounds[1].isoformat()}".encode()).hexdigest()[
        :8
    ]
    sources = {
        name: source.model_copy(update={"limits": _UNLIMITED_EPOCH})
        for name, source in spec.sources.items()
    }
    own: dict[str, object] = {
        "catalog": f"sqlite:///{folder / 'catalog.sqlite'}",
        "catalog_options": {},
        "namespace": None,
    }
    outputs = spec.outputs.model_copy(update=own)
    return spec.model_copy(
        update={
            "name": f"{spec.name[:50]}__bf_{mark}",
            "sources": sources,
            "outputs": outputs,
            "sinks": {},
        }
    )


def compare_windows(
    spec: PipelineSpec, batch: PipelineSpec, store: Store, bounds: tuple[datetime, datetime]
) -> dict[str, Any]:
    """Per window of the spec: how many results are equal, and which are not."""
    from tidegate.jobs.sinks.published_tables import read_table

    found = {}
    for name, window in spec.windows.items():
        sides = [
            read_table(side, store, name, current_only=True).to_pylist() for side in (spec, batch)
        ]
        found[name] = compare_results(
            window, *(list(_select_rows_within(rows, bounds)) for rows in sides)
        )
    return found


def compare_results(
    window: WindowSpec, stream: list[dict[str, Any]], batch: list[dict[str, Any]]
) -> dict[str, Any]:
    """Results by key and span, in both and in one of them only.

    A result after the last one that the other side has closed is not compared: there it may still
    come.
    """
    closed = min(
        (max((row["window_end"] for row in rows), default=None) for rows in (stream, batch)),
        key=_to_sortable_time,
    )
    ours, theirs = (
        {_make_result_key(window, row): row for row in rows if _is_result_closed(row, closed)}
        for rows in (stream, batch)
    )
    both = ours.keys() & theirs.keys()
    different = sorted(
        key for key in both if not _has_same_aggregates(window, ours[key], theirs[key])
    )
    only_stream, only_batch = (
        sorted(ours.keys() - theirs.keys()),
        sorted(theirs.keys() - ours.keys()),
    )
    return {
        "equal": len(both) - len(different),
        "different": len(different),
        "only_stream": len(only_stream),
        "only_batch": len(only_batch),
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


def _run_and_compare(
    spec: PipelineSpec, url: str, bounds: tuple[datetime, datetime], keep: bool, folder: Path
) -> str:
    batch, store = make_batch_spec(spec, bounds, folder), open_store(url)
    _delete_pipeline_state(store, batch.name)  # of an earlier try
    code = run_pipeline(batch, RunOptions(store_url=url, until=EndConditions(idle=_IDLE_SECONDS)))
    if code != 0:
        raise typer.Exit(code)
    found = compare_windows(spec, batch, store, bounds)
    exact = all(
        not any(w[kind] for kind in ("different", "only_stream", "only_batch"))
        for w in found.values()
    )
    head, own = (
        SlotLog(store, spec.name).head().checkpoint,
        SlotLog(store, batch.name).head().record,
    )
    result = {
        "pipeline": spec.name,
        "start": bounds[0].isoformat(),
        "end": bounds[1].isoformat(),
        "checkpoint": str(head) if head else None,
        "equal": exact,
        "late_in_batch": (
            own.counters.late if own is not None else 0
        ),  # rows that came while it ran, or beyond all limits
        "windows": found,
    }
    key = f"{BucketLayout(spec.name).pipeline_prefix}backfills/{batch.name}.json"
    store.put(key, canonical_bytes(result))
    if not keep:
        _delete_pipeline_state(store, batch.name)
    _log.info("compared", pipeline=spec.name, equal=exact, key=key)
    return key


def _delete_pipeline_state(store: Store, pipeline: str) -> None:
    for entry in list(store.list_objects(BucketLayout(pipeline).pipeline_prefix)):
        store.delete(entry.key)


def _select_rows_within(
    rows: list[dict[str, Any]], bounds: tuple[datetime, datetime]
) -> Iterator[dict[str, Any]]:
    return (
        row for row in rows if bounds[0] <= row["window_start"] and row["window_end"] <= bounds[1]
    )


def _to_sortable_time(instant: datetime | None) -> float:
    return -math.inf if instant is None else instant.timestamp()


def _is_result_closed(row: Mapping[str, Any], closed: datetime | None) -> bool:
    return closed is not None and row["window_end"] <= closed


def _make_result_key(window: WindowSpec, row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in ("window_start", "window_end", *window.keys))


def _format_aggregates(window: WindowSpec, row: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(row[name]) for name in window.aggregates}


def _has_same_aggregates(
    window: WindowSpec, left: Mapping[str, Any], right: Mapping[str, Any]
) -> bool:
    return all(_are_values_equal(left[name], right[name]) for name in window.aggregates)


def _are_values_equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=_FLOAT_TOLERANCE) or (
            math.isnan(left) and math.isnan(right)
        )
    return bool(left == right)


def _parse_range_instant(name: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise ConfigurationError(
            f"--{name}: {text!r} is no instant with an offset from UTC",
            code="backfill.range",
            advice="2026-01-31T00:00:00Z",
        )
    return found


if __name__ == "__main__":
    typer.run(run_backfill)
