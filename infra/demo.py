"""The demo: runs the whole system once on real flights, and prints a summary of what it measured.

1. Start a local stack: MinIO and Airflow, fresh data.
2. Feed departures, by default a week and one simulated hour a second; `flights.stream` runs the
   pipeline.
3. Half way, kill the driver with kill -9; Airflow starts it again from the latest completed
   checkpoint.
4. Restore an older checkpoint with `flights.recover`; the stream continues from there.
5. Check late rows, barriers and checkpoints with `flights.quality`.
6. Compare the tables with an independent recomputation, and stop everything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import TidegateError
from tidegate.jobs.sinks.exactness_audit import ExactnessReport, audit_exactness, list_sealed_epochs
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec
from tidegate.json_types import JsonObject

from .errors import (
    DEMO_IMPORT_ERRORS,
    DEMO_NOTHING_SEALED,
    DEMO_RECOVER_FAILED,
    DEMO_TIMEOUT,
)
from .flights import FlightsFeed
from .local_processes import (
    ProcessId,
    is_process_alive,
    spawn_process,
    stop_processes,
)
from .local_stack import Stack, StackSettings

_PHASE_TIMEOUT = (
    600.0  # seconds for one phase beyond the pace of the feed; a shared machine can be slow
)


def run_demo(start: date, days: int, pace: float, home: Path, *, keep: bool) -> int:
    """Run the demo and return the exit code.

    0 if the tables are exact, the stream ended well and no critical check failed; 1 if not; that of
    the error's class if the demo ended early. SIGTERM stops the stack and exits with 143.

    Args:
        start: first day.
        days: to feed; 31 from 2013-01-01 is the month, 365 the year.
        pace: seconds per simulated hour.
        home: folder of the demo's stack; the data of an earlier demo in it is deleted.
        keep: leave MinIO and Airflow running; `tidegate down` ends them.
    """
    # Without this a terminated demo would leave its stack behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _Demo(home, FlightsFeed(start, days), pace, keep=keep).run()
    except TidegateError as error:
        print(f"\nThe demo ended early.\n{error}", file=sys.stderr)
        return error.failure_class.exit_code


class _Demo:
    def __init__(self, home: Path, flights: FlightsFeed, pace: float, *, keep: bool) -> None:
        self.stack = Stack(StackSettings(home=home))
        self.flights, self.pace, self.keep = flights, pace, keep
        self.began = time.monotonic()
        self.facts = DemoResults()

    def run(self) -> int:
        """All phases; the stack goes down whatever happens."""
        self._clear_previous_run()
        try:
            self.stack.up(self.print_progress)
            os.environ |= self.stack.environment()
            self.store = open_store(self.stack.store_url)
            self.api = self.stack.airflow_api()
            self.spec = load_spec(self.stack.settings.dags / "pipelines" / f"{DEMO_PIPELINE}.yaml")
            self.log = SlotLog(self.store, DEMO_PIPELINE)
            self._start_stream()
            self._kill_half_way()
            self._wait_until_all_read("the rest of the week")
            self._recover_by_hand()
            self._check_quality()
            self._stop_stream()
            verdict = self._check_exactness()
            self.facts.elapsed = time.monotonic() - self.began
            print_summary(self.facts, self.stack, keep=self.keep)
            return 0 if verdict else 1
        finally:
            if not self.keep:
                self._stop_feed()
                self.stack.down(self.print_progress)

    def print_progress(self, line: str) -> None:
        """One line of progress, with the seconds since the start."""
        plain = re.sub(
            r"^(\[ *[\d.]+ s\] )+", "", line
        )  # what the stack says carries its own times
        print(f"[{time.monotonic() - self.began:6.1f} s] {plain}", flush=True)

    def _clear_previous_run(self) -> None:
        """The demo starts from nothing; only its own folder is cleared.

        Airflow's database stays: making it takes time.
        """
        if (self.stack.home / "stack.json").exists():
            self.stack.down(lambda _line: None)
        for name in ("minio-data", "drivers", "catalog", "work"):
            shutil.rmtree(self.stack.home / name, ignore_errors=True)

    def _start_stream(self) -> None:
        """Airflow launches the job; the feed begins once it runs."""
        for dag in ("stream", "recover", "quality"):
            self.api.wait_for_dag(f"{DEMO_PIPELINE}.{dag}", timeout=_PHASE_TIMEOUT)
            self.api.unpause(f"{DEMO_PIPELINE}.{dag}")
        errors = self.api.import_errors()
        if errors:
            raise DEMO_IMPORT_ERRORS(errors=errors)
        self.stream_run = self.api.trigger_dag(f"{DEMO_PIPELINE}.stream")
        self.print_progress(f"{DEMO_PIPELINE}.stream is triggered; waiting for its driver")
        self._wait_until(
            lambda: self.driver_status().get("state") == "running",
            "the driver to run",
            _PHASE_TIMEOUT,
        )
        command = [sys.executable, "-m", "tidegate.infra.flights", "--store", self.stack.store_url]
        command += [
            "--start",
            str(self.flights.start),
            "--days",
            str(self.flights.days),
            "--pace",
            str(self.pace),
        ]
        self.feed: ProcessId | None = spawn_process(
            command, log=self.stack.home / "logs" / "feed.log", env=os.environ | {}
        )
        self.total = sum(self.flights.counts().rows.values())
        self.print_progress(
            f"feeding {self.total:,} departures of {self.flights.days} days, one simulated hour"
            f" every {self.pace:g} s"
        )

    def _kill_half_way(self) -> None:
        """kill -9 to the driver at half of the rows.

        The gap is until the next sealed checkpoint.
        """
        self._wait_until(
            lambda: self.rows_read() >= self.total // 2,
            "half of the rows",
            self._feed_seconds(),
            show=True,
        )
        # Read before the kill, because the next driver overwrites the status and a record.
        before = self.log.head().record
        status, launched = self.driver_status(), self._count_launches()
        os.kill(status["holder_process"]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        self.print_progress(
            f"kill -9 to the driver (pid {status['holder_process']['pid']}), latest checkpoint"
            f" {before.id if before else None}"
        )
        token = status["token"]
        self._wait_until(
            lambda: self._count_launches() > launched, "Airflow to notice", _PHASE_TIMEOUT
        )
        self.facts.noticed = time.monotonic() - killed
        self._wait_until(
            lambda: self.newest_epoch().lease_token > token, "a new checkpoint", _PHASE_TIMEOUT
        )
        self.facts.gap = time.monotonic() - killed
        first = self.newest_epoch()
        self.facts.recovered_from = str(before.id) if before else "the beginning"
        self.print_progress(
            f"recovered: the new driver went on from {first.parent}; noticed and launched again"
            f" after {self.facts.noticed:.1f} s, {self.facts.gap:.1f} s to {first.id}"
        )

    def _recover_by_hand(self) -> None:
        """Back to an older checkpoint of choice, through Airflow, and forward again."""
        epochs = list_sealed_epochs(self.log)
        # Far enough back that a part of the rows is read again.
        chosen = epochs[int(len(epochs) * 0.7)]
        conf = {"checkpoint": str(chosen.id), "reason": "the demo goes back by hand"}
        run = self.api.trigger_dag(f"{DEMO_PIPELINE}.recover", conf)
        self.print_progress(
            f"{DEMO_PIPELINE}.recover is triggered: back from {epochs[-1].id} to {chosen.id}"
        )
        ended = self.api.wait_for_run(f"{DEMO_PIPELINE}.recover", run, timeout=_PHASE_TIMEOUT)
        if ended["state"] != "success":
            raise DEMO_RECOVER_FAILED(dag_id=f"{DEMO_PIPELINE}.recover", state=ended["state"])
        self.facts.restored_to = str(chosen.id)
        self._wait_until_all_read("the rows after the restored checkpoint")

    def _wait_until_all_read(self, what: str) -> None:
        self._wait_until(
            lambda: self.rows_read() >= self.total,
            what,
            self._feed_seconds() + _PHASE_TIMEOUT,
            show=True,
        )
        self.print_progress(
            f"all {self.total:,} rows are read, timeline {self.log.head().timeline}"
        )

    def _check_quality(self) -> None:
        self._wait_until(
            lambda: self.driver_status().get("unpublished") == 0,
            "the tables to be up to date",
            _PHASE_TIMEOUT,
        )
        run = self.api.trigger_dag(f"{DEMO_PIPELINE}.quality")
        ended = self.api.wait_for_run(f"{DEMO_PIPELINE}.quality", run, timeout=_PHASE_TIMEOUT)
        latest = json.loads(self.store.get(f"{DEMO_PIPELINE}/quality/results/latest.json").data)
        self.facts.quality = latest
        self.print_progress(f"{DEMO_PIPELINE}.quality: {latest.get('verdict')} ({ended['state']})")

    def _stop_stream(self) -> None:
        """The stream ends green because its driver reported its end."""
        submit_request(
            self.store,
            DEMO_PIPELINE,
            RequestKind.STOP,
            who="demo",
            why="the demo is over",
            token=self.driver_status()["token"],
        )
        ended = self.api.wait_for_run(
            f"{DEMO_PIPELINE}.stream", self.stream_run, timeout=_PHASE_TIMEOUT
        )
        self.facts.stream = ended["state"]
        self.print_progress(f"{DEMO_PIPELINE}.stream ended: {ended['state']}")

    def _check_exactness(self) -> bool:
        found = audit_exactness(
            self.spec,
            self.store,
            self.log,
            lambda name: read_table(self.spec, self.store, name, current_only=True),
        )
        self.facts.exactness, self.facts.epochs = found, list_sealed_epochs(self.log)
        for problem in found.problems:
            self.print_progress(f"NOT EXACT: {problem}")
        return (
            found.is_exact
            and self.facts.stream == "success"
            and self.facts.quality.get("verdict") != "fail"
        )

    def _stop_feed(self) -> None:
        feed = getattr(self, "feed", None)
        if feed is not None and is_process_alive(feed):
            stop_processes([feed])

    def _feed_seconds(self) -> float:
        return 24 * (self.flights.days + 1) * self.pace * 2 + _PHASE_TIMEOUT

    def driver_status(self) -> JsonObject:
        """The driver's status as it lies in the bucket; empty before the first."""
        found = read_status(self.store, DEMO_PIPELINE)
        return {**found.body, "token": found.token} if found else {}

    def _count_launches(self) -> int:
        """Drivers that Airflow has launched so far; each start leaves a record."""
        return len(list((self.stack.home / "drivers" / DEMO_PIPELINE).glob("*.json")))

    def newest_epoch(self) -> Manifest:
        """The newest sealed epoch."""
        record = self.log.head().record
        if record is None:
            raise DEMO_NOTHING_SEALED()
        return record

    def rows_read(self) -> int:
        """Rows read so far on the current timeline."""
        record = self.log.head().record
        return record.counters.read if record else 0

    def _wait_until(
        self, ready: Callable[[], bool], what: str, timeout: float, *, show: bool = False
    ) -> None:
        deadline, shown = time.monotonic() + timeout, 0.0
        while not ready():
            if time.monotonic() > deadline:
                raise DEMO_TIMEOUT(seconds=timeout, what=what, home=self.stack.home)
            if show and time.monotonic() - shown > 10.0:
                shown = time.monotonic()
                self._show_progress()
            time.sleep(0.5)

    def _show_progress(self) -> None:
        status = self.driver_status()
        if not status.get("checkpoint"):
            self.print_progress("the driver has not sealed an epoch of its own yet")
            return
        counters = status.get("counters") or {}
        self.print_progress(
            f"{counters.get('read', 0):>6,} of {self.total:,} rows, {counters.get('late', 0):,}"
            f" late, checkpoint {status.get('checkpoint')}, frontier {status.get('frontier_text')}"
        )


