"""The state of streams and attachments after an epoch, stored in its manifest.

It is ``notes["streams"]`` of the manifest, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class StreamState:
    """The end of a stream.

    Attributes:
        next: position of the next row.
        last: stream time of the newest row, in ticks: no later row may be below; None before the
            first row.
        shift: of `events`: rows that merges inserted into the stream; the pipeline's positions do
            not count them.
    """

    next: int = 0
    last: int | None = None
    shift: int = 0


@dataclass(frozen=True, slots=True)
class AttachmentState:
    """The state of one pipe or reducer.

    Attributes:
        cursor: position of the next row of the origin.
        head: the origin's end when it was attached; rows below are its backfill.
        since: ``<timeline>-<slot>`` of that epoch.
        round: how many times it was attached; later rounds dispatch under a name with the number.
        status: only an attached one takes rows; a failure pauses it.
        failure: the row that paused it: position, id and error; None unless it is paused.
        caught_up: (from, to, slot) of rows that it took in a later epoch than the one they came in:
            its backfill, and what it made up for after a pause. It took all others as they came.
        until: slot that detached it; None if none did.
    """

    cursor: int = 0
    head: int = 0
    since: str = ""
    round: int = 1
    status: Literal["attached", "paused", "detached"] = "attached"
    failure: dict[str, Any] | None = None
    caught_up: tuple[tuple[int, int, int], ...] = ()
    until: int | None = None

    def dispatch_name(self, name: str) -> str:
        """Return its name in the identities of what it dispatches."""
        return name if self.round == 1 else f"{name}@{self.round}"

    def request_id(self, name: str) -> str:
        """Return the id of its splice request."""
        return f"{name}-{self.since}"


@dataclass(frozen=True, slots=True)
class CollectedRequest:
    """A splice request while its rows are being collected.

    People can decide about it once it is not `open` any more. `min_time` and `max_time` are stamps
    of its rows in ticks, None without rows; `merged` is the slot that merged it.
    """

    attachment: str
    destination: str
    rows: int = 0
    min_time: int | None = None
    max_time: int | None = None
    open: bool = True
    merged: int | None = None


@dataclass(frozen=True, slots=True)
class DispatchState:
    """The state of all streams, attachments and requests.

    `lagging` means that an attachment has rows to take even if no new ones come.
    """

    streams: dict[str, StreamState] = field(default_factory=dict)
    attachments: dict[str, AttachmentState] = field(default_factory=dict)
    requests: dict[str, CollectedRequest] = field(default_factory=dict)
    # A driver without new rows seals an epoch for these.
    lagging: bool = False

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DispatchState:
        """Read the state from a manifest; empty if the manifest has no streams."""
        return cls(
            {name: StreamState(**one) for name, one in record.get("streams", {}).items()},
            {
                name: _attachment_from_record(one)
                for name, one in record.get("attachments", {}).items()
            },
            {name: CollectedRequest(**one) for name, one in record.get("requests", {}).items()},
            record.get("lagging", False),
        )

    def to_record(self) -> dict[str, Any]:
        """Return the state as a manifest stores it."""
        # The field names are the manifest's: they must not be renamed.
        return asdict(self)

    def stream_state(self, name: str) -> StreamState:
        """Return the end of a stream; that of an empty one if it is not known."""
        return self.streams.get(name, StreamState())

    def is_lagging(self, name: str, origin: str) -> bool:
        """Return whether an attachment has rows of its origin to take, and is not paused."""
        attachment = self.attachments.get(name)
        return (
            attachment is not None
            and attachment.status == "attached"
            and attachment.cursor < self.stream_state(origin).next
        )

    def attach(self, name: str, head: int, since: str) -> None:
        """Start at the origin's first row, in a new round if there was one.

        Rows below `head` are backfill.
        """
        # A later round dispatches under another name: its rows must not have the identities of the
        # first round.
        before = self.attachments.get(name)
        self.attachments[name] = AttachmentState(0, head, since, before.round + 1 if before else 1)

    def update_attachment(self, name: str, **fields: Any) -> None:
        """Change fields of an attachment's state."""
        self.attachments[name] = replace(self.attachments[name], **fields)


def _attachment_from_record(record: Mapping[str, Any]) -> AttachmentState:
    state = AttachmentState(**record)
    if "caught_up" in record:
        return replace(state, caught_up=tuple((a, b, slot) for a, b, slot in record["caught_up"]))
    known = min(state.head, state.cursor)  # sealed before this was written down
    return replace(state, caught_up=((0, known, parse_since_slot(state.since)),) if known else ())


def parse_since_slot(since: str) -> int:
    """Return the slot of `since`, which is ``<timeline>-<slot>``; 0 if it is empty."""
    return int(since.partition("-")[2] or 0)
