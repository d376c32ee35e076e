"""Delta and Iceberg tables as sources.

Which files each version added, in the order of the versions.

Only appended files are rows that arrive. A version that moved rows (compaction) brings nothing; one
that took rows away or changed them is refused, or entered under a name that is no file and becomes
a dead letter (`TableOptions.on_rewrite`). What was found is kept in the pipeline's log of arrivals
(`arrivals`), so the table may forget old versions once they were read; before, that is a gap, and
said.

Delta's log is read as it lies, by listing behind the last commit: no library, and the store's own
access. Iceberg is asked for through its catalog.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol
from urllib.parse import unquote

import pyarrow.parquet as pq

from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import ConfigurationError, PoisonError, TransientError
from tidegate.jobs.sources.object_decoding import parse_folder_values
from tidegate.jobs.spec.source_options import TableOptions, resolve_environment_value

_REWRITE_PREFIX: Final = "_rewritten/"  # begins names that stand for a version instead of a file
_COMMIT_NAME: Final = re.compile(r"(\d{20})\.json\Z")


class TableVersions(Protocol):
    """The versions of one table."""

    def list_versions_after(self, version: int | None) -> Iterator[tuple[int, Sequence[str]]]:
        """Each newer version and the files it added, as names below the table's folder.

        Args:
            version: the last one known; None for all there is.

        Raises:
            PoisonError: versions are gone before they were read, or one rewrote rows and
                `on_rewrite` is ``fail``.
            ConfigurationError: the table uses what is not supported.
            TransientError: there is no such table (yet), or its catalog is away.
        """
        ...


def open_table_versions(
    source: str, options: TableOptions, store: Store, folder: str
) -> TableVersions:
    """The table in a folder of a store."""
    if options.format == "delta":
        return DeltaVersions(source, options, store, folder)
    return IcebergVersions(source, options, store, folder)


def rewrite_reason(name: str) -> str | None:
    """What a name that is no file stands for; None for files."""
    if not name.startswith(_REWRITE_PREFIX):
        return None
    version, _, operation = name[len(_REWRITE_PREFIX) :].partition("-")
    return (
        f"version {version} of the table ({operation}) took or changed rows, which is not followed"
    )


class _VersionsBase:
    def __init__(self, source: str, options: TableOptions, store: Store, folder: str) -> None:
        self.source, self.options, self.store, self.folder = source, options, store, folder

    def _handle_rewrite(self, version: int, operation: str) -> list[str]:
        if self.options.on_rewrite == "skip":
            return [
                f"{_REWRITE_PREFIX}{version}-{re.sub('[^A-Za-z ]', '', operation) or 'unknown'}"
            ]
        raise PoisonError(
            f"source {self.source}: version {version} of {self.store.uri(self.folder)}"
            f" ({operation}) took or changed rows",
            code="table.rewritten",
            kept="everything sealed so far",
            advice=(
                "set table.on_rewrite: skip to go on behind it, with a dead letter that says so; or"
                " read the table under a new source name"
            ),
        )

    def _version_gap_error(self, version: int, found: str) -> PoisonError:
        return PoisonError(
            f"source {self.source}: {self.store.uri(self.folder)} has forgotten what came behind"
            f" version {version} ({found})",
            code="table.gap",
            kept="everything sealed so far",
            advice=(
                "keep a table's history for longer than its reader may be away; read the table"
                " again under a new source name"
            ),
        )

    def _unsupported_table_error(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"source {self.source}: {self.store.uri(self.folder)} {what}",
            code="table.unsupported",
            kept="everything sealed so far",
            advice=(
                "rewrite the table without it, or land it with Spark's own connector (see"
                " docs/landing.md)"
            ),
        )

    def _absent_table_error(self, why: str) -> TransientError:
        return TransientError(
            f"source {self.source}: there is no {self.options.format} table at"
            f" {self.store.uri(self.folder)} ({why})",
            code="table.absent",
            kept="everything sealed so far",
            advice="make the table, or mend path and table; tidegate looks again",
            retry_after=5.0,
        )


class DeltaVersions(_VersionsBase):
    """Commits of a Delta table's log."""

    def list_versions_after(self, version: int | None) -> Iterator[tuple[int, Sequence[str]]]:
        """From the first commit on, or, when it is gone, from the newest checkpoint on."""
        log = f"{self.folder}_delta_log/"
        if version is None and self.options.start == "current":
            yield self._read_current_files(log)
            return
        known = -1 if version is None else version
        for entry in self.store.list_objects(
            log, start_after=f"{log}{known:020d}.json" if known >= 0 else None
        ):
            match = _COMMIT_NAME.match(entry.key[len(log) :])
            if match is None:
                continue
            number = int(match[1])
            if number != known + 1:
                if version is not None:
                    raise self._version_gap_error(known, f"the next commit is {number}")
                known, files = self._read_delta_checkpoint(log)
                yield known, files
                yield from self.list_versions_after(known)
                return
            known = number
            yield number, self._list_commit_files(number, self.store.get(entry.key).data)
        if known < 0:
            raise self._absent_table_error("its log is empty")

    def _read_current_files(self, log: str) -> tuple[int, list[str]]:
        """The newest version and the files that the table has in it.

        Those of the last checkpoint, and what came since.
        """
        known, files = -1, set[str]()
        try:
            known, held = self._read_delta_checkpoint(log)
            files.update(held)
        except PoisonError:
            pass  # no checkpoint yet: all commits are there
        for entry in self.store.list_objects(
            log, start_after=f"{log}{known:020d}.json" if known >= 0 else None
        ):
            match = _COMMIT_NAME.match(entry.key[len(log) :])
            if match is None:
                continue
            if int(match[1]) != known + 1:
                raise self._version_gap_error(known, f"the next commit is {int(match[1])}")
            known, found = known + 1, self._parse_actions(self.store.get(entry.key).data)
            files -= {unquote(str(body["path"])) for body in found.get("remove", ())}
            files |= {self._check_file_name(body) for body in found.get("add", ())}
        if known < 0:
            raise self._absent_table_error("its log is empty")
        return known, sorted(files)

    def _parse_actions(self, data: bytes) -> dict[str, list[dict[str, Any]]]:
        """What a commit does, by kind."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in data.splitlines():
            for kind, body in (json.loads(line) if line.strip() else {}).items():
                found.setdefault(kind, []).append(body)
        for body in found.get("metaData", ()):
            self._require_plain_names(body.get("configuration", {}))
        return found

    def _require_plain_names(self, configuration: dict[str, str]) -> None:
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise self._unsupported_table_error(
                "maps column names, so its files do not bear the table's names"
            )

    def _list_commit_files(self, number: int, data: bytes) -> list[str]:
        found = self._parse_actions(data)
        if any(body.get("dataChange", True) for body in found.get("remove", ())):
            operation = next(
                (str(body.get("operation", "")) for body in found.get("commitInfo", ())), ""
            )
            return self._handle_rewrite(number, operation)
        return sorted(
            self._check_file_name(body)
            for body in found.get("add", ())
            if body.get("dataChange", True)
        )

    def _read_delta_checkpoint(self, log: str) -> tuple[int, list[str]]:
        """The files of the table as its newest checkpoint has them."""
        try:
            last = json.loads(self.store.get(f"{log}_last_checkpoint").data)
        except NotFoundError as error:
            raise self._version_gap_error(-1, "there is no checkpoint either") from error
        version, parts = int(last["version"]), int(last.get("parts") or 0)
        names = [
            f"{version:020d}.checkpoint.{n:010d}.{parts:010d}.parquet" for n in range(1, parts + 1)
        ]
        files: list[str] = []
        for name in names or [f"{version:020d}.checkpoint.parquet"]:
            try:
                table = pq.read_table(
                    io.BytesIO(self.store.get(log + name).data), columns=["add", "metaData"]
                )
            except NotFoundError as error:
                raise self._unsupported_table_error(
                    "has checkpoints of a kind that is not supported"
                ) from error
            for body in filter(None, table["metaData"].to_pylist()):
                self._require_plain_names(dict(body.get("configuration") or ()))
            files += [
                self._check_file_name(body) for body in table["add"].to_pylist() if body is not None
            ]
        return version, sorted(files)

    def _check_file_name(self, add: dict[str, Any]) -> str:
        """The file's name below the folder.

        Raises:
            ConfigurationError: it lies elsewhere, some of its rows are deleted, or its folders do
                not tell its partition.
        """
        name = unquote(str(add["path"]))
        if "://" in name or name.startswith("/"):
            raise self._unsupported_table_error(f"names a file outside its folder: {name}")
        if add.get("deletionVector"):
            raise self._unsupported_table_error(f"deletes rows of files by vectors ({name})")
        values = add.get("partitionValues") or {}
        told = {
            k: v if v != "" else None
            for k, v in (values.items() if isinstance(values, dict) else values)
        }
        if told != parse_folder_values(name):
            raise self._unsupported_table_error(
                f"has partition values that the names of its folders do not tell: {name}"
            )
        return name


class IcebergVersions(_VersionsBase):
    """Snapshots of an Iceberg table's main branch."""

    _catalog: Any = None

    def list_versions_after(self, version: int | None) -> Iterator[tuple[int, Sequence[str]]]:
        """From the oldest snapshot on that the table still has, or from the current one."""
        with self._translate_catalog_errors():
            yield from self._walk_snapshots(version)

    def _walk_snapshots(self, version: int | None) -> Iterator[tuple[int, Sequence[str]]]:
        table = self._load_iceberg_table()
        metadata, chain = table.metadata, []
        snapshot = metadata.current_snapshot()
        while snapshot is not None and snapshot.snapshot_id != version:
            chain.append(snapshot)
            parent = snapshot.parent_snapshot_id
            if version is None and self.options.start == "current":
                break
            snapshot = None if parent is None else metadata.snapshot_by_id(parent)
        if snapshot is None and version is not None:
            raise self._version_gap_error(version, "its snapshot is expired, or was rolled back")
        for one in reversed(chain):
            first = version is None and one is chain[-1]
            yield one.snapshot_id, self._list_snapshot_files(table, one, whole=first)

    def _list_snapshot_files(self, table: Any, snapshot: Any, *, whole: bool) -> list[str]:
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
        from pyiceberg.table.snapshots import Operation

        operation = snapshot.summary.operation if snapshot.summary else Operation.APPEND
        if operation == Operation.REPLACE and not whole:
            return []
        manifests = snapshot.manifests(table.io)
        if (
            operation in (Operation.OVERWRITE, Operation.DELETE)
            and not whole
            and _removed_rows(snapshot)
        ):
            return self._handle_rewrite(snapshot.snapshot_id, operation.value)
        if any(m.content == ManifestContent.DELETES for m in manifests):
            raise self._unsupported_table_error("deletes rows of files by delete files")
        wanted = [m for m in manifests if whole or m.added_snapshot_id == snapshot.snapshot_id]
        entries = [
            entry
            for m in wanted
            for entry in m.fetch_manifest_entry(table.io, discard_deleted=True)
        ]
        added = [e for e in entries if whole or e.status == ManifestEntryStatus.ADDED]
        return sorted(self._to_relative_name(entry.data_file.file_path) for entry in added)

    def _to_relative_name(self, path: str) -> str:
        base = self.store.uri(self.folder).removeprefix("file://")
        own = path.removeprefix("file://").replace("s3a://", "s3://", 1)
        if not own.startswith(base):
            raise self._unsupported_table_error(f"has a file outside its folder: {path}")
        return own[len(base) :].lstrip("/")

    def _load_iceberg_table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        from tidegate.jobs.sinks.iceberg_catalog import build_io_properties

        if self._catalog is None:
            given = self.options.catalog_options.items()
            options = {
                k: resolve_environment_value(f"table.catalog_options.{k}", v, os.environ)
                for k, v in given
            }
            name = options.pop("name", "default")
            self._catalog = load_catalog(
                name, uri=self.options.catalog, **{**build_io_properties(self.store), **options}
            )
        assert self.options.name is not None  # noqa: S101 - the spec says so
        return self._catalog.load_table(self.options.name)

    @contextmanager
    def _translate_catalog_errors(self) -> Iterator[None]:
        """Errors of the catalog and of the table's files in our words."""
        from pyiceberg.exceptions import (
            ForbiddenError,
            NoSuchNamespaceError,
            NoSuchTableError,
            RESTError,
            UnauthorizedError,
        )
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise self._absent_table_error(str(error)) from error
        except (ForbiddenError, UnauthorizedError) as error:
            raise ConfigurationError(
                f"source {self.source}: the catalog {self.options.catalog} refuses it:"
                f" {_get_first_line(error)}",
                code="table.catalog_denied",
                kept="everything sealed so far",
                advice=(
                    "set table.catalog_options (token or credential, as env:NAME) and the right to"
                    " read the table"
                ),
            ) from error
        except (
            FileNotFoundError
        ) as error:  # of a snapshot that expired since the table was loaded: the next look tells
            raise self._table_unavailable_error("a file of its metadata is gone", error) from error
        except (OSError, SQLAlchemyError, RESTError) as error:
            self._catalog = None
            raise self._table_unavailable_error(
                "its catalog or files cannot be reached", error
            ) from error

    def _table_unavailable_error(self, what: str, error: Exception) -> TransientError:
        return TransientError(
            f"source {self.source}: {self.options.name}: {what} ({_get_first_line(error)})",
            code="table.unavailable",
            kept="everything sealed so far",
            advice="check the catalog and the store; tidegate tries again by itself",
            retry_after=2.0,
        )


def _get_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _removed_rows(snapshot: Any) -> bool:
    """Whether a snapshot that may take rows away did."""
    said = snapshot.summary.additional_properties
    return any(
        int(said.get(name, 0))
        for name in ("deleted-data-files", "added-delete-files", "deleted-records")
    )
