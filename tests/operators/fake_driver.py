"""A driver without Spark.

Takes the lease, seals an empty epoch at each beat, obeys requests and SIGTERM.

    python fake_driver.py SPEC.yaml --store URL [--recover-to ...]

`FAKE_DRIVER` in the store (`<pipeline>/fake.json`) tells it what to do wrong: {"mode": "run" |
"poison" | "transient" | "configuration" | "finish" | "stall"}. It is read at start and at each
beat, so a test can change its mind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from typing import Any

from tidegate.checkpoints.bucket_layout import BucketLayout, generate_attempt_id
from tidegate.checkpoints.driver_reports import DriverStatus, write_status
from tidegate.checkpoints.driver_requests import (
    Ack,
    AckOutcome,
    RequestKind,
    acknowledge_request,
    list_pending_requests,
)
from tidegate.checkpoints.lease import Lease, LeaseRenewer
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.open_store import open_store
from tidegate.checkpoints.pipeline_identity import ProcessIdentity, ensure_identity
from tidegate.checkpoints.slot_log import Sealed, SlotLog
from tidegate.checkpoints.store import NotFoundError, Store
from tidegate.errors import (
    ConfigurationError,
    FencedError,
    PoisonError,
    TidegateError,
    TransientError,
)
from tidegate.jobs.spec.loader import load_spec
from tidegate.jobs.spec.spec_masks import mask_secrets

BEAT = 0.5
ERRORS: dict[str, type[TidegateError]] = {
    "poison": PoisonError,
    "transient": TransientError,
    "configuration": ConfigurationError,
}


class FakeDriver:
    """One run of it."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self.store, self.pipeline = store, pipeline
        self.uid = ensure_identity(store, pipeline)
        self.lease = Lease.acquire(store, pipeline, ProcessIdentity.this_process(), uid=self.uid)
        self.keeper = LeaseRenewer(self.lease).start()
        self.log = SlotLog(store, pipeline)
        self.stop = threading.Event()
        self.facts: dict[str, Any] = {}
        self.step_since = time.time()

    def run(self) -> str:
        """Beat until something ends it; the last word."""
        self.say("running")
        while not self.stop.is_set():
            mode = self.mode()
            if mode in ERRORS:
                raise ERRORS[mode](
                    "the fake was told to fail", code=f"fake.{mode}", pipeline=self.pipeline
                )
            if mode == "finish":
                return "finished"
            if mode != "stall":
                self.beat()
            self.obey()
            if self.keeper.lost.is_set():
                raise FencedError("the lease is lost", code="lease.lost")
            self.stop.wait(BEAT)
        return "stopped"

    def mode(self) -> str:
        """What the test asks of it."""
        try:
            return str(json.loads(self.store.get(f"{self.pipeline}/fake.json").data)["mode"])
        except NotFoundError:
            return "run"

    def beat(self) -> None:
        """Seal one empty epoch."""
        self.keeper.announce_step("seal", 60.0)
        head = self.log.head()
        now = time.time_ns() // 1000
        frontier, slot = 1_357_000_000_000_000 + head.next_slot * 60_000_000, head.next_slot
        members = {
            "EWR": frontier + 9_000_000 * (slot % 7),
            "JFK": frontier,
            "LGA": frontier + 5_000_000 * (slot % 11),
        }
        per_source = {
            name: {"read": 10 * slot, "late": slot * part} for part, name in enumerate(members)
        }
        late = sum(source["late"] for source in per_source.values())
        counters = Counters(
            read=30 * slot, released=30 * slot - late, late=late, per_source=per_source
        )
        manifest = Manifest(
            timeline=head.timeline,
            slot=head.next_slot,
            pipeline=self.pipeline,
            uid=self.uid,
            spec_digest="fake",
            code_version="fake",
            parent=str(head.checkpoint) if head.checkpoint else None,
            parent_sha256=head.sha256,
            attempt=generate_attempt_id(),
            lease_token=self.lease.token,
            driver=self.lease.holder.driver,
            recorded_now=now,
            created_at=now,
            counters=counters,
            decider={
                "clock": now,
                "output": {
                    "inputs": {
                        name: {"frontier": at, "status": "active"} for name, at in members.items()
                    }
                },
            },
            decision={
                "frontier_after": frontier,
                "holder": {"member": "JFK/0", "why": "no data", "since": frontier},
            },
            barriers=[_barrier(slot, now)] if slot % 10 == 0 else [],
            timings={"survey": 0.1 + slot % 3 / 100, "move": 0.3 + slot % 5 / 10},
        )
        if isinstance(self.log.seal(manifest), Sealed):
            self.facts["checkpoint"] = str(manifest.id)
            self.facts["slot"], self.facts["timeline"], self.facts["sealed_at"] = (
                manifest.slot,
                manifest.timeline,
                now / 1e6,
            )
            self.step_since = time.time()
        self.say("running")

    def obey(self) -> None:
        """Stop and drain requests."""
        for request in list_pending_requests(self.store, self.pipeline):
            if (
                request.kind in (RequestKind.STOP, RequestKind.DRAIN)
                and request.refusal_outcome(self.lease.token, time.time_ns() // 1000) is None
            ):
                ack = Ack(
                    id=request.id,
                    outcome=AckOutcome.APPLIED,
                    token=self.lease.token,
                    at=time.time_ns() // 1000,
                )
                acknowledge_request(self.store, self.pipeline, ack)
                self.stop.set()

    def say(self, state: str, error: TidegateError | None = None) -> None:
        """Write the status."""
        self.facts |= {
            "state": state,
            "error": error.as_dict() if error else None,
            "step_since": self.step_since,
        }
        status = DriverStatus(
            token=self.lease.token,
            driver=self.lease.holder.driver,
            step="seal",
            at=time.time_ns() // 1000,
            body=self.facts,
        )
        write_status(self.store, self.pipeline, status)

    def close(self) -> None:
        """Give the lease back."""
        self.keeper.stop()
        self.lease.release()


def _barrier(slot: int, now: int) -> dict[str, Any]:
    missing = ["LGA/0"] if slot % 30 == 0 else []
    outcome = "incomplete" if missing else "complete"
    return {
        "id": slot // 10,
        "types": ["day_close"],
        "outcome": outcome,
        "missing": missing,
        "opened": now - 2_500_000,
        "closed": now,
    }


def main() -> int:
    """The process; its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--store", required=True)
    parser.add_argument("--recover-to", default="latest")
    chosen = parser.parse_args()
    store, spec = open_store(chosen.store), load_spec(chosen.spec)
    # As a driver does, so that the page finds the spec of the tables; by the digest of its epochs.
    key = BucketLayout(spec.name).spec_key("fake")
    store.put(key, mask_secrets(spec).canonical_json().encode())
    driver = FakeDriver(store, spec.name)
    signal.signal(signal.SIGTERM, lambda *_: driver.stop.set())
    sys.stdout.write("fake driver started\n")
    try:
        driver.say(driver.run())
    except TidegateError as error:
        driver.say("failed", error)
        sys.stderr.write(f"{error}\n")
        return error.failure_class.exit_code
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
