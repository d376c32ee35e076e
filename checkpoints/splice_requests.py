"""Splice requests: rows to be inserted into the history of a pipeline, and people's decisions.

A request is one small document, swapped by ETag, and an immutable Parquet file with its rows. The
document records what people decided. The log alone says whether a request *is* merged: a sealed
slot names it. So a crash between the two, or a restore to before the merge, needs no repair; see
`tidegate.jobs.splice.tables_at_head`.
"""

import secrets
from collections.abc import Callable
from typing import Any, Literal

from tidegate.json_types import JsonObject

from .bucket_layout import BucketLayout
from .errors import SPLICE_DECIDED, SPLICE_UNDECIDED, SPLICE_UNKNOWN
from .manifest import FileRef
from .shared_documents import SharedDocument, change_document, create_record, read_document
from .store import Store

SpliceState = Literal["created", "approved", "merged", "rejected", "expired"]
OPEN_STATES: tuple[SpliceState, ...] = ("created", "approved")
# Entries kept. A request that is tried more often than this tells nothing new.
_MAX_TRAIL_ENTRIES = 200


class SpliceRequest(SharedDocument):
    """One request to insert rows into the history; the content of `splices/<id>.json`.

    Attributes:
        destination: ``events`` (the rows go to every output they are meant for), a window's name,
            or a stream.
        origin: where the rows come from; `origin_detail` adds a filter, a file name or an
            attachment.
        rows: the Parquet files that hold the rows, as `FileRef` fields.
        min_time, max_time: least and greatest event time, ticks; None without rows.
        state: what was decided. ``merged`` outlives a restore to before the merge; the log alone
            says whether the request is merged. An open request past `expires_at` stays open here
            until someone decides or merges it (`is_expired`).
        created_at, expires_at, decided_at: wall clock in ticks; `expires_at` None: never.
        at_slot: "timeline" and "slot" of the log's head when the request was made.
        approved_digest: digest of the approved impact report; a merge with another effect is
            refused.
        trail: what happened to the request, oldest first: at, who, what, and more; the newest 200.
    """

    id: str
    pipeline: str
    destination: str = "events"
    origin: Literal["attachment", "late", "dead_letters", "file"]
    origin_detail: JsonObject = {}
    rows: list[JsonObject] = []
    row_count: int
    min_time: int | None = None
    max_time: int | None = None
    state: SpliceState = "created"
    created_at: int
    expires_at: int | None = None
    who: str
    why: str = ""
    decided_by: str | None = None
    decided_why: str | None = None
    decided_at: int | None = None
    at_slot: dict[str, int] = {}
    approved_digest: str | None = None
    trail: list[JsonObject] = []

    def row_files(self) -> list[FileRef]:
        """Return the files that hold the rows."""
        return [FileRef.model_validate(raw) for raw in self.rows]

    def is_expired(self, now: int) -> bool:
        """Return whether it is marked as expired, or open with `expires_at` not after `now`."""
        return self.state == "expired" or (
            self.state in OPEN_STATES and self.expires_at is not None and now >= self.expires_at
        )


class SpliceApproval(SharedDocument):
    """What people were asked about one request, and their answers; `approvals/<id>.json`.

    A merge in Airflow believes this alone. Operators' keys may write the request and not this.

    Attributes:
        lines: reports, approvals and refusals, oldest first; the newest 200.
    """

    lines: list[JsonObject] = []


def generate_splice_request_id() -> str:
    """Return a new request id, short enough to type."""
    return f"s{secrets.token_hex(4)}"


def build_rows_key(pipeline: str, request_id: str) -> str:
    """Return the key of the rows of a request."""
    return f"{BucketLayout(pipeline).splice_request_prefix(request_id)}rows.parquet"


def create_splice_request(store: Store, request: SpliceRequest) -> SpliceRequest:
    """Write a new request and return it; if the id exists already, return the existing request.

    Raises:
        TransientError: the store did not answer; call again with the same id.
    """
    key = BucketLayout(request.pipeline).splice_request_key(request.id)
    return create_record(store, key, request, SPLICE_UNDECIDED)


def read_splice_request(store: Store, pipeline: str, request_id: str) -> SpliceRequest:
    """Return one request.

    Raises:
        ConfigurationError: there is no such request.
    """
    found, _etag = read_document(
        store, BucketLayout(pipeline).splice_request_key(request_id), SpliceRequest
    )
    if found is None:
        raise SPLICE_UNKNOWN(pipeline=pipeline, request=request_id)
    return found


