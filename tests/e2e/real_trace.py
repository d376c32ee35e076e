"""The protocol's steps of a real run, read afterwards from the bucket and judged.

The bucket keeps every version of every object, so that each write and each deletion is there with
its time. They are taken in that order by the rules of `tests/simulation/protocol_steps.py`; a table
moves when its entry in the catalog does, and its files are read from its Iceberg metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import boto3
from pyiceberg.table import StaticTable
from pyiceberg.table.snapshots import Snapshot

from tests.servers.minio import RealMinio
from tests.simulation.cheap import parsed
from tests.simulation.protocol_steps import Protocol
from tests.simulation.protocol_trace import TraceJudge, UntakenError
from tidegate.infra.provision import REGION

_ENTRY = re.compile(r"iceberg/([^/]+)/catalog\.json")
_ORDER = ("timelines/", "lease.json", "roots.json", "/slots/", "/catalog.json", "current.json")


@dataclass(frozen=True)
class Change:
    """A write, or with `data` None a deletion; keys are relative to the store."""

    at: datetime
    key: str
    data: bytes | None

    @property
    def rank(self) -> tuple[datetime, int]:
        """The time, and for one millisecond the order in which a process works."""
        return self.at, max((n for n, part in enumerate(_ORDER) if part in self.key), default=0)


class _Mark(NamedTuple):
    timeline: int
    upto: int


class _Main(NamedTuple):
    """What `table_of` asks of a version's newest snapshot."""

    mark: _Mark
    files: tuple[str, ...]


class _Version(NamedTuple):
    main: _Main | None


def keep_versions(minio: RealMinio) -> None:
    """Let the bucket keep every version from now on."""
    _client(minio).put_bucket_versioning(
        Bucket=minio.bucket, VersioningConfiguration={"Status": "Enabled"}
    )


def read_changes(minio: RealMinio, prefix: str) -> list[Change]:
    """Return what happened below a prefix, in order; the prefix is left out of the keys."""
    client, found = _client(minio), list[Change]()
    pages = client.get_paginator("list_object_versions")
    for page in pages.paginate(Bucket=minio.bucket, Prefix=prefix):
        for entry in page.get("DeleteMarkers", ()):
            found.append(Change(entry["LastModified"], entry["Key"][len(prefix) :], None))
        for entry in page.get("Versions", ()):
            key = entry["Key"]
            data = b""
            if key.endswith(".json"):
                answer = client.get_object(
                    Bucket=minio.bucket, Key=key, VersionId=entry["VersionId"]
                )
                data = answer["Body"].read()
            found.append(Change(entry["LastModified"], key[len(prefix) :], data))
    return sorted(found, key=lambda change: change.rank)


def take_changes(
    changes: Iterable[Change], pipeline: str, tables: Tables | None = None
) -> TraceJudge:
    """Take every step; return the judge, which has counted them.

    Raises:
        UntakenError: the protocol does not allow a step.
    """
    judge = TraceJudge(pipeline=pipeline, keep=True)
    for change in changes:
        if not change.key.startswith(f"{pipeline}/"):
            continue
        if change.data is None:
            judge.removed(change.key)
            continue
        try:
            _take_change(judge, change, tables)
        except UntakenError as error:
            raise UntakenError(f"{change.at} {change.key}: {error}") from error
    return judge


def _take_change(judge: TraceJudge, change: Change, tables: Tables | None) -> None:
    entry = _ENTRY.search(change.key)
    if entry is None or tables is None:
        judge.wrote(change.key, change.data or b"", tables or {})  # type: ignore[arg-type]
        return
    main = tables[parsed(change.data or b"")["metadata_location"]].main
    if main is not None:
        judge.take("follow", entry[1], tuple(main.mark), frozenset(main.files))


