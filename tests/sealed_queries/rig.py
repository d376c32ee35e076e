"""A job as a process that tests kill, stop and restore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.sealed_queries.apps import App
from tests.servers.processes import kill_jvms
from tidegate.checkpoints.batch_notes import BatchNotes
from tidegate.checkpoints.bucket_layout import CheckpointId
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease, read_lease
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.restore import RestorePlan, commit_restore, plan_restore
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.spec.job_spec import JobSpec

_STATE = "org.apache.spark.sql.execution.streaming.state."
COMBINATIONS: dict[str, dict[str, str]] = {
    "hdfs-1": {},
    "rocksdb-1": {
        "spark.sql.streaming.stateStore.providerClass": f"{_STATE}RocksDBStateStoreProvider"
    },
    "rocksdb-2": {
        "spark.sql.streaming.stateStore.providerClass": f"{_STATE}RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
}
_PATIENCE = 1200.0  # seconds; the machine may be busy
# Short runs: a JVM that compiles little, and queries that are interpreted, start sooner.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
_QUIET = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


class KilledJob:
    """One job with its store below a folder; `kind` says which application, with how many files.

    `location` says where Spark keeps the checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        conf: Mapping[str, str],
        kind: type[App],
        files: int,
        store_url: str | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        quick: bool = True,
        location: str = "host",
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.files, self.app = folder, files, kind(folder, files)
        self._environment = {
            **environment,
            "TIDEGATE_HOME": str(folder / "home"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_TOOL_OPTIONS": _QUICK_JVM if quick else "",
        }
        self.store_url = store_url or str(folder / "store")
        self.spec = JobSpec.model_validate(
            {
                "kind": "job",
                "name": kind.name,
                "app": str(self.app.script),
                "args": self.app.arguments(),
                "repeatable": kind.repeatable,
                "conf": {**(_QUIET if quick else {}), **self.app.conf(), **conf},
                "checkpoint": {"location": location},
            }
        )
        (folder / "job.yaml").write_text(self.spec.model_dump_json(by_alias=True))
        self.log = SlotLog(open_store(self.store_url), kind.name)
        self.process: subprocess.Popen[bytes] | None = None
        self._log_begins = 0  # where the log of the newest driver begins
        self._token_before = 0  # of the lease, when the newest driver was started
        self._started: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        """Kill every driver that is left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()

    def token(self) -> int:
        """The fencing token of the lease; 0 before the first."""
        lease = read_lease(self.log.store, self.app.name)
        return lease.token if lease else 0

    def is_running(self) -> bool:
        """Whether the newest driver lives."""
        return self.process is not None and self.process.poll() is None

    def holds_lease(self) -> bool:
        """Whether the newest driver has taken the lease; before, a signal makes it fail."""
        return self.token() > self._token_before

    def launch(self, *options: str, submitted: bool = False) -> subprocess.Popen[bytes]:
        """Start a driver with these options, by itself or by spark-submit to a local master."""
        self._token_before = self.token()
        module = "operators.spark_submission" if submitted else "jobs.sealed_queries"
        command = [sys.executable, "-m", f"tidegate.{module}"]
        command += [str(self.folder / "attempt"), '{"conn_id": "here"}'] if submitted else []
        arguments = [str(self.folder / "job.yaml"), "--store", self.store_url, *options]
        with (self.folder / "driver.log").open("ab") as log:
            self._log_begins = log.tell()
            self.process = subprocess.Popen(
                [*command, *arguments],
                env={
                    **self._environment,
                    "AIRFLOW_CONN_HERE": '{"conn_type": "spark", "host": "local[2]"}',
                    "TIDEGATE_STORE": self.store_url,
                },
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        self._started.append(self.process)
        return self.process

    def find_holder(self) -> psutil.Process:
        """The process that holds the lease: under spark-submit another one than was started."""
        lease = read_lease(self.log.store, self.app.name)
        assert lease is not None
        assert lease.holder is not None
        return psutil.Process(lease.holder.pid)

    def kill(self, victim: str = "driver") -> None:
        """kill -9 of the driver, or of its JVM, and wait for the driver's end."""
        assert self.process is not None
        if victim != "jvm" or not kill_jvms(self.process.pid):
            self.process.kill()
        self.process.wait(timeout=_PATIENCE)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=_PATIENCE)

    def run_to_end_of_input(self) -> None:
        """Wait until all files are sealed in each query, by a new driver if none runs; stop it.

        The input may be complete already. A driver that a signal stops before it has the lease ends
        with the error of what it waits for, so its token says that it can be stopped.
        """
        if not self.is_running():
            self.launch()
        self.wait(lambda: self.holds_lease() and self.is_complete())
        code = self.stop()
        assert code == 0, f"{code}: {self.read_end_of_log()}"
        assert "nanobind" not in self.read_end_of_log()  # its own words are the last

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; fails if the driver ends before.

        A driver that ended because the host was too busy to start a Python worker is launched
        again, as its supervisor does.
        """
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert self.process is not None
            has_ended = self.process.poll() is not None or time.monotonic() > deadline
            if has_ended and not condition():  # it may hold since the driver's last step
                if self._had_no_worker():
                    self.launch()
                    continue
                raise AssertionError(self.read_end_of_log())
            time.sleep(0.1)

    def _had_no_worker(self) -> bool:
        """Whether the newest driver has ended because Spark gave up on a Python worker."""
        assert self.process is not None
        log = (self.folder / "driver.log").read_bytes()[self._log_begins :]
        return self.process.poll() == 3 and b'"job.worker_late"' in log

    def read_end_of_log(self) -> str:
        """What the drivers have said last."""
        return (self.folder / "driver.log").read_text()[-4000:]

    def is_complete(self) -> bool:
        """Whether each query has sealed all files."""
        return self._has_all_files(self.log.head().record)

    def _has_all_files(self, sealed: Manifest | None) -> bool:
        return self.app.count_files(sealed) >= self.files

    def positions(self) -> dict[str, int]:
        """Query -> newest sealed batch."""
        return _get_positions(self.log.head().record)

    def read_line(self) -> list[Manifest]:
        """The sealed batches that led to the present one, oldest first; each is there once.

        Of each query the batches have to follow one another.
        """
        found = []
        for row in reversed(CheckpointCatalog(self.log).list_checkpoints()):
            filled = self.log.read_slot(row.timeline, row.slot)
            assert filled is not None
            assert isinstance(filled.record, Manifest)
            found.append(filled.record)
        sealed: dict[str, list[int]] = {}
        for manifest in found:
            notes = BatchNotes.from_manifest(manifest)
            assert notes is not None
            sealed.setdefault(notes.query, []).append(notes.queries[notes.query].batch)
        for query, batches in sealed.items():
            assert batches == list(range(batches[0], batches[-1] + 1)), (
                f"{query} has sealed {batches}"
            )
        return found

    def list_targets(self) -> list[CheckpointId]:
        """Sealed batches behind which a file is left to replay."""
        return [one.id for one in self.read_line() if not self._has_all_files(one)]

    def restore(self, target: CheckpointId | None) -> RestorePlan:
        """Go back as the command line does."""
        lease = Lease.acquire(self.log.store, self.app.name, ProcessIdentity.this_process())
        try:
            plan = plan_restore(self.log, target)
            commit_restore(self.log, lease, plan, request_id=f"r{time.time_ns()}", who="t", why="t")
        finally:
            lease.release()
        return plan


def _get_positions(record: object) -> dict[str, int]:
    notes = BatchNotes.from_manifest(record) if isinstance(record, Manifest) else None
    return {name: at.batch for name, at in notes.queries.items()} if notes else {}
