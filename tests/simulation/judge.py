"""What must hold after every schedule, once a fresh driver has recovered (semantics.md section 9)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tests.simulation.actors import Stage
from tests.simulation.basics import PIPELINE, Violation
from tests.simulation.cheap import parsed, record_of, rows_of
from tests.simulation.judge_rows import judge_epochs
from tests.simulation.judge_sinks import judge_sink
from tests.simulation.judge_streams import judge_streams
from tests.simulation.shapes import PLAIN
from tests.simulation.storage import MERGED, JudgeStore

from tidegate.checkpoints.bucket_layout import LAST_SLOT, BucketLayout
from tidegate.checkpoints.manifest import Manifest, RetiredEpoch
from tidegate.checkpoints.pins import RootsFile
from tidegate.checkpoints.slot_log import SlotLog
from tidegate.jobs.sinks.lineage_position import read_published_cut
from tidegate.jobs.spec.event_time_options import ReleaseMode
from tidegate.jobs.spec.pipeline import BUILT, CHECKPOINTS
from tidegate.jobs.spec.stream_specs import REJECTIONS

LAYOUT = BucketLayout(PIPELINE)


def judge(stage: Stage) -> None:
    """Look at everything once.

    Raises:
        Violation: what is wrong, in one line.
    """
    log = SlotLog(JudgeStore(stage.world.bucket), PIPELINE)
    head, lineage = log.head(), read_lineage(stage)
    if not stage.world.garbled:
        _chained(stage, log)
        _restorable(stage)
        _pinned(stage, log)
    condemned = stage.world.judge.protocol.damaged
    damaged = bool(stage.world.damaged or stage.world.lost or stage.world.garbled)
    _require(not condemned or damaged, f"{set(condemned)} were never damaged")
    _answered(stage)
    _conserved(lineage)
    _tables_follow(stage, lineage, (head.timeline, head.slot))
    _checkpoints_counted(stage, lineage)
    _barriers_are_cuts(stage, lineage)
    _readable(stage, log, (head.timeline, head.slot))
    judge_sink(stage, lineage, (head.timeline, head.slot))
    judge_epochs(stage, lineage)
    judge_streams(stage, lineage)
    _rows(stage, lineage)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


def read_lineage(stage: Stage) -> list[Manifest]:
    """The epochs of the current lineage as they were sealed, retired or not."""
    log = SlotLog(JudgeStore(stage.world.bucket), PIPELINE)
    head, found = log.head(), []
    lineage = log.lineage(head.timeline)
    for slot in range(1, head.slot + 1):
        home = next(s.timeline for s in lineage if s.contains(slot))
        data = stage.world.bucket.bytes.get(LAYOUT.slot_key(home, slot))
        _require(data is not None, f"slot {slot} of timeline {home} is empty")
        record = record_of(data or b"")
        _require(isinstance(record, Manifest), f"slot {slot} of timeline {home} holds no epoch")
        found.append(record)
    return found  # type: ignore[return-value]


def _chained(stage: Stage, log: SlotLog) -> None:
    """Per timeline: no gaps, one fork and it is the last, each record names the hash before it."""
    forks = log.list_forks()
    for timeline in range(len(forks) + 1):
        slots = sorted(
            LAST_SLOT - int(key[-15:-5])
            for key in stage.world.bucket.objects
            if key.startswith(LAYOUT.slots_prefix(timeline))
        )
        if not slots:
            continue
        first = 1 if timeline == 0 else forks[timeline - 1].fork_slot + 1
        _require(
            slots == list(range(first, first + len(slots))),
            f"timeline {timeline} has the slots {slots}",
        )
        filled = [log.read_slot(timeline, slot) for slot in slots]
        kinds = [f.record.kind == "fork" for f in filled if f]
        _require(
            not any(kinds[:-1]) and kinds[-1] is (timeline < len(forks)),
            f"timeline {timeline}: forks at {kinds}",
        )
        for before, after in pairwise(filled):
            if before and after:
                _require(
                    after.record.parent_sha256 == before.sha256,
                    f"the chain of timeline {timeline} is broken at {after.key}",
                )


def _restorable(stage: Stage) -> None:
    """Every completed checkpoint that was not retired has all its files, byte for byte in size."""
    objects = stage.world.bucket.objects
    for key, record in stage.world.bucket.records.items():
        _require(key in objects, f"{key} is gone")
        now = parsed(objects[key])
        if now["kind"] != "epoch" or key in stage.world.damaged:
            continue
        for file in [*record["segments"], *(f for fs in record["files"].values() for f in fs)]:
            data = objects.get(file["key"])
            if file["key"] in stage.world.lost:
                continue
            _require(
                data is not None and len(data) == file["bytes"],
                f"{key} cannot be restored: {file['key']} is damaged or gone",
            )


def _pinned(stage: Stage, log: SlotLog) -> None:
    roots = RootsFile(log.store, PIPELINE).read()
    for ack in (
        parsed(data)
        for key, data in stage.world.bucket.objects.items()
        if key.startswith(LAYOUT.acks_prefix)
    ):
        request = stage.world.bucket.objects.get(LAYOUT.request_key(str(ack["id"])))
        # A driver deletes an answered request after an hour, before its acknowledgement.
        asked = parsed(request) if request is not None else {}
        if ack["outcome"] == "applied" and asked.get("kind") == "savepoint":
            pin = roots.pins.get(asked["name"])
            _require(
                pin is not None and pin.checkpoint == ack["checkpoint"],
                f"savepoint {ack} is pinned as {pin}",
            )
    for name, pin in roots.pins.items():
        key = next(
            (
                k
                for k, r in stage.world.bucket.records.items()
                if r.get("attempt") == pin.checkpoint.rpartition("-")[2]
            ),
            None,
        )
        _require(key is not None, f"pin {name} names nothing")
        record = record_of(stage.world.bucket.objects[key or ""])
        _require(not isinstance(record, RetiredEpoch), f"pin {name}: {pin.checkpoint} was retired")


def _answered(stage: Stage) -> None:
    """Every request has an answer: drivers have run since the last one came."""
    objects = stage.world.bucket.objects
    for key in objects:
        if key.startswith(LAYOUT.requests_prefix):
            name = key.removeprefix(LAYOUT.requests_prefix).removesuffix(".json")
            _require(f"{LAYOUT.acks_prefix}{name}.json" in objects, f"{key} was never answered")


def _conserved(lineage: list[Manifest]) -> None:
    for epoch in lineage:
        _require(epoch.counters.is_conserved(), f"epoch {epoch.id} does not conserve")


def _checkpoints_counted(stage: Stage, lineage: list[Manifest]) -> None:
    """The table `checkpoints` counts what the log does."""
    wanted = {
        (e.timeline, e.slot): (
            e.epoch_counters.read,
            e.epoch_counters.released,
            e.counters.retained,
        )
        for e in lineage
    }
    main = stage.catalog.tables[CHECKPOINTS].main if lineage else None
    for file in main.files if main else ():
        for row in rows_of(stage.world.bucket.written[file]):
            counts = tuple(row[name] for name in ("rows_read", "rows_released", "rows_retained"))
            where = row["_timeline"], row["_epoch"]
            _require(wanted[where] == counts, f"checkpoints counts {counts} in {where}: {wanted}")


def _tables_follow(stage: Stage, lineage: list[Manifest], head: tuple[int, int]) -> None:
    """Every table names the files of the lineage, each once, and no other."""
    for table in stage.spec.table_names:
        metadata = stage.catalog.tables.get(table)
        if table == CHECKPOINTS:
            wanted = [f"{LAYOUT.table_prefix(table, e.id)}publisher.parquet" for e in lineage]
        else:
            wanted = [f.key for e in lineage for f in e.files.get(table, []) if f.rows]
        has = [*metadata.main.files] if metadata and metadata.main else []
        same = (
            _contents(stage, has) == _contents(stage, wanted)
            if any(map(_is_merged, has))
            else Counter(has) == Counter(wanted)
        )
        _require(same, f"{table} holds {_short(has)}, the log says {_short(wanted)}")
        gone = [key for key in has if not _is_kept(stage, key)]
        _require(not gone, f"{table} names {gone[:1]}, which is gone")
    if lineage:
        mark = stage.catalog.tables[CHECKPOINTS].main
        _require(
            mark is not None and (mark.mark.timeline, mark.mark.upto) == head,
            f"checkpoints stands at {mark and mark.mark}",
        )


def _barriers_are_cuts(stage: Stage, lineage: list[Manifest]) -> None:
    """Every table holds under a barrier's tag the rows up to the slot that completed it."""
    cuts = {
        f"barrier-{barrier['id']}": epoch.slot
        for epoch in lineage
        for barrier in epoch.barriers
        if barrier["outcome"] == "complete" and stage.spec.barriers.alignment == "block"
    }
    made_later = (*stage.spec.windows, *stage.spec.streams, REJECTIONS, BUILT)
    for table, metadata in stage.catalog.tables.items():
        tags = {n: s for n, s in metadata.tags.items() if n.startswith("barrier-")}
        _require(tags.keys() <= cuts.keys(), f"{table} has {sorted(tags)}, not {sorted(cuts)}")
        for name, slot in cuts.items():
            wanted = [f.key for e in lineage for f in e.files.get(table, []) if e.slot <= slot]
            if name not in tags:
                # A table that is made later had no row at the barrier.
                _require(
                    not wanted and table in made_later,
                    f"{table} has no {name} at slot {slot}",
                )
                continue
            mark, has = tags[name].mark, [*tags[name].files]
            _require(mark.upto == slot, f"{table}: {name} is at {mark}, and completed in {slot}")
            _require(
                table == CHECKPOINTS or _contents(stage, has) == _contents(stage, wanted),
                f"{table}: {name} holds {_short(has)}, not {_short(wanted)}",
            )


