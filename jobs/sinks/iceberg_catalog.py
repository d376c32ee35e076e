"""Opens the Iceberg catalog in which the tables are registered, and the files of the tables.

The catalog is a SQLite file, any SQL database, or an Iceberg REST catalog. It provides the
compare-and-swap of a table commit. Readers do not need it, and it may be lost: the pointer
`current.json` names every table's metadata file (see `lineage_position`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

from tidegate.checkpoints.bucket_layout import BucketLayout
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.s3_store import S3Store
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.source_options import resolve_environment_value

_CATALOG_NAME = "tidegate"  # Spark's JdbcCatalog on the same database needs the same name


def resolve_namespace(spec: PipelineSpec) -> str:
    """Return the Iceberg namespace of a pipeline."""
    return spec.outputs.namespace or spec.name


def build_table_location(spec: PipelineSpec, store: Store, table: str) -> str:
    """Return the folder of a table's Iceberg metadata; data files are stored with their epochs."""
    return store.uri(BucketLayout(spec.name).iceberg_table_folder(table))


def has_shared_catalog(spec: PipelineSpec, store: Store) -> bool:
    """Return whether all publishers use one catalog.

    If not, each driver has one in its work folder.
    """
    return spec.outputs.catalog is not None or isinstance(store, LocalStore)


def open_catalog(
    spec: PipelineSpec, store: Store, workdir: Path, *, durable: bool = False
) -> Catalog:
    """Open the catalog of `outputs.catalog`, by default a SQLite file.

    The SQLite file is next to a local store; for any other store it is in the work folder.

    Args:
        spec: the pipeline.
        store: its store.
        workdir: the driver's folder.
        durable: whether commits must survive a power failure. Needed by callers that delete files
            because of a commit.
    """
    catalog = _connect_catalog(spec, store, workdir, durable)
    catalog.create_namespace_if_not_exists(resolve_namespace(spec))
    return catalog


def _connect_catalog(spec: PipelineSpec, store: Store, workdir: Path, durable: bool) -> Catalog:
    address, files = spec.outputs.catalog, build_io_properties(store)
    if address is not None and address.startswith(("http://", "https://")):
        given = spec.outputs.catalog_options.items()
        options = {
            name: resolve_environment_value(f"outputs.catalog_options.{name}", value, os.environ)
            for name, value in given
        }
        return RestCatalog(_CATALOG_NAME, uri=address, **files, **options)
    if address is None:
        path = (
            store.root / ".tidegate-store" / "catalog.sqlite"
            if isinstance(store, LocalStore)
            else workdir / "catalog.sqlite"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        address = f"sqlite:///{path}"
    warehouse = store.uri(BucketLayout(spec.name).iceberg_folder)
    catalog = SqlCatalog(_CATALOG_NAME, uri=address, warehouse=warehouse, **files)
    if close_after_use(catalog):
        event.listen(catalog.engine, "connect", _set_full_sync if durable else _set_normal_sync)
    return catalog


def close_after_use(catalog: Catalog) -> bool:
    """Let a catalog in a SQLite file close each connection after use; return whether it is one.

    pyiceberg has no way to close a catalog. A pool of connections would stay open for as long as
    the process runs, one for each catalog that was ever opened.
    """
    if not isinstance(catalog, SqlCatalog) or catalog.engine.dialect.name != "sqlite":
        return False
    catalog.engine.dispose()
    catalog.engine = create_engine(catalog.engine.url, poolclass=NullPool)
    return True


def _set_normal_sync(connection: Any, _record: object) -> None:
    """Let a power failure take the last commits of the catalog, each as a whole.

    The tables then follow the log again from the commits that were kept.
    """
    _set_sqlite_pragmas(connection, "NORMAL")


def _set_full_sync(connection: Any, _record: object) -> None:
    _set_sqlite_pragmas(connection, "FULL")


def _set_sqlite_pragmas(connection: Any, synchronous: str) -> None:
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}").close()


def build_io_properties(store: Store) -> dict[str, str]:
    """Return the properties with which pyiceberg opens the store's files."""
    properties = {"py-io-impl": f"{StoreFileIO.__module__}.{StoreFileIO.__name__}"}
    if isinstance(store, S3Store):
        settings = store.settings
        given = {
            "s3.endpoint": settings.endpoint,
            "s3.region": settings.region,
            "s3.access-key-id": settings.access_key,
            "s3.secret-access-key": (
                settings.secret_key.get_secret_value() if settings.secret_key else None
            ),
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
