"""Streams without Spark and Airflow.

A bucket full of plausible history, for everything that shows it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil, log, sin
from typing import Any

from tidegate.checkpoints.bucket_layout import BucketLayout, CheckpointId, generate_attempt_id
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import (
    DesiredState,
    RequestKind,
    set_desired_state,
    submit_request,
)
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.manifest import Counters, FileRef, Manifest
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.pipeline_identity import ProcessIdentity
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.checkpoints.store import Store
from tidegate.jobs.spec.pipeline import PipelineSpec

AIRPORTS = ("EWR", "JFK", "LGA")
SECOND = 1_000_000
START = 1_357_000_000 * SECOND
_GAMMA = 1.02
GALLERY = ("flights", "taxis", "orders", "clicks", "meters", "weather", "tides")


@dataclass
class History:
    """Writes plausible epochs of one stream.

    Attributes:
        every: seconds between two epochs.
        ago: seconds before now at which the newest epoch of `extend` was sealed.
        why: the reason that the slowest source holds the frontier.
    """

    store: Store
    pipeline: str
    sources: Sequence[str] = AIRPORTS
    every: float = 2.0
    why: str = "idle timer running"
    uid: str = "u"
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.log = SlotLog(self.store, self.pipeline)
        self.barrier = 0
        self.sketches = [self._sketch(60) for _ in range(12)]

    def extend(self, count: int, ago: float = 0.0) -> list[Manifest]:
        """Seal so many epochs, the newest `ago` seconds before now."""
        newest = time.time() - ago
        return [self.epoch(newest - self.every * (count - 1 - i)) for i in range(count)]

    def epoch(self, at: float) -> Manifest:
        """Seal one epoch."""
        head, dice = self.log.head(), self.dice
        slot, before = head.next_slot, head.record.counters if head.record else Counters()
        frontier = START + slot * 900 * SECOND
        slow = self.sources[slot // 15 % len(self.sources)]
        members = {
            s: frontier + (0 if s == slow else dice.randrange(0, 5400) * SECOND)
            for s in self.sources
        }
        per_source, read, late = dict[str, dict[str, int]](), 0, 0
        for source in self.sources:
            rows = int(60 + 55 * sin(slot / 9) + dice.randrange(12))
            missed = sum(dice.random() < 0.025 for _ in range(rows))
            was = before.per_source.get(source, {"read": 0, "late": 0})
            per_source[source] = {"read": was["read"] + rows, "late": was["late"] + missed}
            read, late = read + rows, late + missed
        retained = 40 + dice.randrange(30)
        total = Counters(
            read=before.read + read,
            late=before.late + late,
            released=before.read + read - before.late - late - retained,
            retained=retained,
            per_source=per_source,
        )
        manifest = Manifest(
            timeline=head.timeline,
            slot=slot,
            pipeline=self.pipeline,
            uid=self.uid,
            spec_digest="s",
            code_version="1",
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=generate_attempt_id(),
            lease_token=1,
            driver="d",
            recorded_now=int(at * SECOND),
            created_at=int(at * SECOND),
            counters=total,
            decider={
                "clock": int(at * SECOND),
                "output": {
                    "inputs": {s: {"frontier": t, "status": "active"} for s, t in members.items()}
                },
                "barriers": {"open": self._open(slot, at)},
            },
            decision={
                "frontier_after": frontier,
                "holder": {"member": f"{slow}/0", "why": self.why, "since": int(at * SECOND)},
            },
            barriers=self._closed(slot, at),
            notes={
                "sketches": {
                    s: {"gamma": _GAMMA, "buckets": dice.choice(self.sketches)}
                    for s in self.sources
                }
            },
            segments=[
                FileRef(
                    key=f"{self.pipeline}/x/{i}", rows=900, bytes=90_000, sha256="0", kind="order"
                )
                for i in range(3)
            ],
            files={
                "events": [
                    FileRef(
                        key=f"{self.pipeline}/e/{slot}",
                        rows=read,
                        bytes=41_000,
                        sha256="0",
                        kind="table:events",
                    )
                ]
            },
            timings={
                "plan": 0.06,
                "survey": 0.2 + dice.random() / 5,
                "move": 0.6 + dice.random() / 2,
                "seal": 0.02,
            },
        )
        assert isinstance(self.log.seal(manifest), Sealed)
        return manifest

    def _sketch(self, rows: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(rows):
            behind = (
                0.0 if self.dice.random() < 0.6 else self.dice.lognormvariate(6.4, 1.2) * SECOND
            )
            bucket = str(0 if behind <= 0 else ceil(log(behind) / log(_GAMMA)) + 1)
            found[bucket] = found.get(bucket, 0) + 1
        return found

    def _closed(self, slot: int, at: float) -> list[dict[str, Any]]:
        if slot % 12:
            return []
        self.barrier += 1
        closed, missing = int(at * SECOND), [f"{self.sources[-1]}/0"] if slot % 36 == 0 else []
        opened = closed - int(self.dice.uniform(0.5, 9) * SECOND)
        there = [f"{s}/0" for s in self.sources if f"{s}/0" not in missing]
        arrivals = {
            m: [opened + i * (closed - opened) // max(1, len(there) - 1), 0, START]
            for i, m in enumerate(there)
        }
        facts = {
            "id": self.barrier,
            "types": ["day_close"],
            "homogeneous": True,
            "section": self.barrier,
            "ended": [],
            "tardy": [],
        }
        outcome = "incomplete" if missing else "complete"
        return [
            {
                **facts,
                "outcome": outcome,
                "missing": missing,
                "participants": arrivals,
                "opened": opened,
                "closed": closed,
            }
        ]

    def _open(self, slot: int, at: float) -> list[dict[str, Any]]:
        if slot % 12 < 10:
            return []
        opened = int(at * SECOND) - 2 * SECOND
        return [
            {
                "id": self.barrier + 1,
                "opened": opened,
                "arrivals": {f"{self.sources[0]}/0": {"at": opened}},
            }
        ]

    def restore(self, target: Manifest, who: str = "ann", why: str = "a bad file came in") -> None:
        """Fork back to a checkpoint."""
        self.log.fork(
            self.log.head(), target.id, request_id=generate_attempt_id(), who=who, why=why
        )

    def says(self, state: str, token: int = 1, **body: Any) -> None:
        """The driver's words."""
        body = {"state": state, "unpublished": 1, **body}
        write_status(
            self.store,
            self.pipeline,
            DriverStatus(
                token=token, driver="d", step="move", at=int(time.time() * SECOND), body=body
            ),
        )

    def wanted(self, state: DesiredState, why: str = "") -> None:
        """What shall be."""
        set_desired_state(self.store, self.pipeline, state, who="ann", why=why)

    def checked(
        self, verdict: str, checkpoint: CheckpointId, failed: Sequence[dict[str, Any]] = ()
    ) -> None:
        """A quality run just now, as an old one is a trouble of its own."""
        at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
        key = BucketLayout(self.pipeline).quality_prefix
        run = {
            "at": at.replace("+00:00", "Z"),
            "verdict": verdict,
            "checkpoint": str(checkpoint),
            "failed": list(failed),
        }
        whole = {**run, "id": "r1", "docs": f"{key}docs/r1/index.html"}
        judged = {"value": 0.02, "limit": 0.1, "is_least": False, "owner": "ann", "sample": []}
        good = {"id": "dead_ratio", "severity": "warn", "says": "few rows are dead"} | judged
        row = {"_source": "web", "_partition": "0", "_seq": 7, "_epoch": 3, "_event_time": None}
        bad = {"passed": False, "value": 0.7, "sample": [row], "page": "late_rows.late_by_source"}
        checks = [{**good, "passed": True, "observed": "0.02", "page": "d"}] + [
            {**judged, **check, **bad, "command": "tidegate tables orders late"} for check in failed
        ]
        self.store.put(f"{key}results/latest.json", json.dumps(whole | {"checks": checks}).encode())
        entry = {"id": "r1", **run, "failed": [check["id"] for check in failed]}
        values = [{"dead_ratio": n / 100, "late_ratio": 0.7 - n / 10} for n in (2, 3, 1)]
        ill = [
            {"check": check["id"], "epochs": [1, checkpoint.slot]}
            for check in failed or [{"id": "late_ratio"}]
        ]
        judged_by = {"recent_since": 0, "critical": ill if verdict == "fail" else []}
        runs = [{**entry, **judged_by, "values": one} for one in values]
        self.store.put(f"{key}history.json", json.dumps({"runs": runs}).encode())
        self.store.put(f"{key}docs/r1/index.html", b"<!doctype html><h1>Data Docs</h1>")


