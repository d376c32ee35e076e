"""All keys and prefixes in the bucket, and the public name of a checkpoint.

Other modules only add names below these prefixes.

    <pipeline>/identity.json lease.json desired.json deployed.json roots.json status.json
    <pipeline>/announced.json alerts.json
    <pipeline>/timelines/<t>/slots/<inverted number>.json
    <pipeline>/timelines/<t>/state/<slot>-<attempt>/...
    <pipeline>/timelines/<t>/tables/<table>/<slot>-<attempt>/...
    <pipeline>/requests/<id>.json acks/<id>.json splices/<id>.json
    <pipeline>/approvals/<id>.json trail/<id>.json
    <pipeline>/specs/<digest>.json deployed/<digest>.json
    <pipeline>/sinks/<sink>.json iceberg/... arrivals/<source>/<partition>/...
    <pipeline>/index/... logs/<attempt>/... quality/... staging/<driver>/... backfills/...
    <pipeline>/launches/<launch>/<query>/...

A slot key carries `LAST_SLOT - slot` in fixed width. The newest slot therefore sorts first, and
one LIST of one key finds it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from .errors import BAD_CHECKPOINT_ID, BAD_NAME

LAST_SLOT = 9_999_999_999  # ten digits: one epoch a second for three centuries
_PIPELINE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,199}")
_CHECKPOINT_PATTERN = re.compile(r"t(\d+)-(\d+)-([0-9a-f]{6,32})")
_ATTEMPT_FOLDER_PATTERN = re.compile(
    r"timelines/(\d+)/(?:state|tables/[^/]+)/(\d+)-([0-9a-f]{6,32})/"
)


def generate_attempt_id() -> str:
    """Return a new attempt id of 48 random bits: attempts of one slot never share a folder."""
    return secrets.token_hex(6)


@dataclass(frozen=True, order=True, slots=True)
class CheckpointId:
    """Name of one attempt to seal one slot of one timeline, written `t0-000123-ab12cd`.

    Only the attempt that fills the slot is a checkpoint. The id of an aborted attempt is never
    used again.
    """

    timeline: int
    slot: int
    attempt: str

    def __str__(self) -> str:
        return f"t{self.timeline}-{self.folder_name}"

    @property
    def folder_name(self) -> str:
        """Name of the attempt's folders, ``<slot>-<attempt>``."""
        return f"{self.slot:06d}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> CheckpointId:
        """Read the written form.

        Raises:
            ConfigurationError: `text` is not a checkpoint id.
        """
        match = _CHECKPOINT_PATTERN.fullmatch(text)
        if match is None:
            raise BAD_CHECKPOINT_ID(text=text)
        return cls(int(match[1]), int(match[2]), match[3])


