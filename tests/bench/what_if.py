"""How long `tidegate whatif` takes over a long history: ``make bench-whatif``.

Not a test: seals epochs of two sources with the real decider in memory, then decides all of them
again twice, as they were and with other options. Prints seconds, and the bytes of a survey.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from tests.engine.harness import SECOND, spec_of
from tests.servers.memory_store import MemoryStore
from tidegate.checkpoints.canonical_json import canonical_bytes
from tidegate.checkpoints.manifest import Counters, Manifest
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.engine.interfaces import Slice
from tidegate.jobs.engine.recorded_epochs import read_recorded_epochs
from tidegate.jobs.engine.what_if import WhatIfOptions, run_what_if
from tidegate.jobs.eventtime.decider import create_initial_state, decide
from tidegate.jobs.eventtime.decision_types import Member, MemberSurvey, Survey
from tidegate.jobs.spec.pipeline import PipelineSpec


def make_manifest(
    log: SlotLog, spec: PipelineSpec, slot: int, members: list[Member], state: dict[str, object]
) -> Manifest:
    """One epoch in which every member read rows, but the last one now and then."""
    start = slot * SECOND
    read = [m for n, m in enumerate(members) if n < len(members) - 1 or slot % 500 < 400]
    surveys = [
        MemberSurvey(m, 100, start - n * SECOND, start + 900_000) if m in read else MemberSurvey(m)
        for n, m in enumerate(members)
    ]
    survey = Survey(now=start, members=tuple(surveys), run_start=slot == 1)
    if slot > 1:
        survey = replace(survey, worked=SECOND)
    decision = decide(spec, state, survey)
    part = {"key": "inbox/x/0001.parquet", "etag": "0" * 32, "row_start": 0, "row_end": 100}
    head = log.head()
    return Manifest(
        pipeline="p",
        uid="u",
        spec_digest=spec.digest(),
        code_version="0",
        timeline=0,
        slot=slot,
        parent=str(head.checkpoint) if head.checkpoint else None,
        parent_sha256=head.sha256,
        attempt="0123456789ab",
        lease_token=1,
        driver="d",
        recorded_now=decision.wall,
        cut={str(m): Slice(m, slot, slot + 1, (part,)).to_record() for m in members},
        survey=survey.to_record(),
        decider=decision.after,
        decision=decision.to_record(),
        counters=Counters(),
        created_at=start,
    )


def measure_history(epochs: int) -> None:
    """Print the seconds of one what-if over so many epochs."""
    spec = spec_of()
    log = SlotLog(MemoryStore(), "p")
    members = [Member("a"), Member("b")]
    state = create_initial_state(spec)
    for slot in range(1, epochs + 1):
        manifest = make_manifest(log, spec, slot, members, state)
        log.seal(manifest)
        state = manifest.decider
    began, cpu = time.monotonic(), time.process_time()
    options = WhatIfOptions({"b": 20 * SECOND}, {"": 30 * SECOND})
    report = run_what_if("p", read_recorded_epochs(log, spec), options)
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    sys.stdout.write(
        f"{report.epochs:,} epochs decided twice in {seconds:.1f} s ({used:.1f} s of processor"
        f" time), {'reproduced' if report.is_exact else 'NOT reproduced'}\n"
    )


def measure_size(count: int) -> None:
    """Print the bytes of a survey beside those of its manifest."""
    spec = spec_of()
    log = SlotLog(MemoryStore(), "p")
    members = [Member("a", f"{n:05d}") for n in range(count)]
    manifest = make_manifest(log, spec, 1, members, create_initial_state(spec))
    survey, whole = len(canonical_bytes(manifest.survey)), len(manifest.to_bytes())
    began = time.process_time()
    manifest.to_bytes()
    encoding = 1000 * (time.process_time() - began)
    sys.stdout.write(
        f"{count:6,} members with rows: survey {survey:,} of {whole:,} bytes"
        f" ({survey / whole:.1%}, {survey / count:.0f} per member); encoding {encoding:.1f} ms\n"
    )


def main() -> None:
    """Print a line per measurement."""
    for count in (2, 1_000, 10_000):
        measure_size(count)
    measure_history(int(sys.argv[1]) if len(sys.argv) > 1 else 40_000)


if __name__ == "__main__":
    main()
