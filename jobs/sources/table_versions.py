"""Delta and Iceberg tables as sources: which files each version added, in the order of versions.

Only appended files are new rows. A version that moved rows (compaction) adds nothing. A version
that removed or changed rows is refused, or entered under a placeholder name that becomes a dead
letter (`TableOptions.on_rewrite`). The result is kept in the pipeline's arrival log
(`arrival_log`), so the table may forget versions that were read. Versions it forgot before that are
reported as a gap.

Delta's log is listed and parsed here, through the store that everything else uses: deltalake does
not show the actions of one commit (docs/dependencies.md). Iceberg's snapshots come from its
catalog, through pyiceberg. Rules: docs/decisions/0074-table-commits-enter-the-arrival-log.md.
"""

import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import ConfigurationError, PoisonError, TransientError, get_first_line
from tidegate.jobs.spec.source_options import (
    TableOptions,
    resolve_address,
    resolve_environment_values,
)
from tidegate.json_types import JsonObject
from tidegate.secret_masks import mask_address

from .errors import (
    TABLE_ABSENT,
    TABLE_CATALOG_DENIED,
    TABLE_GAP,
    TABLE_REWRITTEN,
    TABLE_UNAVAILABLE,
    TABLE_UNSUPPORTED,
)
from .object_decoding import parse_folder_values

_REWRITE_PREFIX = "_rewritten/"  # of placeholder names, each of which records a version
_COMMIT_NAME = re.compile(r"(\d{20})\.json\Z")

_Version = tuple[int, Sequence[str]]  # its number, and the files that it added


@dataclass
class TableVersions(ABC):
    """The versions of the table in a folder of a store."""

    source: str
    options: TableOptions
    store: Store
    folder: str

    @property
    def _uri(self) -> str:
        return self.store.uri(self.folder)

    @abstractmethod
    def list_versions_after(self, version: int | None) -> Iterator[_Version]:
        """Yield each newer version with the files it added, as names below the table's folder.

        A new source begins with all files of its first version. A version that rewrote rows has
        a placeholder name instead (`rewrite_reason`) if `on_rewrite` is ``skip``.

        Args:
            version: the last version that was read; None for a new source.

        Raises:
            PoisonError: versions are gone before they were read, or one rewrote rows and
                `on_rewrite` is ``fail``.
            ConfigurationError: the table uses a feature that is not supported, its catalog refuses
                access, or a variable that the spec names is not set.
            TransientError: there is no such table (yet), or its catalog does not answer.
        """

    def _handle_rewrite(self, version: int, operation: str) -> list[str]:
        """Return the placeholder for a version that rewrote rows, or refuse it."""
        if self.options.on_rewrite == "skip":
            plain = re.sub("[^A-Za-z ]", "", operation) or "unknown"
            return [f"{_REWRITE_PREFIX}{version}-{plain}"]
        raise TABLE_REWRITTEN(
            source=self.source, version=version, table=self._uri, operation=operation
        )

    def _version_gap_error(self, version: int, detail: str) -> PoisonError:
        return TABLE_GAP(source=self.source, table=self._uri, version=version, detail=detail)

    def _unsupported_table_error(self, what: str) -> ConfigurationError:
        return TABLE_UNSUPPORTED(source=self.source, table=self._uri, what=what)

    def _absent_table_error(self, detail: str) -> TransientError:
        return TABLE_ABSENT(
            source=self.source, format=self.options.format, table=self._uri, detail=detail
        )


def open_table_versions(
    source: str, options: TableOptions, store: Store, folder: str
) -> TableVersions:
    """Return the versions of the table in a folder of a store, without a request."""
    kind = DeltaVersions if options.format == "delta" else IcebergVersions
    return kind(source, options, store, folder)


def rewrite_reason(name: str) -> str | None:
    """Explain a placeholder name that records a table rewrite; None for ordinary data files."""
    if not name.startswith(_REWRITE_PREFIX):
        return None
    version, _, operation = name[len(_REWRITE_PREFIX) :].partition("-")
    return (
        f"version {version} of the table ({operation}) took or changed rows, which is not followed"
    )


