"""What makes a schedule cheap without checking less: what is the same each time is done once.

* Rows lie in the bucket as marshalled Python rows instead of Parquet: a dozen rows at a time, half
  of a schedule would go into encoding them. The columns are those of the real schemas. What streams
  and merges write are batches of Arrow, because they work on columns.
* A record is written, hashed, parsed and validated once: equal bytes give the same frozen record,
  also to the judge.
* The spec never changes within a schedule: its digest, canonical text and the columns of its tables
  are made once.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tests.oracle import glom, mover, order_buffer, window_state, zero_rows
from tests.servers import memory_store
from tests.simulation.basics import replaced

from tidegate.checkpoints import (
    bucket_layout,
    canonical_json,
    checkpoint_specs,
    driver_requests,
    lease,
    manifest,
    pins,
    shared_documents,
    slot_index,
    slot_log,
    verify,
)
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.manifest import FileRef
from tidegate.checkpoints.store import PreconditionFailedError, Store
from tidegate.jobs.engine import arrow_tables, errors
from tidegate.jobs.sinks import base_follower, iceberg_sink, lineage_position, output_tables
from tidegate.jobs.sinks.output_tables import (
    ARRIVAL_SLOT_COLUMN,
    SPLICE_COLUMN,
    build_system_schema,
    build_table_schema,
)
from tidegate.jobs.spec.pipeline import PipelineSpec
from tidegate.jobs.spec.spec_masks import mask_secrets
from tidegate.jobs.splice import tables_at_head
from tidegate.jobs.streams import row_dispatch, stream_rows

_PLAIN = 2  # marshal's format without references: equal rows give equal bytes
_LIST = b"["  # how marshalled rows begin
_OF_MERGES = {SPLICE_COLUMN: pa.string(), ARRIVAL_SLOT_COLUMN: pa.int64()}
T = TypeVar("T")


class Rows(list[dict[str, Any]]):
    """Rows with what the code asks of an Arrow table."""

    @property
    def num_rows(self) -> int:
        """How many."""
        return len(self)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Themselves."""
        return self

    def slice(self, begin: int, length: int) -> Rows:
        """Some of them."""
        return Rows(self[begin : begin + length])


def rows_of(data: bytes) -> Rows:
    """The rows of an object, whichever way they were written; times are ticks."""
    if data[:1] == _LIST:
        return Rows(marshal.loads(data))
    table = _read_batches(data)
    for number, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.int64()))
    return Rows(table.to_pylist())


def arrow_of(spec: PipelineSpec, table: str, data: bytes) -> pa.Table:
    """The rows of an object as a table, with the types that the spec gives the columns of `table`."""
    if data[:1] != _LIST:
        return _read_batches(data)
    rows = marshal.loads(data)
    given = {name for row in rows for name in row}
    added = [pa.field(name, kind) for name, kind in _OF_MERGES.items() if name in given]
    return pa.Table.from_pylist(rows, pa.schema([*_schema_of(spec, table), *added]))


