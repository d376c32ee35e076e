"""Seals committed batches of a job's queries into the log of slots."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import structlog

from tidegate import __version__
from tidegate.checkpoints.batch_notes import (
    BatchNotes,
    BatchReport,
    QueryPosition,
    SinkRewind,
    SourceProgress,
)
from tidegate.checkpoints.bucket_layout import CheckpointId, generate_attempt_id
from tidegate.checkpoints.epoch_notes import EpochCounters
from tidegate.checkpoints.host_clock import SYSTEM_CLOCK
from tidegate.checkpoints.lease import Lease
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.slot_log import LogHead, SlotLog, SlotTaken
from tidegate.json_types import JsonObject
from tidegate.time_units import TICK_MIN

from .batch_objects import QueryObjects, get_object_kind
from .checkpoint_files import (
    read_offsets,
    read_query_id,
    select_restoring_files,
)
from .checkpoint_folder import CheckpointFolder
from .errors import SLOT_TAKEN
from .sink_restore import find_sink_log
from .writer_hooks import WriterFacts

_log = structlog.get_logger("tidegate.job")


@dataclass(slots=True)
class SealedQuery:
    """One query of a running job.

    Attributes:
        folder: its checkpoint.
        objects: what the bucket holds of it.
        rewind: how its sink follows a restore.
        facts: what the script has said about it.
        sealed: newest batch that is sealed, or was given up because Spark has deleted its files;
            -1: none.
        id: Spark's; None until the first batch is sealed here.
        sink_log: log folder of its file sink; None for other sinks.
    """

    name: str
    folder: CheckpointFolder
    objects: QueryObjects
    rewind: SinkRewind
    facts: WriterFacts
    sealed: int = -1
    id: str | None = None
    sink_log: Path | None = field(init=False)

    def __post_init__(self) -> None:
        # Now, as Spark does it: the script may go to another folder later.
        self.sink_log = find_sink_log(self.facts)


@dataclass(frozen=True)
class JobAuthor:
    """What every manifest of one launch says about its writer.

    Attributes:
        uid: identity of the job.
        spec_digest: of script and spec.
        location: folder of the queries' checkpoints.
    """

    uid: str
    spec_digest: str
    location: str


@dataclass
class BatchSealer:
    """Fills one slot per committed batch.

    A slot that another process has filled ends the job: this launch has gone on from another
    history than the log.

    Args:
        log: the job's log.
        lease: checked before each seal.
        author: who writes.
        on_seal: called with each manifest that fills a slot.

    Attributes:
        log: as given.
        head: of the log, as this object has left it; it is read once.
    """

    log: SlotLog
    _lease: Lease
    _author: JobAuthor
    _on_seal: Callable[[Manifest], None]
    # One id per batch that is tried: files of an attempt that no slot names are swept.
    _attempt: str = field(default_factory=generate_attempt_id)
    _unanswered: tuple[Manifest, SealedQuery, int] | None = None

    def __post_init__(self) -> None:
        self.head = self.log.head()

    def seal(self, query: SealedQuery, batch: int, report: BatchReport) -> bool:
        """Seal one committed batch; False if Spark has deleted what would restore it.

        In both cases `query.sealed` is the batch then. A batch whose seal the store has not
        answered comes first, of whichever query it is.

        Raises:
            TransientError: the store did not answer, or another record fills the slot.
            FencedError: another driver holds the lease.
            ConfigurationError: Spark's log has a format that this version cannot read.
        """
        self._lease.ensure_held()
        if self._unanswered is not None:
            self._fill_slot(*self._unanswered)
            if batch <= query.sealed:
                return True
        checkpoint = CheckpointId(self.head.timeline, self.head.next_slot, self._attempt)
        prefix = self.log.layout.state_prefix(checkpoint)
        try:
            files = select_restoring_files(query.folder, batch, query.sink_log)
            segments = query.objects.store_files(files, prefix, batch)
            offsets = read_offsets(query.folder, batch)
        except FileNotFoundError as error:
            _log.warning("batch_not_sealed", query=query.name, batch=batch, missing=str(error))
            query.sealed = batch
            # The attempt goes on: retention keeps the objects that it may have stored already, and
            # that the next batch needs as well.
            return False
        manifest = self._write_manifest(query, batch, report, segments, offsets)
        self._unanswered = manifest, query, batch
        self._lease.ensure_held()
        self._fill_slot(*self._unanswered)
        return True

    def _fill_slot(self, manifest: Manifest, query: SealedQuery, batch: int) -> None:
        outcome = self.log.seal(manifest)
        if isinstance(outcome, SlotTaken):
            raise SLOT_TAKEN(pipeline=self.log.pipeline, batch=batch, query=query.name)
        # Read from what was sent: one batch costs no request for the head.
        self.head = LogHead(
            manifest.timeline, manifest.slot, manifest, outcome.sha256, outcome.etag
        )
        self._attempt, self._unanswered = generate_attempt_id(), None
        query.sealed = batch
        self._on_seal(manifest)

    def _write_manifest(
        self,
        query: SealedQuery,
        batch: int,
        report: BatchReport,
        segments: list[FileRef],
        offsets: list[Any],
    ) -> Manifest:
        now, head, facts = SYSTEM_CLOCK.wall_ticks(), self.head, query.facts
        # Spark's description of a sink does not name the topic.
        sink = facts.find_topic() or report.sink or facts.get_format()
        query.id = query.id or read_query_id(query.folder)
        position = QueryPosition(
            **dict(report) | {"sink": sink},
            batch=batch,
            rewind=query.rewind,
            seconds=report.phases.get("triggerExecution"),
            interval=facts.interval,
            id=query.id,
        )
        before = BatchNotes.from_manifest(head.record)
        queries = {**(before.queries if before else {}), query.name: position}
        notes = BatchNotes(query=query.name, location=self._author.location, queries=queries)
        # All rows count as given to the query: what it makes of them, Spark does not say.
        counts = {"read": report.rows, "released": report.rows}
        epoch = EpochCounters(
            read=report.rows, released=report.rows, per_source={query.name: counts}
        )
        kind, present = get_object_kind(query.name), head.record.segments if head.record else []
        return Manifest(
            timeline=head.timeline,
            slot=head.next_slot,
            pipeline=self.log.pipeline,
            uid=self._author.uid,
            spec_digest=self._author.spec_digest,
            code_version=__version__,
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=self._attempt,
            lease_token=self._lease.token,
            driver=self._lease.holder.driver,
            recorded_now=now,
            cut=_update_cut(head.record, query.name, report, offsets),
            decision=_describe_watermarks(head.record, queries, now),
            counters=(head.record.counters if head.record else Counters()).add_epoch(epoch),
            segments=[*(ref for ref in present if ref.kind != kind), *segments],
            notes={"epoch": asdict(epoch), **notes.to_record()},
            timings=report.phases,
            created_at=now,
        )


def _update_cut(
    parent: Manifest | None, query: str, report: BatchReport, offsets: list[Any]
) -> JsonObject:
    """Return the offsets of all queries after the batch; those of `query` with where it began."""
    cut: JsonObject = dict(parent.cut) if parent else {}
    for number, offset in enumerate(offsets):
        member = f"{query}/{number}"
        source = report.sources[number].name if number < len(report.sources) else ""
        before = cut.get(member) or {}
        cut[member] = {
            "source": source or before.get("source", ""),
            "start": before.get("end"),
            "end": None if offset is None else json.dumps(offset, sort_keys=True),
        }
    return cut


def _describe_watermarks(
    parent: Manifest | None, queries: Mapping[str, QueryPosition], now: int
) -> JsonObject:
    """Return the least watermark in the place of a pipeline's frontier, which all surfaces show."""
    marks = {name: at.watermark for name, at in queries.items() if at.watermark is not None}
    found = {
        "frontier_before": parent.frontier_after if parent else TICK_MIN,
        "frontier_after": min(marks.values(), default=TICK_MIN),
    }
    if not marks:
        return found
    least = min(marks, key=marks.__getitem__)
    member = f"{least}/{queries[least].holder or ''}".rstrip("/")
    before = (parent.frontier_holder if parent else None) or {}
    since = before["since"] if before.get("member") == member else now
    holder = {"member": member, "since": since, "why": "its watermark is the least of the job"}
    return {**found, "holder": holder}


