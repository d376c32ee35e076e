"""What `tidegate run` shows: a line per epoch, a live line on a terminal, and how the run ended.

Everything else that the run writes goes to a log file: the driver's log lines, and what Spark's JVM
prints. The file is sent to the store as under Airflow, so that `tidegate logs` shows it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tidegate.checkpoints.driver_reports import make_attempt_name
from tidegate.checkpoints.row_counts import RowCounts

from . import output

if TYPE_CHECKING:
    from rich.status import Status

    from tidegate.checkpoints.manifest import Manifest
    from tidegate.jobs.driver.epoch_loop import RunOutcome
    from tidegate.jobs.driver.pipeline_run import RunOptions
    from tidegate.jobs.engine.epoch_engine import EpochReport
    from tidegate.jobs.spec.pipeline import PipelineSpec


class RunDisplay:
    """Prints the epochs of one run.

    Args:
        quiet: print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._screen = output.console()
        self._newest: Manifest | None = None
        self._status: Status | None = None

    @contextmanager
    def show_progress(self, pipeline: str) -> Iterator[None]:
        """Show on a terminal, while the block runs, what the run is doing."""
        if self._quiet or not self._screen.is_terminal:
            yield
            return
        with self._screen.status(f"{pipeline}: starting Spark") as self._status:
            yield

    def on_epoch(self, report: EpochReport, seconds: float) -> None:
        """Print the line of a sealed epoch; `seconds` is how long it took.

        The driver calls this after each epoch. An epoch that sealed nothing has no line.
        """
        if report.manifest is None:
            self._update_progress("waiting for rows")
            return
        self._newest = report.manifest
        self._update_progress("reading")
        if not self._quiet:
            self._screen.print(_format_epoch(report, report.manifest, seconds), markup=False)

    def show_end(self, spec: PipelineSpec, store_url: str, outcome: RunOutcome) -> None:
        """Print why the run ended, the rows in all, and what still waits and for what."""
        if self._quiet:
            return
        newest = self._newest or _read_newest(spec.name, store_url)
        end = {"spec": spec, "store_url": store_url, "outcome": outcome}
        counts = RowCounts.of_sources(newest.counters.per_source if newest else {})
        end["counts"] = counts.to_record()
        output.print_text("run_end", newest=newest, is_new=self._newest is not None, **end)

    def _update_progress(self, doing: str) -> None:
        if self._status is None:
            return
        read = f", {self._newest.counters.read:,} rows read" if self._newest else ""
        self._status.update(f"{doing}{read}; Ctrl-C seals and stops")


def run_in_terminal(spec: PipelineSpec, options: RunOptions, *, quiet: bool) -> None:
    """Run a pipeline until it ends, and show its epochs and its end.

    The log file is deleted after a good end, because the store has it.

    Raises:
        TidegateError: what ended the run; a line before it names the log file.
    """
    from tidegate.jobs.driver import pipeline_run
    from tidegate.jobs.driver.log_output import (
        ATTEMPT_VARIABLE,
        LOG_VARIABLE,
        configure_logs,
        ship_log,
    )

    # The name of a launch, as under Airflow, so that `tidegate logs` finds this run too.
    attempt = make_attempt_name()
    path = Path(tempfile.gettempdir()) / f"tidegate-{spec.name}-{attempt}.log"
    display = RunDisplay(quiet=quiet)
    with ExitStack() as resources:
        # A folder for all users of the host, and a log may quote rows.
        private = partial(os.open, mode=0o600)
        file = resources.enter_context(
            open(path, "a", encoding="utf-8", buffering=1, opener=private)
        )
        resources.enter_context(_send_stderr(file))
        configure_logs(json=False, file=file)
        names = {LOG_VARIABLE: str(path), ATTEMPT_VARIABLE: attempt}
        resources.enter_context(ship_log(options.store_url, spec.name, names))
        try:
            with display.show_progress(spec.name):
                outcome = pipeline_run.run_until_end(
                    spec, replace(options, on_epoch=display.on_epoch)
                )
        except Exception:
            # The file stays after an error, because the store may be what failed.
            print(f"log: {path}", file=sys.stderr)
            raise
        display.show_end(spec, options.store_url, outcome)
    path.unlink()


def _read_newest(pipeline: str, store_url: str) -> Manifest | None:
    """Return the newest epoch; None if there is none."""
    from tidegate.checkpoints.open_store import open_store
    from tidegate.checkpoints.slot_log import SlotLog

    with closing(open_store(store_url)) as store:
        return SlotLog(store, pipeline).head().record


@contextmanager
def _send_stderr(file: TextIO) -> Iterator[None]:
    """Let child processes, such as Spark's JVM, write to `file`; `sys.stderr` stays as it is."""
    sys.stderr.flush()
    terminal, before = os.dup(2), sys.stderr
    os.dup2(file.fileno(), 2)
    # Something else has replaced stderr, for example a test, if it does not write to descriptor 2.
    if before is sys.__stderr__:
        sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1, encoding="utf-8")
    try:
        yield
    finally:
        if sys.stderr is not before:
            sys.stderr.close()
            sys.stderr = before
        os.dup2(terminal, 2)
        os.close(terminal)


def _format_epoch(report: EpochReport, manifest: Manifest, seconds: float) -> str:
    epoch = manifest.epoch_counters
    rows = RowCounts.of_sources(epoch.per_source)
    counts = {
        "read": epoch.read,
        "released": epoch.released,
        "late": rows.late_rows,
        "dead": epoch.dead_lettered,
        "filtered": epoch.filtered,
        "broke rules": sum(rows.count_broken_rules().values()),
        "dead objects": epoch.dead_objects,
    }
    # Zeros are left out: most epochs of a quiet pipeline have nothing to tell.
    parts = [f"{name} {rows:,}" for name, rows in counts.items() if rows]
    if report.decision.barriers:
        barriers = ", ".join(f"{b.id} {b.outcome.value}" for b in report.decision.barriers)
        parts.append(f"barriers {barriers}")
    frontier = output.format_short_instant(report.decision.frontier_after)
    return f"{report.sealed}  {'  '.join(parts) or 'no rows'}  frontier {frontier}  {seconds:.2f} s"