DEMO_PIPELINE = "flights"


@dataclass
class DemoResults:
    """What the demo measured.

    Attributes:
        noticed: seconds from kill -9 until Airflow has launched a new driver.
        gap: seconds from kill -9 to the first new sealed checkpoint.
        elapsed: seconds of the whole demo.
        recovered_from: newest checkpoint at the kill.
        restored_to: the checkpoint restored by hand.
        stream: state of the stream's run at its end.
        quality: result of the quality run.
        exactness: the comparison with a recomputation.
        epochs: manifests of the current lineage.
    """

    noticed: float = 0.0
    gap: float = 0.0
    elapsed: float = 0.0
    recovered_from: str = ""
    restored_to: str = ""
    stream: str = ""
    quality: JsonObject = field(default_factory=dict)
    exactness: ExactnessReport = field(default_factory=ExactnessReport)
    epochs: list[Manifest] = field(default_factory=list)


def print_summary(facts: DemoResults, stack: Stack, *, keep: bool) -> None:
    """Print the summary; `keep` says whether the stack stays up and its addresses answer."""
    console = Console()
    console.print()
    console.print(_build_rows_table(facts))
    console.print(_build_figures_table(facts))
    if not keep:
        command = "make demo ARGS=--keep"
        console.print(f"The stack is going down. `{command}` leaves it running, to look around.")
        return
    links = [("Airflow", stack.airflow_url), ("Logins", str(stack.credentials_file))]
    if facts.quality.get("docs"):
        page = str(facts.quality["docs"]).removeprefix(f"{DEMO_PIPELINE}/quality/docs/")
        address = f"{stack.airflow_url}/tidegate/docs/{DEMO_PIPELINE}.quality/{page}"
        links.append(("Data Docs", address))
        links.append(("", f"{stack.store_url}/{facts.quality['docs']}"))
    links.append(("End it", f"tidegate down --home {stack.home}"))
    for name, target in links:
        console.print(f"  {name:10} {target}", soft_wrap=True, highlight=False)


