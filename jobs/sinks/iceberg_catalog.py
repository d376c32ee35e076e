"""Opens the Iceberg catalog in which the tables are registered, and the files of the tables.

The catalog provides the compare-and-swap of a table commit, and all publishers share it: objects in
the bucket, a SQLite file in a local store, any SQL database, or an Iceberg REST catalog.
Readers do not need it, and it may be lost: the pointer `current.json` names every table's metadata
file (see `lineage_position`). A copied store becomes a pipeline of its own here, which never writes
to the tables of the original.
"""

import os
from contextlib import closing
from functools import partial
from typing import Any

from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.checkpoint_catalog import CheckpointCatalog
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    refuse_copied_store,
    rewrite_identity,
)
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.shared_documents import parse_document
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import NotFoundError, PreconditionFailedError, Store
from tidegate.errors import ConfigurationError
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import resolve_address, resolve_environment_values

from .errors import COPY_LACKS_ROWS, NOT_A_COPY

_CATALOG_NAME = "tidegate"  # Spark's JdbcCatalog on the same database needs the same name


def resolve_namespace(spec: PipelineSpec) -> str:
    """Return the Iceberg namespace of a pipeline."""
    return spec.outputs.namespace or spec.name


def build_table_location(spec: PipelineSpec, store: Store, table: str) -> str:
    """Return the folder of a table's Iceberg metadata; data files are stored with their epochs."""
    return store.uri(BucketLayout(spec.name).iceberg_table_folder(table))


def open_catalog(spec: PipelineSpec, store: Store, *, durable: bool = False) -> Catalog:
    """Open the catalog of `outputs.catalog`; by default one that needs no server.

    For a local store that is a SQLite file in it, which Spark can open as well. For any other store
    it is a `StoreCatalog`. The pipeline's namespace is created if it is missing.

    Args:
        spec: the pipeline.
        store: its store.
        durable: whether commits to a SQLite file must survive a power failure. Needed by callers
            that delete files because of a commit.

    Raises:
        ConfigurationError: a variable that the spec names is not set.
    """
    catalog = _connect_catalog(spec, store, durable)
    catalog.create_namespace_if_not_exists(resolve_namespace(spec))
    return catalog


def _connect_catalog(spec: PipelineSpec, store: Store, durable: bool) -> Catalog:
    address, files = spec.outputs.catalog, build_io_properties(store)
    if address is not None:
        address = resolve_address("outputs.catalog", address, os.environ)
    if address is not None and address.startswith(("http://", "https://")):
        from pyiceberg.catalog.rest import RestCatalog

        given = spec.outputs.catalog_options
        options = resolve_environment_values("outputs.catalog_options", given, os.environ)
        return RestCatalog(_CATALOG_NAME, uri=address, **files, **options)
    if address is None:
        if not isinstance(store, LocalStore):
            return StoreCatalog(store, spec.name, **files)
        path = store.root / ".tidegate-store" / "catalog.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{path}"
    # Only here: SQLAlchemy takes a fifth of the time in which a driver imports its modules, and the
    # catalog in a bucket does without.
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy import event

    warehouse = store.uri(BucketLayout(spec.name).iceberg_folder)
    catalog = SqlCatalog(_CATALOG_NAME, uri=address, warehouse=warehouse, **files)
    if close_after_use(catalog):
        # Otherwise a power failure may take the last commits, each as a whole. The tables then
        # follow the log again from the commits that were kept.
        set_pragmas = partial(_set_sqlite_pragmas, "FULL" if durable else "NORMAL")
        event.listen(catalog.engine, "connect", set_pragmas)
    return catalog


def list_outage_errors() -> tuple[type[Exception], ...]:
    """Return what a catalog or store that cannot be reached raises, for an `except` clause.

    Python calls it there only after something was raised, so that SQLAlchemy is imported late.
    """
    from sqlalchemy.exc import SQLAlchemyError

    return OSError, SQLAlchemyError, RESTError