class _Below:
    """A key, prefix or folder below the pipeline's own prefix: an attribute of `BucketLayout`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: BucketLayout, _: object) -> str:
        return f"{layout.pipeline}/{self._name}"


@dataclass(frozen=True)
class BucketLayout:
    """The keys of one pipeline.

    Names of tables, requests, attempts and index pages are checked, other names are not.

    Raises:
        ConfigurationError: the pipeline's name, or a name that is checked, cannot be part of a key.
    """

    pipeline: str

    def __post_init__(self) -> None:
        _require_match(_PIPELINE_PATTERN, self.pipeline, "pipeline name")

    # Single documents

    identity_key = _Below("identity.json")
    """The pipeline's random uid and the store's address; swapped only if a copy is adopted."""
    lease_key = _Below("lease.json")
    """Which process drives the pipeline; swapped by ETag."""
    desired_key = _Below("desired.json")
    """Whether the pipeline should run; swapped by ETag."""
    deployed_key = _Below("deployed.json")
    """Which copy of the spec its drivers run; swapped by ETag."""
    roots_key = _Below("roots.json")
    """Pins, condemned checkpoints and restore claims; swapped by ETag."""
    status_key = _Below("status.json")
    """The driver's report for people; the last writer wins."""
    announced_key = _Below("announced.json")
    """The window periods that Airflow has announced to its assets; swapped by ETag."""
    alerts_key = _Below("alerts.json")
    """The incidents, and which receivers of alerts know of them; swapped by ETag."""

    # Prefixes

    pipeline_prefix = _Below("")
    """Prefix of everything this pipeline owns."""
    timelines_prefix = _Below("timelines/")
    """Prefix of all timelines."""
    requests_prefix = _Below("requests/")
    """Prefix of the requests to the driver."""
    acks_prefix = _Below("acks/")
    """Prefix of the driver's acknowledgements."""
    index_prefix = _Below("index/")
    """Prefix of a cache that can be rebuilt: slot index, notes of scrub and spec."""
    quality_prefix = _Below("quality/")
    """Prefix of Great Expectations results and Data Docs."""
    restore_audit_prefix = _Below("trail/")
    """Prefix of the restores' histories: who asked, who approved, how it ended."""
    staging_prefix = _Below("staging/")
    """Prefix of the files that a driver and Spark's tasks exchange if they share no disk.

    The driver deletes them at the end of the epoch or of its run.
    """
    launches_prefix = _Below("launches/")
    """Prefix of the checkpoints that Spark keeps in the bucket, of a job's newest launches."""
    logs_prefix = _Below("logs/")
    """Prefix of the drivers' logs."""
    splice_requests_prefix = _Below("splices/")
    """Prefix of all splice requests."""
    iceberg_folder = _Below("iceberg")
    """Folder of the Iceberg metadata, without a slash at the end."""
    published_cut_key = _Below("iceberg/current.json")
    """Key of the pointer to the tables' metadata files, one cut over all tables."""
    table_versions_key = _Below("iceberg/versions.json")
    """Key of the notes of what the pointer named earlier; readers may still use it."""

    # Slots and the files of attempts

    def attempt_prefixes(self, timeline: int) -> tuple[str, str]:
        """Prefixes of the state segments and of the table files of all attempts of a timeline."""
        folder = f"{self.timelines_prefix}{timeline}/"
        return f"{folder}state/", f"{folder}tables/"

    def slots_prefix(self, timeline: int) -> str:
        """Prefix of the slots of one timeline."""
        return f"{self.timelines_prefix}{timeline}/slots/"

    def slot_key(self, timeline: int, slot: int) -> str:
        """Key of one slot; the newest sorts first.

        Raises:
            ValueError: there is no slot with this number.
        """
        if not 0 < slot <= LAST_SLOT:
            raise ValueError(f"slots are 1 to {LAST_SLOT}; got {slot}")
        return f"{self.slots_prefix(timeline)}{LAST_SLOT - slot:010d}.json"

    def state_prefix(self, attempt: CheckpointId) -> str:
        """Folder of the state segments of one attempt."""
        return f"{self.attempt_prefixes(attempt.timeline)[0]}{attempt.folder_name}/"

    def table_prefix(self, table: str, attempt: CheckpointId) -> str:
        """Folder of the files that one attempt wrote for one table."""
        folder = self.attempt_prefixes(attempt.timeline)[1]
        return f"{folder}{require_name(table, 'table name')}/{attempt.folder_name}/"

    def parse_attempt(self, key: str) -> CheckpointId | None:
        """Return the attempt in whose folder a data key lies, or None for any other key."""
        if not key.startswith(self.pipeline_prefix):
            return None
        match = _ATTEMPT_FOLDER_PATTERN.match(key, len(self.pipeline_prefix))
        return CheckpointId(int(match[1]), int(match[2]), match[3]) if match else None

    # Documents by name

    def request_key(self, request_id: str) -> str:
        """Key of one request to the driver."""
        return f"{self.requests_prefix}{require_name(request_id, 'request id')}.json"

    def parse_request_key(self, key: str) -> str:
        """Return the request id in the key of a request or of an acknowledgement, unchecked."""
        return key.rpartition("/")[2].removesuffix(".json")

    def ack_key(self, request_id: str) -> str:
        """Key of the acknowledgement of one request."""
        return f"{self.acks_prefix}{require_name(request_id, 'request id')}.json"

    def splice_request_key(self, request_id: str) -> str:
        """Key of one splice request."""
        return f"{self.splice_requests_prefix}{require_name(request_id, 'splice request id')}.json"

    def splice_request_prefix(self, request_id: str) -> str:
        """Folder of the rows and reports of one splice request."""
        return f"{self.splice_requests_prefix}{require_name(request_id, 'splice request id')}/"

    def splice_approval_key(self, request_id: str) -> str:
        """Key of what Airflow's tasks asked people about one splice request, and the answers."""
        name = require_name(request_id, "splice request id")
        return f"{self.pipeline}/approvals/{name}.json"

    def restore_audit_key(self, request_id: str) -> str:
        """Key of the history of one restore."""
        return f"{self.restore_audit_prefix}{require_name(request_id, 'request id')}.json"

    def index_page_key(self, name: str) -> str:
        """Key of one page of the slot index."""
        return f"{self.index_prefix}{require_name(name, 'index page')}.json"

    def attempt_logs_prefix(self, attempt: str) -> str:
        """Folder of the log of one driver process."""
        return f"{self.logs_prefix}{require_name(attempt, 'attempt')}/"

    @property
    def specs_prefix(self) -> str:
        """Prefix of the specs that have written checkpoints."""
        return f"{self.pipeline}/specs/"

    def spec_key(self, digest: str) -> str:
        """Key of the spec with this digest."""
        return f"{self.specs_prefix}{digest}.json"

    def parse_spec_key(self, key: str) -> str:
        """Return the digest in the key of a spec."""
        return key.removeprefix(self.specs_prefix).removesuffix(".json")

    @property
    def spec_copies_prefix(self) -> str:
        """Prefix of the copies of specs that were deployed."""
        return f"{self.pipeline}/deployed/"

    def spec_copy_key(self, digest: str) -> str:
        """Key of a copy of a spec and its code, as it was deployed."""
        return f"{self.spec_copies_prefix}{digest}.json"

    def parse_spec_copy_key(self, key: str) -> str:
        """Return the digest in the key of a copy."""
        return key.removeprefix(self.spec_copies_prefix).removesuffix(".json")

    def sink_position_key(self, sink: str) -> str:
        """Key of the position up to which a sink has followed the log."""
        return f"{self.pipeline}/sinks/{sink}.json"

    def iceberg_table_folder(self, table: str) -> str:
        """Folder of the Iceberg metadata of one table, without a slash at the end."""
        return f"{self.iceberg_folder}/{table}"

    def table_catalog_key(self, table: str) -> str:
        """Key of a table's entry in the catalog that the bucket itself provides."""
        return f"{self.iceberg_table_folder(table)}/catalog.json"

    def arrivals_prefix(self, source: str, partition: str) -> str:
        """Prefix of the log of arrivals of one partition of a source."""
        return f"{self.pipeline}/arrivals/{source}/{partition}/"

    def backfill_report_key(self, name: str) -> str:
        """Key of the comparison of a backfill with the live pipeline."""
        return f"{self.pipeline}/backfills/{name}.json"


@dataclass(frozen=True, slots=True)
class AttemptFolders:
    """The folders of one attempt."""

    layout: BucketLayout
    attempt: CheckpointId

    def table_prefix(self, table: str) -> str:
        """Folder of the attempt's files of one table."""
        return self.layout.table_prefix(table, self.attempt)

    def segment_key(self, kind: str) -> str:
        """Key of the attempt's state segment of this kind, if it writes one file of the kind."""
        return f"{self.segment_stem(kind)}.parquet"

    def segment_stem(self, kind: str) -> str:
        """How the keys of the attempt's state segments of this kind begin."""
        return self.layout.state_prefix(self.attempt) + kind.replace(":", "-")


def require_name(text: str, what: str) -> str:
    """Return `text` if it can be a part of a key and of a command.

    Raises:
        ConfigurationError: it cannot; the error calls it `what`.
    """
    return _require_match(_NAME_PATTERN, text, what)


def _require_match(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise BAD_NAME(text=text, what=what)
    return text
