"""The real compaction on the model of a catalog.

What reads and writes Parquet, and Iceberg's own files, is the model's.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from tests.simulation.catalog_model import Catalog, ModelFollower, key_of, read_data_file
from tests.simulation.cheap import Rows, rows_of
from tests.simulation.storage import SimStore

from tidegate.jobs.sinks import table_maintenance
from tidegate.jobs.sinks.table_files import make_merged_stem
from tidegate.jobs.sinks.table_maintenance import _FileGroup, _TableCompactor
from tidegate.jobs.spec.pipeline import PipelineSpec


class _SimTable(_TableCompactor):
    """The real run over one table; its files hold marshalled rows."""

    _store: SimStore

    def _write_merged_files(
        self, follower: Any, bins: Iterable[_FileGroup], arrangement: object
    ) -> dict[str, tuple[Any, ...]]:
        new: dict[str, tuple[Any, ...]] = {}
        for parts in bins:
            rows = Rows(
                r
                for part in parts
                for r in rows_of(read_data_file(self._store, key_of(part.file.file_path)))
            )
            assert rows.num_rows == sum(part.file.record_count for part in parts)
            stem = f"{self._spec.name}/iceberg/{self._name}/{make_merged_stem(follower.table.metadata)}"
            key = f"{stem}-{0:016x}.parquet"
            self._store.create(key, marshal.dumps([*rows], 2))
            new[self._store.uri(key)] = ()
        return new


class _SimStaticTable:
    """A published version, read without the catalog."""

    @staticmethod
    def from_metadata(location: str, store: SimStore) -> Any:
        """Ask the store for it; that may fail."""
        catalog: Catalog = store.world.catalog
        return SimpleNamespace(metadata=catalog.read_version(location))


def _open_catalog(_: PipelineSpec, store: SimStore, *, durable: bool) -> Any:
    assert durable
    return store.world.stage.open_catalog(store)


def _named(versions: dict[str, Any]) -> set[str]:
    files = (file for table in versions.values() for file in table.metadata.files())
    return {f"memory://sim/{file}" for file in files}


COMPACTION: tuple[tuple[object, str, object], ...] = (
    (table_maintenance, "TableFollower", ModelFollower),
    (table_maintenance, "StaticTable", _SimStaticTable),
    (table_maintenance, "_TableCompactor", _SimTable),
    (table_maintenance, "_collect_named_files", _named),
    (table_maintenance, "build_io_properties", lambda store: store),
    (table_maintenance, "open_catalog", _open_catalog),
    (table_maintenance, "_NEWEST_SLOTS_KEPT", 1),
    (table_maintenance, "_MIN_FILES_PER_MERGE", 2),
    (table_maintenance, "_MERGES_PER_COMMIT", 1),
)
"""What the compaction takes from its surroundings, and its numbers, as small as they may be.

Module, name, replacement.
"""