def read_progress(progress: Mapping[str, Any]) -> BatchReport:
    """Read a `StreamingQueryProgress` of Spark, as parsed JSON."""
    operators = progress.get("stateOperators") or ()
    watermark = (progress.get("eventTime") or {}).get("watermark")
    return BatchReport(
        rows=sum(int(source["numInputRows"]) for source in progress["sources"]),
        sources=tuple(
            SourceProgress(
                name=str(source["description"]),
                rows=int(source["numInputRows"]),
                backlog=_count_backlog(source.get("endOffset"), source.get("latestOffset")),
            )
            for source in progress["sources"]
        ),
        sink=str((progress.get("sink") or {}).get("description", "")),
        watermark=None
        if watermark is None
        else round(datetime.fromisoformat(watermark).timestamp() * 1e6),
        dropped=sum(int(one.get("numRowsDroppedByWatermark", 0)) for one in operators),
        state_rows=sum(int(one["numRowsTotal"]) for one in operators),
        state_bytes=sum(int(one["memoryUsedBytes"]) for one in operators),
        phases={name: ms / 1000 for name, ms in (progress.get("durationMs") or {}).items()},
    )


def _count_backlog(end: Any, latest: Any) -> int | None:
    """Count what lies between two offsets of the form topic -> partition -> number."""
    try:
        behind: list[int] = [
            max(0, number - end[topic].get(partition, number))
            for topic, partitions in latest.items()
            for partition, number in partitions.items()
        ]
    except (AttributeError, KeyError, TypeError):
        return None
    return sum(behind)
