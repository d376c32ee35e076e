"""Turns a copied store into an independent pipeline that never writes to the original's tables."""

from __future__ import annotations

from contextlib import closing

from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.pipeline_identity import refuse_copied_store, rewrite_identity
from tidegate.checkpoints.process_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.errors import ConfigurationError
from tidegate.jobs.sinks.errors import COPY_LACKS_ROWS, NOT_A_COPY
from tidegate.jobs.sinks.iceberg_catalog import open_catalog, resolve_namespace
from tidegate.jobs.spec.pipeline import PipelineSpec


def adopt_copied_store(spec: PipelineSpec, log: SlotLog) -> str:
    """Give the copied pipeline a new uid and drop its reference to the original's tables.

    The next driver creates new tables next to the copy. Because of the new uid, this pipeline
    cannot write to tables of a shared catalog or to sinks that the original filled: its driver is
    refused until the spec names others.

    Returns:
        The new uid.

    Raises:
        ConfigurationError: the store is not a copy, or epochs were retired, so that their rows are
            only in the original's tables.
        LeaseHeldError: a driver is running on the copy.
    """
    store = log.store
    try:
        refuse_copied_store(store, spec.name)
    except ConfigurationError as error:
        if error.code != "identity.copied":
            raise
    else:
        raise NOT_A_COPY(pipeline=spec.name, store=store.url)
    if any(row.kind == "stub" for row in CheckpointCatalog(log).list_checkpoints(kinds=("stub",))):
        raise COPY_LACKS_ROWS(pipeline=spec.name)
    # The lease keeps a driver of the copy from reading the old uid while it changes.
    lease = Lease.acquire(store, spec.name, ProcessIdentity.this_process("adopt"))
    try:
        _forget_published_tables(spec, log)
        return rewrite_identity(store, spec.name)
    finally:
        lease.release()


def _forget_published_tables(spec: PipelineSpec, log: SlotLog) -> None:
    """Delete the pointer to the tables, and drop the tables from a catalog that was copied along.

    No data file is deleted.
    """
    log.store.delete(log.layout.published_cut_key)
    log.store.delete(log.layout.table_versions_key)
    if spec.outputs.catalog is None:
        with closing(open_catalog(spec, log.store)) as catalog:
            for identifier in catalog.list_tables(resolve_namespace(spec)):
                catalog.drop_table(identifier)