def drives(store: Store, pipeline: str) -> LeaseRenewer:
    """A live lease, renewed until it is stopped."""
    keeper = LeaseRenewer(Lease.acquire(store, pipeline, ProcessIdentity.this_process())).start()
    keeper.announce_step("move", 3600.0)
    return keeper


def drove(store: Store, pipeline: str) -> None:
    """A lease that was given back."""
    Lease.acquire(store, pipeline, ProcessIdentity.this_process()).release()


def make_spec(pipeline: str, sources: Sequence[str], lag: str = "1h") -> PipelineSpec:
    """A spec with a part of each kind."""
    schema = {"at": "timestamp", "value": "long"}
    source = {"schema": schema, "event_time": "at", "lag": lag}
    return PipelineSpec.model_validate(
        {
            "name": pipeline,
            "sources": {name: {**source, "path": f"inbox/{name}"} for name in sources},
            "windows": {
                "hourly": {"kind": "tumbling", "size": "1h", "aggregates": {"n": "count(*)"}}
            },
            "streams": {"big": {}, "sums": {"schema": {"total": "long"}}},
            "pipes": {"large": {"from": "events", "to": "big", "where": "value > 9"}},
            "reducers": {
                "add": {"from": "big", "to": "sums", "aggregates": {"total": "sum(value)"}}
            },
            "sinks": {"copy": {"kind": "files", "path": "out/", "tables": ["hourly", "sums"]}},
        }
    )


