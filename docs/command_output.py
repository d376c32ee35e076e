"""The JSON Schema of what commands print with ``--json``, in docs/command-output.json.

`make docs` writes the file, and the table in docs/command-output.md. Data that a command takes from
a model has the schema of the model; the other shapes are declared here. `tests/cli` compares all
that its commands print with it, and a field that is not named here fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from tidegate.checkpoints.checkpoint_catalog import CheckpointDiff
from tidegate.checkpoints.manifest import Manifest
from tidegate.checkpoints.restore import RestorePlan
from tidegate.checkpoints.retention import StorageReport, SweepReport
from tidegate.checkpoints.slot_index import SlotSummary
from tidegate.checkpoints.verify import Verification
from tidegate.jobs.cases.case_report import CaseResult
from tidegate.jobs.cli.output import SCHEMA_VERSION
from tidegate.jobs.sealed_queries.state_diff import OperatorDifference
from tidegate.jobs.spec.spec_changes import SpecChange
from tidegate.jobs.spec.spec_plan import SpecPlan
from tidegate.jobs.splice.impact import Impact
from tidegate.jobs.splice.row_trace import RowTrace

Json = dict[str, Any]  # its fields depend on the pipeline, or belong to the driver's report

Error = TypedDict(
    "Error",
    {
        "code": str,
        "class": str,
        "message": str,
        "pipeline": str | None,
        "kept": str | None,
        "advice": str | None,
        "retry_after": float | None,
    },
)


class DesiredStateData(TypedDict):
    """What a person or Airflow wants."""

    state: str
    who: str
    why: str


class DriverData(TypedDict):
    """Who holds the lease; instants are ticks, `heard_of` seconds."""

    name: str
    host: str
    pid: int
    token: int
    step: str | None
    started_at: int | None
    heard_of: float | None


class NewestCheckpoint(TypedDict):
    """The newest sealed epoch."""

    id: str
    sealed_at: int
    age_seconds: float | None
    epoch_seconds: float


class SourceData(TypedDict):
    """A source as of the newest sealed epoch; the frontier is in ticks."""

    frontier: int | None
    status: str | None
    rows: Json
    counts: Json
    pending: bool


class PipelineStatus(TypedDict):
    """Of `tidegate status`. Without a sealed epoch, some fields are null or left out.

    `unpublished` is null while the tables still show an older timeline.
    """

    pipeline: str
    state: str
    why: str | None
    desired: DesiredStateData | None
    driver: DriverData | None
    checkpoint: NewestCheckpoint | None
    timeline: int
    restores: int
    unpublished: int | None
    queries: NotRequired[Any]
    sinks: Json
    error: Json | None
    trouble: Any
    silent: dict[str, int]
    freshness: Json
    stale: Json
    lag: Json
    late_uploads: Json
    held_back: list[Any]
    warnings: list[str]
    frontier: int | None
    holder: Json | None
    blocked: NotRequired[Any]
    rows: Json | None
    counts: Json | None
    sources: dict[str, SourceData]
    open_barriers: list[Json]
    quality: Json | None
    attachments: Json


class DeployedData(TypedDict):
    """What drivers run; `commit` is that of git, and null where the spec lies in no checkout."""

    who: str
    why: str
    commit: str | None
    at: int


class OneStatus(PipelineStatus):
    """Of `tidegate status PIPELINE`."""

    landings: dict[str, Json]
    store: Json
    deployed: DeployedData | None


class AllStatuses(TypedDict):
    """Of `tidegate status`."""

    store: Json
    pipelines: list[PipelineStatus]


class LogData(TypedDict, total=False):
    """Of `tidegate logs`: the attempts, or one attempt with its lines."""

    attempts: list[str]
    attempt: str
    lines: list[str]


class ValidationReport(TypedDict):
    """Of one spec of `tidegate validate`."""

    spec: str
    valid: bool
    error: NotRequired[Error]
    name: NotRequired[str]
    kind: NotRequired[str]
    pipeline: NotRequired[str]
    digest: NotRequired[str]
    sources: NotRequired[list[str]]
    tables: NotRequired[list[str]]
    warnings: NotRequired[list[str]]


class PlanMore(TypedDict):
    """What `tidegate plan` adds to the plan."""

    exit_code: int


class TableAddress(TypedDict):
    """Of one table of `tidegate tables`."""

    table: str
    rows: int
    address: str | None


class TableRows(TypedDict):
    """Of `tidegate tables PIPELINE NAME`: the columns are those of the table."""

    table: str
    rows: list[Json]


class Export(TypedDict):
    """Of `tidegate tables --out`."""

    table: str
    rows: int
    file: str


class NewestEpochs(TypedDict):
    """Means of the newest epochs."""

    epochs: int
    data_objects: float
    bytes: float


class StorageMore(TypedDict):
    """What `tidegate storage` adds to the report."""

    epochs: NewestEpochs


class GarbageMore(TypedDict):
    """What `tidegate gc` adds to the report."""

    compacted: dict[str, Json]
    compaction_left: str | None


class RestoreMore(TypedDict):
    """What `tidegate checkpoints restore` adds to the plan."""

    done: bool
    spec_changes: list[SpecChange]


class DiffMore(TypedDict):
    """What `tidegate checkpoints diff --state` adds to the diff."""

    state_rows: NotRequired[list[OperatorDifference]]


class CheckpointMore(TypedDict):
    """What `tidegate checkpoints show` adds to the manifest."""

    id: str


class RereadData(TypedDict):
    """Of `tidegate reread`: names of objects."""

    copied: list[str]
    copied_before: list[str]
    gone: list[str]


class CheckData(TypedDict):
    """Of `tidegate check`."""

    exact: bool
    bucket_rules: list[str]
    rows: dict[str, dict[str, int]]
    windows: Any
    problems: list[str]
    skipped: Any
    topics: Any
    set_aside: Any
    retired_upto: Any


class ReplayData(TypedDict):
    """Of `tidegate replay`: per table the rows sealed, replayed, and different."""

    checkpoint: str
    equal: bool
    tables: dict[str, list[int]]
    decided_differently: list[str]


class AdviceData(TypedDict):
    """Of `tidegate advise`; times in microseconds."""

    pipeline: str
    epochs: int
    first_slot: int | None
    last_slot: int | None
    sources: dict[str, Json]
    plot: str | None


class WhatIfData(TypedDict):
    """Of `tidegate whatif`; times in microseconds."""

    pipeline: str
    first_slot: int | None
    last_slot: int | None
    epochs: int
    reproduced: bool
    not_reproduced: dict[str, list[str]]
    rows_read: dict[str, int]
    rows_late: dict[str, int]
    happened: Json
    other: Json
    points: list[list[int | None]]


class RequestData(TypedDict):
    """A splice request; instants are ticks."""

    id: str
    pipeline: str
    destination: str
    origin: str
    origin_detail: Json
    row_count: int
    min_time: int | None
    max_time: int | None
    state: str
    created_at: int
    expires_at: int | None
    who: str
    why: str
    decided_by: str | None
    decided_why: str | None
    decided_at: int | None
    at_slot: dict[str, int]
    approved_digest: str | None
    trail: list[Json]


class NewRequest(RequestData):
    """Of `tidegate splice late`, `dead-letters` and `file`."""

    request: str
    rows: int


class TooFewRows(TypedDict):
    """Of `tidegate splice late --at-least` with fewer rows."""

    request: None
    rows: int
    at_least: int


class SplitRequest(TypedDict):
    """Of `tidegate splice part`: the requests of the chosen rows and of the rest."""

    request: str
    rows: int
    rest: str
    rest_rows: int


class MergedRequest(TypedDict):
    """Of `tidegate splice show` for a request that was merged in this checkpoint."""

    request: RequestData
    checkpoint: str


class ImpactData(TypedDict):
    """Of `tidegate splice show`."""

    request: RequestData
    impact: Impact


class MergeData(TypedDict):
    """Of `tidegate splice merge`."""

    request: str
    checkpoint: str | None
    promised: str | None
    actual: str | None
    again: bool
    slots_lost: int
    seconds: float
    impact: Impact | None


class StackData(TypedDict):
    """Of `tidegate up`."""

    airflow: str
    minio: str
    credentials: str
    healthy: Any
    processes: Json


class WarmData(TypedDict):
    """Of `tidegate warm`."""

    archive: str
    made: bool


class QualityData(TypedDict):
    """Of `tidegate quality`."""

    schema_version: int
    kind: str
    id: str
    key: str
    docs: str
    pipeline: str
    at: str
    checkpoint: str | None
    timeline: int | None
    epoch: int | None
    recent_since: Any
    judged_since: int
    slices: int
    every: float | None
    verdict: str
    failed: list[Json]
    checks: list[Json]
    illness: Json
    seconds: float


_PAGE: Final = """# What commands print with `--json`

