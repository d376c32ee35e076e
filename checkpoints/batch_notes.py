"""What a sealed batch of a job notes in its manifest, and what a restore means for its sinks.

A batch of a Spark query is sealed as a manifest like any epoch: `segments` names the objects that
restore Spark's checkpoint, `cut` the offsets, and ``notes["batch"]`` the rest. A slot seals one
batch of one query and repeats where the job's other queries were, so it restores all of them.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Self

from tidegate.jobs.spec.event_time_options import OmittedIfEmpty, OmittedIfNone

from .manifest import Manifest
from .record_models import FrozenModel

_KEY = "batch"  # in `Manifest.notes`
TOPIC_SCHEME = "kafka://"  # of the sink of a query whose topic is known


class SinkRewind(StrEnum):
    """How the sink of a query follows a restore."""

    LOG = "log"  # a file sink: its log is cut; files of later batches stay, but are not read
    CALLBACK = "callback"  # the script's `on_restore` takes the later batches back
    ROLLBACK = "rollback"  # an Iceberg or Delta table, which goes back in one commit
    REPEAT = "repeat"  # the sink may get the later batches twice: declared, or it keeps nothing
    ANNOUNCE = "announce"  # a topic that may get them twice, and a message that announces it
    REFUSED = "refused"  # nothing can take the later batches back


class SourceProgress(FrozenModel):
    """What one source gave to a batch.

    Attributes:
        name: Spark's description.
        rows: rows that the batch read of it.
        backlog: messages behind the batch; None if Spark does not say (only Kafka's source does).
    """

    name: str
    rows: int = 0
    backlog: int | None = None


class BatchReport(FrozenModel):
    """What Spark reports about one batch; as it is by default if the report was lost.

    Attributes:
        sink: Spark's description of the sink.
        watermark: in ticks; None without one.
        rows: rows that the batch read.
        dropped: rows that Spark reports as dropped by the watermark. Spark counts them after
            partial aggregation, so a true count may be larger.
        state_rows: rows of state after the batch.
        state_bytes: memory of the state, in bytes.
        sources: its sources, in the order of the offsets.
        phases: phase of the batch -> seconds.
        holder: the source whose watermark decides that of the query.
    """

    sink: str = ""
    watermark: int | None = None
    rows: int = 0
    dropped: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    sources: OmittedIfEmpty[tuple[SourceProgress, ...]] = ()
    phases: OmittedIfEmpty[dict[str, float]] = {}
    holder: OmittedIfNone[str] = None


class QueryPosition(BatchReport):
    """Where one query was when a slot was sealed, with the report of its batch.

    Attributes:
        batch: its newest sealed batch.
        rewind: how the sink follows a restore.
        seconds: duration of the batch; None if Spark's report of it was lost.
        interval: seconds from batch to batch that the trigger asks for; None if it asks for none.
        id: Spark's id of the query, which its sinks note; None in slots of older versions.
    """

    batch: int
    rewind: SinkRewind
    seconds: float | None = None
    interval: OmittedIfNone[float] = None
    id: OmittedIfNone[str] = None

    def allow_repeats(self) -> SinkRewind:
        """Return how the sink follows if it may get batches twice."""
        if self.rewind is not SinkRewind.REFUSED:
            return self.rewind
        is_topic = self.sink.startswith(TOPIC_SCHEME)
        return SinkRewind.ANNOUNCE if is_topic else SinkRewind.REPEAT


class BatchNotes(FrozenModel):
    """The notes of one sealed batch.

    Attributes:
        query: the query whose batch the slot seals.
        location: folder of Spark's checkpoints on the driver's host, as of this slot.
        queries: all queries of the job by name.
    """

    query: str
    location: str
    queries: dict[str, QueryPosition] = {}

    @classmethod
    def from_manifest(cls, manifest: Manifest | None) -> Self | None:
        """Return the notes; None for the epoch of a pipeline, or without a manifest."""
        raw = manifest.notes.get(_KEY) if manifest else None
        return None if raw is None else cls.model_validate(raw)

    def to_record(self) -> dict[str, object]:
        """Return the JSON-ready part of `Manifest.notes`."""
        return {_KEY: self.model_dump(mode="json")}


class SinkPlan(FrozenModel):
    """What a restore does to the sink of one query; the fork keeps it as what the restore owes.

    Attributes:
        query: name of the query.
        id: Spark's id of the query, which its sinks note; empty in slots of older versions.
        newest: newest sealed batch of the current lineage.
        batch: batch to return to; None for the beginning.
        sink: Spark's description of the sink.
        rewind: how the sink follows.
    """

    query: str
    id: str = ""
    newest: int
    batch: int | None
    sink: str
    rewind: SinkRewind


def plan_sinks(
    head: Manifest | None, target: Manifest | None, repeatable: Collection[str] = ()
) -> tuple[SinkPlan, ...]:
    """Return what going back from `head` to `target` does to the sink of each query of `head`.

    Empty for a pipeline, or without a head.

    Args:
        head: the newest record.
        target: the checkpoint to return to; None for the beginning.
        repeatable: queries that the present spec of the job declares so. When the head was sealed
            they may not have been, and a job that fails seals no other batch.
    """
    now, then = BatchNotes.from_manifest(head), BatchNotes.from_manifest(target)
    before = then.queries if then else {}
    return tuple(
        SinkPlan(
            query=name,
            id=at.id or "",
            newest=at.batch,
            batch=before[name].batch if name in before else None,
            sink=at.sink,
            rewind=at.allow_repeats() if name in repeatable else at.rewind,
        )
        for name, at in (now.queries if now else {}).items()
    )


def list_called_queries(target: Manifest | None) -> dict[str, int]:
    """Return the queries whose sink follows by a function, each with its batch at `target`."""
    notes = BatchNotes.from_manifest(target)
    return {
        name: at.batch
        for name, at in (notes.queries if notes else {}).items()
        if at.rewind is SinkRewind.CALLBACK
    }
