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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from tidegate.checkpoints.driver_reports import read_status
from tidegate.checkpoints.driver_requests import RequestKind, submit_request
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.engine.recorded_epochs import read_kept_manifests
from tidegate.jobs.sinks.exactness_audit import audit_exactness
from tidegate.jobs.sinks.published_tables import read_table
from tidegate.jobs.spec.loader import load_spec
from tidegate.json_types import JsonObject

from .errors import DEMO_IMPORT_ERRORS, DEMO_NOTHING_SEALED, DEMO_RECOVER_FAILED, DEMO_TIMEOUT
from .flights import FlightsFeed
from .local_processes import ProcessId, spawn_process, stop_processes
from .local_stack import Stack, StackSettings

DEMO_PIPELINE = "flights"
# Seconds for one phase beyond the pace of the feed; a shared machine can be slow.
_PHASE_TIMEOUT = 600.0


@contextmanager
def run_demo(start: date, days: int, pace: float, home: Path, *, keep: bool) -> Iterator[Demo]:
    """Run the demo, and yield it with what it measured while its stack still runs.

    SIGTERM stops the stack and exits with 143.

    Args:
        start: first day.
        days: to feed; 31 from 2013-01-01 is the month, 365 the year.
        pace: seconds per simulated hour.
        home: folder of the demo's stack; the data of an earlier demo in it is deleted.
        keep: leave MinIO and Airflow running; `tidegate down` ends them.

    Raises:
        TidegateError: what ended the demo early.
    """
    # Without this a terminated demo would leave its stack behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(Stack(StackSettings(home=home)), FlightsFeed(start, days), pace)
    demo.clear_previous_run()
    try:
        demo.run_all_phases()
        yield demo
    finally:
        if not keep:
            stop_processes(demo.feed)
            demo.stack.down(demo.print_progress)