Every command that shows something has `--json`. It prints one line on standard output, and nothing
else there:

```json
{"schema_version": 1, "kind": "tables", "data": [{"table": "events", "rows": 1707, "address": "s3://..."}]}
```

`kind` says what `data` is. [command-output.json](command-output.json) is the JSON Schema of all
kinds (draft 2020-12). A new field may come with any release, and `schema_version` stays then; it
grows if a field changes its meaning or goes. Instants that are numbers are microseconds since 1970
in UTC unless their name says otherwise. The exit code is as without `--json`.

A command that cannot answer prints the kind `error`. One with bad news, such as `check` of a row
that is in two places, prints its own kind. An option that does not exist is reported on standard
error only.

`tidegate schema` prints the schema of the YAML files. `init` and `infer` print YAML and JSON as
they are.

This page is generated by `make docs`.

| kind | `tidegate ...` |
|---|---|
"""

KINDS: Final[dict[str, tuple[str, Any]]] = {
    "advice": ("advise", AdviceData),
    "check": ("check", CheckData),
    "checkpoint": ("checkpoints show", (Manifest, CheckpointMore)),
    "checkpoints": ("checkpoints list", list[SlotSummary]),
    "diff": ("checkpoints diff", (CheckpointDiff, DiffMore)),
    "error": ("every command that fails", Error),
    "export": ("tables --out", Export),
    "gc": ("gc", (SweepReport, GarbageMore)),
    "impact": ("splice show", ImpactData),
    "logs": ("logs", LogData),
    "merge": ("splice merge", MergeData),
    "plan": ("plan", (SpecPlan, PlanMore)),
    "put": ("put", dict[str, list[str]]),
    "quality": ("quality", QualityData),
    "replay": ("replay", ReplayData),
    "reread": ("reread", RereadData),
    "restore": ("checkpoints restore", (RestorePlan, RestoreMore)),
    "row": ("row", list[RowTrace]),
    "splice": (
        "splice show of a merged request; splice late, dead-letters, file, part",
        NewRequest | TooFewRows | SplitRequest | MergedRequest,
    ),
    "splices": ("splice list", list[RequestData]),
    "stack": ("up", StackData),
    "status": ("status PIPELINE", OneStatus),
    "statuses": ("status", AllStatuses),
    "storage": ("storage", (StorageReport, StorageMore)),
    "table": ("tables PIPELINE NAME", TableRows),
    "tables": ("tables PIPELINE", list[TableAddress]),
    "test": ("test", list[CaseResult]),
    "validation": ("validate", list[ValidationReport]),
    "verification": ("checkpoints verify", list[Verification]),
    "warm": ("warm", WarmData),
    "whatif": ("whatif", WhatIfData),
}
"""Kind of an envelope -> the command, and the type of its data; of two types the fields of both."""


def build_schema() -> Json:
    """Return the schema of all envelopes. Readers must accept fields that it does not name."""
    kinds: Json = {}
    definitions: Json = {}
    for kind, (_, shape) in KINDS.items():
        parts = [
            _describe(part, definitions)
            for part in (shape if isinstance(shape, tuple) else (shape,))
        ]
        for more in parts[1:]:
            parts[0]["properties"] |= more["properties"]
            parts[0]["required"] = [*parts[0].get("required", ()), *more.get("required", ())]
        kinds[kind] = parts[0]
    rules = [
        {
            "if": {"properties": {"kind": {"const": kind}}},
            "then": {"properties": {"data": data}},
        }
        for kind, data in kinds.items()
    ]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "What tidegate's commands print with --json",
        "type": "object",
        "required": ["schema_version", "kind", "data"],
        "properties": {
            "schema_version": {"const": SCHEMA_VERSION},
            "kind": {"enum": [*KINDS]},
            "data": {},
        },
        "allOf": rules,
        "$defs": dict(sorted(definitions.items())),
    }
    for part in _list_objects(schema):
        if "properties" in part:
            part.pop("additionalProperties", None)
        # How a model is made says nothing about what is printed.
        if isinstance(part.get("title"), str) and ("type" in part or "anyOf" in part):
            part.pop("title")
        part.pop("default", None)
    return schema


def render_page() -> str:
    """Return docs/command-output.md."""
    rows = "".join(f"| `{kind}` | {command} |\n" for kind, (command, _) in KINDS.items())
    return f"{_PAGE}{rows}"


def forbid_unknown_fields(schema: Json) -> Json:
    """Refuse in place what the schema does not name, for tests; return it."""
    for part in _list_objects({key: schema[key] for key in ("allOf", "$defs")}):
        if "type" in part and "properties" in part:
            part["additionalProperties"] = False
    return schema


def _describe(shape: Any, definitions: Json) -> Json:
    """The schema of one type; the models that it names are added to `definitions`."""
    found = TypeAdapter(shape).json_schema(mode="serialization")
    definitions |= found.pop("$defs", {})
    return found


def _list_objects(part: Any) -> Iterator[Json]:
    """Every object of a schema, itself included."""
    if isinstance(part, dict):
        yield part
        for value in part.values():
            yield from _list_objects(value)
    elif isinstance(part, list):
        for value in part:
            yield from _list_objects(value)