class StoreCatalog(NoopCatalog, MetastoreCatalog):
    """A catalog in the pipeline's own folder of the bucket.

    `<pipeline>/iceberg/<table>/catalog.json` names the table's metadata file. A commit replaces it
    by a conditional PUT, so all drivers share the catalog without a server. pyiceberg prepares the
    metadata; the other operations of a catalog are not supported.
    """

    def __init__(self, store: Store, pipeline: str, **properties: str) -> None:
        super().__init__(_CATALOG_NAME, **properties)
        self._store, self._layout = store, BucketLayout(pipeline)

    def create_namespace_if_not_exists(self, namespace: Any, properties: Any = None) -> None:
        """Do nothing: the pipeline's folder is the only namespace."""

    def list_tables(self, namespace: Any) -> list[Any]:
        """Return the identifiers of all registered tables, also of those that the spec dropped."""
        # Also tables that the spec does not have any more.
        folders = self._store.list_folders(f"{self._layout.iceberg_folder}/")
        return [one for name in folders if self.table_exists(one := (namespace, name))]

    def table_exists(self, identifier: Any) -> bool:
        """Return whether the table is registered."""
        return self._store.stat(self._get_entry_key(identifier)) is not None

    def load_table(self, identifier: Any) -> Table:
        """Read a table's current metadata.

        Raises:
            NoSuchTableError: the table is not registered.
        """
        location = self._read_entry(identifier)[0]
        files = self._load_file_io(location=location)
        metadata = FromInputFile.table_metadata(files.new_input(location))
        return Table(identifier, metadata, location, files, self)

    def create_table(self, identifier: Any, schema: Any, *args: Any, **more: Any) -> Table:
        """Write the first metadata file of a table, and register it.

        Raises:
            TableAlreadyExistsError: the table is registered, perhaps by a faster publisher.
        """
        # The file first: an entry never names a file that is not there.
        staged = self._create_staged_table(identifier, schema, *args, **more)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        return self.register_table(identifier, staged.metadata_location)

    def register_table(
        self, identifier: Any, metadata_location: str, overwrite: bool = False
    ) -> Table:
        """Register a table by its metadata file; `overwrite` is ignored.

        Raises:
            TableAlreadyExistsError: the table is registered already.
        """
        try:
            self._store.create(
                self._get_entry_key(identifier), _build_catalog_entry(metadata_location)
            )
        except PreconditionFailedError as error:
            raise TableAlreadyExistsError(f"the table {identifier} is registered") from error
        return self.load_table(identifier)

    def drop_table(self, identifier: Any) -> None:
        """Forget a table; its files stay."""
        self._store.delete(self._get_entry_key(identifier))

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        """Write the changed metadata, and name it in the table's entry.

        Raises:
            NoSuchTableError: the table was dropped.
            CommitFailedException: the table is not as `requirements` say, or another publisher
                committed meanwhile.
        """
        identifier = table.name()
        location, etag = self._read_entry(identifier)
        # Usually no other publisher has committed since the table was loaded, so its metadata need
        # not be read again.
        current = table if location == table.metadata_location else self.load_table(identifier)
        staged = self._update_and_stage_table(current, identifier, requirements, updates)
        if staged.metadata == current.metadata:
            return _build_response(current)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        try:
            # By ETag: a request that arrives late cannot undo a newer commit.
            self._store.compare_and_swap(
                self._get_entry_key(identifier),
                _build_catalog_entry(staged.metadata_location),
                etag,
            )
        except PreconditionFailedError as error:
            raise CommitFailedException(f"another publisher committed to {identifier}") from error
        return _build_response(staged)

    def _read_entry(self, identifier: Any) -> tuple[str, str]:
        """Return the location of the table's metadata, and the ETag of its entry."""
        try:
            stored = self._store.get(self._get_entry_key(identifier))
        except NotFoundError as error:
            raise NoSuchTableError(f"there is no table {identifier}") from error
        place = parse_document(
            self._store, stored, "catalog entry", lambda raw: str(raw["metadata_location"])
        )
        return place, stored.etag

    def _get_entry_key(self, identifier: Any) -> str:
        return self._layout.table_catalog_key(identifier[-1])


def _build_response(table: Table) -> CommitTableResponse:
    return CommitTableResponse.model_validate(
        {"metadata": table.metadata, "metadata-location": table.metadata_location}
    )


def _build_catalog_entry(location: str) -> bytes:
    return canonical_bytes({"metadata_location": location})


def close_after_use(catalog: Catalog) -> bool:
    """Let a catalog in a SQLite file close each connection after use; return whether it is one.

    pyiceberg has no way to close a catalog. A pool of connections would stay open for as long as
    the process runs, one for each catalog that was ever opened.
    """
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    if not isinstance(catalog, SqlCatalog) or catalog.engine.dialect.name != "sqlite":
        return False
    catalog.engine.dispose()
    catalog.engine = create_engine(catalog.engine.url, poolclass=NullPool)
    return True


def _set_sqlite_pragmas(synchronous: str, connection: Any, _record: object) -> None:
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}").close()


def build_io_properties(store: Store) -> dict[str, str]:
    """Return the properties with which pyiceberg opens the store's files; for S3 with its keys."""
    properties = {"py-io-impl": f"{StoreFileIO.__module__}.{StoreFileIO.__name__}"}
    if isinstance(store, S3Store):
        settings = store.settings
        access_key, secret_key, session_token = settings.reveal_keys()
        given = {
            "s3.endpoint": settings.endpoint,
            "s3.region": settings.region,
            "s3.access-key-id": access_key,
            "s3.secret-access-key": secret_key,
            "s3.session-token": session_token,
            "s3.connect-timeout": str(settings.connect_timeout),
            "s3.request-timeout": str(settings.read_timeout),
        }
        properties |= {name: value for name, value in given.items() if value is not None}
    return properties


class StoreFileIO(PyArrowFileIO):
    """pyiceberg's file access, with two S3 settings for which pyiceberg has no property.

    * A small file, as all metadata is, is written by one PUT. By default Arrow opens a multipart
      upload for each file, which takes three requests.
    * The private CA of `AWS_CA_BUNDLE` is trusted, as boto3 does. By default Arrow reads only
      `SSL_CERT_FILE`, which would apply to every connection of the process.
    """

    def _initialize_s3_fs(self, netloc: str | None) -> Any:
        # Pickling keeps all settings that the file system was made with.
        rebuild, (settings,) = super()._initialize_s3_fs(netloc).__reduce__()
        ca = os.environ.get("AWS_CA_BUNDLE")
        return rebuild(
            {**settings, "allow_delayed_open": True, **({"tls_ca_file_path": ca} if ca else {})}
        )


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
        forget_published_tables(spec, log)
        return rewrite_identity(store, spec.name)
    finally:
        lease.release()


def forget_published_tables(spec: PipelineSpec, log: SlotLog) -> None:
    """Delete the pointer to the tables, and drop the tables from a catalog that was copied along.

    No data file is deleted.
    """
    log.store.delete(log.layout.published_cut_key)
    log.store.delete(log.layout.table_versions_key)
    if spec.outputs.catalog is None:
        with closing(open_catalog(spec, log.store)) as catalog:
            for identifier in catalog.list_tables(resolve_namespace(spec)):
                catalog.drop_table(identifier)
