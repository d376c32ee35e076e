"""`tidegate size`: how many cores of executors a pipeline needs for so many rows per second."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from . import arguments, output
from .arguments import PipelineArgument, StoreOption
from .errors import NO_FIGURES

_EPOCHS: Final = 100
_LINES: Final = 20_000
_SHOWN: Final = (1, 2, 4, 8, 16, 32, 64)


def show_cluster_size(
    pipeline: PipelineArgument,
    rows_per_second: Annotated[
        float, typer.Option("--rows-per-second", metavar="N", min=0.001, help="What is needed.")
    ],
    store: StoreOption = None,
) -> None:
    """Compute how many cores of executors a pipeline needs, from its own newest epochs.

    The processor time of tasks is laid upon so many cores, and the rest of each epoch stays as it
    was. It prints the figures, the most memory that a Python worker has held, and the assumptions.
    The exit code is 1 if no number of cores is enough.
    """
    from tidegate.checkpoints.driver_reports import list_log_attempts, read_log_tail
    from tidegate.jobs.engine.cluster_size import ASSUMPTIONS, MOST_CORES, collect_figures
    from tidegate.jobs.engine.recorded_epochs import read_kept_manifests

    log = arguments.open_log(pipeline, store)
    manifests = list(read_kept_manifests(log, max(log.head().slot - _EPOCHS, 1)))
    newest = list_log_attempts(log.store, log.pipeline)[:1]
    lines = [
        line
        for attempt in newest
        for line in read_log_tail(log.store, log.pipeline, attempt, _LINES)
    ]
    size = collect_figures(manifests, lines)
    if not size.epochs:
        raise NO_FIGURES(pipeline=log.pipeline)
    cores = size.choose_cores(rows_per_second)
    output.print_text(
        "size",
        pipeline=log.pipeline,
        size=size,
        shown=_SHOWN,
        wanted=rows_per_second,
        cores=cores,
        most=MOST_CORES,
        assumptions=ASSUMPTIONS,
    )
    if cores is None:
        raise typer.Exit(1)