class Tables:
    """Address of a metadata file -> that version of its table, read when it is first asked for."""

    def __init__(self, minio: RealMinio, prefix: str) -> None:
        self._root = f"s3://{minio.bucket}/{prefix}"
        self._properties = {
            "s3.endpoint": minio.server.endpoint,
            "s3.region": REGION,
            "s3.access-key-id": minio.app.access_key,
            "s3.secret-access-key": minio.app.secret_key,
        }
        self._known: dict[str, _Version] = {}
        _restore_deleted(minio, prefix)

    def __getitem__(self, location: str) -> _Version:
        if location not in self._known:
            self._known[location] = self._read_version(location)
        return self._known[location]

    def _read_version(self, location: str) -> _Version:
        table = StaticTable.from_metadata(location, self._properties)
        newest = table.current_snapshot()
        if newest is None:
            return _Version(None)
        files = (
            entry.data_file.file_path.removeprefix(self._root)
            for manifest in newest.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
        )
        return _Version(_Main(_find_mark(table, newest), tuple(files)))


def _restore_deleted(minio: RealMinio, prefix: str) -> None:
    """Bring back what was deleted: the sweep of a table's metadata removes old versions."""
    client = _client(minio)
    pages = client.get_paginator("list_object_versions")
    for page in pages.paginate(Bucket=minio.bucket, Prefix=prefix):
        for entry in page.get("DeleteMarkers", ()):
            if "/iceberg/" in entry["Key"]:
                version = {"Key": entry["Key"], "VersionId": entry["VersionId"]}
                client.delete_object(Bucket=minio.bucket, **version)


def _find_mark(table: StaticTable, newest: Snapshot) -> _Mark:
    """Return the position of the newest snapshot that has one; compactions have none."""
    snapshot: Snapshot | None = newest
    while snapshot is not None:
        noted = snapshot.summary.additional_properties if snapshot.summary else {}
        if "tidegate.upto" in noted:
            return _Mark(int(noted["tidegate.timeline"]), int(noted["tidegate.upto"]))
        snapshot = table.metadata.snapshot_by_id(snapshot.parent_snapshot_id or 0)
    return _Mark(0, 0)


def judge_bucket(minio: RealMinio, prefix: str, pipeline: str) -> int:
    """Take every step of a pipeline in the bucket; return how many there were.

    Raises:
        UntakenError: the protocol does not allow a step.
    """
    changes = read_changes(minio, prefix)
    return take_changes(changes, pipeline, Tables(minio, prefix)).steps


def forge_histories(changes: list[Change], protocol: Protocol) -> dict[str, list[Change]]:
    """Plant bugs in a history that was taken: what each bug is, and the history with it.

    There must be a retirement or a restore in it, because `roots.json` is written for those.
    """
    events = protocol.tables["events"]
    needed = replace(changes[-1], key=max(events.files), data=None)
    return {
        "a slot is lost": _lose(changes, "/timelines/0/slots/"),
        "a slot is filled again": [*changes, _fill_again(changes)],
        # All of its writes: each has the whole document, so the next one makes up for one.
        "roots.json is left out": [one for one in changes if "/roots.json" not in one.key],
        "readers are shown what is not sealed": _hasten(changes, "/current.json"),
        "a table has rows that are not sealed": _hasten(changes, "/events/catalog.json"),
        "a file that a table needs is deleted": [*changes, needed],
    }


def _lose(changes: list[Change], part: str) -> list[Change]:
    """Without the first write of a kind."""
    lost = next(change for change in changes if part in change.key)
    return [change for change in changes if change is not lost]


def _hasten(changes: list[Change], part: str) -> list[Change]:
    """With the last write of a kind before everything else."""
    early = [change for change in changes if part in change.key][-1]
    return [early, *(change for change in changes if change is not early)]


def _fill_again(changes: list[Change]) -> Change:
    """As if a second driver had written over the newest slot."""
    filled = [(one, json.loads(one.data or b"")) for one in changes if "/slots/" in one.key]
    slot, raw = [(one, raw) for one, raw in filled if raw["kind"] == "epoch"][-1]
    return replace(slot, data=json.dumps(raw | {"created_at": raw["created_at"] + 1}).encode())


def _client(minio: RealMinio) -> Any:
    root = minio.server.root
    return boto3.client(
        "s3",
        endpoint_url=minio.server.endpoint,
        region_name=REGION,
        aws_access_key_id=root.access_key,
        aws_secret_access_key=root.secret_key,
    )
