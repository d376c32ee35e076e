"""The real `StoreCatalog` of a pipeline without a shared catalog, on the simulated bucket.

An entry per table names the table's version, and a commit swaps the entry by its ETag: what goes
wrong with a request to the bucket goes wrong with a commit. Only Iceberg's own metadata is the
model's; a version takes effect when the bucket takes its entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pyiceberg.exceptions import CommitFailedException
from tests.simulation.basics import PIPELINE
from tests.simulation.catalog_model import Catalog, Metadata
from tests.simulation.storage import SimStore

from tidegate.jobs.sinks import iceberg_catalog
from tidegate.jobs.sinks.iceberg_catalog import StoreCatalog


class PrivateCatalog(StoreCatalog):
    """One process's view of the pipeline's own catalog."""

    def __init__(self, store: SimStore, model: Catalog) -> None:
        super().__init__(store, PIPELINE)
        self._model = model
        self.world = model.world

    @property
    def validates(self) -> bool:
        """Whether a merge is refused if main lacks a part."""
        return self._model.validates

    @property
    def fences(self) -> bool:
        """Whether a rewind leaves a snapshot."""
        return self._model.fences

    def held(self, key: str) -> Any:
        """What Iceberg knows of a data file."""
        return self._model.held(key)

    def close(self) -> None:
        """A client's connections; there are none."""

    def load_table(self, identifier: Any) -> Any:
        """A table as its entry names it."""
        return self._open(identifier, self._read_entry(identifier)[0])

    def commit(self, handle: Any, timeline: int, change: Callable[[Metadata], Metadata]) -> None:
        """Commit as pyiceberg does: on the condition that main is what the follower judged."""
        handle.commits(self, (handle.metadata,), (change,))

    def _open(self, identifier: Any, location: str) -> Any:
        handle = SimpleNamespace(
            catalog=self,
            table=identifier[-1],
            name=lambda: (PIPELINE, identifier[-1]),
            metadata=self._model.read_version(location),
            metadata_location=location,
            io=None,
        )
        handle.commits = lambda catalog, judged, changes: vars(handle).update(
            vars(catalog.commit_table(handle, judged, changes))
        )
        return handle

    def _create_staged_table(self, identifier: Any, schema: Any, *_: Any, **__: Any) -> Any:
        metadata = Metadata(self._name_version(identifier[-1]))
        return SimpleNamespace(metadata=metadata, io=None, metadata_location=metadata.location)

    def _update_and_stage_table(
        self, current_table: Any, table_identifier: Any, requirements: Any, updates: Any
    ) -> Any:
        (judged,), (change,) = requirements, updates
        if current_table.metadata.main is not judged.main:
            raise CommitFailedException(f"main of {table_identifier} has moved")
        after = change(current_table.metadata)
        location = self._name_version(table_identifier[-1])
        return SimpleNamespace(
            metadata=replace(after, location=location), io=None, metadata_location=location
        )

    def _write_metadata(self, metadata: Any, *_: Any) -> None:  # type: ignore[override]
        self._model.meet_store("put", metadata.location)
        self._model.version(metadata)

    def _name_version(self, table: str) -> str:
        self._model.names += 1
        return f"{table}/{self._model.names}"


def _build_response(staged: Any) -> Any:
    return SimpleNamespace(metadata=staged.metadata, metadata_location=staged.metadata_location)


PRIVATE = ((iceberg_catalog, "_build_response", _build_response),)
"""What the real catalog takes from pyiceberg: module, name, replacement."""
