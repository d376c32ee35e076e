"""The applications that the proof kills and restores, each with its input and its sinks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from pyiceberg.table import StaticTable

from tests.sealed_queries.clicks import EXAMPLE, read_counts, read_files, write_clicks
from tests.servers.jars import BROKER, CONNECTOR, ensure_jars, spark_jars
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import KafkaClient
from tests.servers.postgres import PostgresServer, running
from tidegate.checkpoints.manifest import Manifest

SCRIPTS = Path(__file__).with_name("scripts")
_ICEBERG = ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",)
_ROWS = 60  # of a file


class App(ABC):
    """One application below a folder of its own. A batch of a query reads the next file."""

    name: ClassVar[str]
    queries: ClassVar[tuple[str, ...]]
    repeatable: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, files: int) -> None:
        self.folder, self.files = folder, files

    @classmethod
    def prepare(cls, folder: Path, resources: ExitStack) -> None:
        """Start what all jobs of the application need: nothing."""
        return

    @property
    @abstractmethod
    def script(self) -> Path:
        """The script."""

    @abstractmethod
    def arguments(self) -> list[str]:
        """Its arguments."""

    def conf(self) -> dict[str, str]:
        """Settings of Spark that it needs."""
        return {}

    @abstractmethod
    def outputs(self) -> dict[str, Any]:
        """What the sinks hold, however the rows were divided among batches."""

    @classmethod
    def count_files(cls, sealed: Manifest | None) -> int:
        """How many files each source of each query has read, up to a sealed batch.

        The batch number does not tell: Spark notes the next file before it plans a batch. After a
        kill between the two, it reads that file and the one behind it in a single batch.
        """
        cut = sealed.cut if sealed else {}
        counts = [cls._count_of_source(json.loads(at["end"] or "{}")) for at in cut.values()]
        is_whole = {member.rpartition("/")[0] for member in cut} == set(cls.queries)
        return min(counts) if is_whole else 0

    @classmethod
    def _count_of_source(cls, end: dict[str, Any]) -> int:
        return int(end.get("logOffset", -1)) + 1


class Clicks(App):
    """The example of the documentation: a file sink and a foreachBatch into SQLite."""

    name = "clicks"
    queries: ClassVar[tuple[str, ...]] = ("enriched", "per_minute")

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        write_clicks(folder / "in", files, _ROWS)

    @property
    def script(self) -> Path:
        return EXAMPLE / "clicks.py"

    def arguments(self) -> list[str]:
        return [str(self.folder / "in"), str(self.folder / "out")]

    def outputs(self) -> dict[str, Any]:
        out = self.folder / "out"
        return {"counts": read_counts(out), "enriched": read_files(out)}


class Copy(Clicks):
    """Files to the file sink, without state."""

    name = "copy"
    queries: ClassVar[tuple[str, ...]] = ("enriched",)

    @property
    def script(self) -> Path:
        return SCRIPTS / "files_to_files.py"

    def outputs(self) -> dict[str, Any]:
        return {"enriched": read_files(self.folder / "out")}


class Join(App):
    """A stream-stream join into PostgreSQL by foreachBatch."""

    name = "join"
    queries: ClassVar[tuple[str, ...]] = ("joined",)
    server: ClassVar[PostgresServer | None] = None

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        assert self.server is not None
        self._schema = "job_" + folder.name.replace("-", "_")
        self.server.run(f"CREATE SCHEMA {self._schema}")
        (folder / "in").mkdir()
        for side, seed in (("left", 7), ("right", 8)):
            write_clicks(folder / "in" / side, files, _ROWS, seed)

    @classmethod
    def prepare(cls, folder: Path, resources: ExitStack) -> None:
        """Start the server."""
        folder.mkdir()
        cls.server = resources.enter_context(running(lambda _name: folder))

    @property
    def script(self) -> Path:
        return SCRIPTS / "join_to_postgres.py"

    def arguments(self) -> list[str]:
        return [str(self.folder / "in"), self._url]

    @property
    def _url(self) -> str:
        assert self.server is not None
        return f"{self.server.url}?options=-csearch_path%3D{self._schema}"

    def outputs(self) -> dict[str, Any]:
        import psycopg

        with psycopg.connect(self._url) as db:
            rows = db.execute("SELECT at, page, other FROM pairs").fetchall()
        return {"pairs": sorted(rows)}


class Windows(App):
    """A topic, counted per minute, into an Iceberg table."""

    name = "windows"
    queries: ClassVar[tuple[str, ...]] = ("windows",)
    server: ClassVar[KafkaServer | None] = None
    client: ClassVar[KafkaClient | None] = None

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, files)
        write_clicks(folder / "in", files, _ROWS)
        assert self.client is not None
        self._topic = folder.name
        client = self.client
        client.topic(self._topic, 1)
        for path in sorted((folder / "in").iterdir()):
            for line in path.read_text().splitlines():
                client.send(self._topic, 0, line)
        client.flush()

    @classmethod
    def prepare(cls, folder: Path, resources: ExitStack) -> None:
        """Start the broker, and a client for all topics."""
        jars = ensure_jars("kafka-broker", BROKER)
        cls.server = KafkaServer(jars, folder)
        cls.server.start()
        resources.callback(cls.server.stop)
        cls.client = KafkaClient(jars, cls.server.servers)
        resources.callback(cls.client.close)

    @classmethod
    def _count_of_source(cls, end: dict[str, Any]) -> int:
        rows: int = sum(sum(partitions.values()) for partitions in end.values())
        return rows // _ROWS

    @property
    def script(self) -> Path:
        return SCRIPTS / "kafka_to_iceberg.py"

    def arguments(self) -> list[str]:
        assert self.server is not None
        return [self.server.servers, self._topic, str(_ROWS)]

    def conf(self) -> dict[str, str]:
        jars = [
            *spark_jars("spark-kafka", CONNECTOR),
            *ensure_jars("iceberg-spark-only", _ICEBERG),
        ]
        return {
            # Spark runs the batch without rows that closes the last windows only in the start that
            # ran the batch before, so a kill between the two would change what the table holds.
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            "spark.jars": ",".join(map(str, jars)),
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.warehouse": str(self.folder / "lake"),
        }

    def outputs(self) -> dict[str, Any]:
        metadata = self.folder / "lake" / "db" / "windows" / "metadata"
        version = (metadata / "version-hint.text").read_text()
        table = StaticTable.from_metadata(str(metadata / f"v{version}.metadata.json"))
        batches, at = [], table.current_snapshot()
        while at is not None:
            summary = at.summary.additional_properties if at.summary else {}
            if int(summary.get("added-records", 0)):
                batches.append(summary.get("spark.sql.streaming.epochId"))
            parent = at.parent_snapshot_id
            at = None if parent is None else table.snapshot_by_id(parent)
        rows = table.scan().to_arrow().to_pylist()
        return {"rows": sorted(json.dumps(row, default=str) for row in rows), "batches": batches}


APPS: dict[str, type[App]] = {app.name: app for app in (Clicks, Copy, Join, Windows)}
