"""Writes the files that Spark 4.1.3 leaves in a query's checkpoint, without Spark."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from tidegate.jobs.sealed_queries.checkpoint_folder import HostFolder

UID = "acefa33c-6ca0-4dbe-92d0-223fac9b7b3e"


class FakeCheckpoint:
    """A query with one file source and one state operator.

    Args:
        folder: the checkpoint.
        partitions: of the state.
        store: "hdfs", "rocksdb" (a snapshot per batch) or "changelog" (format 2).
    """

    def __init__(self, folder: Path, partitions: int = 2, store: str = "hdfs") -> None:
        self.folder, self.partitions, self.store = folder, partitions, store
        self.host = HostFolder(folder)
        self.put("metadata", '{"id":"x"}')
        self.put("state/0/_metadata/metadata", "v1")
        for partition in range(partitions):
            self.put(f"state/0/{partition}/_metadata/schema", "v1")

    def put(self, path: str, text: str) -> Path:
        """Write a file, and Hadoop's checksum beside it."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.with_name(f".{target.name}.crc").write_text("crc")
        return target

    def plan(self, batch: int, offset: object = None) -> None:
        """What exists when a batch was planned: its offsets and the source's log."""
        end = {"logOffset": batch} if offset is None else offset
        self.put(f"offsets/{batch}", f"v1\n{{}}\n{json.dumps(end)}")
        if offset is None:
            self.put(f"sources/0/{batch}", f"files of {batch}")

    def write_state(self, version: int, snapshot: bool = False) -> None:
        """The state that batch `version - 1` leaves in each partition."""
        for partition in range(self.partitions):
            where = f"state/0/{partition}"
            if self.store == "rocksdb":
                self.put_zip(f"{where}/{version}.zip", [f"{version:06}-{UID}.sst"])
            elif self.store == "changelog":
                self.put(f"{where}/{version}_{UID}.changelog", f"{version} of {partition}")
                self.put(f"{where}/{version}_{UID}.changelog.crc", "sum")
                if snapshot:
                    self.put_zip(f"{where}/{version}_{UID}.zip", [f"{version:06}-{UID}.sst"])
            else:
                self.put(f"{where}/{version}.delta", f"{version} of {partition}")
                self.put(f"{where}/{version}.delta.crc", "sum")
                if snapshot:
                    self.put(f"{where}/{version}.snapshot", "whole")

    def put_zip(self, path: str, ssts: list[str]) -> None:
        """A snapshot of RocksDB, and the SST files that it names."""
        target = self.put(path, "")
        files = [{"localFileName": "1.sst", "dfsSstFileName": name} for name in ssts]
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr("metadata", "v1\n" + json.dumps({"sstFiles": files}))
        for name in ssts:
            self.put(f"{Path(path).parent}/SSTs/{name}", "sst")

    def commit(self, batch: int, snapshot: bool = False) -> None:
        """One whole batch."""
        self.plan(batch)
        self.write_state(batch + 1, snapshot)
        self.put(f"commits/{batch}", "v1\n{}")


def read_tree(folder: Path) -> dict[str, bytes]:
    """Path -> content of all files that are not hidden."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