def _read_batches(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _write_batches(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _read_arrow_object(store: Any, key: str, sha256: str = "") -> pa.Table:
    table, data = key.partition("/tables/")[2].partition("/")[0], store.get(key).data
    if sha256 and _SHA(data) != sha256:
        raise errors.FILE_UNREADABLE(uri=store.uri(key), cause="a wrong byte")
    with _judged_as_parquet(store, key):
        return arrow_of(store.world.stage.spec, table, data)


def _read_row_object(store: Any, key: str) -> Rows:
    with _judged_as_parquet(store, key):
        return rows_of(store.get(key).data)


@contextmanager
def _judged_as_parquet(store: Any, key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, TypeError, OSError) as error:
        raise errors.FILE_UNREADABLE(uri=store.uri(key), cause=error) from error


def _build_checkpoint_table(manifests: Any) -> pa.Table:
    rows = output_tables.build_checkpoint_rows(manifests)
    return pa.Table.from_pylist([*rows], build_system_schema("checkpoints"))


def _packed(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    return marshal.dumps([{name: row.get(name) for name in names} for row in rows], _PLAIN)


@lru_cache
def _own_names(table: str) -> list[str]:
    return list(build_system_schema(table).names)


def _write_rows(
    store: Store,
    key: str,
    kind: str,
    schema: Any,
    rows: Sequence[Mapping[str, Any]],
    times: Iterable[int] = (),
    **extra: Any,
) -> FileRef:
    data, known = _packed(schema.names, rows), list(times)
    store.put(key, data)
    return FileRef.model_construct(
        key=key,
        rows=len(rows),
        bytes=len(data),
        sha256=sha256_of_bytes(data),
        min_time=min(known, default=None),
        max_time=max(known, default=None),
        kind=kind,
        extra=extra,
    )


def _read_rows_of(store: Store, ref: FileRef) -> Rows:
    data = store.get(ref.key).data
    if _SHA(data) != ref.sha256:  # as the Spark mover does
        raise errors.FILE_UNREADABLE(uri=store.uri(ref.key), cause="a wrong byte")
    return rows_of(data)


def _write_small(store: Store, key: str, rows: Rows) -> FileRef:
    data = marshal.dumps([*rows], _PLAIN)
    try:
        store.create(key, data)
    except PreconditionFailedError:
        data = store.get(key).data
    kind = f"table:{key.split('/')[-3]}"
    return FileRef.model_construct(
        key=key,
        rows=len(rows),
        bytes=len(data),
        sha256=sha256_of_bytes(data),
        min_time=None,
        max_time=None,
        kind=kind,
        extra={},
    )


def _small_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Rows:
    return Rows({column: row.get(column) for column in _own_names(name)} for row in rows)


def _read_table(source: Any, **_: Any) -> Rows:
    return rows_of(source.read())


def _write_table(rows: Any, where: Any, **_: Any) -> None:
    packed = _write_batches(rows) if isinstance(rows, pa.Table) else marshal.dumps([*rows], _PLAIN)
    where.write(packed)


def _read_metadata(source: Any) -> SimpleNamespace:
    rows = len(rows_of(source.read()))
    return SimpleNamespace(num_rows=rows, write_metadata_file=lambda _: None)


class _Once(Generic[T]):
    """A function of bytes that is asked about the same bytes again and again."""

    def __init__(self, ask: Callable[..., T]) -> None:
        self._ask = ask
        self._known: dict[bytes, T] = {}

    def __call__(self, data: bytes, *more: str) -> T:
        found = self._known.get(data)
        if found is None:
            found = self._known[data] = self._ask(data, *more)
        return found

    def forget(self) -> None:
        """Another schedule begins."""
        self._known.clear()


class _OnceEach(Generic[T]):
    """A method of a frozen object that is asked again and again."""

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self._ask = ask
        self._known: dict[int, tuple[Any, T]] = {}

    def __get__(self, thing: Any, kind: type) -> Callable[[], T]:
        known = self._known.get(id(thing))
        if known is None:
            known = self._known[id(thing)] = thing, self._ask(thing)
        return lambda: known[1]

    def forget(self) -> None:
        """Another schedule begins."""
        self._known.clear()


class _OnceFor(Generic[T]):
    """A function of JSON that was parsed once, so that equal bytes are the same object."""

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self._ask = ask
        self._known: dict[int, tuple[Any, T]] = {}

    def __call__(self, raw: Any) -> T:
        known = self._known.get(id(raw))
        if known is None:
            known = self._known[id(raw)] = raw, self._ask(raw)
        return known[1]

    def forget(self) -> None:
        """Another schedule begins."""
        self._known.clear()


class _Pages:
    """The pages of the slot index as models."""

    def __init__(self, adapter: Any) -> None:
        self.dump_python, self._read = adapter.dump_python, _Once[Any](adapter.validate_json)
        self.forget = self._read.forget

    def validate_json(self, data: bytes) -> list[Any]:
        """The rows of a page, in a list of the caller's own."""
        return [*self._read(data)]


class _Columns:
    """The columns of a spec's table. Specs and windows are few and live as long as this module."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self._known: dict[tuple[int, ...], tuple[Any, SimpleNamespace]] = {}

    def __call__(self, *given: Any) -> SimpleNamespace:
        key = tuple(map(id, given))
        if key not in self._known:
            self._known[key] = given, SimpleNamespace(names=list(self._ask(*given).names))
        return self._known[key][1]


_SCHEMAS: dict[tuple[int, str], tuple[PipelineSpec, pa.Schema]] = {}


def _schema_of(spec: PipelineSpec, table: str) -> pa.Schema:
    key = id(spec), table
    if key not in _SCHEMAS:
        _SCHEMAS[key] = spec, build_table_schema(spec, table)
    return _SCHEMAS[key][1]


_MASKED: dict[int, tuple[PipelineSpec, PipelineSpec]] = {}


def _mask_once(spec: PipelineSpec) -> PipelineSpec:
    if len(_MASKED) > 1000:  # also specs that were read, which live for a moment
        _MASKED.clear()
    if id(spec) not in _MASKED:
        _MASKED[id(spec)] = spec, mask_secrets(spec)
    return _MASKED[id(spec)][1]


_DIGEST, _CANONICAL = _OnceEach(PipelineSpec.digest), _OnceEach(PipelineSpec.canonical_json)
_BYTES = _OnceEach(manifest.Manifest.to_bytes)
_NOTES = _OnceEach(manifest.Manifest.epoch_notes.fget)  # type: ignore[attr-defined]
_DOCUMENTS: dict[type, _OnceFor[Any]] = {
    kind: _OnceFor(kind.model_validate)
    for kind in (lease.LeaseRecord, pins.Roots, driver_requests.DesiredDocument)
}
_PAGES = _Pages(slot_index._PAGE_ADAPTER)
_RECORD, _JSON, _SHA = (
    _Once(manifest.parse_record),
    _Once(canonical_json.parse_json),
    _Once(canonical_json.sha256_of_bytes),
)
parsed: Callable[[bytes], Any] = _JSON
"""The JSON in an object's bytes; no one may change it."""
record_of: Callable[..., manifest.SlotRecord] = _RECORD
"""The record in a slot's bytes."""
_SHORTCUTS: tuple[tuple[object, str, object], ...] = (
    *(
        (module, "write_rows", _write_rows)
        for module in (glom, mover, order_buffer, window_state, zero_rows)
    ),
    *(
        (module, "read_rows_of", _read_rows_of)
        for module in (glom, order_buffer, window_state, zero_rows)
    ),
    *((module, "write_parquet_once", _write_small) for module in (output_tables, iceberg_sink)),
    *(
        (mover, name, _Columns(getattr(mover, name)))
        for name in ("dead_schema", "events_schema", "late_schema", "window_schema")
    ),
    (output_tables, "_build_system_table", _small_table),
    (base_follower, "read_parquet_object", _read_row_object),
    (pq, "read_table", _read_table),
    (pq, "write_table", _write_table),
    (pq, "read_metadata", _read_metadata),
    *(
        (module, "read_parquet_object", _read_arrow_object)
        for module in (arrow_tables, row_dispatch, stream_rows, tables_at_head)
    ),
    (tables_at_head, "build_checkpoint_rows", _build_checkpoint_table),
    (slot_log, "parse_record", _RECORD),
    (slot_log, "sha256_of_bytes", _SHA),
    *((module, "parse_json", _JSON) for module in (shared_documents, manifest, lineage_position)),
    (manifest.Manifest, "to_bytes", _BYTES),
    (
        manifest.Manifest,
        "epoch_notes",
        property(lambda epoch: _NOTES.__get__(epoch, type(epoch))()),
    ),
    *((kind, "model_validate", once) for kind, once in _DOCUMENTS.items()),
    (slot_index, "_PAGE_ADAPTER", _PAGES),
    (memory_store, "sha256_of_bytes", _SHA),
    (verify, "_compute_object_digest", lambda store, key: _SHA(store.get(key).data)),
    (bucket_layout.BucketLayout, "__post_init__", lambda layout: None),
    (canonical_json, "_refuse_foreign_keys", lambda value: None),
    (checkpoint_specs, "mask_secrets", _mask_once),
    (PipelineSpec, "digest", _DIGEST),
    (PipelineSpec, "canonical_json", _CANONICAL),
)
_PER_SCHEDULE: tuple[Any, ...] = (
    *(_BYTES, _NOTES, _RECORD, _JSON, _SHA, _PAGES),
    *_DOCUMENTS.values(),
)
_taken = 0


@contextmanager
def cheap() -> Iterator[None]:
    """The shortcuts are taken; within it, entering it again costs nothing."""
    global _taken
    for one in _PER_SCHEDULE:
        one.forget()
    with replaced(_SHORTCUTS if _taken == 0 else ()):
        _taken += 1
        try:
            yield
        finally:
            _taken -= 1
