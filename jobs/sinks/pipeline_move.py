"""Moves a pipeline to another address, with its uid, its checkpoints and its tables.

1. Take the lease of the origin, so that no driver runs until the end. Refuse requests that a driver
   has still to answer, because they are not copied.
2. Copy the pipeline (`copy_pipeline`); nothing writes for a copy.
3. Make the tables again at the target, from the files of the origin's tables: Iceberg's metadata
   contain whole addresses.
4. Write the target's address into the identity of the origin, which makes the origin a copy that
   drivers refuse. Then write it into that of the target, whose driver may start from then on.
   The origin is wanted stopped, so that Airflow starts no driver there.

A move that was broken off is begun again. Before step 4 only the target has changed, and the origin
may go on instead. After it, the next call only finishes the step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from tidegate.checkpoints.backup import BackupReport, copy_pipeline
from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    list_pending_requests,
    set_desired_state,
)
from tidegate.checkpoints.errors import BACKUP_ONTO_ITSELF
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.pipeline_identity import (
    ProcessIdentity,
    claim_address,
    is_at,
    move_identity,
    read_identity,
    refuse_copied_store,
)
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.store import Store
from tidegate.checkpoints.verify import Verification, verify_checkpoint
from tidegate.jobs.spec.job_spec import JobSpec, SupervisedSpec
from tidegate.jobs.spec.pipeline import PipelineSpec

from .errors import (
    MOVE_NOT_WHOLE,
    MOVE_OF_REQUESTS,
    MOVE_OF_SHARED_TABLES,
    MOVE_ONTO_OTHER,
    TABLE_NOT_MOVABLE,
)
from .iceberg_catalog import (
    build_table_location,
    forget_published_tables,
    open_catalog,
    resolve_namespace,
)
from .lineage_position import advance_published_cut, read_published_cut
from .table_files import PartitionValues
from .table_follower import TABLE_PROPERTIES, TableFollower

_DAY = 86_400.0  # seconds that the copy may take


def move_pipeline(
    spec: SupervisedSpec,
    log: SlotLog,
    target: Store,
    verify: Callable[[], None] = lambda: None,
) -> BackupReport:
    """Move a pipeline or job to another store, and return what was copied now.

    Args:
        spec: names the tables. Those of a catalog of its own are not moved.
        log: the log at the origin.
        target: where the pipeline goes.
        verify: called when everything is at the target, before drivers may start there; an error
            of it leaves the pipeline at the origin.

    Raises:
        ConfigurationError: the target holds something else, the tables cannot be moved, or a driver
            has requests to answer.
        LeaseHeldError: a driver is running at the origin.
    """
    source, name = log.store, log.pipeline
    if source.uri(log.layout.identity_key) == target.uri(log.layout.identity_key):
        raise BACKUP_ONTO_ITSELF(pipeline=name, target=target.url)
    if is_at(source, target, name):
        # Step 4 was broken off in between, or the pipeline has moved already.
        if read_identity(source, name) != read_identity(target, name):
            raise MOVE_ONTO_OTHER(pipeline=name, target=target.url)
        _record_move(source, target, name)
        return BackupReport(objects=0, copied=0, bytes=0)
    refuse_copied_store(source, name)
    _require_free_place(source, target, name)
    if isinstance(spec, PipelineSpec) and spec.outputs.catalog is not None:
        raise MOVE_OF_SHARED_TABLES(pipeline=name)
    with _keep_lease(source, name) as lease:
        # Also refuses what another move has moved meanwhile.
        claim_address(source, name)
        _require_no_requests(source, name, lease)
        report = copy_pipeline(source, target, name)
        if not isinstance(spec, JobSpec):
            _rebuild_tables(spec, source, SlotLog(target, name))
        verify()
        _require_no_requests(source, name, lease)
        lease.ensure_held()
        _record_move(source, target, name)
    return report


def require_whole_copy(log: SlotLog, target: Store, results: Iterable[Verification]) -> bool:
    """Require that a copy has no damage but that of its origin; return whether it has that.

    Args:
        log: the log at the origin.
        target: where the copy is.
        results: of its checkpoints.

    Raises:
        PoisonError: an object of the copy is damaged, or could not be read, which proves nothing.
    """
    has_damage = False
    for result in results:
        if not result.findings:
            continue
        has_damage = True
        there = verify_checkpoint(log, CheckpointId.parse(result.checkpoint)).findings
        known = {(found.key, found.problem) for found in there if found.is_definite}
        for found in result.findings:
            if (found.key, found.problem) not in known:
                raise MOVE_NOT_WHOLE(
                    pipeline=log.pipeline,
                    uri=target.uri(found.key),
                    problem=found.problem,
                    detail=found.detail,
                )
    return has_damage


def _record_move(source: Store, target: Store, pipeline: str) -> None:
    move_identity(source, target, pipeline)
    why = f"moved to {target.url}"
    set_desired_state(source, pipeline, DesiredState.STOPPED, who="move", why=why)


def _require_no_requests(store: Store, pipeline: str, lease: Lease) -> None:
    """Refuse while there are requests that the next driver would apply.

    Raises:
        ConfigurationError: there are.
    """
    now = SYSTEM_CLOCK.wall_ticks()
    pending = list_pending_requests(store, pipeline)
    kept = [one.kind for one in pending if one.refusal_outcome(lease.token, now) is None]
    if kept:
        raise MOVE_OF_REQUESTS(pipeline=pipeline, requests=", ".join(kept))


@contextmanager
def _keep_lease(store: Store, pipeline: str) -> Iterator[Lease]:
    """Hold the lease during the block; it runs out by itself if this process ends."""
    lease = Lease.acquire(store, pipeline, ProcessIdentity.this_process("move"))
    renewer = LeaseRenewer(lease)
    renewer.announce_step("copy", _DAY)
    try:
        with renewer:
            yield lease
    finally:
        lease.release()


def _require_free_place(source: Store, target: Store, pipeline: str) -> None:
    """Refuse a target with objects that are not an earlier copy of this pipeline."""
    uid = read_identity(target, pipeline)
    prefix = BucketLayout(pipeline).pipeline_prefix
    is_taken = uid is None and next(iter(target.list_objects(prefix)), None) is not None
    # A copy bears the address of the origin; a pipeline that runs there bears its own.
    is_other = uid is not None and uid != read_identity(source, pipeline)
    if is_taken or is_other or (uid is not None and not is_at(target, source, pipeline)):
        raise MOVE_ONTO_OTHER(pipeline=pipeline, target=target.url)


def _rebuild_tables(spec: PipelineSpec, source: Store, log: SlotLog) -> None:
    """Make the tables at the target: same files, rows, columns and positions, at their new address.

    Old snapshots and tags stay behind.
    """
    target = log.store
    forget_published_tables(spec, log)
    cut = read_published_cut(source, spec.name)
    if cut is None:
        return
    namespace = resolve_namespace(spec)
    places = {}
    with (
        closing(open_catalog(spec, source)) as old_catalog,
        closing(open_catalog(spec, target, durable=True)) as new_catalog,
    ):
        for identifier in old_catalog.list_tables(namespace):
            table = identifier[-1]
            old = TableFollower(old_catalog.load_table(identifier), cut.uid)
            position = old.newest_position()
            if position is None:
                continue
            made = new_catalog.create_table(
                (namespace, table),
                old.table.schema(),
                location=build_table_location(spec, target, table),
                properties=TABLE_PROPERTIES,
            )
            new = TableFollower(made, cut.uid)
            new.set_layout(old.current_layout())
            files = _list_moved_files(old, source, target, spec.name)
            new.append_slots(files, position.timeline, 1, position.upto)
            places[table] = new.metadata_location
    advance_published_cut(target, spec.name, replace(cut, tables=places))


def _list_moved_files(
    old: TableFollower, source: Store, target: Store, pipeline: str
) -> dict[str, PartitionValues]:
    """The files of a table, by their address at the target.

    Raises:
        ConfigurationError: a file is outside the pipeline's prefix or of an earlier layout, or
            another engine has deleted single rows.
    """
    table, metadata = ".".join(old.table.name()), old.table.metadata
    # The address of a folder has no slash at its end; without it a key would have two.
    prefix = f"{source.uri(BucketLayout(pipeline).pipeline_prefix).rstrip('/')}/"
    try:
        live = old.live_files()
    except ValueError as error:
        raise TABLE_NOT_MOVABLE(pipeline=pipeline, table=table, cause=str(error)) from error
    files = {}
    for one in live:
        path = one.file.file_path
        if not path.startswith(prefix) or one.file.spec_id != metadata.default_spec_id:
            cause = f"{path} has another place or layout"
            raise TABLE_NOT_MOVABLE(pipeline=pipeline, table=table, cause=cause)
        partition = one.file.partition
        key = BucketLayout(pipeline).pipeline_prefix + path.removeprefix(prefix)
        files[target.uri(key)] = tuple(partition[n] for n in range(len(partition)))
    return files
