"""A local store with a history in it, and a way to call the command line and read what it said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docs.command_output import forbid_unknown_fields
from jsonschema import Draft202012Validator
from typer.main import get_command
from typer.testing import CliRunner

from tidegate.checkpoints.bucket_layout import CheckpointId, generate_attempt_id
from tidegate.checkpoints.canonical_json import sha256_of_bytes
from tidegate.checkpoints.local_store import LocalStore
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.pipeline_identity import ensure_identity
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.cli.main import app
from tidegate.time_units import TICK_MIN

SEALED = 1_750_000_000_000_000
SPEC = """\
apiVersion: tidegate/v1
name: flights
sources:
  EWR: {path: inbox/EWR, schema: {sched: timestamp, carrier: string}, event_time: sched, lag: 1h}
"""


@dataclass(frozen=True)
class Said:
    """What a command said."""

    exit_code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The data of the envelope, which is compared with its JSON Schema on the way."""
        envelope = json.loads(self.out)
        assert set(envelope) == {"schema_version", "kind", "data"}
        refuse_undocumented(envelope)
        return envelope["data"]


Cli = Callable[..., Said]


@cache
def _open_schema() -> Draft202012Validator:
    page = Path(__file__).parents[2] / "docs" / "command-output.json"
    return Draft202012Validator(forbid_unknown_fields(json.loads(page.read_text())))


def refuse_undocumented(envelope: dict[str, Any]) -> None:
    """Fail for an envelope that differs from docs/command-output.json, or has more fields."""
    faults = [
        f"{fault.json_path}: {fault.message}" for fault in _open_schema().iter_errors(envelope)
    ]
    assert faults == []


_build_command = cache(get_command)  # 0.04 s; `CliRunner` does it for each call


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Call `tidegate` in an empty folder, with the store of these tests."""
    for name in ("TIDEGATE_STORE", "TIDEGATE_PIPELINES", "TIDEGATE_DEBUG", "TIDEGATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.testing._get_command", _build_command)

    def call(*arguments: str, input: str | None = None) -> Said:
        monkeypatch.setattr("sys.argv", ["tidegate", *arguments])
        result = CliRunner().invoke(app, list(arguments), input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """The default store of the folder the commands run in."""
    return LocalStore(tmp_path / ".tidegate" / "store")


@pytest.fixture
def log(store: LocalStore) -> SlotLog:
    """Three sealed epochs of `flights`."""
    ensure_identity(store, "flights")
    log = SlotLog(store, "flights")
    for _ in range(3):
        seal(log)
    return log


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "flights.yaml"
    path.write_text(SPEC)
    return path


def seal(
    log: SlotLog,
    *,
    sketches: dict[str, Any] | None = None,
    spec_digest: str = "d" * 64,
    why: str = "no data",
    decider: dict[str, Any] | None = None,
    statuses: dict[str, str] | None = None,
    cut: dict[str, Any] | None = None,
    counts: dict[str, int] | None = None,
    segments: Sequence[FileRef] = (),
) -> Manifest:
    """One more epoch: ten rows read, nine released, one late; one file.

    `decider` adds to the decider's state, `counts` to the row counts of the source; `segments` is
    the live state.
    """
    head = log.head()
    slot, attempt = head.next_slot, generate_attempt_id()
    checkpoint = CheckpointId(head.timeline, slot, attempt)
    data = str(checkpoint).encode()
    key = f"{log.layout.table_prefix('events', checkpoint)}part-0.parquet"
    log.store.put(key, data)
    file = FileRef(
        key=key, rows=9, bytes=len(data), sha256=sha256_of_bytes(data), kind="table:events"
    )
    counters = {"read": 10 * slot, "released": 9 * slot, "late": slot, **(counts or {})}
    frontier = 1_000_000 * slot
    manifest = Manifest(
        pipeline="flights",
        uid="u",
        spec_digest=spec_digest,
        code_version="1",
        timeline=head.timeline,
        slot=slot,
        parent=str(head.checkpoint) if head.checkpoint else None,
        parent_sha256=head.sha256,
        attempt=attempt,
        lease_token=1,
        driver="driver1",
        recorded_now=SEALED,
        cut=cut or {"EWR/0": {"start": slot - 1, "end": slot, "pending": slot % 2 == 0}},
        decider={
            "output": {
                "value": frontier,
                "inputs": {"EWR": {"frontier": frontier, "status": "active", "aligned": True}},
            },
            **(decider or {}),
        },
        decision={
            "frontier_before": frontier - 1_000_000 if slot > 1 else TICK_MIN,
            "frontier_after": frontier,
            "holder": {"member": "EWR/0", "since": SEALED, "why": why},
            "statuses": statuses or {},
        },
        counters=Counters(
            read=10 * slot, released=9 * slot, late=slot, per_source={"EWR": counters}
        ),
        segments=list(segments),
        files={"events": [file]},
        notes={"sketches": sketches} if sketches else {},
        timings={"move": 0.5, "seal": 0.01},
        created_at=SEALED + 1_000_000 * slot,
    )
    log.seal(manifest)
    return manifest


def ids(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Slots of listed checkpoints."""
    return [row["slot"] for row in rows]