def keep_spec(history: History) -> None:
    """The spec that the epochs of a history name."""
    spec = make_spec(history.pipeline, history.sources)
    key = BucketLayout(history.pipeline).spec_key("s")
    history.store.put(key, spec.canonical_json().encode())


def gallery(store: Store, length: int = 90) -> History:
    """Streams in every state, and none yet of `tides`.

    The one that goes on, with so many epochs since its restore.
    """
    flights = History(store, "flights")
    old = flights.extend(3 * length, ago=120)
    flights.restore(old[2 * length])
    newest = flights.extend(length)
    drives(store, "flights")
    flights.wanted(DesiredState.RUN)
    waits = {"sealed": [1.4, 2.9, 4.2], "visible": [2.2, 4.8, 9.6]}
    flights.says("running", freshness=dict.fromkeys(AIRPORTS, waits), sinks={"copy": 3})
    RootsFile(store, "flights").pin(
        "before_fix", newest[length // 4].id, who="ann", why="known to be good"
    )
    submit_request(
        store,
        "flights",
        RequestKind.SAVEPOINT,
        who="uwe",
        why="before the release",
        name="release_7",
    )
    flights.checked("pass", newest[length // 2].id)

    taxis = History(store, "taxis", ("yellow", "green"))
    taxis.extend(30)
    drives(store, "taxis")
    taxis.wanted(DesiredState.RUN)
    taxis.says("waiting", why="31 epochs are sealed but not in the tables yet", unpublished=31)

    orders = History(store, "orders", ("web", "shop"))
    last = orders.extend(40, ago=900)[-1]
    orders.wanted(DesiredState.RUN)
    says = "few rows are late"
    orders.checked(
        "fail",
        last.id,
        [
            {
                "suite": "late",
                "id": "late_ratio",
                "severity": "critical",
                "says": says,
                "observed": 0.7,
            }
        ],
    )

    clicks = History(store, "clicks", ("eu", "us"))
    clicks.extend(40, ago=4000)
    drove(store, "clicks")
    clicks.wanted(DesiredState.STOPPED, "maintenance of the shop")
    meters = History(store, "meters", ("north", "south"))
    meters.extend(20, ago=60)
    drove(store, "meters")
    meters.wanted(DesiredState.RUN)
    error = {
        "message": "/specs/meters.yaml:12: sources.north.rules: row 17 of inbox/north/a.parquet",
        "advice": "mend the object, then start the stream again",
    }
    meters.says("failed", error=error)
    weather = History(store, "weather", ("buoys",))
    weather.extend(50, ago=30)
    drove(store, "weather")
    weather.wanted(DesiredState.RUN)
    weather.says("finished")
    for history in (flights, taxis, orders, clicks, meters, weather):
        keep_spec(history)
    return flights