class Demo:
    """One run of the demo, and what it measured.

    Attributes:
        stack: the stack that it runs on.
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

    def __init__(self, stack: Stack, flights: FlightsFeed, pace: float) -> None:
        self.stack, self.flights, self.pace = stack, flights, pace
        self.began = time.monotonic()
        self.feed: list[ProcessId] = []

    def run_all_phases(self) -> None:
        """Run one phase after another."""
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
        self._check_exactness()
        self.elapsed = time.monotonic() - self.began

    @property
    def is_good(self) -> bool:
        """Whether tables are exact, the stream ended well, and no critical check failed."""
        well = self.stream == "success" and self.quality.get("verdict") != "fail"
        return well and self.exactness.is_exact

    def count_rows(self) -> dict[str, dict[str, int]]:
        """Count the rows of each airport by the place in which they are."""
        places = ("released", "late", "dropped", "rejected", "dead_lettered")
        counted = self.epochs[-1].counters.per_source
        rows = {}
        for source, own in sorted(self.exactness.rows.items()):
            found = {**counted.get(source, {}), **own}
            found["retained"] = found["read"] - sum(found.get(place, 0) for place in places)
            rows[source] = found
        return rows

    def count_windows(self) -> tuple[int, int]:
        """Count the windows that were compared, and their later revisions."""
        compared = self.exactness.windows
        counters = [epoch.epoch_counters for epoch in self.epochs]
        emitted = sum(epoch.windows.get(name, 0) for epoch in counters for name in compared)
        results = sum(compared.values())
        return results, emitted - results

    def measure_epochs(self, *steps: str) -> tuple[float, float]:
        """Return median and 95th percentile of the epochs' seconds in these steps; of all: none."""
        timings = [epoch.timings for epoch in self.epochs]
        known = [own for own in timings if own.keys() >= {*steps}]
        times = sorted(sum(own[step] for step in steps or own) for own in known) or [0.0]
        return statistics.median(times), times[int(0.95 * len(times))]

    def print_progress(self, line: str) -> None:
        """Print one line of progress, with the seconds since the start."""
        # What the stack says carries its own times.
        plain = re.sub(r"^(\[ *[\d.]+ s\] )+", "", line)
        print(f"[{time.monotonic() - self.began:6.1f} s] {plain}", flush=True)

    def clear_previous_run(self) -> None:
        """Clear the demo's own folder, so that it starts from nothing.

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
        if errors := self.api.import_errors():
            raise DEMO_IMPORT_ERRORS(errors=errors)
        self.stream_run = self.api.trigger_dag(f"{DEMO_PIPELINE}.stream")
        self.print_progress(f"{DEMO_PIPELINE}.stream is triggered; waiting for its driver")
        self._wait_until(
            lambda: self.driver_status().get("state") == "running", "the driver to run"
        )
        command = [sys.executable, "-m", "tidegate.infra.flights", "--store", self.stack.store_url]
        feed = {"start": self.flights.start, "days": self.flights.days, "pace": self.pace}
        command += [f"--{option}={value}" for option, value in feed.items()]
        log = self.stack.home / "logs" / "feed.log"
        self.feed.append(spawn_process(command, log=log, env=os.environ))
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
            lambda: self.rows_read() >= self.total // 2, "half of the rows", self._feed_seconds()
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
        self._wait_until(lambda: self._count_launches() > launched, "Airflow to notice")
        self.noticed = time.monotonic() - killed
        self._wait_until(lambda: self.newest_epoch().lease_token > token, "a new checkpoint")
        self.gap = time.monotonic() - killed
        first = self.newest_epoch()
        self.recovered_from = str(before.id) if before else "the beginning"
        self.print_progress(
            f"recovered: the new driver went on from {first.parent}; noticed and launched again"
            f" after {self.noticed:.1f} s, {self.gap:.1f} s to {first.id}"
        )

    def _recover_by_hand(self) -> None:
        """Back to an older checkpoint of choice, through Airflow, and forward again."""
        epochs = list(read_kept_manifests(self.log))
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
        self.restored_to = str(chosen.id)
        self._wait_until_all_read("the rows after the restored checkpoint")

    def _wait_until_all_read(self, what: str) -> None:
        self._wait_until(
            lambda: self.rows_read() >= self.total,
            what,
            self._feed_seconds() + _PHASE_TIMEOUT,
        )
        self.print_progress(
            f"all {self.total:,} rows are read, timeline {self.log.head().timeline}"
        )

    def _check_quality(self) -> None:
        self._wait_until(
            lambda: self.driver_status().get("unpublished") == 0,
            "the tables to be up to date",
        )
        run = self.api.trigger_dag(f"{DEMO_PIPELINE}.quality")
        ended = self.api.wait_for_run(f"{DEMO_PIPELINE}.quality", run, timeout=_PHASE_TIMEOUT)
        key = f"{DEMO_PIPELINE}/quality/results/latest.json"
        self.quality: JsonObject = json.loads(self.store.get(key).data)
        verdict = self.quality.get("verdict")
        self.print_progress(f"{DEMO_PIPELINE}.quality: {verdict} ({ended['state']})")

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
        self.stream = ended["state"]
        self.print_progress(f"{DEMO_PIPELINE}.stream ended: {ended['state']}")

    def _check_exactness(self) -> None:
        self.exactness = audit_exactness(
            self.spec,
            self.store,
            self.log,
            lambda name: read_table(self.spec, self.store, name, current_only=True),
        )
        self.epochs = list(read_kept_manifests(self.log))
        for problem in self.exactness.problems:
            self.print_progress(f"NOT EXACT: {problem}")

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
        self, ready: Callable[[], bool], what: str, timeout: float = _PHASE_TIMEOUT
    ) -> None:
        begun = shown = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - begun > timeout:
                raise DEMO_TIMEOUT(seconds=timeout, what=what, home=self.stack.home)
            if now - shown > 10.0:
                shown = now
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
            f" late, checkpoint {status['checkpoint']}, frontier {status.get('frontier_text')}"
        )
