"""All key names in the bucket, and the public name of a checkpoint. Nobody else joins keys by hand.

    <pipeline>/identity.json lease.json desired.json roots.json status.json
    <pipeline>/timelines/<t>/slots/<inverted number>.json
    <pipeline>/timelines/<t>/state/<slot>-<attempt>/...
    <pipeline>/timelines/<t>/tables/<table>/<slot>-<attempt>/...
    <pipeline>/index/... requests/<id>.json acks/<id>.json trail/<id>.json logs/<attempt>/...
    quality/... <pipeline>/staging/<driver>/...

Slot keys carry `LAST_SLOT - slot` in fixed width, so that the newest slot sorts first and is one
LIST of one key.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from tidegate.errors import ConfigurationError

LAST_SLOT = 9_999_999_999  # ten digits: one epoch a second for three centuries
_PIPELINE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,199}")
_CHECKPOINT_PATTERN = re.compile(r"t(\d+)-(\d+)-([0-9a-f]{6,32})")
_ATTEMPT_FOLDER_PATTERN = re.compile(
    r"timelines/(\d+)/(?:state|tables/[^/]+)/(\d+)-([0-9a-f]{6,32})/"
)


def generate_attempt_id() -> str:
    """A fresh attempt id. 48 random bits: two attempts of one slot must never share a folder."""
    return secrets.token_hex(6)


@dataclass(frozen=True, order=True, slots=True)
class CheckpointId:
    """Name of one attempt to seal one slot of one timeline, written `t0-000123-ab12cd`.

    Only the attempt that fills the slot is a checkpoint; an aborted id is never reused.
    """

    timeline: int
    slot: int
    attempt: str

    def __str__(self) -> str:
        return f"t{self.timeline}-{self.slot:06d}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> CheckpointId:
        """Read the written form.

        Raises:
            ConfigurationError: `text` is not a checkpoint id.
        """
        match = _CHECKPOINT_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a checkpoint id; ids look like t0-000123-ab12cd",
                code="checkpoint.bad_id",
                advice="list the ids with: tidegate checkpoints list",
            )
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The keys of one pipeline."""

    pipeline: str

    def __post_init__(self) -> None:
        _require_match(_PIPELINE_PATTERN, self.pipeline, "pipeline name")

    @property
    def pipeline_prefix(self) -> str:
        """Prefix of everything this pipeline owns."""
        return f"{self.pipeline}/"

    @property
    def identity_key(self) -> str:
        """Put-if-absent: the pipeline's random uid."""
        return f"{self.pipeline}/identity.json"

    @property
    def lease_key(self) -> str:
        """Who drives; swapped by ETag."""
        return f"{self.pipeline}/lease.json"

    @property
    def desired_key(self) -> str:
        """Whether the pipeline should run; swapped by ETag."""
        return f"{self.pipeline}/desired.json"

    @property
    def roots_key(self) -> str:
        """Pins, condemned set, restore claims; swapped by ETag."""
        return f"{self.pipeline}/roots.json"

    @property
    def status_key(self) -> str:
        """Last writer wins; never trusted for data."""
        return f"{self.pipeline}/status.json"

    @property
    def timelines_prefix(self) -> str:
        """Prefix of all timelines."""
        return f"{self.pipeline}/timelines/"

    @property
    def requests_prefix(self) -> str:
        """Prefix of all requests."""
        return f"{self.pipeline}/requests/"

    @property
    def acks_prefix(self) -> str:
        """Prefix of all acknowledgements."""
        return f"{self.pipeline}/acks/"

    @property
    def index_prefix(self) -> str:
        """Prefix of the catalog's pages: a cache, rebuildable."""
        return f"{self.pipeline}/index/"

    @property
    def quality_prefix(self) -> str:
        """Prefix of Great Expectations results and Data Docs."""
        return f"{self.pipeline}/quality/"

    @property
    def restore_audit_prefix(self) -> str:
        """Prefix of the restores' histories: who asked, who approved, what came of it."""
        return f"{self.pipeline}/trail/"

    @property
    def staging_prefix(self) -> str:
        """Prefix of what drivers and Spark's tasks hand each other, where they share no disk.

        Gone with its epoch.
        """
        return f"{self.pipeline}/staging/"

    @property
    def logs_prefix(self) -> str:
        """Prefix of the drivers' logs."""
        return f"{self.pipeline}/logs/"

    @property
    def splice_requests_prefix(self) -> str:
        """Prefix of all splice requests."""
        return f"{self.pipeline}/splices/"

    def timeline_prefix(self, timeline: int) -> str:
        """Prefix of one timeline."""
        return f"{self.timelines_prefix}{timeline}/"

    def slots_prefix(self, timeline: int) -> str:
        """Prefix of the slots of one timeline."""
        return f"{self.timelines_prefix}{timeline}/slots/"

    def slot_key(self, timeline: int, slot: int) -> str:
        """Key of one slot; the newest sorts first."""
        if not 0 < slot <= LAST_SLOT:
            raise ValueError(f"slots are 1 to {LAST_SLOT}; got {slot}")
        return f"{self.slots_prefix(timeline)}{LAST_SLOT - slot:010d}.json"

    def parse_slot_key(self, key: str) -> tuple[int, int] | None:
        """The (timeline, slot) a slot key names, or None for any other key."""
        match = re.fullmatch(re.escape(self.timelines_prefix) + r"(\d+)/slots/(\d{10})\.json", key)
        return (int(match[1]), LAST_SLOT - int(match[2])) if match else None

    def state_prefix(self, attempt: CheckpointId) -> str:
        """Folder of the state segments of one attempt."""
        return (
            f"{self.timeline_prefix(attempt.timeline)}state/{attempt.slot:06d}-{attempt.attempt}/"
        )

    def table_prefix(self, table: str, attempt: CheckpointId) -> str:
        """Folder of the files of one table written by one attempt."""
        require_name(table, "table name")
        return f"{self.timeline_prefix(attempt.timeline)}tables/{table}/{attempt.slot:06d}-{attempt.attempt}/"

    def parse_attempt(self, key: str) -> CheckpointId | None:
        """The attempt whose folder a data key lies in, or None for any other key."""
        match = (
            _ATTEMPT_FOLDER_PATTERN.match(key, len(self.pipeline_prefix))
            if key.startswith(self.pipeline_prefix)
            else None
        )
        return CheckpointId(int(match[1]), int(match[2]), match[3]) if match else None

    def request_key(self, request_id: str) -> str:
        """Key of one request."""
        return f"{self.requests_prefix}{require_name(request_id, 'request id')}.json"

    def ack_key(self, request_id: str) -> str:
        """Key of the acknowledgement of one request."""
        return f"{self.acks_prefix}{require_name(request_id, 'request id')}.json"

    def splice_request_key(self, request_id: str) -> str:
        """Key of one splice request."""
        return f"{self.splice_requests_prefix}{require_name(request_id, 'splice request id')}.json"

    def splice_request_prefix(self, request_id: str) -> str:
        """Folder of the rows and reports of one splice request."""
        return f"{self.splice_requests_prefix}{require_name(request_id, 'splice request id')}/"

    def index_page_key(self, name: str) -> str:
        """Key of one index page."""
        return f"{self.index_prefix}{require_name(name, 'index page')}.json"


def require_name(text: str, what: str) -> str:
    """Check that `text` can be a part of a key and of a command.

    `what` it is stands in the error.
    """
    return _require_match(_NAME_PATTERN, text, what)


def _require_match(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise ConfigurationError(
            f"{text!r} cannot be a {what}: letters, digits and _.- only, starting with a letter or"
            " digit",
            code="layout.bad_name",
            advice=f"choose another {what}",
        )
    return text