class DeltaVersions(TableVersions):
    """Implements `TableVersions` with the commits of a Delta table's log."""

    def list_versions_after(self, version: int | None) -> Iterator[_Version]:
        """See `TableVersions`.

        A new source of a table that has lost its first commit begins with the newest checkpoint.
        """
        if version is None and self.options.start == "current":
            yield self._read_current_files()
            return
        previous = -1 if version is None else version
        for number, key in self._list_commits(previous):
            if number != previous + 1:
                if version is not None:
                    raise self._version_gap_error(previous, f"the next commit is {number}")
                previous, files = self._read_delta_checkpoint()
                yield previous, files
                yield from self.list_versions_after(previous)
                return
            previous = number
            yield number, self._list_commit_files(number, key)
        if previous < 0:
            raise self._absent_table_error("its log is empty")

    def _list_commits(self, version: int) -> Iterator[tuple[int, str]]:
        """Yield number and key of each commit after `version`; -1: all."""
        log = f"{self.folder}_delta_log/"
        start_after = f"{log}{version:020d}.json" if version >= 0 else None
        for entry in self.store.list_objects(log, start_after=start_after):
            if match := _COMMIT_NAME.match(entry.key[len(log) :]):
                yield int(match[1]), entry.key

    def _read_current_files(self) -> tuple[int, list[str]]:
        """Return the newest version and the files of the table in it.

        They are those of the last checkpoint, and what was added and removed since.
        """
        version, files = -1, set[str]()
        try:
            version, checkpointed = self._read_delta_checkpoint()
            files.update(checkpointed)
        except PoisonError:
            pass  # without a checkpoint all commits are still there
        for number, key in self._list_commits(version):
            if number != version + 1:
                raise self._version_gap_error(version, f"the next commit is {number}")
            version, actions = number, self._read_actions(key)
            files -= {unquote(str(body["path"])) for body in actions.get("remove", ())}
            files |= {self._check_file_name(body) for body in actions.get("add", ())}
        if version < 0:
            raise self._absent_table_error("its log is empty")
        return version, sorted(files)

    def _read_actions(self, key: str) -> dict[str, list[JsonObject]]:
        """Return a commit's actions by kind."""
        actions: dict[str, list[JsonObject]] = {}
        for line in self.store.get(key).data.splitlines():
            for kind, body in (json.loads(line) if line.strip() else {}).items():
                actions.setdefault(kind, []).append(body)
        for body in actions.get("metaData", ()):
            self._require_plain_names(body.get("configuration", {}))
        return actions

    def _require_plain_names(self, configuration: dict[str, str]) -> None:
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise self._unsupported_table_error(
                "maps column names, so its files do not bear the table's names"
            )

    def _list_commit_files(self, number: int, key: str) -> list[str]:
        actions = self._read_actions(key)
        # A compaction removes and adds files with dataChange = false.
        if any(body.get("dataChange", True) for body in actions.get("remove", ())):
            infos = actions.get("commitInfo", [{}])
            return self._handle_rewrite(number, str(infos[0].get("operation", "")))
        return sorted(
            self._check_file_name(body)
            for body in actions.get("add", ())
            if body.get("dataChange", True)
        )

    def _read_delta_checkpoint(self) -> tuple[int, list[str]]:
        """Return the version of the newest checkpoint and the table's files in it."""
        log = f"{self.folder}_delta_log/"
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
                data = self.store.get(log + name).data
            except NotFoundError as error:
                what = "has checkpoints of a kind that is not supported"
                raise self._unsupported_table_error(what) from error
            table = pq.read_table(io.BytesIO(data), columns=["add", "metaData"])
            # With column mapping, files have other column names than the table; that is not
            # supported.
            for body in filter(None, table["metaData"].to_pylist()):
                self._require_plain_names(dict(body.get("configuration") or ()))
            files += map(self._check_file_name, filter(None, table["add"].to_pylist()))
        return version, sorted(files)

    def _check_file_name(self, add: JsonObject) -> str:
        """Return the name below the folder of an added file.

        Raises:
            ConfigurationError: the file lies elsewhere, some of its rows are deleted, or the names
                of its folders differ from its partition values.
        """
        name = unquote(str(add["path"]))
        if "://" in name or name.startswith("/"):
            raise self._unsupported_table_error(f"names a file outside its folder: {name}")
        if add.get("deletionVector"):
            raise self._unsupported_table_error(f"deletes rows of files by vectors ({name})")
        values = dict(add.get("partitionValues") or ())  # pairs in a checkpoint, an object in JSON
        if {k: v if v != "" else None for k, v in values.items()} != parse_folder_values(name):
            raise self._unsupported_table_error(
                f"has partition values that the names of its folders do not tell: {name}"
            )
        return name


