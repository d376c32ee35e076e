"""Writes the document of a splice request once the request is sealed complete.

Writing it again changes nothing. The rows are in the manifest: if a driver dies before it writes
the document, the next one does.
"""

from __future__ import annotations

from tidegate.checkpoints.host_clock import SYSTEM_CLOCK, Clock
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.checkpoints.splice_requests import SpliceRequest, create_splice_request
from tidegate.checkpoints.store import Store
from tidegate.jobs.streams.dispatched_rows import select_request_segments
from tidegate.jobs.streams.stream_state import DispatchState


def write_request_documents(
    store: Store, epoch: Manifest, clock: Clock = SYSTEM_CLOCK
) -> list[SpliceRequest]:
    """Create the documents of the requests that are complete after an epoch, and return them.

    Existing documents are not changed; they are returned too. Requests without rows get none.
    """
    documents = []
    for name, request in DispatchState.from_record(epoch.stream_state).requests.items():
        # An open request may still get rows; one without rows needs no decision.
        if request.open or not request.rows:
            continue
        files = select_request_segments(epoch.segments, request.attachment, name)
        document = SpliceRequest(
            id=name,
            pipeline=epoch.pipeline,
            destination=request.destination,
            origin="attachment",
            origin_detail={"attachment": request.attachment},
            rows=[file.model_dump(mode="json") for file in files],
            row_count=request.rows,
            min_time=request.min_time,
            max_time=request.max_time,
            created_at=clock.wall_ticks(),
            who=request.attachment,
            why=f"the backfill of {request.attachment}",
            at_slot={"timeline": epoch.timeline, "slot": epoch.slot},
        )
        documents.append(create_splice_request(store, document))
    return documents


class SpliceRequestSink:
    """A follower of the log that writes these documents."""

    name = "splice requests"

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._offered: set[str] = set()

    def follow(self, log: SlotLog, *, flush: bool = True) -> int:
        """Write the requests of the newest epoch, which holds all those of earlier ones.

        Returns:
            1, or 0 if no epoch was sealed yet.
        """
        head = log.head().record
        if head is None:
            return 0
        # A document is offered once per process. After a restart it is written again, which changes
        # nothing.
        waiting = DispatchState.from_record(head.stream_state).requests.keys() - self._offered
        if waiting:
            self._offered |= {
                document.id for document in write_request_documents(log.store, head, self._clock)
            }
        return 1

    def lag(self, log: SlotLog) -> int:
        """Return 0: the newest epoch holds the requests of all earlier ones.

        While `follow` fails, the publisher still counts this follower as behind.
        """
        return 0