def _is_kept(stage: Stage, key: str) -> bool:
    """Whether no process has deleted it; a damaged file may be gone."""
    return key in stage.world.bucket.objects or key in stage.world.lost


def _is_merged(key: str) -> bool:
    return MERGED in key


def _contents(stage: Stage, keys: list[str]) -> Counter[str]:
    """The rows of files, also of those that a merged file has replaced."""
    return Counter(
        repr(sorted(row.items()))
        for key in keys
        for row in rows_of(stage.world.bucket.written[key])
    )


def _readable(stage: Stage, log: SlotLog, head: tuple[int, int]) -> None:
    """Readers are pointed to the head, and what they are pointed to is there."""
    current = read_published_cut(log.store, PIPELINE)
    seen = (current.timeline, current.upto) if current else (head[0], 0)
    _require(seen == head, f"readers are pointed to {seen}, and the head is {head}")
    for table, location in (current.tables if current else {}).items():
        main = stage.catalog.versions[location].main
        gone = [key for key in (main.files if main else ()) if not _is_kept(stage, key)]
        _require(not gone, f"readers of {table} are pointed to {gone[:1]}, which is gone")


def _short(keys: list[str]) -> list[str]:
    return [key.split("/timelines/")[-1] for key in keys]


def _rows(stage: Stage, lineage: list[Manifest]) -> None:
    """Exactly once, in order, positions without a gap, windows equal to a recomputation."""
    events, late = _table(stage, lineage, "events"), _table(stage, lineage, "late")
    # A row that is late and flagged is in the events table as well.
    late_events = [r for r in late if r["output"] == "events" and r["reason"] != "flagged"]
    places = Counter((r["_source"], r["_partition"], r["_seq"]) for r in [*events, *late_events])
    data = {
        (*member, n): raw
        for source in stage.sources.values()
        for member, n, raw in source.list_placed()
        if raw["kind"] == "data"
    }
    lost, doubled = (
        sorted(data.keys() - places.keys()),
        [k for k, n in places.items() if n > 1 or k not in data],
    )
    _require(not lost and not doubled, f"rows lost: {lost[:3]}, doubled or invented: {doubled[:3]}")
    _require(
        [r["position"] for r in events] == list(range(len(events))), "positions are not contiguous"
    )
    marks = [(r["section"], r["t"]) for r in events if not r["_late"]]
    ordered = stage.spec.release.mode is not ReleaseMode.PASS_THROUGH
    _require(not ordered or marks == sorted(marks), "released rows are out of order")
    if stage.shape == PLAIN:
        _windows(stage, lineage, late, data)