class IcebergVersions(TableVersions):
    """Implements `TableVersions` with the snapshots of an Iceberg table's main branch."""

    _catalog: Any = None

    def list_versions_after(self, version: int | None) -> Iterator[_Version]:
        """Yield each newer snapshot's id with the files it added; see `TableVersions`.

        A new source begins with all files of the oldest snapshot that the table still has, or of
        the current one if `start` is ``current``.
        """
        # pyiceberg's incremental scan skips snapshots that are not appends; here they are refused.
        with self._translate_catalog_errors():
            table = self._load_iceberg_table()
            metadata, newest_first = table.metadata, []
            snapshot = metadata.current_snapshot()
            while snapshot is not None and snapshot.snapshot_id != version:
                newest_first.append(snapshot)
                if version is None and self.options.start == "current":
                    break
                parent = snapshot.parent_snapshot_id
                snapshot = None if parent is None else metadata.snapshot_by_id(parent)
            if snapshot is None and version is not None:
                raise self._version_gap_error(
                    version, "its snapshot is expired, or was rolled back"
                )
            for snapshot in reversed(newest_first):
                # What came before the first snapshot of a new source is only in its whole content.
                whole = version is None and snapshot is newest_first[-1]
                yield snapshot.snapshot_id, self._list_snapshot_files(table, snapshot, whole=whole)

    def _list_snapshot_files(self, table: Any, snapshot: Any, *, whole: bool) -> list[str]:
        """Return the files that a snapshot added, or all that it has."""
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
        from pyiceberg.table.snapshots import Operation

        operation = snapshot.summary.operation if snapshot.summary else Operation.APPEND
        if operation == Operation.REPLACE and not whole:
            return []
        manifests = snapshot.manifests(table.io)
        may_remove = operation in (Operation.OVERWRITE, Operation.DELETE) and not whole
        if may_remove and _removed_rows(snapshot):
            return self._handle_rewrite(snapshot.snapshot_id, operation.value)
        if any(m.content == ManifestContent.DELETES for m in manifests):
            raise self._unsupported_table_error("deletes rows of files by delete files")
        return sorted(
            self._to_relative_name(entry.data_file.file_path)
            for manifest in manifests
            if whole or manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            if whole or entry.status == ManifestEntryStatus.ADDED
        )

    def _to_relative_name(self, path: str) -> str:
        base = self._uri.removeprefix("file://")
        location = path.removeprefix("file://").replace("s3a://", "s3://", 1)
        if not location.startswith(base):
            what = f"has a file outside `path`, {path}: let it be a folder above all its files"
            raise self._unsupported_table_error(what)
        return location[len(base) :].lstrip("/")

    def _load_iceberg_table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        from tidegate.jobs.sinks.iceberg_catalog import build_io_properties, close_after_use

        if self._catalog is None:
            given = self.options.catalog_options
            options = resolve_environment_values("table.catalog_options", given, os.environ)
            name = options.pop("name", "default")
            uri = resolve_address("table.catalog", str(self.options.catalog), os.environ)
            options = {**build_io_properties(self.store), **options}
            self._catalog = load_catalog(name, uri=uri, **options)
            close_after_use(self._catalog)
        assert self.options.name is not None  # noqa: S101 - checked by the spec
        return self._catalog.load_table(self.options.name)

    @contextmanager
    def _translate_catalog_errors(self) -> Iterator[None]:
        """Translate exceptions of the catalog and of the table's files."""
        from pyiceberg.exceptions import (
            ForbiddenError,
            NoSuchNamespaceError,
            NoSuchTableError,
            UnauthorizedError,
        )

        from tidegate.jobs.sinks.iceberg_catalog import list_outage_errors

        try:
            yield
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise self._absent_table_error(str(error)) from error
        except (ForbiddenError, UnauthorizedError) as error:
            raise TABLE_CATALOG_DENIED(
                source=self.source,
                catalog=mask_address(str(self.options.catalog)),
                detail=get_first_line(error),
            ) from error
        except FileNotFoundError as error:
            # A snapshot expired since the table was loaded: the next look says which.
            raise self._table_unavailable_error("a file of its metadata is gone", error) from error
        except list_outage_errors() as error:
            self._catalog = None
            what = "its catalog or files cannot be reached"
            raise self._table_unavailable_error(what, error) from error

    def _table_unavailable_error(self, what: str, error: Exception) -> TransientError:
        return TABLE_UNAVAILABLE(
            source=self.source, table=self.options.name, what=what, detail=get_first_line(error)
        )


def _removed_rows(snapshot: Any) -> bool:
    """Return whether a snapshot of an operation that can remove rows removed any."""
    totals = snapshot.summary.additional_properties
    names = ("deleted-data-files", "added-delete-files", "deleted-records")
    return any(int(totals.get(name, 0)) for name in names)
