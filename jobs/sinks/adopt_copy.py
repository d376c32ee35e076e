"""A copy of a store becomes a pipeline of its own.

Its driver writes nothing where the original's does.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import refuse_copied_store, rewrite_identity
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks.iceberg_catalog import open_catalog, resolve_namespace
from tidegate.jobs.sinks.lineage_position import build_cut_key
from tidegate.jobs.spec.pipeline import PipelineSpec


def adopt_copied_store(spec: PipelineSpec, log: SlotLog) -> str:
    """Give the copy an identity of its own, and forget the original's tables.

    The next driver makes them anew, here.

    With the new uid every table of a shared catalog, every ledger of a sink and every mark that the
    original filled is refused.

    Raises:
        ConfigurationError: the store is no copy, or epochs were retired, so that their rows are in
            the original's tables only.
        LeaseHeldError: somebody drives it.
    """
    store = log.store
    try:
        refuse_copied_store(store, spec.name)
    except ConfigurationError as error:
        if error.code != "identity.copied":
            raise
    else:
        raise _adoption_error(
            spec, f"{store.url} is no copy", "nothing to adopt", "run it as it is"
        )
    if any(row.kind == "stub" for row in CheckpointCatalog(log).list_checkpoints(kinds=("stub",))):
        raise _adoption_error(
            spec,
            f"epochs of {spec.name} were retired: their rows are in the original's tables only,"
            " whose metadata names their place",
            "the copy, which every reading command can look at",
            "put the copy in the place it came from, under the same address",
        )
    lease = Lease.acquire(store, spec.name, ProcessIdentity.this_process("adopt"))
    try:
        _forget_published_tables(spec, log)
        return rewrite_identity(store, spec.name)
    finally:
        lease.release()


def _forget_published_tables(spec: PipelineSpec, log: SlotLog) -> None:
    """Take them out of the pointer, and out of the catalog that was copied with the store.

    No file is touched.
    """
    log.store.delete(build_cut_key(spec.name))
    if spec.outputs.catalog is None and isinstance(log.store, LocalStore):
        with closing(open_catalog(spec, log.store, Path())) as catalog:
            for identifier in catalog.list_tables(resolve_namespace(spec)):
                catalog.drop_table(identifier)


def _adoption_error(spec: PipelineSpec, what: str, kept: str, advice: str) -> ConfigurationError:
    return ConfigurationError(
        what, code="identity.not_adopted", pipeline=spec.name, kept=kept, advice=advice
    )