def list_splice_requests(store: Store, pipeline: str) -> list[SpliceRequest]:
    """Return all requests, oldest first."""
    prefix = BucketLayout(pipeline).splice_requests_prefix
    names = [entry.key[len(prefix) :] for entry in store.list_objects(prefix)]
    found = [
        read_splice_request(store, pipeline, name.removesuffix(".json"))
        for name in names
        # The rows of a request are in a folder next to its document.
        if name.endswith(".json") and "/" not in name
    ]
    # Ids are random, so their order says nothing.
    return sorted(found, key=lambda request: (request.created_at, request.id))


def read_splice_approval(store: Store, pipeline: str, request_id: str) -> SpliceApproval:
    """Return what people were asked about a request and have answered."""
    key = BucketLayout(pipeline).splice_approval_key(request_id)
    return read_document(store, key, SpliceApproval)[0] or SpliceApproval()


def record_splice_approval(
    store: Store, pipeline: str, request_id: str, line: JsonObject
) -> SpliceApproval:
    """Add a line, unless the last one equals it but for its time, and return the document."""

    def add_line(before: SpliceApproval) -> SpliceApproval:
        if before.lines and {**before.lines[-1], "at": line["at"]} == line:
            return before
        return before.model_copy(update={"lines": [*before.lines, line][-_MAX_TRAIL_ENTRIES:]})

    key = BucketLayout(pipeline).splice_approval_key(request_id)
    return change_document(store, key, SpliceApproval(), add_line)


def note_splice_event(
    store: Store, pipeline: str, request_id: str, what: str, *, who: str, at: int, **more: Any
) -> SpliceRequest:
    """Add one entry to the trail of a request, and set those of its fields that `more` names.

    The rest of `more` goes into the entry. An entry that equals the last one but for its time,
    because a step was tried again after a crash, is not added twice. `at` is in ticks.

    Raises:
        ConfigurationError: there is no such request.
    """

    def add_trail_line(request: SpliceRequest) -> SpliceRequest:
        # Facts that are not fields of the document are in the trail only.
        fields = {name: value for name, value in more.items() if name in SpliceRequest.model_fields}
        facts = {name: value for name, value in more.items() if name not in fields}
        line = {"at": at, "who": who, "what": what, **facts}
        # Compared without the time, which differs when a step is repeated.
        said_before = request.trail and {**request.trail[-1], "at": at} == line
        if said_before and all(
            getattr(request, name) == value
            for name, value in fields.items()
            if not name.endswith("_at")
        ):
            return request
        return _extend_trail(request, line, fields)

    return _change_splice_request(store, pipeline, request_id, add_trail_line)


def reject_splice_request(
    store: Store, pipeline: str, request_id: str, *, who: str, why: str, at: int
) -> SpliceRequest:
    """Reject an open request; record who did it, why and when (`at`, ticks).

    The same decision a second time changes nothing. The expiry is not checked.

    Raises:
        ConfigurationError: the request is not open any more, or there is none.
    """
    line = {"at": at, "who": who, "what": "rejected", "why": why}
    return _close_splice_request(store, pipeline, request_id, line)


def expire_splice_request(store: Store, pipeline: str, request_id: str, at: int) -> SpliceRequest:
    """Close a request whose time was over at `at` (ticks); raises as `reject_splice_request`."""
    line = {"at": at, "who": "clock", "what": "expired", "why": "no one decided in time"}
    return _close_splice_request(store, pipeline, request_id, line)


def _close_splice_request(
    store: Store, pipeline: str, request_id: str, line: JsonObject
) -> SpliceRequest:
    decision = {"state": line["what"], "decided_by": line["who"], "decided_why": line["why"]}

    def apply_decision(request: SpliceRequest) -> SpliceRequest:
        if all(getattr(request, name) == value for name, value in decision.items()):
            return request
        # The first decision counts; two people may have decided at the same moment.
        if request.state not in OPEN_STATES:
            raise SPLICE_DECIDED(
                pipeline=pipeline,
                request=request_id,
                state=request.state,
                who=request.decided_by,
                why=request.decided_why or "no reason given",
            )
        # An approval that was given before does not hold any more.
        fields = {**decision, "decided_at": line["at"], "approved_digest": None}
        return _extend_trail(request, line, fields)

    return _change_splice_request(store, pipeline, request_id, apply_decision)


def _extend_trail(request: SpliceRequest, line: JsonObject, fields: JsonObject) -> SpliceRequest:
    trail = [*request.trail, line][-_MAX_TRAIL_ENTRIES:]
    return request.model_copy(update={**fields, "trail": trail})


def _change_splice_request(
    store: Store, pipeline: str, request_id: str, step: Callable[[SpliceRequest], SpliceRequest]
) -> SpliceRequest:
    return change_document(
        store,
        BucketLayout(pipeline).splice_request_key(request_id),
        read_splice_request(store, pipeline, request_id),
        step,
    )