def _windows(
    stage: Stage,
    lineage: list[Manifest],
    late: list[dict[str, Any]],
    data: dict[Any, dict[str, Any]],
) -> None:
    refused = {(r["_source"], r["_partition"], r["_seq"]) for r in late if r["output"] == "w"}
    wanted: dict[int, list[int]] = defaultdict(list)
    for place, raw in data.items():
        if place not in refused:
            wanted[raw["t"] // 10_000_000].append(raw["v"])
    newest: dict[int, dict[str, Any]] = {}
    revisions = Counter[tuple[int, int]]()
    for r in _table(stage, lineage, "w"):
        start = r["window_start"] // 10_000_000
        revisions[start, r["revision"]] += 1
        if start not in newest or newest[start]["revision"] < r["revision"]:
            newest[start] = r
    _require(all(n == 1 for n in revisions.values()), "a revision was emitted twice")
    has = {start: (r["n"], r["s"]) for start, r in newest.items()}
    _require(
        has == {k: (len(v), sum(v)) for k, v in wanted.items()},
        f"windows {has} differ from the recomputation {dict(wanted)}",
    )


def _table(stage: Stage, lineage: Iterable[Manifest], table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for epoch in lineage:
        for file in epoch.files.get(table, []):
            found += rows_of(stage.world.bucket.written[file.key])
    return found