def _build_rows_table(facts: DemoResults) -> Table:
    table = Table(title="Every row in exactly one place", title_justify="left")
    columns = ("read", "released", "late", "dropped", "rejected", "dead_lettered", "retained")
    table.add_column("airport")
    for column in columns:
        table.add_column(column.removesuffix("_lettered"), justify="right")
    head = facts.epochs[-1].counters
    for source, places in sorted(facts.exactness.rows.items()):
        counted = head.per_source.get(source, {})
        values = {name: places.get(name, counted.get(name, 0)) for name in columns}
        values["retained"] = values["read"] - sum(values[name] for name in columns[1:-1])
        table.add_row(source, *(f"{values[name]:,}" for name in columns))
    return table


def _build_figures_table(facts: DemoResults) -> Table:
    table = Table(title="Figures", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value")
    counters = [epoch.epoch_counters for epoch in facts.epochs]
    compared = facts.exactness.windows
    emitted = sum(epoch.windows.get(name, 0) for epoch in counters for name in compared)
    results = sum(compared.values())
    seals = [e.timings["seal_before"] for e in facts.epochs if "seal_before" in e.timings]
    totals = [sum(e.timings.values()) for e in facts.epochs]
    barriers = [b["outcome"] for e in facts.epochs for b in e.barriers]
    outcome = (
        ", ".join(f"{barriers.count(kind)} {kind}" for kind in sorted(set(barriers))) or "none"
    )
    verdict = "exact" if facts.exactness.is_exact else "; ".join(facts.exactness.problems)
    for what, value in (
        ("tables against a recomputation", verdict),
        ("windows, revisions", f"{results:,} windows, {emitted - results:,} later revisions"),
        ("barriers (day_close)", outcome),
        ("checkpoints sealed", f"{len(facts.epochs):,} on the current lineage"),
        ("epoch, median and p95", f"{_compute_median(totals):.2f} s, {_compute_p95(totals):.2f} s"),
        (
            "seal, median and p95",
            f"{_compute_median(seals) * 1000:.0f} ms, {_compute_p95(seals) * 1000:.0f} ms",
        ),
        (
            "kill -9 of the driver",
            (
                f"a new driver launched after {facts.noticed:.1f} s, first new checkpoint after"
                f" {facts.gap:.1f} s"
            ),
        ),
        ("recovered from", facts.recovered_from),
        ("restored by hand to", facts.restored_to),
        ("quality", str(facts.quality.get("verdict", "not run"))),
        ("stream ended as", facts.stream),
        ("whole demo", f"{facts.elapsed:.0f} s"),
    ):
        table.add_row(what, value)
    return table


def _compute_median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _compute_p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else 0.0
