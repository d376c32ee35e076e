"""The demo: the whole shape once, on real flights, and a summary that was measured.

1. A local stack: MinIO and Airflow, fresh data.
2. A week of departures is fed, one simulated hour a second; `flights.stream` runs the pipeline.
3. Half way the driver is killed with kill -9; Airflow brings it back from the latest completed checkpoint.
4. `flights.recover` goes back to an older checkpoint by hand; the stream reads on from there.
5. `flights.quality` checks late rows, barriers and checkpoints.
6. The tables are compared with an independent recomputation, and everything goes down.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tidegate.checkpoints.log import SlotLog
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open import open_store
from tidegate.checkpoints.requests import Kind, submit
from tidegate.checkpoints.status import read_status
from tidegate.infra.demo_report import PIPELINE, Facts, print_summary
from tidegate.infra.flights import FlightsFeed
from tidegate.infra.processes import ProcessMark, is_alive, spawn, stop
from tidegate.infra.stack import Stack, StackSettings
from tidegate.jobs.sinks.exact import check_exact, sealed_epochs
from tidegate.jobs.sinks.tables import read_table
from tidegate.jobs.spec.errors import PoisonError, TidegateError, TransientError
from tidegate.jobs.spec.loader import load_spec

__all__ = ["main"]

_PATIENCE = 600.0  # seconds for one phase beyond the pace of the feed; a shared machine can be slow


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tidegate demo", description="The whole shape once, on real flights.")
    parser.add_argument("--start", type=date.fromisoformat, default=date(2013, 1, 6), help="first day (2013-01-06)")
    parser.add_argument("--days", type=int, default=7, help="days to feed (7; 31 from 2013-01-01 is the month, 365 the year)")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds per simulated hour (1.0)")
    parser.add_argument("--home", type=Path, default=Path.cwd() / ".tidegate" / "demo", help="folder of the demo's stack")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack goes down with the demo
    try:
        return _Demo(chosen.home, FlightsFeed(chosen.start, chosen.days), chosen.pace).run()
    except TidegateError as error:
        print(f"\nThe demo ended early.\n{error}", file=sys.stderr)
        return error.failure_class.exit_code


class _Demo:
    def __init__(self, home: Path, flights: FlightsFeed, pace: float) -> None:
        self.stack = Stack(StackSettings(home=home))
        self.flights, self.pace = flights, pace
        self.began = time.monotonic()
        self.facts = Facts()

    def run(self) -> int:
        """All phases; the stack goes down whatever happens."""
        self._fresh()
        try:
            self.stack.up(self.say)
            os.environ |= self.stack.environment()
            self.store = open_store(self.stack.store)
            self.api = self.stack.api()
            self.spec = load_spec(self._spec_file())
            self.log = SlotLog(self.store, PIPELINE)
            self._stream()
            self._kill_half_way()
            self._until_all_read("the rest of the week")
            self._recover_by_hand()
            self._quality()
            self._stop_stream()
            verdict = self._exact()
            self.facts.elapsed = time.monotonic() - self.began
            print_summary(self.facts, self.stack)
            if sys.stdin.isatty():
                self._offer_to_stay()
            return 0 if verdict else 1
        finally:
            if not self.facts.stays:
                self._end_feed()
                self.stack.down(self.say)

    def say(self, line: str) -> None:
        """One line of progress, with the seconds since the start."""
        plain = re.sub(r"^(\[ *[\d.]+ s\] )+", "", line)  # what the stack says carries its own times
        print(f"[{time.monotonic() - self.began:6.1f} s] {plain}", flush=True)

    def _fresh(self) -> None:
        """The demo starts from nothing; only its own folder is cleared. Airflow's database stays: making it takes time."""
        if (self.stack.home / "stack.json").exists():
            self.stack.down(lambda _line: None)
        for name in ("minio-data", "drivers", "catalog", "work"):
            shutil.rmtree(self.stack.home / name, ignore_errors=True)

    def _spec_file(self) -> Path:
        return self.stack.settings.dags / "pipelines" / f"{PIPELINE}.yaml"

    def _stream(self) -> None:
        """Airflow launches the job; the feed begins once it runs."""
        for dag in ("stream", "recover", "quality"):
            self.api.wait_for_dag(f"{PIPELINE}.{dag}", timeout=_PATIENCE)
            self.api.unpause(f"{PIPELINE}.{dag}")
        errors = self.api.import_errors()
        if errors:
            raise PoisonError(f"Airflow could not import: {errors}", code="demo.import_errors")
        self.stream_run = self.api.trigger(f"{PIPELINE}.stream")
        self.say(f"{PIPELINE}.stream is triggered; waiting for its driver")
        self._wait(lambda: self.status().get("state") == "running", "the driver to run", _PATIENCE)
        command = [sys.executable, "-m", "tidegate.infra.flights", "--store", self.stack.store]
        command += ["--start", str(self.flights.start), "--days", str(self.flights.days), "--pace", str(self.pace)]
        self.feed: ProcessMark | None = spawn(command, log=self.stack.home / "logs" / "feed.log", env=os.environ | {})
        self.total = sum(self.flights.counts().rows.values())
        self.say(f"feeding {self.total:,} departures of {self.flights.days} days, one simulated hour every {self.pace:g} s")

    def _kill_half_way(self) -> None:
        """kill -9 to the driver at half of the rows; the gap is until the next sealed checkpoint."""
        self._wait(lambda: self.read() >= self.total // 2, "half of the rows", self._feed_seconds(), show=True)
        before = self.log.head().record
        status, launched = self.status(), self._launches()
        os.kill(status["holder_process"]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        self.say(
            f"kill -9 to the driver (pid {status['holder_process']['pid']}), latest checkpoint {before.id if before else None}"
        )
        token = status["token"]
        self._wait(lambda: self._launches() > launched, "Airflow to notice", _PATIENCE)
        self.facts.noticed = time.monotonic() - killed
        self._wait(lambda: self.newest().lease_token > token, "a new checkpoint", _PATIENCE)
        self.facts.gap = time.monotonic() - killed
        first = self.newest()
        self.facts.recovered_from = str(before.id) if before else "the beginning"
        self.say(
            f"recovered: the new driver went on from {first.parent}; "
            f"noticed and launched anew after {self.facts.noticed:.1f} s, {self.facts.gap:.1f} s to {first.id}"
        )

    def _recover_by_hand(self) -> None:
        """Back to an older checkpoint of choice, through Airflow, and forward again."""
        epochs = sealed_epochs(self.log)
        chosen = epochs[int(len(epochs) * 0.7)]
        conf = {"checkpoint": str(chosen.id), "reason": "the demo goes back by hand"}
        run = self.api.trigger(f"{PIPELINE}.recover", conf)
        self.say(f"{PIPELINE}.recover is triggered: back from {epochs[-1].id} to {chosen.id}")
        ended = self.api.wait_for_run(f"{PIPELINE}.recover", run, timeout=_PATIENCE)
        if ended["state"] != "success":
            raise PoisonError(f"{PIPELINE}.recover ended as {ended['state']}", code="demo.recover_failed")
        self.facts.restored_to = str(chosen.id)
        self._until_all_read("the rows after the restored checkpoint")

    def _until_all_read(self, what: str) -> None:
        self._wait(lambda: self.read() >= self.total, what, self._feed_seconds() + _PATIENCE, show=True)
        self.say(f"all {self.total:,} rows are read, timeline {self.log.head().timeline}")

    def _quality(self) -> None:
        self._wait(lambda: self.status().get("unpublished") == 0, "the tables to be up to date", _PATIENCE)
        run = self.api.trigger(f"{PIPELINE}.quality")
        ended = self.api.wait_for_run(f"{PIPELINE}.quality", run, timeout=_PATIENCE)
        latest = json.loads(self.store.get(f"{PIPELINE}/quality/results/latest.json").data)
        self.facts.quality = latest
        self.say(f"{PIPELINE}.quality: {latest.get('verdict')} ({ended['state']})")

    def _stop_stream(self) -> None:
        """The stream ends green because its driver said so itself."""
        submit(self.store, PIPELINE, Kind.STOP, who="demo", why="the demo is over", token=self.status()["token"])
        ended = self.api.wait_for_run(f"{PIPELINE}.stream", self.stream_run, timeout=_PATIENCE)
        self.facts.stream = ended["state"]
        self.say(f"{PIPELINE}.stream ended: {ended['state']}")

    def _exact(self) -> bool:
        found = check_exact(
            self.spec, self.store, self.log, lambda name: read_table(self.spec, self.store, name, current_only=True)
        )
        self.facts.exactness, self.facts.epochs = found, sealed_epochs(self.log)
        for problem in found.problems:
            self.say(f"NOT EXACT: {problem}")
        return found.exact and self.facts.stream == "success" and self.facts.quality.get("verdict") != "fail"

    def _offer_to_stay(self) -> None:
        print("\nPress Enter within a minute to leave the stack up (tidegate down ends it) ... ", end="", flush=True)
        ready, _, _ = select.select([sys.stdin], [], [], 60.0)
        if ready:
            self.facts.stays = True
            print(f"It stays up: {self.stack.airflow_url} (logins in {self.stack.credentials_file})")

    def _end_feed(self) -> None:
        feed = getattr(self, "feed", None)
        if feed is not None and is_alive(feed):
            stop([feed])

    def _feed_seconds(self) -> float:
        return 24 * (self.flights.days + 1) * self.pace * 2 + _PATIENCE

    def status(self) -> dict[str, Any]:
        """The driver's status as it lies in the bucket; empty before the first."""
        found = read_status(self.store, PIPELINE)
        return {**found.body, "token": found.token} if found else {}

    def _launches(self) -> int:
        """Drivers that Airflow has launched so far; each start leaves a record."""
        return len(list((self.stack.home / "drivers" / PIPELINE).glob("*.json")))

    def newest(self) -> Manifest:
        """The newest sealed epoch."""
        record = self.log.head().record
        if record is None:
            raise TransientError("nothing is sealed yet", code="demo.nothing_sealed")
        return record

    def read(self) -> int:
        """Rows read so far on the current timeline."""
        record = self.log.head().record
        return record.counters.read if record else 0

    def _wait(self, ready: Callable[[], bool], what: str, timeout: float, *, show: bool = False) -> None:
        deadline, shown = time.monotonic() + timeout, 0.0
        while not ready():
            if time.monotonic() > deadline:
                raise TransientError(
                    f"waited {timeout:.0f} s for {what}",
                    code="demo.timeout",
                    advice=f"the logs are in {self.stack.home}/logs and {self.stack.home}/drivers",
                )
            if show and time.monotonic() - shown > 10.0:
                shown = time.monotonic()
                self._show()
            time.sleep(0.5)

    def _show(self) -> None:
        status = self.status()
        if not status.get("checkpoint"):
            self.say("the driver has not sealed an epoch of its own yet")
            return
        counters = status.get("counters") or {}
        self.say(
            f"{counters.get('read', 0):>6,} of {self.total:,} rows, {counters.get('late', 0):,} late, "
            f"checkpoint {status.get('checkpoint')}, frontier {status.get('frontier_text')}"
        )


if __name__ == "__main__":
    sys.exit(main())
