"""The stage of a run: MinIO behind the naming proxy, a watch over processes, Spark's event log."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.rows_on_spark.evidence import Evidence, SparkLog, read_driver_log, read_event_logs
from tests.rows_on_spark.processes import RUN_MARK, Family, Watch
from tests.rows_on_spark.proxy import NamingProxy, run_proxy
from tests.rows_on_spark.requests import RESULT_BOUND, StorePlace
from tests.rows_on_spark.rights import build_driver_environment, build_executor_environment
from tests.servers.minio import RealMinio
from tests.servers.spark import connect_server, standalone
from tidegate.checkpoints.s3_store import S3Store
from tidegate.infra.provision import Credentials

MASTERS: Final = ("local[2]", "standalone", "connect")
PATIENCE: Final = 1800.0  # seconds for one pipeline on a busy machine


@dataclass
class Stage:
    """Where one program runs."""

    folder: Path
    minio: RealMinio
    proxy: NamingProxy
    family: Family
    master: str
    """Address for Spark."""
    driver_keys: Credentials | None = None
    """Of the store, where they are not those of tasks."""
    executor_keys: Credentials | None = None

    @property
    def event_log(self) -> Path:
        """Folder of Spark's event log."""
        return self.folder / "event-log"

    def open_store(self, prefix: str) -> S3Store:
        """The store without the proxy, for those who prepare a run."""
        return S3Store(self.minio.settings().model_copy(update={"prefix": prefix}))

    def run(self, command: Sequence[str], place: StorePlace) -> Evidence:
        """Run a driver to its end, and return what it has left behind."""
        log = self.folder / "driver.log"
        with log.open("wb") as out, Watch(self.family):
            child = subprocess.Popen(
                command, stdout=out, stderr=out, env=build_driver_environment(self.driver_keys)
            )
            self.family.driver = child.pid
            _wait_for(child)
            self.family.refresh()  # with the time of all that it has waited for, before it is gone
            child.wait()
        return Evidence(
            place=place,
            requests=self.proxy.requests,  # complete when the stage has closed
            members=self.family.list_members(),
            driver_log=read_driver_log(log.read_text(errors="replace")),
            spark=read_event_logs(self.event_log) if self.event_log.exists() else SparkLog(),
            exit_code=child.returncode,
        )


def _wait_for(child: subprocess.Popen[bytes]) -> None:
    """Wait until a child has ended, and leave it as a zombie."""
    deadline = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            child.kill()
        time.sleep(0.05)


def build_spark_settings(event_log: Path) -> dict[str, str]:
    """What a run needs of Spark: its event log, as one plain file for each application."""
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.executor.memory": "1g",
    }


@contextmanager
def open_stage(
    folder: Path, minio: RealMinio, master: str, *, with_rights: bool = False
) -> Iterator[Stage]:
    """A proxy, and a Spark of its own for this master, until the end of the block.

    `with_rights`: driver and executors have different keys, whose rights are still to be granted.
    """
    folder.mkdir(parents=True)
    (folder / "event-log").mkdir()
    mark = secrets.token_hex(8)
    family = Family(mark)
    with run_proxy(minio.server.port, family) as proxy:
        own = {
            **minio.environment(),
            "TIDEGATE_S3_ENDPOINT": proxy.endpoint,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            RUN_MARK: mark,
        }
        stage = Stage(folder, minio, proxy, family, master)
        if with_rights:
            executors = Credentials.generate("executors")
            stage.driver_keys, stage.executor_keys = Credentials.generate("driver"), executors
            own |= build_executor_environment(executors)
        with _set_environment(own):
            if master == "standalone":
                with standalone(folder, 1) as cluster:
                    yield replace(stage, master=cluster.master)
            elif master == "connect":
                settings = build_spark_settings(stage.event_log)
                settings["spark.driver.maxResultSize"] = str(RESULT_BOUND)
                with connect_server(folder, settings) as server:
                    yield replace(stage, master=server.address)
            else:
                yield stage


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """The servers of a run inherit its mark and the address of the proxy."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
